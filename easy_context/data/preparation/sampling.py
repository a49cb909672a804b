"""Choose documents: validation documents, and how often each training document is used."""

import numpy as np


def choose_validation(lengths: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Choose whole documents of one source for validation.

    Documents are taken in random order while they fit into `fraction` of the source's tokens; where none fits, the
    shortest is taken. A source of one document gives none, because nothing would be left to train on.

    Args:
        lengths: int64 `[documents]`, tokens.
        fraction: share of the tokens wanted, 0 to below 1.
        rng: decides the order.

    Returns:
        bool `[documents]`.
    """
    chosen = np.zeros(len(lengths), bool)
    if fraction <= 0 or len(lengths) < 2:
        return chosen
    room = fraction * lengths.sum()
    for document in rng.permutation(len(lengths)):
        if lengths[document] <= room:
            chosen[document] = True
            room -= lengths[document]
    if not chosen.any():
        chosen[np.argmin(lengths)] = True
    return chosen


def upsample_long_documents(
    lengths: np.ndarray, long_from: int, factor: float, rng: np.random.Generator, number: int = 0
) -> np.ndarray:
    """Decide how often each document of one source is used in pass `number`, so that long ones make up a larger share.

    Long documents weigh `factor` times as much against short ones, while the source keeps its number of tokens, hence
    the sources keep their mix: "per-source length upsampling" of https://arxiv.org/abs/2402.10171. Long documents
    then appear more than once and some short ones not at all.

    The expected uses of every document, and so the expected tokens of the source, are exact in each pass. In one pass
    the tokens miss that by at most two long and two short documents, and so they do in all passes together.

    Args:
        lengths: int64 `[documents]`, tokens.
        long_from: documents of at least so many tokens are long.
        factor: 1 leaves every document once.
        rng: must be in the same state at each pass, because a pass goes on where the one before it stopped.
        number: of the pass, from 0.

    Returns:
        int64 `[documents]`, uses of each document.
    """
    long = lengths >= long_from
    long_tokens, short_tokens = int(lengths[long].sum()), int(lengths[~long].sum())
    uses = np.ones(len(lengths), np.int64)
    if factor == 1 or not long_tokens or not short_tokens:
        return uses
    short_rate = (long_tokens + short_tokens) / (factor * long_tokens + short_tokens)
    for group, rate in ((long, factor * short_rate), (~long, short_rate)):
        uses[group] = _uses_in_pass(lengths[group], rate, rng, number)
    return uses


def _uses_in_pass(lengths: np.ndarray, rate: float, rng: np.random.Generator, number: int) -> np.ndarray:
    """Return how often each document is met in one pass that takes `rate` of all tokens.

    Place the documents in random order around a circle, each taking an arc proportional to its length. From a random
    start every pass walks on by `rate` of a turn, and uses a document whenever it crosses one random point of its arc.
    So a document is used `rate` times in expectation (systematic sampling), and over all passes no document is used two
    times more than another.
    """
    order = rng.permutation(len(lengths))
    points = np.empty(len(lengths))
    points[order] = np.cumsum(lengths[order]) - rng.random(len(lengths)) * lengths[order]
    points = points / lengths.sum() - rng.random()
    return (np.floor((number + 1) * rate - points) - np.floor(number * rate - points)).astype(np.int64)

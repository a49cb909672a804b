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


def upsample_long_documents(lengths: np.ndarray, long_from: int, factor: float, rng: np.random.Generator) -> np.ndarray:
    """Decide how often each document of one source is used in a pass, so that long ones make up a larger share.

    Long documents weigh `factor` times as much against short ones, while the source keeps its number of tokens, hence
    the sources keep their mix: "per-source length upsampling" of https://arxiv.org/abs/2402.10171. Long documents
    then appear more than once and some short ones not at all; which ones, changes from pass to pass with `rng`.

    Args:
        lengths: int64 `[documents]`, tokens.
        long_from: documents of at least so many tokens are long.
        factor: 1 leaves every document once.
        rng: chooses the documents of the fractional part.

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
        documents = rng.permutation(np.flatnonzero(group))
        uses[documents] = int(rate)
        wanted = (rate - int(rate)) * lengths[documents].sum()
        before = np.cumsum(lengths[documents]) - lengths[documents]
        # A document joins when at least half of it fits, which keeps the expected number of tokens.
        uses[documents[before + lengths[documents] / 2 <= wanted]] += 1
    return uses

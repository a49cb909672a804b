"""Assign documents to training or validation, and plan the rows that hold them."""

from dataclasses import dataclass

import numpy as np

from .corpus import Corpus
from .packing import Segment, pack
from .sampling import choose_validation, upsample_long_documents
from .settings import Settings

VALIDATION, UPSAMPLING, PACKING, VALIDATION_PACKING, RETRIEVAL = range(5)  # purposes of random generators
MOST_PASSES = 1000


@dataclass
class SplitRows:
    """Rows of one split, and what was done to its documents.

    Attributes:
        rows: segments of each row.
        source_tokens: int64 `[sources]`, tokens of the documents.
        drawn_tokens: int64 `[sources]`, tokens drawn in all passes; some fill no row or follow the last row wanted.
        passes: number of passes over the documents, the last perhaps in part.
    """

    rows: list[list[Segment]]
    source_tokens: np.ndarray
    drawn_tokens: np.ndarray
    passes: int = 1


def plan_validation_documents(corpora: list[Corpus], settings: Settings) -> list[np.ndarray]:
    """Return for each source a bool `[documents]`, True where a document is held out.

    The choice depends on the seed and the documents only, so that it is the same at every row length.
    """
    return [
        choose_validation(corpus.lengths, settings.validation_fraction, settings.random_generator(VALIDATION, number))
        for number, corpus in enumerate(corpora)
    ]


def _whole_documents(source: int, lengths: np.ndarray, uses: np.ndarray) -> list[Segment]:
    documents = np.repeat(np.arange(len(lengths)), uses).tolist()
    return [Segment(source, document, 0, int(lengths[document])) for document in documents]


def _tokens(corpora: list[Corpus], uses: list[np.ndarray]) -> np.ndarray:
    """Return int64 `[sources]`, the tokens of all documents, each counted as many times as in `uses`."""
    return np.array([(corpus.lengths * use).sum() for corpus, use in zip(corpora, uses, strict=True)], np.int64)


def _bad_records(corpora: list[Corpus]) -> str:
    bad_records = [record for corpus in corpora for record in corpus.bad_records]
    if not bad_records:
        return ""
    are = "record is" if len(bad_records) == 1 else "records are"
    return f"; {len(bad_records)} {are} bad, the first at " + "{location}: {problem}".format(**bad_records[0])


def plan_train(corpora: list[Corpus], held_out: list[np.ndarray], settings: Settings) -> SplitRows:
    """Plan the train rows, in one pass or in as many as `train_tokens` needs.

    Raises:
        ValueError: the documents do not fill one row, or `train_tokens` needs over `MOST_PASSES` passes.
    """
    source_tokens = _tokens(corpora, [~held for held in held_out])
    tokens = int(source_tokens.sum())
    if not tokens and (bad_records := _bad_records(corpora)):
        raise ValueError(f"--input: no record can be used{bad_records}")
    if settings.train_tokens is not None and settings.train_tokens > MOST_PASSES * tokens > 0:
        raise ValueError(
            f"--train-tokens {settings.train_tokens}: the documents for training hold {tokens} tokens and would be "
            f"repeated over {MOST_PASSES} times; ask for fewer or add text"
        )
    rows_wanted = None if settings.train_tokens is None else -(-settings.train_tokens // settings.seq_length)
    plan = SplitRows([], source_tokens, np.zeros_like(source_tokens), passes=0)
    while not plan.passes or (rows_wanted is not None and len(plan.rows) < rows_wanted):
        documents, all_uses = [], []
        for number, corpus in enumerate(corpora):
            rng = settings.random_generator(UPSAMPLING, settings.seq_length, number)
            train = ~held_out[number]
            uses = np.zeros(len(corpus.lengths), np.int64)
            uses[train] = upsample_long_documents(
                corpus.lengths[train], settings.long_from, settings.upsample_long, rng, plan.passes
            )
            all_uses.append(uses)
            documents += _whole_documents(number, corpus.lengths, uses)
        rng = settings.random_generator(PACKING, settings.seq_length, plan.passes)
        packed = pack(documents, settings.seq_length, rng, shift_cuts=plan.passes > 0)
        plan.drawn_tokens += _tokens(corpora, all_uses)
        plan.passes += 1
        plan.rows += packed.rows
        if not plan.rows:
            raise ValueError(
                f"--seq-length {settings.seq_length}: the {len(documents)} documents for training hold "
                f"{plan.drawn_tokens.sum()} tokens, fewer than one row; shorten the rows or add text"
                + _bad_records(corpora)
            )
    plan.rows = plan.rows[:rows_wanted]
    return plan


def plan_validation(
    corpora: list[Corpus], held_out: list[np.ndarray], extra: list[Corpus], settings: Settings
) -> SplitRows:
    """Plan the validation rows from the held-out documents and all documents of the validation inputs.

    The remaining tokens become a shorter last row, so that no held-out text is lost.
    """
    uses = [mask.astype(np.int64) for mask in held_out] + [np.ones(len(corpus.lengths), np.int64) for corpus in extra]
    documents = [
        segment
        for number, corpus in enumerate([*corpora, *extra])
        for segment in _whole_documents(number, corpus.lengths, uses[number])
    ]
    packed = pack(documents, settings.seq_length, settings.random_generator(VALIDATION_PACKING))
    tokens = _tokens([*corpora, *extra], uses)
    return SplitRows(packed.rows + ([packed.rest] if packed.rest else []), tokens, tokens)

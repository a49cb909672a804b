"""Count what stands in the rows of each document: the report says what was written, not what was meant to be."""

from dataclasses import dataclass

import numpy as np

from .packing import Segment
from .token_store import TokenStore


@dataclass(frozen=True)
class Uses:
    """Of one source's documents in some rows.

    Attributes:
        times: int64 `[documents]`, how often the token stands there that stands there most often; 0 for a document that
            is in no row, 1 for one of which some rows hold a part once.
        tokens: int64 `[documents]`, tokens in the rows, counted as often as they stand there.
    """

    times: np.ndarray
    tokens: np.ndarray


def count_uses(rows: list[list[Segment]], stores: list[TokenStore]) -> list[Uses]:
    """Return the uses of every source's documents.

    Args:
        rows: segments of each row.
        stores: token stores, by source number.
    """
    numbers = (number for row in rows for x in row for number in (x.source, x.document, x.start, x.end))
    segments = np.fromiter(numbers, np.int64).reshape(-1, 4)
    return [_uses_of(segments[segments[:, 0] == source, 1:], len(store.lengths)) for source, store in enumerate(stores)]


def _uses_of(segments: np.ndarray, documents: int) -> Uses:
    """Segments: int64 `[segments, 3]`, document, start and end."""
    document, start, end = segments.T
    tokens = np.zeros(documents, np.int64)
    np.add.at(tokens, document, end - start)
    # Walk over all documents: a segment begins (+1) or ends (-1, first at the same place).
    document, place = np.tile(document, 2), np.concatenate([start, end])
    change = np.repeat([1, -1], len(segments))
    order = np.lexsort((change, place, document))
    times = np.zeros(documents, np.int64)
    np.maximum.at(times, document[order], np.cumsum(change[order]))
    return Uses(times, tokens)


def first_tokens(segments: list[Segment], count: int) -> list[Segment]:
    """Return the segments of the first `count` tokens of a row."""
    kept = []
    for segment in segments:
        if count <= 0:
            break
        end = min(segment.end, segment.start + count)
        kept.append(Segment(segment.source, segment.document, segment.start, end))
        count -= len(segment)
    return kept

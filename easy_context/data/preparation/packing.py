"""Pack documents into rows of exactly `seq_length` tokens, cutting as few documents as possible."""

import bisect
import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Segment:
    """Tokens `start:end` of a document of a source."""

    source: int
    document: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass
class PackedRows:
    """Rows of segments, each row of exactly `seq_length` tokens; `rest` holds the tokens that fill no row."""

    rows: list[list[Segment]]
    rest: list[Segment]


def pack(documents: list[Segment], seq_length: int, rng: np.random.Generator, shift_cuts: bool = False) -> PackedRows:
    """Pack documents into full rows.

    Documents longer than a row give as many full rows as they hold; what is left over counts as a document. Then,
    longest first, each document goes whole into the fullest row that has room (best-fit decreasing), or opens a new
    row if what remains can still fill every gap. The documents left (short ones, as a rule) are poured one after
    the other into the gaps and into further rows, and only these are cut, at row ends.

    Args:
        documents: segments that cover whole documents, the separator included.
        seq_length: number of tokens in a row.
        rng: random generator for the order of documents of equal length, the order within a row, and the order of rows.
        shift_cuts: whether the full rows of a long document begin at a random offset instead of at its start, so that
            another pass over the documents gives different rows.

    Returns:
        Every token of `documents` once, in `rows` or (fewer than `seq_length`) in `rest`.
    """
    rows, pieces = _cut_into_rows(documents, seq_length, rng if shift_cuts else None)
    order = rng.permutation(len(pieces))
    pieces = sorted((pieces[index] for index in order), key=len, reverse=True)
    open_rows, filler = _place_whole(pieces, seq_length)
    open_rows = [[row[index] for index in rng.permutation(len(row))] for row in open_rows]
    poured, rest = _pour([filler[index] for index in rng.permutation(len(filler))], open_rows, seq_length)
    rows += poured
    return PackedRows([rows[index] for index in rng.permutation(len(rows))], rest)


def _cut_into_rows(
    documents: list[Segment], seq_length: int, shift_rng: np.random.Generator | None
) -> tuple[list[list[Segment]], list[Segment]]:
    """Return the full rows that long documents give, and the pieces of documents that are left."""
    rows, pieces = [], []
    for document in documents:
        start = document.start
        if shift_rng is not None and len(document) > seq_length:
            start += int(shift_rng.integers(len(document) % seq_length + 1))  # costs no full row
            if start > document.start:
                pieces.append(Segment(document.source, document.document, document.start, start))
        while document.end - start >= seq_length:
            rows.append([Segment(document.source, document.document, start, start + seq_length)])
            start += seq_length
        if start < document.end:
            pieces.append(Segment(document.source, document.document, start, document.end))
    return rows, pieces


def _place_whole(pieces: list[Segment], seq_length: int) -> tuple[list[list[Segment]], list[Segment]]:
    """Return rows of whole pieces and the filler that is left, by best-fit decreasing.

    A row is opened only while the remaining pieces and the filler can still fill all gaps.
    """
    rows: list[list[Segment]] = []
    gaps: list[tuple[int, int]] = []  # (room, row) of every row with room, sorted
    room_left, unplaced = 0, sum(map(len, pieces))
    filler = []
    for piece in pieces:
        best = bisect.bisect_left(gaps, (len(piece), -1))
        if best < len(gaps):
            room, row = gaps.pop(best)
            rows[row].append(piece)
        elif room_left + seq_length - len(piece) <= unplaced - len(piece):
            room, row = seq_length, len(rows)
            rows.append([piece])
            room_left += seq_length
        else:
            filler.append(piece)
            continue
        room_left -= len(piece)
        unplaced -= len(piece)
        if room > len(piece):
            bisect.insort(gaps, (room - len(piece), row))
    return rows, filler


def _pour(
    filler: list[Segment], open_rows: list[list[Segment]], seq_length: int
) -> tuple[list[list[Segment]], list[Segment]]:
    """Return the open rows and further ones, filled with `filler` in order, and an incomplete last row."""
    rows = list(open_rows)
    targets = iter(open_rows)
    row = next(targets, None)
    room = 0 if row is None else seq_length - sum(map(len, row))
    for piece in filler:
        start = piece.start
        while start < piece.end:
            while row is None or not room:
                row = next(targets, None)
                if row is None:
                    row = []
                    rows.append(row)
                room = seq_length - sum(map(len, row))
            end = min(piece.end, start + room)
            row.append(Segment(piece.source, piece.document, start, end))
            room -= end - start
            start = end
    rest = rows.pop() if row and room and rows and rows[-1] is row else []
    return rows, rest


def first_tokens(segments: list[Segment], count: int | None) -> list[Segment]:
    """Return the segments of the first `count` tokens of a row, all if None."""
    if count is None:
        return segments
    kept = []
    for segment in segments:
        if count <= 0:
            break
        end = min(segment.end, segment.start + count)
        kept.append(Segment(segment.source, segment.document, segment.start, end))
        count -= len(segment)
    return kept


def count_tokens(rows: list[list[Segment]], documents: list[int]) -> list[np.ndarray]:
    """Return for each source int64 `[documents]`, the tokens of each document in the rows, repetitions included.

    Args:
        rows: segments of each row.
        documents: number of documents of each source.
    """
    tokens = [np.zeros(number, np.int64) for number in documents]
    for segment in itertools.chain(*rows):
        tokens[segment.source][segment.document] += len(segment)
    return tokens

"""Packing: every row is full, every token is used once, long documents stay whole."""

import numpy as np
import pytest

from easy_context.data.preparation.packing import Segment, count_tokens, first_tokens, pack


def check_packed(packed, lengths, seq_length):
    """Every row full, every token of every document once."""
    assert all(sum(map(len, row)) == seq_length for row in packed.rows)
    assert sum(map(len, packed.rest)) < seq_length
    seen = [np.zeros(length, int) for length in lengths]
    for row in [*packed.rows, packed.rest]:
        for segment in row:
            seen[segment.document][segment.start : segment.end] += 1
    assert all((part == 1).all() for part in seen)


@pytest.mark.parametrize("seed", range(40))
def test_packing_uses_every_token_once(seed):
    rng = np.random.default_rng(seed)
    seq_length = int(rng.integers(1, 200))
    lengths = rng.integers(1, int(rng.integers(2, 500)), int(rng.integers(1, 80))).tolist()
    documents = [Segment(0, i, 0, length) for i, length in enumerate(lengths)]
    for shift in (False, True):
        packed = pack(documents, seq_length, rng, shift_cuts=shift)
        check_packed(packed, lengths, seq_length)
        assert len(packed.rows) == sum(lengths) // seq_length


def test_long_documents_stay_whole():
    """Documents of 60 to 90 % of a row with short ones to fill up: only short ones are cut."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(600, 900, 50).tolist(), *rng.integers(5, 60, 800).tolist()]
    packed = pack([Segment(0, i, 0, length) for i, length in enumerate(lengths)], 1000, rng)
    check_packed(packed, lengths, 1000)
    whole = {s.document for row in packed.rows for s in row if s.start == 0 and s.end == lengths[s.document]}
    assert set(range(50)) <= whole
    assert len(lengths) - len(whole) < 60


def test_packing_is_reproducible():
    documents = [Segment(0, i, 0, 5 + i % 17) for i in range(100)]
    first, second = (pack(documents, 64, np.random.default_rng(3)) for _ in range(2))
    assert first.rows == second.rows
    assert pack(documents, 64, np.random.default_rng(4)).rows != first.rows


def test_tokens_of_documents_are_counted_as_often_as_they_occur():
    rows = [[Segment(0, 1, 0, 5), Segment(1, 0, 2, 4)], [Segment(0, 1, 3, 5), Segment(0, 0, 0, 1)]]
    assert [tokens.tolist() for tokens in count_tokens(rows, [3, 1])] == [[1, 7, 0], [2]]
    assert [tokens.tolist() for tokens in count_tokens([], [2])] == [[0, 0]]


@pytest.mark.parametrize(
    ("count", "kept"), [(0, []), (3, [(0, 3)]), (5, [(0, 5)]), (6, [(0, 5), (2, 3)]), (9, [(0, 5), (2, 6)])]
)
def test_first_tokens_of_a_row(count, kept):
    row = [Segment(0, 0, 0, 5), Segment(1, 0, 2, 6)]
    assert [(segment.start, segment.end) for segment in first_tokens(row, count)] == kept

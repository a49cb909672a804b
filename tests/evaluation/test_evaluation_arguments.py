"""Flags that both evaluations share."""

import pytest

from easy_context.evaluation.arguments import context_lengths


def test_grids_of_lengths():
    flags = ("--min", "--max", "--step")
    assert context_lengths(256, 2048, 0, flags) == [256, 512, 1024, 2048]
    assert context_lengths(100, 500, 0, flags) == [100, 200, 400, 500]
    assert context_lengths(100, 350, 100, flags) == [100, 200, 300, 350]
    assert context_lengths(64, 64, 0, flags) == [64]
    with pytest.raises(ValueError, match="--min 10 and --max 5"):
        context_lengths(10, 5, 0, flags)
    with pytest.raises(ValueError, match="--step 1: from 2 to 200000 tokens that is 199,999 lengths"):
        context_lengths(2, 200_000, 1, flags)

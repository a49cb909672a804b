"""Batches: what is cut and padded, and who gets which row of which step."""

import itertools
from argparse import Namespace

import datasets
import pytest
import torch

from easy_context.data.token_rows import TokenRow, TokenRows
from easy_context.loss import IGNORE_INDEX
from easy_context.mesh import Mesh
from easy_context.training.batches import RowStream, collate, describe_lengths, evaluation_batches, training_steps

ROWS = [[row, row, row + 1] for row in range(1, 12)]  # each names itself by its first token
VOCABULARY = 32


@pytest.fixture
def table():
    return datasets.Dataset.from_dict({"input_ids": ROWS, "attention_mask": [[1, 1, 1]] * 11, "source": ["x"] * 11})


@pytest.fixture
def rows(table, tmp_path):
    table.save_to_disk(tmp_path / "rows")
    return TokenRows(str(tmp_path / "rows"), "--dataset", VOCABULARY, seq_length=3)


def options(batch_size=1, accumulate=1, seed=7, seq_length=3):
    return Namespace(batch_size=batch_size, gradient_accumulate_every=accumulate, seed=seed, seq_length=seq_length)


def test_labels_are_kept(tmp_path):
    labels = [[IGNORE_INDEX, 5, 6]]
    datasets.Dataset.from_dict({"input_ids": [[4, 5, 6]], "labels": labels}).to_parquet(tmp_path / "r.parquet")
    rows = TokenRows(str(tmp_path / "r.parquet"), "--dataset", VOCABULARY, seq_length=8)
    batch = collate([rows[0]], 8)
    assert batch["targets"].tolist() == [[5, 6, IGNORE_INDEX]]  # the next token's


def test_unequal_rows_are_cut_and_padded():
    batch = collate([TokenRow(torch.arange(1, n + 1), torch.arange(1, n + 1)) for n in (2, 9, 4)], 5)
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0, 0], [1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]
    assert batch["targets"].tolist() == [
        [2, *[IGNORE_INDEX] * 4],
        [2, 3, 4, 5, IGNORE_INDEX],
        [2, 3, 4, *[IGNORE_INDEX] * 2],
    ]


def test_an_empty_row_has_no_targets():
    batch = collate([TokenRow(*[torch.tensor([], dtype=torch.int64)] * 2)], 5)
    assert batch["targets"].tolist() == [[IGNORE_INDEX]]


def test_documents_are_cut_with_their_row_and_padding_is_one_of_its_own():
    lengths_and_starts = [(2, [0, 1]), (9, [0, 4, 5, 7]), (5, [0]), (0, [])]
    rows = [TokenRow(torch.ones(n, dtype=torch.int64), torch.ones(n), starts) for n, starts in lengths_and_starts]
    assert collate(rows, 5)["documents"] == [[0, 1, 2], [0, 4], [0], [0]]
    assert "documents" not in collate([row._replace(documents=None) for row in rows], 5)


def test_lengths_are_described_only_where_rows_are_cut_or_padded(rows, tmp_path):
    assert describe_lengths(rows, 3) is None
    assert "11 are longer than --seq-length 2 and are cut, 0 are" in describe_lengths(rows, 2)
    shorter = describe_lengths(rows, 4)
    assert "0 are longer than --seq-length 4 and are cut, 11 are shorter" in shorter
    assert "The longest has 3 tokens, but the saved model's window is --seq-length" in shorter


def test_each_epoch_has_every_row_once_in_its_own_seeded_order(rows):
    epochs = [[int(RowStream(rows, 7)[11 * epoch + i][0][0]) for i in range(11)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(1, 12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [int(RowStream(rows, 7)[i][0][0]) for i in range(11)] == epochs[0]
    assert [int(RowStream(rows, 8)[i][0][0]) for i in range(11)] != epochs[0]


def test_neighbouring_seeds_share_no_epochs(rows):
    """Seed 8 must not begin with the second epoch of seed 7."""
    orders = [
        tuple(int(RowStream(rows, seed)[11 * epoch + i][0][0]) for i in range(11))
        for seed in (7, 8, 9)
        for epoch in range(3)
    ]
    assert len(set(orders)) == len(orders)


def rows_of_steps(rows, batch_size, accumulate, groups, steps):
    """For each step the first tokens of the rows of all data-parallel groups."""
    streams = [
        training_steps(rows, options(batch_size, accumulate), Mesh(data_rank=rank, data_size=groups))
        for rank in range(groups)
    ]
    found = []
    for _ in range(steps):
        of_groups = [next(stream) for stream in streams]
        assert all(len(step) == accumulate for step in of_groups)
        assert all(batch["input_ids"].shape == (batch_size, 3) for step in of_groups for batch in step)
        found.append(sorted(int(t) for step in of_groups for batch in step for t in batch["input_ids"][:, 0]))
    return found


def test_a_step_has_the_same_rows_however_the_global_batch_is_made_up(rows):
    expected = rows_of_steps(rows, 1, 4, 1, steps=6)  # 24 rows: more than two epochs of 11
    for batch_size, accumulate, groups in [(4, 1, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)]:
        assert rows_of_steps(rows, batch_size, accumulate, groups, steps=6) == expected


def test_ranks_of_a_group_get_the_same_rows(rows):
    meshes = [Mesh(sequence_rank=rank, sequence_size=3, data_rank=1, data_size=2) for rank in range(3)]
    runs = [list(itertools.islice(training_steps(rows, options(2, 2), m), 5)) for m in meshes]
    for other in runs[1:]:
        for ours, theirs in zip(itertools.chain(*runs[0]), itertools.chain(*other), strict=True):
            assert torch.equal(ours["input_ids"], theirs["input_ids"])


@pytest.mark.parametrize("groups, batch_size", [(1, 1), (1, 4), (2, 1), (2, 3), (3, 4), (4, 5), (16, 2)])
def test_evaluation_covers_every_row_once_and_keeps_the_groups_in_step(rows, groups, batch_size):
    seen, counts = [], set()
    for rank in range(groups):
        mesh = Mesh(data_rank=rank, data_size=groups)
        batches = list(evaluation_batches(rows, options(batch_size), mesh))
        counts.add(len(batches))
        for batch in batches:
            assert len(batch["targets"]) == batch_size
            seen += [int(row[0]) for row in batch["targets"] if (row != IGNORE_INDEX).any()]
    assert len(counts) == 1
    assert sorted(seen) == list(range(1, 12))

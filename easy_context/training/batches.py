"""Rows of token ids for each optimizer step: seeded, endless, the same for every rank that shares a row."""

from collections.abc import Iterator
from typing import Any

import torch

from ..common.constants import IGNORE_INDEX
from ..data.token_rows import TokenRow, TokenRows
from ..loss import next_token_targets
from ..mesh import Mesh
from .arguments import Arguments

Batch = dict[str, Any]


class RowStream:
    """The rows of all epochs as one endless sequence, each epoch in its own seeded order."""

    def __init__(self, rows: TokenRows, seed: int) -> None:
        self._rows, self._seed, self._epoch = rows, seed, -1
        self._order: list[int] = []

    def __getitem__(self, number: int) -> TokenRow:
        """Return row `number`, counted from the start of training."""
        return self._rows[self.index(number)]

    def index(self, number: int) -> int:
        """Return the dataset index of row `number`, counted from the start of training."""
        epoch, offset = divmod(number, len(self._rows))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self._rows), generator=generator).tolist()
            self._epoch = epoch
        return self._order[offset]


def training_steps(rows: TokenRows, args: Arguments, mesh: Mesh, first_step: int = 1) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each optimizer step.

    Step s, counted from 1, uses rows (s-1)*G to s*G of the stream, G = batch size x accumulation x data-parallel
    groups, however G is made up; ranks of one sequence-parallel group get the same rows. `first_step` comes first.

    Yields:
        `--gradient-accumulate-every` batches as `collate` makes them.
    """
    stream = RowStream(rows, args.seed)
    number = (first_step - 1) * args.gradient_accumulate_every * args.batch_size * mesh.data_size
    while True:
        micro_batches = []
        for _ in range(args.gradient_accumulate_every):
            first = number + mesh.data_rank * args.batch_size
            micro_batches.append(collate([stream[first + i] for i in range(args.batch_size)], args.seq_length))
            number += args.batch_size * mesh.data_size
        yield micro_batches


def rows_of_step(rows: TokenRows, args: Arguments, mesh: Mesh, step: int) -> list[int]:
    """Return the dataset indices of the rows of an optimizer step, counted from 1, over all processes."""
    stream, size = RowStream(rows, args.seed), args.gradient_accumulate_every * args.batch_size * mesh.data_size
    return [stream.index(number) for number in range((step - 1) * size, step * size)]


def evaluation_batches(rows: TokenRows, args: Arguments, mesh: Mesh) -> Iterator[Batch]:
    """Yield every row once over all data-parallel groups.

    Groups without rows left get rows without targets, so that all groups make the same number of steps.
    """
    for start in range(0, len(rows), args.batch_size * mesh.data_size):
        first = start + mesh.data_rank * args.batch_size
        batch = collate([rows[(first + i) % len(rows)] for i in range(args.batch_size)], args.seq_length)
        surplus = max(0, min(args.batch_size, first + args.batch_size - len(rows)))
        batch["targets"][args.batch_size - surplus :] = IGNORE_INDEX
        yield batch


def collate(rows: list[TokenRow], seq_length: int) -> Batch:
    """Put rows of any length into one batch: longer ones are cut at seq_length, shorter ones padded on the right.

    Args:
        rows: rows of a dataset.
        seq_length: maximum number of tokens in a row.

    Returns:
        `input_ids` and `targets` (the next token's id, or -100) `[batch, longest]` int64. Padding is token 0 without a
        target, which the causal mask hides from every real token. If documents are kept apart, `documents` holds the
        start positions of each row's documents; the padding is a document of its own.
    """
    longest = min(seq_length, max(1, *(len(row.ids) for row in rows)))
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for i, row in enumerate(rows):
        length = min(len(row.ids), longest)
        input_ids[i, :length], labels[i, :length] = row.ids[:length], row.labels[:length]
    batch = {"input_ids": input_ids, "targets": next_token_targets(labels)}
    starts = [[*row.documents, len(row.ids)] for row in rows if row.documents is not None]
    return batch | {"documents": [[place for place in row if place < longest] for row in starts]} if starts else batch


def describe_lengths(rows: TokenRows, seq_length: int) -> str | None:
    """Return a sentence about rows that are cut or padded; None if the first thousand all have seq_length tokens."""
    lengths = rows.lengths(1000)
    cut, padded = sum(n > seq_length for n in lengths), sum(n < seq_length for n in lengths)
    if not cut and not padded:
        return None
    note = (
        f"of the first {len(lengths)} rows, {cut} are longer than --seq-length {seq_length} and are cut, {padded} are "
        f"shorter (the shortest has {min(lengths)} tokens)"
    )
    if max(lengths) < seq_length:
        note += f". The longest has {max(lengths)} tokens, but the saved model's window is --seq-length all the same"
    return note

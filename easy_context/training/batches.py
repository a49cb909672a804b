"""Rows of token ids for each optimizer step: seeded, endless, the same for every rank that shares a row."""

from collections.abc import Iterator
from typing import Any

import torch

from ..common.constants import IGNORE_INDEX
from ..data.token_rows import refuse_ids, tokens_and_labels
from ..loss import next_token_targets
from ..mesh import Mesh
from .arguments import Arguments

Batch = dict[str, torch.Tensor]


class RowStream:
    """The rows of all epochs as one endless sequence, each epoch in its own seeded order."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed, self._epoch, self._order = dataset, seed, -1, []

    def __getitem__(self, index: int) -> Batch:
        """Row number `index`, counted from the start of training."""
        epoch, offset = divmod(index, len(self._dataset))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self._dataset), generator=generator).tolist()
            self._epoch = epoch
        return self._dataset[self._order[offset]]


def training_steps(
    dataset: Any, args: Arguments, mesh: Mesh, vocab_size: int, first_step: int = 1
) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each optimizer step.

    Step s, counted from 1, uses rows (s-1)*G to s*G of the stream, G = batch size x accumulation x data-parallel
    groups, however G is made up; ranks of one sequence-parallel group get the same rows. `first_step` comes first.

    Yields:
        `--gradient-accumulate-every` batches as `collate` makes them.
    """
    stream = RowStream(dataset, args.seed)
    row = (first_step - 1) * args.gradient_accumulate_every * args.batch_size * mesh.data_size
    while True:
        micro_batches = []
        for _ in range(args.gradient_accumulate_every):
            first = row + mesh.data_rank * args.batch_size
            rows = [stream[index] for index in range(first, first + args.batch_size)]
            micro_batches.append(collate(rows, args.seq_length, vocab_size))
            row += args.batch_size * mesh.data_size
        yield micro_batches


def evaluation_batches(dataset: Any, args: Arguments, mesh: Mesh, vocab_size: int) -> Iterator[Batch]:
    """Every row once over all data-parallel groups; where rows run out, rows without targets keep the ranks in step."""
    step = args.batch_size * mesh.data_size
    for start in range(0, len(dataset), step):
        first = start + mesh.data_rank * args.batch_size
        rows = [dataset[index % len(dataset)] for index in range(first, first + args.batch_size)]
        batch = collate(rows, args.seq_length, vocab_size, flag="--eval-dataset")
        surplus = max(0, min(args.batch_size, first + args.batch_size - len(dataset)))
        batch["targets"][args.batch_size - surplus :] = IGNORE_INDEX
        yield batch


def collate(rows: list[Batch], seq_length: int, vocab_size: int, flag: str = "--dataset") -> Batch:
    """Rows of any length as one batch: longer ones are cut at seq_length, shorter ones padded on the right.

    Args:
        rows: each with `input_ids` `[length]` int64, perhaps `labels`, and other columns of `load_rows`.
        seq_length: most tokens of a row.
        vocab_size: of the model.
        flag: for errors.

    Returns:
        `input_ids` and `targets` (the next token's id, or -100) `[batch, longest]` int64; padding is token 0 without a
        target, which the causal mask hides from every real token.

    Raises:
        ValueError: a token id or label outside the vocabulary, labels of another length than their row, or another
            column that cannot be honoured.
    """
    kept = [tokens_and_labels(row, f"{flag}: a row") for row in rows]
    longest = min(seq_length, max(1, *(len(ids) for ids, _ in kept)))
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for i, (ids, own_labels) in enumerate(kept):
        length = min(len(ids), longest)
        input_ids[i, :length], labels[i, :length] = ids[:length], own_labels[:length]
    for ids, what in ((input_ids, "token ids"), (labels.where(labels != IGNORE_INDEX, 0), "labels")):
        refuse_ids(int(ids.min()), int(ids.max()), vocab_size, flag, what)
    return {"input_ids": input_ids, "targets": next_token_targets(labels)}


def describe_lengths(dataset: Any, seq_length: int) -> str | None:
    """A sentence about rows that will be cut or padded, or None if the first thousand all have seq_length tokens."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(dataset.with_format("arrow")[:1000]["input_ids"]).to_pylist()  # reads no tokens
    cut, padded = sum(n > seq_length for n in lengths), sum(n < seq_length for n in lengths)
    if not cut and not padded:
        return None
    return (
        f"of the first {len(lengths)} rows, {cut} are longer than --seq-length {seq_length} and are cut, {padded} are "
        f"shorter (the shortest has {min(lengths)} tokens)"
    )

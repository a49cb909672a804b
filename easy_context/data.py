"""Rows of token ids for each optimizer step: seeded, endless, the same for every rank that shares a row."""

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .loss import IGNORE_INDEX
from .mesh import Mesh

Batch = dict[str, torch.Tensor]
_COLUMNS = ("input_ids", "labels")
_FILE_TYPES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_TOKENS_CHECKED = 100_000_000  # token ids are checked in the first so many before training, and in every batch


def load_rows(name: str, flag: str = "--dataset") -> Any:
    """A dataset of rows with `input_ids` and perhaps `labels`; other columns are dropped.

    Args:
        name: a hub name, a folder written by `save_to_disk`, a parquet, json or jsonl file, or a folder of those.
        flag: the flag that `name` comes from, for errors.

    Returns:
        A `datasets.Dataset` that gives int64 tensors.

    Raises:
        ValueError: nothing there, no rows, no `input_ids`, or ids that are not integers.
    """
    dataset = _load(name, flag)
    if "input_ids" not in dataset.column_names:
        raise ValueError(
            f"{flag} {name} has columns {dataset.column_names} and no input_ids: it must hold token ids; "
            "prepare_data.py makes such rows from text"
        )
    if len(dataset) == 0:
        raise ValueError(f"{flag} {name} has no rows")
    dataset = dataset.select_columns([column for column in _COLUMNS if column in dataset.column_names])
    for column in dataset.column_names:
        inner = getattr(dataset.features[column], "feature", None)
        if inner is None or "int" not in str(getattr(inner, "dtype", "")):
            raise ValueError(f"{flag} {name}: {column} must be lists of integers, got {dataset.features[column]}")
    return dataset.with_format("torch", dtype=torch.int64)


def _load(name: str, flag: str) -> Any:
    import datasets

    path = Path(name)
    try:
        if path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
            loaded = datasets.load_from_disk(name)
        elif path.exists():
            files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in _FILE_TYPES)
            kinds = {_FILE_TYPES.get(file.suffix) for file in files}
            if len(kinds) != 1 or None in kinds:
                raise ValueError(
                    f"{flag} {name}: expected parquet, json or jsonl files of one kind, or save_to_disk's folder"
                )
            loaded = datasets.load_dataset(kinds.pop(), data_files=[str(file) for file in files])
        elif os.sep in name and (name.startswith((os.sep, ".", "~")) or name.count(os.sep) > 1):
            raise ValueError(f"{flag} {name}: no such file or folder")
        else:
            loaded = datasets.load_dataset(name)
    except (
        OSError,
        ConnectionError,
        datasets.exceptions.DatasetNotFoundError,
        datasets.exceptions.DataFilesNotFoundError,
    ) as e:
        raise ValueError(f"{flag} {name}: neither a local path nor a dataset that the hub gives ({e})") from e
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded and len(loaded) != 1:
            raise ValueError(
                f"{flag} {name} has splits {sorted(loaded)} and none called train: name one split's folder"
            )
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    return loaded


def check_token_ids(dataset: Any, vocab_size: int, flag: str = "--dataset") -> None:
    """Raise ValueError if one of the first 100 million token ids is not in the vocabulary.

    Args:
        dataset: from `load_rows`.
        vocab_size: of the model.
        flag: for the error.
    """
    import pyarrow.compute

    seen = 0
    for table in dataset.with_format("arrow").iter(batch_size=64):
        extremes = pyarrow.compute.min_max(table["input_ids"].combine_chunks().flatten()).as_py()
        _refuse_ids(extremes["min"], extremes["max"], vocab_size, flag)
        seen += len(table["input_ids"].combine_chunks().flatten())
        if seen >= _TOKENS_CHECKED:
            break


def _refuse_ids(least: int | None, most: int | None, vocab_size: int, flag: str) -> None:
    if least is not None and (least < 0 or most >= vocab_size):
        raise ValueError(
            f"{flag} holds token ids from {least} to {most}, but the model's vocabulary has {vocab_size}: the rows "
            "were tokenised for another model"
        )


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


def training_windows(dataset: Any, args: Namespace, mesh: Mesh, vocab_size: int) -> Iterator[list[Batch]]:
    """This rank's micro-batches, one accumulation window an optimizer step.

    Step s uses rows s*G to (s+1)*G of the stream, G = batch size x accumulation x data-parallel groups, however G is
    made up; ranks of one sequence-parallel group get the same rows.

    Yields:
        `--gradient-accumulate-every` batches as `collate` makes them.
    """
    stream, row = RowStream(dataset, args.seed), 0
    while True:
        window = []
        for _ in range(args.gradient_accumulate_every):
            first = row + mesh.data_rank * args.batch_size
            rows = [stream[index] for index in range(first, first + args.batch_size)]
            window.append(collate(rows, args.seq_length, vocab_size))
            row += args.batch_size * mesh.data_size
        yield window


def evaluation_batches(dataset: Any, args: Namespace, mesh: Mesh, vocab_size: int) -> Iterator[Batch]:
    """Every row once over all data-parallel groups; where rows run out, rows without targets keep the ranks in step."""
    step = args.batch_size * mesh.data_size
    for start in range(0, len(dataset), step):
        first = start + mesh.data_rank * args.batch_size
        rows = [dataset[index % len(dataset)] for index in range(first, first + args.batch_size)]
        batch = collate(rows, args.seq_length, vocab_size, flag="--eval-dataset")
        surplus = max(0, min(args.batch_size, first + args.batch_size - len(dataset)))
        batch["labels"][args.batch_size - surplus :] = IGNORE_INDEX
        yield batch


def collate(rows: list[Batch], seq_length: int, vocab_size: int, flag: str = "--dataset") -> Batch:
    """Rows of any length as one batch: longer ones are cut at seq_length, shorter ones padded on the right.

    Args:
        rows: each with `input_ids` `[length]` int64 and perhaps `labels`.
        seq_length: most tokens of a row.
        vocab_size: of the model.
        flag: for errors.

    Returns:
        `input_ids` and `labels` `[batch, longest]` int64; padding is token 0 with label -100, which the causal mask
        hides from every real token.

    Raises:
        ValueError: a token id outside the vocabulary, or labels of another length than their row.
    """
    longest = min(seq_length, max(len(row["input_ids"]) for row in rows))
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for i, row in enumerate(rows):
        ids, targets = row["input_ids"], row.get("labels", row["input_ids"])
        if len(ids) != len(targets):
            raise ValueError(f"{flag}: a row has {len(ids)} input_ids and {len(targets)} labels")
        length = min(len(ids), longest)
        input_ids[i, :length], labels[i, :length] = ids[:length], targets[:length]
    _refuse_ids(int(input_ids.min()), int(input_ids.max()), vocab_size, flag)
    return {"input_ids": input_ids, "labels": labels}


def describe_lengths(dataset: Any, seq_length: int) -> str | None:
    """A sentence about rows that will be cut or padded, or None if the first thousand all have seq_length tokens."""
    lengths = [len(row["input_ids"]) for row in dataset.select(range(min(1000, len(dataset))))]
    cut, padded = sum(n > seq_length for n in lengths), sum(n < seq_length for n in lengths)
    if not cut and not padded:
        return None
    return (
        f"of the first {len(lengths)} rows, {cut} are longer than --seq-length {seq_length} and are cut, {padded} are "
        f"shorter (the shortest has {min(lengths)} tokens)"
    )

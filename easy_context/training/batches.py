"""Rows of token ids for each optimizer step: seeded, endless, the same for every rank that shares a row."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..common.errors import first_line
from ..common.notes import say_once
from ..data.columns import apply_columns, describe_columns, kind_of
from ..loss import IGNORE_INDEX, next_token_targets
from ..mesh import Mesh
from .arguments import Arguments

Batch = dict[str, torch.Tensor]
_TOKENS = ("input_ids", "labels")
_EXPECTED = "give a hub name, a folder of save_to_disk, or parquet, json or jsonl files of one kind"
_FILE_TYPES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_TOKENS_CHECKED = 100_000_000  # rows are checked in the first so many before training, and in every batch


def load_rows(name: str, flag: str = "--dataset") -> Any:
    """A dataset of rows with `input_ids`, perhaps `labels`, and the columns that say how these are to be read.

    Other columns are dropped; the log says which.

    Args:
        name: a hub name, a folder written by `save_to_disk`, a parquet, json or jsonl file, or a folder of those.
        flag: the flag that `name` comes from, for errors.

    Returns:
        A `datasets.Dataset` that gives tensors, of int64 where the column holds integers.

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
        raise ValueError(f"{flag} {name} has no rows: name another dataset; prepare_data.py makes rows from text")
    used = [name for name, feature in dataset.features.items() if name in _TOKENS or _is_read(name, feature)]
    if note := describe_columns(dataset.column_names, used):
        say_once(f"{flag} {name}: {note}")
    dataset = dataset.select_columns(used)
    for column in (column for column in used if column in _TOKENS):
        inner = getattr(dataset.features[column], "feature", None)
        if inner is None or "int" not in str(getattr(inner, "dtype", "")):
            raise ValueError(f"{flag} {name}: {column} must be lists of integers, got {dataset.features[column]}")
    return dataset.with_format("torch")


def _is_read(column: str, feature: Any) -> bool:
    """Whether a column can say how its row is to be read: a single value for a whole row cannot."""
    return kind_of(column) is not None and not hasattr(feature, "dtype")


def _load(name: str, flag: str) -> Any:
    import datasets

    if os.environ.get("RANK", "0") != "0":
        datasets.disable_progress_bars()  # rank 0 shows them
    path = Path(name)
    saved = is_saved_dataset(path)
    files = _data_files(path, flag) if path.exists() and not saved else []
    try:
        if saved:
            loaded = datasets.load_from_disk(name)
        elif files:
            loaded = datasets.load_dataset(_FILE_TYPES[files[0].suffix], data_files=[str(file) for file in files])
        elif name.startswith((os.sep, ".", "~")) or name.count(os.sep) > 1:
            raise FileNotFoundError("no such file or folder")
        else:
            loaded = datasets.load_dataset(name)
    except (StopIteration, IndexError) as error:  # what an empty file or folder gives
        raise ValueError(
            f"{flag} {name} has no rows: name another dataset; prepare_data.py makes rows from text"
        ) from error
    except Exception as error:  # malformed files and unknown hub names raise a dozen types
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"{flag} {name} cannot be read as a dataset ({reason}): {_EXPECTED}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded and len(loaded) != 1:
            raise ValueError(
                f"{flag} {name} has splits {sorted(loaded)} and none called train: name one split's folder"
            )
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    return loaded


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` was written by `save_to_disk`."""
    return any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))


def _data_files(path: Path, flag: str) -> list[Path]:
    """The parquet, json or jsonl files that `path` is or holds, all of one kind."""
    if path.is_dir() and (parts := sorted(str(part) for part in path.iterdir() if is_saved_dataset(part))):
        raise ValueError(f"{flag} {path} is a folder of several datasets: name one of {', '.join(parts)}")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _FILE_TYPES)
    kinds = {_FILE_TYPES.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        found = ", ".join(sorted({file.suffix or file.name for file in files})) or "nothing of the kind"
        raise ValueError(f"{flag} {path} holds {found}: {_EXPECTED}")
    return files


def check_rows(dataset: Any, vocab_size: int, seq_length: int, what: str = "--dataset") -> None:
    """Check the rows that hold the first 100 million token ids.

    Args:
        dataset: from `load_rows`.
        vocab_size: of the model.
        seq_length: tokens of a row that are used.
        what: flag and name of the dataset, for errors.

    Raises:
        ValueError: a row that is null or holds one, a token id or label outside the vocabulary, labels of another
            length than their row, another column that cannot be honoured, or no token that could be learned in any of
            these rows.
    """
    import pyarrow.compute as pc

    seen, number, learnable = 0, 0, False
    for table in dataset.with_format("arrow").iter(batch_size=16):
        for column in (column for column in table.column_names if column in _TOKENS):
            tokens = pc.list_flatten(table[column])
            if table[column].null_count or tokens.null_count:
                raise ValueError(f"{what} holds nulls in {column}: give every row whole lists of integers")
            if column == "labels":
                tokens = tokens.filter(pc.not_equal(tokens, IGNORE_INDEX))
            extremes = pc.min_max(tokens).as_py()
            _refuse_ids(
                extremes["min"], extremes["max"], vocab_size, what, "labels" if column == "labels" else "token ids"
            )
        columns = {column: table[column].to_numpy() for column in table.column_names}
        for i in range(len(table)):
            row = {column: values[i] for column, values in columns.items()}
            ids, labels = _tokens_and_labels(row, f"{what}: row {number}")
            # The first token of a row is never predicted.
            learnable = learnable or bool((labels[1:seq_length] != IGNORE_INDEX).any())
            seen, number = seen + len(ids), number + 1
        if seen >= _TOKENS_CHECKED:
            break
    if not learnable:
        raise ValueError(
            f"{what} has no token to learn in its first {seen} tokens: rows need at least 2 tokens, and labels other "
            "than -100 behind the first one"
        )


def _tokens_and_labels(row: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """The ids and labels of a row, arrays or tensors, after all that its columns say; `where` begins an error."""
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    if len(ids) != len(labels):
        raise ValueError(f"{where} has {len(ids)} input_ids and {len(labels)} labels; they must be as many")
    try:
        return apply_columns(row, ids, labels)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _refuse_ids(least: int | None, most: int | None, vocab_size: int, where: str, what: str = "token ids") -> None:
    if least is not None and (least < 0 or most >= vocab_size):
        raise ValueError(
            f"{where} holds {what} from {least} to {most}, but the model's vocabulary has {vocab_size}: the rows "
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
    kept = [_tokens_and_labels(row, f"{flag}: a row") for row in rows]
    longest = min(seq_length, max(1, *(len(ids) for ids, _ in kept)))
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for i, (ids, own_labels) in enumerate(kept):
        length = min(len(ids), longest)
        input_ids[i, :length], labels[i, :length] = ids[:length], own_labels[:length]
    for ids, what in ((input_ids, "token ids"), (labels.where(labels != IGNORE_INDEX, 0), "labels")):
        _refuse_ids(int(ids.min()), int(ids.max()), vocab_size, flag, what)
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

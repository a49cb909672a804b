"""Rows of a dataset on disk or on the hub; those that are token ids already are checked one by one."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common.errors import first_line
from ..common.notes import say_once
from ..data.columns import apply_columns, describe_columns, kind_of
from ..training.batches import is_saved_dataset
from .texts import Document

TOKEN_COLUMNS = ("input_ids", "tokens")
_LARGEST_ID = 2**63 - 1


def tokenized_documents(rows: Iterable[dict], name: str) -> Iterator[Document]:
    """One document a row of a tokenized dataset; padding (attention_mask 0 at either end) is cut off.

    Args:
        rows: with `input_ids` (or `tokens`), `labels` where there are any, and other columns; see columns.py.
        name: of the dataset, for errors.

    Raises:
        ValueError: a row that is no tokenized text, or a column of it that cannot be honoured, naming it.
    """
    for number, row in enumerate(rows):
        where = f"--tokenized {name}: row {number}"
        if not isinstance(row, dict):
            raise ValueError(f"{where} is {_shown(row)}, not an object with {' or '.join(TOKEN_COLUMNS)}")
        column = next((key for key in TOKEN_COLUMNS if key in row), None)
        if column is None:
            raise ValueError(f"{where} has columns {sorted(row)}, none of {' or '.join(TOKEN_COLUMNS)}")
        if number == 0:
            _say_columns(row, column, name)
        ids = labels = _integers(row[column], f"{where}: {column}")
        if row.get("labels") is not None:
            labels = _integers(row["labels"], f"{where}: labels", len(ids))
        try:
            ids, labels = apply_columns(row, ids, labels)
        except ValueError as reason:
            raise ValueError(f"{where}: {reason}") from None
        yield Document(f"row-{number}", ids, labels, where)


def _say_columns(row: dict, ids: str, name: str) -> None:
    """Say what is read beside the token ids, and what is not."""
    used = [key for key in row if key in (ids, "labels") or (kind_of(key) and isinstance(row[key], list))]
    if note := describe_columns(row, used):
        say_once(f"--tokenized {name}: {note}")


def _integers(values: Any, what: str, length: int | None = None) -> torch.Tensor:
    """A list of integers as int64; anything else is a ValueError that begins with `what`."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (len(array) and (array.dtype.kind not in "iu" or int(array.max()) > _LARGEST_ID)):
        raise ValueError(f"{what} must be a list of integers, got {_shown(values)}")
    if length is not None and len(array) != length:
        raise ValueError(f"{what} has {len(array)} values for {length} tokens; there must be one for each")
    return torch.from_numpy(array.astype(np.int64))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_rows(name: str, split: str | None, subset: str | None = None, flag: str = "--tokenized") -> Iterable[dict]:
    """A dataset's rows: a folder from `save_to_disk` or of several, a parquet or JSON file, or a name on the hub.

    Args:
        name: path or hub name.
        split: of a dataset that has several; None takes the only one, else test, validation or train.
        subset: configuration of a dataset on the hub; None takes the default one.
        flag: for errors.

    Raises:
        ValueError: it cannot be read, has no rows, or has no such split.
    """
    path = Path(name)
    if subset and (is_saved_dataset(path) or path.is_file()):
        raise ValueError(f"--subset {subset}: {flag} {name} is on disk and has none; leave the flag out")
    what = f"{flag} {name}"
    splits = {"": _json_rows(path, what)} if path.suffix in (".json", ".jsonl") else _splits_of(name, subset, what)
    if list(splits) == [""] and split:
        raise ValueError(f"--split {split}: {name} has no splits; leave the flag out")
    wanted = [split] if split else ["test", "validation", "train", *splits]
    chosen = next((key for key in wanted if key in splits), None)
    if chosen is None:
        raise ValueError(f"--split {split}: {name} has {', '.join(splits)}")
    rows = iter(splits[chosen])
    first = list(itertools.islice(rows, 1))
    if not first:
        raise ValueError(f"{what}: no rows{f' in split {chosen}' if chosen else ''}; name another dataset")
    return itertools.chain(first, rows)


def _splits_of(name: str, subset: str | None, what: str) -> dict[str, Iterable[dict]]:
    """Split -> rows; a dataset without splits has one called "". `what` begins an error."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = Path(name)
    parts = sorted(part for part in path.iterdir() if is_saved_dataset(part)) if path.is_dir() else []
    try:
        if is_saved_dataset(path):
            dataset = load_from_disk(name)
        elif parts:  # the output of prepare_data.py: a folder for each split
            return {part.name: load_from_disk(str(part)) for part in parts}
        elif path.is_file() and path.suffix != ".parquet":
            raise ValueError(f"a file of kind {path.suffix or path.name}; give parquet, json or jsonl, or --text")
        elif path.suffix == ".parquet":
            return {"": load_dataset("parquet", data_files=name)["train"]}
        else:
            dataset = load_dataset(name, subset)
    except Exception as reason:  # damaged files and unknown names raise a dozen types
        cause = first_line(reason.__cause__ or reason)
        raise ValueError(f"{what}: not a dataset on disk or on the hub ({cause})") from reason
    if isinstance(dataset, DatasetDict):
        return dict(dataset)
    return {"": dataset}


def _json_rows(path: Path, what: str) -> Iterator[Any]:
    """The rows of a JSONL file, or of a JSON file that is one list; `what` begins an error."""
    try:
        with path.open(encoding="utf-8") as file:
            if file.read(1) == "[" and path.suffix == ".json":
                file.seek(0)
                yield from json.load(file)
                return
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json_row(line, f"{what}: line {number}")
    except json.JSONDecodeError as reason:
        raise ValueError(f"{what}: not JSON ({reason})") from reason
    except (OSError, UnicodeDecodeError) as reason:
        raise ValueError(f"{what}: not a dataset on disk or on the hub ({first_line(reason)})") from reason


def _json_row(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as reason:
        raise ValueError(f"{where} is not JSON ({reason})") from None

"""Read rows of token ids as documents, and check each."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ..common.notes import say_once
from ..data.columns import apply_columns, describe_columns, kind_of
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

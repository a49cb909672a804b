"""Interpret the columns in addition to a row's token ids, such as masks, positions and document lengths.

Columns are recognised by the names that TRL, Axolotl, LLaMA-Factory, torchtune, LLM Foundry, MaxText, NeMo and Megatron
use. A column without effect (positions that count from 0, a mask of ones) is accepted. Padding is removed. Columns that
separate the documents of a packed row are used by a reader that keeps documents apart. Other readers reject them,
except for the column that prepare_data.py writes. A weighted or masked loss is rejected.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ..common.constants import IGNORE_INDEX
from .documents import COLUMN, KINDS, starts_of_column

_KINDS = {
    "padding": r"attention_masks?",
    "positions": r"(input_?|inputs_?|target_?|targets_?|decoder_?)?(position|pos)(s|_?ids?)?",
    "documents": r"(decoder_?)?(segment|seg|document|doc|sequence|seq|sample|example|token_type)s?_?(id|ids|idx)"
    r"|segments?|(inputs?|targets?)_segmentation",
    "lengths": r"(sub_?)?(seq|sequence|doc|document|sample)_?(len|lens|lengths)|seqlens?",
    "boundaries": r"cu_?(seq|doc)_?(len|lens|lengths)(_[qk])?|seq_start_ids?",
    "learned": r"((loss|completion|assistant|assistant_tokens|response|answer|label|labels|target|train)_)?masks?",
    "not learned": r"(special_tokens|prompt|instruction|user|padding|pad|key_padding)_masks?",
    "weights": r"(loss|token)_?(weight|scale)s?|weights",
    "targets": r"(label|target|lm_label)_?ids|(lm|shift|shifted)_?labels|targets?|target_tokens",
}
_PACKED = "packed documents would be read as one text"
_REMEDY = "give each document a row of its own, or train with --respect-documents"
_LABELS = f"give labels instead, a copy of input_ids with {IGNORE_INDEX} where nothing is to be learned"


@functools.cache
def kind_of(column: str) -> str | None:
    """Return the meaning of a column with this name, or None for an unknown name."""
    return next((kind for kind, names in _KINDS.items() if re.fullmatch(names, column.lower())), None)


def describe_columns(columns: Iterable[str], used: Collection[str]) -> str | None:
    """Return a sentence about the columns other than the token ids, or None if there are none.

    Args:
        columns: all columns of the dataset.
        used: columns that are read.
    """
    notes = []
    if "labels" in used:
        notes.append(f"labels say which tokens are learned ({IGNORE_INDEX}: none)")
    if padding := [column for column in used if kind_of(column) == "padding"]:
        notes.append(f"what {padding[0]} hides at the ends of a row is left out")
    if dropped := sorted(set(columns) - set(used)):
        notes.append(f"not used: {', '.join(dropped)}")
    return "; ".join(notes) or None


def apply_columns(
    row: Mapping[str, Any], ids: Any, labels: Any = None, *, apart: bool = False
) -> tuple[Any, Any, list[int] | None]:
    """Return a row's tokens and labels after applying its other columns, and the start positions of its documents.

    Args:
        row: dict from column to value: lists, arrays or tensors. Other values, such as None, are ignored.
        ids: token ids `[length]`, an array or tensor.
        labels: labels of the same length and type; `ids` if None.
        apart: whether the reader keeps documents apart.

    Returns:
        `ids` and `labels` without the padding that an attention mask hides at either end, and the start positions of
        the documents in them, beginning with 0 and increasing; None if no column contains them.

    Raises:
        ValueError: a column is not supported; the message begins with its name.
    """
    labels = ids if labels is None else labels
    known = {column: _array(row[column]) for column in row if kind_of(column) and row[column] is not None}
    kept = slice(0, len(ids))
    for column, values in known.items():
        if kind_of(column) == "padding":
            kept = _shown(column, values, len(ids))
    lists = {column: values for column, values in known.items() if kind_of(column) != "padding" and values.ndim}
    for column, values in lists.items():
        if kind_of(column) not in KINDS:
            _check(column, values, kept, np.asarray(ids), np.asarray(labels))
    return ids[kept], labels[kept], _find_starts(lists, kept, len(ids), apart)


def _find_starts(columns: Mapping[str, np.ndarray], kept: slice, length: int, apart: bool) -> list[int] | None:
    """Return the documents' start positions from the columns, which must agree; None if no column contains them."""
    found: dict[str, list[int]] = {}
    for column, values in columns.items():
        if (kind := kind_of(column)) in KINDS:
            try:
                starts = starts_of_column(kind, values, kept, length)
            except ValueError as error:
                raise ValueError(f"{column} {_few(values)} {error}") from None
            if starts is not None:
                found[column] = starts
    dividing = {column: starts for column, starts in found.items() if len(starts) > 1}
    for column, starts in dividing.items():
        if not apart and column != COLUMN:
            raise ValueError(f"{column} {_few(columns[column])} tells documents apart: {_PACKED}; {_REMEDY}")
        if starts != (first := next(iter(dividing.values()))):
            raise ValueError(f"{column} divides the row at {starts[1:4]}, {next(iter(dividing))} at {first[1:4]}")
    return next(iter(dividing.values()), next(iter(found.values()), None))


def _array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # lists of different lengths within a list
        return np.empty((0, 0))


def _shown(column: str, mask: np.ndarray, length: int) -> slice:
    """Return the tokens that an attention mask does not hide, which must be contiguous."""
    _check_length(column, mask, length)
    shown = mask.nonzero()[0]
    if not (mask[shown] == 1).all():
        raise ValueError(f"{column} holds other values than 0 and 1: {_PACKED}")
    first, last = (int(shown[0]), int(shown[-1]) + 1) if len(shown) else (0, 0)
    if last - first != len(shown):
        raise ValueError(f"{column} has padding between its tokens, which cannot be honoured; keep padding at the ends")
    return slice(first, last)


def _check(column: str, values: np.ndarray, kept: slice, ids: np.ndarray, labels: np.ndarray) -> None:
    kind = kind_of(column)
    _check_length(column, values, len(ids))
    values, ids, labels = values[kept], ids[kept], labels[kept]
    learned = labels != IGNORE_INDEX
    if (kind == "learned" and learned[values == 0].any()) or (kind == "not learned" and learned[values != 0].any()):
        raise ValueError(f"{column} marks tokens that are not to be learned, but only labels are read: {_LABELS}")
    if kind == "weights" and (values[learned] != 1).any():
        raise ValueError(f"{column} weighs tokens unequally, which cannot be honoured: drop the column, or {_LABELS}")
    if kind == "targets" and not np.array_equal(values, labels):
        raise ValueError(f"{column} is not what is learned, since only labels are read: {_LABELS}")


def _check_length(column: str, values: np.ndarray, length: int) -> None:
    if values.ndim != 1 or (values.size and values.dtype.kind not in "biuf"):
        raise ValueError(f"{column} must be a list of numbers, one for each token, got {_few(values)}")
    if len(values) != length:
        raise ValueError(f"{column} has {len(values)} values for {length} tokens; there must be one for each")


def _few(values: np.ndarray) -> str:
    text = ", ".join(map(str, values.reshape(-1)[:4].tolist()))
    return f"[{text}, ...]" if values.size > 4 else f"[{text}]"

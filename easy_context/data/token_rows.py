"""Rows of token ids in a dataset: which columns are read, and what is refused before anything trains on them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..common.constants import IGNORE_INDEX
from ..common.notes import say_once
from .columns import apply_columns, describe_columns, kind_of
from .datasets import HELD_OUT_FIRST, open_dataset

if TYPE_CHECKING:
    import torch

_TOKENS = ("input_ids", "labels")
_TOKENS_CHECKED = 100_000_000  # at the start; a row behind them is checked when it is read


class UnusableRow(ValueError):
    """A row that cannot be trained on, found while training: it stands behind those that were checked before."""


class TokenRows:
    """Rows of token ids and labels, each checked once: those of the first 100 million ids at once, others when read."""

    def __init__(self, name: str, flag: str, vocab_size: int | None, seq_length: int) -> None:
        """Open and check a dataset.

        Args:
            name: as `open_dataset` takes it.
            flag: the flag that `name` comes from, for errors.
            vocab_size: of the model; None leaves the ids unchecked.
            seq_length: tokens of a row that are used.

        Raises:
            ValueError: as `load_rows` and `check_rows`.
        """
        self._dataset, self._what, self._vocab_size = load_rows(name, flag), f"{flag} {name}", vocab_size
        self._checked = 0 if vocab_size is None else check_rows(self._dataset, vocab_size, seq_length, self._what)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the ids and labels of a row, `[length]` int64, labels -100 where nothing is learned.

        Raises:
            UnusableRow: the row was not checked before, and cannot be used.
        """
        where, row = f"{self._what}: row {index}", self._dataset[index]
        try:
            ids, labels = tokens_and_labels(row, where)
            if index >= self._checked and self._vocab_size is not None and len(ids):
                wanted = labels.where(labels != IGNORE_INDEX, 0)
                for values, kind in ((ids, "token ids"), (wanted, "labels")):
                    refuse_ids(int(values.min()), int(values.max()), self._vocab_size, where, kind)
        except ValueError as error:
            raise UnusableRow(str(error)) from None
        return ids, labels

    def lengths(self, rows: int) -> list[int]:
        """Return the number of tokens of each of the first `rows` rows; no tokens are read."""
        import pyarrow.compute as pc

        return pc.list_value_length(self._dataset.with_format("arrow")[:rows]["input_ids"]).to_pylist()


def load_rows(name: str, flag: str, split: str | None = None, subset: str | None = None) -> Any:
    """Open a dataset of rows with `input_ids`, perhaps `labels`, and the columns that say how these are to be read.

    Other columns are dropped; the log says which. Of several splits `--dataset` takes train, and any other flag one
    that is held out, if there is one.

    Args:
        name: as `open_dataset` takes it.
        flag: the flag that `name` comes from.
        split, subset: as `open_dataset` takes them.

    Returns:
        A `datasets.Dataset` that gives tensors, of int64 where the column holds integers.

    Raises:
        ValueError: no such dataset, no rows, no `input_ids`, or ids that are not integers.
    """
    dataset = open_dataset(name, flag, ("train",) if flag == "--dataset" else HELD_OUT_FIRST, split, subset)
    if "input_ids" not in dataset.column_names and "tokens" in dataset.column_names:
        dataset = dataset.rename_column("tokens", "input_ids")
    if "input_ids" not in dataset.column_names:
        raise ValueError(
            f"{flag} {name} has columns {dataset.column_names} and no input_ids: it must hold token ids; "
            "prepare_data.py makes such rows from text"
        )
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
    """Return whether a column can say how its row is to be read: a single value for a whole row cannot."""
    return kind_of(column) is not None and not hasattr(feature, "dtype")


def check_rows(dataset: Any, vocab_size: int, seq_length: int, what: str) -> int:
    """Check the rows that hold the first 100 million token ids.

    Args:
        dataset: from `load_rows`.
        vocab_size: of the model.
        seq_length: tokens of a row that are used.
        what: flag and name of the dataset, for errors.

    Returns:
        The number of rows that were checked.

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
            refuse_ids(
                extremes["min"], extremes["max"], vocab_size, what, "labels" if column == "labels" else "token ids"
            )
        columns = {column: table[column].to_numpy() for column in table.column_names}
        for i in range(len(table)):
            row = {column: values[i] for column, values in columns.items()}
            ids, labels = tokens_and_labels(row, f"{what}: row {number}")
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
    return number


def tokens_and_labels(row: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """Return ids and labels of a row, arrays or tensors, after all that its columns say; `where` begins an error."""
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    for column, values in (("input_ids", ids), ("labels", labels)):
        if values is None or "int" not in str(values.dtype):
            raise ValueError(f"{where} holds nulls in {column}: give every row whole lists of integers")
    if len(ids) != len(labels):
        raise ValueError(f"{where} has {len(ids)} input_ids and {len(labels)} labels; they must be as many")
    try:
        return apply_columns(row, ids, labels)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def refuse_ids(least: int | None, most: int | None, vocab_size: int, where: str, what: str = "token ids") -> None:
    """Raise ValueError if ids from `least` to `most` (None for no ids at all) leave the vocabulary."""
    if least is not None and most is not None and (least < 0 or most >= vocab_size):
        raise ValueError(
            f"{where} holds {what} from {least} to {most}, but the model's vocabulary has {vocab_size}: the rows "
            "were tokenised for another model"
        )

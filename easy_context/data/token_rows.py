"""Rows of token ids in a dataset: which columns are read, and what is refused before anything trains on them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..common.constants import IGNORE_INDEX
from ..common.notes import say_once
from .columns import apply_columns, describe_columns, kind_of
from .datasets import HELD_OUT_FIRST, open_dataset
from .documents import COLUMN, KINDS, DocumentRule

if TYPE_CHECKING:
    import torch

_TOKENS = ("input_ids", "labels")
_ROWS_LOOKED_AT = 1000
_TOKENS_CHECKED = 100_000_000  # at the start; a row behind them is checked when it is read


class UnusableRow(ValueError):
    """A row that cannot be trained on, found while training: it stands behind those that were checked before."""


class TokenRow(NamedTuple):
    """A row of a dataset.

    Attributes:
        ids: token ids, `[length]` int64.
        labels: the same, -100 where nothing is learned.
        documents: where its documents start, 0 first; None if they are not kept apart.
    """

    ids: "torch.Tensor"
    labels: "torch.Tensor"
    documents: list[int] | None = None


class TokenRows:
    """Rows of token ids and labels, each checked once: those of the first 100 million ids at once, others when read."""

    def __init__(
        self, name: str, flag: str, vocab_size: int | None, seq_length: int, documents: DocumentRule | None = None
    ) -> None:
        """Open and check a dataset.

        Args:
            name: as `open_dataset` takes it.
            flag: the flag that `name` comes from, for errors.
            vocab_size: of the model; None leaves the ids unchecked.
            seq_length: tokens of a row that are used.
            documents: tells where documents start that are to be kept apart; None to read each row as one text.

        Raises:
            ValueError: as `load_rows` and `check_rows`.
        """
        self._what, self._vocab_size, self._documents = f"{flag} {name}", vocab_size, documents
        self._dataset = load_rows(name, flag, apart=documents is not None)
        self._checked = 0
        if vocab_size is not None:
            self._checked = check_rows(self._dataset, vocab_size, seq_length, self._what, documents)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> TokenRow:
        """Return a row.

        Raises:
            UnusableRow: the row was not checked before, and cannot be used.
        """
        where, row = f"{self._what}: row {index}", self._dataset[index]
        try:
            tokens = read_row(row, where, self._documents)
            if index >= self._checked and self._vocab_size is not None and len(tokens.ids):
                wanted = tokens.labels.where(tokens.labels != IGNORE_INDEX, 0)
                for values, kind in ((tokens.ids, "token ids"), (wanted, "labels")):
                    refuse_ids(int(values.min()), int(values.max()), self._vocab_size, where, kind)
        except ValueError as error:
            raise UnusableRow(str(error)) from None
        return tokens

    def content(self, index: int) -> bytes:
        """Return the numbers in all columns of a row as bytes, without a check."""
        import pyarrow.compute as pc

        row = self._dataset.with_format("arrow")[index : index + 1]
        return b"".join(pc.list_flatten(row[name]).to_numpy().tobytes() for name in sorted(row.column_names))

    def lengths(self, rows: int) -> list[int]:
        """Return the number of tokens of each of the first `rows` rows; no tokens are read."""
        import pyarrow.compute as pc

        return pc.list_value_length(self._dataset.with_format("arrow")[:rows]["input_ids"]).to_pylist()


def load_rows(name: str, flag: str, split: str | None = None, subset: str | None = None, *, apart: bool = False) -> Any:
    """Open a dataset of rows with `input_ids`, perhaps `labels`, and the columns that say how these are to be read.

    Other columns are dropped; the log says which. Of several splits `--dataset` takes train, and any other flag one
    that is held out, if there is one.

    Args:
        name: as `open_dataset` takes it.
        flag: the flag that `name` comes from.
        split, subset: as `open_dataset` takes them.
        apart: documents are kept apart; otherwise the log says so once if rows hold several.

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
    if not apart and COLUMN in used and _several_documents(dataset):
        say_once(
            f"{flag} {name}: each row is read as one text: attention and targets cross the documents that {COLUMN} "
            "tells apart; train.py --respect-documents keeps them apart"
        )
    dataset = dataset.select_columns(used)
    for column in (column for column in used if column in _TOKENS):
        inner = getattr(dataset.features[column], "feature", None)
        if inner is None or "int" not in str(getattr(inner, "dtype", "")):
            raise ValueError(f"{flag} {name}: {column} must be lists of integers, got {dataset.features[column]}")
    return dataset.with_format("torch")


def _is_read(column: str, feature: Any) -> bool:
    """Return whether a column can say how its row is to be read: a single value for a whole row cannot."""
    return kind_of(column) is not None and not hasattr(feature, "dtype")


def _several_documents(dataset: Any) -> bool:
    """Return whether any of the first rows holds more than one document."""
    import pyarrow.compute as pc

    numbers = pc.list_value_length(dataset.with_format("arrow")[:_ROWS_LOOKED_AT][COLUMN])
    return (pc.max(numbers).as_py() or 0) > 1


def check_rows(dataset: Any, vocab_size: int, seq_length: int, what: str, documents: DocumentRule | None = None) -> int:
    """Check the rows that hold the first 100 million token ids.

    Args:
        dataset: from `load_rows`.
        vocab_size: of the model.
        seq_length: tokens of a row that are used.
        what: flag and name of the dataset, for errors.
        documents: tells where documents start; None to read each row as one text.

    Returns:
        The number of rows that were checked.

    Raises:
        ValueError: a row that is null or holds one, a token id or label outside the vocabulary, labels of another
            length than their row, another column that cannot be honoured, no token that could be learned in any of
            these rows, or nothing that tells where documents start.
    """
    import pyarrow.compute as pc

    if documents is not None and documents.flag is None and not any(kind_of(n) in KINDS for n in dataset.column_names):
        raise ValueError(
            f"--respect-documents: no column of {what} tells where documents start: prepare_data.py writes {COLUMN}; "
            "or name a token with --documents-end-with or --documents-begin-with"
        )
    seen, number, learnable, divided = 0, 0, False, False
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
            tokens = read_row(row, f"{what}: row {number}", documents)
            learned = tokens.labels[:seq_length] != IGNORE_INDEX
            starts = [0] if tokens.documents is None else tokens.documents
            # The first token of a row, or of a document, is never predicted.
            learned[[start for start in starts if start < len(learned)]] = False
            learnable, divided = learnable or bool(learned.any()), divided or len(starts) > 1
            seen, number = seen + len(tokens.ids), number + 1
        if seen >= _TOKENS_CHECKED:
            break
    if not learnable:
        raise ValueError(
            f"{what} has no token to learn in its first {seen} tokens: rows need at least 2 tokens, and labels other "
            "than -100 behind the first one"
        )
    if documents is not None and documents.flag is not None and not divided:
        raise ValueError(f"{documents.flag}: the token marks no document in the first {number} rows of {what}")
    return number


def read_row(row: Mapping[str, Any], where: str, documents: DocumentRule | None = None) -> TokenRow:
    """Return a row, arrays or tensors, after all that its columns say.

    Args:
        row: column -> value.
        where: begins an error.
        documents: tells where documents start; None to read the row as one text.
    """
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    for column, values in (("input_ids", ids), ("labels", labels)):
        if values is None or "int" not in str(values.dtype):
            raise ValueError(f"{where} holds nulls in {column}: give every row whole lists of integers")
    if len(ids) != len(labels):
        raise ValueError(f"{where} has {len(ids)} input_ids and {len(labels)} labels; they must be as many")
    try:
        ids, labels, starts = apply_columns(row, ids, labels, apart=documents is not None)
        return TokenRow(ids, labels, None if documents is None else documents.starts(ids, starts))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def refuse_ids(least: int | None, most: int | None, vocab_size: int, where: str, what: str = "token ids") -> None:
    """Raise ValueError if ids from `least` to `most` (None for no ids at all) leave the vocabulary."""
    if least is not None and most is not None and (least < 0 or most >= vocab_size):
        raise ValueError(
            f"{where} holds {what} from {least} to {most}, but the model's vocabulary has {vocab_size}: the rows "
            "were tokenised for another model"
        )

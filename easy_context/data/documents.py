"""Find the start positions of a packed row's documents, from columns or from a token that separates documents."""

from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMN = "document_lengths"  # of prepare_data.py's rows
KINDS = ("positions", "documents", "lengths", "boundaries")  # of columns (see columns.py) that can divide a row


@dataclass(frozen=True)
class DocumentRule:
    """The rule that separates documents: a token, or the columns of the rows if neither token is given.

    Attributes:
        begin_with: id of the token that begins every document.
        end_with: id of the token that ends every document.
    """

    begin_with: int | None = None
    end_with: int | None = None

    @property
    def flag(self) -> str | None:
        """The flag of train.py that names the token; None if columns are used."""
        if self.begin_with is not None:
            return f"--documents-begin-with {self.begin_with}"
        return None if self.end_with is None else f"--documents-end-with {self.end_with}"

    def starts(self, ids: Any, of_columns: list[int] | None) -> list[int]:
        """Return the start positions of a row's documents in increasing order; the first is 0 if the row has tokens.

        Args:
            ids: token ids `[length]`, an array or tensor.
            of_columns: start positions from the row's columns; None if it has none of KINDS.

        Raises:
            ValueError: both columns and a token separate the documents, or neither does.
        """
        if self.flag is None:
            if of_columns is None:
                raise ValueError("no column tells where its documents start")
            return of_columns
        if of_columns is not None and len(of_columns) > 1:
            raise ValueError(f"its columns tell documents apart already: leave out {self.flag}")
        values = np.asarray(ids)
        begins = values == self.begin_with if self.end_with is None else np.roll(values == self.end_with, 1)
        begins[:1] = True
        return begins.nonzero()[0].tolist()


def starts_of_column(kind: str, values: np.ndarray, kept: slice, length: int) -> list[int] | None:
    """Return the start positions of documents among the kept tokens of a row, from one of its columns.

    Args:
        kind: one of KINDS.
        values: values of the column: one per token (positions, documents), one per document (lengths), or borders.
        kept: slice of the tokens without padding.
        length: number of tokens in the row, including padding.

    Returns:
        The start positions in increasing order, the first of them 0 if any token is kept; None if the column describes
        the row as a whole.

    Raises:
        ValueError: the values do not fit a row of this length. The message begins with a verb.
    """
    if kind == "documents" and (values.ndim != 1 or len(values) != length):
        return None
    if values.ndim != 1 or (values.size and values.dtype.kind not in "biuf"):
        raise ValueError("must be a list of numbers")
    if kind == "lengths":
        return _between_borders(np.append(0, values).cumsum(), kept, length, complete=True)
    if kind == "boundaries":
        return _between_borders(values, kept, length)
    if len(values) != length:
        raise ValueError(f"has {len(values)} values for {length} tokens; there must be one for each")
    values = values[kept]
    if kind == "documents":
        starts = np.append(True, values[1:] != values[:-1])[: len(values)].nonzero()[0]
        if len(np.unique(values[starts])) != len(starts):
            raise ValueError("has a number again behind another: the tokens of a document must lie together")
        return starts.tolist()
    starts = (values == 0).nonzero()[0]
    if len(values) and (
        starts[:1].tolist() != [0] or (np.diff(values) != np.where(values[1:] == 0, -values[:-1], 1)).any()
    ):
        raise ValueError("does not count from 0 by ones, or anew in each document")
    return starts.tolist()


def _between_borders(borders: np.ndarray, kept: slice, length: int, complete: bool = False) -> list[int]:
    """Return the starts between borders, which count from the row's first token, or from the first that is kept."""
    tokens, (first, last) = kept.stop - kept.start, (borders[0], borders[-1]) if borders.size else (0, 0)
    if complete and last not in (0, length, kept.stop, tokens):
        raise ValueError(f"adds up to {last}, but the row has {length} tokens")
    if (np.diff(borders, prepend=0) < 0).any() or last > length:
        raise ValueError(f"does not divide a row of {length} tokens")
    if (first, last) != (0, tokens):
        borders = borders - kept.start
    inside = np.unique(borders[(borders > 0) & (borders < tokens)]).astype(int)
    return [0, *inside.tolist()] if tokens else []

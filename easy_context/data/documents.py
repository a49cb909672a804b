"""Where the documents of a packed row start: from the columns that packing leaves, or from a token that marks them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMN = "document_lengths"  # of prepare_data.py's rows
KINDS = ("positions", "documents", "lengths", "boundaries")  # of columns (see columns.py) that can divide a row


@dataclass(frozen=True)
class DocumentRule:
    """What tells where documents start: a token, or the columns of the rows if neither token is given.

    Attributes:
        begin_with: id of the token that begins every document.
        end_with: id of the token that ends every document.
    """

    begin_with: int | None = None
    end_with: int | None = None

    @property
    def flag(self) -> str | None:
        """The flag of train.py that names the token; None if columns tell."""
        if self.begin_with is not None:
            return f"--documents-begin-with {self.begin_with}"
        return None if self.end_with is None else f"--documents-end-with {self.end_with}"

    def starts(self, ids: Any, of_columns: list[int] | None) -> list[int]:
        """Return where the documents of a row start: 0, if it has any token, and places in rising order.

        Args:
            ids: token ids `[length]`, an array or tensor.
            of_columns: what the row's columns say; None if it has none of KINDS.

        Raises:
            ValueError: columns and a token both tell documents apart, or neither does.
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
    """Return where documents start in the tokens of a row that are kept, according to one of its columns.

    Args:
        kind: of KINDS.
        values: of the column: one for each token (positions, documents), one for each document (lengths), or borders.
        kept: the tokens without padding.
        length: tokens of the row, padding included.

    Returns:
        0, if any token is kept, and places in rising order; None if the column is about the row as a whole.

    Raises:
        ValueError: values that divide no row of this length; begins with a verb.
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

"""Start positions, position ids and targets of packed documents in whole rows, before the rows are split."""

from collections.abc import Sequence

import torch

from .common.constants import IGNORE_INDEX
from .kernels.documents import Documents

# Where documents start: the places in each row, or "position_ids" if positions start anew from 0 in each document.
DocumentStarts = Sequence[Sequence[int]] | str
BY_POSITIONS = "position_ids"


def find_documents(documents: DocumentStarts, shape: tuple[int, ...], position_ids: torch.Tensor) -> Documents:
    """Return the documents of a batch of rows.

    Args:
        documents: the places in each row where its documents start, 0 first; or "position_ids": where these are 0.
        shape: rows of the batch and tokens of a row.
        position_ids: `[batch, length]` or `[1, length]`.

    Raises:
        ValueError: starts of another number of rows or that `Documents.of_rows` refuses, or positions that do not count
            from 0 by ones within each document.
    """
    batch, length = shape
    if isinstance(documents, str):
        if documents != BY_POSITIONS:
            raise ValueError(
                f"documents={documents!r}: give where the documents of each row start, or {BY_POSITIONS!r}"
            )
        documents = [row.nonzero().flatten().tolist() for row in (position_ids == 0).expand(batch, -1)]
        found = Documents.of_rows(documents, length)
        if not torch.equal(restarting_positions(found, position_ids.device), position_ids.expand(batch, -1)):
            raise ValueError(
                f"documents={BY_POSITIONS!r}, but position_ids do not count from 0 by ones within each document"
            )
        return found
    if len(documents) != batch:
        raise ValueError(f"documents tells the starts of {len(documents)} rows, but there are {batch}")
    return Documents.of_rows(documents, length)


def restarting_positions(documents: Documents, device: torch.device | str) -> torch.Tensor:
    """Return positions `[batch, length]` int64 that count from 0 in each document of whole rows."""
    rows = []
    for borders in documents.queries:
        places = torch.tensor(borders, device=device)
        rows.append(torch.arange(borders[-1], device=device) - places[:-1].repeat_interleave(places.diff()))
    return torch.stack(rows)


def targets_within(documents: Documents, targets: torch.Tensor) -> torch.Tensor:
    """Return targets `[batch, length]` of whole rows without those that are another document's first token."""
    targets = targets.clone()
    for row, borders in enumerate(documents.queries):
        targets[row, torch.tensor(borders[1:], device=targets.device) - 1] = IGNORE_INDEX
    return targets

"""Packed documents: attention of each token to its own document, as kernel calls on slices of a block.

Documents follow one another in a row. In any part of the row that keeps its order, the tokens of a document are
contiguous, so each document is one slice of a block's queries and one slice of its keys. No query is in two slices, so
no results are merged. Off the diagonal of a split row, at most one document has both keys and queries in a block.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .mask import AttentionMask, Ranges

if TYPE_CHECKING:
    from .base import AttentionKernel

Borders = tuple[int, ...]


@dataclass(frozen=True)
class Documents:
    """The positions of documents in a whole row, or in a block of a row.

    Attributes:
        queries: for each row of the batch, the borders of its documents among the queries: document d has queries
            `borders[d]` to `borders[d + 1]`, perhaps none. The first border is 0, the last the number of queries.
        keys: the same for the keys; in a whole row they are equal.
    """

    queries: tuple[Borders, ...]
    keys: tuple[Borders, ...]

    @classmethod
    def of_rows(cls, starts: Sequence[Sequence[int]], length: int) -> "Documents":
        """Return the documents of a batch of whole rows.

        Args:
            starts: start positions of the documents for each row: 0 first, then in increasing order.
            length: number of tokens in a row.

        Raises:
            ValueError: the starts do not begin with 0, do not increase, or lie beyond the end of the row.
        """
        for row, places in enumerate(starts):
            borders = [*places, length]
            if not places or places[0] != 0 or any(a >= b for a, b in zip(borders, borders[1:], strict=False)):
                raise ValueError(
                    f"documents of row {row} start at {list(places)[:8]}: give 0 first, then places in rising order "
                    f"below the row's {length} tokens"
                )
        rows = tuple((*map(int, places), length) for places in starts)
        return cls(rows, rows)

    @property
    def length(self) -> int:
        """The number of queries in a row. It equals the number of keys if both are the same tokens."""
        return self.queries[0][-1]

    @property
    def checksum(self) -> int:
        """A number that is equal on all ranks with the same documents."""
        return hash(self.queries)

    @property
    def squared_lengths(self) -> int:
        """The sum over all documents of the square of their length: about twice the (query, key) pairs of attention."""
        return sum((end - start) ** 2 for borders in self.queries for start, end in itertools.pairwise(borders))

    def lengthened(self, tokens: int) -> "Documents":
        """Return the documents of whole rows, with the last document of each row extended by the padding."""
        rows = tuple((*borders[:-1], borders[-1] + tokens) for borders in self.queries)
        return Documents(rows, rows)

    def among(self, queries: Ranges, keys: Ranges) -> "Documents":
        """Return the documents of a part of this block; the same part gives the same object."""
        if (queries, keys) not in self._parts:
            self._parts[queries, keys] = Documents(
                tuple(_places(borders, queries) for borders in self.queries),
                tuple(_places(borders, keys) for borders in self.keys),
            )
        return self._parts[queries, keys]

    def cut(self) -> tuple[range, range, "Documents"]:
        """Remove the queries and keys at both ends of the block that no row of the batch needs.

        Returns:
            The remaining queries and keys, possibly none, and the documents among them.
        """
        queries = range(
            min((queries.start for _, queries, _ in self.slices), default=0),
            max((queries.stop for _, queries, _ in self.slices), default=0),
        )
        keys = range(
            min((keys.start for _, _, keys in self.slices), default=0),
            max((keys.stop for _, _, keys in self.slices), default=0),
        )
        return queries, keys, self.among((queries,), (keys,))

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Raise ValueError unless these are the documents of a block with such queries and keys."""
        for what, tensor, rows in (("queries", q, self.queries), ("keys", k, self.keys)):
            if len(rows) != tensor.shape[0] or any(borders[-1] != tensor.shape[1] for borders in rows):
                raise ValueError(
                    f"documents are given for {len(rows)} rows of {rows[0][-1]} {what}, but there are "
                    f"{tensor.shape[0]} rows of {tensor.shape[1]}"
                )

    @property
    def is_single(self) -> bool:
        """Whether all queries and keys of each row belong to one document, so that no separation is needed."""
        whole = slice(0, self.queries[0][-1]), slice(0, self.keys[0][-1])
        return self.slices == [(row, *whole) for row in range(len(self.queries))]

    @functools.cached_property
    def slices(self) -> list[tuple[int, slice, slice]]:
        """The row, queries and keys of each document that has both queries and keys."""
        return [
            (row, slice(*queries), slice(*keys))
            for row, borders in enumerate(zip(self.queries, self.keys, strict=True))
            for queries, keys in zip(*(zip(each, each[1:], strict=False) for each in borders), strict=True)
            if queries[0] < queries[1] and keys[0] < keys[1]
        ]

    @functools.cached_property
    def joined(self) -> "Documents":
        """The documents of all rows after concatenating the rows into one; queries and keys are the same tokens."""
        if len(self.queries) == 1:
            return self
        borders = [row * self.length + border for row, each in enumerate(self.queries) for border in each[:-1]]
        row = (*borders, len(self.queries) * self.length)
        return Documents((row,), (row,))

    def cumulative_lengths(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the borders of the documents of one row, int32, and the longest document's length.

        That is how kernels take them where queries and keys are the same tokens.
        """
        if device not in self._cumulative:
            lengths = torch.tensor(sorted(set(self.queries[0])), dtype=torch.int32)  # documents without tokens left out
            self._cumulative[device] = lengths.to(device), int(lengths.diff().max())
        return self._cumulative[device]

    @functools.cached_property
    def _parts(self) -> dict[tuple[Ranges, Ranges], "Documents"]:
        return {}

    @functools.cached_property
    def _cumulative(self) -> dict[torch.device, tuple[torch.Tensor, int]]:
        return {}


def _places(borders: Borders, tokens: Ranges) -> Borders:
    """Return the number of `tokens` before each border."""
    return tuple(sum(min(max(border - part.start, 0), len(part)) for part in tokens) for border in borders)


def forward(
    kernel: "AttentionKernel", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: AttentionMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a block whose mask has documents; arguments and results as of `AttentionKernel.forward`."""
    documents = mask.documents
    assert documents is not None
    documents.check(q, k)
    if _in_one_call(kernel, mask):
        joined_q, joined_k, joined_v = (x.flatten(0, 1)[None] for x in (q, k, v))
        joined = replace(mask, documents=documents.joined)
        out, lse = kernel._forward_in_parts(joined_q, joined_k, joined_v, scale, joined)
        return out.view(q.shape), lse[0].unflatten(1, (q.shape[0], -1)).transpose(0, 1)
    plain = replace(mask, documents=None)
    out = torch.zeros_like(q)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=lse_dtype)
    for row, queries, keys in documents.slices:
        rows = slice(row, row + 1)
        part = kernel.forward(q[rows, queries], k[rows, keys], v[rows, keys], scale, plain)
        for whole, result in zip((out[rows, queries], lse[rows, :, queries]), part, strict=True):
            whole.copy_(result)
    return out, lse


def backward(
    kernel: "AttentionKernel",
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    mask: AttentionMask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients through a block whose mask has documents; see `AttentionKernel.backward`."""
    documents = mask.documents
    assert documents is not None
    documents.check(q, k)
    if _in_one_call(kernel, mask):
        joined_dout, joined_q, joined_k, joined_v, joined_out = (x.flatten(0, 1)[None] for x in (dout, q, k, v, out))
        joined_lse = lse.transpose(0, 1).flatten(1)[None].contiguous()
        joined = replace(mask, documents=documents.joined)
        joined_dq, joined_dk, joined_dv = kernel._backward_in_parts(
            joined_dout, joined_q, joined_k, joined_v, joined_out, joined_lse, scale, joined
        )
        return joined_dq.view(q.shape), joined_dk.view(k.shape), joined_dv.view(v.shape)
    plain = replace(mask, documents=None)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for row, queries, keys in documents.slices:
        rows = slice(row, row + 1)
        part_dout, part_q, part_out = (x[rows, queries] for x in (dout, q, out))
        part_k, part_v = k[rows, keys], v[rows, keys]
        part_lse = lse[rows, :, queries].contiguous()
        part_grads = kernel.backward(part_dout, part_q, part_k, part_v, part_out, part_lse, scale, plain)
        dq[rows, queries], dk[rows, keys], dv[rows, keys] = part_grads
    return dq, dk, dv


def _in_one_call(kernel: "AttentionKernel", mask: AttentionMask) -> bool:
    """Return whether the kernel takes all documents of a block at once."""
    return kernel.takes_documents and mask.causal

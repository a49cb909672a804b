"""Cut a block of attention into parts that a backend can index: by batch rows first, then by heads."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """A part of a block.

    Attributes:
        rows: the rows of the batch.
        heads: the query heads.
        kv_heads: the key heads that these query heads read.
    """

    rows: slice
    heads: slice
    kv_heads: slice

    def of_queries(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return views of `[batch, seq, heads, head_dim]` tensors."""
        return [tensor[self.rows, :, self.heads] for tensor in tensors]

    def of_keys(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return views of `[batch, seq, kv_heads, head_dim]` tensors."""
        return [tensor[self.rows, :, self.kv_heads] for tensor in tensors]

    def of_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Return a view of an lse `[batch, heads, seq]`."""
        return lse[self.rows, self.heads]


def parts_within(limit: int, q: torch.Tensor, k: torch.Tensor) -> list[Part]:
    """Return parts of a block in which neither q nor k has more than `limit` elements.

    Query heads that share a key head are put into different parts only if one such group exceeds the limit by itself.
    The gradients of that key head are then sums over parts.

    Args:
        limit: maximum number of elements in a tensor.
        q: `[batch, seq_q, heads, head_dim]`.
        k: `[batch, seq_k, kv_heads, head_dim]`.

    Raises:
        ValueError: a single head of a single row has more than `limit` elements.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_k, kv_heads = k.shape[1:3]
    fit_q, fit_k = limit // (seq_q * head_dim), limit // (seq_k * head_dim)  # heads of one row that fit
    if min(fit_q, fit_k) < 1:
        raise ValueError(
            f"one head of {max(seq_q, seq_k)} tokens x {head_dim} has more than the {limit} elements that this "
            "attention kernel can index: use another kernel, more ranks or shorter rows"
        )
    rows = min(fit_q // heads, fit_k // kv_heads)
    head_groups = [(slice(0, heads), slice(0, kv_heads))] if rows else _head_groups(heads, kv_heads, fit_q, fit_k)
    return [Part(row, *group) for row in _even_slices(batch, max(1, rows)) for group in head_groups]


def _head_groups(heads: int, kv_heads: int, fit_q: int, fit_k: int) -> list[tuple[slice, slice]]:
    """Return (query heads, key heads) of each part: at most `fit_q` and `fit_k` of them."""
    repeats = heads // kv_heads
    if fit_q >= repeats:  # whole groups of query heads that share a key head
        groups = _even_slices(kv_heads, min(fit_q // repeats, fit_k))
        return [(slice(group.start * repeats, group.stop * repeats), group) for group in groups]
    return [
        (slice(kv_head * repeats + part.start, kv_head * repeats + part.stop), slice(kv_head, kv_head + 1))
        for kv_head in range(kv_heads)
        for part in _even_slices(repeats, fit_q)
    ]


def _even_slices(count: int, most: int) -> list[slice]:
    """Cut range(count) into the fewest slices of at most `most`, of nearly equal length."""
    step = math.ceil(count / math.ceil(count / most))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]

"""What every parallel mode offers: how a sequence is split over a group of ranks, and attention over the split."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from ..kernels import AttentionKernel, AttentionMask

Residuals = tuple[torch.Tensor, ...]


class ParallelMode(ABC):
    """A way to spread one row over the ranks of a sequence-parallel group.

    A row is cut into `multiple_of(size)` equal chunks, and `chunk_indices` says which of them a rank holds, in order.
    Attention is a pair of pure functions; what `forward` returns besides its output is kept for `backward`.
    """

    name: str

    def multiple_of(self, size: int) -> int:
        """A row's length must be a multiple of this number (callers pad) when `size` ranks share it."""
        return size

    def chunk_indices(self, rank: int, size: int) -> list[int]:
        """Which of the row's `multiple_of(size)` chunks `rank` holds, in the order in which it holds them."""
        chunks = self.multiple_of(size) // size
        return list(range(rank * chunks, (rank + 1) * chunks))

    def shard(self, tensor: torch.Tensor, rank: int, size: int, dim: int = 1) -> torch.Tensor:
        """This rank's part of `tensor`, whose length along `dim` is a multiple of `multiple_of(size)`."""
        chunks = tensor.unflatten(dim, (self.multiple_of(size), -1))
        index = torch.tensor(self.chunk_indices(rank, size), device=tensor.device)
        return chunks.index_select(dim, index).flatten(dim, dim + 1)

    def unshard(self, shards: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The whole tensor from the shards of all ranks, in rank order: the inverse of `shard`."""
        size = len(shards)
        order = [chunk for rank in range(size) for chunk in self.chunk_indices(rank, size)]
        index = torch.tensor(order, device=shards[0].device).argsort()
        chunks = torch.cat(shards, dim).unflatten(dim, (self.multiple_of(size), -1))
        return chunks.index_select(dim, index).flatten(dim, dim + 1)

    def check(self, config: Any, seq_length: int, size: int) -> None:
        """Raise ValueError if a model of this `config` cannot train rows of `seq_length` tokens on `size` ranks."""
        if seq_length < self.multiple_of(size):
            raise ValueError(
                f"seq_length {seq_length} is too short for seq_algo {self.name} on {size} ranks: "
                f"use at least {self.multiple_of(size)} tokens"
            )

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        mask: AttentionMask,
        kernel: AttentionKernel,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, Residuals]:
        """Attention of this rank's queries over the whole row.

        Args:
            q: `[batch, seq / size, heads, head_dim]`, this rank's shard.
            k: `[batch, seq / size, kv_heads, head_dim]`, this rank's shard; v likewise.
            scale: what scores are multiplied by.
            mask: causal over the whole row.
            kernel: computes one block.
            group: the ranks that share the row; None for one process.

        Returns:
            out, shaped and typed like q, and the residuals.
        """

    @abstractmethod
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        residuals: Residuals,
        *,
        scale: float,
        mask: AttentionMask,
        kernel: AttentionKernel,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of this rank's q, k and v, in their dtype, summed over all ranks that used them."""


def require_plain_causal(mask: AttentionMask, mode: str) -> None:
    """Raise ValueError for a mask that a split row cannot honour: blocks of other ranks know no distances."""
    if not mask.causal or mask.window is not None:
        raise ValueError(f"{mode} splits the row and honours only a plain causal mask, got {mask}; use data_parallel")


def accumulator(first: torch.Tensor, terms: int) -> torch.Tensor:
    """A tensor that holds the first of several terms and that the others are summed or merged into.

    Args:
        first: a kernel's result.
        terms: how many there are at most. More than two are accumulated in float32 (or wider); a sum of two is rounded
            once either way, so it stays in the kernel's dtype, and in place.
    """
    return first.to(torch.promote_types(first.dtype, torch.float32)) if terms > 2 else first

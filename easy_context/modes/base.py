"""The base class of all parallel modes: it splits rows over ranks and computes attention over the shards."""

from typing import Any

import torch
import torch.distributed as dist

from ..kernels import AttentionMask, check_kernel, check_kernel_name, select_kernel
from ..kernels.base import AttentionKernel
from ..kernels.mask import Ranges
from ..mesh import CurrentMesh, CurrentRanks, Mesh, Ranks, sequence_size

Residuals = tuple[torch.Tensor, ...]


class ParallelMode:
    """A way to spread one row over the ranks that share it.

    A row is cut into `multiple_of` equal chunks, and `chunk_indices` returns the chunks that a rank holds, in order.
    Splitting depends only on ranks and sizes; attention also needs the ranks' process group.

    `forward` and `backward` handle the case of one process and check the mask for all modes. Subclasses implement
    `_forward` and `_backward` for several ranks. The residuals that `forward` returns are kept for `backward`.
    """

    name: str
    splits_rows = True  # False: every rank has rows of its own

    def __init__(self, ranks: Ranks | CurrentRanks) -> None:
        """Create the mode for `ranks`, the ranks that share a row."""
        self.ranks = ranks

    @classmethod
    def over(cls, mesh: CurrentMesh | Mesh) -> "ParallelMode":
        """Return this mode over the ranks of `mesh` that share a row."""
        return cls(mesh.sequence)

    def make_groups(self) -> None:
        """Create the process groups of this mode now instead of at their first use; collective over all ranks."""
        self.ranks.group  # noqa: B018

    # --- Checks that need no process group ---

    @classmethod
    def sequence_size(cls, requested: int | None, processes: int) -> int:
        """Return how many of `processes` share a row. `requested` is the user's number, or None for all.

        Raises:
            ValueError: the number does not divide the processes, or this mode does not support it.
        """
        return sequence_size(requested, processes)

    @classmethod
    def ring_degree(cls, requested: int | None, size: int, heads: int | None = None) -> int:
        """Return how many of the `size` ranks that share a row form a ring of usp_attn; 1 in the other modes.

        Args:
            requested: number that the user requests; None for the mode's choice.
            size: number of ranks that share a row.
            heads: number of query heads of the model, if known.

        Raises:
            ValueError: the mode does not support the requested number.
        """
        if requested not in (None, 1):
            raise ValueError(
                f"ring_degree {requested} has no meaning with seq_algo {cls.name}: leave it out or choose usp_attn"
            )
        return 1

    @classmethod
    def check_kernel_name(cls, name: str) -> None:
        """Raise ValueError if an attn_kernel does not exist or this mode's engine does not support it."""
        check_kernel_name(name)

    @classmethod
    def check_kernel(
        cls, name: str, device: torch.device, dtype: torch.dtype, head_dim: int, documents: bool = False
    ) -> None:
        """Raise ValueError if `select_kernel` would find no usable kernel; see `kernels.check_kernel`."""
        check_kernel(name, device, dtype, head_dim, documents)

    @classmethod
    def check_window(cls, window: int | None) -> None:
        """Raise ValueError if this mode's engine cannot limit attention to the last `window` keys (None: no limit)."""

    @classmethod
    def select_kernel(
        cls, name: str, device: torch.device, dtype: torch.dtype, head_dim: int, documents: bool = False
    ) -> AttentionKernel:
        """Return the kernel that computes this mode's blocks; see `kernels.select_kernel`."""
        return select_kernel(name, device, dtype, head_dim, documents)

    def check(self, config: Any, seq_length: int) -> None:
        """Raise ValueError if a model of this `config` cannot train rows of `seq_length` tokens in this mode."""
        if seq_length < self.multiple_of:
            raise ValueError(
                f"seq_length {seq_length} is too short for seq_algo {self.name} on {self.ranks.size} ranks: "
                f"use at least {self.multiple_of} tokens"
            )

    # --- How a row is split ---

    @property
    def multiple_of(self) -> int:
        """The divisor of every row's length; callers pad rows to a multiple of it."""
        return self.ranks.size

    def chunk_indices(self, rank: int) -> list[int]:
        """Return the indices of the row's `multiple_of` chunks that `rank` holds, in the order of its shard."""
        chunks = self.multiple_of // self.ranks.size
        return list(range(rank * chunks, (rank + 1) * chunks))

    def places(self, rank: int, tokens: int) -> Ranges:
        """Return the positions in the row that `rank` holds, in the order of its shard of `tokens` tokens."""
        chunks = self.chunk_indices(rank)
        length = tokens // len(chunks)
        return tuple(range(chunk * length, (chunk + 1) * length) for chunk in chunks)

    def shard(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's part of `tensor`, whose length along `dim` is a multiple of `multiple_of`."""
        chunks = tensor.unflatten(dim, (self.multiple_of, -1))
        index = torch.tensor(self.chunk_indices(self.ranks.rank), device=tensor.device)
        return chunks.index_select(dim, index).flatten(dim, dim + 1)

    def unshard(self, shards: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Return the whole tensor from the shards of all ranks, in rank order: the inverse of `shard`."""
        order = [chunk for rank in range(self.ranks.size) for chunk in self.chunk_indices(rank)]
        index = torch.tensor(order, device=shards[0].device).argsort()
        chunks = torch.cat(shards, dim).unflatten(dim, (self.multiple_of, -1))
        return chunks.index_select(dim, index).flatten(dim, dim + 1)

    # --- Attention over the split ---

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        mask: AttentionMask,
        kernel: AttentionKernel,
    ) -> tuple[torch.Tensor, Residuals]:
        """Compute attention of this rank's queries over the whole row.

        Args:
            q: `[batch, seq / size, heads, head_dim]`, this rank's shard.
            k: `[batch, seq / size, kv_heads, head_dim]`, this rank's shard; v likewise.
            scale: factor for the attention scores.
            mask: mask of the whole row. A split row supports only a causal mask, optionally with a window or documents.
            kernel: kernel that computes one block.

        Returns:
            The output, with q's shape and dtype, and the residuals.

        Raises:
            ValueError: this mode does not support the mask or the number of heads.
        """
        if self._is_local:
            out, lse = kernel.forward(q, k, v, scale, mask)
            return out, (lse,)
        if not mask.causal:
            raise ValueError(f"{self.name} splits the row and honours only causal masks, got {mask}; use data_parallel")
        return self._forward(q, k, v, scale, mask, kernel)

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of this rank's q, k and v, in their dtype, summed over all ranks that used them."""
        (lse,) = residuals
        if self._is_local:
            return kernel.backward(dout, q, k, v, out, lse, scale, mask)
        return self._backward(dout, q, k, v, out, lse, scale, mask, kernel)

    @property
    def _is_local(self) -> bool:
        """Whether this rank has the whole row, so that the kernel alone computes attention."""
        return not self.splits_rows or self.ranks.size == 1

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that share a row."""
        if (group := self.ranks.group) is None:
            raise RuntimeError(f"{self.name} without a process group can only split rows: build it on a CurrentMesh")
        return group

    def _forward(self, q, k, v, scale: float, mask: AttentionMask, kernel: AttentionKernel):
        raise NotImplementedError

    def _backward(self, dout, q, k, v, out, lse, scale: float, mask: AttentionMask, kernel: AttentionKernel):
        raise NotImplementedError


def accumulator(first: torch.Tensor, terms: int) -> torch.Tensor:
    """Return a tensor with the first of several terms, into which the other terms are summed or merged.

    Args:
        first: a kernel's result.
        terms: maximum number of terms. More than two are accumulated in float32 or wider. A sum of two is rounded only
            once in any case, so it stays in the kernel's dtype and is computed in place.
    """
    return first.to(torch.promote_types(first.dtype, torch.float32)) if terms > 2 else first

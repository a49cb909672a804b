"""Ulysses: all-to-alls turn sequence shards into head shards for attention on whole rows, and turn its output back.

This is DeepSpeed Ulysses, arXiv 2309.14509. If the number of key heads is not a multiple of the number of ranks, each
key head is repeated so that every rank gets the same number. The gradients of the copies are summed.
"""

import math

import torch

from ..communication import gather_heads, scatter_heads
from .base import ParallelMode


class UlyssesAttention(ParallelMode):
    """Ulysses attention. The number of query heads must be divisible by the number of ranks."""

    name = "ulysses_attn"

    def check(self, config, seq_length):
        super().check(config, seq_length)
        check_query_heads(config.num_attention_heads, self.ranks.size)

    def _forward(self, q, k, v, scale, mask, kernel):
        check_query_heads(q.shape[2], self.ranks.size)
        k, v = repeat_heads((k, v), self.ranks.size)
        out, lse = kernel.forward(*scatter_heads((q, k, v), self.group), scale, mask)
        return gather_heads((out,), self.group)[0], (lse,)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        group, repeats = self.group, kv_repeats(k.shape[2], self.ranks.size)
        k, v = repeat_heads((k, v), self.ranks.size)
        # Recomputed layers have q, k, v only as sequence shards, so they are sent again. Two messages, not one, because
        # what is sent is free again before the second one is put together.
        dout, out = scatter_heads((dout, out), group)
        q, k, v = scatter_heads((q, k, v), group)
        dq, dk, dv = gather_heads(kernel.backward(dout, q, k, v, out, lse, scale, mask), group)
        return dq, sum_copies(dk, repeats), sum_copies(dv, repeats)


def check_query_heads(heads: int, size: int) -> None:
    """Raise ValueError unless `size` ranks can share `heads` query heads evenly."""
    if heads % size:
        raise ValueError(
            f"seq_algo ulysses_attn cannot split {heads} query heads over {size} ranks: use a number of ranks "
            f"that divides {heads}, or zigzag_ring_attn or dist_flash_attn, which take any"
        )


def kv_repeats(kv_heads: int, size: int) -> int:
    """Return how often to repeat each key head so that `size` ranks get the same number of heads."""
    return math.lcm(kv_heads, size) // kv_heads


def repeat_heads(tensors: tuple[torch.Tensor, ...], size: int) -> tuple[torch.Tensor, ...]:
    """Return k and v with each head repeated `kv_repeats` times, with the copies next to each other."""
    repeats = kv_repeats(tensors[0].shape[2], size)
    return tuple(x.repeat_interleave(repeats, dim=2) for x in tensors) if repeats > 1 else tensors


def sum_copies(grad: torch.Tensor, repeats: int) -> torch.Tensor:
    """Sum the gradients of the copies of each key head, in float32 or wider."""
    if repeats == 1:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.unflatten(2, (-1, repeats)).sum(dim=3, dtype=wide).to(grad.dtype)

"""Ulysses: an all-to-all turns sequence shards into head shards, attention runs on whole rows, another turns it back.

DeepSpeed Ulysses, arXiv 2309.14509. Where the ranks outnumber the key heads, or do not divide them, each key head is
repeated so that every rank gets the same number; the gradients of the copies are summed.
"""

import math

import torch

from ..communication import gather_heads, group_size, scatter_heads
from .base import ParallelMode, require_plain_causal


class UlyssesAttention(ParallelMode):
    """Needs query heads divisible by the number of ranks."""

    name = "ulysses_attn"

    def check(self, config, seq_length, size):
        super().check(config, seq_length, size)
        check_query_heads(config.num_attention_heads, size)

    def forward(self, q, k, v, *, scale, mask, kernel, group):
        size = group_size(group)
        if size == 1:
            out, lse = kernel.forward(q, k, v, scale, mask)
            return out, (lse,)
        require_plain_causal(mask, self.name)
        check_query_heads(q.shape[2], size)
        out, lse = kernel.forward(*_scatter_qkv(q, k, v, group), scale, mask)
        return gather_heads(out, group), (lse,)

    def backward(self, dout, q, k, v, out, residuals, *, scale, mask, kernel, group):
        size = group_size(group)
        if size == 1:
            return kernel.backward(dout, q, k, v, out, *residuals, scale, mask)
        heads, kv_heads = q.shape[2], k.shape[2]
        # Recomputed layers have q, k, v only as sequence shards, so they are sent again, together with out and dout.
        dout, out = scatter_heads(_interleave((dout, out), size), group).chunk(2, dim=2)
        grads = kernel.backward(dout, *_scatter_qkv(q, k, v, group), out, *residuals, scale, mask)
        dq, dk, dv = _deinterleave(gather_heads(torch.cat(grads, dim=2), group), [x.shape[2] for x in grads], size)
        repeats = kv_repeats(kv_heads, size)
        dk, dv = (sum_copies(x, repeats) for x in (dk, dv))
        assert dq.shape[2] == heads and dk.shape[2] == kv_heads
        return dq, dk, dv


def check_query_heads(heads: int, size: int) -> None:
    """Raise ValueError unless `size` ranks can share `heads` query heads evenly."""
    if heads % size:
        raise ValueError(
            f"--parallel_mode ulysses_attn cannot split {heads} query heads over {size} ranks: use a number of ranks "
            f"that divides {heads}, or zigzag_ring_attn or dist_flash_attn, which take any"
        )


def kv_repeats(kv_heads: int, size: int) -> int:
    """How often each key head is repeated so that `size` ranks get equally many."""
    return math.lcm(kv_heads, size) // kv_heads


def _scatter_qkv(q, k, v, group):
    """q, k and v as head shards, by one all-to-all; key heads repeated where the ranks do not divide them."""
    size = group_size(group)
    repeats = kv_repeats(k.shape[2], size)
    k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
    heads = [x.shape[2] // size for x in (q, k, v)]
    return scatter_heads(_interleave((q, k, v), size), group).split(heads, dim=2)


def _interleave(tensors: tuple[torch.Tensor, ...], size: int) -> torch.Tensor:
    """Concatenate along heads so that each of `size` equal parts holds that part of every tensor."""
    parts = [tensor.unflatten(2, (size, -1)) for tensor in tensors]
    return torch.cat(parts, dim=3).flatten(2, 3)


def _deinterleave(tensor: torch.Tensor, heads: list[int], size: int) -> list[torch.Tensor]:
    """Undo `_interleave`: `heads` are the heads of each tensor inside one part."""
    return [part.flatten(2, 3) for part in tensor.unflatten(2, (size, -1)).split(heads, dim=3)]


def sum_copies(grad: torch.Tensor, repeats: int) -> torch.Tensor:
    """Sum the gradients of the copies of each key head, in float32 or wider."""
    if repeats == 1:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.unflatten(2, (-1, repeats)).sum(dim=3, dtype=wide).to(grad.dtype)

"""A candidate beside the ring: zigzag with all keys gathered on every rank at once.

Two kernel calls a rank, one for each of its chunks over all keys up to that chunk's end, take the place of one call a
ring step and of merging their results. In return the gather and the sum of the gradients cannot hide behind
computation, and every rank holds the row's keys, values and their gradients. docs/performance.md says what is known;
the package has the ring only.
"""

import torch
import torch.distributed as dist

from easy_context.kernels import FULL, AttentionMask
from easy_context.kernels.base import AttentionKernel
from easy_context.kernels.merge import merge_block_
from easy_context.mesh import Ranks
from easy_context.modes.base import accumulator
from easy_context.modes.zigzag_ring_attn import ZigzagRingAttention

CAUSAL = AttentionMask(causal=True)
ALIGNED_AT_THE_END = ("flash_attn_4", "flash_attn")  # with more keys than queries, the last query sees the last key


class ZigzagAllGather(ZigzagRingAttention):
    """Splits rows as zigzag_ring_attn does, and is exact as well."""

    name = "zigzag_all_gather"

    def _forward(self, q, k, v, scale, mask, kernel):
        keys, values = self._gather(k, v)
        results = [
            _forward(kernel, queries, keys[:, :end], values[:, :end], scale)
            for queries, end in zip(q.chunk(2, dim=1), self._ends(q), strict=True)
        ]
        outs, lses = zip(*results, strict=True)
        return torch.cat(outs, dim=1), (torch.cat(lses, dim=2),)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        keys, values = self._gather(k, v)
        dkv = accumulator(keys.new_empty(0), self.ranks.size).new_zeros(2, *keys.shape)
        dqs = []
        parts = zip(*(x.chunk(2, dim=1) for x in (dout, q, out)), lse.chunk(2, dim=2), strict=True)
        for (dout_part, q_part, out_part, lse_part), end in zip(parts, self._ends(q), strict=True):
            inputs = (dout_part, q_part, keys[:, :end], values[:, :end], out_part, lse_part.contiguous())
            dq, *block = _backward(kernel, *inputs, scale)
            dqs.append(dq)
            for total, grad in zip(dkv, block, strict=True):
                total[:, :end] += grad
        dk, dv = self._sum_home(dkv)
        return torch.cat(dqs, dim=1), dk.to(k.dtype), dv.to(v.dtype)

    def _ends(self, q: torch.Tensor) -> tuple[int, int]:
        """Where in the row the early and the late chunk of this rank end."""
        rank, chunk = self.ranks.rank, q.shape[1] // 2
        return (rank + 1) * chunk, (self.multiple_of - rank) * chunk

    def _gather(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """All keys and values in the row's order: `[2, batch, seq, kv_heads, head_dim]`."""
        kv = torch.stack((k, v))
        size = self.ranks.size
        shards = kv.new_empty(2 * size, *kv.shape[1:])
        dist.all_gather_into_tensor(shards, kv, group=self.group)
        return self.unshard(list(shards.chunk(size)), dim=2)

    def _sum_home(self, dkv: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of dk and dv, summed over ranks: `[2, batch, seq / size, kv_heads, head_dim]`."""
        size = self.ranks.size
        shards = torch.cat([type(self)(Ranks(rank, size)).shard(dkv, dim=2) for rank in range(size)])
        mine = shards.new_empty(2, *shards.shape[1:])
        dist.reduce_scatter_tensor(mine, shards, group=self.group)
        return mine


def _forward(kernel: AttentionKernel, q, k, v, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with queries at the end of the keys: one call if the kernel aligns queries to the end, else two."""
    if kernel.name in ALIGNED_AT_THE_END:
        return kernel._forward(q, k, v, scale, CAUSAL)  # past the check for equal lengths
    first = k.shape[1] - q.shape[1]
    out, lse = kernel.forward(q, k[:, first:], v[:, first:], scale, CAUSAL)
    if first:
        merge_block_(out, lse, *kernel.forward(q, k[:, :first], v[:, :first], scale, FULL))
    return out, lse


def _backward(kernel: AttentionKernel, dout, q, k, v, out, lse, scale: float) -> tuple[torch.Tensor, ...]:
    if kernel.name in ALIGNED_AT_THE_END:
        return kernel._backward(dout, q, k, v, out, lse, scale, CAUSAL)
    first = k.shape[1] - q.shape[1]
    dq, dk, dv = kernel.backward(dout, q, k[:, first:], v[:, first:], out, lse, scale, CAUSAL)
    if not first:
        return dq, dk, dv
    block_dq, *block = kernel.backward(dout, q, k[:, :first], v[:, :first], out, lse, scale, FULL)
    return dq + block_dq, torch.cat((block[0], dk), dim=1), torch.cat((block[1], dv), dim=1)

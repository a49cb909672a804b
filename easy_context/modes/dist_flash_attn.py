"""DistFlashAttn: contiguous shards, and ranks that would idle compute for later ranks (arXiv 2310.03294).

Rank r's queries need the keys of ranks 0..r. In step t, rank r >= t takes the block (q_r, k_{r-t}); rank r < t has no
such block left and computes (q_o, k_r) for the rank o = r - t + W instead, on queries that it receives, and sends the
result back. For odd W every rank has the same work. For even W the blocks of distance W/2 remain, one for each pair of
ranks: the pair shares it, the helper takes the first half of the queries, the owner the second.

In every step rank r sends to r + t and receives from r - t, and results go the opposite way (ranks modulo W).
"""

from dataclasses import dataclass

import torch

from ..communication import Exchange
from ..kernels import FULL
from ..kernels.merge import merge_block_
from .base import ParallelMode, accumulator


@dataclass(frozen=True)
class Step:
    """What one rank does in one step of the schedule, beside its own diagonal block.

    Attributes:
        source: the rank whose keys (an owner) or queries (a helper) arrive; the results go back to it.
        target: the rank that gets our keys, or our queries if it is our helper.
        is_owner: we compute for our own queries, on received keys; else we help `source`, on our own keys.
        has_helper: `target` computes for our queries.
        own_tokens: the tokens of our shard for whose queries we compute as an owner.
        helped_tokens: the tokens of a shard for whose queries a helper computes.
    """

    source: int
    target: int
    is_owner: bool
    has_helper: bool
    own_tokens: slice
    helped_tokens: slice

    def helped(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the helped tokens of `[batch, seq, heads, head_dim]` or of lse `[batch, heads, seq]` tensors."""
        return [x[..., self.helped_tokens] if x.dim() == 3 else x[:, self.helped_tokens] for x in tensors]


def schedule(rank: int, size: int, tokens: int) -> list[Step]:
    """Return the steps of `rank` among `size`, for shards of `tokens` tokens (an even number if `size` is even)."""
    steps = []
    for distance in range(1, size // 2 + 1):
        shared = 2 * distance == size
        steps.append(
            Step(
                source=(rank - distance) % size,
                target=(rank + distance) % size,
                is_owner=rank >= distance,
                has_helper=rank + distance >= size,
                own_tokens=slice(tokens // 2, tokens) if shared else slice(0, tokens),
                helped_tokens=slice(0, tokens // 2) if shared else slice(0, tokens),
            )
        )
    return steps


class DistFlashAttention(ParallelMode):
    """Exact and balanced for any number of ranks, even or odd, and any head layout."""

    name = "dist_flash_attn"

    @property
    def multiple_of(self):
        size = self.ranks.size
        return size if size % 2 else 2 * size  # the shared step cuts a shard in halves

    def _forward(self, q, k, v, scale, mask, kernel):
        size, group = self.ranks.size, self.ranks.group
        steps = schedule(self.ranks.rank, size, q.shape[1])
        kv = torch.stack((k, v))
        arriving = _Inputs(steps[0], kv, (q,), None, group)
        block_out, lse = kernel.forward(q, k, v, scale, mask)
        out = accumulator(block_out, size)
        returning = None
        for step, next_step in zip(steps, [*steps[1:], None], strict=True):
            arrived = arriving.wait()
            if next_step is not None:
                arriving = _Inputs(next_step, kv, (q,), None, group)
            results = Exchange(group)
            if step.is_owner:
                own = step.own_tokens
                merge_block_(out[:, own], lse[..., own], *kernel.forward(q[:, own], *arrived.kv, scale, FULL))
            else:
                for tensor in kernel.forward(*arrived.queries, k, v, scale, FULL):
                    results.send(tensor, step.source)
            if returning is not None:  # the step before's, which travelled while this one computed
                _merge_returned(out, lse, *returning)
            buffers = []
            if step.has_helper:
                buffers = [results.receive(_buffer(x), step.target) for x in step.helped(q, lse)]
            returning = step, buffers, results.start()
        _merge_returned(out, lse, *returning)
        return out.to(q.dtype), (lse,)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        size, group = self.ranks.size, self.ranks.group
        steps = schedule(self.ranks.rank, size, q.shape[1])
        kv = torch.stack((k, v))
        queries = dout, q, out
        arriving = _Inputs(steps[0], kv, queries, lse, group)
        grads = kernel.backward(dout, q, k, v, out, lse, scale, mask)
        dq, *dkv = (accumulator(grad, size + 1) for grad in grads)  # a helper adds its own share, too
        returning = None
        for step, next_step in zip(steps, [*steps[1:], None], strict=True):
            arrived = arriving.wait()
            if next_step is not None:
                arriving = _Inputs(next_step, kv, queries, lse, group)
            results = Exchange(group)
            if step.is_owner:
                own = step.own_tokens
                own_dout, own_q, own_out = (x[:, own] for x in queries)
                own_lse = lse[..., own].contiguous()
                block_dq, *block_dkv = kernel.backward(own_dout, own_q, *arrived.kv, own_out, own_lse, scale, FULL)
                dq[:, own] += block_dq
                results.send(torch.stack(block_dkv), step.source)
            else:
                its_dout, its_q, its_out = arrived.queries
                its_dq, *block_dkv = kernel.backward(its_dout, its_q, k, v, its_out, arrived.lse, scale, FULL)
                for total, part in zip(dkv, block_dkv, strict=True):
                    total += part
                results.send(its_dq, step.source)
            if returning is not None:
                _add_returned(dq, dkv, *returning)
            # A helper returns the gradient of our queries; an owner that used our keys returns theirs.
            (like,) = step.helped(q) if step.has_helper else (kv,)
            returning = step, results.receive(_buffer(like), step.target), results.start()
        _add_returned(dq, dkv, *returning)
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)


class _Inputs:
    """What one step needs from another rank, on its way: keys for an owner, queries for a helper."""

    def __init__(self, step: Step, kv: torch.Tensor, queries: tuple[torch.Tensor, ...], lse, group) -> None:
        """Post the exchange: `kv` `[2, b, s, kv_heads, d]` or helped tokens of `queries` go out, the like come in."""
        *helped, helped_lse = step.helped(*queries, lse) if lse is not None else (*step.helped(*queries), None)
        self._exchange = Exchange(group)
        self._exchange.send(torch.stack(helped) if step.has_helper else kv, step.target)
        shape = kv.shape if step.is_owner else (len(helped), *helped[0].shape)
        self._received = self._exchange.receive(kv.new_empty(shape), step.source)
        self.lse = None
        if lse is not None and step.has_helper:
            self._exchange.send(helped_lse, step.target)
        if lse is not None and not step.is_owner:
            self.lse = self._exchange.receive(_buffer(helped_lse), step.source)
        self._exchange.start()

    def wait(self) -> "_Inputs":
        self._exchange.wait()
        return self

    @property
    def kv(self) -> torch.Tensor:
        return self._received

    @property
    def queries(self) -> torch.Tensor:
        return self._received


def _buffer(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised contiguous tensor to receive into."""
    return like.new_empty(like.shape)


def _merge_returned(out, lse, step: Step, buffers: list[torch.Tensor], exchange: Exchange) -> None:
    exchange.wait()
    if buffers:
        merge_block_(out[:, step.helped_tokens], lse[..., step.helped_tokens], *buffers)


def _add_returned(dq, dkv, step: Step, received: torch.Tensor, exchange: Exchange) -> None:
    exchange.wait()
    if step.has_helper:
        dq[:, step.helped_tokens] += received
    else:
        for total, part in zip(dkv, received, strict=True):
            total += part

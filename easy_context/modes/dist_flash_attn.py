"""DistFlashAttn: contiguous shards, where ranks that would be idle compute for later ranks (arXiv 2310.03294).

Rank r's queries need the keys of ranks 0..r. In step t, rank r >= t takes the block (q_r, k_{r-t}); rank r < t has no
such block left. Instead it receives queries, computes (q_o, k_r) for the rank o = r - t + W, and sends the result back.
For odd W every rank has the same work. For even W the blocks of distance W/2 remain, one for each pair of ranks. Each
pair shares its block: the helper computes the first half of the queries, the owner the second half.

In every step rank r sends to r + t and receives from r - t. Results travel in the opposite direction (ranks modulo W).
"""

from dataclasses import dataclass

import torch

from ..communication import Exchange
from ..kernels import AttentionMask
from ..kernels.mask import Block
from ..kernels.merge import merge_block_
from .base import ParallelMode, accumulator


@dataclass(frozen=True)
class Step:
    """The work of one rank in one step of the schedule, in addition to its diagonal block.

    Attributes:
        source: rank that sends us its keys (if we are an owner) or queries (if we are a helper) and gets results back.
        target: rank that receives our keys, or our queries if it is our helper.
        is_owner: whether we use our own queries and received keys; otherwise we help `source` with our own keys.
        has_helper: whether `target` computes for our queries.
        block: block that we compute; None if window and documents mask all of it.
        target_block: block that `target` computes.
    """

    source: int
    target: int
    is_owner: bool
    has_helper: bool
    block: Block | None
    target_block: Block | None


def schedule(rank: int, size: int, tokens: int, mask: AttentionMask) -> list[Step]:
    """Return the steps of `rank` among `size`, for shards of `tokens` tokens (an even number if `size` is even)."""

    def block_of(rank: int, distance: int) -> Block | None:
        """Return the block that `rank` computes: for its own queries as an owner, or for those of a later rank."""
        is_owner = rank >= distance
        query_rank, key_rank = (rank, rank - distance) if is_owner else (rank - distance + size, rank)
        queries, keys = (range(each * tokens, (each + 1) * tokens) for each in (query_rank, key_rank))
        first = tokens // 2 if is_owner and 2 * distance == size else 0
        last = tokens // 2 if not is_owner and 2 * distance == size else tokens
        return mask.block((queries[first:last],), (keys,), first)

    steps = []
    for distance in range(1, size // 2 + 1):
        target = (rank + distance) % size
        steps.append(
            Step(
                source=(rank - distance) % size,
                target=target,
                is_owner=rank >= distance,
                has_helper=rank + distance >= size,
                block=block_of(rank, distance),
                target_block=block_of(target, distance),
            )
        )
    return steps


class DistFlashAttention(ParallelMode):
    """Exact and balanced for any number of ranks, even or odd, and any head layout."""

    name = "dist_flash_attn"

    @property
    def multiple_of(self):
        size = self.ranks.size
        return size if size % 2 else 2 * size  # the shared step splits a shard in half

    def _forward(self, q, k, v, scale, mask, kernel):
        rank, size, group = self.ranks.rank, self.ranks.size, self.group
        steps = schedule(rank, size, q.shape[1], mask)
        kv = torch.stack((k, v))
        arriving = _Inputs(steps[0], kv, (q,), None, group)
        block_out, lse = kernel.forward(q, k, v, scale, mask.among(self.places(rank, q.shape[1])))
        out = accumulator(block_out, size)
        returning = None
        for step, next_step in zip(steps, [*steps[1:], None], strict=True):
            arrived = arriving.wait()
            if next_step is not None:
                arriving = _Inputs(next_step, kv, (q,), None, group)
            results = Exchange(group)
            if block := step.block:
                if step.is_owner:
                    part = kernel.forward(q[:, block.queries], *arrived.kv, scale, block.mask)
                    merge_block_(out[:, block.queries], lse[..., block.queries], *part)
                else:
                    keys = k[:, block.keys], v[:, block.keys]
                    for tensor in kernel.forward(*arrived.queries, *keys, scale, block.mask):
                        results.send(tensor, step.source)
            if returning is not None:  # results of the previous step, sent while this one computed
                _merge_returned(out, lse, *returning)
            buffers = []
            if step.has_helper and (helped := step.target_block):
                ours = q[:, helped.queries], lse[..., helped.queries]
                buffers = [results.receive(_buffer(x), step.target) for x in ours]
            returning = step, buffers, results.start()
        assert returning is not None  # there was at least one step
        _merge_returned(out, lse, *returning)
        return out.to(q.dtype), (lse,)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        rank, size, group = self.ranks.rank, self.ranks.size, self.group
        steps = schedule(rank, size, q.shape[1], mask)
        kv = torch.stack((k, v))
        queries = dout, q, out
        arriving = _Inputs(steps[0], kv, queries, lse, group)
        grads = kernel.backward(dout, q, k, v, out, lse, scale, mask.among(self.places(rank, q.shape[1])))
        dq, *dkv = (accumulator(grad, size + 1) for grad in grads)  # a helper adds its own share, too
        returning = None
        for step, next_step in zip(steps, [*steps[1:], None], strict=True):
            arrived = arriving.wait()
            if next_step is not None:
                arriving = _Inputs(next_step, kv, queries, lse, group)
            results = Exchange(group)
            if block := step.block:
                if step.is_owner:
                    own_dout, own_q, own_out = (x[:, block.queries] for x in queries)
                    own_lse = lse[..., block.queries].contiguous()
                    block_dq, *block_dkv = kernel.backward(
                        own_dout, own_q, *arrived.kv, own_out, own_lse, scale, block.mask
                    )
                    dq[:, block.queries] += block_dq
                    results.send(torch.stack(block_dkv), step.source)
                else:
                    its_dout, its_q, its_out = arrived.queries
                    keys = k[:, block.keys], v[:, block.keys]
                    its_dq, *block_dkv = kernel.backward(
                        its_dout, its_q, *keys, its_out, arrived.lse, scale, block.mask
                    )
                    for total, part in zip(dkv, block_dkv, strict=True):
                        total[:, block.keys] += part
                    results.send(its_dq, step.source)
            if returning is not None:
                _add_returned(dq, dkv, *returning)
            received = None
            if other := step.target_block:
                # A helper returns the gradient of our queries; an owner that used our keys returns theirs.
                like = q[:, other.queries] if step.has_helper else kv[:, :, other.keys]
                received = results.receive(_buffer(like), step.target)
            returning = step, received, results.start()
        assert returning is not None
        _add_returned(dq, dkv, *returning)
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)


class _Inputs:
    """A pending exchange for one step: it brings keys to an owner, or queries to a helper."""

    def __init__(self, step: Step, kv: torch.Tensor, queries: tuple[torch.Tensor, ...], lse, group) -> None:
        """Start sending keys of `kv` `[2, b, s, kv_heads, d]` or tokens of `queries`, and receiving the same."""
        self._exchange = Exchange(group)
        self._received: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        if theirs := step.target_block:
            if step.has_helper:
                self._exchange.send(torch.stack([x[:, theirs.queries] for x in queries]), step.target)
            else:
                self._exchange.send(kv[:, :, theirs.keys], step.target)
        if ours := step.block:
            shape = kv[:, :, ours.keys].shape if step.is_owner else (len(queries), *queries[0][:, ours.queries].shape)
            self._received = self._exchange.receive(kv.new_empty(shape), step.source)
        if lse is not None and step.has_helper and theirs:
            self._exchange.send(lse[..., theirs.queries], step.target)
        if lse is not None and not step.is_owner and ours:
            self.lse = self._exchange.receive(_buffer(lse[..., ours.queries]), step.source)
        self._exchange.start()

    def wait(self) -> "_Inputs":
        self._exchange.wait()
        return self

    @property
    def kv(self) -> torch.Tensor:
        assert self._received is not None  # the step has a block
        return self._received

    @property
    def queries(self) -> torch.Tensor:
        assert self._received is not None
        return self._received


def _buffer(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised contiguous tensor to receive into."""
    return like.new_empty(like.shape)


def _merge_returned(out, lse, step: Step, buffers: list[torch.Tensor], exchange: Exchange) -> None:
    exchange.wait()
    if buffers and (block := step.target_block):
        merge_block_(out[:, block.queries], lse[..., block.queries], *buffers)


def _add_returned(dq, dkv, step: Step, received: torch.Tensor | None, exchange: Exchange) -> None:
    exchange.wait()
    block = step.target_block
    if received is None or block is None:
        return
    if step.has_helper:
        dq[:, block.queries] += received
    else:
        for total, part in zip(dkv, received, strict=True):
            total[:, block.keys] += part

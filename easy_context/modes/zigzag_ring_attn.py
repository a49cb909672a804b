"""Zigzag ring attention: keys and values travel a ring, and each rank holds one early and one late chunk of the row.

Ring attention is arXiv 2310.01889. With 2W chunks, rank r holds chunks r and 2W-1-r, so that under a causal mask every
rank has the same work in every step. After the first step, either all its queries attend to the first half of the
received keys, or the second half of its queries attends to all of them.
"""

import torch

from ..communication import Exchange, ring_exchange
from ..kernels import AttentionMask
from ..kernels.mask import Block
from ..kernels.merge import merge_block_
from .base import ParallelMode, accumulator


class ZigzagRingAttention(ParallelMode):
    """Exact for any number of ranks and any head layout."""

    name = "zigzag_ring_attn"

    @property
    def multiple_of(self):
        return 2 * self.ranks.size

    def chunk_indices(self, rank):
        return [rank, self.multiple_of - 1 - rank]

    def _forward(self, q, k, v, scale, mask, kernel):
        rank, size = self.ranks.rank, self.ranks.size
        kv = torch.stack((k, v))  # one buffer, one message
        for step in range(size):
            if step + 1 < size:
                next_kv, exchange = self._exchange_keys(k, v, kv, step + 1, mask)
            if step == 0:
                block_out, lse = kernel.forward(q, k, v, scale, mask.among(self.places(rank, q.shape[1])))
                out = accumulator(block_out, size)
            elif block := self._block(rank, rank - step, q.shape[1], mask):
                keys, values = self._keys_of(block, kv, mask)
                part = kernel.forward(q[:, block.queries], keys, values, scale, block.mask)
                merge_block_(out[:, block.queries], lse[..., block.queries], *part)
            if step + 1 < size:
                exchange.wait()
                kv = next_kv
        return out.to(q.dtype), (lse,)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        rank, size = self.ranks.rank, self.ranks.size
        kv = torch.stack((k, v))
        returning = None
        for step in range(size):
            if step + 1 < size:
                next_kv, exchange = self._exchange_keys(k, v, kv, step + 1, mask)
            if step == 0:
                own_mask = mask.among(self.places(rank, q.shape[1]))
                dq, *dkv = (
                    accumulator(grad, size) for grad in kernel.backward(dout, q, k, v, out, lse, scale, own_mask)
                )
            else:
                block_dkv = None
                if block := self._block(rank, rank - step, q.shape[1], mask):
                    keys, values = self._keys_of(block, kv, mask)
                    block_dout, block_q, block_out = (x[:, block.queries] for x in (dout, q, out))
                    block_lse = lse[..., block.queries].contiguous()
                    block_dq, *block_dkv = kernel.backward(
                        block_dout, block_q, keys, values, block_out, block_lse, scale, block.mask
                    )
                    dq[:, block.queries] += block_dq
                if returning is not None:
                    self._add_returned(dkv, *returning)
                returning = self._send_home(block_dkv, k, step, mask)
            if step + 1 < size:
                exchange.wait()
                kv = next_kv
        assert returning is not None  # there were at least two steps
        self._add_returned(dkv, *returning)
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)

    def _block(self, query_rank: int, key_rank: int, tokens: int, mask: AttentionMask) -> Block | None:
        """Return the block of one rank's queries and another rank's keys (rank numbers wrap around).

        All queries attend to the early chunk of an earlier rank. The late chunk of the queries attends to all keys of a
        later rank.
        """
        size = self.ranks.size
        return mask.block(self.places(query_rank % size, tokens), self.places(key_rank % size, tokens))

    def _exchange_keys(
        self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, step: int, mask: AttentionMask
    ) -> tuple[torch.Tensor, Exchange]:
        """Start the exchange that brings the keys and values of `step`.

        In the ring, `kv` of the previous step moves on to the next rank. With a window or documents, other ranks need
        only few keys, and these are sent to them directly.

        Returns:
            The receive buffer (empty if nothing is received), and the started exchange to wait for.
        """
        if not mask.leaves_out_keys:
            return ring_exchange(kv, self.group)
        rank, size, tokens = self.ranks.rank, self.ranks.size, k.shape[1]
        exchange, received = Exchange(self.group), kv.new_empty(0)
        if needed := self._block(rank + step, rank, tokens, mask):
            exchange.send(torch.stack([x[:, needed.keys] for x in (k, v)]), (rank + step) % size)
        if block := self._block(rank, rank - step, tokens, mask):
            received = exchange.receive(_buffer(k, block.keys), (rank - step) % size)
        return received, exchange.start()

    @staticmethod
    def _keys_of(block: Block, kv: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        """Return the keys and values of a block from the tensors received for its step."""
        return kv if mask.leaves_out_keys else kv[:, :, block.keys]

    def _send_home(
        self, block_dkv: list[torch.Tensor] | None, k: torch.Tensor, step: int, mask: AttentionMask
    ) -> tuple[slice, torch.Tensor | None, Exchange]:
        """Send a block's dk and dv directly to the rank that owns the keys, and receive the gradients of our keys.

        The gradients are sent in the kernel's dtype, which loses no precision because the kernel has already rounded
        them, and the owner sums them in float32. This takes half the bytes of a float32 sum that travels the ring.

        Returns:
            The keys whose gradients arrive, their receive buffer (None if none arrive), and the exchange.
        """
        rank, size = self.ranks.rank, self.ranks.size
        exchange = Exchange(self.group)
        if block_dkv is not None:
            exchange.send(torch.stack(block_dkv), (rank - step) % size)
        block = self._block(rank + step, rank, k.shape[1], mask)
        if block is None:
            return slice(0), None, exchange.start()
        received = exchange.receive(_buffer(k, block.keys), (rank + step) % size)
        return block.keys, received, exchange.start()

    @staticmethod
    def _add_returned(dkv: list[torch.Tensor], keys: slice, received: torch.Tensor | None, exchange: Exchange) -> None:
        exchange.wait()
        if received is not None:
            for total, part in zip(dkv, received, strict=True):
                total[:, keys] += part


def _buffer(k: torch.Tensor, keys: slice) -> torch.Tensor:
    """Return a buffer `[2, batch, keys, kv_heads, head_dim]` for some keys and values, or their gradients."""
    return k.new_empty(2, k.shape[0], keys.stop - keys.start, *k.shape[2:])

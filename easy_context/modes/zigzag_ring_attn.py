"""Zigzag ring attention: keys and values travel a ring, each rank holds one early and one late chunk of the row.

Ring attention is arXiv 2310.01889. With 2W chunks, rank r holds chunks r and 2W-1-r, so that under a causal mask every
rank has the same work in every step: after the first step, either all its queries see the first half of the travelling
keys, or the second half of its queries sees all of them.
"""

import torch

from ..communication import Exchange, ring_exchange
from ..kernels import FULL
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
        rank, size, group = self.ranks.rank, self.ranks.size, self.ranks.group
        half = q.shape[1] // 2
        kv = torch.stack((k, v))  # one buffer, one message
        for step in range(size):
            if step + 1 < size:
                next_kv, exchange = ring_exchange(kv, group)
            if step == 0:
                # The two chunks are in order, so plain causal attention over the shard is right.
                block_out, lse = kernel.forward(q, k, v, scale, mask)
                out = accumulator(block_out, size)
            elif step <= rank:  # the travelling keys come from an earlier rank: their late chunk is in our future
                block = kernel.forward(q, kv[0, :, :half], kv[1, :, :half], scale, FULL)
                merge_block_(out, lse, *block)
            else:  # from a later rank: our early chunk sees neither of its chunks
                block = kernel.forward(q[:, half:], kv[0], kv[1], scale, FULL)
                merge_block_(out[:, half:], lse[..., half:], *block)
            if step + 1 < size:
                exchange.wait()
                kv = next_kv
        return out.to(q.dtype), (lse,)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        rank, size, group = self.ranks.rank, self.ranks.size, self.ranks.group
        half = q.shape[1] // 2
        late = [x[:, half:] for x in (dout, q, out)]
        late_lse = lse[..., half:].contiguous()
        kv = torch.stack((k, v))
        returning = None
        for step in range(size):
            if step + 1 < size:
                next_kv, exchange = ring_exchange(kv, group)
            if step == 0:
                grads = kernel.backward(dout, q, k, v, out, lse, scale, mask)
                dq, *dkv = (accumulator(grad, size) for grad in grads)
            elif step <= rank:
                early = kv[0, :, :half], kv[1, :, :half]
                block_dq, *block_dkv = kernel.backward(dout, q, *early, out, lse, scale, FULL)
                dq += block_dq
            else:
                block_dq, *block_dkv = kernel.backward(late[0], late[1], *kv, late[2], late_lse, scale, FULL)
                dq[:, half:] += block_dq
            if step > 0:
                if returning is not None:
                    self._add_returned(dkv, *returning)
                returning = self._send_home(torch.stack(block_dkv), step)
            if step + 1 < size:
                exchange.wait()
                kv = next_kv
        self._add_returned(dkv, *returning)
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)

    def _send_home(self, block_dkv: torch.Tensor, step: int) -> tuple[torch.Tensor, Exchange]:
        """Send a block's dk and dv straight to the rank that owns the keys; receive those made from our keys.

        They travel in the kernel's own dtype, which loses nothing (the kernel rounded them already), and are summed at
        home in float32: half the bytes of a float32 sum that travels the ring.
        """
        rank, size = self.ranks.rank, self.ranks.size
        exchange = Exchange(self.ranks.group)
        exchange.send(block_dkv, (rank - step) % size)
        # A later rank saw only the early half of our keys, an earlier one all of them.
        from_later = rank + step < size
        whole = 2 * block_dkv.shape[2] if step <= rank else block_dkv.shape[2]
        tokens = whole // 2 if from_later else whole
        shape = (*block_dkv.shape[:2], tokens, *block_dkv.shape[3:])
        received = exchange.receive(block_dkv.new_empty(shape), (rank + step) % size)
        return received, exchange.start()

    @staticmethod
    def _add_returned(dkv: list[torch.Tensor], received: torch.Tensor, exchange: Exchange) -> None:
        exchange.wait()
        for total, part in zip(dkv, received, strict=True):
            total[:, : part.shape[1]] += part

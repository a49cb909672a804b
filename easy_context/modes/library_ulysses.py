"""ulysses_attn with yunchang's all-to-all, for comparisons."""

import functools

import torch

from .library import LibraryMode, import_library
from .ulysses_attn import UlyssesAttention, check_query_heads, kv_repeats, repeat_heads, sum_copies


class LibraryUlysses(LibraryMode, UlyssesAttention):
    """yunchang's all-to-all of one tensor at a time, with flash-attn; key heads are repeated as in our mode."""

    def __init__(self, ranks) -> None:
        super().__init__(ranks)
        exchange = import_library("yunchang.comm.all_to_all", "yunchang==0.6.4").all_to_all_4D
        self._scatter_heads = functools.partial(exchange, scatter_idx=2, gather_idx=1)
        self._gather_heads = functools.partial(exchange, scatter_idx=1, gather_idx=2)

    def _forward(self, q, k, v, scale, mask, kernel):
        check_query_heads(q.shape[2], self.ranks.size)
        out, lse = kernel.forward(*self._scatter_qkv(q, k, v), scale, mask)
        return self._gather_heads(out, group=self.group), (lse,)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        group, repeats = self.group, kv_repeats(k.shape[2], self.ranks.size)
        dout, out = (self._scatter_heads(x, group=group) for x in (dout, out))
        grads = kernel.backward(dout, *self._scatter_qkv(q, k, v), out, lse, scale, mask)
        dq, *dkv = (self._gather_heads(grad, group=group) for grad in grads)
        return dq, *(sum_copies(grad, repeats) for grad in dkv)

    def _scatter_qkv(self, q, k, v) -> list[torch.Tensor]:
        k, v = repeat_heads((k, v), self.ranks.size)
        return [self._scatter_heads(x, group=self.group) for x in (q, k, v)]

"""The base class of attention kernels, which compute one block of exact attention, forward and backward."""

import sys
from abc import ABC, abstractmethod

import torch

from . import documents, windows
from .mask import AttentionMask
from .splitting import parts_within


class AttentionKernel(ABC):
    """One backend. `forward` and `backward` make the common checks; subclasses implement `_forward` and `_backward`.

    Shapes: q, out `[batch, seq_q, heads, head_dim]`; k, v `[batch, seq_k, kv_heads, head_dim]` with kv_heads dividing
    heads (query head h reads key head `h // (heads / kv_heads)`); lse `[batch, heads, seq_q]`, the natural logarithm of
    the softmax denominator, float32 (float64 for float64 inputs). Tensors may have any strides.
    """

    name: str
    takes_documents = False  # whether it has `_forward_packed` and `_backward_packed`; else it gets one after the other
    # Why this kernel should not be chosen for documents, whose lengths are all different; None if it can be.
    unfit_for_documents: str | None = None
    # The furthest element of a tensor that the backend indexes rightly. Blocks with more are computed in parts.
    max_elements = sys.maxsize
    # Backward runs in parts beyond so many elements of q, so that what the backend sums in float32 takes the memory of
    # one part. Heads that share a key head stay together.
    backward_elements = sys.maxsize

    @abstractmethod
    def unsupported_reason(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why this kernel does not support such inputs on this machine, or None if it does."""

    @abstractmethod
    def _forward(self, q, k, v, scale: float, mask: AttentionMask) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def _backward(
        self, dout, q, k, v, out, lse, scale: float, mask: AttentionMask
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def _forward_packed(
        self, q, k, v, scale: float, borders: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute causal attention within the documents of a row: q `[tokens, heads, head_dim]`, lse `[heads, tokens]`.

        `borders` and `longest` are from `Documents.cumulative_lengths`.
        """
        raise NotImplementedError

    def _backward_packed(
        self, dout, q, k, v, out, lse, scale: float, borders: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: AttentionMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of q over k and v.

        Returns:
            The output in q's dtype, and lse. A query that attends to no key has output 0 and lse -inf.

        Raises:
            ValueError: a causal mask with unequal lengths, a window without a causal mask, or documents of another
                batch.
        """
        q, k, v = _dense_vectors(q, k, v)
        mask = _cut_window(q, k, mask)
        if mask.tiles is not None:
            return windows.forward(self, q, k, v, scale, mask.tiles)
        if mask.documents is not None:
            return documents.forward(self, q, k, v, scale, mask)
        _check_lengths(q, k, mask)
        if k.shape[1] == 0:
            lse_dtype = torch.promote_types(q.dtype, torch.float32)
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=lse_dtype, device=q.device)
            return torch.zeros_like(q), lse
        return self._forward_in_parts(q, k, v, scale, mask)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: AttentionMask,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the gradients of q, k and v through this block, in their dtype.

        `out` and `lse` may be merged over several blocks. The block's probabilities are exp(score - lse), so each block
        contributes its part of the gradients of the whole attention.
        """
        dout, q, k, v, out = _dense_vectors(dout, q, k, v, out)
        mask = _cut_window(q, k, mask)
        if mask.tiles is not None:
            return windows.backward(self, dout, q, k, v, out, lse, scale, mask.tiles)
        if mask.documents is not None:
            return documents.backward(self, dout, q, k, v, out, lse, scale, mask)
        _check_lengths(q, k, mask)
        if k.shape[1] == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return self._backward_in_parts(dout, q, k, v, out, lse, scale, mask)

    def _forward_in_parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: AttentionMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `forward` in as many calls of the backend as its limits require."""
        if max(q.numel(), k.numel()) <= self.max_elements:
            q, k, v = self._near(q, k, v)
            return self._call_forward(q, k, v, scale, mask)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in parts_within(self.max_elements, q, k):
            part_q, part_k, part_v = self._near(*part.of_queries(q), *part.of_keys(k, v))
            part_out, part_lse = self._call_forward(part_q, part_k, part_v, scale, mask)
            part.of_queries(out)[0].copy_(part_out)
            part.of_lse(lse).copy_(part_lse)
        return out, lse

    def _backward_in_parts(
        self, dout, q, k, v, out, lse, scale: float, mask: AttentionMask
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute `backward` in as many calls of the backend as its limits require."""
        sharing_a_key = max(q.shape[1] * q.shape[2] // k.shape[2], k.shape[1]) * q.shape[3]
        limit = min(self.max_elements, max(self.backward_elements, sharing_a_key))
        if max(q.numel(), k.numel()) <= limit:
            dout, q, k, v, out = self._near(dout, q, k, v, out)
            return self._call_backward(dout, q, k, v, out, lse, scale, mask)
        parts = parts_within(limit, q, k)
        # Parts that share a key head contribute to the same gradients, which are summed in float32 or wider.
        share_keys = parts[0].heads.stop - parts[0].heads.start < q.shape[2] // k.shape[2]
        sum_dtype = torch.promote_types(k.dtype, torch.float32) if share_keys else k.dtype
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=sum_dtype), torch.zeros_like(v, dtype=sum_dtype)
        for part in parts:
            part_dout, part_q, part_out = self._near(*part.of_queries(dout, q, out))
            part_k, part_v = self._near(*part.of_keys(k, v))
            part_lse = part.of_lse(lse).contiguous()
            part_dq, *part_dkv = self._call_backward(part_dout, part_q, part_k, part_v, part_out, part_lse, scale, mask)
            part.of_queries(dq)[0].copy_(part_dq)
            for total, share in zip(part.of_keys(dk, dv), part_dkv, strict=True):
                total += share
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _call_forward(self, q, k, v, scale: float, mask: AttentionMask) -> tuple[torch.Tensor, torch.Tensor]:
        if mask.documents is None:
            return self._forward(q, k, v, scale, mask)
        borders, longest = mask.documents.cumulative_lengths(q.device)
        out, lse = self._forward_packed(q[0], k[0], v[0], scale, borders, longest)
        return out[None], lse[None]

    def _call_backward(
        self, dout, q, k, v, out, lse, scale: float, mask: AttentionMask
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if mask.documents is None:
            return self._backward(dout, q, k, v, out, lse, scale, mask)
        borders, longest = mask.documents.cumulative_lengths(q.device)
        dq, dk, dv = self._backward_packed(dout[0], q[0], k[0], v[0], out[0], lse[0], scale, borders, longest)
        return dq[None], dk[None], dv[None]

    def _near(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy those views whose elements lie too far apart in a larger tensor: heads of long rows, halves of many."""
        return tuple(x if _extent(x) <= self.max_elements else x.contiguous() for x in tensors)


def _cut_window(q: torch.Tensor, k: torch.Tensor, mask: AttentionMask) -> AttentionMask:
    """Return the mask of a whole row with its window cut into tiles; no backend is given a window."""
    if mask.window is None:
        return mask
    if not mask.causal:
        raise ValueError(f"window={mask.window} asks for a causal mask")
    _check_lengths(q, k, mask)
    if mask.documents is not None:
        mask.documents.check(q, k)
    return mask.among((range(q.shape[1]),))


def _check_lengths(q: torch.Tensor, k: torch.Tensor, mask: AttentionMask) -> None:
    if mask.causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"a causal block needs as many keys as queries, got {k.shape[1]} and {q.shape[1]}: "
            "backends align unequal lengths differently"
        )


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements that a tensor spans in memory, from its first element through its last."""
    return 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _dense_vectors(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with a last stride of 1. With other strides, some backends silently read wrong memory."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def heads_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return `[batch, seq, heads, head_dim]` as views `[batch, heads, seq, head_dim]`; a second call undoes this."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def needs_cuda_half(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel for half precision on CUDA cannot run, or None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {dtype}"
    return None

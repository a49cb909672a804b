"""FlashAttention-4 from the package flash-attn-4: the fastest on Hopper and Blackwell, compiled at first use."""

from typing import Any

import torch

from ..common.errors import cannot_import
from .base import AttentionKernel, needs_cuda_half


class FlashAttn4Kernel(AttentionKernel):
    """`flash_attn.cute.interface`; the first call for a shape family takes seconds to compile."""

    name = "flash_attn_4"
    backward_elements = 2**28  # 1 GiB of float32 sums; 64K tokens of 32 heads of 128, enough to keep a GPU busy
    takes_documents = True

    def unsupported_reason(self, device, dtype, head_dim):
        if reason := needs_cuda_half(device, dtype):
            return reason
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "it needs a Hopper GPU or newer"
        # It accepts multiples of 8, but its backward fails, or is silently wrong, where 32 does not divide head_dim
        # (flash-attention issue 2492). These three were seen right on a GPU.
        if head_dim not in (64, 96, 128):
            return f"it is right for head_dim 64, 96 and 128, not {head_dim}"
        return cannot_import("flash_attn.cute.interface", "flash-attn-4")

    def _forward(self, q, k, v, scale, mask):
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=mask.causal, return_lse=True)
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, scale, mask):
        from flash_attn.cute.interface import _flash_attn_bwd

        dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=scale, causal=mask.causal)
        return dq, dk, dv

    def _forward_packed(self, q, k, v, scale, borders, longest):
        from flash_attn.cute.interface import _flash_attn_fwd

        options = _packed(borders, longest)
        out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=True, return_lse=True, **options)
        return out, lse

    def _backward_packed(self, dout, q, k, v, out, lse, scale, borders, longest):
        from flash_attn.cute.interface import _flash_attn_bwd

        options = _packed(borders, longest)
        dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=scale, causal=True, **options)
        return dq, dk, dv


def _packed(borders: torch.Tensor, longest: int) -> dict[str, Any]:
    """Return the keyword arguments that keep documents apart."""
    return {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}

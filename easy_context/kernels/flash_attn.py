"""FlashAttention-2 from the package flash-attn."""

import torch

from ..common.errors import cannot_import
from .base import AttentionKernel, needs_cuda_half

_PLAIN = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


class FlashAttnKernel(AttentionKernel):
    """`flash_attn.flash_attn_interface` of flash-attn 2.7 and newer (arXiv 2307.08691)."""

    name = "flash_attn"
    takes_documents = True
    max_elements = 2**31 - 1  # as PyTorch's copy of it, see torch_flash.py

    def unsupported_reason(self, device, dtype, head_dim):
        if reason := needs_cuda_half(device, dtype):
            return reason
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs an Ampere GPU or newer"
        package = "flash-attn"
        if head_dim > 256 or head_dim % 8:
            return f"head_dim {head_dim} is not a multiple of 8 up to 256"
        # What only stands in for the package lacks its compiled module.
        return cannot_import("flash_attn_2_cuda", package) or cannot_import("flash_attn.flash_attn_interface", package)

    def _forward(self, q, k, v, scale, mask):
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, mask.causal, return_softmax=False, **_PLAIN)
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, scale, mask):
        from flash_attn.flash_attn_interface import _flash_attn_backward

        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
        _flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, scale, mask.causal, deterministic=False, **_PLAIN)
        return grads

    def _forward_packed(self, q, k, v, scale, borders, longest):
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        lengths = borders, borders, longest, longest
        out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *lengths, 0.0, scale, True, return_softmax=False, **_PLAIN)
        return out, lse

    def _backward_packed(self, dout, q, k, v, out, lse, scale, borders, longest):
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        inputs = dout.contiguous(), q, k, v, out.contiguous(), lse, *grads
        lengths = borders, borders, longest, longest
        _flash_attn_varlen_backward(*inputs, *lengths, 0.0, scale, True, deterministic=False, **_PLAIN)
        return grads

"""PyTorch's flash attention for CPUs: blockwise, grouped heads native, every floating dtype."""

import torch

from .base import AttentionKernel, heads_first

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel(AttentionKernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, whose tensors have heads before the sequence."""

    name = "cpu"

    def unsupported_reason(self, device, dtype, head_dim):
        if device.type != "cpu":
            return f"it runs on CPUs, not on {device.type}"
        return None if dtype.is_floating_point else f"it needs floating-point inputs, not {dtype}"

    def _forward(self, q, k, v, scale, mask):
        out, lse = _forward(*heads_first(q, k, v), 0.0, mask.causal, scale=scale)
        return out.transpose(1, 2), lse

    def _backward(self, dout, q, k, v, out, lse, scale, mask):
        grads = _backward(*heads_first(dout, q, k, v, out), lse, 0.0, mask.causal, scale=scale)
        return heads_first(*grads)

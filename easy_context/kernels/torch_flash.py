"""The FlashAttention-2 kernel inside PyTorch: every CUDA build has it."""

import torch

from .base import AttentionKernel, heads_first, needs_cuda_half

_forward = torch.ops.aten._scaled_dot_product_flash_attention
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_forward_packed = torch.ops.aten._flash_attention_forward
_backward_packed = torch.ops.aten._flash_attention_backward


class TorchFlashKernel(AttentionKernel):
    """`aten::_scaled_dot_product_flash_attention` (arXiv 2307.08691), which lays tensors out heads first."""

    name = "torch_flash"
    takes_documents = True
    # Beyond, its backward writes outside its tensors (seen with torch 2.11 on 2064 rows of 256 tokens).
    max_elements = 2**31 - 1

    def unsupported_reason(self, device, dtype, head_dim):
        if reason := needs_cuda_half(device, dtype):
            return reason
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs an Ampere GPU or newer"
        return (
            None if head_dim <= 256 and head_dim % 8 == 0 else f"head_dim {head_dim} is not a multiple of 8 up to 256"
        )

    def _forward(self, q, k, v, scale, mask):
        out, lse, *_ = _forward(*heads_first(q, k, v), 0.0, mask.causal, scale=scale)
        return out.transpose(1, 2), lse

    def _backward(self, dout, q, k, v, out, lse, scale, mask):
        no_dropout = _no_dropout(q)
        lengths = (None, None, q.shape[1], k.shape[1])  # no packed sequences
        tensors = heads_first(dout, q, k, v, out)
        grads = _backward(*tensors, lse, *lengths, 0.0, mask.causal, no_dropout, no_dropout, scale=scale)
        return heads_first(*grads)

    def _forward_packed(self, q, k, v, scale, borders, longest):
        lengths = borders, borders, longest, longest
        out, lse, *_ = _forward_packed(q, k, v, *lengths, 0.0, True, False, scale=scale)
        return out, lse

    def _backward_packed(self, dout, q, k, v, out, lse, scale, borders, longest):
        no_dropout = _no_dropout(q)
        lengths = borders, borders, longest, longest
        return _backward_packed(dout, q, k, v, out, lse, *lengths, 0.0, True, no_dropout, no_dropout, scale=scale)


def _no_dropout(q: torch.Tensor) -> torch.Tensor:
    """Return a random state, which is not used at dropout 0."""
    return torch.zeros(2, dtype=torch.uint64, device=q.device)

"""cuDNN's fused attention inside PyTorch: close to FlashAttention-3 on Hopper, with nothing to install."""

import torch

from .base import AttentionKernel, heads_first, needs_cuda_half

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class CudnnKernel(AttentionKernel):
    """`aten::_scaled_dot_product_cudnn_attention`, which lays tensors out heads first and lse as `[b, h, s, 1]`."""

    name = "cudnn"
    # Its backward is wrong beyond, without an error (seen with cuDNN 9.19), also in views that reach so far.
    max_elements = 2**31 - 1
    unfit_for_documents = "it prepares itself anew for every length"

    def unsupported_reason(self, device, dtype, head_dim):
        if reason := needs_cuda_half(device, dtype):
            return reason
        if not torch.backends.cudnn.is_available():
            return "this PyTorch has no cuDNN"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "it is slower than FlashAttention-2 before Hopper"
        return (
            None if head_dim <= 128 and head_dim % 8 == 0 else f"head_dim {head_dim} is not a multiple of 8 up to 128"
        )

    def _forward(self, q, k, v, scale, mask):
        out, lse, *_ = _forward(*heads_first(q, k, v), None, True, 0.0, mask.causal, False, scale=scale)
        return out.transpose(1, 2), lse.squeeze(-1)

    def _backward(self, dout, q, k, v, out, lse, scale, mask):
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state, unused at dropout 0
        lengths = (None, None, q.shape[1], k.shape[1])  # no packed sequences
        tensors = heads_first(dout, q, k, v, out)
        lse = lse.unsqueeze(-1)
        grads = _backward(*tensors, lse, no_dropout, no_dropout, None, *lengths, 0.0, mask.causal, scale=scale)
        return heads_first(*grads)

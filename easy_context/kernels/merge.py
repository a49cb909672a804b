"""Merge the attention of one set of queries over several blocks of keys."""

import functools

import torch


def merge_block_(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Merge one more block into `out` and `lse`, in place.

    The merged output is the average of both, weighted by the softmax denominators exp(lse) and exp(block_lse). Written
    with a sigmoid of their difference, it cannot overflow (the form of ring-flash-attention, issue 34). It runs in
    float32 or wider, by one Triton kernel on CUDA.

    Args:
        out: accumulated output, any float dtype, `[batch, seq, heads, head_dim]`.
        lse: its log-sum-exp, `[batch, heads, seq]`; -inf where no key was seen so far.
        block_out: the block's output, same shape.
        block_lse: the block's log-sum-exp, same shape as lse.
    """
    if out.is_cuda and out.dtype != torch.float64 and _triton_kernel() is not None:
        _merge_on_cuda(out, lse, block_out, block_lse)
        return
    wide = torch.promote_types(out.dtype, torch.float32)
    # Two values of -inf give NaN. Neither side attended to a key, so the block's weight is 0.
    weight = torch.sigmoid((block_lse - lse).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    out.copy_(out.to(wide).lerp(block_out.to(wide), weight.to(wide).transpose(1, 2).unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, block_lse))


def _merge_on_cuda(out, lse, block_out, block_lse) -> None:
    import triton

    batch, seq, heads, head_dim = out.shape
    tokens = 64
    grid = (triton.cdiv(seq, tokens), batch * heads)
    strides = [stride for x in (out, block_out) for stride in x.stride()[:3]]
    strides += [stride for x in (lse, block_lse) for stride in x.stride()]
    with torch.cuda.device(out.device):
        _triton_kernel()[grid](
            out, block_out, lse, block_lse, *strides, heads, seq, head_dim, triton.next_power_of_2(head_dim), tokens
        )


@functools.cache
def _triton_kernel():
    """Return the kernel, which is compiled at its first use, or None without Triton (a part of PyTorch for CUDA)."""
    try:
        from .merge_triton import merge_kernel
    except ImportError:
        return None
    return merge_kernel

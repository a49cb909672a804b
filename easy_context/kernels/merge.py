"""Merging the attention of one set of queries over several blocks of keys."""

import torch


def merge_block_(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Merge one more block into `out` and `lse`, in place.

    The merged output is the average of both, weighted by the softmax denominators exp(lse) and exp(block_lse). Written
    with a sigmoid of their difference nothing overflows, whatever the gap (the form of ring-flash-attention, issue 34).

    Args:
        out: accumulated output, float32 or wider, `[batch, seq, heads, head_dim]`.
        lse: its log-sum-exp, `[batch, heads, seq]`; -inf where no key was seen so far.
        block_out: the block's output, any float dtype, same shape.
        block_lse: the block's log-sum-exp, same shape as lse.
    """
    # Both -inf gives NaN: neither side saw a key, and the block weighs nothing.
    weight = torch.sigmoid((block_lse - lse).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    out.lerp_(block_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, block_lse))

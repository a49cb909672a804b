"""Attention as the textbook writes it, in float64, gradients by autograd: what every kernel and mode is held against.

Nothing here is shared with the package, so that an error there cannot hide behind the same error here.
"""

import dataclasses

import torch


@dataclasses.dataclass
class Attention:
    """Float64 results: out and dq `[batch, seq_q, heads, dim]`, lse `[batch, heads, seq_q]`, dk and dv like k."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def plain_attention(
    q, k, v, scale: float, causal: bool, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention one head at a time; query head h reads key head h // (heads / kv_heads).

    Args:
        q: `[batch, seq_q, heads, dim]`. k, v: `[batch, seq_k, kv_heads, dim]`.
        scale: factor on the scores.
        causal: query i sees keys 0..i; needs seq_q == seq_k.
        window: query i of a causal row sees keys i - window + 1..i only.

    Returns:
        out `[batch, seq_q, heads, dim]` and lse `[batch, heads, seq_q]`.
    """
    queries_per_key = q.shape[2] // k.shape[2]
    outs, lses = [], []
    for head in range(q.shape[2]):
        key, value = k[:, :, head // queries_per_key], v[:, :, head // queries_per_key]
        scores = torch.bmm(q[:, :, head], key.transpose(1, 2)) * scale
        if causal:
            assert q.shape[1] == k.shape[1]
            future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
            if window is not None:
                scores = scores.masked_fill(torch.ones_like(future).tril(-window), float("-inf"))
        lse = scores.logsumexp(dim=-1)
        outs.append(torch.bmm((scores - lse[..., None]).exp(), value))
        lses.append(lse)
    return torch.stack(outs, dim=2), torch.stack(lses, dim=1)


def attention_with_gradients(q, k, v, dout, scale: float, causal: bool = True, window: int | None = None) -> Attention:
    """Forward and backward of `plain_attention` in float64, whatever the dtype of the inputs."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = plain_attention(*leaves, scale, causal, window)
    gradients = torch.autograd.grad(out, leaves, dout.double())
    return Attention(out.detach(), lse.detach(), *gradients)


def merge(blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the union of several blocks of keys, from each block's (out, lse), in float64."""
    outs = torch.stack([out.double() for out, _ in blocks])
    lses = torch.stack([lse.double() for _, lse in blocks])
    lse = lses.logsumexp(dim=0)
    share = (lses - lse).exp().transpose(2, 3)[..., None]  # [blocks, batch, seq_q, heads, 1]
    return (outs * share).sum(dim=0), lse


def random_inputs(seed: int, batch, seq_q, seq_k, heads, kv_heads, dim, dtype=torch.float32, device="cpu"):
    """q, k, v and dout, drawn on the CPU so that every process and device gets the same numbers from one seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq_q, heads, dim), *[(batch, seq_k, kv_heads, dim)] * 2, (batch, seq_q, heads, dim)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite for another shape or a value not finite."""
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    difference = (actual.double() - expected.double()).norm().item()
    return difference / max(expected.double().norm().item(), 1e-30)

"""Plain attention with all scores in memory, for any device and dtype; the reference for the other kernels."""

import torch

from .base import AttentionKernel
from .mask import AttentionMask


class ReferenceKernel(AttentionKernel):
    """Plain attention in float32, or float64 for float64 inputs. Its memory grows with seq_q x seq_k."""

    name = "reference"

    def unsupported_reason(self, device, dtype, head_dim):
        return None if dtype.is_floating_point else f"it needs floating-point inputs, not {dtype}"

    def _forward(self, q, k, v, scale, mask):
        scores = self._scores(q, k, scale, mask)
        lse = scores.logsumexp(dim=-1)
        probabilities = (scores - lse.unsqueeze(-1)).exp().nan_to_num(nan=0.0)  # -inf - -inf: the row sees no key
        out = torch.einsum("bgrqk,bkgd->bqgrd", probabilities, v.to(scores.dtype))
        return out.reshape(q.shape).to(q.dtype), lse.flatten(1, 2)

    def _backward(self, dout, q, k, v, out, lse, scale, mask):
        scores = self._scores(q, k, scale, mask)
        dtype, groups = scores.dtype, scores.shape[1]
        lse = lse.to(dtype).unflatten(1, (groups, -1)).unsqueeze(-1)
        probabilities = (scores - lse).exp().nan_to_num(nan=0.0)
        dout, out, q_grouped = (x.to(dtype).unflatten(2, (groups, -1)) for x in (dout, out, q))
        dv = torch.einsum("bgrqk,bqgrd->bkgd", probabilities, dout)
        dprobabilities = torch.einsum("bqgrd,bkgd->bgrqk", dout, v.to(dtype))
        delta = (dout * out).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)  # [batch, kv_heads, repeats, seq_q, 1]
        dscores = probabilities * (dprobabilities - delta) * scale
        dq = torch.einsum("bgrqk,bkgd->bqgrd", dscores, k.to(dtype)).reshape(q.shape)
        dk = torch.einsum("bgrqk,bqgrd->bkgd", dscores, q_grouped)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: AttentionMask) -> torch.Tensor:
        """Masked scores `[batch, kv_heads, repeats, seq_q, seq_k]`, query heads grouped by the key head they read."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q = q.to(dtype).unflatten(2, (k.shape[2], -1))
        scores = torch.einsum("bqgrd,bkgd->bgrqk", q, k.to(dtype)) * scale
        distance = torch.arange(q.shape[1], device=q.device)[:, None] - torch.arange(k.shape[1], device=q.device)
        if mask.causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        return scores

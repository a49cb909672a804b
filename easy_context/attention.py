"""The one autograd function through which every mode runs."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .kernels import AttentionKernel, AttentionMask
from .memory.layer_run import current_layer_run
from .modes import ParallelMode


@dataclass(frozen=True)
class AttentionPlan:
    """How attention is computed: all that `sequence_parallel_attention` needs beside q, k and v."""

    mode: ParallelMode
    scale: float
    mask: AttentionMask
    kernel: AttentionKernel
    group: dist.ProcessGroup | None

    @property
    def options(self) -> dict:
        """Keyword arguments of the mode's forward and backward."""
        return {"scale": self.scale, "mask": self.mask, "kernel": self.kernel, "group": self.group}


class _SequenceParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan: AttentionPlan):
        run = current_layer_run()
        kept = None if run is None else run.attention
        if kept is not None and run.recomputing:
            out, *residuals = kept.pop(0)
        else:
            out, residuals = plan.mode.forward(q, k, v, **plan.options)
            if kept is not None:
                kept.append((out, *residuals))
        ctx.save_for_backward(q, k, v, out, *residuals)
        ctx.plan = plan
        return out.view_as(out)  # autograd marks what is returned; the kept tensor stays as it is

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, *residuals = ctx.saved_tensors
        grads = ctx.plan.mode.backward(dout, q, k, v, out, tuple(residuals), **ctx.plan.options)
        return *grads, None


def sequence_parallel_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Exact attention of this rank's queries over the row that its group shares, with gradients.

    Args:
        q: `[batch, seq / size, heads, head_dim]`, this rank's shard, float.
        k: `[batch, seq / size, kv_heads, head_dim]`, same dtype; v likewise.
        plan: the mode and what it needs.

    Returns:
        The output, shaped and typed like q.
    """
    return _SequenceParallelAttention.apply(q, k, v, plan)

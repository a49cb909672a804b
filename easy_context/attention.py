"""The one autograd function through which every mode runs."""

from dataclasses import dataclass
from typing import Any

import torch

from .kernels import AttentionMask
from .kernels.base import AttentionKernel
from .memory.layer_run import LayerRun, current_layer_run
from .modes.base import ParallelMode


@dataclass(frozen=True)
class AttentionSettings:
    """The settings that `sequence_parallel_attention` needs in addition to q, k and v."""

    mode: ParallelMode
    kernel: AttentionKernel
    scale: float
    mask: AttentionMask

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the mode's forward and backward."""
        return {"kernel": self.kernel, "scale": self.scale, "mask": self.mask}


class _SequenceParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, settings: AttentionSettings):
        run = current_layer_run() or LayerRun()
        if run.attention is not None and run.recomputing:
            results = run.attention.pop(0)
        else:
            out, residuals = settings.mode.forward(q, k, v, **settings.options)
            results = (out, *residuals)
            if run.attention is not None:
                run.attention.append(results)
        ctx.save_for_backward(q, k, v, *results)
        ctx.settings = settings
        return results[0].view_as(results[0])  # autograd modifies the returned tensor; the kept one must stay unchanged

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, *residuals = ctx.saved_tensors
        settings = ctx.settings
        return *settings.mode.backward(dout, q, k, v, out, tuple(residuals), **settings.options), None


def sequence_parallel_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: AttentionSettings
) -> torch.Tensor:
    """Compute exact attention of this rank's queries over the row that the mode's ranks share, with gradients.

    Args:
        q: `[batch, seq / size, heads, head_dim]`, this rank's shard, float.
        k: `[batch, seq / size, kv_heads, head_dim]`, same dtype; v likewise.
        settings: the mode and its settings.

    Returns:
        The output, with q's shape and dtype.
    """
    return _SequenceParallelAttention.apply(q, k, v, settings)

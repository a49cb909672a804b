"""The one autograd function through which every mode runs, and the record that spares recomputing attention."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .kernels import AttentionKernel, AttentionMask
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


class AttentionRecord:
    """Outputs and residuals of the attention calls inside a checkpointed layer, in call order.

    While the layer first runs they are recorded; while it is recomputed they are replayed, so that neither the kernel
    nor the forward collectives run again (rematerialisation-aware checkpointing of arXiv 2310.03294, for every mode).
    """

    def __init__(self, recorded: list[tuple[torch.Tensor, ...]] | None = None) -> None:
        """An empty record to fill, or, given what one recorded, a record to replay."""
        self.replaying = recorded is not None
        self.results: list[tuple[torch.Tensor, ...]] = list(recorded or [])

    def next(self) -> tuple[torch.Tensor, ...]:
        """The next call's (out, *residuals)."""
        return self.results.pop(0)


_current = threading.local()  # the backward of CUDA tensors, and so recomputation, runs on threads of autograd's own


@contextlib.contextmanager
def attention_record(record: AttentionRecord | None) -> Iterator[None]:
    """Attention calls of this thread inside the block fill or replay `record`; None for neither."""
    previous = getattr(_current, "record", None)
    _current.record = record
    try:
        yield
    finally:
        _current.record = previous


class _SequenceParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan: AttentionPlan):
        record = getattr(_current, "record", None)
        if record is not None and record.replaying:
            out, *residuals = record.next()
        else:
            out, residuals = plan.mode.forward(q, k, v, **plan.options)
            if record is not None:
                record.results.append((out, *residuals))
        ctx.save_for_backward(q, k, v, out, *residuals)
        ctx.plan = plan
        return out.view_as(out)  # a recorded tensor must not become part of a graph that is freed

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

"""Tell what runs inside a checkpointed layer whether this is the layer's first run or a later one."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class LayerRun:
    """One run of a checkpointed layer: the first, without a graph, or one in backward that takes what the first kept.

    Attention keeps its results in the first run and takes them in the others, so that neither the kernel nor the
    forward collectives run again (the rematerialisation-aware checkpointing of arXiv 2310.03294, for every mode).
    Linear layers do likewise.

    Attributes:
        recomputing: results are taken from the lists below, not put into them.
        attention: (out, *residuals) of the layer's attention calls in order; None to compute attention in every run.
        projections: outputs of the layer's linear layers in order; None to compute them in every run.
        output_unread: nothing reads the values that the layer returns, only their graph.
    """

    recomputing: bool = False
    attention: list[tuple[torch.Tensor, ...]] | None = None
    projections: list[torch.Tensor] | None = None
    output_unread: bool = False


_current = threading.local()  # the backward of CUDA tensors, and so recomputation, runs on threads of autograd's own


@contextlib.contextmanager
def layer_run(run: LayerRun) -> Iterator[None]:
    """Run what this thread computes inside the block as a part of `run`."""
    previous = current_layer_run()
    _current.run = run
    try:
        yield
    finally:
        _current.run = previous


def current_layer_run() -> LayerRun | None:
    """Return the checkpointed layer's run that this thread is in; None outside of one."""
    return getattr(_current, "run", None)

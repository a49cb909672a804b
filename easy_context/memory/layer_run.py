"""Tell code inside a checkpointed layer whether the layer runs for the first time or again in backward."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class LayerRun:
    """One run of a checkpointed layer: the first run, without a graph, or a recomputation in backward.

    Attention records its results in the first run and reuses them in later runs, so that neither the kernel nor the
    forward collectives run again (the rematerialisation-aware checkpointing of arXiv 2310.03294, for every mode).
    Linear layers do the same.

    Attributes:
        recomputing: whether results are taken from the lists below instead of being added to them.
        attention: (out, *residuals) of the layer's attention calls in order; None to compute attention in every run.
        projections: outputs of the layer's linear layers in order; None to compute them in every run.
        output_unread: whether only the graph of the layer's output is used and its values are never read.
    """

    recomputing: bool = False
    attention: list[tuple[torch.Tensor, ...]] | None = None
    projections: list[torch.Tensor] | None = None
    output_unread: bool = False


_current = threading.local()  # autograd runs the backward of CUDA tensors, and so recomputation, on its own threads


@contextlib.contextmanager
def layer_run(run: LayerRun) -> Iterator[None]:
    """Make `run` the current run of this thread inside the block."""
    previous = current_layer_run()
    _current.run = run
    try:
        yield
    finally:
        _current.run = previous


def current_layer_run() -> LayerRun | None:
    """Return this thread's current run of a checkpointed layer, or None outside of one."""
    return getattr(_current, "run", None)

"""Tell what runs inside a checkpointed layer whether this is the layer's first run or its recomputation."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class LayerRun:
    """One run of a checkpointed layer: the first, without a graph, or the recomputation in backward.

    Attention keeps its results in the first run and takes them in the second, so that neither the kernel nor the
    forward collectives run again (the rematerialisation-aware checkpointing of arXiv 2310.03294, for every mode).

    Attributes:
        recomputing: this is the recomputation; nothing reads the value that the layer returns, only its graph.
        attention: (out, *residuals) of the layer's attention calls in order, to fill or to take from; None to compute
            attention in both runs.
    """

    recomputing: bool
    attention: list[tuple[torch.Tensor, ...]] | None


_current = threading.local()  # the backward of CUDA tensors, and so recomputation, runs on threads of autograd's own


@contextlib.contextmanager
def layer_run(run: LayerRun) -> Iterator[None]:
    """What this thread computes inside the block belongs to `run`."""
    previous = current_layer_run()
    _current.run = run
    try:
        yield
    finally:
        _current.run = previous


def current_layer_run() -> LayerRun | None:
    """The checkpointed layer that this thread is running; None outside of one."""
    return getattr(_current, "run", None)

"""Gradient checkpointing that keeps attention's results and puts layer inputs into host memory.

A checkpointed layer runs without a graph; in backward it runs again with one. Its input waits on the host (as Unsloth's
offloaded checkpointing does), and its attention is not computed a second time: see `layer_run.LayerRun`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.modeling_utils

from .autocast import autocast_as_now
from .layer_run import LayerRun, layer_run
from .offload import OffloadedTensors, release_host_memory

KEEP_ATTENTION = ("gpu", "cpu", "none")
_original_checkpoint: Callable | None = None


def apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(
    *, offload: bool = True, keep_attention: str = "gpu"
) -> None:
    """Make Hugging Face's `model.gradient_checkpointing_enable()`, called afterwards, use this module's checkpointing.

    Args:
        offload: put the layers' inputs into host memory (pinned, copied while the GPU computes); False keeps them on
            the device.
        keep_attention: where attention outputs and their log-sum-exp wait for backward: "gpu" (the device), "cpu" (the
            host), or "none" to compute attention twice.

    Raises:
        ValueError: an unknown `keep_attention`.
    """
    global _original_checkpoint
    if keep_attention not in KEEP_ATTENTION:
        raise ValueError(f"keep_attention {keep_attention!r} is unknown; choose one of {', '.join(KEEP_ATTENTION)}")
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    _original_checkpoint = transformers.modeling_utils.checkpoint
    transformers.modeling_utils.checkpoint = functools.partial(
        checkpoint_layer, offload=offload, keep_attention=keep_attention
    )


def remove_unsloth_offloaded_gradient_checkpoint_monkey_patch() -> None:
    """Undo the patch, and unpin the host memory that nothing waits in.

    Models whose checkpointing was enabled under the patch keep it until it is enabled anew.
    """
    global _original_checkpoint
    release_host_memory()
    if _original_checkpoint is not None:
        transformers.modeling_utils.checkpoint = _original_checkpoint
        _original_checkpoint = None


def checkpoint_layer(
    function: Callable,
    *args: Any,
    offload: bool = True,
    keep_attention: str = "gpu",
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
) -> Any:
    """Run `function(*args)` without a graph now, and again with one in backward.

    Args:
        function: a layer; tensors that need gradients are positional arguments, parameters may be anywhere.
        args: what it is called with.
        offload: keep the tensors of `args` on the host meanwhile.
        keep_attention: see `apply_unsloth_offloaded_gradient_checkpoint_monkey_patch`.
        preserve_rng_state: draw the same dropout masks in the second run.
        use_reentrant: accepted for `gradient_checkpointing_kwargs`; this checkpointing is of the reentrant kind either
            way, and works without an input that requires gradients.

    Returns:
        What the layer returns: a tensor or a tuple of tensors.
    """
    # A layer with trainable parameters but a frozen input still needs a node in the graph; this tensor makes one.
    trigger = torch.empty(0, requires_grad=True)
    settings = {"offload": offload, "keep_attention": keep_attention, "preserve_rng_state": preserve_rng_state}
    return _CheckpointedLayer.apply(trigger, function, settings, *args)


class _CheckpointedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trigger, function, settings, *args):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        ctx.function = function
        ctx.context = _RunContext(device, settings["preserve_rng_state"])
        keep = settings["keep_attention"]
        run = LayerRun(recomputing=False, attention=None if keep == "none" else [])
        with layer_run(run):
            outputs = function(*args)
        ctx.put_away = _PutAway(args, run.attention, settings["offload"], keep == "cpu")
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        if ctx.put_away is None:
            raise RuntimeError("a checkpointed layer was run backward twice; its input was freed after the first time")
        args, attention = ctx.put_away.fetch()
        run = LayerRun(recomputing=True, attention=attention)
        with ctx.context.restored(), torch.enable_grad(), layer_run(run):
            outputs = ctx.function(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.function = ctx.put_away = attention = run = None  # free what this layer kept
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and grad is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return (None, None, None, *(x.grad if isinstance(x, torch.Tensor) else None for x in args))


class _PutAway:
    """A layer's arguments and what its attention calls recorded, until backward runs the layer again.

    What waits on the host is one group, so that backward, which fetches one layer ahead, fetches all of it.
    """

    def __init__(
        self, args: tuple, attention: list[tuple[torch.Tensor, ...]] | None, offload: bool, offload_attention: bool
    ) -> None:
        """`offload` moves floating-point tensors among `args` to the host, `offload_attention` the recorded ones."""
        self._requires_grad = [isinstance(x, torch.Tensor) and x.requires_grad for x in args]
        self._lengths = None if attention is None else [len(result) for result in attention]
        recorded = [tensor for result in attention or () for tensor in result]
        self._moved = [offload and isinstance(x, torch.Tensor) and x.is_floating_point() for x in args]
        self._moved += [offload_attention] * len(recorded)
        values = [*args, *recorded]
        self._kept = [None if moved else x for x, moved in zip(values, self._moved, strict=True)]
        self._offloaded = OffloadedTensors([x.detach() for x, moved in zip(values, self._moved, strict=True) if moved])

    def fetch(self) -> tuple[list, list[tuple[torch.Tensor, ...]] | None]:
        """The arguments, as leaves of a new graph, and the recorded results."""
        fetched = iter(self._offloaded.fetch())
        values = [next(fetched) if moved else x for x, moved in zip(self._kept, self._moved, strict=True)]
        args = [
            x.detach().requires_grad_(needs) if isinstance(x, torch.Tensor) else x
            for x, needs in zip(values, self._requires_grad, strict=False)
        ]
        if self._lengths is None:
            return args, None
        recorded = iter(values[len(args) :])
        attention = [tuple(next(recorded) for _ in range(length)) for length in self._lengths]
        return args, attention


class _RunContext:
    """Random state and autocast setting in which a layer first ran, to run it again in the same."""

    def __init__(self, device: torch.device, preserve_rng_state: bool) -> None:
        self._device = device
        self._autocast = autocast_as_now(device)
        self._cpu_state = torch.get_rng_state() if preserve_rng_state else None
        self._cuda_state = torch.cuda.get_rng_state(device) if preserve_rng_state and device.type == "cuda" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        devices = [self._device] if self._cuda_state is not None else []
        with (
            torch.random.fork_rng(devices=devices, enabled=self._cpu_state is not None),
            self._autocast(),
        ):
            if self._cpu_state is not None:
                torch.set_rng_state(self._cpu_state)
            if self._cuda_state is not None:
                torch.cuda.set_rng_state(self._cuda_state, self._device)
            yield

"""Gradient checkpointing that follows a memory plan: each layer's tensors stay on the GPU, on the host, or nowhere.

A checkpointed layer runs without a graph, and runs again with one in backward. Attention's results and the outputs of
linear layers that the plan keeps are not computed again (see `layer_run.LayerRun`). Inputs stay on the host, as in
Unsloth's offloaded checkpointing, or on the GPU, or are recomputed by running the previous layer again.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.modeling_utils
from torch.autograd.graph import get_gradient_edge
from transformers import PreTrainedModel

from .autocast import autocast_as_now
from .layer_run import LayerRun, layer_run
from .offload import OffloadedTensors, release_host_memory
from .plan import PLACES, LayerPlan, MemoryPlan, check_memory_plan
from .projections import apply_known_projections
from .tiled_mlp import apply_tiled_mlp

_original_checkpoint: Callable | None = None
_newest = threading.local()  # `layer`, `output`: the checkpointed layer that ran last, if the next layer keeps no input


def apply_memory_plan(model: PreTrainedModel, plan: MemoryPlan, *, mlp_tile_size: int = 0) -> PreTrainedModel:
    """Make a Hugging Face decoder keep the tensors in `plan` for its backward, and recompute the rest.

    Args:
        model: a model with `model.layers`. Call this before DeepSpeed or DDP wraps it.
        plan: one entry for each layer.
        mlp_tile_size: tokens in a tile of a recomputed MLP (see `apply_tiled_mlp`); 0 for untiled MLPs.

    Returns:
        The same model.

    Raises:
        ValueError: the plan has a different number of layers than the model, or backward cannot follow it.
    """
    layers = model.model.layers
    if len(plan) != len(layers):
        raise ValueError(f"a memory plan for {len(plan)} layers does not go with a model of {len(layers)}")
    check_memory_plan(plan)
    for layer, keeps, after in zip(layers, plan, (*plan[1:], None), strict=True):
        makes_input = after is not None and after.input == "none"
        layer.gradient_checkpointing = not keeps.everything
        layer._gradient_checkpointing_func = functools.partial(checkpoint_layer, keeps=keeps, makes_input=makes_input)
        apply_known_projections(layer, model.config.model_type)
    if mlp_tile_size:
        recomputed = [layer for layer, keeps in zip(layers, plan, strict=True) if not keeps.everything]
        apply_tiled_mlp(model, mlp_tile_size, recomputed)
    return model


def apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(
    *, offload: bool = True, keep_attention: str = "gpu"
) -> None:
    """Make later calls of Hugging Face's `model.gradient_checkpointing_enable()` use this module's checkpointing.

    `apply_memory_plan` can do more: it accepts a plan for each layer, and it recomputes less.

    Args:
        offload: whether to move the layers' inputs to pinned host memory while the GPU computes; False keeps them on
            the device.
        keep_attention: where attention outputs and their log-sum-exp are kept for backward: "gpu" (the device), "cpu"
            (the host), or "none" to compute attention twice.

    Raises:
        ValueError: an unknown `keep_attention`.
    """
    global _original_checkpoint
    if keep_attention not in PLACES:
        raise ValueError(f"keep_attention {keep_attention!r} is unknown; choose one of {', '.join(PLACES)}")
    keeps = LayerPlan(input="cpu" if offload else "gpu", attention=keep_attention)
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    _original_checkpoint = transformers.modeling_utils.checkpoint
    transformers.modeling_utils.checkpoint = functools.partial(checkpoint_layer, keeps=keeps)


def remove_unsloth_offloaded_gradient_checkpoint_monkey_patch() -> None:
    """Undo the patch, and unpin unused host memory.

    Models whose checkpointing was enabled under the patch keep it until it is enabled again.
    """
    global _original_checkpoint
    release_host_memory()
    if _original_checkpoint is not None:
        transformers.modeling_utils.checkpoint = _original_checkpoint
        _original_checkpoint = None


def checkpoint_layer(
    function: Callable,
    *args: Any,
    keeps: LayerPlan = LayerPlan(),  # noqa: B008 - frozen
    makes_input: bool = False,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
) -> Any:
    """Run `function(*args)` without a graph now, and again with one in backward.

    Args:
        function: a layer. Tensors that need gradients, other than parameters, must be positional arguments.
        args: positional arguments of the layer, beginning with the hidden states.
        keeps: which tensors are kept for backward, and where.
        makes_input: whether the next layer keeps no input and in backward runs this layer again to recompute it.
        preserve_rng_state: whether to draw the same dropout masks in the second run.
        use_reentrant: accepted for `gradient_checkpointing_kwargs` and ignored. This checkpointing is always reentrant,
            and works without an input that requires gradients.

    Returns:
        The layer's output: a tensor or a tuple of tensors.
    """
    # A layer with trainable parameters but a frozen input still needs a node in the graph; this tensor makes one.
    trigger = torch.empty(0, requires_grad=True)
    settings = {"keeps": keeps, "makes_input": makes_input, "preserve_rng_state": preserve_rng_state}
    return _CheckpointedLayer.apply(trigger, function, settings, *args)


class _CheckpointedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trigger, function, settings, *args):
        keeps = settings["keeps"]
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        context = _RunContext(tensors[0].device if tensors else torch.device("cpu"), settings["preserve_rng_state"])
        run = LayerRun(
            attention=None if keeps.attention == "none" else [],
            projections=None if keeps.projections == "none" else [],
        )
        with layer_run(run):
            outputs = function(*args)
        ctx.first_run = _FirstRun(function, context, args, run, keeps)
        if settings["makes_input"]:
            _newest.layer, _newest.output = ctx.first_run, outputs.detach()
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        if ctx.first_run is None:
            raise RuntimeError("a checkpointed layer was run backward twice; its input was freed after the first time")
        args, outputs = ctx.first_run.run_with_graph()
        ctx.first_run = None  # free what this layer kept
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (get_gradient_edge(output), grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and grad is not None
        ]
        del outputs  # only their graph is needed
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        return (None, None, None, *(x.grad if isinstance(x, torch.Tensor) else None for x in args))


class _FirstRun:
    """The record of a layer's first run that backward needs: the function, its context, and the kept tensors.

    All tensors on the host form one group, so that the prefetch of the next layer in backward fetches all of them.
    """

    def __init__(
        self, function: Callable, context: "_RunContext", args: tuple, run: LayerRun, keeps: LayerPlan
    ) -> None:
        """Start moving the tensors that `keeps` places on the host: floating-point `args` and recorded results."""
        self._function, self._context = function, context
        self._requires_grad = [isinstance(x, torch.Tensor) and x.requires_grad for x in args]
        self._before = _take_layer_that_made(args[0]) if keeps.input == "none" else None
        if self._before is not None:
            args = (None, *args[1:])
        self._lengths = None if run.attention is None else [len(result) for result in run.attention]
        self._recorded_projections = run.projections is not None
        recorded = [tensor for result in run.attention or () for tensor in result]
        moved = [keeps.input == "cpu" and isinstance(x, torch.Tensor) and x.is_floating_point() for x in args]
        moved += [keeps.attention == "cpu"] * len(recorded)
        moved += [keeps.projections == "cpu"] * len(run.projections or ())
        values = [*args, *recorded, *(run.projections or ())]
        self._moved = moved
        self._values: list[Any] = [None if away else x for x, away in zip(values, moved, strict=True)]
        self._offloaded: OffloadedTensors | None = OffloadedTensors(
            [x.detach() for x, away in zip(values, moved, strict=True) if away]
        )

    def run_with_graph(self) -> tuple[list, Any]:
        """Run the layer again, once.

        Returns:
            The arguments, as leaves of a new graph, and the layer's output, whose values are undefined.
        """
        args, attention, projections = self._fetch()
        self._values, self._before = [], None
        args = [
            x.detach().requires_grad_(needs) if isinstance(x, torch.Tensor) else x
            for x, needs in zip(args, self._requires_grad, strict=True)
        ]
        run = LayerRun(recomputing=True, attention=attention, projections=projections, output_unread=True)
        with self._context.restored(), torch.enable_grad(), layer_run(run):
            return args, self._function(*args)

    def output(self) -> Any:
        """Run the layer again without a graph, and return its output for the next layer, which kept no input."""
        args, attention, _ = self._fetch()
        # Projections are computed again, because Liger would change the kept ones in place, and they are still needed.
        with self._context.restored(), torch.no_grad(), layer_run(LayerRun(recomputing=True, attention=attention)):
            return self._function(*args)

    def _fetch(self) -> tuple[list, list[tuple[torch.Tensor, ...]] | None, list[torch.Tensor] | None]:
        """Fetch the arguments, attention's results and the projections to the device, and return them."""
        if self._offloaded is not None:
            fetched = iter(self._offloaded.fetch())
            self._values = [next(fetched) if away else x for x, away in zip(self._values, self._moved, strict=True)]
            self._offloaded = None
        if self._before is not None:
            self._values[0], self._before = self._before.output(), None
        values = iter(self._values)
        args = [next(values) for _ in self._requires_grad]
        lengths = self._lengths
        attention = None if lengths is None else [tuple(next(values) for _ in range(length)) for length in lengths]
        return args, attention, list(values) if self._recorded_projections else None


def _take_layer_that_made(hidden: torch.Tensor) -> _FirstRun | None:
    """Return the most recent checkpointed layer if `hidden` is its unchanged output, else None.

    Hooks between two layers, such as ZeRO-3's, may make another tensor of the same memory.
    """
    layer, output = getattr(_newest, "layer", None), getattr(_newest, "output", None)
    _newest.layer = _newest.output = None
    same = output is not None and (output.data_ptr(), output.shape) == (hidden.data_ptr(), hidden.shape)
    return layer if same else None


class _RunContext:
    """The random state and autocast setting of a layer's first run, to be restored when it runs again."""

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

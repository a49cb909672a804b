"""Estimate the memory of weights, gradients and optimizer states of a process, in bytes for each parameter."""

from typing import Any

from ..memory.forecast import Memory, Shape
from .arguments import Arguments
from .gradient_release import updates_in_backward
from .optimizer import keeps_weights_in_bf16

_MOMENTS_IN_8_BITS = 2 * (1 + 4 / 256)  # two codes of one byte each, and a float32 scale for every 256 codes
_MOST_AT_ONCE = 1e9  # parameters that ZeRO-3's optimizer works on at a time


def state_memory(
    choice: str | None, args: Arguments, plugin: Any, shape: Shape, processes: int, trained_share: float = 1.0
) -> Memory:
    """Estimate the memory of one process's weights, gradients and AdamW states.

    Under ZeRO, mixed-precision AdamW holds 16 bytes a parameter: bf16 weights and gradients, float32 weights and two
    moments. Offloaded, DeepSpeed adds float32 gradients on the host (20 bytes a parameter were counted there with all
    offloaded, 18 without the weights).

    Args:
        choice: what ZeRO-3 offloads, one of `zero_offload.CHOICES`; None for a launch without ZeRO-3.
        args: train.py's arguments.
        plugin: Accelerate's DeepSpeed plugin, or None.
        shape: sizes of the model.
        processes: number of processes, among which ZeRO divides its state.
        trained_share: share of the parameters that are trained; the others have neither gradients nor states.
    """
    parameters, trained = shape.parameters, trained_share * shape.parameters
    if choice is None and plugin is None:
        return Memory(_without_deepspeed(args, shape, processes, trained), 0.0)
    weight = 2 if args.mixed_precision == "bf16" else 4
    own, own_trained = parameters / processes, trained / processes
    if choice is None:
        stage = plugin.deepspeed_config.get("zero_optimization", {}).get("stage", 0)
        if stage:
            return Memory(2 * parameters + 2 * trained + 12 * own_trained, 0.0)
        return Memory(weight * parameters + (16 - weight) * trained, 0.0)
    return {
        "none": Memory(weight * own + (16 - weight) * own_trained, 0.0),
        "optimizer": Memory(weight * own, 18 * own_trained),
        "all": Memory(0.0, weight * own + (20 - weight) * own_trained),
    }[choice]


def _without_deepspeed(args: Arguments, shape: Shape, processes: int, trained: float) -> float:
    """Return the bytes of weights, gradients and moments in plain PyTorch, where every process holds them all."""
    in_bf16 = args.mixed_precision == "bf16"
    weight = 2 if keeps_weights_in_bf16(args) else 4
    gradient = 0 if updates_in_backward(args, processes, None) else weight
    autocast = 2 if in_bf16 and weight == 4 else 0  # Autocast keeps bf16 copies of all weights until forward ends.
    moments = 8 * trained
    if args.optimizer == "adamw8bit":
        # Its moments are float32; where less than all is trained, it is not known of what.
        embedding = min(trained, shape.vocabulary * shape.hidden)
        moments = _MOMENTS_IN_8_BITS * (trained - embedding) + 8 * embedding
    return (weight + autocast) * shape.parameters + gradient * trained + moments


def optimizer_step_memory(
    choice: str | None, args: Arguments, plugin: Any, shape: Shape, processes: int, trained_share: float = 1.0
) -> float:
    """Estimate the working memory of the optimizer's step on the GPU, after activations are freed.

    A step in backward works on one parameter at a time, in memory that its layer has just freed.

    Args:
        choice: as for `state_memory`.
        args: train.py's arguments.
        plugin: Accelerate's DeepSpeed plugin, or None.
        shape: sizes of the model.
        processes: number of processes.
        trained_share: share of the parameters that are trained.
    """
    if choice == "none":
        return 12 * min(trained_share * shape.parameters / processes, _MOST_AT_ONCE)
    if choice is not None or plugin is not None or updates_in_backward(args, processes, plugin):
        return 0.0
    if args.optimizer == "adamw8bit":  # both moments of one parameter in float32; assumed, not measured
        return 8 * shape.hidden * max(shape.vocabulary, shape.inner)
    return 4 * trained_share * shape.parameters  # PyTorch computes the root of all second moments at once.

"""The memory of an evaluation, forecast before its model loads."""

import argparse
from typing import Any

from ..common.notes import say_once
from ..huggingface import head_dim
from ..memory.forecast import Load, Shape
from ..memory.forward_forecast import forward_memory
from ..modes import find_mode
from ..training.accelerator import launched_for_deepspeed
from ..training.free_memory import USABLE, free_memory
from .loading import dtype_of, mode_of, own_device, processes
from .scorer import sizes_at_once

GIB = 2**30


def check_memory(name: str, config: Any, args: argparse.Namespace, tokens: int, longest: str) -> None:
    """Say what this process will need of the memory that is free; a model that runs its own attention is not forecast.

    Args:
        name: path or hub name of the model.
        config: of the model.
        args: the flags of `add_model_flags`.
        tokens: most that go through the model together: a row, or a batch of them.
        longest: the flags that bound them, for the message.

    Raises:
        ValueError: the forecast is above all the memory that is free on this process's device.
    """
    parts = _forecast(config, args, tokens)
    if parts is None:
        return
    need, free = sum(parts.values()), free_memory(own_device(), processes()).gpu
    forecast = (
        f"--model {name}: {tokens:,} tokens at once take about {need / GIB:.1f} of {free / GIB:.1f} GiB that are free "
        f"({', '.join(f'{part} {size / GIB:.1f}' for part, size in parts.items())}) in each of {processes()} processes"
    )
    remedy = (
        f"use more processes, over which a row is split (torchrun --nproc-per-node), a smaller {longest}, or "
        "accelerate_configs/deepspeed_inference.yaml, which splits the weights"
    )
    if need > free:
        raise ValueError(f"{forecast}: {remedy}")
    say_once(forecast if need <= USABLE * free else f"{forecast}, which may be too much: {remedy}")


def _forecast(config: Any, args: argparse.Namespace, tokens: int) -> dict[str, float] | None:
    """Return bytes of a process by part; None for a model that runs its own attention."""
    mode = mode_of(config.model_type, args)
    if mode is None:
        return None
    dtype = dtype_of(args)
    ranks = find_mode(mode).sequence_size(args.sequence_parallel_size, processes())
    kernel = find_mode(mode).select_kernel(args.attn_kernel, own_device(), dtype, head_dim(config))
    load = Load(-(-tokens // ranks), tokens, dtype.itemsize, kernel=kernel.name)
    shape = Shape.of(config)
    parts = forward_memory(shape, load, ranks, *sizes_at_once(getattr(args, "aggressive_memory", False)))
    if launched_for_deepspeed():  # which may keep them on the host; a layer and the output layer are gathered
        parts["weights"] = dtype.itemsize * (shape.layer_parameters + shape.vocabulary * shape.hidden)
    return parts

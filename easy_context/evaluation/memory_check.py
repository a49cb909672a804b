"""Forecasts the memory of an evaluation before its model loads."""

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
    """Print the forecast and the free memory; there is no forecast for models that run their own attention.

    Args:
        name: path or hub name of the model.
        config: the model's config.
        args: the flags of `add_model_flags`.
        tokens: the largest number of tokens in a pass, which is a row or a batch of rows.
        longest: the flags that limit this number, for the message.

    Raises:
        ValueError: the forecast exceeds the free memory of this process's device.
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
    """Return the bytes of a process by part, or None for a model that runs its own attention."""
    mode = mode_of(config.model_type, args)
    if mode is None:
        return None
    dtype = dtype_of(args)
    ranks = find_mode(mode).sequence_size(args.sequence_parallel_size, processes())
    kernel = find_mode(mode).select_kernel(args.attn_kernel, own_device(), dtype, head_dim(config))
    load = Load(-(-tokens // ranks), tokens, dtype.itemsize, kernel=kernel.name)
    shape = Shape.of(config)
    parts = forward_memory(shape, load, ranks, *sizes_at_once(getattr(args, "aggressive_memory", False)))
    if launched_for_deepspeed():  # It may keep the weights on the host; it gathers a layer and the output layer.
        parts["weights"] = dtype.itemsize * (shape.layer_parameters + shape.vocabulary * shape.hidden)
    return parts

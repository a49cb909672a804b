"""What DeepSpeed ZeRO-3 keeps in host memory: who decides it, what it takes, and the configuration that says so."""

import os
from typing import Any

import torch

from ..memory.forecast import Memory
from .arguments import Arguments

CHOICES = ("none", "optimizer", "all")  # fastest first
IN_WORDS = {
    "none": "weights and optimizer stay on the GPU",
    "optimizer": "the optimizer waits in host memory, weights stay on the GPU",
    "all": "weights and optimizer wait in host memory",
}


def is_zero_3(plugin: Any) -> bool:
    """Return whether Accelerate's DeepSpeed plugin, None without DeepSpeed, asks for ZeRO-3."""
    return plugin is not None and plugin.deepspeed_config.get("zero_optimization", {}).get("stage") == 3


def named_by_json(plugin: Any) -> str | None:
    """Return the choice that the launch configuration makes, None if it leaves it open."""
    zero = plugin.deepspeed_config["zero_optimization"]
    devices = {kind: (zero.get(f"offload_{kind}") or {}).get("device") for kind in ("optimizer", "param")}
    if devices["param"] in ("cpu", "nvme"):
        return "all"
    if devices["optimizer"] in ("cpu", "nvme"):
        return "optimizer"
    # Accelerate writes "none" itself where a YAML file describes DeepSpeed without a JSON.
    from_json = "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ
    return "none" if from_json and "none" in devices.values() else None


def write_offload(plugin: Any, choice: str) -> None:
    """Put a choice into the configuration that DeepSpeed reads."""
    zero = plugin.deepspeed_config["zero_optimization"]
    for kind, offloaded in (("optimizer", choice != "none"), ("param", choice == "all")):
        zero.pop(f"offload_{kind}", None)
        if offloaded:
            zero[f"offload_{kind}"] = {"device": "cpu", "pin_memory": True}
    if choice != "none" and torch.cuda.is_available():
        # PyTorch's AdamW would run on the host, many times slower than DeepSpeed's for CPUs.
        plugin.deepspeed_config.get("optimizer", {}).get("params", {}).pop("torch_adam", None)
    plugin.set_deepspeed_weakref()  # from_pretrained reads a copy


def state_memory(choice: str | None, args: Arguments, plugin: Any, parameters: int, processes: int) -> Memory:
    """Estimate what weights, gradients and AdamW's states take of one process.

    Mixed-precision AdamW holds 16 bytes a parameter: bf16 weights and gradients, float32 weights and two moments.
    Offloaded, DeepSpeed adds float32 gradients on the host (20 bytes a parameter were counted there with all
    offloaded, 18 without the weights).

    Args:
        choice: of ZeRO-3, one of CHOICES; None for a launch without ZeRO-3.
        args: train.py's arguments.
        plugin: Accelerate's for DeepSpeed, or None.
        parameters: of the model.
        processes: of the launch; they share what ZeRO shards.
    """
    own = parameters / processes
    in_half = args.mixed_precision == "bf16"
    if choice is None:
        stage = 0 if plugin is None else plugin.deepspeed_config.get("zero_optimization", {}).get("stage", 0)
        return Memory(4 * parameters + 12 * own if stage else 16 * parameters, 0.0)
    return {
        "none": Memory(16 * own, 0.0),
        "optimizer": Memory((2 if in_half else 4) * own, 18 * own),
        "all": Memory(0.0, 20 * own),
    }[choice]

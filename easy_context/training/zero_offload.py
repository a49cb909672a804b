"""Choose the state that DeepSpeed ZeRO-3 keeps in host memory, and write the choice into its configuration."""

import os
from typing import Any

import torch

CHOICES = ("none", "optimizer", "all")  # fastest first
IN_WORDS = {
    "none": "weights and optimizer stay on the GPU",
    "optimizer": "the optimizer waits in host memory, weights stay on the GPU",
    "all": "weights and optimizer wait in host memory",
}


def is_zero_3(plugin: Any) -> bool:
    """Return whether Accelerate's DeepSpeed plugin (None without DeepSpeed) uses ZeRO-3."""
    return plugin is not None and plugin.deepspeed_config.get("zero_optimization", {}).get("stage") == 3


def named_by_json(plugin: Any) -> str | None:
    """Return the choice in the launch configuration, or None if it has none."""
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

"""Let train.py's flags override the same settings in the launch configuration, and log the overridden values."""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .arguments import Arguments

_ADAMW = ("adamw", "adam")  # DeepSpeed's Adam is AdamW unless told otherwise


def settle_launch(args: Arguments, with_deepspeed: bool) -> tuple[Any, str | None]:
    """Put the flags' values into what `accelerate launch` has set up for this process.

    It has to be done before the Accelerator is made, which refuses a DeepSpeed JSON of another precision, and would
    take accumulation steps from the environment rather than from its argument.

    Args:
        args: train.py's arguments.
        with_deepspeed: whether the launch configuration asks for DeepSpeed.

    Returns:
        The `accelerate.DeepSpeedPlugin` (None without DeepSpeed), and a line for the log about values that the flags
        overrule (None if there are none).
    """
    overruled = _settle_environment(args)
    plugin, source = None, "the launch configuration"
    if with_deepspeed:
        from accelerate import DeepSpeedPlugin

        plugin = DeepSpeedPlugin()
        file = Path(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", ""))
        # Accelerate has added values of its own to what the JSON says.
        written = json.loads(file.read_text()) if file.is_file() else None
        source = file.name or source
        overruled += apply_flags(plugin.deepspeed_config, args, written)
    return plugin, f"train.py's flags overrule {source}: {'; '.join(overruled)}" if overruled else None


def _settle_environment(args: Arguments) -> list[str]:
    overruled = []
    for name, value, flag in (
        ("ACCELERATE_MIXED_PRECISION", args.mixed_precision, "--mixed-precision"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(args.gradient_accumulate_every), "--gradient-accumulate-every"),
    ):
        own = os.environ.get(name)
        if own is not None:
            os.environ[name] = value
        # Where nothing is asked for, accelerate launch writes "no", and 1 or auto.
        if own not in (None, "no", "1", "auto", value):
            overruled.append(f"{name} {own} -> {value} ({flag})")
    return overruled


def apply_flags(config: dict[str, Any], args: Arguments, written: dict[str, Any] | None = None) -> list[str]:
    """Give the flags the last word over a DeepSpeed configuration, which describes only the cluster.

    Args:
        config: changed in place.
        args: train.py's arguments.
        written: the configuration as its author wrote it; `config` as it is if None.

    Returns:
        For each key to which the author gave another value: the key, that value, the one that is used and its flag.
    """
    written = copy.deepcopy(config if written is None else written)
    if str(_get(written, "optimizer.type") or "AdamW").lower() not in _ADAMW:
        config["optimizer"] = {}  # its parameters may be none of AdamW's
    overruled = []
    for key, value, flag in _settled(args, written):
        own = _get(written, key)
        _set(config, key, value)
        if own not in (None, "auto", value) and not (value == "AdamW" and str(own).lower() in _ADAMW):
            overruled.append(f"{key} {own} -> {value} ({flag})")
    rows = args.batch_size * args.gradient_accumulate_every * int(os.environ.get("WORLD_SIZE", "1"))
    config["train_batch_size"] = "auto"
    if (own := written.get("train_batch_size", "auto")) not in ("auto", rows):
        overruled.append(f"train_batch_size {own} -> {rows} (--batch-size, --gradient-accumulate-every, processes)")
    if scheduler := config.pop("scheduler", None):
        overruled.append(
            f"scheduler {scheduler.get('type')} -> {args.lr_scheduler}, {args.warmup_steps} warm-up steps "
            "(--lr-scheduler, --warmup-steps)"
        )
    return overruled


def _settled(args: Arguments, written: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Each key that train.py settles, its value, and where that comes from."""
    precision = f"--mixed-precision {args.mixed_precision}"
    yield "train_micro_batch_size_per_gpu", args.batch_size, "--batch-size"
    yield "gradient_accumulation_steps", args.gradient_accumulate_every, "--gradient-accumulate-every"
    yield "gradient_clipping", args.max_grad_norm, "--max-grad-norm"
    yield "bf16.enabled", args.mixed_precision == "bf16", precision
    yield "optimizer.type", "AdamW", "train.py has no other"
    yield "optimizer.params.lr", args.learning_rate, "--learning-rate"
    yield "optimizer.params.weight_decay", args.weight_decay, "--weight-decay"
    yield "optimizer.params.betas", list(args.adam_betas), "--adam-betas"
    if _get(written, "zero_optimization.stage") == 3:
        yield "zero_optimization.stage3_gather_16bit_weights_on_model_save", True, "train.py saves the whole model"
    for key, value, why in (
        ("fp16.enabled", False, precision),
        ("torch_autocast.enabled", False, precision),
        ("optimizer.params.adam_w_mode", True, "--weight-decay is AdamW's"),
        ("zero_optimization.compute_grad_norm", True, "train.py logs the norm"),
    ):
        if _get(written, key) is not None:
            yield key, value, why


def _get(config: dict[str, Any], key: str) -> Any:
    """Return the value at "section.key", None where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value

"""Weights & Biases and TensorBoard; a run that goes on after an interruption continues its own curves."""

import dataclasses
import os
import secrets
from pathlib import Path
from typing import Any

from ..common.files import write_whole
from .arguments import Arguments

WANDB_ID = "wandb-id.txt"  # the wandb run that this folder's training logs to


def start_trackers(accelerator: Any, args: Arguments, step: int) -> None:
    """Open the trackers that --report-to names.

    Args:
        accelerator: the Accelerator, made with `log_with`.
        args: train.py's arguments.
        step: the last one of an earlier run that this one continues, 0 for a new run.
    """
    if args.report_to == "none":
        return
    wandb = {"dir": args.output_dir}
    if args.report_to in ("wandb", "all") and accelerator.is_main_process:
        _wandb_offline_without_key()
        wandb |= {"id": _wandb_id(Path(args.output_dir), step), "resume": "allow"}
    settings = {
        key: str(value) if isinstance(value, list | tuple) else value for key, value in dataclasses.asdict(args).items()
    }
    accelerator.init_trackers(
        args.wandb or "easy-context",
        config=settings,
        # TensorBoard leaves out what was logged of later steps.
        init_kwargs={"wandb": wandb, "tensorboard": {"purge_step": step + 1} if step else {}},
    )


def _wandb_id(output_dir: Path, step: int) -> str:
    """Return the wandb run that logs into this folder, a new one for a run that does not go on."""
    file = output_dir / WANDB_ID
    if not (step and file.exists()):
        write_whole(file, secrets.token_hex(4))
    return file.read_text()


def _wandb_offline_without_key() -> None:
    """Let wandb write offline where it would ask for a key and wait."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    if netrc.exists() and "api.wandb.ai" in netrc.read_text():
        return
    os.environ["WANDB_MODE"] = "offline"
    print("wandb has no API key: the run is logged offline; `wandb sync` uploads it later")

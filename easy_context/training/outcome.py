"""Describe the files that a run has saved when it is stopped."""

from collections.abc import Callable
from pathlib import Path

from .checkpoints.files import newest_in
from .saving import METRICS, MODEL_CONFIG


def what_is_saved(output_dir: Path) -> Callable[[], str]:
    """Return a function that says what train.py has saved in the folder since now."""
    before = {name: _signature(output_dir / name) for name in (METRICS, MODEL_CONFIG)}

    def describe() -> str:
        metrics, config = output_dir / METRICS, output_dir / MODEL_CONFIG
        if config.exists() and _signature(config) != before[MODEL_CONFIG]:
            return f"the model is saved in {output_dir}"
        steps = metrics.read_bytes().count(b"\n") if _signature(metrics) not in (None, before[METRICS]) else 0
        if not steps:
            return f"no step was finished and nothing was saved in {output_dir}"
        saved = newest_in(output_dir)
        model = "the model of an earlier run is unchanged" if config.exists() else "no model is saved"
        goes_on = f"goes on from {saved}" if saved else "begins again at step 1"
        return f"{steps} steps are in {metrics}, {model}; the same command {goes_on}"

    return describe


def _signature(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written anew; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

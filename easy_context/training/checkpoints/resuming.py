"""Resume from a checkpoint: find a complete one, compare its settings with the run's, and load it."""

import logging
import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...common.errors import first_line
from ...common.files import first_free
from ..all_processes import first_problem
from ..arguments import Arguments
from ..refusal import exit_on
from ..saving import MODEL_CONFIG
from .files import checkpoints_in, damage, read_manifest, read_states
from .settings import differences
from .state import TrainingState

logger = logging.getLogger(__name__)


@exit_on(ValueError)
def resume(accelerator: Any, args: Arguments, settings: dict[str, Any], state: TrainingState) -> dict[str, Any]:
    """Load the checkpoint that --resume names, or the last whole one.

    The run ends with a message if the named checkpoint is damaged or was made with other settings. Checkpoints of later
    steps are moved to `earlier-checkpoints-N`, so that no run resumes from them by mistake.

    Args:
        accelerator: the Accelerator.
        args: train.py's arguments.
        settings: settings of this run, to be compared with the checkpoint's.
        state: training state to load the checkpoint into.

    Returns:
        The manifest of the checkpoint, or a manifest of step 0 if there is no checkpoint.
    """
    manifest = _load_last(accelerator, args, settings, state)
    if accelerator.is_main_process:
        _set_aside(Path(args.output_dir), manifest["step"])
    return manifest


def _load_last(accelerator: Any, args: Arguments, settings: dict[str, Any], state: TrainingState) -> dict[str, Any]:
    named = args.resume not in ("auto", "none")
    for folder in [Path(args.resume)] if named else _candidates(accelerator, args):
        problem, manifest = _inspect(accelerator, folder)
        if problem is None:
            _refuse_other_settings(folder, manifest["settings"], settings, args.resume_anyway)
            _refuse_too_few_steps(folder, manifest["step"], args.max_train_steps)
            try:
                state.put_back(read_states(folder, manifest["processes"]))
            except (ValueError, pickle.UnpicklingError) as error:
                raise ValueError(f"{folder} cannot be used: {first_line(error)}") from error
            logger.info("resumed from %s", folder)
            return {"skipped": []} | manifest  # versions that did not say which
        if named:
            raise ValueError(f"--resume {folder} cannot be used: {problem}")
        logger.info("%s is left out: %s", folder, problem)
    return {"step": 0, "skipped": []}


def _candidates(accelerator: Any, args: Arguments) -> list[Path]:
    """Return the checkpoints as rank 0 sees them, newest first; not those of a run that has saved its model since."""
    if args.resume == "none":
        return []
    config = Path(args.output_dir) / MODEL_CONFIG
    finished = config.stat().st_mtime if config.exists() else 0.0
    found = [[path for path in checkpoints_in(Path(args.output_dir)).values() if path.stat().st_mtime > finished]]
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(found, src=0, device=accelerator.device)
    return found[0]


def _inspect(accelerator: Any, folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the first problem that any process finds in a checkpoint, and the checkpoint's manifest."""
    manifest = {}
    try:
        manifest = read_manifest(folder)
        problem = damage(folder, manifest, accelerator.process_index, accelerator.num_processes)
    except (OSError, ValueError) as error:
        problem = first_line(error)
    return first_problem(accelerator, problem), manifest


def _refuse_other_settings(folder: Path, saved: dict[str, Any], settings: dict[str, Any], anyway: bool) -> None:
    if anyway:  # the states of one optimizer are of no use to another
        settings = {"optimizer": settings["optimizer"]}
    if other := differences(saved, settings):
        raise ValueError(
            f"{folder} was made with other settings: {'; '.join(other)}. Use the same,"
            f"{'' if anyway else ' pass --resume-anyway,'} or start anew with --resume none"
        )


def _refuse_too_few_steps(folder: Path, step: int, max_train_steps: int) -> None:
    if step > max_train_steps:
        raise ValueError(
            f"{folder} was saved after step {step}, beyond --max-train-steps {max_train_steps}: raise it, name an "
            "earlier checkpoint with --resume, or start anew with --resume none"
        )


def _set_aside(output_dir: Path, step: int) -> None:
    """Move away later checkpoints, damaged or of an earlier run, so that no run resumes from them by mistake."""
    later = [path for saved_after, path in checkpoints_in(output_dir).items() if saved_after > step]
    if not later:
        return
    kept = first_free(output_dir, "earlier-checkpoints-{}")
    kept.mkdir()
    for folder in later:
        folder.rename(kept / folder.name)
    logger.warning("checkpoints behind step %d are of an earlier run or damaged: moved to %s", step, kept)

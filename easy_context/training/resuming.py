"""Folders `checkpoint-<step>/` from which a run that was cut off goes on, written whole or not at all.

Every process writes one file: under ZeRO-3 its share of the float32 weights and of the optimizer's moments, otherwise
the first process all of them. The rows of a step are a function of the step alone, so nothing of the data is saved.
"""

import contextlib
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..common.errors import first_line
from ..common.files import first_free
from .arguments import Arguments
from .refusal import refusal
from .resume_files import FORMAT, MANIFEST, PARTIAL, checkpoints_in, damage, file_of, finish, read, write_own
from .saving import MODEL_CONFIG
from .zero_shares import load_shares, shares

logger = logging.getLogger(__name__)

# Another value of one of these gives other weights. Modes, kernels and what is kept where do not.
SETTINGS = (
    "model",
    "dataset",
    "seq_length",
    "rope_theta",
    "learning_rate",
    "warmup_steps",
    "lr_scheduler",
    "weight_decay",
    "adam_betas",
    "max_grad_norm",
    "seed",
    "mixed_precision",
)


class Checkpoints:
    """A run's checkpoints: when one is due, saving it, going on from the last one that is whole."""

    @refusal()
    def __init__(
        self, accelerator: Any, args: Arguments, mesh: Any, model: Any, optimizer: Any, scheduler: Any, rows: int
    ) -> None:
        """Remember what is saved.

        Args:
            accelerator: the Accelerator.
            args: train.py's arguments.
            mesh: the grid of ranks.
            model: prepared, like the optimizer.
            optimizer: of plain PyTorch; DeepSpeed's engine has its own.
            scheduler: of the learning rate.
            rows: of the dataset; their number decides their order.
        """
        self._accelerator, self._args = accelerator, args
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._folder = Path(args.output_dir)
        self._sharded = accelerator.state.deepspeed_plugin is not None
        self._settings = settings_of(args, mesh.data_size, rows)
        self._last_save = time.monotonic()
        stage = model.zero_optimization_stage() if self._sharded else None
        if stage not in (None, 3) and (args.save_every or args.save_minutes):
            raise ValueError(
                f"--save-every and --save-minutes need ZeRO-3 or no DeepSpeed, and this is ZeRO stage {stage}"
            )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after `step`, the same on every process."""
        every, minutes = self._args.save_every, self._args.save_minutes
        if step == self._args.max_train_steps:
            return False  # the model itself is saved next
        due = bool(every) and step % every == 0
        if minutes and not due:
            due = self._agree_any(
                self._accelerator.is_main_process and time.monotonic() - self._last_save >= 60 * minutes
            )
        return due

    def save(self, step: int) -> None:
        """Save `checkpoint-<step>`. A full disk, or any error of the file system, costs this checkpoint and no more."""
        start, partial = time.perf_counter(), self._folder / PARTIAL
        main = self._accelerator.is_main_process
        if main:
            shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                partial.mkdir()
        self._accelerator.wait_for_everyone()
        problem, entry = None, None
        try:
            entry = write_own(partial / file_of(self._accelerator.process_index), self._state())
        except (OSError, RuntimeError) as error:  # torch.save gives a RuntimeError when the disk is full
            if isinstance(error, torch.OutOfMemoryError):
                raise
            problem = first_line(error)
        problem, files = self._collect(problem, entry)
        if main and problem is None:
            try:
                finish(self._folder, step, {"files": files, "settings": self._settings} | self._versions())
                self._remove_old()
            except OSError as error:
                problem = first_line(error)
        problem, _ = self._collect(problem, None)
        if problem is not None:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
            logger.warning(
                "checkpoint of step %d could not be saved (%s); earlier ones are untouched and training goes on",
                step,
                problem,
            )
        self._last_save = time.monotonic()
        if problem is None:
            logger.info("saved checkpoint-%d in %.1f s", step, time.perf_counter() - start)

    @refusal()
    def restore(self) -> int:
        """Load the checkpoint that --resume names, or the last whole one.

        A named checkpoint that is damaged, and one that was made with other settings, end the run with a message.

        Returns:
            The step that it was saved after; 0 where there is none.
        """
        step = self._load_last()
        if self._accelerator.is_main_process:
            self._set_aside(step)
        return step

    def _load_last(self) -> int:
        named = self._args.resume not in ("auto", "none")
        for folder in [Path(self._args.resume)] if named else self._candidates():
            problem, manifest = self._inspect(folder)
            if problem is None:
                self._refuse_other_settings(folder, manifest)
                self._refuse_too_few_steps(folder, manifest["step"])
                self._load(folder, manifest["processes"])
                logger.info("resumed from %s", folder)
                return manifest["step"]
            if named:
                raise ValueError(f"--resume {folder} cannot be used: {problem}")
            logger.warning("%s is left out: %s", folder, problem)
        return 0

    def _candidates(self) -> list[Path]:
        """The checkpoints as rank 0 sees them, newest first; not those of a run that saved its model since."""
        if self._args.resume == "none":
            return []
        config = self._folder / MODEL_CONFIG
        finished = config.stat().st_mtime if config.exists() else 0.0
        found = [[path for path in checkpoints_in(self._folder).values() if path.stat().st_mtime > finished]]
        if self._accelerator.num_processes > 1:
            dist.broadcast_object_list(found, src=0, device=self._accelerator.device)
        return found[0]

    def _set_aside(self, step: int) -> None:
        """Move checkpoints of later steps, damaged or of an earlier run, where no run takes them for its own."""
        later = [path for saved_after, path in checkpoints_in(self._folder).items() if saved_after > step]
        if not later:
            return
        kept = first_free(self._folder, "earlier-checkpoints-{}")
        kept.mkdir()
        for folder in later:
            folder.rename(kept / folder.name)
        logger.warning("checkpoints behind step %d are of an earlier run or damaged: moved to %s", step, kept)

    def _inspect(self, folder: Path) -> tuple[str | None, dict[str, Any]]:
        """What is wrong with a checkpoint, as any process sees it (each reads its own file), and its manifest."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            problem = damage(folder, manifest, self._accelerator.process_index, self._accelerator.num_processes)
        except (OSError, ValueError, KeyError, TypeError) as error:
            manifest, problem = {}, f"its {MANIFEST} cannot be read ({first_line(error)})"
        problem, _ = self._collect(problem, None)
        return problem, manifest

    def _refuse_too_few_steps(self, folder: Path, step: int) -> None:
        if step > self._args.max_train_steps:
            raise ValueError(
                f"{folder} was saved after step {step}, beyond --max-train-steps {self._args.max_train_steps}: raise "
                "it, name an earlier checkpoint with --resume, or start anew with --resume none"
            )

    def _refuse_other_settings(self, folder: Path, manifest: dict[str, Any]) -> None:
        saved = manifest["settings"]
        other = [
            f"{name} was {saved.get(name)!r} and is {value!r}"
            for name, value in json.loads(json.dumps(self._settings)).items()
            if saved.get(name) != value
        ]
        if other and not self._args.resume_anyway:
            raise ValueError(
                f"{folder} was made with other settings: {'; '.join(other)}. Use the same, pass --resume-anyway, or "
                "start anew with --resume none"
            )
        if manifest["sharded"] != self._sharded:
            ways = ("without DeepSpeed", "under ZeRO-3")
            raise ValueError(f"{folder} was made {ways[manifest['sharded']]}: launch this run so too")

    def _state(self) -> dict[str, Any]:
        random_state = {"cpu": torch.get_rng_state()}
        if self._accelerator.device.type == "cuda":
            random_state["cuda"] = torch.cuda.get_rng_state(self._accelerator.device)
        state = {"random": random_state, "scheduler": self._scheduler.state_dict()}
        if self._sharded:
            return state | {"zero": shares(self._model.optimizer, self._model.module)}
        if self._accelerator.is_main_process:
            model = self._accelerator.unwrap_model(self._model)
            state |= {"model": model.state_dict(), "optimizer": self._optimizer.state_dict()}
        return state

    def _load(self, folder: Path, processes: int) -> None:
        """Load a checkpoint that so many processes saved."""
        rank = self._accelerator.process_index
        if self._sharded:
            load_shares(self._model.optimizer, self._model.module, lambda n: read(folder, n)["zero"], processes, rank)
        else:
            whole = read(folder, 0)
            self._accelerator.unwrap_model(self._model).load_state_dict(whole["model"])
            self._optimizer.load_state_dict(whole["optimizer"])
        own = read(folder, rank if rank < processes else 0)
        self._scheduler.load_state_dict(own["scheduler"])
        torch.set_rng_state(own["random"]["cpu"])
        if "cuda" in own["random"] and self._accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(own["random"]["cuda"], self._accelerator.device)

    def _versions(self) -> dict[str, Any]:
        from importlib.metadata import version

        packages = ("torch", "transformers", "accelerate", "deepspeed")
        return {
            "format": FORMAT,
            "processes": self._accelerator.num_processes,
            "sharded": self._sharded,
            "versions": {name: version(name) for name in packages},
        }

    def _collect(self, problem: str | None, entry: dict | None) -> tuple[str | None, dict]:
        """Any process's problem, and what every process wrote, on every process."""
        if self._accelerator.num_processes == 1:
            return problem, entry or {}
        found: list[Any] = [None] * self._accelerator.num_processes
        dist.all_gather_object(found, (problem, entry or {}))
        files = {name: value for _, each in found for name, value in each.items()}
        return next((said for said, _ in found if said), None), files

    def _agree_any(self, flag: bool) -> bool:
        if self._accelerator.num_processes == 1:
            return flag
        tensor = torch.tensor(int(flag), device=self._accelerator.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return bool(tensor)

    def _remove_old(self) -> None:
        for old in list(checkpoints_in(self._folder).values())[self._args.keep_last :]:
            shutil.rmtree(old, ignore_errors=True)


def settings_of(args: Arguments, data_size: int, rows: int) -> dict[str, Any]:
    """Return what decides the weights of each step, for the comparison with a checkpoint's."""
    settings = {name: getattr(args, name) for name in SETTINGS} | {"rows": rows}
    settings["rows_per_step"] = args.batch_size * args.gradient_accumulate_every * data_size
    if args.lr_scheduler != "constant":
        settings["max_train_steps"] = args.max_train_steps
    return settings

"""Saving checkpoints: when one is due, and writing its files while training goes on."""

import logging
import os
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...common.errors import first_line
from ...data.token_rows import TokenRows
from ..all_processes import any_process, every_process, first_problem
from ..arguments import Arguments
from ..free_memory import USABLE, free_host_memory
from ..watch.watch import Watch
from .background import FileWriting, copy_of, size_of
from .files import PARTIAL, make_partial, missing_room, not_visible
from .resuming import resume
from .settings import settings_of
from .state import TrainingState

logger = logging.getLogger(__name__)
SECONDS_UNTIL_RETRY = 300.0  # behind a checkpoint that could not be saved


class Checkpoints:
    """A run's checkpoints: the one it goes on from, and those it saves.

    Attributes:
        stopping: whether a signal has asked the run to save and end; the same on every process.
        saved_step: last step with a complete checkpoint; 0 if there is none.
        skipped_steps: steps skipped because of a loss or gradient norm that is not finite, including before resuming.
    """

    def __init__(
        self, accelerator: Any, args: Arguments, mesh: Any, model: Any, optimizer: Any, rows: TokenRows, watch: Watch
    ) -> None:
        """Remember what is saved.

        Args:
            accelerator: the Accelerator.
            args: train.py's arguments.
            mesh: the grid of ranks.
            model: prepared, like the optimizer.
            optimizer: of plain PyTorch; DeepSpeed's engine has its own.
            rows: of --dataset; their number decides their order.
            watch: is told what this process does, and knows whether a signal asks it to save and end.
        """
        self._accelerator, self._args, self._watch = accelerator, args, watch
        self._folder = Path(args.output_dir)
        self._state = TrainingState(accelerator, model, optimizer)
        self._settings = settings_of(args, mesh.data_size, rows)
        self._next_save = time.monotonic() + 60 * args.save_minutes if args.save_minutes else float("inf")
        self._writing: FileWriting | None = None
        self.stopping = False
        self.saved_step = 0
        self.skipped_steps: list[int] = []

    def restore(self) -> int:
        """Go on from the checkpoint that --resume asks for; return the step it was saved after, 0 if there is none.

        From now on a first SIGTERM or SIGUSR1 asks for a checkpoint and the end of the run.
        """
        manifest = resume(self._accelerator, self._args, self._settings, self._state)
        self.saved_step, self.skipped_steps = manifest["step"], manifest["skipped"]
        self._watch.interrupts.save_first("this step is finished, a checkpoint is saved, and the run ends")
        return self.saved_step

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is to be saved after `step`, the same on every process; call it after each step.

        It is due every --save-every steps and --save-minutes, some minutes after a save that failed, and when a signal
        has asked any process to end (`stopping`).
        """
        writing = self._writing
        stop, time_is_up, still_writing, failed = any_process(
            self._accelerator,
            self._watch.interrupts.asked_to_stop,
            self._accelerator.is_main_process and time.monotonic() >= self._next_save,
            writing is not None and writing.is_alive(),
            writing is not None and writing.problem is not None,
        )
        if failed or not still_writing:
            self.finish()
        if step == self._args.max_train_steps:
            return False  # the model itself is saved next
        self.stopping = stop
        return stop or time_is_up or bool(self._args.save_every and step % self._args.save_every == 0)

    def save(self, step: int) -> None:
        """Begin to save `checkpoint-<step>`; training goes on while threads write copies of the state.

        A process without enough host memory for a copy writes its file immediately. If the disk is full or the file
        system fails, only this checkpoint is lost.
        """
        self._watch.at(f"saving checkpoint-{step}", patient=True)
        self.finish()
        began = time.monotonic()
        state, manifest = self._state.take(), None
        own_size = size_of(state)
        size = sum(every_process(self._accelerator, own_size))
        problem = None
        if self._accelerator.is_main_process:
            manifest = self._manifest(step)
            problem = _prepare(self._folder, size)
        problem = first_problem(self._accelerator, problem)
        problem = first_problem(self._accelerator, problem or not_visible(self._folder / PARTIAL))
        if problem is not None:
            self._say_failed(step, problem)
            self._watch.at(f"behind step {step}")
            return
        processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", self._accelerator.num_processes))
        copied = own_size <= USABLE * free_host_memory() / processes_here
        process = self._accelerator.process_index
        self._writing = FileWriting(
            self._folder, step, process, copy_of(state) if copied else state, manifest, self._args.keep_last
        )
        self._writing.start()
        if not copied:
            self._writing.own_file_is_done.wait()
        self._writing.size, self._writing.began, self._writing.waited = size, began, time.monotonic() - began
        self._watch.at(f"behind step {step}")

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is whole; collective."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.own_file_is_done.wait()
        problem = first_problem(self._accelerator, writing.problem)
        if problem is not None:
            writing.another_failed.set()  # the first process need not wait for its file
        writing.join()
        problem = problem or first_problem(self._accelerator, writing.problem)
        if problem is not None:
            self._say_failed(writing.step, problem)
            return
        if self._args.save_minutes:
            self._next_save = writing.began + 60 * self._args.save_minutes
        self.saved_step = writing.step
        logger.info(
            "saved checkpoint-%d: %.3g GB, written in %.1f s, for which training waited %.1f s",
            *(writing.step, writing.size / 1e9, writing.seconds, writing.waited),
        )

    def close(self) -> None:
        """Wait for files that are being written; if a signal has ended the run, print how to continue it."""
        self._watch.at("saving", patient=True)
        self.finish()
        if self.stopping:
            self._accelerator.print(
                f"stopped by a signal: the same command goes on from checkpoint-{self.saved_step} in {self._folder}"
            )
        else:
            self._watch.interrupts.save_first("the model is saved first")

    def _say_failed(self, step: int, problem: str) -> None:
        self._next_save = time.monotonic() + SECONDS_UNTIL_RETRY
        if self._accelerator.is_main_process:
            shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
        logger.info(
            "checkpoint of step %d could not be saved (%s); earlier ones are untouched%s",
            *(step, problem),
            "" if self.stopping else f"; training goes on and tries again in {SECONDS_UNTIL_RETRY / 60:.0f} minutes",
        )
        if self.stopping:
            sys.exit(1)

    def _manifest(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "skipped": self.skipped_steps,
            "processes": self._accelerator.num_processes,
            "settings": self._settings,
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
        }


def _prepare(folder: Path, size: int) -> str | None:
    """Make the folder for a checkpoint of the given size in bytes; return the problem, or None on success."""
    try:
        problem = missing_room(folder, size)
        if problem is None:
            make_partial(folder)
    except OSError as error:
        problem = first_line(error)
    return problem

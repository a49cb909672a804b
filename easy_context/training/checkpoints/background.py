"""Write a process's checkpoint file in a thread, from a copy of the state, while training continues."""

import threading
import time
from pathlib import Path
from typing import Any

import torch

from ...common.errors import first_line
from .files import PARTIAL, finish, remove_old, wait_for_files, write_state


class FileWriting(threading.Thread):
    """Writes one process's file of a checkpoint; on the first process, waits for the others' and names the checkpoint.

    Attributes:
        step: step of the checkpoint.
        problem: reason why the checkpoint cannot be completed, as far as this process knows; None without a problem.
        seconds: duration of the writing.
        size: total bytes of all files.
        began: start of the saving, in seconds of `time.monotonic`.
        waited: seconds that training waited.
        own_file_is_done: event that is set when this process has written its file or has failed to.
        another_failed: event for the caller to set if another process could not write its file.
    """

    def __init__(
        self, folder: Path, step: int, process: int, state: dict, manifest: dict | None, keep_last: int
    ) -> None:
        """Prepare the thread.

        Args:
            folder: folder of the run.
            step: step of the checkpoint.
            process: rank of this process.
            state: this process's part of the state, which training must not change while it is written.
            manifest: manifest without its list of files; None except on the first process.
            keep_last: number of checkpoints to keep.
        """
        super().__init__(name=f"checkpoint-{step}", daemon=True)  # a run that fails does not wait for it
        self._folder, self.step, self._process, self._state, self._manifest = folder, step, process, state, manifest
        self._keep_last = keep_last
        self.problem: str | None = None
        self.size, self.began, self.waited, self.seconds = 0, 0.0, 0.0, 0.0
        self.own_file_is_done, self.another_failed = threading.Event(), threading.Event()

    def run(self) -> None:
        """Write, and remember a problem."""
        began, partial = time.monotonic(), self._folder / PARTIAL
        try:
            write_state(partial, self._process, self._state)
            self.own_file_is_done.set()
            if self._manifest is not None:
                files = wait_for_files(partial, self._manifest["processes"], self.another_failed)
                finish(self._folder, self._manifest | {"files": files})
                remove_old(self._folder, self._keep_last)
        except Exception as error:
            self.problem = first_line(error)
        self.seconds = time.monotonic() - began
        self._state = {}  # a copy may take much memory
        self.own_file_is_done.set()


def size_of(state: Any) -> int:
    """Return the bytes of all tensors in nested dicts and lists."""
    if torch.is_tensor(state):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(size_of(value) for value in values)


def copy_of(state: Any) -> Any:
    """Return the same nested dicts and lists with copies of the tensors in host memory."""
    if torch.is_tensor(state):
        return state.to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    return [copy_of(value) for value in state] if isinstance(state, list) else state

"""The processes of a benchmark's run, and the time that it may take."""

import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .flags import launched_processes


@dataclass(frozen=True)
class World:
    """The processes of this run.

    Attributes:
        rank: of this process.
        size: how many there are.
        device: of this process, `cuda:<local rank>` or `cpu`.
    """

    rank: int
    size: int
    device: torch.device

    def largest(self, value: float) -> float:
        """Return the largest of all ranks' values on every rank. Decisions made with it are the same everywhere."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors on every rank; the argument is overwritten."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def synchronize(self) -> None:
        """Wait until every rank's device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def attempt(self, action: Callable[[], Any]) -> tuple[Any, str | None]:
        """Run `action` on every rank. A failure on one rank counts as a failure on all of them, and the run goes on.

        Returns:
            The action's value and None, or None and one line about what went wrong.
        """
        value, problem = None, None
        try:
            value = action()
        except Exception as error:  # peers fail in ways of their own; the table says how
            traceback.print_exc()
            text = " ".join(str(error).split())
            problem = f"{type(error).__name__}: {text[:300]}"
        if self.largest(float(problem is not None)):
            return None, problem or "failed on another rank"
        return value, None


def start_world() -> World:
    """Initialise torch.distributed if torchrun started this process, with NCCL on GPUs and gloo on CPUs."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # libraries give them about their own calls
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    return World(dist.get_rank() if dist.is_initialized() else 0, launched_processes(), device)


class Budget:
    """The seconds that the whole run may take; all ranks read the same clock."""

    def __init__(self, world: World, seconds: float) -> None:
        """Start the clock."""
        self._world, self.seconds, self._start = world, seconds, time.monotonic()

    def overrun(self) -> str | None:
        """Return a note for the rows that are left out if the time is over on any rank, else None."""
        if self._world.largest(time.monotonic() - self._start) > self.seconds:
            return f"left out: the time budget of {self.seconds:g} s is spent"
        return None

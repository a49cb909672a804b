"""What both benchmarks share: the processes of the run, a time budget, versions and cards, JSON and tables."""

import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from easy_context.common.files import write_whole

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "deepspeed",
    "liger-kernel",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "flash-attn",
    "ring-flash-attn",
    "yunchang",
)
WIDEST_CELL = 70  # characters; the JSON has the whole text


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
        """The largest of all ranks' values, on every rank: what ranks decide with, so that they decide alike."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, on every rank; the argument is overwritten."""
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
        """Run `action` on every rank. A failure on any rank is one on all of them, and ends nothing.

        Returns:
            its value and None, or None and what went wrong, in one line.
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
    """Initialise torch.distributed if torchrun started this process: NCCL on GPUs, gloo on CPUs."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries, about their own calls
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    return World(dist.get_rank() if dist.is_initialized() else 0, size, device)


class Budget:
    """Seconds that the whole run may take; all ranks read the same clock."""

    def __init__(self, world: World, seconds: float) -> None:
        """Start the clock."""
        self._world, self.seconds, self._start = world, seconds, time.monotonic()

    def spent(self) -> bool:
        """Whether the time is over on any rank."""
        return self._world.largest(time.monotonic() - self._start) > self.seconds


def environment(world: World) -> dict[str, Any]:
    """Versions, cards and platform, to be read beside every number."""
    on_gpu = world.device.type == "cuda"
    return {
        "devices": [torch.cuda.get_device_name(world.device)] * world.size if on_gpu else [platform.processor()],
        "processes": world.size,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "packages": {name: _version(name) for name in PACKAGES},
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(world: World, path: str, results: dict[str, Any]) -> None:
    """Write `results` on rank 0, whole or not at all. Called after every row, so that a crash loses one row."""
    if world.rank == 0:
        write_whole(Path(path), json.dumps(results, indent=1) + "\n")


def markdown_table(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, str]]) -> str:
    """A Markdown table.

    Args:
        rows: one dictionary a row; a missing value or None is left empty.
        columns: (title, key, format), the format as in `format(value, ...)`.
    """

    def cell(row: dict[str, Any], key: str, form: str) -> str:
        value = row.get(key)
        text = "" if value is None else format(value, form).replace("|", "/")
        return text if len(text) <= WIDEST_CELL else text[: WIDEST_CELL - 1] + "…"

    lines = [[title for title, _, _ in columns]]
    lines += [[cell(row, key, form) for _, key, form in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    widths[-1] = 0  # nothing follows the last column
    lines.insert(1, ["-" * max(3, width) for width in widths])
    padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def describe_environment(facts: dict[str, Any]) -> str:
    """The versions and cards in one line, for above the table."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    cuda = f"CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}, " if facts["cuda"] else ""
    return f"{facts['processes']} × {facts['devices'][0] or 'CPU'}; {cuda}{packages}; Python {facts['python']}"

"""What a benchmark's run leaves: JSON with versions and cards, and a Markdown table."""

import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from easy_context.common.files import write_whole

from .world import World

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
Column = tuple[str, str, str]


def environment(world: World) -> dict[str, Any]:
    """Return the versions, cards and platform that every number belongs to."""
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
    """Write `results` on rank 0, whole or not at all. Call it after every row, so that a crash loses one row."""
    if world.rank == 0:
        write_whole(Path(path), json.dumps(results, indent=1) + "\n")


def finish(
    world: World, path: str, results: dict[str, Any], columns: Sequence[Column], legend: str, measured: str
) -> None:
    """Write and print the results and leave the process group.

    Args:
        world: the ranks.
        path: of the JSON file.
        results: with "environment" and "rows".
        columns: of the printed table.
        legend: text below the table.
        measured: the key that every row with a measurement has.

    Raises:
        SystemExit: no row has a measurement.
    """
    write_json(world, path, results)
    table = markdown_table(results["rows"], columns)
    world.say(f"\n{describe_environment(results['environment'])}\n\n{table}\n\n{legend}")
    if world.size > 1:
        dist.destroy_process_group()
    if not any(measured in row for row in results["rows"]):
        sys.exit("nothing was measured; the notes in the table say why")


def markdown_table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    """Return a Markdown table.

    Args:
        rows: one dictionary a row; the cell of a missing value or None is empty.
        columns: title, key and format of each, the format as in `format(value, ...)`.
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
    """Return the versions and cards in one line, which stands above the table."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    cuda = f"CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}, " if facts["cuda"] else ""
    return f"{facts['processes']} × {facts['devices'][0] or 'CPU'}; {cuda}{packages}; Python {facts['python']}"

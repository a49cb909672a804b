"""Measure the free memory of the GPU and of the host, also inside a container."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..memory.forecast import Memory

# The share of free memory that a forecast may fill; the rest is for fragmentation and what the forecast omits.
USABLE = 0.92  # on the host, and on the GPU with Liger's layers, for which the forecast is closest
USABLE_WITHOUT_LIGER = 0.85  # on the GPU


def least_free(accelerator: Any) -> Memory:
    """Return the minimum of `free_memory` over all processes."""
    free = free_memory(accelerator.device, accelerator.num_processes)
    if not dist.is_initialized():
        return free
    least = torch.tensor([free.gpu, free.host], dtype=torch.float64, device=accelerator.device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return Memory(*least.tolist())


def free_memory(device: torch.device, processes: int) -> Memory:
    """Return the free memory for this process; the host's is divided by the processes of the machine.

    Without a GPU, host memory counts as the GPU's, and the host has none.

    Args:
        device: device of this process.
        processes: number of processes on this machine, used if LOCAL_WORLD_SIZE is not set.
    """
    host = free_host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return Memory(torch.cuda.mem_get_info(device)[0], host) if device.type == "cuda" else Memory(host, 0.0)


def free_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that the machine and the container leave for this process.

    Args:
        proc: where the kernel shows `meminfo` and `self/cgroup`.
        cgroups: where control groups are mounted, version 1 or 2.
    """
    available = next(
        int(line.split()[1]) * 1024
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    return min([available, *_left_in_cgroups(proc, cgroups)])


def _left_in_cgroups(proc: Path, cgroups: Path) -> list[int]:
    """Return the bytes left below each memory limit of this process's control group and its parents."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, limit, usage = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = root / name.lstrip("/")
        for folder in (own, *own.parents):
            if folder != root and root not in folder.parents:
                break
            try:
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            except (OSError, ValueError):  # The group is not in this namespace, or its limit is "max".
                continue
            left.append(max(0, most - used + _reclaimable(folder)))
    return left


def _reclaimable(folder: Path) -> int:
    """Return the bytes of a control group's usage that are only cached files."""
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))

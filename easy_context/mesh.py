"""The grid of ranks: data-parallel x sequence-parallel."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid.

    Attributes:
        sequence_group: the ranks that share a row; None without torch.distributed.
        sequence_rank: this process's rank among them.
        sequence_size: how many they are.
        data_rank: which of the groups this one is; groups of different data_rank train on different rows.
        data_size: how many groups there are.
    """

    sequence_group: dist.ProcessGroup | None = None
    sequence_rank: int = 0
    sequence_size: int = 1
    data_rank: int = 0
    data_size: int = 1


def sequence_size(requested: int | None, processes: int, mode: str | None = None) -> int:
    """How many processes share a row.

    Args:
        requested: by `--sequence-parallel-size`; None for all of them, or 1 under data_parallel.
        processes: of the launch.
        mode: the parallel mode; data_parallel never splits a row.

    Raises:
        ValueError: the size means nothing to the mode, or does not divide the processes.
    """
    if mode == "data_parallel":
        if requested not in (None, 1):
            raise ValueError(
                f"--sequence-parallel-size {requested} has no meaning with --parallel_mode data_parallel, which never "
                "splits a row: leave it out or choose another mode"
            )
        return 1
    size = processes if requested is None else requested
    if size < 1 or processes % size:
        raise ValueError(
            f"--sequence-parallel-size {size} must divide the number of processes, {processes}: launch a multiple of "
            f"it (--num_processes) or choose a divisor of {processes}"
        )
    return size


def build_mesh(sequence_parallel_size: int | None = None, timeout: timedelta | None = None) -> Mesh:
    """Group the ranks: each run of `sequence_parallel_size` consecutive ranks shares its rows.

    Every rank must call it (creating groups is collective). Without torch.distributed there is one process.

    Args:
        sequence_parallel_size: ranks that share a row; None for all of them.
        timeout: of the new groups' collectives; None for the backend's default.

    Raises:
        ValueError: the size does not divide the number of processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    size = sequence_size(sequence_parallel_size, world)
    if not dist.is_initialized():
        return Mesh()
    rank = dist.get_rank()
    data_rank, sequence_rank = divmod(rank, size)
    for start in range(0, world, size):
        group = dist.group.WORLD if size == world else dist.new_group(range(start, start + size), timeout=timeout)
        if start <= rank < start + size:
            own_group = group
    _connect(own_group)
    return Mesh(own_group, sequence_rank, size, data_rank, world // size)


def _connect(group: dist.ProcessGroup) -> None:
    """One small collective: NCCL makes the group's communicator in it, which a lone send or receive may not do."""
    on_cuda = "nccl" in dist.get_backend(group)
    dist.all_reduce(
        torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()) if on_cuda else "cpu"), group=group
    )

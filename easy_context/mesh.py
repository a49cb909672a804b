"""The grid of ranks: data-parallel x sequence-parallel."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .communication import communication_device


@dataclass(frozen=True)
class Ranks:
    """Ranks that work together, as one of them sees them.

    Attributes:
        rank: this process's place among them.
        size: how many there are.
        group: their process group; None without torch.distributed, or where nothing is to be sent.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


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

    @property
    def sequence(self) -> Ranks:
        """The ranks that share a row."""
        return Ranks(self.sequence_rank, self.sequence_size, self.sequence_group)


class CurrentRanks:
    """The attributes of `Ranks`, worked out whenever they are asked for: each run of `size` consecutive ranks.

    `group` makes the groups of all such runs at its first use in a process group, which is collective over all ranks.
    """

    def __init__(self, size: Callable[[], int], timeout: timedelta | None) -> None:
        self._size = size
        self._timeout = timeout
        self._world: dist.ProcessGroup | None = None  # the world that _group was made of
        self._group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return _rank() % self.size

    @property
    def size(self) -> int:
        return self._size()

    @property
    def group(self) -> dist.ProcessGroup | None:
        size = self.size
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not self._world:  # also where a new one has as many ranks
            self._group = None if world is None else _own_group(size, self._timeout)
            self._world = world
        return self._group


class CurrentMesh:
    """The grid of the processes that there are when it is asked, with the attributes of `Mesh`.

    It can be made before torch.distributed is initialised, and follows a process group that is destroyed and made anew.
    Each run of `sequence_parallel_size` consecutive ranks shares its rows; without torch.distributed there is one
    process.

    Ranks and sizes are arithmetic, which any rank may ask for alone. `sequence_group` makes groups at its first use,
    which is collective: every rank of the launch must get there, or the others wait until the timeout. Under a patch
    the first use is the patch itself where torch.distributed is initialised already, else the first
    `prepare_seq_parallel_inputs` or forward pass.

    Raises (from every attribute):
        RuntimeError: the launcher started several processes, but torch.distributed is not initialised: each would take
            itself for the only one and attend within its own shard.
        ValueError: the size does not divide the number of processes.
    """

    def __init__(self, sequence_parallel_size: int | None = None, timeout: timedelta | None = None) -> None:
        """`timeout` is that of the collectives of groups made here; None for the backend's default."""
        self.sequence = CurrentRanks(lambda: sequence_size(sequence_parallel_size, _processes()), timeout)

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        return self.sequence.group

    @property
    def sequence_rank(self) -> int:
        return self.sequence.rank

    @property
    def sequence_size(self) -> int:
        return self.sequence.size

    @property
    def data_rank(self) -> int:
        return _rank() // self.sequence_size

    @property
    def data_size(self) -> int:
        return _processes() // self.sequence_size


def sequence_size(requested: int | None, processes: int) -> int:
    """Return how many processes share a row.

    Args:
        requested: ranks that share a row; None for all of them.
        processes: of the launch.

    Raises:
        ValueError: the size does not divide the processes.
    """
    size = processes if requested is None else requested
    if size < 1 or processes % size:
        raise ValueError(
            f"sequence_parallel_size {size} must divide the number of processes, {processes}: launch a multiple of it "
            f"(the launcher's --num_processes) or choose a divisor of {processes}"
        )
    return size


def launched_processes() -> int:
    """Return the number of processes that the launcher says it started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _processes() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    if launched_processes() > 1:
        raise RuntimeError(
            f"WORLD_SIZE={launched_processes()} processes were launched, but torch.distributed is not initialised, so "
            "that this one would take itself for the only one: call torch.distributed.init_process_group (or make the "
            "Accelerator) before the first forward pass, or unset WORLD_SIZE for one process"
        )
    return 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _own_group(size: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make the groups of `size` consecutive ranks and return this rank's; collective over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for start in range(0, world, size):
        group = dist.group.WORLD if size == world else dist.new_group(range(start, start + size), timeout=timeout)
        if start <= rank < start + size:
            own_group = group
    # NCCL makes the group's communicator in its first collective, which a lone send or receive may not do.
    dist.all_reduce(torch.zeros(1, device=communication_device(own_group)), group=own_group)
    return own_group

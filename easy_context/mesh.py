"""The grid of ranks: data-parallel x sequence-parallel."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .agreement import check_together
from .communication import communication_device


@dataclass(frozen=True)
class Ranks:
    """A set of ranks that work together, and this process's rank in it.

    Attributes:
        rank: rank of this process in the set.
        size: number of ranks in the set.
        group: process group of the set; None without torch.distributed, or if no communication is needed.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid.

    Attributes:
        sequence_group: process group of the ranks that share a row; None without torch.distributed.
        sequence_rank: this process's rank in that group.
        sequence_size: number of ranks in that group.
        data_rank: index of that group; groups with different data_rank train on different rows.
        data_size: number of such groups.
        ring_degree: number of ranks in a ring of usp_attn, among the ranks that share a row. Consecutive ranks form its
            Ulysses groups.
    """

    sequence_group: dist.ProcessGroup | None = None
    sequence_rank: int = 0
    sequence_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    ring_degree: int = 1

    @property
    def sequence(self) -> Ranks:
        """The ranks that share a row."""
        return Ranks(self.sequence_rank, self.sequence_size, self.sequence_group)

    @property
    def ulysses(self) -> Ranks:
        """The ranks of this one's Ulysses group, without their process group."""
        size = self.sequence_size // self.ring_degree
        return Ranks(self.sequence_rank % size, size)

    @property
    def ring(self) -> Ranks:
        """The ranks of this one's ring, without their process group."""
        return Ranks(self.sequence_rank * self.ring_degree // self.sequence_size, self.ring_degree)


class CurrentRanks:
    """A set of ranks with the attributes of `Ranks`, which are computed at each access.

    The set has `size` ranks at a distance of `stride`, such as 1, 3, 5, 7 for a size of 4 and a stride of 2.
    """

    def __init__(self, size: Callable[[], int], stride: Callable[[], int], groups: "_Groups") -> None:
        self._size = size
        self._stride = stride
        self._groups = groups

    @property
    def rank(self) -> int:
        return _rank() // self._stride() % self.size

    @property
    def size(self) -> int:
        return self._size()

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._groups.find(self.size, self._stride())


class CurrentMesh:
    """The grid of the current processes, with the attributes of `Mesh`, which are computed at each access.

    It can be created before torch.distributed is initialised, and remains valid if the process group is destroyed and
    created again. Each `sequence_parallel_size` consecutive ranks share their rows; without torch.distributed there is
    one process.

    Any rank may read ranks and sizes alone. Process groups are created at their first use, which is collective: every
    rank of the launch must take part, or the others wait until the timeout. Under a patch, the first use is the patch
    itself if torch.distributed is already initialised, else the first `prepare_seq_parallel_inputs` or forward pass.

    Raises (from every attribute):
        RuntimeError: the launcher started several processes, but torch.distributed is not initialised, so that each
            process would attend only within its own shard.
        ValueError: the size does not divide the number of processes.
    """

    def __init__(
        self,
        sequence_parallel_size: int | None = None,
        timeout: timedelta | None = None,
        ring_degree: Callable[[int], int] = lambda size: 1,
    ) -> None:
        """Describe a grid.

        Args:
            sequence_parallel_size: number of ranks that share a row; None for all of them.
            timeout: timeout of the collectives of groups created here; None for the backend's default.
            ring_degree: function from the number of ranks that share a row to the number in a ring of usp_attn.
        """
        groups = _Groups(timeout)
        self._ring_degree = ring_degree
        self.sequence = CurrentRanks(
            lambda: sequence_size(sequence_parallel_size, _processes()), stride=lambda: 1, groups=groups
        )
        self.ulysses = CurrentRanks(lambda: self._ulysses_degree, stride=lambda: 1, groups=groups)
        self.ring = CurrentRanks(lambda: self.ring_degree, stride=lambda: self._ulysses_degree, groups=groups)

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

    @property
    def ring_degree(self) -> int:
        return self._ring_degree(self.sequence_size)

    @property
    def _ulysses_degree(self) -> int:
        return self.sequence_size // self.ring_degree


class _Groups:
    """The process groups of a mesh, each made at its first use in the world that there is."""

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self._world: dist.ProcessGroup | None = None  # the world that the groups were made in
        self._made: dict[tuple[int, int], dist.ProcessGroup | None] = {}

    def find(self, size: int, stride: int) -> dist.ProcessGroup | None:
        """Return this rank's group of `size` ranks at a distance of `stride`; None without torch.distributed."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not self._world:  # also where a new one has as many ranks
            self._world, self._made = world, {}
        if world is not None and (size, stride) not in self._made:
            self._made[size, stride] = _own_group(size, stride, self._timeout)
        return self._made.get((size, stride))


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


def _own_group(size: int, stride: int, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Make all groups of `size` ranks at a distance of `stride` and return this rank's; collective over all ranks."""
    check_together(
        lambda: {"ranks of a group": size, "distance between them": stride},
        dist.group.WORLD,
        "the processes of the launch want other groups: give all of them one sequence_parallel_size and ring_degree",
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    for first in (start + offset for start in range(0, world, size * stride) for offset in range(stride)):
        members = range(first, first + size * stride, stride)
        group = dist.group.WORLD if size == world else dist.new_group(members, timeout=timeout)
        if rank in members:
            own_group = group
    # NCCL makes the group's communicator in its first collective, which a lone send or receive may not do.
    dist.all_reduce(torch.zeros(1, device=communication_device(own_group)), group=own_group)
    return own_group

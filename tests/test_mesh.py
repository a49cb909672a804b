"""The grid of ranks: consecutive ranks share a row, groups are disjoint and cover the world."""

import datetime

import pytest
import torch
import torch.distributed as dist
from family_models import patched

from easy_context.mesh import Mesh, build_mesh


def describe_mesh(rank: int, world_size: int, size: int | None):
    """(sequence_rank, sequence_size, data_rank, data_size) and the ranks that a sum over the group reaches."""
    mesh = build_mesh(size, timeout=datetime.timedelta(seconds=60))
    members = torch.zeros(world_size, dtype=torch.int64)
    members[rank] = 1
    dist.all_reduce(members, group=mesh.sequence_group)
    assert dist.get_rank(mesh.sequence_group) == mesh.sequence_rank
    place = (mesh.sequence_rank, mesh.sequence_size, mesh.data_rank, mesh.data_size)
    return place, members.nonzero().flatten().tolist()


def describe_meshes(rank: int, world_size: int, sizes: list):
    return [describe_mesh(rank, world_size, size) for size in sizes]


def message_of_bad_size(rank: int, world_size: int, size: int) -> str:
    with pytest.raises(ValueError) as error:
        build_mesh(size)
    return str(error.value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_consecutive_ranks_share_a_row(pool, world_size):
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for rank, meshes in enumerate(pool.run(describe_meshes, world_size, [None, *sizes])):
        for size, (place, members) in zip([world_size, *sizes], meshes, strict=True):
            first = rank // size * size
            assert place == (rank % size, size, rank // size, world_size // size)
            assert members == list(range(first, first + size))


def timeouts_of_new_groups(rank: int, world_size: int) -> list[datetime.timedelta]:
    """Of the group that `build_mesh` makes, and of the one that the patch makes."""
    timeout = datetime.timedelta(seconds=7777)
    meshes = [build_mesh(2, timeout)]
    with patched("zigzag_ring_attn", sequence_parallel_size=2, timeout=timeout) as mesh:
        meshes.append(mesh)
    return [mesh.sequence_group._get_backend(torch.device("cpu")).options._timeout for mesh in meshes]


def test_new_groups_have_the_timeout_that_is_asked_for(pool):
    """Half an hour, the default, would end a run in which one rank prepares data or saves for longer."""
    for timeouts in pool.run(timeouts_of_new_groups, 4):
        assert timeouts == [datetime.timedelta(seconds=7777)] * 2


@pytest.mark.parametrize("size", [0, 3, 8])
def test_a_size_that_does_not_divide_the_processes_is_refused(pool, size):
    for message in pool.run(message_of_bad_size, 4, size):
        assert "--sequence-parallel-size" in message and str(size) in message and "4" in message


def test_without_torch_distributed_there_is_one_process():
    assert build_mesh() == build_mesh(None) == build_mesh(1) == Mesh(None, 0, 1, 0, 1)
    with pytest.raises(ValueError, match="--sequence-parallel-size 2"):
        build_mesh(2)


def test_a_mesh_is_a_frozen_value():
    with pytest.raises(AttributeError):
        Mesh().sequence_rank = 1

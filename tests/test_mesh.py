"""The grid of ranks: consecutive ranks share a row, groups are disjoint and cover the world."""

import dataclasses
import datetime

import pytest
import torch
import torch.distributed as dist
from family_models import patched

from easy_context.mesh import CurrentMesh, Mesh


def describe_mesh(rank: int, world_size: int, size: int | None):
    """(sequence_rank, sequence_size, data_rank, data_size) and the ranks that a sum over the group reaches."""
    mesh = CurrentMesh(size, timeout=datetime.timedelta(seconds=60))
    members = torch.zeros(world_size, dtype=torch.int64)
    members[rank] = 1
    dist.all_reduce(members, group=mesh.sequence_group)
    assert dist.get_rank(mesh.sequence_group) == mesh.sequence_rank
    place = (mesh.sequence_rank, mesh.sequence_size, mesh.data_rank, mesh.data_size)
    return place, members.nonzero().flatten().tolist()


def describe_meshes(rank: int, world_size: int, sizes: list):
    return [describe_mesh(rank, world_size, size) for size in sizes]


def groups_of_usp(rank: int, world_size: int, size: int, ring_degree: int) -> tuple:
    """Place and members of the Ulysses group and of the ring, as the process group has them and as arithmetic has."""
    mesh = CurrentMesh(size, ring_degree=lambda size: ring_degree)
    placed = Mesh(sequence_rank=rank % size, sequence_size=size, ring_degree=ring_degree)
    found = []
    for ranks, expected in ((mesh.ulysses, placed.ulysses), (mesh.ring, placed.ring)):
        assert (ranks.rank, ranks.size) == (expected.rank, expected.size)
        assert dist.get_rank(ranks.group) == ranks.rank and ranks.group is ranks.group
        found.append(dist.get_process_group_ranks(ranks.group))
    assert (mesh.ulysses.group is mesh.sequence_group) == (ring_degree == 1)
    return tuple(found)


def test_a_ring_goes_through_the_same_places_of_neighbouring_ulysses_groups(pool):
    found = pool.run(groups_of_usp, 8, 4, 2)
    assert [ulysses for ulysses, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [ring for _, ring in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    found = pool.run(groups_of_usp, 8, 8, 2)
    assert found[5] == ([4, 5, 6, 7], [1, 5])
    assert pool.run(groups_of_usp, 4, 4, 1)[2] == ([0, 1, 2, 3], [2])


def disagree(rank: int, world_size: int) -> str:
    """Two machines with other numbers of processes, whose ring degree follows from LOCAL_WORLD_SIZE."""
    mesh = CurrentMesh(ring_degree=lambda size: 2 if rank < 2 else 4)
    with pytest.raises(ValueError) as error:
        mesh.ring.group  # noqa: B018
    return str(error.value)


def test_processes_that_want_other_groups_all_say_so(pool):
    for message in pool.run(disagree, 4):
        assert "ranks of a group 2 on rank 0, 1, 4 on rank 2, 3" in message and "ring_degree" in message


def message_of_bad_size(rank: int, world_size: int, size: int) -> str:
    with pytest.raises(ValueError) as error:
        CurrentMesh(size).sequence_group  # noqa: B018
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
    """Of a mesh's group that is made at first use, and of the one that the patch makes."""
    timeout = datetime.timedelta(seconds=7777)
    meshes = [CurrentMesh(2, timeout)]
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
        assert "sequence_parallel_size" in message and str(size) in message and "4" in message


def place_of(mesh: CurrentMesh) -> Mesh:
    """What the mesh says now, as a value that can be compared."""
    return Mesh(*(getattr(mesh, field.name) for field in dataclasses.fields(Mesh)))


def test_without_torch_distributed_there_is_one_process():
    assert place_of(CurrentMesh()) == place_of(CurrentMesh(1)) == Mesh(None, 0, 1, 0, 1, 1)
    with pytest.raises(ValueError, match="sequence_parallel_size 2"):
        CurrentMesh(2).sequence_size  # noqa: B018


def test_a_launched_process_without_torch_distributed_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for size in (None, 1, 2):
        for field in dataclasses.fields(Mesh):
            with pytest.raises(RuntimeError, match="(?s)WORLD_SIZE=2.*init_process_group"):
                getattr(CurrentMesh(size), field.name)


def follow_the_process_groups(rank: int, world_size: int, folder: str) -> list:
    """Places of one mesh before a process group, in it, after it, and in others of the same and of another size."""
    dist.destroy_process_group()
    mesh, other_size, places, groups = CurrentMesh(), CurrentMesh(2), [], []
    places.append(place_of(mesh))
    for number, size in enumerate((world_size, world_size, 2)):
        if rank >= size:
            break
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=size)
        for one in (mesh, other_size):
            total = torch.ones(())
            dist.all_reduce(total, group=one.sequence_group)
            assert total == one.sequence_size
            assert one.sequence_group is one.sequence_group
        assert all(mesh.sequence_group is not group for group in groups)
        groups.append(mesh.sequence_group)
        places.append((mesh.sequence_rank, mesh.sequence_size, other_size.sequence_rank, other_size.data_rank))
        dist.destroy_process_group()
        places.append(place_of(mesh))
    return places


def test_the_mesh_follows_the_process_group(pool, tmp_path):
    alone = Mesh()
    for rank, places in enumerate(pool.run(follow_the_process_groups, 4, str(tmp_path))):
        in_four, in_two = (rank, 4, rank % 2, rank // 2), (rank, 2, rank, 0)
        assert places == [alone, in_four, alone, in_four, alone, *([in_two, alone] if rank < 2 else [])]


def ranks_asked_alone(rank: int, world_size: int) -> tuple[int, int]:
    """Ranks and sizes need no other rank: only rank 1 asks."""
    mesh = CurrentMesh(2)
    return (mesh.sequence_rank, mesh.data_size) if rank == 1 else (-1, -1)


def test_ranks_and_sizes_are_no_collective(pool):
    assert pool.run(ranks_asked_alone, 4)[1] == (1, 2)


def test_a_mesh_is_a_frozen_value():
    with pytest.raises(AttributeError):
        Mesh().sequence_rank = 1

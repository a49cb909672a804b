"""Exchanges and all-to-all between real processes, on the whole group and on a part of it."""

import weakref

import pytest
import torch
import torch.distributed as dist

from easy_context.communication import Exchange, gather_heads, group_rank, group_size, ring_exchange, scatter_heads

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def row_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(12).reshape(1, 3, 4).to(dtype) + 20 * rank


def own_half(rank: int, world_size: int):
    """The group of this rank's half of the world, and the first rank in it."""
    half = world_size // 2
    groups = [dist.new_group(range(start, start + half)) for start in (0, half)]
    return groups[rank // half], rank // half * half


def ring_around(group, first_rank: int) -> None:
    rank, size = group_rank(group), group_size(group)
    for dtype in DTYPES:
        for sent in (row_of(first_rank + rank, dtype), row_of(first_rank + rank, dtype).transpose(1, 2)):
            travelling = sent
            for step in range(1, size + 1):
                received, exchange = ring_exchange(travelling, group)
                exchange.wait()
                origin = first_rank + (rank - step) % size
                expected = row_of(origin, dtype) if sent.shape[1] == 3 else row_of(origin, dtype).transpose(1, 2)
                assert received.dtype == dtype and torch.equal(received, expected)
                travelling = received


def heads_there_and_back(group, first_rank: int) -> None:
    """Element (batch, position, head, dim) of the whole row is a number that tells where it came from."""
    rank, size = group_rank(group), group_size(group)
    rows = 3
    wholes = [
        torch.arange(2 * rows * size * heads * 4).reshape(2, rows * size, heads, 4) + 1000 * first_rank + 7 * heads
        for heads in (2 * size, size, 3 * size)
    ]
    for dtype in DTYPES:
        for count in (1, 2, 3):  # tensors in one message
            data = [whole.to(dtype) for whole in wholes[:count]]
            mine = [x[:, rank * rows : (rank + 1) * rows] for x in data]
            scattered = scatter_heads(mine, group)
            for part, x in zip(scattered, data, strict=True):
                assert torch.equal(part, x.chunk(size, dim=2)[rank])
            strided = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in scattered]
            for back in (gather_heads(scattered, group), gather_heads(strided, group)):
                for part, x in zip(back, mine, strict=True):
                    assert torch.equal(part, x)


def exchange_uneven(group) -> None:
    """Every rank sends to every other, itself left out, lengths that tell who speaks to whom."""
    rank, size = group_rank(group), group_size(group)
    exchange, buffers = Exchange(group), {}
    for peer in range(size):
        if peer != rank:
            exchange.send(torch.full((1 + rank, 2), 10.0 * rank + peer), peer)
            buffers[peer] = exchange.receive(torch.empty(1 + peer, 2), peer)
    exchange.start().wait()
    for peer, received in buffers.items():
        assert (received == 10.0 * peer + rank).all()


def check_whole_group(rank: int, world_size: int) -> None:
    if world_size > 1:  # a ring of one would send to itself, which gloo cannot and no mode does
        ring_around(dist.group.WORLD, 0)
    heads_there_and_back(dist.group.WORLD, 0)
    exchange_uneven(dist.group.WORLD)


def check_half_of_the_ranks(rank: int, world_size: int) -> None:
    group, first = own_half(rank, world_size)
    assert group_size(group) == world_size // 2 and group_rank(group) == rank - first
    ring_around(group, first)
    heads_there_and_back(group, first)
    exchange_uneven(group)


def exchange_nothing(rank: int, world_size: int) -> None:
    Exchange(dist.group.WORLD).start().wait()


def exchange_and_let_go(rank: int, world_size: int) -> None:
    sent = torch.ones(3)
    held, (_, exchange) = weakref.ref(sent), ring_exchange(sent, dist.group.WORLD)
    exchange.wait()
    del sent
    assert held() is None


def test_what_was_sent_is_free_after_the_wait(pool):
    """A mode keeps its last exchange while the next block computes."""
    pool.run(exchange_and_let_go, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_on_all_ranks(pool, world_size):
    pool.run(check_whole_group, world_size)


@pytest.mark.parametrize("world_size", [4, 6])
def test_on_a_group_that_does_not_start_at_rank_zero(pool, world_size):
    pool.run(check_half_of_the_ranks, world_size)


def test_an_exchange_of_nothing_returns(pool):
    pool.run(exchange_nothing, 2)


def test_without_a_group_there_is_one_process():
    assert group_size(None) == 1 and group_rank(None) == 0

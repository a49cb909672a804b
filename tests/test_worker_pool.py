"""The pool itself: results in rank order, failures with their traceback, hangs that end."""

import os
import random
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import free_port
from worker_pool import WorkerError


def rank_and_sum(rank, world_size, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total.item()


def return_at_once(rank, world_size):
    return rank


def fail_on_rank_one(rank, world_size):
    if rank == 1:
        raise ValueError("rank one is broken")
    dist.barrier()


def hang(rank, world_size):
    if rank == 0:
        time.sleep(60)


def die(rank, world_size):
    if rank == 1:
        os._exit(7)


def test_groups_have_exactly_the_size_asked_for(pool):
    for world_size in (3, 1, 2):
        expected = [(rank, world_size, sum(range(world_size)) + world_size) for rank in range(world_size)]
        assert pool.run(rank_and_sum, world_size, 1) == expected


def test_a_rank_that_returns_at_once_leaves_nobody_half_connected(pool):
    for _ in range(50):
        assert pool.run(return_at_once, 4) == [0, 1, 2, 3]


def test_a_failure_carries_the_traceback_and_the_pool_goes_on(pool):
    with pytest.raises(WorkerError, match="(?s)rank 1 of 2.*fail_on_rank_one.*rank one is broken"):
        pool.run(fail_on_rank_one, 2)
    assert pool.run(rank_and_sum, 2, 0) == [(0, 2, 1), (1, 2, 1)]


def test_a_hung_worker_is_killed_and_its_stack_shown(pool):
    with pytest.raises(WorkerError, match="(?s)rank 0 of 2 hung in hang: no answer in 5 s.*test_worker_pool"):
        pool.run(hang, 2, timeout=5)


def test_a_worker_that_dies_is_named(pool):
    with pytest.raises(WorkerError, match="rank 1 of 2 failed in die:\nprocess died with exit code 7"):
        pool.run(die, 2)
    assert len(pool.run(rank_and_sum, 3, 0)) == 3


def test_a_port_is_free_and_none_that_a_connection_may_get_by_itself(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        drawn = iter([taken.getsockname()[1], port := int(free_port())])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert free_port() == str(port), "the first one drawn is taken"
    first_given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    assert port < (int(first_given.read_text().split()[0]) if first_given.exists() else 32768)

"""One rank of a sequence-parallel group alone on a device, to time what it computes without what it sends.

The other ranks do not exist: torch.distributed's fake process group has their number, and every message received is a
copy of one sent, on the device itself. Results are wrong, shapes, kernels and their order are right.
"""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from easy_context import communication
from easy_context.attention import AttentionSettings, sequence_parallel_attention
from easy_context.mesh import Mesh

from .peers import AttentionMethod, usp_ring_degree


def alone(settings: AttentionSettings, rank: int, size: int) -> AttentionMethod:
    """Return what rank `rank` of `size` does; the settings' mode must be over a `CurrentMesh`."""
    return AttentionMethod(
        functools.partial(sequence_parallel_attention, settings=settings),
        type(settings.mode).over(Mesh(sequence_rank=rank, sequence_size=size, ring_degree=usp_ring_degree(size))).shard,
        note="without communication",
        session=functools.partial(_lone_rank, rank, size),
    )


@contextlib.contextmanager
def _lone_rank(rank: int, size: int) -> Iterator[None]:
    """Provide a process group of `size` inside the block, in which this process is `rank` and sends to itself."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with (
            mock.patch.object(communication.Exchange, "start", _start_loopback),
            mock.patch.object(dist, "all_to_all_single", _copy_loopback),
            mock.patch.object(dist, "all_gather_into_tensor", _copy_loopback),
            mock.patch.object(dist, "reduce_scatter_tensor", _reduce_scatter_loopback),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _start_loopback(exchange: communication.Exchange) -> communication.Exchange:
    sent = [step.tensor for step in exchange._operations if step.op is dist.isend]
    received = [step.tensor for step in exchange._operations if step.op is dist.irecv]
    for source, target in zip(sent, received, strict=False):
        common = min(source.numel(), target.numel())
        target.view(-1)[:common].copy_(source.view(-1)[:common])
    return exchange


def _copy_loopback(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    received.view(-1, *sent.shape).copy_(sent)  # an all-gather receives as much from every rank


def _reduce_scatter_loopback(
    received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    received.copy_(sent[: len(received)])

"""The work each rank does, counted by a kernel that does none: a full block is its area, a diagonal one half of it."""

import dataclasses

import pytest
import torch
from test_modes import rings, splitting

from easy_context.kernels import AttentionMask
from easy_context.mesh import CurrentMesh
from easy_context.modes import MODES, build_mode

BALANCED_MODES = tuple(name for name in MODES if name != "data_parallel")


@dataclasses.dataclass
class CountingKernel:
    """Stands in for a kernel and notes the (query, key) pairs times heads of every call."""

    forward_work: list = dataclasses.field(default_factory=list)
    backward_work: list = dataclasses.field(default_factory=list)
    name: str = "counting"

    @staticmethod
    def work(q, k, mask) -> float:
        pairs = q.shape[1] * k.shape[1]
        return (pairs / 2 if mask.causal else pairs) * q.shape[2]

    def forward(self, q, k, v, scale, mask):
        self.forward_work.append(self.work(q, k, mask))
        return torch.zeros_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    def backward(self, dout, q, k, v, out, lse, scale, mask):
        self.backward_work.append(self.work(q, k, mask))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    @staticmethod
    def unsupported_reason(device, dtype, head_dim):
        return None


def count_work(rank: int, world_size: int, name: str, length: int, heads: int):
    """(forward calls, backward calls): the work of each call in units of one rank's full block of all heads."""
    mode = build_mode(name, CurrentMesh(ring_degree=lambda size: rings(name, size)))
    kernel = CountingKernel()
    q, k, v, dout = (mode.shard(torch.zeros(1, length, heads, 4)).contiguous() for _ in range(4))
    settings = {"scale": 0.5, "mask": AttentionMask(), "kernel": kernel}
    out, residuals = mode.forward(q, k, v, **settings)
    mode.backward(dout, q, k, v, out, residuals, **settings)
    block = (length / world_size) ** 2 * heads
    return [w / block for w in kernel.forward_work], [w / block for w in kernel.backward_work]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", BALANCED_MODES)
def test_every_rank_does_the_same_work(pool, name, world_size):
    """A causal square of W x W blocks holds W * W / 2 of work: W / 2 for each rank, and no rank more."""
    length = 12 * splitting(name, world_size).multiple_of
    counts = pool.run(count_work, world_size, name, length, world_size)
    for direction in (0, 1):
        totals = [sum(count[direction]) for count in counts]
        assert totals == pytest.approx([world_size / 2] * world_size), f"{name} W={world_size}: {totals}"


@pytest.mark.parametrize("world_size", range(2, 9))
def test_dist_flash_attn_is_balanced_at_every_step(pool, world_size):
    """Ranks wait for each other at every exchange, so an equal sum is not enough: the k-th calls must be equal too.

    W // 2 exchanges: the diagonal (a half), then whole blocks, then for even W one half of a block shared by partners.
    """
    counts = pool.run(count_work, world_size, "dist_flash_attn", 24 * world_size, 1)
    expected = [0.5] + [1.0] * ((world_size - 1) // 2) + ([0.5] if world_size % 2 == 0 else [])
    for rank, count in enumerate(counts):
        assert count[0] == pytest.approx(expected), f"W={world_size} rank={rank} forward: {count[0]}"
        assert sorted(count[1]) == pytest.approx(sorted(expected)), f"W={world_size} rank={rank} backward: {count[1]}"

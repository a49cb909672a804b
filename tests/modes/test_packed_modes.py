"""Packed documents in every mode, on real processes, against float64 attention of each document by itself."""

import contextlib
import dataclasses
import random

import pytest
import torch
import torch.distributed as dist
from packed_rows import Starts, documents_apart, packed_mask, random_starts
from plain_attention import relative_error
from test_modes import WORLD_SIZES, Case, current_mode, head_counts, splitting

from easy_context.kernels import select_kernel
from easy_context.kernels.reference import ReferenceKernel
from easy_context.modes import MODES, find_mode

NAMES = ("out", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class PackedCase(Case):
    """An attention problem over packed rows."""

    starts: Starts = ()

    def expected(self) -> dict[str, torch.Tensor]:
        results = documents_apart(*self.inputs(), self.scale, self.starts)
        return {name: getattr(results, name) for name in NAMES}


def packed_cases(name: str, world_size: int, dtype: torch.dtype, seed: int, lengths: tuple[int, int]) -> list[Case]:
    """Batches of 1, 2 and 3 rows with other boundaries in each, among them at the edges of shards."""
    rng, cases = random.Random(seed), []
    multiple = splitting(name, world_size).multiple_of
    for layout, batch in (("equal", 1), ("grouped", 2), ("single", 3), ("grouped", 1)):
        length = multiple * rng.randint(-(-lengths[0] // multiple), max(2, lengths[1] // multiple))
        heads, kv_heads = head_counts(rng, layout, name, world_size)
        starts = random_starts(rng, batch, length, edges=multiple)
        case = name, batch, length, heads, kv_heads, rng.choice([8, 16]), dtype, rng.randrange(10**6)
        cases.append(PackedCase(*case, starts=starts))
    return cases


def special_cases(name: str, world_size: int) -> list[Case]:
    """One document; nearly all of one token; borders at all shards; one over all but the ends; two rows alike."""
    multiple = splitting(name, world_size).multiple_of
    length, rows = 4 * multiple, []
    rows.append(((0,),))
    rows.append((tuple(range(length - 2)),))
    rows.append((tuple(range(0, length, 4)),))
    rows.append(((0, 1, length - 1), (0,)))
    rows.append(((0, length // 2 + 1),) * 2)
    heads = 2 * world_size
    return [
        PackedCase(name, len(starts), length, heads, heads, 8, torch.float32, seed, starts=starts)
        for seed, starts in enumerate(rows)
    ]


def run_packed(case: PackedCase, kernel=None) -> tuple[torch.Tensor, ...]:
    """This rank's shards of out, dq, dk, dv."""
    mode = current_mode(case)
    kernel = kernel or select_kernel(case.kernel, torch.device("cpu"), case.dtype, case.dim, documents=True)
    q, k, v, dout = (mode.shard(x).contiguous() for x in case.inputs())
    settings = {"scale": case.scale, "mask": packed_mask(case.starts, case.length), "kernel": kernel}
    out, residuals = mode.forward(q, k, v, **settings)
    gradients = mode.backward(dout, q, k, v, out, residuals, **settings)
    for x, leaf in zip((out, *gradients), (q, q, k, v), strict=True):
        assert x.shape == leaf.shape and x.dtype == case.dtype, f"{x.shape} {x.dtype}: {case}"
    return out, *gradients


def run_all(rank: int, world_size: int, cases: list[PackedCase]) -> list[tuple[torch.Tensor, ...]]:
    return [run_packed(case) for case in cases]


def errors_of(case: PackedCase, shards: list[tuple[torch.Tensor, ...]]) -> dict[str, float]:
    """Relative norm against float64 of what the ranks hold together."""
    mode, expected = splitting(case.mode, len(shards)), case.expected()
    return {
        name: relative_error(mode.unshard([shard[i] for shard in shards]), expected[name])
        for i, name in enumerate(NAMES)
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", MODES)
def test_float32_is_as_documents_apart(pool, name, world_size):
    cases = packed_cases(name, world_size, torch.float32, 500 + world_size, lengths=(24, 96))
    cases += special_cases(name, world_size)
    size = 1 if name == "data_parallel" else world_size
    results = pool.run(run_all, world_size, cases)[:size]
    for i, case in enumerate(cases):
        for what, error in errors_of(case, [result[i] for result in results]).items():
            assert error < 1e-5, f"{what} is off by {error:.2e}: W={world_size} {case}"


@pytest.mark.parametrize("world_size", (2, 4))
@pytest.mark.parametrize("name", MODES)
def test_bfloat16_is_as_exact_as_the_kernel(pool, name, world_size):
    """At most 1.5 times the error of the kernel on the whole packed rows in one process."""
    cases = packed_cases(name, world_size, torch.bfloat16, 600 + world_size, lengths=(128, 256))
    size = 1 if name == "data_parallel" else world_size
    results = pool.run(run_all, world_size, cases)[:size]
    for i, case in enumerate(cases):
        alone = dataclasses.replace(case, mode="data_parallel")
        limits = errors_of(alone, [run_packed(alone)])
        for what, error in errors_of(case, [result[i] for result in results]).items():
            assert error <= 1.5 * limits[what], f"{what}: {error:.2e} > 1.5 x {limits[what]:.2e}: W={world_size} {case}"


class PairCounter(ReferenceKernel):
    """Counts the pairs of queries and keys that it is asked for, times heads."""

    def __init__(self):
        self.forward_pairs = self.backward_pairs = 0

    @staticmethod
    def _pairs(q, k, mask) -> int:
        queries, keys = q.shape[1], k.shape[1]
        return q.shape[0] * q.shape[2] * (queries * (queries + 1) // 2 if mask.causal else queries * keys)

    def _forward(self, q, k, v, scale, mask):
        self.forward_pairs += self._pairs(q, k, mask)
        return super()._forward(q, k, v, scale, mask)

    def _backward(self, dout, q, k, v, out, lse, scale, mask):
        self.backward_pairs += self._pairs(q, k, mask)
        return super()._backward(dout, q, k, v, out, lse, scale, mask)


@contextlib.contextmanager
def counted_messages():
    """Counts the elements that this process sends to other ranks one by one."""
    sent, original = [], dist.batch_isend_irecv

    def counting(operations):
        sent.extend(operation.tensor.numel() for operation in operations if operation.op is dist.isend)
        return original(operations)

    dist.batch_isend_irecv = counting
    try:
        yield sent
    finally:
        dist.batch_isend_irecv = original


def count_pairs(rank: int, world_size: int, cases: list[PackedCase]) -> list[tuple[int, int, int]]:
    """For each case the pairs of forward and backward, and the elements sent."""
    counts = []
    for case in cases:
        kernel = PairCounter()
        with counted_messages() as sent:
            run_packed(case, kernel)
        counts.append((kernel.forward_pairs, kernel.backward_pairs, sum(sent)))
    return counts


@pytest.mark.parametrize("world_size", (1, 2, 3, 4, 8))
@pytest.mark.parametrize("name", MODES)
def test_no_pair_of_two_documents_is_computed(pool, name, world_size):
    """All ranks together compute each pair inside of a document once, and no other."""
    cases = packed_cases(name, world_size, torch.float32, 700 + world_size, lengths=(24, 96))
    counts = pool.run(count_pairs, world_size, cases)[: 1 if name == "data_parallel" else world_size]
    for i, case in enumerate(cases):
        ends = [(*places[1:], case.length) for places in case.starts]
        lengths = [b - a for row, end in zip(case.starts, ends, strict=True) for a, b in zip(row, end, strict=True)]
        heads = case.heads
        expected = heads * sum(length * (length + 1) // 2 for length in lengths)
        for direction in (0, 1):
            assert sum(count[i][direction] for count in counts) == expected, f"W={world_size} {case}"


@pytest.mark.parametrize("name", ["zigzag_ring_attn", "dist_flash_attn"])
def test_only_what_another_rank_needs_is_sent(pool, name):
    """Nothing where documents end at the edges of chunks; in rows of one document as much as without any."""
    case = special_cases(name, 4)[0]
    edges = tuple(range(0, case.length, case.length // 8))
    apart, beside = (edges,), (tuple(place - 1 if place else 0 for place in edges),)
    cases = [dataclasses.replace(case, starts=starts) for starts in (apart, beside, case.starts)]
    counts = pool.run(count_pairs, 4, cases)
    messages = [sum(count[i][2] for count in counts) for i in range(3)]
    assert messages[0] == 0 < messages[1] < messages[2]


def test_a_library_refuses_documents():
    mode = find_mode("ulysses_attn", "library")
    for method in (mode.check_kernel, mode.select_kernel):
        with pytest.raises(ValueError, match="library attends across the documents.*attn_engine easy_context"):
            method("auto", torch.device("cpu"), torch.bfloat16, 64, documents=True)

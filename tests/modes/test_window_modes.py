"""Sliding windows in every mode, on real processes, against float64 attention with the window on the whole row."""

import dataclasses
import itertools
import random

import pytest
import torch
from packed_rows import Starts, documents_apart, packed_mask, random_starts
from plain_attention import attention_with_gradients
from test_modes import Case, current_mode, head_counts, splitting
from test_packed_modes import NAMES, PairCounter, counted_messages, errors_of

from easy_context.kernels import AttentionMask, select_kernel
from easy_context.modes import MODES, find_mode


@dataclasses.dataclass(frozen=True)
class WindowCase(Case):
    """An attention problem with a window, perhaps over packed rows."""

    window: int = 1
    starts: Starts | None = None

    @property
    def mask(self) -> AttentionMask:
        if self.starts is None:
            return AttentionMask(window=self.window)
        return packed_mask(self.starts, self.length, self.window)

    def expected(self) -> dict[str, torch.Tensor]:
        if self.starts is None:
            results = attention_with_gradients(*self.inputs(), self.scale, window=self.window)
        else:
            results = documents_apart(*self.inputs(), self.scale, self.starts, self.window)
        return {name: getattr(results, name) for name in NAMES}


def window_cases(name: str, world_size: int, dtype: torch.dtype, seed: int, lengths=(24, 96)) -> list[WindowCase]:
    """Windows of two tokens, within a chunk, as long as one, over several, one short of the row; some in documents."""
    rng, cases = random.Random(seed), []
    multiple = splitting(name, world_size).multiple_of
    for i, layout in enumerate(("equal", "grouped", "single", "grouped", "equal", "grouped")):
        length = multiple * rng.randint(-(-lengths[0] // multiple), max(2, lengths[1] // multiple))
        chunk, batch = length // multiple, rng.randint(1, 2)
        window = (2, rng.randint(2, max(chunk, 2)), chunk, chunk + 1, rng.randint(2, length), length - 1)[i]
        starts = random_starts(rng, batch, length, edges=multiple) if i in (3, 4) else None
        heads, kv_heads = head_counts(rng, layout, name, world_size)
        case = name, batch, length, heads, kv_heads, rng.choice([8, 16]), dtype, rng.randrange(10**6)
        cases.append(WindowCase(*case, window=max(window, 2), starts=starts))
    return cases


def run_windowed(case: WindowCase, kernel=None) -> tuple[torch.Tensor, ...]:
    """This rank's shards of out, dq, dk, dv."""
    mode = current_mode(case)
    kernel = kernel or select_kernel(case.kernel, torch.device("cpu"), case.dtype, case.dim)
    q, k, v, dout = (mode.shard(x).contiguous() for x in case.inputs())
    settings = {"scale": case.scale, "mask": case.mask, "kernel": kernel}
    out, residuals = mode.forward(q, k, v, **settings)
    gradients = mode.backward(dout, q, k, v, out, residuals, **settings)
    for x, leaf in zip((out, *gradients), (q, q, k, v), strict=True):
        assert x.shape == leaf.shape and x.dtype == case.dtype, f"{x.shape} {x.dtype}: {case}"
    return out, *gradients


def run_all(rank: int, world_size: int, cases: list[WindowCase]) -> list[tuple[torch.Tensor, ...]]:
    return [run_windowed(case) for case in cases]


@pytest.mark.parametrize("name,world_size", [*itertools.product(MODES, (1, 2, 3, 4)), ("zigzag_ring_attn", 8)])
def test_float32_is_as_one_process_with_the_window(pool, name, world_size):
    cases = window_cases(name, world_size, torch.float32, 800 + world_size)
    results = pool.run(run_all, world_size, cases)[: 1 if name == "data_parallel" else world_size]
    for i, case in enumerate(cases):
        for what, error in errors_of(case, [result[i] for result in results]).items():
            assert error < 1e-5, f"{what} is off by {error:.2e}: W={world_size} {case}"


@pytest.mark.parametrize("name", MODES)
def test_bfloat16_is_as_exact_as_the_kernel(pool, name):
    """At most 1.5 times the error of the kernel with the window on whole rows in one process."""
    cases = window_cases(name, 4, torch.bfloat16, 900, lengths=(128, 256))
    results = pool.run(run_all, 4, cases)[: 1 if name == "data_parallel" else 4]
    for i, case in enumerate(cases):
        alone = dataclasses.replace(case, mode="data_parallel")
        limits = errors_of(alone, [run_windowed(alone)])
        for what, error in errors_of(case, [result[i] for result in results]).items():
            assert error <= 1.5 * limits[what], f"{what}: {error:.2e} > 1.5 x {limits[what]:.2e}: {case}"


def count_pairs(rank: int, world_size: int, cases: list[WindowCase]) -> list[tuple[int, int, int]]:
    """For each case the pairs of forward and backward, and the elements sent."""
    counts = []
    for case in cases:
        kernel = PairCounter()
        with counted_messages() as sent:
            run_windowed(case, kernel)
        counts.append((kernel.forward_pairs, kernel.backward_pairs, sum(sent)))
    return counts


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("name", MODES)
def test_no_pair_outside_of_the_window_is_computed(pool, name, world_size):
    """All ranks together compute each pair in the window once, and no other."""
    cases = window_cases(name, world_size, torch.float32, 1000 + world_size)
    counts = pool.run(count_pairs, world_size, cases)[: 1 if name == "data_parallel" else world_size]
    for i, case in enumerate(cases):
        expected = 0
        for places in case.starts or ((0,),) * case.batch:
            for start, end in zip(places, [*places[1:], case.length], strict=True):
                expected += case.heads * sum(min(place + 1, case.window) for place in range(end - start))
        for direction in (0, 1):
            assert sum(count[i][direction] for count in counts) == expected, f"W={world_size} {case}"


@pytest.mark.parametrize("name", ["zigzag_ring_attn", "dist_flash_attn"])
def test_only_what_the_window_reaches_is_sent(pool, name):
    """Nothing for a window of one token; less for one within a shard than for one over all of the row."""
    case = WindowCase(name, 1, 64, 4, 2, 8, torch.float32, 1)
    cases = [dataclasses.replace(case, window=window) for window in (1, 3, 63)]
    counts = pool.run(count_pairs, 4, cases)
    messages = [sum(count[i][2] for count in counts) for i in range(3)]
    assert messages[0] == 0 < messages[1] < messages[2] / 4


def test_a_library_refuses_a_window():
    mode = find_mode("ulysses_attn", "library")
    mode.check_window(None)
    with pytest.raises(ValueError, match="sliding_window=5.*attn_engine easy_context"):
        mode.check_window(5)

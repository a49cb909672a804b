"""The fastest plan that fits: it fits, nothing can be added, and more memory never makes it slower."""

import itertools
from dataclasses import replace

import pytest

from easy_context.memory.forecast import Load, Memory, Shape, activation_memory, micro_batch_seconds
from easy_context.memory.plan import KEEP_EVERYTHING, check_memory_plan, format_memory_plan, parse_memory_plan
from easy_context.memory.plan_search import fastest_plan, most_frugal_plan

GIB = 2**30
LLAMA_3_8B = Shape(4096, 14336, 4096, 1024, 32, 8, 32, 128256, False)


def choose(tokens: int, gpu: float, host: float, **options):
    """(plan, tile, seconds) within so many GiB; None if nothing fits."""
    load = Load(tokens, tokens)

    def fits(need: Memory) -> bool:
        return need.gpu <= gpu * GIB and need.host <= host * GIB

    found = fastest_plan(LLAMA_3_8B, load, fits, **options)
    if found is None:
        return None
    plan, tile_size = found
    load = replace(load, mlp_tile_size=tile_size)
    assert fits(activation_memory(LLAMA_3_8B, load, plan))
    check_memory_plan(plan)
    assert parse_memory_plan(format_memory_plan(plan), 32) == plan
    return plan, tile_size, micro_batch_seconds(LLAMA_3_8B, load, plan)


def test_more_memory_never_makes_a_step_slower():
    for tokens in (8192, 65536, 262144):
        times = {}
        for gpu, host in itertools.product((20, 50, 100, 400), (0, 60, 300)):
            found = choose(tokens, gpu, host)
            times[gpu, host] = float("inf") if found is None else found[2]
        for (gpu, host), time in times.items():
            for (more_gpu, more_host), other in times.items():
                if more_gpu >= gpu and more_host >= host:
                    assert other <= time * 1.001, (tokens, gpu, host, more_gpu, more_host)


def test_memory_that_is_there_is_used():
    plan, tile_size, _ = choose(8192, 100, 100)
    assert set(plan) == {KEEP_EVERYTHING} and tile_size == 0
    plan, _, _ = choose(32768, 100, 100)
    kept = [layer.projections != "none" or layer.everything for layer in plan]
    assert 25 <= sum(kept) <= 32 and kept == sorted(kept), "the last layers keep most"
    load = Load(32768, 32768)
    more = (*plan[: kept.index(True) - 1], *(replace(plan[0], projections="gpu"),) * (33 - kept.index(True)))
    if not all(kept):
        assert activation_memory(LLAMA_3_8B, load, more).gpu > 100 * GIB


def test_long_rows_keep_attention_before_inputs():
    """A layer's products take 2 % of attention's time at 512K tokens: every second input is made again."""
    plan, tile_size, _ = choose(524288, 100, 118)
    assert tile_size == 16384
    assert all(layer.input == ("cpu", "none")[number % 2] for number, layer in enumerate(plan))
    attention = [layer.attention for layer in plan]
    assert attention.count("gpu") > 5 and attention.count("cpu") > 5


def test_nothing_fits():
    assert choose(524288, 20, 118) is None
    assert choose(524288, 100, 0, plan=most_frugal_plan(32)) is None


@pytest.mark.parametrize("tile_sizes", [(0,), (8192,)])
def test_what_is_given_is_not_chosen(tile_sizes):
    plan = parse_memory_plan("input@cpu+attention", 32)
    assert choose(32768, 100, 100, plan=plan, tile_sizes=tile_sizes)[:2] == (plan, *tile_sizes)

"""The forecast of memory and time beside what an H200 needed, and what its terms mean."""

import json
from pathlib import Path

import pytest

from easy_context.memory.forecast import Load, Shape, activation_memory, micro_batch_seconds
from easy_context.memory.plan import parse_memory_plan

GIB = 2**30
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "performance"
SMALL = Shape(hidden=64, inner=256, query=64, key=32, heads=4, key_heads=2, layers=4, vocabulary=500, tied=False)


def measured() -> list:
    """(tokens, kernel, layers, tile, plan, GiB, seconds) of a Llama-3-8B shape, forward and backward, no optimizer."""
    cases = []
    for file in sorted(RESULTS.glob("memory_plans_*.json")):
        results = json.loads(file.read_text())
        tile = results["arguments"]["mlp_tile_size"]
        for row in results["rows"]:
            if "all_step_seconds" in row:  # not an extrapolation
                plan = row["method"].split(", ", 1)[1]
                sizes = (row["seq_length"], row["kernel"], row["layers"], tile, plan)
                cases.append((*sizes, row["peak_memory_gib"], row["step_seconds"]))
    return cases


@pytest.mark.parametrize("tokens,kernel,layers,tile,text,gib,seconds", measured())
def test_memory_and_time_are_near_the_measured_ones(tokens, kernel, layers, tile, text, gib, seconds):
    shape = Shape(4096, 14336, 4096, 1024, 32, 8, layers, 128256, False)
    load = Load(tokens, tokens, kernel=kernel, mlp_tile_size=tile)
    plan = parse_memory_plan(text, layers)
    assert activation_memory(shape, load, plan).gpu + 2 * shape.parameters == pytest.approx(gib * GIB, rel=0.05)
    assert micro_batch_seconds(shape, load, plan) == pytest.approx(seconds, rel=0.1)


def test_there_are_measurements():
    assert len(measured()) >= 15


def peak(text: str, **load) -> float:
    return activation_memory(SMALL, Load(**{"tokens": 2**20, "row": 2**20} | load), parse_memory_plan(text, 4)).gpu


def test_each_layer_s_part_is_added_where_it_waits():
    """The first layers' share of a peak, in bytes a token: bf16, four heads of 16, keys of 32."""
    tokens = 2**20
    attention, projections = 2 * 64 + 4 * 4, 2 * (64 + 2 * 32 + 64 + 2 * 256)
    least = peak("input")
    assert peak("input+attention") - least == 3 * attention * tokens
    assert peak("3*input+projections,1*input") - least == 3 * projections * tokens
    assert least - peak("1*input,1*nothing,2*input") == 2 * 64 * tokens
    on_host = activation_memory(SMALL, Load(tokens, tokens), parse_memory_plan("input@cpu+attention", 4))
    assert on_host.host == 4 * 2 * 64 * tokens
    # two of three earlier layers' inputs have left the GPU: one is fetched ahead
    assert peak("input+attention") - on_host.gpu == 2 * 2 * 64 * tokens


def test_what_a_layer_works_in():
    tokens = 2**20
    work = peak("input")
    assert peak("input", liger=False) - work == 2 * tokens * (5 * 64 + 256 + 2 * 256)
    tiled = peak("input", mlp_tile_size=1000)
    assert tiled < work and peak("input", mlp_tile_size=tokens - 1) > work, "a tile makes the input's gradient anew"
    # Layers that keep their projections run whole.
    assert peak("input+projections", mlp_tile_size=1000) == peak("input+projections")
    assert peak("all", mlp_tile_size=1000) == peak("all")
    # Small tiles leave attention's backward as the peak, in which FlashAttention-4 works on one key head at a time.
    whole, half = 5.4 * tokens * (64 + 2 * 32), 8.0 / 2 * tokens * (64 + 2 * 32)
    long = {"mlp_tile_size": 1000, "tokens": 16 * tokens}
    assert peak("input", **long, kernel="cudnn") - peak("input", **long) == pytest.approx(16 * (whole - half))


def seconds(text: str, **load) -> float:
    return micro_batch_seconds(SMALL, Load(**{"tokens": 2**20, "row": 2**20} | load), parse_memory_plan(text, 4))


def test_what_is_computed_twice_takes_time():
    assert (
        seconds("all")
        < seconds("input+attention+projections")
        < seconds("input+attention")
        < seconds("input@cpu+attention")
        < min(seconds("input@cpu+attention@cpu"), seconds("input@cpu+attention,attention"))
        < seconds("input")
    )
    forward = (seconds("input") - seconds("input+attention")) / 4
    assert forward == pytest.approx(2 * 2**40 * 64 / 613e12)
    assert seconds("input,nothing") - seconds("input") > 2 * forward
    assert seconds("all", kernel="cudnn") > seconds("all")

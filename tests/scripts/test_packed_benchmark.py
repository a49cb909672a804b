"""The benchmark of packed rows: it runs on small sizes without a GPU, and counts and compares the right things."""

import argparse
import dataclasses
import json
import math
import statistics
import sys

import pytest
import torch
from launching import run_python, torchrun
from plain_attention import relative_error

from benchmarks import packed, packed_runs
from benchmarks.attention_cases import our_settings
from benchmarks.attention_runs import local_inputs, make_inputs, run_once
from benchmarks.packed_runs import PackedRow, count_pairs, draw_lengths
from benchmarks.world import World

SIZES = "--heads 4 --kv-heads 2 --head-dim 16"
ALONE = World(0, 1, torch.device("cpu"))
ARGS = argparse.Namespace(batch_size=2, heads=4, kv_heads=2, head_dim=16, seed=0, sigma=1.0)


@pytest.mark.launch
def test_packed_rows_on_two_processes(tmp_path):
    flags = f"-m benchmarks.packed --seq-length 256 {SIZES} --check-length 64 --repeats 1 --documents 2 16"
    modes = ["zigzag_ring_attn", "ulysses_attn"]
    result = run_python(*torchrun(2), *flags.split(), "--modes", *modes, "--output", str(tmp_path / "packed.json"))
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads((tmp_path / "packed.json").read_text())["rows"]
    assert [(row["mean_document"], row["method"]) for row in rows] == [(f"1/{n}", m) for n in (2, 16) for m in modes]
    for row in rows:
        assert row["error"] < 0.02  # bf16 against float64
        assert row["vs_dense"] == pytest.approx(row["dense_ms"] / row["packed_ms"])
        assert row["vs_apart"] == pytest.approx(row["apart_ms"] / row["packed_ms"])
        assert row["of_pairs"] == pytest.approx(row["vs_dense"] * row["pairs_of_dense"])
        assert 0.5 <= row["balance"] <= 1, "of two ranks none has more than all pairs"
        lengths = draw_lengths(256, int(row["mean_document"][2:]), 1.0, 0)
        expected = sum(n * (n + 1) for n in lengths) / (256 * 257)
        assert row["pairs_of_dense"] == pytest.approx(expected), "pairs within documents, each on one rank"
        assert (row["balance"] == 1) == (row["method"] == "ulysses_attn")
    assert "balance" in result.stdout and "1/16" in result.stdout


def test_fewer_pairs_are_less_work_for_the_kernel():
    whole = make_inputs(ARGS, ALONE, 512)
    dense = our_settings("data_parallel", "cpu", ARGS, ALONE)
    counts = [count_pairs(dense, whole[:3])]
    for parts, sigma in ((8, 0.0), (64, 0.0), (8, 1.0)):
        row = PackedRow(whole, parts, draw_lengths(512, parts, sigma, 0))
        counts.append(count_pairs(dataclasses.replace(dense, mask=row.mask), whole[:3]))
        assert counts[-1] == 2 * 4 * sum(n * (n + 1) // 2 for n in row.lengths)
    assert counts[0] == 2 * 4 * 512 * 513 // 2
    assert counts[0] > 7 * counts[1] > 49 * counts[2], "documents of one length"


def test_documents_apart_are_the_packed_row():
    """The three ways to run the same documents give the same result, but for the padding of documents apart."""
    row = PackedRow.draw(make_inputs(ARGS, ALONE, 128), 8, ARGS)
    dense = our_settings("zigzag_ring_attn", "cpu", ARGS, ALONE)
    results = {}
    for name, method in (
        ("packed", packed_runs.method_of(dataclasses.replace(dense, mask=row.mask))),
        ("apart", packed_runs.apart(dense, row.lengths)),
    ):
        results[name] = run_once(method, *local_inputs(method, row.whole))
    kept = torch.cat([torch.arange(start, start + n) for n, start in places(row.lengths)])
    for got, expected in zip(results["apart"], results["packed"], strict=True):
        assert relative_error(got[:, kept], expected) < 1e-2  # bf16


def places(lengths: list[int]) -> list[tuple[int, int]]:
    """Length of each document, and where it starts among documents padded to the two chunks of a lone zigzag rank."""
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length + length % 2)
    return list(zip(lengths, starts, strict=True))


def test_lengths_are_log_normal_and_fill_the_row():
    for parts in (8, 64):
        lengths = draw_lengths(1 << 16, parts, 1.0, seed=5)
        assert sum(lengths) == 1 << 16 and min(lengths) >= 1
        assert lengths == draw_lengths(1 << 16, parts, 1.0, seed=5) != draw_lengths(1 << 16, parts, 1.0, seed=6)
    many = draw_lengths(1 << 24, 1 << 14, 1.0, seed=0)[:-1]
    assert statistics.mean(many) == pytest.approx(1 << 10, rel=0.05)
    assert statistics.stdev(map(math.log, many)) == pytest.approx(1.0, rel=0.05)
    assert set(draw_lengths(1024, 8, 0.0, seed=0)) == {128}


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--documents 0", "argument --documents: must be at least 1, got 0"),
        ("--documents 8 8", "--documents 8 8: give each once"),
        ("--sigma -1", "argument --sigma: must be at least 0, got -1"),
        ("--seq-length 100", "--seq-length 100: a row must be a multiple of 16"),
        ("--heads 6 --kv-heads 4", "--heads 6 must be a multiple of --kv-heads 4"),
    ],
)
def test_wrong_flags_end_before_anything_is_measured(monkeypatch, capsys, flags, said):
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        packed.parse_arguments()
    assert stop.value.code == 2
    assert said in capsys.readouterr().err

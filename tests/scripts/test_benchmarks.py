"""Both benchmarks run on tiny sizes without a GPU, write the JSON they promise, and count right."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import run_python

from benchmarks import (
    attention,
    attention_runs,
    evaluation,
    flash_attn_shim,
    loopback,
    tables,
    train_step,
    train_step_runs,
)
from benchmarks import zigzag_all_gather as candidate

SMALL_MODEL = "--hidden-size 32 --intermediate-size 64 --heads 4 --kv-heads 2 --vocab-size 128 --full-depth 4"


def run(benchmark: str, arguments: str, output: Path, processes: int = 1) -> tuple[dict, str]:
    """Run a benchmark as a user would, on the CPU, and return its JSON and what it printed."""
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node {processes}" if processes > 1 else ""
    words = f"{launcher} -m benchmarks.{benchmark} {arguments} --output {output}"
    result = run_python(*words.split())
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(output.read_text()), result.stdout


def parse(benchmark, monkeypatch, arguments: str = ""):
    """Return the flags that a benchmark reads from a command line."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments.split()])
    return benchmark.parse_arguments()


@pytest.mark.launch
def test_attention_on_two_processes(tmp_path):
    modes = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "zigzag_all_gather")
    sizes = "--seq-length 128 64 --heads 4 --kv-heads 2 --head-dim 16 --check-length 64 --repeats 2"
    arguments = f"{sizes} --modes {' '.join(modes)}"
    results, printed = run("attention", arguments, tmp_path / "attention.json", processes=2)
    assert results["environment"]["processes"] == 2
    assert results["environment"]["packages"]["torch"] == torch.__version__
    rows = {(row["method"], row["kernel"], row["seq_length"]): row for row in results["rows"]}
    for seq_length in (64, 128):
        single = rows["one GPU", "cpu", seq_length]
        for mode in modes:
            row = rows[mode, "cpu", seq_length]
            assert row["error"] < 0.02  # bf16 against float64
            assert row["of_limit"] == pytest.approx(single["total_ms"] / 2 / row["total_ms"])
            assert row["tflops_per_gpu"] > 0 and row["repeats"] == 2
        for peer in ("ring-flash-attn zigzag", "yunchang Ulysses"):  # on PyTorch's kernel in place of flash-attn's
            row = rows[peer, "torch_flash", seq_length]
            assert row["error"] < 0.02 and row["total_ms"] > 0
            assert "flash-attn" in row["note"]
        # What needs a GPU is a row that says so, and nothing else is lost.
        assert rows["context_parallel", "cudnn", seq_length]["note"]
    assert "| zigzag_ring_attn" in printed and "of limit" in printed


@pytest.mark.launch
def test_train_step_on_one_process(tmp_path):
    results, printed = run(
        "train_step", f"{SMALL_MODEL} --seq-length 64 --layers 1 2 --steps 1", tmp_path / "step.json"
    )
    rows = results["rows"]
    assert {row["method"] for row in rows} == {
        "ours: data_parallel, input+attention",
        "original + fused loss",
        "original recipe",
    }
    assert sorted({row["layers"] for row in rows}) == [1, 2, 4]
    measured = [row for row in rows if row["layers"] < 4]  # extrapolated times of tiny models are noise
    assert all(row["tokens_per_second_per_gpu"] > 0 and row["vs_original"] > 0 for row in measured)
    for layers in (1, 2):  # same weights, same rows
        losses = [row["loss"] for row in rows if row["layers"] == layers]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)
    assert "4 from 1, 2" in printed


def test_evaluation_by_tiles_and_plain(tmp_path, capsys):
    sizes = SMALL_MODEL.replace("--full-depth 4", "--layers 2 --seq-length 128 64")
    evaluation.main([*sizes.split(), "--output", str(tmp_path / "evaluation.json")])
    rows = json.loads((tmp_path / "evaluation.json").read_text())["rows"]
    assert [(row["seq_length"], row["passes"]) for row in rows] == [
        *((64, "tiles"), (64, "plain")),
        *((128, "tiles"), (128, "plain")),
    ]
    for tiles, plain in (rows[:2], rows[2:]):
        assert tiles["loss"] == pytest.approx(plain["loss"], rel=1e-5) and tiles["forecast_gib"] > 0
        assert min(tiles["seconds"], plain["seconds"]) > 0
    assert "forecast GiB" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.launch
def test_train_step_under_zero3(tmp_path):
    methods = "--methods ours alst_cudnn alst_cudnn_tiled original --modes zigzag_ring_attn dist_flash_attn"
    sizes = "--seq-length 64 128 --layers 2 --tokens-per-step 256 --steps 1 --mlp-tile-size 16"
    rows = run("train_step", f"{SMALL_MODEL} {methods} {sizes}", tmp_path / "step.json", processes=2)[0]["rows"]
    assert len(rows) == 10 and not any("note" in row for row in rows)
    for seq_length in (64, 128):  # the second length starts from weights that a few steps moved alike
        runs = [row["losses"] for row in rows if row["seq_length"] == seq_length]
        for losses in runs[1:]:
            assert losses == pytest.approx(runs[0], rel=2e-3)
    assert {row["micro_batches"] for row in rows} == {2, 4}


def test_names_are_those_of_the_package():
    """The scripts list names without importing torch."""
    from easy_context.kernels import KERNELS
    from easy_context.modes import MODES

    assert set(attention.KERNELS) <= set(KERNELS)
    assert set(attention.OUR_MODES) | set(train_step.MODES) <= set(MODES)
    assert (candidate.ZigzagAllGather.name,) == attention.CANDIDATES


def test_attention_flops():
    times = {"forward_ms": 100.0, "backward_ms": 250.0, "total_ms": 350.0}
    row = attention_runs.rates(times, torch.empty(1, 65536, 32, 128, device="meta"), devices=1)
    # 2 products of 2·n²/2·heads·head_dim FLOPs forward; two and a half times that backward
    forward = 2 * 65536**2 * 32 * 128 / 0.1 / 1e12
    assert row["forward_tflops"] == pytest.approx(forward)
    assert row["backward_tflops"] == pytest.approx(forward)
    assert row["tflops_per_gpu"] == pytest.approx(forward)


def test_model_flops_utilisation_of_llama_3_8b(monkeypatch):
    from easy_context.training.flops import flops_per_token

    args = parse(train_step, monkeypatch)
    config, parameters = train_step_runs.model_config(args, 32), train_step_runs.parameter_count(args, 32)
    assert parameters == 8_030_261_248
    # 3486 tokens/s on one GPU of 989 TFLOP/s at 128K tokens are 52.2 %
    assert 3486 * flops_per_token(config, parameters, 131072) / 989e12 == pytest.approx(0.522, abs=5e-4)


def test_parameter_count_is_the_models(monkeypatch):
    from transformers import AutoModelForCausalLM

    args = parse(train_step, monkeypatch, SMALL_MODEL)
    model = AutoModelForCausalLM.from_config(train_step_runs.model_config(args, 3))
    assert train_step_runs.parameter_count(args, 3) == sum(p.numel() for p in model.parameters())


def test_extrapolation(monkeypatch):
    args = parse(train_step, monkeypatch)
    world = SimpleNamespace(size=2, device=torch.device("cpu"))
    common = {"seq_length": 131072, "method": "m", "peer": False, "kernel": "k", "tokens_per_step": 262144}
    rows = [common | {"layers": layers, "step_seconds": 3 + 2 * layers} for layers in (4, 8)]
    (row,) = train_step_runs.extrapolate(rows, args, world)
    assert (row["seconds_per_layer"], row["fixed_seconds"], row["step_seconds"]) == pytest.approx((2, 3, 67))
    assert row["tokens_per_second_per_gpu"] == pytest.approx(262144 / 67 / 2)
    assert train_step_runs.extrapolate(rows[:1], args, world) == []
    rows[0]["step_seconds"] = rows[1]["step_seconds"]
    (row,) = train_step_runs.extrapolate(rows, args, world)
    assert "noise" in row["note"] and "step_seconds" not in row


def test_rows_that_no_method_would_split_as_the_others_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        parse(train_step, monkeypatch, "--modes zigzag_ring_attn data_parallel")
    assert "--modes data_parallel: here all processes share a row" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(SystemExit):
        parse(train_step, monkeypatch, "--seq-length 32768")
    assert (
        "--seq-length 32768: a row must be a multiple of 80 tokens to be split over 5 ranks" in capsys.readouterr().err
    )


def test_stand_in_for_flash_attn():
    """Its calls compute what the kernels compute, in flash-attn's shapes and into the buffers given."""
    from easy_context.kernels import AttentionMask, select_kernel

    q, k, v, dout = (torch.randn(1, 24, heads, 16) for heads in (4, 2, 2, 4))
    kernel = select_kernel("reference", q.device, q.dtype, 16)
    out, lse = kernel.forward(q, k, v, 0.25, AttentionMask())
    expected = kernel.backward(dout, q, k, v, out, lse, 0.25, AttentionMask())
    ours = flash_attn_shim._flash_attn_forward(q, k, v, 0.0, 0.25, True)
    torch.testing.assert_close(ours[0], out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], lse, rtol=1e-5, atol=1e-5)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flash_attn_shim._flash_attn_backward(dout, q, k, v, ours[0], ours[1], *grads, 0.0, 0.25, True)
    torch.testing.assert_close(grads, list(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError):
        flash_attn_shim._flash_attn_forward(q, k, v, 0.1, 0.25, True)


def test_table():
    rows = [{"name": "a|b", "value": 1.25}, {"name": "long " * 40}]
    table = tables.markdown_table(rows, [("name", "name", ""), ("×", "value", ".1f")]).splitlines()
    assert len(table) == 4
    assert table[2].split("|")[1].strip() == "a/b" and table[2].split("|")[2].strip() == "1.2"
    assert all(line.count("|") == 3 for line in table)


@pytest.mark.launch
def test_attention_of_lone_ranks(tmp_path):
    sizes = "--seq-length 96 --heads 4 --kv-heads 2 --head-dim 16 --check-length 64 --repeats 1 --alone 2 3"
    results, _ = run("attention", f"{sizes} --modes zigzag_ring_attn dist_flash_attn", tmp_path / "alone.json")
    rows = {row["method"]: row for row in results["rows"]}
    single = rows.pop("one GPU")
    assert set(rows) == {
        f"{mode}, rank {rank} of {size} alone"
        for mode in ("zigzag_ring_attn", "dist_flash_attn")
        for size, rank in ((2, 0), (2, 1), (3, 0), (3, 2))
    }
    for method, row in rows.items():
        size = int(method.split()[-2])
        assert row["of_limit"] == pytest.approx(single["total_ms"] / size / row["total_ms"])


@pytest.mark.parametrize("mode", attention.OUR_MODES)
@pytest.mark.parametrize("rank,size", [(0, 2), (1, 2), (2, 4)])
def test_a_lone_rank_computes_what_it_does_among_others(mode, rank, size):
    """Calls of the kernel and their shapes; that they are right among others is tested in test_modes.py."""
    from easy_context.attention import AttentionSettings
    from easy_context.kernels import AttentionMask, select_kernel
    from easy_context.mesh import CurrentMesh
    from easy_context.modes import build_mode

    pairs = []  # (query, key) pairs of each call

    class Counting(type(select_kernel("cpu", torch.device("cpu"), torch.float32, 8))):
        def forward(self, q, k, v, scale, mask):
            pairs.append(q.shape[1] * k.shape[1] * q.shape[2] // (2 if mask.causal else 1))
            return super().forward(q, k, v, scale, mask)

    whole_mode = build_mode(mode, CurrentMesh(ring_degree=loopback.usp_ring_degree))
    settings = AttentionSettings(whole_mode, Counting(), 1.0, AttentionMask(causal=True))
    method = loopback.alone(settings, rank, size)
    q, k, v = (method.shard(torch.randn(1, 480, 4, 8)).requires_grad_() for _ in range(3))
    with method.session():
        out = method.run(q, k, v)
        out.sum().backward()
    assert out.shape == q.shape and q.grad.shape == q.shape and k.grad.shape == k.shape
    # Balanced modes: every rank has its share of half of all pairs.
    assert sum(pairs) == pytest.approx(4 * 480 * 480 / 2 / size, rel=0.05)
    assert not torch.distributed.is_initialized()


def test_gathered_keys_need_one_call_of_a_kernel_that_aligns_the_ends():
    """FlashAttention's kernels do; here the reference does, and agrees with two calls and a merge."""
    from plain_attention import random_inputs, relative_error

    from easy_context.kernels import select_kernel
    from easy_context.kernels.reference import ReferenceKernel

    class AlignedAtTheEnd(ReferenceKernel):
        name = "flash_attn"

        @staticmethod
        def _scores(q, k, scale, mask):
            padded = torch.cat((q.new_zeros(q.shape[0], k.shape[1] - q.shape[1], *q.shape[2:]), q), dim=1)
            return ReferenceKernel._scores(padded, k, scale, mask)[..., -q.shape[1] :, :]

    q, k, v, dout = random_inputs(31, 2, 12, 40, 4, 2, 16, torch.float64)
    results = []
    for kernel in (AlignedAtTheEnd(), select_kernel("reference", torch.device("cpu"), torch.float64, 16)):
        out, lse = candidate._forward(kernel, q, k, v, 0.3)
        results.append((out, lse, *candidate._backward(kernel, dout, q, k, v, out, lse, 0.3)))
    for one_call, two_calls in zip(*results, strict=True):
        assert relative_error(one_call, two_calls) < 1e-10


@pytest.mark.parametrize(
    "benchmark,flags,said",
    [
        (attention, "--heads 0", "argument --heads: must be at least 1, got 0"),
        (attention, "--heads 6 --kv-heads 4", "--heads 6 must be a multiple of --kv-heads 4"),
        (attention, "--seq-length 64 -16", "argument --seq-length: must be at least 1, got -16"),
        (attention, "--seq-length 100", "--seq-length 100: a row must be a multiple of 16"),
        (attention, "--repeats 0", "argument --repeats: must be at least 1, got 0"),
        (attention, "--output /proc/x/y.json", "--output /proc/x/y.json"),
        (attention, "--time-budget nan", "argument --time-budget: must be at least 1, got nan"),
        (attention, "--alone 3 --seq-length 32", "--seq-length 32: a row must be a multiple of 48"),
        (attention, "--alone 1", "argument --alone: must be at least 2, got 1"),
        (attention, "--check-length -1", "argument --check-length: must be at least 0, got -1"),
        (train_step, "--methods nothing", "invalid choice: 'nothing'"),
        (train_step, "--methods ours ours", "--methods ours ours: give each once"),
        (train_step, "--seq-length 32 32", "--seq-length 32 32: give each once"),
        (train_step, "--layers 4 4", "--layers 4 4: give each once"),
        (train_step, "--layers 0", "argument --layers: must be at least 1, got 0"),
        (train_step, "--steps two", "argument --steps: invalid int value: 'two'"),
        (train_step, "--hidden-size 30", "--heads must divide --hidden-size"),
        (train_step, "--vocab-size 0", "argument --vocab-size: must be at least 1, got 0"),
        (train_step, "--attn-kernel foo", "invalid choice: 'foo'"),
        (train_step, "--memory-plan 4*input+attention,4*all", "is for 8 layers, but the model has 4"),
        (train_step, "--mlp-tile-size -4", "argument --mlp-tile-size: must be at least 0, got -4"),
        (train_step, "--time-budget -5", "argument --time-budget: must be at least 1, got -5"),
        (train_step, "--tokens-per-step 0", "argument --tokens-per-step: must be at least 1, got 0"),
    ],
)
def test_wrong_flags_end_before_anything_is_measured(monkeypatch, capsys, benchmark, flags, said):
    with pytest.raises(SystemExit) as stop:
        parse(benchmark, monkeypatch, flags)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err

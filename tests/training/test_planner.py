"""plan.py and what is behind it: parts add up, the longest row fits and no longer one, its line is train.py's."""

import dataclasses
import shlex
import sys

import pytest
from transformers import LlamaConfig, Qwen3Config

import plan
from easy_context.training.arguments import parse_arguments
from easy_context.training.flops import PEAK_FLOPS
from easy_context.training.planner import CARD_MEMORY, GIB, Machines, forecast, longest_row

LLAMA_3_8B = LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, tie_word_embeddings=False)
QWEN3_06B = Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip


def arguments(*flags: str):
    args = parse_arguments(flags)
    args.liger = True
    return args


def machines(gpus: int = 8, card: str = "H100", host: float = 1000.0) -> Machines:
    return Machines.of(gpus, card, CARD_MEMORY[card], host, 8)


@pytest.mark.parametrize("offload", ["none", "optimizer", "all", "auto"])
@pytest.mark.parametrize("seq_length", [2048, 524288])
def test_parts_add_up_to_the_need(offload, seq_length):
    result = forecast(arguments("--offload", offload, "--seq-length", str(seq_length)), LLAMA_3_8B, machines())
    assert sum(result.gpu.values()) == pytest.approx(result.option.need.gpu)
    assert sum(result.host.values()) == pytest.approx(result.option.need.host)
    assert result.option.offload == ("none" if offload == "auto" else offload) and result.fits
    assert all(size >= 0 for size in (*result.gpu.values(), *result.host.values(), *result.seconds.values()))


def test_speed_is_near_what_was_measured():
    """Two H200s, 128K: 3366 tokens/s a GPU, 50.4 % MFU. One, six layers, cuDNN: 7.42 s and 7.83 s a step."""
    flags = ("--seq-length", "131072", "--gradient-checkpointing", "full", "--gradient-accumulate-every", "2")
    result = forecast(arguments(*flags), LLAMA_3_8B, machines(2, "H200"))
    assert result.tokens_per_second / 2 == pytest.approx(3366, rel=0.05)
    assert result.mfu == pytest.approx(0.504, rel=0.05)
    six = LlamaConfig(intermediate_size=14336, num_key_value_heads=8, num_hidden_layers=6, tie_word_embeddings=False)
    one = ("--parallel_mode", "data_parallel", "--gradient-accumulate-every", "1", "--attn-kernel", "cudnn")
    for text, seconds in (("1*input+attention+projections,5*all", 7.42), ("input@cpu+attention@cpu", 7.83)):
        args = arguments(*one, "--seq-length", "131072", "--memory-plan", text)
        assert sum(forecast(args, six, machines(1, "H200")).seconds.values()) == pytest.approx(seconds, rel=0.05)


def test_tokens_of_a_step_are_those_of_all_groups():
    flags = ("--seq-length", "4096", "--batch-size", "2", "--gradient-accumulate-every", "3")
    for sharing, groups in (("8", 1), ("2", 4)):
        args = arguments(*flags, "--sequence-parallel-size", sharing)
        result = forecast(args, QWEN3_06B, machines())
        tokens = result.tokens_per_second * sum(result.seconds.values())
        assert tokens == pytest.approx(2 * 4096 * 3 * groups)


def test_the_longest_row_fits_and_a_longer_one_does_not():
    args = arguments("--parallel_mode", "data_parallel")
    for host in (64.0, 500.0):
        there = machines(1, "A100", host)
        longest = longest_row(args, QWEN3_06B, there)
        for seq_length, fits in ((longest, True), (int(1.03 * longest), False)):
            longer = dataclasses.replace(args, seq_length=seq_length)
            assert forecast(longer, QWEN3_06B, there).fits == fits
    assert longest_row(args, LLAMA_3_8B, machines(1, "3090", 64.0)) == 0


def run(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """Return plan.py's exit status and what it prints."""
    monkeypatch.setattr(sys, "argv", ["plan.py", *words])
    try:
        plan.main()
        status = 0
    except SystemExit as end:
        status = end.code
    return status, "".join(capsys.readouterr())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("planner")
    LLAMA_3_8B.save_pretrained(folder)
    return str(folder)


def test_the_line_it_prints_is_for_train_py(monkeypatch, capsys, model):
    flags = ("--model", model, "--seq_length", "262144", "--parallel_mode", "ulysses_attn", "--output-dir", "a folder")
    status, printed = run(monkeypatch, capsys, "--gpus", "8", "--card", "A100", *flags)
    assert status == 0 and "8.03e9 parameters, rows of 262,144 tokens, 32,768 of a micro-batch" in printed
    for part in ("weights", "gradients and optimizer", "kept for backward", "memory plan: ", "longest row that fits"):
        assert part in printed
    line = shlex.split(printed.strip().splitlines()[-1])
    assert line[:4] == ["accelerate", "launch", "--config_file", "accelerate_configs/single_node.yaml"]
    args = parse_arguments(line[line.index("train.py") + 1 :])
    assert args == parse_arguments(list(flags)) and args.output_dir == "a folder"


EIGHT_BIT = ("--optimizer", "adamw8bit", "--parallel_mode", "data_parallel", "--seq-length", "716800")


def test_without_deepspeed_parts_add_up_and_every_gpu_holds_all():
    for gpus in (1, 2):
        result = forecast(arguments(*EIGHT_BIT), LLAMA_3_8B, machines(gpus, "H200", 120.0 * gpus))
        assert result.fits and result.option.offload is None
        assert sum(result.gpu.values()) == pytest.approx(result.option.need.gpu)
        assert result.gpu["weights"] / GIB == pytest.approx(15.0, rel=0.01)
        assert result.gpu["gradients and optimizer"] / GIB == pytest.approx(33.1, rel=0.01)
        assert result.host["weights, gradients, optimizer"] == 0 and result.seconds["optimizer"] > 0
    in_backward = arguments(*EIGHT_BIT, "--max-grad-norm", "0", "--gradient-accumulate-every", "1")
    released = forecast(in_backward, LLAMA_3_8B, machines(1, "H200", 120.0))
    assert released.gpu["gradients and optimizer"] / GIB == pytest.approx(18.1, rel=0.01)


@pytest.mark.parametrize(
    "gpus,line",
    [
        (1, "accelerate launch --config_file accelerate_configs/single_gpu_plain.yaml --num_processes 1 train.py"),
        (2, "torchrun --nproc-per-node 2 train.py"),
        (16, "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 8 train.py"),
    ],
)
def test_an_optimizer_without_deepspeed_is_launched_without_it(monkeypatch, capsys, model, gpus, line):
    words = ("--gpus", str(gpus), "--host-memory", "1000", "--model", model, *EIGHT_BIT)
    status, printed = run(monkeypatch, capsys, *words)
    assert status == 0 and printed.strip().splitlines()[-1].startswith(line)
    longest = int(printed.split("longest row that fits: about ")[1].split(" ")[0].replace(",", ""))
    assert longest > 716800


def test_what_does_not_fit_is_said(monkeypatch, capsys, model):
    status, printed = run(monkeypatch, capsys, "--card", "3090", "--host-memory", "64", "--model", model)
    assert status == 1 and "does not fit" in printed and "accelerate launch" not in printed


def test_cards_are_listed(monkeypatch, capsys):
    status, printed = run(monkeypatch, capsys, "--list")
    assert status == 0 and all(card in printed for card in CARD_MEMORY)
    assert CARD_MEMORY.keys() == PEAK_FLOPS.keys()


@pytest.mark.parametrize(
    "words,said",
    [
        (["--card", "H9000"], "--card H9000 is unknown: choose one of B200"),
        (["--gpus", "0"], "--gpus"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--memory-plan", "5*all"], "'5*all'"),
        (["--gpus", "4", "--sequence-parallel-size", "3"], "3 must divide the number of processes, 4"),
        (["--model", "/no/such/folder"], "no such folder"),
        (["--gpus", "4", "--parallel_mode", "usp_attn", "--ring_degree", "3"], "--ring_degree 3 must divide"),
        (["--gpus", "4", "--ring_degree", "2"], "--ring_degree 2"),  # of a mode that has no such choice
        (["--gpus", "64", "--parallel_mode", "ulysses_attn"], "32"),  # more than the query heads
        (["--optimizer", "adamw8bit", "--offload", "all"], "--offload all is DeepSpeed's"),
        (["--batch-size", "0", "--seq-length", "1"], "--batch-size 0 must be a whole number, at least 1"),
    ],
)
def test_wrong_flags_are_named(monkeypatch, capsys, model, words, said):
    status, printed = run(monkeypatch, capsys, *(["--model", model] if "--model" not in words else []), *words)
    assert status not in (0, None) and said in f"{status}{printed}"


def test_memory_is_the_card_s_or_the_given_one():
    assert machines(1, "H200").free.gpu == pytest.approx(138.9 * GIB, rel=1e-3)
    assert Machines.of(16, "A100", 40, 800, 8).free.gpu == pytest.approx(39.4 * GIB)
    assert Machines.of(16, "A100", 40, 800, 8).free.host == pytest.approx(100e9)

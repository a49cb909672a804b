"""train.py on several processes: Accelerate, DeepSpeed ZeRO-3 with CPU offload, gloo.

Some runs are launched as users launch them; the others are forked, since a launch takes many times as long.

All runs train the same four rows a step, in fp32, with gradient clipping active, and must agree with each other: a
wrong scale of the gradient in any mode shows in the norm, and in the losses of the following steps.
"""

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from forked_runs import ZERO_3_OFFLOAD, ForkedRun
from launching import accelerate_launch, read_metrics, run_python, start_python, torchrun

pytestmark = pytest.mark.launch
SEQ_LENGTH = 60  # no multiple of 8: four zigzag ranks must pad
STEPS = 6
MAX_GRAD_NORM = 0.5  # below every norm of these runs, so that each step is clipped
TOLERANCE = 1e-4

TILED = ["--memory-plan", "input+attention", "--mlp-tile-size", "7"]
KEPT = ["--memory-plan", "1*input+attention+projections,1*all"]
# name: (processes, flags); each makes four rows a step
RUNS = {
    "zigzag_ring_attn-1": (1, ["--gradient-accumulate-every", "4", "--gradient-checkpointing", "offload"]),
    "zigzag_ring_attn-2": (2, ["--gradient-accumulate-every", "4", "--memory-plan", "input@cpu+attention,projections"]),
    "zigzag_ring_attn-4": (4, ["--gradient-accumulate-every", "2", "--batch-size", "2", *TILED]),
    "dist_flash_attn-2": (2, ["--gradient-accumulate-every", "4", "--keep-attention", "cpu"]),
    "ulysses_attn-2": (2, ["--gradient-accumulate-every", "4"]),
    "usp_attn-4": (4, ["--gradient-accumulate-every", "4", "--ring_degree", "2"]),
    "data_parallel-2": (2, ["--gradient-accumulate-every", "2", *KEPT]),
    "data_parallel-2-torchrun": (2, ["--gradient-accumulate-every", "2", "--memory-plan", "input,nothing"]),
    "zigzag_ring_attn-4-in-two-groups": (4, ["--gradient-accumulate-every", "2", "--sequence-parallel-size", "2"]),
}
LAUNCHED = {"zigzag_ring_attn-2": accelerate_launch, "data_parallel-2-torchrun": torchrun}  # this without DeepSpeed
REFERENCE = "plain"  # one process without DeepSpeed or a launcher


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    """A model of four heads on two key-value heads, and rows of unequal lengths, some of their tokens not learnt."""
    import datasets
    from tiny_models import VOCABULARY, save_tiny_llama

    folder = tmp_path_factory.mktemp("launches")
    save_tiny_llama(folder / "model")
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in [SEQ_LENGTH] * 6 + [SEQ_LENGTH + 15, SEQ_LENGTH - 13, 31, SEQ_LENGTH]:
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        hidden = torch.rand(length, generator=generator) < 0.4
        rows.append({"input_ids": ids.tolist(), "labels": ids.masked_fill(hidden, -100).tolist(), "source": "random"})
    rows[3]["labels"] = [-100] * len(rows[3]["labels"])  # a row, on some ranks a micro-batch, without targets
    datasets.Dataset.from_list(rows).save_to_disk(folder / "rows")
    datasets.Dataset.from_list(rows[4:9]).to_parquet(folder / "eval.parquet")
    return folder


@pytest.fixture(scope="module")
def train(assets):
    """`train(name)`: the output folder of a run of RUNS or REFERENCE, which is made once a session."""
    finished: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in finished:
            processes, flags = RUNS.get(name, (1, ["--gradient-accumulate-every", "1", "--batch-size", "4"]))
            mode = name.split("-")[0] if name in RUNS else "data_parallel"
            output_dir = assets / name
            flags = [
                *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--parallel_mode", mode),
                *("--eval-dataset", str(assets / "eval.parquet"), "--eval-every", "4"),
                *("--seq-length", str(SEQ_LENGTH), "--rope-theta", "50000", "--max-train-steps", str(STEPS)),
                *("--learning-rate", "3e-3", "--warmup-steps", "2", "--weight-decay", "0.1"),
                *("--max-grad-norm", str(MAX_GRAD_NORM), "--mixed-precision", "no", "--output-dir", str(output_dir)),
                *flags,
            ]
            if name in LAUNCHED:
                result = run_python(*LAUNCHED[name](processes), "train.py", *flags)
                assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
            else:
                variables = {} if name == REFERENCE else ZERO_3_OFFLOAD
                forked = ForkedRun(assets / f"{name}.log", processes, flags, **variables)
                assert forked.wait(300) == [0] * processes, forked.said()[-6000:]
            finished[name] = output_dir
        return finished[name]

    return run


@pytest.mark.parametrize("name", RUNS)
def test_every_mode_and_process_count_trains_alike(train, name):
    got, expected = read_metrics(train(name)), read_metrics(train(REFERENCE))
    assert [record["step"] for record in got] == list(range(1, STEPS + 1))
    for record, reference in zip(got, expected, strict=True):
        assert record["grad_norm"] > MAX_GRAD_NORM, "clipping must be active"
        assert record["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE)
        assert record["grad_norm"] == pytest.approx(reference["grad_norm"], rel=TOLERANCE)
        assert record["valid_tokens"] == reference["valid_tokens"]
        assert record["learning_rate"] == pytest.approx(reference["learning_rate"], rel=1e-9)
        assert ("eval_loss" in record) == (record["step"] in (4, STEPS))
        if "eval_loss" in record:
            assert record["eval_loss"] == pytest.approx(reference["eval_loss"], rel=TOLERANCE)


def test_the_reference_is_the_plain_hugging_face_loss(train, assets):
    """Step 1 by hand: the mean over the valid targets of the step's four rows, computed without this package."""
    import datasets
    from transformers import AutoModelForCausalLM

    first = read_metrics(train(REFERENCE))[0]
    rows = datasets.load_from_disk(str(assets / "rows"))
    config = AutoModelForCausalLM.from_pretrained(assets / "model").config
    config.rope_parameters["rope_theta"] = 50000.0
    model = AutoModelForCausalLM.from_pretrained(assets / "model", config=config, attn_implementation="eager")
    # The first four rows of epoch 0 in the order of the default seed. Checkpoints rely on this order.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42 * 1_000_003 + 0)).tolist()
    total, count = 0.0, 0
    for row in rows.select(order[:4]):
        ids = torch.tensor(row["input_ids"][:SEQ_LENGTH])
        targets = torch.tensor(row["labels"][:SEQ_LENGTH])[1:]
        with torch.no_grad():
            logits = model(ids.unsqueeze(0)).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100).item()
        count += int((targets != -100).sum())
    assert first["valid_tokens"] == count
    assert first["loss"] == pytest.approx(total / count, rel=1e-6)


def test_a_run_writes_what_users_and_tools_read(train, assets):
    output_dir = train("zigzag_ring_attn-2")
    keys = {
        *("step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "tokens_per_second_per_device"),
        *("mfu", "peak_memory_bytes", "valid_tokens", "time"),
    }
    for record in read_metrics(output_dir):
        assert keys <= set(record) <= keys | {"eval_loss"}
        assert record["mfu"] is None  # a CPU's peak is not known
        assert record["tokens_per_second"] == pytest.approx(2 * record["tokens_per_second_per_device"])
        assert record["valid_tokens"] < record["tokens"] <= 4 * SEQ_LENGTH
        assert math.isfinite(record["loss"]) and record["peak_memory_bytes"] > 0
    arguments = json.loads((output_dir / "args.json").read_text())
    assert arguments["seq_length"] == SEQ_LENGTH and arguments["parallel_mode"] == "zigzag_ring_attn"
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= {p.name for p in output_dir.iterdir()}


@pytest.mark.parametrize("name", ["zigzag_ring_attn-2", "data_parallel-2"])
def test_the_saved_model_reloads_and_goes_on_where_training_ended(train, assets, name):
    """Every key, the new RoPE base, and the loss that the run itself measured after its last step."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output_dir = train(name)
    model, report = AutoModelForCausalLM.from_pretrained(output_dir, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.rope_parameters["rope_theta"] == 50000
    assert AutoTokenizer.from_pretrained(output_dir).vocab_size
    rotary = model.model.rotary_emb
    expected = 50000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(rotary.inv_freq.float(), expected, rtol=1e-5, atol=0)

    total, count = 0.0, 0
    for row in datasets.Dataset.from_parquet(str(assets / "eval.parquet")):
        targets = torch.tensor(row["labels"][:SEQ_LENGTH])[1:]
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"][:SEQ_LENGTH]])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100).item()
        count += int((targets != -100).sum())
    assert total / count == pytest.approx(read_metrics(output_dir)[-1]["eval_loss"], rel=1e-5)


def test_weights_after_training_do_not_depend_on_the_mode(train):
    from safetensors.torch import load_file

    reference = load_file(train(REFERENCE) / "model.safetensors")
    for name in ("zigzag_ring_attn-2", "data_parallel-2"):
        weights = load_file(train(name) / "model.safetensors")
        assert weights.keys() == reference.keys()
        for key, value in weights.items():
            # AdamW divides by the root of a squared gradient: where that is all rounding, so is the step.
            difference = (value - reference[key]).norm() / reference[key].norm()
            assert difference < 1e-3, (name, key, float(difference))


def test_what_cannot_work_is_said_once_and_nothing_is_written(assets):
    """Three mistakes on two processes: one message with all three, no traceback of train.py's."""
    output_dir = assets / "refused"
    flags = [
        *("--model", str(assets / "model"), "--dataset", str(assets / "no-such-rows"), "--parallel_mode"),
        *("ulysses_attn", "--sequence-parallel-size", "3", "--max-train-steps", "0", "--output-dir", str(output_dir)),
    ]
    result = run_python(*accelerate_launch(2), "train.py", *flags)
    assert result.returncode != 0
    assert result.stderr.count("train.py cannot start") == 1
    for flag in ("--dataset", "--sequence-parallel-size 3", "--max-train-steps 0"):
        assert f"  - {flag}" in result.stderr, result.stderr
    assert 'train.py", line' not in result.stderr
    assert not output_dir.exists()


def test_a_loss_that_is_not_finite_is_said_once(assets):
    output_dir = assets / "diverged"
    flags = [
        *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--seq-length", str(SEQ_LENGTH)),
        *("--learning-rate", "1e30", "--mixed-precision", "no", "--output-dir", str(output_dir)),
        *("--gradient-accumulate-every", "1"),
    ]
    run = ForkedRun(assets / "diverged.log", 2, flags, **ZERO_3_OFFLOAD)
    assert run.wait() == [1, 1]
    assert run.said().count("step 2: loss nan") == 1, run.said()
    assert 'train.py", line' not in run.said()
    assert [record["step"] for record in read_metrics(output_dir)] == [1, 2]
    assert not (output_dir / "config.json").exists()


def test_ctrl_c_is_answered_once(assets):
    """Two processes are interrupted while they train, as a terminal does it: a line of the first, no stack trace."""
    output_dir = assets / "interrupted"
    flags = [
        *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--seq-length", str(SEQ_LENGTH)),
        *("--mixed-precision", "no", "--output-dir", str(output_dir), "--max-train-steps", "1000000"),
    ]
    file, deadline = output_dir / "metrics.jsonl", time.monotonic() + 200
    process = start_python(*torchrun(2), "train.py", *flags)
    try:
        while not (file.exists() and file.read_text().count("\n") > 1):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert said.count("stopped by Ctrl-C: ") == 1, said[-3000:]
    assert f"steps are in {file}, no model is saved; the same command begins again at step 1" in said
    assert 'train.py", line' not in said
    assert not (output_dir / "config.json").exists()


@pytest.fixture(scope="module")
def zero_stages(assets):
    """Metrics of two processes at each ZeRO stage and precision, in one launch; the reference's four rows a step."""
    folder = assets / "zero"
    folder.mkdir()
    flags = [
        *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--seq-length", str(SEQ_LENGTH)),
        *("--rope-theta", "50000", "--max-train-steps", "4", "--learning-rate", "3e-3", "--warmup-steps", "2"),
        *("--weight-decay", "0.1", "--max-grad-norm", str(MAX_GRAD_NORM), "--gradient-accumulate-every", "4"),
    ]
    result = run_python(*torchrun(2), "tests/helpers/zero_stages.py", str(folder), *flags)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return {path.name: read_metrics(path) for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize("stage", range(4))
def test_every_zero_stage_trains_alike_in_float32(train, zero_stages, stage):
    for record, reference in zip(zero_stages[f"{stage}-no"], read_metrics(train(REFERENCE)), strict=False):
        assert record["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE)
        assert record["grad_norm"] == pytest.approx(reference["grad_norm"], rel=TOLERANCE)


@pytest.mark.parametrize("stage", range(4))
def test_every_zero_stage_trains_alike_in_bf16(train, zero_stages, stage):
    """Rounding to 8 bits moves the loss of these few tokens by less than 1 %, and is the same at stages 0 and 1."""
    records = zero_stages[f"{stage}-bf16"]
    for record, reference in zip(records, read_metrics(train(REFERENCE)), strict=False):
        assert record["loss"] == pytest.approx(reference["loss"], rel=0.01)
        assert record["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.05)
    if stage == 0:
        assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in zero_stages["1-bf16"]], rel=2e-3)

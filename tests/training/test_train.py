"""train.py from its first line to its last, in this process: one rank, no launcher, no DeepSpeed."""

import math
import sys
from pathlib import Path

import pytest
import torch
from launching import read_metrics, train_here
from tiny_models import VOCABULARY, save_tiny_llama

STEPS = 3


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    import datasets

    folder = tmp_path_factory.mktemp("train")
    save_tiny_llama(folder / "model")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (7, 48), generator=generator).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / "rows")
    labels = [[-100] * 48] * 6 + [rows[6]]
    datasets.Dataset.from_dict({"input_ids": rows, "labels": labels}).save_to_disk(folder / "mostly-unlearnt")
    labels = [[-100] * 48] * 7
    datasets.Dataset.from_dict({"input_ids": rows, "labels": labels}).save_to_disk(folder / "unlearnt")
    return folder


@pytest.fixture
def train(assets, tmp_path):
    """`train(flags...)`: run train.main() with tiny rows, undo all it patched, and return its output folder."""

    def run(*flags: str) -> Path:
        output_dir = tmp_path / "out"
        usual = [
            *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--output-dir", str(output_dir)),
            *("--seq-length", "48", "--max-train-steps", str(STEPS), "--gradient-accumulate-every", "2"),
            *("--learning-rate", "1e-3", "--mixed-precision", "no"),
        ]
        train_here(*usual, *flags)
        return output_dir

    return run


def test_a_run_is_repeated_exactly_and_another_seed_takes_other_rows(train):
    flags = ["--overwrite"]
    losses = [[record["loss"] for record in read_metrics(train(*flags, "--seed", seed))] for seed in ("5", "5", "6")]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("how", [("none", "gpu"), ("full", "none"), ("full", "gpu"), ("offload", "cpu")])
def test_checkpointing_changes_nothing(train, how):
    expected = read_metrics(train("--gradient-checkpointing", "none"))
    got = read_metrics(train("--gradient-checkpointing", how[0], "--keep-attention", how[1], "--overwrite"))
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in got] == [record[key] for record in expected]


def test_accumulation_is_a_larger_batch(train):
    """Also where an epoch ends inside a step: seven rows, four a step."""
    many = read_metrics(train("--batch-size", "1", "--gradient-accumulate-every", "4"))
    one = read_metrics(train("--batch-size", "4", "--gradient-accumulate-every", "1", "--overwrite"))
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in many] == pytest.approx([record[key] for record in one], rel=1e-5)


def test_utilisation_counts_attention_over_the_rows_there_are(train, assets, monkeypatch):
    """Rows of 48 tokens under --seq-length 4096 do not attend to 4096."""
    from transformers import AutoModelForCausalLM

    from easy_context.training import metrics as metrics_module

    monkeypatch.setattr(metrics_module, "peak_flops", lambda device: 1e12)
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    token_flops = metrics_module.flops_per_token(model.config, sum(p.numel() for p in model.parameters()), 48)
    for record in read_metrics(train("--seq-length", "4096")):
        assert record["tokens"] == 2 * 48
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * token_flops / 1e12)


def test_bf16_trains_float32_weights_near_the_float32_run(train):
    from safetensors.torch import load_file

    expected = read_metrics(train())
    output_dir = train("--mixed-precision", "bf16", "--overwrite")
    got = read_metrics(output_dir)
    assert [record["loss"] for record in got] == pytest.approx([record["loss"] for record in expected], rel=0.02)
    assert got != expected
    assert {value.dtype for value in load_file(output_dir / "model.safetensors").values()} == {torch.float32}


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(train, assets, capsys):
    output_dir = train()
    saved = (output_dir / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit) as stop:
        train("--learning-rate", "1e30", "--max-train-steps", "9", "--overwrite")
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert "\nstep 2: loss nan" in message and "Lower --learning-rate" in message
    order = torch.randperm(7, generator=torch.Generator().manual_seed(42 * 1_000_003)).tolist()  # of the first epoch
    rows = f"rows {order[2]}, {order[3]} of --dataset {assets / 'rows'}"
    assert f"{rows}. The weights were not changed by it" in message
    lines = read_metrics(output_dir)
    assert [record["step"] for record in lines] == [1, 2]
    assert math.isfinite(lines[0]["loss"]) and lines[1]["loss"] is None
    assert (output_dir / "model.safetensors").read_bytes() == saved


def test_steps_without_any_target_are_no_nan(train, assets):
    records = read_metrics(train("--dataset", str(assets / "mostly-unlearnt")))
    empty = [record for record in records if record["valid_tokens"] == 0]
    assert empty and len(empty) < len(records)
    for record in records:
        assert (record["loss"] == 0) == (record["grad_norm"] == 0) == (record["valid_tokens"] == 0)


@pytest.mark.parametrize("flag", ["--dataset", "--eval-dataset"])
def test_rows_without_any_target_are_refused(train, assets, capsys, flag):
    with pytest.raises(SystemExit):
        train(flag, str(assets / "unlearnt"))
    assert f"{flag} {assets / 'unlearnt'} has no token to learn" in capsys.readouterr().err


def test_padding_is_neither_learned_nor_evaluated(train, assets, tmp_path):
    """Rows of 20 tokens and 28 of padding: 19 targets, and the loss of plain transformers on the 20 tokens."""
    import datasets
    from transformers import AutoModelForCausalLM

    rows = torch.randint(1, VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(1))
    padded = [row + [0] * 28 for row in rows.tolist()]
    padding = {"input_ids": padded, "attention_mask": [[1] * 20 + [0] * 28] * 4}
    datasets.Dataset.from_dict(padding).save_to_disk(tmp_path / "padded")
    flags = ["--dataset", str(tmp_path / "padded"), "--eval-dataset", str(tmp_path / "padded"), "--learning-rate", "0"]
    for record in read_metrics(train(*flags, "--max-train-steps", "2", "--gradient-accumulate-every", "4")):
        assert record["valid_tokens"] == 4 * 19
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(assets / "model")(rows, labels=rows).loss.item()
        assert record["loss"] == pytest.approx(expected, rel=1e-5)
    assert record["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("flag", ["--dataset", "--eval-dataset"])
def test_packed_documents_are_refused_at_the_start(train, assets, tmp_path, capsys, flag):
    import datasets

    packed = {"input_ids": [list(range(48))], "position_ids": [[*range(20), *range(28)]]}
    datasets.Dataset.from_dict(packed).save_to_disk(tmp_path / "packed")
    with pytest.raises(SystemExit):
        train(flag, str(tmp_path / "packed"))
    message = f"{flag} {tmp_path}/packed: row 0: position_ids [0, 1, 2, 3, ...] tells documents apart"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_columns_that_are_used_and_those_that_are_not_are_said_once(train, assets, tmp_path, caplog):
    import datasets

    rows = datasets.load_from_disk(str(assets / "mostly-unlearnt"))
    rows.add_column("source", ["web"] * len(rows)).save_to_disk(tmp_path / "rows")
    train("--dataset", str(tmp_path / "rows"), "--max-train-steps", "1")
    said = [record.getMessage() for record in caplog.records if "--dataset" in record.getMessage()]
    assert said == [f"--dataset {tmp_path}/rows: labels say which tokens are learned (-100: none); not used: source"]


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_lack_a_tensor_are_not_trained(train, assets, tmp_path, capsys, form):
    """Whether it shows in a header or only when the model loads."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(assets / "model", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    (folder / "model.safetensors").unlink()
    if form == "pytorch_model.bin":
        torch.save(tensors, folder / form)
    else:
        save_file(tensors, folder / form, metadata={"format": "pt"})
    with pytest.raises(SystemExit) as stop:
        train("--model", str(folder))
    assert stop.value.code == 2
    message = f"train.py cannot start:\n  - --model {folder}: its weights lack lm_head.weight, which would be random"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_steps_run_in_training_mode_and_evaluations_do_not(train, assets, monkeypatch):
    """Also behind an evaluation, and without checkpointing, which would not run otherwise."""
    from easy_context import loss

    modes, apply_fused_loss = [], loss.apply_fused_loss

    def watched(model, **options):
        model.register_forward_pre_hook(lambda module, _: modes.append((module.training, torch.is_grad_enabled())))
        return apply_fused_loss(model, **options)

    monkeypatch.setattr(loss, "apply_fused_loss", watched)
    flags = ["--eval-dataset", str(assets / "rows"), "--eval-every", "1", "--gradient-checkpointing", "none"]
    records = read_metrics(train(*flags))
    assert modes == STEPS * ([(True, True)] * 2 + [(False, False)] * 7)
    assert [sorted(record) for record in records] == STEPS * [sorted([*records[0]])] and "eval_loss" in records[0]


def test_evaluations_come_at_their_steps_and_at_the_end(train, assets, monkeypatch):
    """And their time is no step's: the clock starts anew behind each."""
    from easy_context.training.metrics import StepMeter

    restart, restarts = StepMeter.restart, []
    monkeypatch.setattr(StepMeter, "restart", lambda meter: restarts.append(restart(meter)))
    records = read_metrics(train("--eval-dataset", str(assets / "rows"), "--eval-every", "2", "--max-train-steps", "5"))
    assert [record["step"] for record in records if "eval_loss" in record] == [2, 4, 5]
    assert len(restarts) == 1 + 3


def test_learning_rates_are_the_flags(train):
    flags = ["--warmup-steps", "2", "--lr-scheduler", "linear", "--learning-rate", "6e-4", "--max-train-steps", "5"]
    rates = [record["learning_rate"] for record in read_metrics(train(*flags))]
    assert rates == pytest.approx([2e-4, 4e-4, 6e-4, 4e-4, 2e-4])


def test_tensorboard_gets_every_reported_step(train):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output_dir = train("--report-to", "tensorboard", "--log-every", "2", "--max-train-steps", "4")
    (folder,) = {path.parent for path in output_dir.rglob("events.out.tfevents*") if path.parent.name == "easy-context"}
    events = EventAccumulator(str(folder)).Reload()
    logged = {event.step: event.value for event in events.Scalars("loss")}
    expected = {record["step"]: record["loss"] for record in read_metrics(output_dir)}
    assert logged == pytest.approx({step: expected[step] for step in (2, 4)}, rel=1e-6)


def test_wandb_without_a_key_neither_asks_nor_waits(train, monkeypatch, tmp_path, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "")  # restored afterwards, whatever the run sets
    monkeypatch.setattr(sys, "stdin", None)  # a question would fail
    output_dir = train("--wandb", "long context")
    assert "offline" in capsys.readouterr().out
    assert list(output_dir.rglob("*.wandb"))
    assert len(read_metrics(output_dir)) == STEPS


def test_a_row_that_cannot_be_used_ends_the_run_without_a_traceback(train, assets, tmp_path, monkeypatch, capsys):
    """It stands behind the rows that are checked at the start."""
    import datasets

    from easy_context.data import token_rows

    rows = [[1] * 48] * 16 + [[VOCABULARY] * 48] * 2
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "rows")
    monkeypatch.setattr(token_rows, "_TOKENS_CHECKED", 16 * 48)
    with pytest.raises(SystemExit) as stop:
        train("--dataset", str(tmp_path / "rows"), "--max-train-steps", "9")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert f"train.py cannot continue:\n  - --dataset {tmp_path}/rows: row 1" in message
    assert f"holds token ids from {VOCABULARY} to {VOCABULARY}" in message

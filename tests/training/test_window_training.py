"""train.py with a sliding window shorter than the row: the window counts from the place in the whole row."""

from pathlib import Path

import datasets
import pytest
import torch
from family_models import family_model
from forked_runs import ZERO_3_OFFLOAD, ForkedRun
from launching import read_metrics, train_here

LENGTH, WINDOW, STEPS, TOLERANCE = 60, 9, 3, 1e-4


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    """A Mistral model with a window, and rows."""
    folder = tmp_path_factory.mktemp("windows")
    family_model("mistral", vocab_size=64, sliding_window=WINDOW).save_pretrained(folder / "model")
    rows = torch.randint(64, (4, LENGTH), generator=torch.Generator().manual_seed(5)).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / "rows")
    return folder


def flags_of(assets: Path, output_dir: Path) -> list[str]:
    return [
        *("--model", str(assets / "model"), "--dataset", str(assets / "rows"), "--output-dir", str(output_dir)),
        *("--seq-length", str(LENGTH), "--rope-theta", "50000", "--max-train-steps", str(STEPS)),
        *("--learning-rate", "3e-3", "--max-grad-norm", "0.5", "--mixed-precision", "no"),
    ]


@pytest.fixture(scope="module")
def expected(assets) -> list[dict]:
    """Metrics of one process; the loss of its first step is that of transformers' own attention."""
    one_batch = ["--parallel_mode", "data_parallel", "--batch-size", "4", "--gradient-accumulate-every", "1"]
    train_here(*flags_of(assets, assets / "one"), *one_batch)
    metrics = read_metrics(assets / "one")
    rows = torch.tensor(datasets.load_from_disk(assets / "rows")["input_ids"])
    losses = []
    for window in (WINDOW, None):
        model = family_model("mistral", vocab_size=64, sliding_window=window)
        model.config.rope_parameters["rope_theta"] = 50000.0
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        losses.append(model(rows, labels=rows).loss.item())
    assert metrics[0]["loss"] == pytest.approx(losses[0], rel=TOLERANCE)
    assert metrics[0]["loss"] != pytest.approx(losses[1], rel=10 * TOLERANCE), "the window must matter"
    return metrics


@pytest.mark.launch
@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "ulysses_attn"])
def test_two_processes_under_zero_3_train_as_one(assets, expected, tmp_path, mode):
    flags = [*flags_of(assets, tmp_path / "out"), "--parallel_mode", mode]
    run = ForkedRun(tmp_path / "log", 2, [*flags, "--gradient-accumulate-every", "4"], **ZERO_3_OFFLOAD)
    assert run.wait(300) == [0, 0], run.said()[-3000:]
    got = read_metrics(tmp_path / "out")
    assert len(got) == STEPS
    for record, reference in zip(got, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert record[key] == pytest.approx(reference[key], rel=TOLERANCE), (key, record["step"])

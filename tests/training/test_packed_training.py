"""train.py --respect-documents: packed rows train as the same documents do when each is a row of its own.

A step takes all four packed rows, so that it sees the same documents as a step over all rows of the other dataset,
whatever the order.
"""

import json
from pathlib import Path

import datasets
import pytest
import torch
from forked_runs import ZERO_3_OFFLOAD, ForkedRun
from launching import read_metrics, train_here
from tiny_models import VOCABULARY, save_tiny_llama
from transformers.models.llama.modeling_llama import LlamaModel

STEPS, TOLERANCE = 4, 1e-4
SEPARATOR = 200  # the last token of each document, and of no other place
LENGTHS = [[20, 1, 11, 28], [60], [1, 1, 43], [30, 30]]  # tokens of the documents of each row


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    """A model, and the documents in rows of 60 and 45 tokens, told apart in three ways, and each in its own row."""
    folder = tmp_path_factory.mktemp("packed")
    save_tiny_llama(folder / "model")
    generator = torch.Generator().manual_seed(3)
    packed, apart = [], []
    for lengths in LENGTHS:
        documents = []
        for length in lengths:
            ids = torch.randint(0, SEPARATOR, (length,), generator=generator)
            ids[-1] = SEPARATOR
            hidden = torch.rand(length, generator=generator) < 0.3
            documents.append({"input_ids": ids.tolist(), "labels": ids.masked_fill(hidden, -100).tolist()})
        apart += documents
        packed.append({key: sum((document[key] for document in documents), []) for key in documents[0]})
    save = {
        "apart": apart,
        "plain": packed,
        "lengths": [row | {"document_lengths": lengths} for row, lengths in zip(packed, LENGTHS, strict=True)],
        "positions": [
            row | {"position_ids": [place for length in lengths for place in range(length)]}
            for row, lengths in zip(packed, LENGTHS, strict=True)
        ],
    }
    assert SEPARATOR < VOCABULARY
    for name, rows in save.items():
        datasets.Dataset.from_list(rows).save_to_disk(folder / name)
    return folder


def flags_of(assets: Path, rows: str, output_dir: Path) -> list[str]:
    return [
        *("--model", str(assets / "model"), "--dataset", str(assets / rows), "--eval-dataset", str(assets / rows)),
        *("--seq-length", "60", "--rope-theta", "50000", "--max-train-steps", str(STEPS), "--eval-every", "2"),
        *("--learning-rate", "3e-3", "--max-grad-norm", "0.5", "--mixed-precision", "no"),
        *("--output-dir", str(output_dir)),
    ]


@pytest.fixture(scope="module")
def expected(assets) -> list[dict]:
    """Metrics of one process over the documents apart."""
    documents = sum(map(len, LENGTHS))
    one_batch = ["--batch-size", str(documents), "--gradient-accumulate-every", "1"]
    train_here(*flags_of(assets, "apart", assets / "expected"), "--parallel_mode", "data_parallel", *one_batch)
    return read_metrics(assets / "expected")


def assert_alike(output_dir: Path, expected: list[dict]) -> None:
    got = read_metrics(output_dir)
    assert len(got) == len(expected) == STEPS
    for record, reference in zip(got, expected, strict=True):
        for key in ("loss", "grad_norm", *(["eval_loss"] if "eval_loss" in reference else [])):
            assert record[key] == pytest.approx(reference[key], rel=TOLERANCE), (key, record["step"])
        assert record["valid_tokens"] == reference["valid_tokens"]


@pytest.mark.parametrize(
    "rows, flags",
    [
        ("positions", ["--batch-size", "2", "--gradient-accumulate-every", "2"]),
        ("plain", ["--batch-size", "1", "--gradient-accumulate-every", "4", "--documents-end-with", str(SEPARATOR)]),
    ],
)
def test_one_process_trains_packed_rows_as_their_documents(assets, expected, tmp_path, rows, flags):
    train_here(*flags_of(assets, rows, tmp_path), "--respect-documents", *flags)
    assert_alike(tmp_path, expected)


@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_positions_restart_or_continue_and_nothing_else_changes(assets, expected, tmp_path, monkeypatch, positions):
    seen, forward = [], LlamaModel.forward

    def watch(model, *args, position_ids, **kwargs):
        seen.append(position_ids)
        return forward(model, *args, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", watch)
    flags = ["--batch-size", "4", "--gradient-accumulate-every", "1", "--document-positions", positions]
    train_here(*flags_of(assets, "lengths", tmp_path), "--respect-documents", *flags)
    assert_alike(tmp_path, expected)
    going_on = torch.arange(60).expand(4, 60)
    assert seen and all(torch.equal(each, going_on) == (positions == "continue") for each in seen)


def test_without_the_flag_attention_crosses_documents_and_the_log_says_so(assets, expected, tmp_path, caplog):
    flags = ["--batch-size", "4", "--gradient-accumulate-every", "1"]
    train_here(*flags_of(assets, "lengths", tmp_path), *flags)
    assert read_metrics(tmp_path)[0]["loss"] != pytest.approx(expected[0]["loss"], rel=1e-3)
    said = [record.message for record in caplog.records if "read as one text" in record.message]
    assert len(said) == 2 and said[0].startswith("--dataset") and said[1].startswith("--eval-dataset")


@pytest.mark.launch
def test_two_processes_under_ddp_train_packed_rows_as_their_documents(assets, expected, tmp_path):
    flags = ["--respect-documents", "--parallel_mode", "ulysses_attn", "--gradient-accumulate-every", "4"]
    run = ForkedRun(tmp_path / "said.txt", 2, [*flags_of(assets, "lengths", tmp_path / "out"), *flags])
    assert run.wait(300) == [0] * 2, run.said()[-3000:]
    assert_alike(tmp_path / "out", expected)


@pytest.mark.launch
def test_four_processes_under_zero3_train_packed_rows_as_their_documents(assets, expected, tmp_path):
    """Two groups of two, with layers that are recomputed."""
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    flags = [
        *("--respect-documents", "--parallel_mode", "zigzag_ring_attn", "--sequence-parallel-size", "2"),
        *("--gradient-accumulate-every", "2", "--memory-plan", "input@cpu+attention,input"),
    ]
    all_flags = [*flags_of(assets, "lengths", tmp_path / "out"), *flags]
    variables = ZERO_3_OFFLOAD | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "zero.json")}
    run = ForkedRun(tmp_path / "said.txt", 4, all_flags, **variables)
    assert run.wait(300) == [0] * 4, run.said()[-3000:]
    assert_alike(tmp_path / "out", expected)

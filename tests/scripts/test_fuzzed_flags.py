"""Odd command lines for every script: each is honoured or refused in words that name a flag, without a traceback."""

import contextlib
import io
import sys
from unittest import mock

import pytest
import torch
from fuzzing import command_lines, few, in_words, small_tree
from hypothesis import given
from tiny_models import VOCABULARY, save_tiny_llama

import plan
from easy_context.data.preparation import arguments as preparing
from easy_context.evaluation.needle import arguments as needle
from easy_context.evaluation.perplexity import arguments as perplexity
from easy_context.training import arguments as training


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The current folder of these tests: `model`, `rows`, and files that are damaged in many ways."""
    import datasets
    import huggingface_hub

    folder = tmp_path_factory.mktemp("fuzz")
    save_tiny_llama(folder / "model")
    rows = torch.randint(0, VOCABULARY, (5, 32), generator=torch.Generator().manual_seed(0)).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / "rows")
    small_tree(folder)
    with contextlib.chdir(folder), mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
        yield folder


PATHS = [
    *("model", "rows", "empty", "empty.jsonl", "text.txt", "bytes.txt", "bad.json", "list.json", "rows.jsonl"),
    *("bad.parquet", "bad.gz", "checkpoint-1", "new", "text.txt/x"),
]


def assert_clear(run, words: list[str], refused: tuple[type[Exception], ...] = ()) -> None:
    """Run with a command line; what it refuses must name a flag."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            run(words)
    except (SystemExit, *refused) as error:
        if isinstance(error, SystemExit) and error.code == 0:
            return
        message = in_words(error, said.getvalue())
        assert "--" in message or "-m" in message or "does not fit: more than" in message, f"{words}: {message}"
        assert "Traceback" not in message


def check_training(words: list[str]) -> None:
    from easy_context.training.checks import find_problems

    args = training.parse_arguments(["--model", "model", "--dataset", "rows", *words])
    problems, *_ = find_problems(args, world_size=2)
    for problem in problems:
        assert "--" in problem, problem


def plan_main(words: list[str]) -> None:
    with mock.patch.object(sys, "argv", ["plan.py", "--model", "model", *words]):
        plan.main()


@few(60)
@given(command_lines(training.build_parser(), PATHS))
def test_train(words):
    assert_clear(check_training, words)


@few(40)
@given(command_lines(training.build_parser(), ["model"]))
def test_plan(words):
    assert_clear(plan_main, words)


@few(150)
@given(command_lines(preparing.build_parser(), PATHS))
def test_prepare_data(words):
    usual = ["--input", "text.txt", "--tokenizer", "model", "--seq-length", "64", "--output-dir", "new"]
    assert_clear(preparing.parse_arguments, [*usual, *words], (ValueError, OSError))


@few(150)
@given(command_lines(perplexity.build_parser(), PATHS))
def test_eval_ppl(words):
    assert_clear(perplexity.parse_arguments, ["-m", "model", "--text", "text.txt", *words], (ValueError, OSError))


@few(150)
@given(command_lines(needle.build_parser(), PATHS))
def test_eval_needle(words):
    assert_clear(needle.parse_arguments, ["--model", "model", *words], (ValueError, OSError))

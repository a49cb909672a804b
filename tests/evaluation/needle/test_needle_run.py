"""eval_needle.py: files on disk; cells survive a stop; other settings are refused; processes change nothing."""

import csv
import json
import os

import pytest
import torch
from needle_runs import CELLS, TOY, OracleScorer, journal_of, parse, prepare, records_of, run_oracle
from tiny_models import save_tiny_llama
from tokenizer_styles import tokenizer_of_style

import eval_needle
from easy_context.evaluation import loading
from easy_context.evaluation.needle import run
from easy_context.evaluation.needle.ruler_tasks import RULER_TASKS

pytestmark = pytest.mark.usefixtures("small_haystack")


def test_results_on_disk(model_folder, tmp_path):
    records = run_oracle(model_folder, tmp_path, OracleScorer())
    assert [(record["length"], record["depth"]) for record in records] == CELLS
    for record in records:
        right = [int(sample["answer"][0]) >= 5 for sample in record["samples"]]
        assert [sample["exact"] for sample in record["samples"]] == right
        assert record["accuracy"] == pytest.approx(sum(right) / 3)
        assert {sample["tokens"] for sample in record["samples"]} == {record["length"]}
        assert all(len(sample["answer"]) == 5 and len(sample["places"]) == 1 for sample in record["samples"])
    assert 0 < sum(record["accuracy"] for record in records) < len(records)
    summary = json.loads((tmp_path / "summary.json").read_text())["tasks"]["needle"]
    for length in (96, 192, 200):
        own = [record["accuracy"] for record in records if record["length"] == length]
        assert summary["by_length"][str(length)]["accuracy"] == pytest.approx(sum(own) / len(own))
        assert summary["by_length"][str(length)]["samples"] == 9
    with open(tmp_path / "cells.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["task", "length", "depth", "accuracy", "item_accuracy"]
    assert [(int(row["length"]), float(row["depth"])) for row in rows] == CELLS
    assert [float(row["accuracy"]) for row in rows] == [record["accuracy"] for record in records]
    assert (tmp_path / "needle.png").stat().st_size > 5000


def test_a_stopped_run_is_continued(model_folder, tmp_path):
    whole = run_oracle(model_folder, tmp_path / "whole", OracleScorer())
    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run_oracle(model_folder, folder, OracleScorer(stop_after=4))
    assert len(records_of(folder)) == 4
    with (folder / "cells.jsonl").open("a") as file:
        file.write('{"task": "needle", "length": 19')  # killed in the middle of a line
    oracle = OracleScorer()
    assert run_oracle(model_folder, folder, oracle) == whole
    assert oracle.passes == len(CELLS) - 4
    again = OracleScorer()
    finer = ["--depth_interval", "0.25", "--batch_tokens", "1", "--resume", "auto"]
    run_oracle(model_folder, folder, again, *finer)
    assert again.passes == 3 * 2 * 3  # two new depths at three lengths, one row at a time
    fresh = OracleScorer()
    run_oracle(model_folder, folder, fresh, "--overwrite")
    assert fresh.passes == len(CELLS)
    assert parse(model_folder, folder, "--overwrite") == parse(model_folder, folder, "--resume", "none")


def test_cells_that_were_not_asked_for_stay_out_of_the_results(model_folder, tmp_path):
    run_oracle(model_folder, tmp_path, OracleScorer())
    oracle = OracleScorer()
    records = run_oracle(model_folder, tmp_path, oracle, "--max_context_length", "96")
    assert oracle.passes == 0 and {record["length"] for record in records} == {96}
    assert list(json.loads((tmp_path / "summary.json").read_text())["tasks"]["needle"]["by_length"]) == ["96"]


def test_other_settings_are_refused(model_folder, tmp_path):
    run_oracle(model_folder, tmp_path, OracleScorer())
    grid = ["--max_context_length", "2000", "--min_context_length", "1500"]  # which may change
    for change in (["--seed", "1"], ["--num_samples", "2"], ["--answer-template", "{value}#"], ["--few_shot", "1"]):
        key = change[0].strip("-").replace("-", "_")
        args = parse(model_folder, tmp_path, *grid, *change)
        with pytest.raises(ValueError, match=f"results of other settings .{key}: .*--output_dir, or .*--resume none"):
            run.open_journal(args, prepare(args)[2], journal_of(args))


def test_a_run_of_a_version_that_recorded_less_is_refused(model_folder, tmp_path):
    args = parse(model_folder, tmp_path)
    _, _, settings = prepare(args)
    earlier = {key: value for key, value in settings.items() if key != "tokenizer"} | {"dtype": "auto"}
    (tmp_path / "cells.jsonl").write_text(json.dumps({"settings": earlier}) + "\n")
    with pytest.raises(ValueError, match="dtype: 'auto' then, 'float32' now; tokenizer: not recorded then, '.*' now"):
        run.open_journal(args, settings, journal_of(args))


def test_the_dtype_that_is_recorded_is_the_one_that_computes(model_folder, tmp_path, monkeypatch):
    def recorded(*arguments):
        return prepare(parse(model_folder, tmp_path, *arguments))[2]["dtype"]

    assert recorded() == recorded("--dtype", "float32") == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "check_memory", lambda *_: None)  # it would ask the GPU
    assert recorded() == recorded("--dtype", "bfloat16") == "bfloat16"


def test_another_tokenizer_is_another_run(tmp_path):
    folder, out = save_tiny_llama(tmp_path / "model"), tmp_path / "out"
    run_oracle(folder, out, OracleScorer())
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="results of other settings .tokenizer: '.*' then, '.*' now"):
        run_oracle(folder, out, OracleScorer())


def test_a_family_without_parallel_modes_runs_on_one_process(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=2, n_positions=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer_of_style("bytes").save_pretrained(tmp_path / "gpt2")
    eval_needle.main(["--model", str(tmp_path / "gpt2"), *TOY, "--output_dir", str(tmp_path / "out")])
    assert len(records_of(tmp_path / "out")) == 9


def main_on_rank(rank, world_size, arguments, folder):
    os.environ["RANK"] = str(rank)  # as a launcher sets it
    try:
        eval_needle.main([*arguments, "--output_dir", folder])
    finally:
        del os.environ["RANK"]


def test_processes_and_modes_find_what_one_finds(pool, model_folder, tmp_path, small_haystack):
    # Lengths that do not divide, so that rows are padded over the ranks as well.
    arguments = ["--model", model_folder, *TOY, "--max_context_length", "201", "--haystack_dir", str(small_haystack)]
    arguments[arguments.index("96")] = "99"
    eval_needle.main([*arguments, "--output_dir", str(tmp_path / "one")])
    one = records_of(tmp_path / "one")
    assert len(one) == 9
    for mode in ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "data_parallel"):
        pool.run(main_on_rank, 2, [*arguments, "--parallel_mode", mode], str(tmp_path / mode))
        assert records_of(tmp_path / mode) == one, mode


def test_every_task_runs_on_a_model(model_folder, tmp_path):
    arguments = ["--model", model_folder, "--task", "ruler", "needle", "--min-context-length", "3000"]
    arguments += ["--max-context-length", "3000", "--depth-interval", "1", "--format", "chat", "--few-shot", "1"]
    arguments += ["--num_needles", "2", "--ask", "all", "--output_dir", str(tmp_path)]
    eval_needle.main(arguments)
    records = records_of(tmp_path)
    tasks = {record["task"] for record in records}
    assert tasks == {"needle", *RULER_TASKS}
    for record in records:
        assert (record["depth"] is None) == (record["task"] in ("variable_tracking", "common_words"))
        assert 0.9 * 3000 < record["samples"][0]["tokens"] <= 3000
    for task in tasks:
        assert (tmp_path / f"{task}.png").is_file()


@pytest.mark.parametrize("checked", [True, False])
def test_a_length_just_too_short_ends_with_a_message(model_folder, tmp_path, monkeypatch, checked):
    arguments = ["--model", model_folder, "--output_dir", str(tmp_path), "--depth_interval", "0.25"]
    (task,), builder, _ = prepare(eval_needle.parse_arguments(arguments))
    short = str(builder.shortest(task, 0.5, "check"))  # one prompt fits, others do not
    if checked:
        monkeypatch.setattr(loading, "load_scorer", pytest.fail)
    else:  # a grid whose first prompts are short throughout
        monkeypatch.setattr(run, "check_lengths", lambda *rest: None)
    with pytest.raises(SystemExit, match=f"eval_needle.py: a context of {short} tokens cannot hold task needle: its"):
        eval_needle.main([*arguments, "--min_context_length", short, "--max_context_length", short])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--haystack_dir", "absent"], "--haystack_dir absent: no such folder"),
        (["--haystack_dir", "EMPTY"], "no .txt file with text in it"),
        (["--haystack_dir", ""], "--haystack_dir '': no such folder"),
        (["--min_context_length", "12"], "a context of 12 tokens cannot hold task needle"),
        (["--min_context_length", "1"], "--min_context_length 1 and --max_context_length 200: need 2 <= "),
        (["--context_interval", "1", "--max_context_length", "9999999"], "--context_interval 1: from 96 to 9999999"),
        (["--num_distractor", "2"], "--needle-template ' #{value}#' must hold {key}"),
        (["--prompt-template", "{haystack}"], "must hold {question} exactly once"),
        (["--prompt-template", "{haystack}{question}{x}"], "--prompt-template .* holds {x}, which nothing fills"),
        (["--prompt-template", "{haystack}{question}{}"], "--prompt-template .* holds {}, which nothing fills"),
        (["--needle-template", " {value} {bad}"], "--needle-template .* holds {bad}, which nothing fills"),
        (["--question-template", "What is {value}?"], "--question-template .* holds {value}, which nothing fills"),
        (["--answer-template", "{value} {bad}"], "--answer-template .* holds {bad}, which nothing fills"),
        (["--question-template", "Which {key}?"], "--needle-template ' #{value}#' has no {key}, but the question"),
        (
            ["--needle-template", " {key} {value}", "--num_distractor", "1"],
            r"--question-template '.n#' must hold {key}: nothing else tells",
        ),
        (["--model", "absent/folder/x"], "--model absent/folder/x: no such folder; give a hub name"),
        (
            ["--parallel_mode", "ulysses_attn", "--sequence-parallel-size", "2"],
            "--sequence-parallel-size 2 must divide",
        ),
        (["--output_dir", "/proc/none"], "--output_dir /proc/none/cells.jsonl: cannot be written"),
    ],
)
def test_bad_input_ends_with_a_message_that_names_it(model_folder, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    arguments = [str(tmp_path / "empty") if word == "EMPTY" else word for word in arguments]
    with pytest.raises(SystemExit, match=message):
        eval_needle.main(["--model", model_folder, "--output_dir", str(tmp_path / "out"), *TOY, *arguments])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--depth_interval", "0"], "--depth_interval: 0 must be a finite number from 0.001 to 1"),
        (["--depth_interval", "1e-9"], "--depth_interval: 1e-9 must be a finite number from 0.001 to 1"),
        (["--depth_interval", "nan"], "--depth_interval: nan must be"),
        (["--num_samples", "0"], "--num_samples: 0 must be a whole number, at least 1"),
        (["--context_interval", "-5"], "--context_interval: -5 must be a whole number, at least 0"),
        (["--digits", "40"], "--rnd_number_digits/--digits: 40 must be a whole number from 1 to 18"),
        (["--rnd-number-digits", "0"], "--rnd_number_digits/--digits: 0 must be a whole number from 1 to 18"),
        (["--num_needles", "0"], "--num_needles: 0 must be a whole number, at least 1"),
        (["--few_shot", "x"], "--few_shot: x must be a whole number, at least 0"),
        (["--rope-theta", "inf"], "--rope-theta: inf must be a finite number"),
        (["--rope-theta", "0"], "--rope-theta: 0 must be positive"),
        (["--task", "nonsense"], "--task: invalid choice: 'nonsense' (choose from"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_flag(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        eval_needle.parse_arguments(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err

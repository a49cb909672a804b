"""eval_ppl.py: files on disk; an unfinished run goes on; neither processes nor modes change a number."""

import gzip
import json
import lzma
import math
import os

import pytest
import torch
from datasets import Dataset, DatasetDict
from ppl_runs import RELATIVE, plain_losses, random_ids, read, run
from tiny_models import save_tiny_llama
from tokenizer_styles import tokenizer_of_style

import eval_ppl
from easy_context.evaluation.perplexity.run import COLUMNS
from easy_context.evaluation.scorer import Scorer


def main_on_rank(rank, world_size, arguments, output):
    os.environ["RANK"] = str(rank)  # as a launcher sets it
    try:
        eval_ppl.main([*arguments, "--output-file", output])
    finally:
        del os.environ["RANK"]


def test_processes_and_modes_give_the_numbers_of_one(pool, model_folder, tmp_path):
    # Lengths that divide by nothing, so that rows are padded; unequal documents, so that a mean over means would show.
    lists = [{"input_ids": random_ids(length, seed=length).tolist()} for length in (201, 67, 333)]
    Dataset.from_list(lists).save_to_disk(tmp_path / "rows")
    arguments = ["-m", model_folder, "--tokenized", str(tmp_path / "rows"), "--min-tokens", "32", "--max-tokens", "333"]
    arguments += ["--bucket-tokens", "64"]
    one, summary = run(arguments, tmp_path / "one.csv")
    assert [(row["document"], row["length"]) for row in one][:5] == [("row-0", str(n)) for n in (32, 64, 128)] + [
        ("row-1", "32"),
        ("row-1", "64"),
    ]
    modes = {mode: 2 for mode in ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "data_parallel")}
    for mode, world_size in modes.items():
        output = tmp_path / f"{mode}.csv"
        pool.run(main_on_rank, world_size, [*arguments, "--parallel_mode", mode], str(output))
        several, other = read(output)
        assert len(several) == len(one)
        for a, b in zip(one, several, strict=True):
            assert (a["document"], a["length"], a["tokens"]) == (b["document"], b["length"], b["tokens"])
            assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-6), mode
        for axis in ("by_length", "by_position"):
            own, others = (result["models"][model_folder][axis] for result in (summary, other))
            for a, b in zip(own, others, strict=True):
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-6), mode


def test_text_files_two_models_csv_and_summary(model_folder, tmp_path):
    other = save_tiny_llama(tmp_path / "other", seed=1)
    (tmp_path / "a.txt").write_text("All happy families are alike. " * 20)
    with lzma.open(tmp_path / "b.txt.xz", "wt") as file:
        file.write("Call me Ishmael. " * 20)
    with gzip.open(tmp_path / "short.txt.gz", "wt") as file:
        file.write("Too short.")
    texts = [str(tmp_path / name) for name in ("a.txt", "b.txt.xz", "short.txt.gz")]
    table, summary = run(
        [
            "-m",
            model_folder,
            "-m",
            other,
            "--text",
            *texts,
            "--min-tokens",
            "64",
            "--max_tokens",
            "256",
            "--samples",
            "5",
        ],
        tmp_path / "out.csv",
    )
    assert list(table[0]) == list(COLUMNS)
    assert {(row["model"], row["document"]) for row in table} == {
        (model, text) for model in (model_folder, other) for text in ("a.txt", "b.txt")
    }
    assert [int(row["length"]) for row in table[:3]] == [64, 128, 256]
    ids = torch.tensor(tokenizer_of_style("bytes")("All happy families are alike. " * 20)["input_ids"])[:256]
    assert float(table[2]["loss"]) == pytest.approx(plain_losses(ids).mean().item(), rel=RELATIVE)
    assert float(table[2]["perplexity"]) == pytest.approx(math.exp(float(table[2]["loss"])))
    by_length = summary["models"][model_folder]["by_length"]
    assert [entry["documents"] for entry in by_length] == [2, 2, 2]
    assert by_length[0]["tokens"] == 2 * 63


TEXTS = ("All happy families are alike. " * 12, "Short.", "Call me Ishmael. " * 30)


@pytest.fixture
def text_rows(tmp_path):
    """A dataset of text in two columns, in every form."""
    dataset = Dataset.from_dict({"body": TEXTS, "title": ["a", "b", "c"]})
    dataset.save_to_disk(tmp_path / "saved")
    DatasetDict(train=dataset, test=dataset.select([2])).save_to_disk(tmp_path / "splits")
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_json(tmp_path / "rows.jsonl")
    return tmp_path


def bytes_of(text):
    return torch.tensor(tokenizer_of_style("bytes")(text)["input_ids"])


@pytest.mark.parametrize("name", ["saved", "splits", "rows.parquet", "rows.jsonl"])
def test_datasets_of_text(model_folder, text_rows, name):
    arguments = ["-m", model_folder, "-d", str(text_rows / name), "-f", "body", "--hide-progress"]
    arguments += ["--min-tokens", "64", "--max-tokens", "256"] + (["--split", "train"] if name == "splits" else [])
    table, summary = run(arguments, text_rows / "out.csv")
    assert [(row["document"], row["length"]) for row in table] == [
        (document, length) for document in ("row-0", "row-2") for length in ("64", "128", "256")
    ]
    for row, text in ((table[2], TEXTS[0]), (table[5], TEXTS[2])):
        assert float(row["loss"]) == pytest.approx(plain_losses(bytes_of(text)[:256]).mean().item(), rel=RELATIVE)
    # What the config says of the trained length goes with the results.
    assert {row["trained_length"] for row in table} == {"512"}
    assert summary["models"][model_folder]["trained_length"] == 512


def test_text_that_is_tokenised_and_saved_gives_the_same_numbers(model_folder, text_rows, capsys):
    lengths = ["--min-tokens", "64", "--max-tokens", "256"]
    source = ["-m", model_folder, "--dataset", str(text_rows / "saved"), "--feature", "body"]
    direct, _ = run([*source, *lengths], text_rows / "direct.csv")
    folder = text_rows / "tokens"
    capsys.readouterr()
    eval_ppl.main([*source, "--save-tokenized", str(folder), "--output-file", str(text_rows / "none.csv")])
    assert f"saved 3 documents of {sum(map(len, TEXTS))} tokens" in capsys.readouterr().out
    assert not (text_rows / "none.csv").exists()  # nothing is evaluated, as in the original
    assert Dataset.load_from_disk(folder)["tokenized_len"][:] == [len(text) for text in TEXTS]
    saved, _ = run(["-m", model_folder, "--tokenized", str(folder), *lengths], text_rows / "saved.csv")
    assert saved == direct
    with pytest.raises(SystemExit, match="--save-tokenized .*tokens: there are files in this folder; name a new one"):
        eval_ppl.main([*source, "--save-tokenized", str(folder)])


def test_only_the_first_process_saves_tokens(model_folder, text_rows, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    source = ["-m", model_folder, "-d", str(text_rows / "saved"), "-f", "body"]
    eval_ppl.main([*source, "--save-tokenized", str(text_rows / "tokens"), "--output-file", str(text_rows / "o.csv")])
    assert not (text_rows / "tokens").exists()


def test_a_hub_datasets_configuration_is_asked_for(model_folder, text_rows, monkeypatch):
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return DatasetDict(validation=Dataset.from_dict({"text": TEXTS}))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    arguments = ["-m", model_folder, "-d", "wikitext", "-s", "wikitext-2", "--min-tokens", "64", "--max-tokens", "64"]
    table, _ = run(arguments, text_rows / "out.csv")
    assert asked == [("wikitext", "wikitext-2")] and len(table) == 2


@pytest.mark.parametrize("hidden", [True, False])
def test_progress_is_shown_unless_it_is_hidden(model_folder, text_rows, capsys, hidden):
    arguments = ["-m", model_folder, "-d", str(text_rows / "saved"), "-f", "body", "--min-tokens", "64"]
    run(arguments + ["--hide-progress"] * hidden, text_rows / "out.csv")
    assert ("documents:" in capsys.readouterr().err) != hidden


def test_sliding_window_reads_the_whole_document_unless_truncated(model_folder, tmp_path):
    (tmp_path / "a.txt").write_text("All happy families are alike. " * 10)
    arguments = ["-m", model_folder, "--text", str(tmp_path / "a.txt"), "--min-tokens", "32", "--max-tokens", "64"]
    arguments += ["--sliding-window", "16"]
    whole, _ = run(arguments, tmp_path / "whole.csv")
    cut, _ = run([*arguments, "--truncate", "--aggressive-memory"], tmp_path / "cut.csv")
    assert [int(row["tokens"]) for row in whole] == [299, 299]
    assert [int(row["tokens"]) for row in cut] == [64, 64]  # the token after the cut is still predicted


def test_what_has_no_scored_token_is_null_in_the_summary(model_folder, tmp_path):
    row = {"input_ids": random_ids(64).tolist(), "labels": [-100] * 40 + random_ids(24).tolist()}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    arguments = ["-m", model_folder, "--tokenized", str(tmp_path / "rows.jsonl"), "--min-tokens", "16"]
    arguments += ["--max-tokens", "64", "--bucket-tokens", "16"]
    table, _ = run(arguments, tmp_path / "out.csv")
    summary = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)["models"][model_folder]
    assert [(entry["tokens"], entry["loss"] is None) for entry in summary["by_length"]] == [
        (0, True),
        (0, True),
        (24, False),
    ]
    assert [entry["perplexity"] is None for entry in summary["by_position"]] == [True, True, False]
    assert [row["tokens"] for row in table] == ["0", "0", "24"]
    assert (tmp_path / "out.png").is_file()


def test_without_a_scored_token_there_is_no_picture(model_folder, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100] * 3}) + "\n")
    arguments = ["-m", model_folder, "--tokenized", str(tmp_path / "rows.jsonl"), "--min-tokens", "2"]
    table, _ = run([*arguments, "--max-tokens", "3"], tmp_path / "out.csv")
    assert [row["loss"] for row in table] == ["nan", "nan"] and not (tmp_path / "out.png").exists()
    assert f"no picture: {tmp_path / 'out.csv'}: {model_folder} has no scored token" in capsys.readouterr().out


class Stopped(Exception):
    """Stands for Ctrl-C."""


@pytest.fixture
def passes(monkeypatch):
    """Lengths of the rows that models have read; the pass after `stop_after` of them fails."""
    done, token_losses = [], Scorer.token_losses

    def recorded(self, input_ids, targets):
        if len(done) == recorded.stop_after:
            raise Stopped
        done.append(input_ids.shape[1])
        return token_losses(self, input_ids, targets)

    recorded.stop_after = None
    monkeypatch.setattr(Scorer, "token_losses", recorded)
    done_and_stop = type("Passes", (), {"done": done, "stop_after": lambda self, n: setattr(recorded, "stop_after", n)})
    return done_and_stop()


@pytest.fixture
def three_documents(model_folder, tmp_path):
    """Arguments for two models and three documents of different lengths."""
    lists = [{"input_ids": random_ids(length, seed=length).tolist()} for length in (100, 90, 80)]
    Dataset.from_list(lists).save_to_disk(tmp_path / "rows")
    other = save_tiny_llama(tmp_path / "other", seed=1)
    arguments = ["-m", model_folder, other, "--tokenized", str(tmp_path / "rows")]
    return [*arguments, "--min-tokens", "32", "--max-tokens", "128", "--bucket-tokens", "16"]


@pytest.mark.parametrize("stop_after", [2, 4])  # in the first model's documents, and in the second's
def test_an_unfinished_run_goes_on_and_ends_like_one_that_was_never_cut_off(
    three_documents, tmp_path, passes, stop_after
):
    whole = run(three_documents, tmp_path / "whole.csv")
    assert passes.done == [100, 90, 80] * 2
    passes.done.clear()
    output, unfinished = tmp_path / "cut.csv", tmp_path / "cut.unfinished.jsonl"
    passes.stop_after(stop_after)
    with pytest.raises(Stopped):
        run(three_documents, output)
    assert len(unfinished.read_text().splitlines()) == 1 + stop_after and output.exists() == (stop_after > 3)
    with unfinished.open("a") as file:
        file.write('{"model": "half a li')
    passes.stop_after(None)
    assert run(three_documents, output) == whole
    assert output.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert passes.done == [100, 90, 80] * 2
    assert not unfinished.exists() and (tmp_path / "cut.png").is_file()


def test_an_unfinished_run_of_other_settings_is_refused_and_one_of_another_model_begins_again(
    three_documents, tmp_path, passes
):
    output = tmp_path / "cut.csv"
    passes.stop_after(4)
    with pytest.raises(Stopped):
        run(three_documents, output)
    passes.stop_after(None)
    other_settings = [*three_documents, "--bucket-tokens", "64"]
    message = "cut.unfinished.jsonl holds results of other settings .bucket_tokens: 16 then, 64 now.; .*--resume none"
    with pytest.raises(SystemExit, match=message):
        run(other_settings, output)
    save_tiny_llama(tmp_path / "other", seed=2)
    passes.done.clear()
    run(three_documents, output)
    assert passes.done == [100, 90, 80]  # the model that is another one now
    passes.done.clear()
    run([*other_settings, "--resume", "none"], output)
    assert passes.done == [100, 90, 80] * 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text", "absent.txt"], "--text absent.txt: no such file"),
        (["--tokenized", ""], "--tokenized  cannot be read as a dataset"),
        (["--dataset", ""], "--dataset  cannot be read as a dataset"),
        (["--tokenized", "absent/folder/x"], "--tokenized absent/folder/x cannot be read as a dataset"),
        (
            ["--text", "TEXT", "--dataset-min-tokens", "99999"],
            "no document has at least 99999 tokens .the longest has 300",
        ),
        (["--text", "TEXT", "--sliding-window", "300"], "--sliding-window 300: the stride must be 1 to --min-tokens"),
        (["--text", "TEXT", "--min-tokens", "9000"], "--min-tokens 9000 and --max-tokens 8192"),
        (["--text", "TEXT", "-m", "absent/folder/x"], "--model absent/folder/x: no such folder; give a hub name"),
        (["--text", "TEXT", "--output-file", "/proc/none/x.csv"], "--output-file /proc/none/x.csv: cannot be written"),
        (["--text", "TEXT", "--output-file", "x.json"], "--output-file x.json: the summary and the picture take .json"),
        (["--text", "TEXT", "--output-file", "x.png"], "--output-file x.png: the summary and the picture take .json"),
        (["--text", "TEXT", "-m", "m", "-m", "m"], "--model m is given twice"),
        (["--text", "TEXT", "--max-tokens", "9999999", "--tokens-step", "1"], "--tokens-step 1: from 256 to 9999999"),
        (["--tokenized", "TEXT"], "--tokenized .*a.txt holds .txt: give a hub name"),
        (["-d", "TEXT"], "--dataset .*a.txt holds .txt: give a hub name, .* parquet, json or jsonl"),
        (
            ["-d", "JSONL", "-f", "body"],
            "--dataset .*: row 0 has no column body .its columns: n, text.; name one with --f",
        ),
        (["-d", "JSONL", "-f", "n"], "--dataset .*: row 0: column n holds int instead of text"),
        (["-d", "JSONL", "-s", "x"], "--subset x: --dataset .*a.jsonl is on disk and has none; leave the flag out"),
        (["--text", "TEXT", "-f", "x"], "--feature x goes with --dataset; leave it out with --text"),
        (["--text", "TEXT", "-s", "x"], "--subset x goes with --dataset or --tokenized; leave it out with --text"),
        (["--text", "TEXT", "--split", "x"], "--split x goes with --dataset or --tokenized; leave it out with --text"),
        (
            ["--tokenized", "x", "--save-tokenized", "y"],
            "--save-tokenized y goes with --text or --dataset; leave it out",
        ),
        (["--text", "TEXT", "--save-tokenized", "/proc/none"], "--save-tokenized /proc/none/.*: cannot be written"),
    ],
)
def test_bad_input_ends_with_a_message_that_names_it(model_folder, tmp_path, arguments, message):
    (tmp_path / "a.txt").write_text("All happy families are alike. " * 10)
    (tmp_path / "a.jsonl").write_text('{"text": "All happy families", "n": 1}\n')
    files = {"TEXT": str(tmp_path / "a.txt"), "JSONL": str(tmp_path / "a.jsonl")}
    arguments = [files.get(word, word) for word in arguments]
    model = [] if "-m" in arguments else ["-m", model_folder]
    output = [] if "--output-file" in arguments else ["--output-file", str(tmp_path / "o.csv")]
    with pytest.raises(SystemExit, match=message):
        eval_ppl.main([*model, *arguments, *output])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--samples", "0"], "--samples: 0 must be a whole number, at least 1"),
        (["--bucket-tokens", "0"], "--bucket-tokens: 0 must be a whole number, at least 1"),
        (["--rope-theta", "nan"], "--rope-theta: nan must be a finite number"),
        (["--rope-theta", "-1"], "--rope-theta: -1 must be positive"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_flag(capsys, arguments, message):
    with pytest.raises(SystemExit):
        eval_ppl.parse_arguments(["-m", "m", "--text", "x", *arguments])
    assert message in capsys.readouterr().err

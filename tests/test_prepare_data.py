"""prepare_data.py from command line to rows: what a user may ask for, and the messages of what cannot be."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from datasets import load_from_disk
from tokenizer_styles import text, tokenizer_of_style

import prepare_data
from easy_context.data_preparation.arguments import parse_arguments


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of_style("smollm2").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A long text of chapters, and 300 short records of which three are bad."""
    folder = tmp_path_factory.mktemp("inputs")
    chapters = [f"CHAPTER {i}\n{text()[4000 * i : 4000 * (i + 1)]}\n" for i in range(20)]
    (folder / "novel.txt").write_text("".join(chapters))
    lines = [json.dumps({"text": text()[50 * i : 50 * i + 60 + i]}) for i in range(300)]
    lines[10], lines[20], lines[30] = "{", '{"text": ""}', '{"words": "x"}'
    (folder / "notes.jsonl").write_text("\n".join(lines))
    return folder


def run(tokenizer_dir, output_dir, *flags):
    prepare_data.main(
        [
            "--tokenizer",
            tokenizer_dir,
            "--separator",
            "<|endoftext|>",
            "--output-dir",
            str(output_dir),
            *map(str, flags),
        ]
    )
    return json.loads((output_dir / "report.json").read_text())


def rows(folder):
    return load_from_disk(str(folder)).with_format("numpy")


def test_rows_and_report(tokenizer_dir, inputs, tmp_path, capsys):
    output = tmp_path / "rows"
    flags = [
        "--input",
        inputs / "novel.txt",
        inputs / "notes.jsonl",
        "--document-start",
        "^CHAPTER",
        "--seq-length",
        512,
    ]
    report = run(tokenizer_dir, output, *flags, "--validation-fraction", 0.1, "--num-workers", 2)
    train, validation = rows(output / "train"), rows(output / "validation")
    assert train.column_names == ["input_ids"]
    assert all(len(row) == 512 for row in train["input_ids"])
    assert all(len(row) <= 512 for row in validation["input_ids"])
    novel, notes = report["sources"]
    assert (novel["documents"], notes["documents"], notes["bad_records"]) == (20, 297, 3)
    held = report["splits"]["validation"]
    assert held["tokens"] == sum(len(row) for row in validation["input_ids"])
    assert held["tokens"] / (novel["tokens"] + notes["tokens"]) == pytest.approx(0.1, abs=0.03)
    count = report["splits"]["train"]
    assert count["tokens"] + count["tokens_left_out"] + held["tokens"] == novel["tokens"] + notes["tokens"]
    bad = [json.loads(line) for line in (output / "bad_records.jsonl").read_text().splitlines()]
    assert [entry["location"].rsplit(":")[-1] for entry in bad] == ["11", "21", "31"]
    assert (output / "lengths.png").stat().st_size > 5000
    assert not (output / "work").exists()
    assert "3 bad records" in capsys.readouterr().out


def test_same_rows_again_and_with_other_workers(tokenizer_dir, inputs, tmp_path):
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 128, "--validation-fraction", 0.2]
    run(tokenizer_dir, tmp_path / "a", *flags, "--num-workers", 1)
    run(tokenizer_dir, tmp_path / "b", *flags, "--num-workers", 2)
    run(tokenizer_dir, tmp_path / "c", *flags, "--num-workers", 1, "--seed", 1)
    a, b, c = (np.array(rows(tmp_path / name / "train")["input_ids"]) for name in "abc")
    assert (a == b).all()
    assert a.shape != c.shape or (a != c).any()


def test_validation_documents_do_not_train(tokenizer_dir, inputs, tmp_path):
    run(
        tokenizer_dir,
        tmp_path / "rows",
        "--input",
        inputs / "notes.jsonl",
        "--seq-length",
        64,
        "--validation-fraction",
        0.3,
    )
    split = {}
    for name in ("train", "validation"):
        stream = np.concatenate(list(rows(tmp_path / "rows" / name)["input_ids"])).tolist()
        split[name] = " ".join(map(str, stream))
    held_out = [document for document in split["validation"].split(" 0 ") if len(document) > 80]
    assert held_out
    assert not any(document in split["train"] for document in held_out[:20])


def test_finished_run_is_left_alone_and_other_settings_are_refused(tokenizer_dir, inputs, tmp_path):
    output = tmp_path / "rows"
    flags = ["--input", inputs / "notes.jsonl", "--num-workers", 1]
    run(tokenizer_dir, output, *flags, "--seq-length", 128)
    stamp = (output / "report.json").stat().st_mtime_ns
    run(tokenizer_dir, output, *flags, "--seq-length", 128)
    assert (output / "report.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="--output-dir: .* holds rows of other inputs or settings"):
        run(tokenizer_dir, output, *flags, "--seq-length", 64)
    assert run(tokenizer_dir, output, *flags, "--seq-length", 64, "--overwrite")["settings"]["seq_length"] == 64


def test_work_dir_is_kept_for_other_lengths(tokenizer_dir, inputs, tmp_path, monkeypatch):
    flags = ["--input", inputs / "notes.jsonl", "--num-workers", 1, "--work-dir", tmp_path / "work"]
    run(tokenizer_dir, tmp_path / "a", *flags, "--seq-length", 128)
    monkeypatch.setattr("easy_context.data_preparation.token_store._write_shard", None)  # nothing may be tokenised
    run(tokenizer_dir, tmp_path / "b", *flags, "--seq-length", 64)
    assert (tmp_path / "work").exists()


def test_train_tokens_repeats_or_cuts_and_keeps_the_mix(tokenizer_dir, inputs, tmp_path):
    flags = [
        "--input",
        inputs / "novel.txt",
        inputs / "notes.jsonl",
        "--document-start",
        "^CHAPTER",
        "--seq-length",
        256,
    ]
    one = run(tokenizer_dir, tmp_path / "one", *flags)
    short = run(tokenizer_dir, tmp_path / "short", *flags, "--train-tokens", 2560)
    long = run(tokenizer_dir, tmp_path / "long", *flags, "--train-tokens", 3 * one["splits"]["train"]["tokens"])
    assert short["splits"]["train"]["rows"] == 10
    assert long["splits"]["train"]["tokens"] == 3 * one["splits"]["train"]["tokens"]
    assert long["splits"]["train"]["passes"] in (3, 4)
    cut = np.array(rows(tmp_path / "long" / "train")["input_ids"])
    assert len(np.unique(cut, axis=0)) > 0.9 * len(cut)  # each pass is packed anew


def test_repeated_documents_are_said_once(tokenizer_dir, inputs, tmp_path, capsys):
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 256, "--num-workers", 1]
    one = run(tokenizer_dir, tmp_path / "one", *flags)
    assert one["notes"] == []
    assert "note:" not in capsys.readouterr().out
    wanted = 3 * one["splits"]["train"]["tokens"]
    (note,) = run(tokenizer_dir, tmp_path / "three", *flags, "--train-tokens", wanted)["notes"]
    assert note.startswith(f"--train-tokens {wanted} is more than one pass over the documents gives: 3 passes")
    assert capsys.readouterr().out.count(note) == 1
    with pytest.raises(ValueError, match="--train-tokens 1000000000000: .* repeated over 1000 times; ask for fewer"):
        run(tokenizer_dir, tmp_path / "endless", *flags, "--train-tokens", 10**12)


def test_source_too_small_to_hold_out_is_said(tokenizer_dir, inputs, tmp_path, capsys):
    flags = ["--seq-length", 256, "--num-workers", 1, "--validation-fraction", 0.5]
    report = run(tokenizer_dir, tmp_path / "one", *flags, "--input", inputs / "novel.txt")
    assert report["splits"]["validation"]["rows"] == 0
    assert "note: --validation-fraction 0.5 holds out nothing of novel: a source" in capsys.readouterr().out
    both = ["--input", inputs / "novel.txt", inputs / "notes.jsonl"]
    (note,) = run(tokenizer_dir, tmp_path / "two", *flags, *both)["notes"]
    assert "nothing of novel:" in note
    extra = ["--validation-input", f"extra={inputs / 'notes.jsonl'}", "--document-start", "^CHAPTER"]
    assert run(tokenizer_dir, tmp_path / "three", *flags, *both, *extra)["notes"] == []


def test_prompts_are_not_learned(tokenizer_dir, tmp_path):
    path = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"What is {i} and {i}?", "response": f" It is {2 * i}."} for i in range(200)]
    path.write_text("\n".join(map(json.dumps, pairs)))
    run(tokenizer_dir, tmp_path / "rows", "--input", path, "--seq-length", 128, "--num-workers", 1)
    tokenizer = tokenizer_of_style("smollm2")
    data = rows(tmp_path / "rows" / "train")
    assert data.column_names == ["input_ids", "labels"]
    for row in data:
        kept = row["labels"] != -100
        assert (row["labels"][kept] == row["input_ids"][kept]).all()
        assert "What" not in tokenizer.decode(row["input_ids"][kept])
        assert "It is" in tokenizer.decode(row["input_ids"][kept])


def test_extra_validation_input(tokenizer_dir, inputs, tmp_path):
    flags = ["--input", inputs / "notes.jsonl", "--validation-input", inputs / "novel.txt", "--seq-length", 256]
    report = run(tokenizer_dir, tmp_path / "rows", *flags)
    assert report["splits"]["validation"]["tokens"] == report["sources"][1]["tokens"]


def test_interrupted_run_goes_on(tokenizer_dir, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("easy_context.data_preparation.token_store.SHARD_RECORDS", 50)
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 128, "--num-workers", 1]
    run(tokenizer_dir, tmp_path / "whole", *flags)
    from easy_context.data_preparation.documents import DocumentTokenizer

    call, calls = DocumentTokenizer.__call__, []

    def interrupted(self, record):
        calls.append(record.location)
        if len(calls) == 170:
            raise KeyboardInterrupt
        return call(self, record)

    monkeypatch.setattr(DocumentTokenizer, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tokenizer_dir, tmp_path / "halves", *flags)
    run(tokenizer_dir, tmp_path / "halves", *flags)
    assert len(calls) == 170 + 150  # three shards of 50 were kept
    a, b = (np.array(rows(tmp_path / name / "train")["input_ids"]) for name in ("whole", "halves"))
    assert (a == b).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq-length", "0"], "--seq-length 0: must be at least 1"),
        (["--validation-fraction", "1"], "--validation-fraction 1.0: must be from 0"),
        (["--upsample-long", "0.5"], "--upsample-long 0.5: must be at least 1"),
        (["--upsample-long", "nan"], "--upsample-long nan: must be at least 1"),
        (["--upsample-long", "inf"], "--upsample-long inf: must be at least 1"),
        (["--validation-fraction", "nan"], "--validation-fraction nan: must be from 0"),
        (["--retrieval-fraction", "nan"], "--retrieval-fraction nan: must be from 0"),
        (["--retrieval-facts", "nan"], "--retrieval-facts nan: must be above 0 and at most 250"),
        (["--retrieval-facts", "inf"], "--retrieval-facts inf: must be above 0 and at most 250"),
        (["--retrieval-facts", "1e9"], "--retrieval-facts 1000000000.0: must be above 0 and at most 250"),
        (["--num-workers", "100000"], "--num-workers 100000: at most"),
        (["--document-start", "("], "--document-start '\\(': not a regular expression"),
        (["--retrieval-fraction", "2"], "--retrieval-fraction 2.0: must be from 0 to 1"),
        (["--retrieval-digits", "9-4"], "--retrieval-digits '9-4': give a number or a range"),
        (["--retrieval-facts", "0"], "--retrieval-facts 0.0: must be above 0"),
        (["--retrieval-templates", "no.json"], "--retrieval-templates: no.json does not exist"),
        (["--tokenizer", "/nope"], "--tokenizer /nope: not a folder"),
        (["--tokenizer", "./nope"], "--tokenizer ./nope: not a folder"),
        (["--tokenizer", __file__], "--tokenizer .*: not a folder"),
        (["--input", "a="], "--input 'a=': no path in it"),
        (["--validation-input", "no.txt"], "--validation-input: no.txt does not exist"),
        (["--input", "no.txt"], "--input: no.txt does not exist"),
        (["--seed", "-1"], "--seed -1: must not be negative"),
    ],
)
def test_bad_flags(inputs, tmp_path, flags, message):
    base = ["--input", str(inputs), "--tokenizer", "t", "--seq-length", "8", "--output-dir", str(tmp_path)]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parse_arguments([*base, *flags])


def test_two_sources_of_one_name(inputs, tmp_path):
    path = str(inputs / "novel.txt")
    shutil.copy(path, tmp_path / "novel.txt")
    base = ["--tokenizer", "t", "--seq-length", "8", "--output-dir", str(tmp_path / "rows"), "--input", path]
    with pytest.raises(ValueError, match="two sources are named 'novel'"):
        parse_arguments([*base, str(tmp_path / "novel.txt")])
    assert len(parse_arguments([*base, f"other={tmp_path / 'novel.txt'}"]).settings.sources) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--seq-length", 10_000_000],
            "--seq-length 10000000: the .* documents for training hold .* fewer than one row",
        ),
        (["--seq-length", 64, "--strict"], "--strict: bad record at .*notes.jsonl:11: not JSON"),
        (["--seq-length", 64, "--separator", "two words"], "--separator 'two words' is .* tokens"),
        (["--seq-length", 24, "--retrieval-fraction", 1], "--seq-length 24: a fact and its question alone"),
    ],
)
def test_what_only_the_data_shows(tokenizer_dir, inputs, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        run(tokenizer_dir, tmp_path / "rows", "--input", inputs / "notes.jsonl", "--num-workers", 1, *flags)
    assert not (tmp_path / "rows" / "report.json").exists()


# --- folders


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("flag", ["--output-dir", "--work-dir"])
@pytest.mark.parametrize("damaged_report", [None, "{", "{}", "[1]"])
def test_folders_of_others_are_refused_and_left_alone(tokenizer_dir, inputs, tmp_path, overwrite, flag, damaged_report):
    foreign = tmp_path / "foreign"
    for name in ("train", "validation", "work", "new.part"):
        (foreign / name).mkdir(parents=True)
        (foreign / name / "mine.txt").write_text(name)
    if damaged_report is not None:
        (foreign / "report.json").write_text(damaged_report)
    before = files_of(foreign)
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 64, "--num-workers", 1, flag, foreign, *overwrite]
    with pytest.raises(ValueError, match=f"{flag} .*foreign: is not empty and was not made by prepare_data.py"):
        run(tokenizer_dir, tmp_path / "rows", *flags)
    assert files_of(foreign) == before
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("name", ["train/mine.txt", "validation/mine.txt", "work/mine.txt", "new.part/mine.txt"])
def test_overwrite_keeps_files_of_others_in_own_folders(tokenizer_dir, inputs, tmp_path, name):
    output = tmp_path / "rows"
    flags = ["--input", inputs / "notes.jsonl", "--num-workers", 1]
    run(tokenizer_dir, output, *flags, "--seq-length", 128)
    (output / "notes.txt").write_text("beside the rows")
    run(tokenizer_dir, output, *flags, "--seq-length", 64, "--overwrite")
    assert (output / "notes.txt").read_text() == "beside the rows"
    (output / name).parent.mkdir(exist_ok=True)
    (output / name).write_text("mine")
    before = files_of(output)
    with pytest.raises(ValueError, match=f"--output-dir .*{name} is not from prepare_data.py and would be lost"):
        run(tokenizer_dir, output, *flags, "--seq-length", 32, "--overwrite")
    assert files_of(output) == before


def test_failed_overwrite_keeps_the_finished_rows(tokenizer_dir, inputs, tmp_path, monkeypatch):
    output = tmp_path / "rows"
    flags = ["--input", inputs / "notes.jsonl", "--num-workers", 1, "--validation-fraction", 0.1]
    run(tokenizer_dir, output, *flags, "--seq-length", 128)
    before = files_of(output)

    def changed():
        return {name: data for name, data in files_of(output).items() if not name.startswith("work/")} != before

    with pytest.raises(ValueError, match="fewer than one row"):
        run(tokenizer_dir, output, *flags, "--seq-length", 10_000_000, "--overwrite")
    assert not changed()
    with monkeypatch.context() as patch:
        patch.setattr("easy_context.data_preparation.pipeline.draw_lengths", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tokenizer_dir, output, *flags, "--seq-length", 64, "--overwrite")
    assert not changed()
    run(tokenizer_dir, output, *flags[:4], "--seq-length", 64, "--overwrite")
    assert len(rows(output / "train")[0]["input_ids"]) == 64
    assert not (output / "validation").exists()
    assert not (output / "work").exists()


def test_work_dir_of_results_is_refused(tokenizer_dir, inputs, tmp_path):
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 64, "--work-dir", tmp_path / "rows" / "train"]
    with pytest.raises(ValueError, match="--work-dir .*train: results of --output-dir go there"):
        run(tokenizer_dir, tmp_path / "rows", *flags)


@pytest.mark.parametrize("content", ["{", "{}", "[1]"])
def test_damaged_report_is_named_and_can_be_replaced(tokenizer_dir, inputs, tmp_path, content):
    output = tmp_path / "rows"
    flags = ["--input", inputs / "notes.jsonl", "--num-workers", 1, "--seq-length", 128]
    run(tokenizer_dir, output, *flags)
    (output / "report.json").write_text(content)
    with pytest.raises(ValueError, match="--output-dir .*report.json is damaged .* --overwrite"):
        run(tokenizer_dir, output, *flags)
    assert run(tokenizer_dir, output, *flags, "--overwrite")["splits"]["train"]["rows"] > 0


@pytest.mark.parametrize("flag", ["--output-dir", "--work-dir"])
def test_folder_that_cannot_be_is_named(tokenizer_dir, inputs, tmp_path, flag):
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 64, "--num-workers", 1]
    for path in (inputs / "novel.txt", inputs / "novel.txt" / "below"):
        with pytest.raises(ValueError, match=f"{flag} .*novel.txt is a file, a folder is needed"):
            run(tokenizer_dir, tmp_path / "rows", *flags, flag, path)
    with pytest.raises(ValueError, match=f"{flag} /proc/rows: cannot be written .*; take another folder"):
        run(tokenizer_dir, tmp_path / "rows", *flags, flag, "/proc/rows")


HOLD = """
import sys
from pathlib import Path
from easy_context.data_preparation.folders import claim_folder
with claim_folder("--output-dir", Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("flag", ["--output-dir", "--work-dir"])
def test_a_folder_that_another_run_writes_is_refused_until_that_run_ends(tokenizer_dir, tmp_path, flag):
    (tmp_path / "a.txt").write_text(text()[:2000])
    held, rows = tmp_path / "held", tmp_path / "rows"
    output, *flags = [held] if flag == "--output-dir" else [rows, "--work-dir", held]
    flags += ["--input", tmp_path / "a.txt", "--seq-length", 64]
    hold = [sys.executable, "-c", HOLD, str(held)]
    with subprocess.Popen(
        hold, cwd=Path(prepare_data.__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=f"{flag} .*held: another prepare_data.py is writing there; wait"):
                run(tokenizer_dir, output, *flags)
        finally:
            other.kill()
    assert run(tokenizer_dir, output, *flags)["splits"]["train"]["rows"] > 0


# --- signals


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_ends_the_workers_too(tokenizer_dir, tmp_path, number, code):
    with (tmp_path / "many.jsonl").open("w") as file:
        for start in range(400):
            file.write(json.dumps({"text": text()[start : start + 80_000]}) + "\n")
    flags = ["--tokenizer", tokenizer_dir, "--separator", "<|endoftext|>", "--seq-length", "64", "--num-workers", "2"]
    flags += ["--input", str(tmp_path / "many.jsonl"), "--output-dir", str(tmp_path / "rows")]
    errors = tmp_path / "errors.txt"
    with errors.open("w") as file:
        process = subprocess.Popen([sys.executable, prepare_data.__file__, *flags], stderr=file)
    workers = []
    try:
        wait_until(lambda: list((tmp_path / "rows").glob("work/*/*.part/tokens.bin")))
        wait_until(lambda: len(psutil.Process(process.pid).children()) == 2)
        workers = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait(60) == code
        assert not psutil.wait_procs(workers, timeout=30)[1]
    finally:
        process.kill()
        process.wait()
        for worker in filter(psutil.Process.is_running, workers):
            worker.kill()
    if number != signal.SIGKILL:
        assert errors.read_text().splitlines()[-1] == "prepare_data.py: interrupted; run again to continue"
        assert "Traceback" not in errors.read_text()
    assert not (tmp_path / "rows" / "report.json").exists()


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_tokenizer_that_cannot_be_loaded_is_named(inputs, tmp_path, content):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 64]
    with pytest.raises(ValueError, match=f"--tokenizer {folder}: cannot be loaded; give a folder"):
        run(str(folder), tmp_path / "rows", *flags)
    assert not (tmp_path / "rows").exists()

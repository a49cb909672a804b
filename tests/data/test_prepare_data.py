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
from easy_context.data.preparation.arguments import parse_arguments


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
    monkeypatch.setattr("easy_context.data.preparation.token_store._write_shard", None)  # nothing may be tokenised
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


def tokens_found(output_dir, marks):
    """How often each token of `marks` stands in the train rows."""
    stream = np.concatenate(list(rows(output_dir / "train")["input_ids"]))
    return [int((stream == mark).sum()) for mark in marks]


def write_marked_source(tokenizer, path, mark, lengths):
    """Records of one word only, so that its tokens can be counted in the rows; return the word's token."""
    (token,) = tokenizer(mark, add_special_tokens=False)["input_ids"]
    assert tokenizer(mark * 3, add_special_tokens=False)["input_ids"] == [token] * 3
    path.write_text("".join(json.dumps({"text": mark * length}) + "\n" for length in lengths))
    return token


@pytest.mark.parametrize("passes", [0.3, 1, 2.5])
@pytest.mark.parametrize("retrieval", [0, 0.5])
def test_report_says_what_is_in_the_rows(tokenizer_dir, tmp_path, passes, retrieval):
    tokenizer = tokenizer_of_style("smollm2")
    lengths = [[30, 2000, 50, 900, 300] * 3, [60, 80] * 40]
    names = ("a", "b")
    marks = [
        write_marked_source(tokenizer, tmp_path / f"{name}.jsonl", mark, of_source)
        for name, mark, of_source in zip(names, (" the", " her"), lengths, strict=True)
    ]
    tokens = int(sum(map(sum, lengths)) * passes)
    flags = ["--seq-length", 512, "--num-workers", 1, "--train-tokens", tokens, "--retrieval-fraction", retrieval]
    flags += ["--input", *(tmp_path / f"{name}.jsonl" for name in names), "--upsample-long", 3, "--long-from", 1000]
    report = run(tokenizer_dir, tmp_path / "rows", *flags)
    train = report["splits"]["train"]
    facts = report["retrieval"]["facts"]
    for source, found in zip(report["sources"], tokens_found(tmp_path / "rows", marks), strict=True):
        # Separators are the source's tokens too; the facts hold " the" but no more than a few times each.
        separators = source["train_tokens"] - found
        assert -12 * facts <= separators <= source["train_document_uses"]
    in_rows = sum(source["train_tokens"] for source in report["sources"])
    assert (in_rows == train["tokens"]) == (retrieval == 0)
    assert sum(source["train_share"] for source in report["sources"]) == pytest.approx(1, abs=2e-4)
    if passes < 1:
        assert all(source["train_tokens"] < 0.9 * source["tokens"] for source in report["sources"])


def test_uneven_upsampling_is_said_and_passes_even_it_out(tokenizer_dir, tmp_path):
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": " the" * 10_000}) + "\n")
    with (tmp_path / "few.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": " the" * 100}) + "\n" for _ in range(40))
    (tmp_path / "many.jsonl").write_text((json.dumps({"text": " her" * 100}) + "\n") * 140)
    flags = ["--input", tmp_path / "few.jsonl", tmp_path / "many.jsonl", "--upsample-long", 5, "--num-workers", 1]
    flags += ["--seq-length", 512]
    one = run(tokenizer_dir, tmp_path / "one", *flags)
    (note,) = one["notes"]
    assert note.startswith("--upsample-long 5 draws ") and "tokens a pass from few, which holds 14,041" in note
    many = run(tokenizer_dir, tmp_path / "many", *flags, "--train-tokens", 40 * 28_000)
    assert not any("upsample" in note for note in many["notes"])
    assert many["sources"][0]["train_share"] == pytest.approx(0.5, abs=0.02)


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


def test_an_output_in_an_input_folder_is_not_read_and_what_is_left_out_is_said(tokenizer_dir, inputs, tmp_path, capsys):
    texts = tmp_path / "texts"
    shutil.copytree(inputs, texts)
    flags = ["--seq-length", 128, "--num-workers", 1, "--validation-fraction", 0.1]
    before = run(tokenizer_dir, tmp_path / "a", "--input", texts, *flags)
    assert before["notes"] == [] and before["sources"][0]["files_left_out"] == {}
    assert before["sources"][0]["bad_records"] == 3
    work = ["--work-dir", tmp_path / "work"]
    run(tokenizer_dir, tmp_path / "b", "--input", inputs / "notes.jsonl", *flags, *work)
    shutil.copytree(tmp_path / "b", texts / "b")
    shutil.copytree(tmp_path / "work", texts / "work")
    for name in ("scan.pdf", "b/more.pdf", "b/mine.csv", ".DS_Store", "README.md"):
        (texts / name).touch()
    capsys.readouterr()
    after = run(tokenizer_dir, tmp_path / "c", "--input", texts, *flags)
    (source,) = after["sources"]
    assert (source["documents"], source["tokens"]) == tuple(before["sources"][0][x] for x in ("documents", "tokens"))
    other, left_out = after["notes"]
    assert other == "texts: 4 files of other kinds ignored: .pdf 2, .DS_Store 1, .csv 1"
    own = sum(1 for folder in ("b", "work") for path in (tmp_path / folder).rglob("*") if path.is_file())
    assert left_out == f"texts: {own + 1} files left out: of prepare_data.py {own}, README.md 1"
    printed = capsys.readouterr().out
    assert f"note: {other}\n" in printed and f"note: {left_out}\n" in printed
    for folder in (texts / "b", texts / "work"):
        with pytest.raises(ValueError, match="no usable file below .* .left out: .*of prepare_data.py"):
            run(tokenizer_dir, tmp_path / "d", "--input", folder, *flags)


def test_answers_that_the_template_rewrites_are_counted_and_said(tmp_path):
    tokenizer = tokenizer_of_style("smollm2")
    template = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '-' }}<|im_end|>{% endfor %}"
    folder = tmp_path / "tokenizer"
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    turns = [{"from": "human", "value": "A question?"}, {"from": "gpt", "value": "An answer."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"conversations": turns * 3}) + "\n") * 40)
    flags = ["--input", tmp_path / "chats.jsonl", "--seq-length", 64, "--num-workers", 2]
    report = run(str(folder), tmp_path / "rows", *flags)
    assert report["sources"][0]["answers_not_learned"] == 80
    assert report["sources"][0]["documents"] == 40
    (note,) = report["notes"]
    assert note.startswith("chats: 80 answers of earlier turns are not learned, because the chat template")
    learned = np.concatenate([row["labels"][row["labels"] != -100] for row in rows(tmp_path / "rows" / "train")])
    assert set(tokenizer.decode(learned)) <= set("An answer.<|im_end|>") and len(learned) > 40


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


BAD = ['{"text": "a\\ud800b and more text"}', '{"text": %s}' % ("[" * 100_000 + "]" * 100_000), "{"]  # noqa: UP031


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_records_of_every_kind_are_listed_by_line(tokenizer_dir, tmp_path, workers):
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join([*BAD, json.dumps({"text": text()[:9000]})]))
    flags = ["--input", path, "--seq-length", 64, "--num-workers", workers]
    assert run(tokenizer_dir, tmp_path / "rows", *flags)["sources"][0]["bad_records"] == 3
    bad = [json.loads(line) for line in (tmp_path / "rows" / "bad_records.jsonl").read_text().splitlines()]
    assert [entry["location"] for entry in bad] == [f"{path}:{line}" for line in (1, 2, 3)]
    for entry, problem in zip(bad, ("not Unicode", "nested too deep", "not JSON"), strict=True):
        assert entry["problem"].startswith(problem)


def test_the_first_bad_record_is_named_where_all_are_bad(tokenizer_dir, inputs, tmp_path):
    path, output = tmp_path / "bad.jsonl", tmp_path / "rows"
    records = [{"text": "a b", "prompt": "c"}] * 3
    path.write_text("\n".join(map(json.dumps, records)))
    flags = ["--input", path, "--seq-length", 64, "--num-workers", 1]
    message = (
        f"--input: no record can be used; 3 records are bad, the first at {path}:1: has 'text' .*--text-field text"
    )
    with pytest.raises(ValueError, match=message):
        run(tokenizer_dir, output, *flags)
    assert len((output / "bad_records.jsonl").read_text().splitlines()) == 3
    path.write_text("\n".join(map(json.dumps, [*records, {"text": "a b"}])))
    with pytest.raises(ValueError, match=f"fewer than one row; .*; 3 records are bad, the first at {path}:1: "):
        run(tokenizer_dir, output, *flags)
    good = ["--input", inputs / "novel.txt", *flags[2:]]
    run(tokenizer_dir, output, *good)
    assert not (output / "bad_records.jsonl").exists()


def test_strict_run_does_not_take_what_a_tolerant_one_tokenised(tokenizer_dir, inputs, tmp_path):
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 64, "--num-workers", 1, "--work-dir", tmp_path / "work"]
    run(tokenizer_dir, tmp_path / "a", *flags)
    with pytest.raises(ValueError, match="--strict: bad record at .*notes.jsonl:11: not JSON"):
        run(tokenizer_dir, tmp_path / "b", *flags, "--strict")


def test_text_files_stand_beside_records_with_another_text_field(tokenizer_dir, tmp_path):
    (tmp_path / "a.txt").write_text(text()[:3000])
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": text()[:3000]}) + "\n")
    flags = ["--input", tmp_path / "a.txt", tmp_path / "b.jsonl", "--text-field", "body", "--seq-length", 64]
    report = run(tokenizer_dir, tmp_path / "rows", *flags)
    assert [(source["documents"], source["bad_records"]) for source in report["sources"]] == [(1, 0), (1, 0)]


@pytest.mark.parametrize(("output", "work"), [("new/rows", "new"), ("new", "new/tokens"), ("new", "new")])
def test_one_folder_may_lie_in_the_other(tokenizer_dir, tmp_path, output, work):
    (tmp_path / "a.txt").write_text(text()[:3000])
    flags = ["--input", tmp_path / "a.txt", "--seq-length", 64, "--work-dir", tmp_path / work]
    assert run(tokenizer_dir, tmp_path / output, *flags)["splits"]["train"]["rows"] > 0


def test_text_field_decides_between_text_and_prompt(tokenizer_dir, tmp_path):
    path = tmp_path / "both.jsonl"
    record = {"text": text()[:3000], "prompt": "Who?", "response": "Anne."}
    path.write_text((json.dumps(record) + "\n") * 5)
    flags = ["--input", path, "--seq-length", 64, "--num-workers", 1, "--work-dir", tmp_path / "work"]
    with pytest.raises(ValueError, match="5 records are bad, .* has 'text' and also 'prompt' and 'response'"):
        run(tokenizer_dir, tmp_path / "rows", *flags)
    report = run(tokenizer_dir, tmp_path / "rows", *flags, "--text-field", "text")
    assert report["sources"][0]["documents"] == 5
    assert rows(tmp_path / "rows" / "train").column_names == ["input_ids"]


def test_extra_validation_input(tokenizer_dir, inputs, tmp_path):
    flags = ["--input", inputs / "notes.jsonl", "--validation-input", inputs / "novel.txt", "--seq-length", 256]
    report = run(tokenizer_dir, tmp_path / "rows", *flags)
    assert report["splits"]["validation"]["tokens"] == report["sources"][1]["tokens"]


def test_interrupted_run_goes_on(tokenizer_dir, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("easy_context.data.preparation.token_store.SHARD_RECORDS", 50)
    flags = ["--input", inputs / "notes.jsonl", "--seq-length", 128, "--num-workers", 1]
    run(tokenizer_dir, tmp_path / "whole", *flags)
    from easy_context.data.preparation.tokenising import DocumentTokenizer

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
        patch.setattr("easy_context.data.preparation.pipeline.draw_lengths", lambda *_: 1 / 0)
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


@pytest.mark.parametrize("flag", ["--output-dir", "--work-dir"])
@pytest.mark.parametrize("source", ["--input", "--validation-input"])
@pytest.mark.parametrize("below", ["", "rows", "a/rows"])
def test_folders_in_an_input_are_refused_before_anything_is_written(
    tokenizer_dir, inputs, tmp_path, flag, source, below
):
    texts = tmp_path / "texts"
    shutil.copytree(inputs, texts)
    before = files_of(tmp_path)
    if not below:
        shutil.copy(inputs / "novel.txt", texts / ".prepare_data")  # as if it were ours
        before = files_of(tmp_path)
    flags = ["--input", inputs / "novel.txt", "--seq-length", 64, "--num-workers", 1, source, texts]
    message = f"{flag} {texts / below}: lies in the input {texts}, so the next run .*; take a folder outside of it"
    with pytest.raises(ValueError, match=message):
        run(tokenizer_dir, tmp_path / "rows", *flags, flag, texts / below)
    assert files_of(tmp_path) == before
    assert not (tmp_path / "rows").exists()


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
from easy_context.data.preparation.folders import claim_folder
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


@pytest.mark.launch
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
    with pytest.raises(ValueError, match=f"--tokenizer {folder}: no tokenizer loads from there .*; give a folder"):
        run(str(folder), tmp_path / "rows", *flags)
    assert not (tmp_path / "rows").exists()


def test_flags_are_not_abbreviated(capsys):
    from easy_context.data.preparation.arguments import build_parser

    with pytest.raises(SystemExit):
        build_parser().parse_args(["--inp", "x", "--tokenizer", "t", "--output-dir", "o", "--seq-length", "8"])
    assert "--inp" in capsys.readouterr().err

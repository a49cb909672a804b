"""prepare_data.py from command line to rows, and how a run ends that is interrupted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from datasets import load_from_disk
from tokenizer_styles import text, tokenizer_of_style

import prepare_data

SEPARATOR = 0  # <|endoftext|> of the tokenizer


def rows(folder):
    return load_from_disk(str(folder)).with_format("numpy")


def test_rows_and_report(prepare, inputs, tmp_path, capsys):
    output = tmp_path / "rows"
    flags = f"--input {inputs}/novel.txt {inputs}/notes.jsonl --document-start ^CHAPTER --seq-length 512"
    report = prepare(f"{flags} --validation-fraction 0.1 --num-workers 2", output)
    train, validation = rows(output / "train"), rows(output / "validation")
    assert train.column_names == ["input_ids", "document_lengths"]
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
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    assert "3 bad records" in capsys.readouterr().out


def test_rows_tell_where_their_documents_start(prepare, inputs, tmp_path):
    """The separator ends each document; a row may begin and end within one."""
    flags = f"--input {inputs}/novel.txt {inputs}/notes.jsonl --document-start ^CHAPTER --seq-length 512"
    prepare(f"{flags} --validation-fraction 0.1", tmp_path / "rows")
    several = 0
    for split in ("train", "validation"):
        for row in rows(tmp_path / "rows" / split):
            ids, starts = row["input_ids"], row["document_lengths"].cumsum()[:-1]
            assert row["document_lengths"].sum() == len(ids) and (row["document_lengths"] > 0).all()
            assert starts.tolist() == ((ids[:-1] == SEPARATOR).nonzero()[0] + 1).tolist()
            several += len(starts) > 0
    assert several > 10


def test_a_retrieval_row_is_one_document(prepare, inputs, tmp_path):
    """Its questions are asked behind other documents than those that hold the facts."""
    prepare(f"--input {inputs}/notes.jsonl --seq-length 512 --retrieval-fraction 0.5", tmp_path / "rows")
    numbers = [len(row["document_lengths"]) for row in rows(tmp_path / "rows" / "train")]
    assert numbers[1::2] == [1] * len(numbers[1::2]) and min(numbers[::2]) > 1


def test_same_rows_again_and_with_other_workers(prepare, inputs, tmp_path):
    flags = f"--input {inputs}/notes.jsonl --seq-length 128 --validation-fraction 0.2"
    prepare(flags, tmp_path / "a")
    prepare(f"{flags} --num-workers 2", tmp_path / "b")
    prepare(f"{flags} --seed 1", tmp_path / "c")
    a, b, c = (np.array(rows(tmp_path / name / "train")["input_ids"]) for name in "abc")
    assert (a == b).all()
    assert a.shape != c.shape or (a != c).any()


def test_validation_documents_do_not_train(prepare, inputs, tmp_path):
    prepare(f"--input {inputs}/notes.jsonl --seq-length 64 --validation-fraction 0.3", tmp_path / "rows")
    split = {}
    for name in ("train", "validation"):
        stream = np.concatenate(list(rows(tmp_path / "rows" / name)["input_ids"])).tolist()
        split[name] = " ".join(map(str, stream))
    held_out = [document for document in split["validation"].split(" 0 ") if len(document) > 80]
    assert held_out
    assert not any(document in split["train"] for document in held_out[:20])


def test_finished_run_is_left_alone_and_other_settings_are_refused(prepare, inputs, tmp_path):
    output, flags = tmp_path / "rows", f"--input {inputs}/notes.jsonl --seq-length"
    prepare(f"{flags} 128", output)
    stamp = (output / "report.json").stat().st_mtime_ns
    prepare(f"{flags} 128", output)
    assert (output / "report.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="--output-dir: .* holds rows of other inputs or settings"):
        prepare(f"{flags} 64", output)
    assert prepare(f"{flags} 64 --overwrite", output)["settings"]["seq_length"] == 64


def test_work_dir_is_kept_for_other_lengths(prepare, inputs, tmp_path, monkeypatch):
    flags = f"--input {inputs}/notes.jsonl --work-dir {tmp_path}/work --seq-length"
    prepare(f"{flags} 128", tmp_path / "a")
    monkeypatch.setattr("easy_context.data.preparation.corpus._map_shard", None)  # nothing may be tokenised
    prepare(f"{flags} 64", tmp_path / "b")
    with pytest.raises(ValueError, match="--strict: bad record at .*notes.jsonl:11: not JSON"):
        prepare(f"{flags} 64 --strict", tmp_path / "c")


def test_train_tokens_repeats_or_cuts_and_keeps_the_mix(prepare, inputs, tmp_path):
    flags = f"--input {inputs}/novel.txt {inputs}/notes.jsonl --document-start ^CHAPTER --seq-length 256"
    tokens = prepare(flags, tmp_path / "one")["splits"]["train"]["tokens"]
    short = prepare(f"{flags} --train-tokens 2560", tmp_path / "short")
    long = prepare(f"{flags} --train-tokens {3 * tokens}", tmp_path / "long")
    assert short["splits"]["train"]["rows"] == 10
    assert long["splits"]["train"]["tokens"] == 3 * tokens
    assert long["splits"]["train"]["passes"] in (3, 4)
    cut = np.array(rows(tmp_path / "long" / "train")["input_ids"])
    assert len(np.unique(cut, axis=0)) > 0.9 * len(cut)  # each pass is packed anew


def test_repeated_documents_are_said_once(prepare, inputs, tmp_path, capsys):
    flags = f"--input {inputs}/notes.jsonl --seq-length 256 --train-tokens"
    one = prepare(f"{flags} 10000", tmp_path / "one")
    assert one["notes"] == []
    assert "note:" not in capsys.readouterr().out
    wanted = 3 * (one["sources"][0]["tokens"] // 256 * 256)
    (note,) = prepare(f"{flags} {wanted}", tmp_path / "three")["notes"]
    assert note.startswith(f"--train-tokens {wanted} is more than one pass over the documents gives: 3 passes")
    assert capsys.readouterr().out.count(note) == 1
    with pytest.raises(ValueError, match="--train-tokens 1000000000000: .* repeated over 1000 times; ask for fewer"):
        prepare(f"{flags} {10**12}", tmp_path / "endless")


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
def test_report_says_what_is_in_the_rows(prepare, tmp_path, passes, retrieval):
    tokenizer = tokenizer_of_style("smollm2")
    lengths = [[30, 2000, 50, 900, 300] * 3, [60, 80] * 40]
    names = ("a", "b")
    marks = [
        write_marked_source(tokenizer, tmp_path / f"{name}.jsonl", mark, of_source)
        for name, mark, of_source in zip(names, (" the", " her"), lengths, strict=True)
    ]
    tokens = int(sum(map(sum, lengths)) * passes)
    flags = f"--seq-length 512 --train-tokens {tokens} --upsample-long 3 --long-from 1000"
    files = " ".join(f"{tmp_path}/{name}.jsonl" for name in names)
    report = prepare(f"--input {files} {flags} --retrieval-fraction {retrieval}", tmp_path / "rows")
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


def test_uneven_upsampling_is_said_and_passes_even_it_out(prepare, tmp_path):
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": " the" * 10_000}) + "\n")
    with (tmp_path / "few.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": " the" * 100}) + "\n" for _ in range(40))
    (tmp_path / "many.jsonl").write_text((json.dumps({"text": " her" * 100}) + "\n") * 140)
    flags = f"--input {tmp_path}/few.jsonl {tmp_path}/many.jsonl --upsample-long 5 --seq-length 512"
    (note,) = prepare(flags, tmp_path / "one")["notes"]
    assert note.startswith("--upsample-long 5 draws ") and "tokens a pass from few, which holds 14,041" in note
    many = prepare(f"{flags} --train-tokens {40 * 28_000}", tmp_path / "many")
    assert not any("upsample" in note for note in many["notes"])
    assert many["sources"][0]["train_share"] == pytest.approx(0.5, abs=0.02)


def test_source_too_small_to_hold_out_is_said(prepare, inputs, tmp_path, capsys):
    flags = f"--seq-length 256 --validation-fraction 0.5 --input {inputs}/novel.txt"
    report = prepare(flags, tmp_path / "one")
    assert report["splits"]["validation"]["rows"] == 0
    assert "note: --validation-fraction 0.5 holds out nothing of novel: a source" in capsys.readouterr().out
    (note,) = prepare(f"{flags} {inputs}/notes.jsonl", tmp_path / "two")["notes"]
    assert "nothing of novel:" in note
    extra = f"--validation-input extra={inputs}/notes.jsonl --document-start ^CHAPTER"
    assert prepare(f"{flags} {inputs}/notes.jsonl {extra}", tmp_path / "three")["notes"] == []


def test_an_output_in_an_input_folder_is_not_read_and_what_is_left_out_is_said(prepare, inputs, tmp_path, capsys):
    texts = tmp_path / "texts"
    shutil.copytree(inputs, texts)
    flags = f"--input {texts} --seq-length 128 --validation-fraction 0.1"
    before = prepare(flags, tmp_path / "a")
    assert before["notes"] == [] and before["sources"][0]["files_left_out"] == {}
    prepare(f"--input {inputs}/notes.jsonl --seq-length 128 --work-dir {tmp_path}/work", tmp_path / "b")
    own = sum(path.is_file() for folder in ("b", "work") for path in (tmp_path / folder).rglob("*"))
    shutil.copytree(tmp_path / "b", texts / "b")
    shutil.copytree(tmp_path / "work", texts / "work")
    for name in ("scan.pdf", "more.pdf", ".DS_Store", "README.md"):
        (texts / name).touch()
    capsys.readouterr()
    after = prepare(flags, tmp_path / "c")
    for key in ("documents", "tokens", "bad_records"):
        assert after["sources"][0][key] == before["sources"][0][key]
    kinds = f"in folders of prepare_data.py {own}, .pdf 2, .DS_Store 1, README.md 1"
    assert after["notes"] == [f"texts: {own + 4} files are not read: {kinds}"]
    assert f"note: {after['notes'][0]}\n" in capsys.readouterr().out


def test_answers_that_the_template_rewrites_are_counted_and_said(prepare, tmp_path):
    tokenizer = tokenizer_of_style("smollm2")
    template = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '-' }}<|im_end|>{% endfor %}"
    folder = tmp_path / "tokenizer"
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    turns = [{"from": "human", "value": "A question?"}, {"from": "gpt", "value": "An answer."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"conversations": turns * 3}) + "\n") * 40)
    report = prepare(f"--input {tmp_path}/chats.jsonl --seq-length 64 --tokenizer {folder}", tmp_path / "rows")
    assert report["sources"][0]["answers_not_learned"] == 80
    assert report["sources"][0]["documents"] == 40
    (note,) = report["notes"]
    assert note.startswith("chats: 80 answers of earlier turns are not learned, because the chat template")
    learned = np.concatenate([row["labels"][row["labels"] != -100] for row in rows(tmp_path / "rows" / "train")])
    assert set(tokenizer.decode(learned)) <= set("An answer.<|im_end|>") and len(learned) > 40


def test_prompts_are_not_learned(prepare, tmp_path):
    path = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"What is {i} and {i}?", "response": f" It is {2 * i}."} for i in range(200)]
    path.write_text("\n".join(map(json.dumps, pairs)))
    prepare(f"--input {path} --seq-length 128", tmp_path / "rows")
    tokenizer = tokenizer_of_style("smollm2")
    data = rows(tmp_path / "rows" / "train")
    assert data.column_names == ["input_ids", "labels", "document_lengths"]
    for row in data:
        kept = row["labels"] != -100
        assert (row["labels"][kept] == row["input_ids"][kept]).all()
        assert "What" not in tokenizer.decode(row["input_ids"][kept])
        assert "It is" in tokenizer.decode(row["input_ids"][kept])


BAD = ['{"text": "a\\ud800b and more text"}', '{"text": %s}' % ("[" * 100_000 + "]" * 100_000), "{"]  # noqa: UP031


def test_bad_records_of_every_kind_are_listed_by_line(prepare, tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join([*BAD, json.dumps({"text": text()[:9000]})]))
    assert prepare(f"--input {path} --seq-length 64", tmp_path / "rows")["sources"][0]["bad_records"] == 3
    bad = [json.loads(line) for line in (tmp_path / "rows" / "bad_records.jsonl").read_text().splitlines()]
    assert [entry["location"] for entry in bad] == [f"{path}:{line}" for line in (1, 2, 3)]
    for entry, problem in zip(bad, ("not Unicode", "nested too deep", "not JSON"), strict=True):
        assert entry["problem"].startswith(problem)


def test_the_first_bad_record_is_named_where_all_are_bad(prepare, inputs, tmp_path):
    path, output = tmp_path / "bad.jsonl", tmp_path / "rows"
    records = [{"text": "a b", "prompt": "c"}] * 3
    path.write_text("\n".join(map(json.dumps, records)))
    flags = f"--seq-length 64 --input {path}"
    message = (
        f"--input: no record can be used; 3 records are bad, the first at {path}:1: has 'text' .*--text-field text"
    )
    with pytest.raises(ValueError, match=message):
        prepare(flags, output)
    assert len((tmp_path / "rows.part" / "new" / "bad_records.jsonl").read_text().splitlines()) == 3
    path.write_text("\n".join(map(json.dumps, [*records, {"text": "a b"}])))
    with pytest.raises(ValueError, match=f"fewer than one row; .*; 3 records are bad, the first at {path}:1: "):
        prepare(flags, output)
    prepare(f"--seq-length 64 --input {inputs}/novel.txt", output)
    assert not (output / "bad_records.jsonl").exists()


def test_text_files_stand_beside_records_with_another_text_field(prepare, tmp_path):
    (tmp_path / "a.txt").write_text(text()[:3000])
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": text()[:3000]}) + "\n")
    report = prepare(
        f"--input {tmp_path}/a.txt {tmp_path}/b.jsonl --text-field body --seq-length 64", tmp_path / "rows"
    )
    assert [(source["documents"], source["bad_records"]) for source in report["sources"]] == [(1, 0), (1, 0)]


def test_text_field_decides_between_text_and_prompt(prepare, tmp_path):
    path = tmp_path / "both.jsonl"
    record = {"text": text()[:3000], "prompt": "Who?", "response": "Anne."}
    path.write_text((json.dumps(record) + "\n") * 5)
    flags = f"--input {path} --seq-length 64 --work-dir {tmp_path}/work"
    with pytest.raises(ValueError, match="5 records are bad, .* has 'text' and also 'prompt' and 'response'"):
        prepare(flags, tmp_path / "rows")
    report = prepare(f"{flags} --text-field text", tmp_path / "rows")
    assert report["sources"][0]["documents"] == 5
    assert rows(tmp_path / "rows" / "train").column_names == ["input_ids", "document_lengths"]


def test_extra_validation_input(prepare, inputs, tmp_path):
    flags = f"--input {inputs}/notes.jsonl --validation-input {inputs}/novel.txt --seq-length 256"
    report = prepare(flags, tmp_path / "rows")
    assert report["splits"]["validation"]["tokens"] == report["sources"][1]["tokens"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--seq-length 10000000", "--seq-length 10000000: the .* documents for training hold .* fewer than one row"),
        ("--seq-length 64 --strict", "--strict: bad record at .*notes.jsonl:11: not JSON"),
        ("--seq-length 64 --separator two_words", "--separator 'two_words' is .* tokens"),
        ("--seq-length 24 --retrieval-fraction 1", "--seq-length 24: a fact and its question alone"),
    ],
)
def test_what_only_the_data_shows(prepare, inputs, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        prepare(f"--input {inputs}/notes.jsonl {flags}", tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


# --- signals


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.mark.launch
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_processes_within_seconds(tokenizer_dir, tmp_path, number):
    """A terminal or a batch system sends its signal to the whole group; SIGKILL for lack of memory ends one process."""
    with (tmp_path / "many.jsonl").open("w") as file:
        for start in range(400):
            file.write(json.dumps({"text": text()[start : start + 80_000]}) + "\n")
    flags = f"--tokenizer {tokenizer_dir} --separator <|endoftext|> --seq-length 64 --num-workers 2"
    flags += f" --input {tmp_path}/many.jsonl --output-dir {tmp_path}/rows"
    errors = tmp_path / "errors.txt"
    with errors.open("w") as file:
        command = [sys.executable, prepare_data.__file__, *flags.split()]
        process = subprocess.Popen(command, stderr=file, start_new_session=True)
    workers = []
    try:
        wait_until(lambda: len(psutil.Process(process.pid).children()) == 2)
        wait_until(lambda: list((tmp_path / "rows.part" / "tokens").glob("*/tmp*")))
        workers = psutil.Process(process.pid).children()
        (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        assert not psutil.wait_procs(workers, timeout=30)[1]
    finally:
        process.kill()
        process.wait()
        for worker in filter(psutil.Process.is_running, workers):
            worker.kill()
    if number != signal.SIGKILL:
        assert errors.read_text().splitlines()[-1] == "prepare_data.py: interrupted; run again to continue"
        assert "Traceback" not in errors.read_text()
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_tokenizer_that_cannot_be_loaded_is_named(prepare, inputs, tmp_path, content):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=f"--tokenizer {folder}: no tokenizer loads from there .*; give a folder"):
        prepare(f"--input {inputs}/notes.jsonl --seq-length 64 --tokenizer {folder}", tmp_path / "rows")
    assert not (tmp_path / "rows").exists()

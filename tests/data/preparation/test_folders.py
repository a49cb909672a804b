"""Folders of prepare_data.py: results come in whole or not at all, and nothing that others wrote is lost."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk

import prepare_data
from easy_context.data.preparation.folders import MARK, check_output_dir, swap_in


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "own files", "a link to a folder"])
def test_a_new_folder_takes_the_place_of_what_was_there(tmp_path, before):
    output = tmp_path / "rows"
    if before == "an empty folder":
        output.mkdir()
    elif before != "nothing":
        swap_in(write(tmp_path / "first", "report.json", "train/old.arrow"), output)
    if before == "a link to a folder":
        output.rename(tmp_path / "elsewhere")
        output.symlink_to(tmp_path / "elsewhere")
    assert swap_in(write(tmp_path / "new", "report.json", "train/new.arrow"), output) is None
    assert files_of(output).keys() == {MARK, "report.json", "train/new.arrow"}
    linked = ["elsewhere"] if before == "a link to a folder" else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*linked, "rows"]


@pytest.mark.parametrize("name", ["notes.txt", "train/mine.arrow", "train/linked"])
def test_a_folder_that_holds_a_file_of_others_is_kept(tmp_path, name):
    output = tmp_path / "rows"
    swap_in(write(tmp_path / "first", "report.json", "train/old.arrow"), output)
    if name == "train/linked":
        (output / name).symlink_to(tmp_path)
    else:
        write(output, name)
    (tmp_path / "rows.old-1").mkdir()
    kept = swap_in(write(tmp_path / "new", "report.json"), output)
    assert kept == tmp_path / "rows.old-2"
    assert (kept / name).exists() and (kept / "train" / "old.arrow").read_text() == "train/old.arrow"
    assert files_of(output).keys() == {MARK, "report.json"}


def test_folders_that_cannot_be_replaced_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for folder in (Path("."), tmp_path / "a" / "b"):
        with pytest.raises(
            ValueError, match="--output-dir .*: cannot be replaced by a new folder, .* take a folder in"
        ):
            check_output_dir(folder)
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "mounted")
    with pytest.raises(ValueError, match="mounted: cannot be replaced"):
        check_output_dir(tmp_path / "mounted")
    check_output_dir(Path("c"))


@pytest.mark.parametrize("overwrite", ["", "--overwrite"])
@pytest.mark.parametrize("flag", ["--output-dir", "--work-dir"])
def test_folders_of_others_are_refused_and_left_alone(prepare, inputs, tmp_path, overwrite, flag):
    foreign = write(tmp_path / "foreign", "train/mine.txt", "report.json")
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=f"{flag} .*foreign: is not empty and was not made by prepare_data.py"):
        prepare(f"--input {inputs}/notes.jsonl --seq-length 64 {flag} {foreign} {overwrite}", tmp_path / "rows")
    assert files_of(tmp_path) == before


def test_overwrite_keeps_a_folder_with_files_of_others(prepare, inputs, tmp_path, caplog):
    output = tmp_path / "rows"
    prepare(f"--input {inputs}/notes.jsonl --seq-length 128", output)
    write(output, "train/mine.txt")
    before = files_of(output)
    prepare(f"--input {inputs}/notes.jsonl --seq-length 64 --overwrite", output)
    assert files_of(tmp_path / "rows.old-1") == before
    assert not (output / "train" / "mine.txt").exists()
    assert f"the folder before held files of others and is kept as {tmp_path}/rows.old-1" in caplog.text


def test_a_run_that_fails_keeps_the_finished_rows(prepare, inputs, tmp_path, monkeypatch):
    output, flags = tmp_path / "rows", f"--input {inputs}/notes.jsonl --overwrite --seq-length"
    prepare(f"{flags} 128 --validation-fraction 0.1", output)
    before = files_of(output)
    with pytest.raises(ValueError, match="fewer than one row"):
        prepare(f"{flags} 10000000", output)
    with monkeypatch.context() as patch:
        patch.setattr("easy_context.data.preparation.pipeline.draw_lengths", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(f"{flags} 64", output)
    assert files_of(output) == before
    prepare(f"{flags} 64", output)
    assert len(load_from_disk(output / "train")[0]["input_ids"]) == 64
    assert not (output / "validation").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("content", ["{", "{}", "[1]"])
def test_a_damaged_report_is_named_and_can_be_replaced(prepare, inputs, tmp_path, content):
    output, flags = tmp_path / "rows", f"--input {inputs}/notes.jsonl --seq-length 128"
    prepare(flags, output)
    (output / "report.json").write_text(content)
    with pytest.raises(ValueError, match="--output-dir .*report.json is damaged .* --overwrite"):
        prepare(flags, output)
    assert prepare(f"{flags} --overwrite", output)["splits"]["train"]["rows"] > 0


@pytest.mark.parametrize("work", ["rows", "rows/train", "rows.part/tokens"])
def test_a_work_dir_in_the_output_is_refused(prepare, inputs, tmp_path, work):
    with pytest.raises(ValueError, match=f"--work-dir {tmp_path}/{work}: lies in .*, which --output-dir replaces"):
        prepare(f"--input {inputs}/notes.jsonl --seq-length 64 --work-dir {tmp_path}/{work}", tmp_path / "rows")
    assert not list(tmp_path.iterdir())


def test_the_output_may_lie_in_the_work_dir(prepare, inputs, tmp_path):
    flags = f"--input {inputs}/notes.jsonl --seq-length 64 --work-dir {tmp_path}/new"
    assert prepare(flags, tmp_path / "new" / "rows")["splits"]["train"]["rows"] > 0
    assert prepare(f"{flags} --seed 1", tmp_path / "new" / "others")["splits"]["train"]["rows"] > 0


@pytest.mark.parametrize("flag", ["--output-dir", "--work-dir"])
@pytest.mark.parametrize("source", ["--input", "--validation-input"])
@pytest.mark.parametrize("below", ["/rows", "/a/rows"])
def test_folders_in_an_input_are_refused_before_anything_is_written(prepare, inputs, tmp_path, flag, source, below):
    texts = tmp_path / "texts"
    shutil.copytree(inputs, texts)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=f"{flag} {texts}{below}: lies in the input {texts}, so the next run"):
        prepare(f"--input {inputs}/novel.txt {source} {texts} --seq-length 64 {flag} {texts}{below}", tmp_path / "rows")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("flag", ["--output-dir", "--work-dir"])
def test_a_folder_that_cannot_be_is_named(prepare, inputs, tmp_path, flag):
    flags = f"--input {inputs}/notes.jsonl --seq-length 64 {flag}"
    for path in (inputs / "novel.txt", inputs / "novel.txt" / "below"):
        with pytest.raises(ValueError, match=f"{flag} .*novel.txt is a file, a folder is needed"):
            prepare(f"{flags} {path}", tmp_path / "rows")
    with pytest.raises(ValueError, match=f"{flag}: /proc/rows.* cannot be written .*; take another folder"):
        prepare(f"{flags} /proc/rows", tmp_path / "rows")


HOLD = """
import sys
from pathlib import Path
from easy_context.data.preparation.folders import claim_folder
with claim_folder("--output-dir", Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_folders_that_another_run_writes_are_refused_until_that_run_ends(prepare, inputs, tmp_path):
    for flag, held in (("--output-dir", "rows.part"), ("--work-dir", "tokens")):
        flags = f"--input {inputs}/notes.jsonl --seq-length 64 --work-dir {tmp_path}/tokens"
        hold = [sys.executable, "-c", HOLD, str(tmp_path / held)]
        with subprocess.Popen(
            hold, cwd=Path(prepare_data.__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            try:
                assert other.stdout.readline() == "held\n"
                with pytest.raises(ValueError, match=f"{flag}: another prepare_data.py is writing in .*{held}; wait"):
                    prepare(flags, tmp_path / "rows")
            finally:
                other.kill()
    assert prepare(flags, tmp_path / "rows")["splits"]["train"]["rows"] > 0

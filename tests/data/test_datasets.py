"""Opening datasets: every form gives the same rows, which split is taken, and what is refused with which words."""

import gzip
import json

import datasets
import pytest

from easy_context.data.datasets import HELD_OUT_FIRST, open_dataset

ROWS = [[row, row, row + 1] for row in range(1, 12)]


@pytest.fixture
def table():
    return datasets.Dataset.from_dict({"input_ids": ROWS})


def save(table, form, folder):
    """Save `table` in one of the forms that are read; return its path."""
    folder.mkdir(exist_ok=True)
    if form == "save_to_disk":
        table.save_to_disk(folder / "saved")
        return folder / "saved"
    if form == "save_to_disk of splits":
        datasets.DatasetDict({"train": table, "validation": table.select([0])}).save_to_disk(folder / "saved")
        return folder / "saved"
    if form == "output of prepare_data.py":
        table.save_to_disk(folder / "train")
        table.select([0]).save_to_disk(folder / "validation")
        (folder / "report.json").write_text("{}")
        return folder
    if form == "folder of parquet":
        (folder / "part").mkdir()
        table.select(range(4)).to_parquet(folder / "a.parquet")
        table.select(range(4, len(table))).to_parquet(folder / "part" / "b.parquet")
        (folder / "README.md").write_text("notes")
        (folder / ".hidden.jsonl").write_text("notes")
        return folder
    if form == "folder of splits":
        table.to_parquet(folder / "train-0.parquet")
        table.select([0]).to_parquet(folder / "test-0.parquet")
        return folder
    file = folder / f"rows.{form}"
    if form == "parquet":
        table.to_parquet(file)
    elif form == "json of one list":
        file = folder / "rows.json"
        file.write_text(json.dumps(list(table)))
    else:
        (gzip.open if form.endswith(".gz") else open)(file, "wb").write(
            b"".join(b"%s\n" % json.dumps(row).encode() for row in table)
        )
    return file


FORMS = ["save_to_disk", "save_to_disk of splits", "output of prepare_data.py", "parquet", "folder of parquet"]
FORMS += ["folder of splits", "jsonl", "json", "ndjson", "jsonl.gz", "json of one list"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(table, tmp_path, form):
    assert open_dataset(str(save(table, form, tmp_path / "data")), "--dataset")["input_ids"][:] == ROWS


@pytest.mark.parametrize(
    "form, held_out",
    [
        ("save_to_disk of splits", "validation"),
        ("output of prepare_data.py", "validation"),
        ("folder of splits", "test"),
    ],
)
def test_which_split_is_taken(table, tmp_path, form, held_out, caplog):
    name = str(save(table, form, tmp_path / "data"))
    assert len(open_dataset(name, "--tokenized", HELD_OUT_FIRST)) == 1
    assert f"--tokenized {name}: split {held_out} of train, {held_out}" in caplog.text
    assert len(open_dataset(name, "--tokenized", HELD_OUT_FIRST, split="train")) == len(ROWS)
    with pytest.raises(ValueError, match=rf"--split dev: --tokenized {name} has train, {held_out}"):
        open_dataset(name, "--tokenized", split="dev")


def test_splits_of_other_names(table, tmp_path):
    datasets.DatasetDict({"b": table, "a": table}).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match="two has splits a, b and none called test or validation or train: name"):
        open_dataset(str(tmp_path / "two"), "--dataset", HELD_OUT_FIRST)
    datasets.DatasetDict({"b": table}).save_to_disk(tmp_path / "one")
    assert len(open_dataset(str(tmp_path / "one"), "--dataset")) == len(ROWS)


@pytest.mark.parametrize("form", ["save_to_disk", "parquet", "folder of parquet", "jsonl"])
def test_flags_of_what_a_dataset_on_disk_has_not(table, tmp_path, form):
    name = str(save(table, form, tmp_path / "data"))
    with pytest.raises(ValueError, match=f"--split train: --dataset {name} has no splits; leave the flag out"):
        open_dataset(name, "--dataset", split="train")
    if form != "folder of parquet":
        with pytest.raises(ValueError, match=f"--subset x: --dataset {name} is on disk and has none; leave the flag"):
            open_dataset(name, "--dataset", subset="x")


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "a.jsonl",
            '{"x": 1}\n\n{"x": 1, \n',
            r"cannot be read as a dataset \(.*a.jsonl: line 3 is not JSON: .*\): give",
        ),
        ("a.jsonl", '{"x": 1}\n7\n', "line 2 is not a JSON object: 7"),
        ("a.ndjson", "nonsense\n", "line 1 is not JSON"),
        ("a.json", '{"x": [1, 2\n', r"cannot be read as a dataset \(.+\): give a hub name"),
        ("a.parquet", "nonsense", r"cannot be read as a dataset \(.+\): give a hub name"),
        ("a.jsonl.gz", "nonsense", r"cannot be read as a dataset \(.+\): give a hub name"),
        ("a.txt", "text", "a.txt holds .txt: give .* parquet, json or jsonl files"),
        ("a.csv.gz", "text", "a.csv.gz holds .csv: give"),
        ("a.jsonl", "", "a.jsonl has no rows: name another dataset"),
        ("a.jsonl", "\n\n", "a.jsonl has no rows"),
        ("a.json", "[]", "a.json has no rows"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"--eval-dataset {tmp_path}.*{message}"):
        open_dataset(str(tmp_path / name), "--eval-dataset")


@pytest.mark.parametrize("name", ["", "none", "/none", "none/at/all"])
def test_names_of_nothing(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"--dataset {name} cannot be read as a dataset"):
        open_dataset(name, "--dataset")


def test_a_folder_holds_files_of_one_kind(table, tmp_path):
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="void holds nothing of the kind"):
        open_dataset(str(tmp_path / "void"), "--dataset")
    save(table, "parquet", tmp_path / "both")
    save(table, "jsonl", tmp_path / "both")
    with pytest.raises(ValueError, match="both holds .jsonl, .parquet: give"):
        open_dataset(str(tmp_path / "both"), "--dataset")


def test_no_file_of_a_folder_is_dropped_silently(table, tmp_path):
    """The datasets library leaves out files whose names tell no split where others do."""
    table.to_parquet(save(table, "folder of splits", tmp_path / "data") / "more.parquet")
    with pytest.raises(ValueError, match="more.parquet would be left out, because other names tell splits apart"):
        open_dataset(str(tmp_path / "data"), "--dataset")


def test_a_split_without_rows_is_named(table, tmp_path):
    datasets.DatasetDict({"train": table, "test": table.select([])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved/test has no rows"):
        open_dataset(str(tmp_path / "saved"), "--dataset", HELD_OUT_FIRST)

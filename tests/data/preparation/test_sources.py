"""Sources: every format gives the same records, and what cannot be read is named."""

import argparse
import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from easy_context.data.preparation.sources import Source, parse_source, read_source


def read(path, document_start=None):
    return list(read_source(Source("s", str(path)), document_start))


def test_reads_every_file_type_alike(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("first", "zweiter ü")).encode()
    for name, opener in (
        ("a.jsonl", open),
        ("b.jsonl.gz", gzip.open),
        ("c.json.xz", lzma.open),
        ("d.ndjson.bz2", bz2.open),
    ):
        with opener(tmp_path / name, "wb") as file:
            file.write(lines)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["first", "zweiter ü"]}), tmp_path / "e.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert [record.data["text"] for record in read(path)] == ["first", "zweiter ü"], path
    assert len(read(tmp_path)) == 10


def test_reads_saved_datasets(tmp_path):
    dataset = Dataset.from_dict({"text": ["one", "two"]})
    dataset.save_to_disk(tmp_path / "rows")
    assert [record.data["text"] for record in read(tmp_path / "rows")] == ["one", "two"]
    DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(tmp_path / "splits")
    assert [record.data["text"] for record in read(tmp_path / "splits")] == ["one", "two"]
    assert len(read(tmp_path / "splits" / "test")) == 1


def test_a_json_file_may_be_one_list(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"},\n 2, {"text": "three", "other": 4}]')
    first, bad, third = read_source(Source("s", str(tmp_path / "a.json")), fields=("text",))
    assert (first.data, third.data) == ({"text": "one"}, {"text": "three", "other": None})
    assert (bad.location, bad.problem) == (f"{tmp_path / 'a.json'}:2", "a JSON object is needed, this is a int")
    (tmp_path / "a.json").write_text('[{"text": "one"}')
    with pytest.raises(ValueError, match="a.json cannot be read .JSONDecodeError"):
        read(tmp_path / "a.json")


def test_text_file_is_one_document_unless_a_start_is_given(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffPreface.\r\nCHAPTER 1\r\nA.\r\nCHAPTER 2\r\nB.".encode())
    assert [record.data["text"] for record in read(path)] == ["Preface.\nCHAPTER 1\nA.\nCHAPTER 2\nB."]
    parts = read(path, "^CHAPTER")
    assert [record.data["text"] for record in parts] == ["Preface.\n", "CHAPTER 1\nA.\n", "CHAPTER 2\nB."]
    assert [record.location for record in parts] == [f"{path}:{line}" for line in (1, 2, 4)]


def test_bad_lines_are_named(tmp_path):
    path = tmp_path / "mixed.jsonl"
    deep = b"[" * 100_000 + b"]" * 100_000
    path.write_bytes(b'{"text": "good"}\n{"text": \n\n[1]\n\xff\xfe\n{"text": %s}\n' % deep)
    records = read(path)
    assert [record.location for record in records] == [f"{path}:{line}" for line in (1, 2, 4, 5, 6)]
    assert records[0].problem is None
    assert "not JSON" in records[1].problem
    assert "list" in records[2].problem
    assert "not JSON" in records[3].problem
    assert records[4].problem == "nested too deep"


def parquet_with_a_bad_string(path):
    """Three rows, of which the second holds half a surrogate pair, as some writers let it pass."""
    text = pyarrow.array([b"first", b"a\xed\xa0\x80b", b"third"]).view(pyarrow.string())
    table = pyarrow.table({"text": text, "other": [1, 2, 3]})
    pyarrow.parquet.write_table(table, path)
    return table


def test_a_bad_string_in_a_table_is_named_and_spoils_no_other_row(tmp_path):
    table = parquet_with_a_bad_string(tmp_path / "a.parquet")
    Dataset(table).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        first, bad, third = read(path)
        assert [first.data["text"], third.data["text"]] == ["first", "third"]
        assert bad.location == f"{path}:2"
        assert bad.problem.startswith("cannot be read: 'utf-8' codec")


def test_only_the_fields_asked_for_are_read_of_a_table(tmp_path):
    # Not even readable: what is not asked for is not looked at.
    bad = parquet_with_a_bad_string(tmp_path / "a.parquet")["text"]
    messages = [[{"role": "user", "content": "x"}]] * 3
    table = pyarrow.table({"bad": bad, "text": ["1", "2", "3"], "messages": messages})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    Dataset(table).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        records = list(read_source(Source("s", str(path)), fields=("text", "messages")))
        assert [r.data for r in records] == [{"bad": None, "text": i, "messages": messages[0]} for i in "123"]
        unnamed = list(read_source(Source("s", str(path)), fields=("body",)))
        assert [record.location for record in unnamed] == [f"{path}:{row}" for row in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing_there.txt", "nothing_there.txt does not exist"),
        ("table.xlsx", "table.xlsx has an unsupported file type"),
        ("empty", "no usable file below .*empty"),
        ("splits", "splits has splits a, b and none called train: name the folder of one"),
    ],
)
def test_unusable_sources_are_refused(tmp_path, text, message):
    (tmp_path / "table.xlsx").touch()
    (tmp_path / "empty").mkdir()
    part = Dataset.from_dict({"text": ["one"]})
    DatasetDict(a=part, b=part).save_to_disk(tmp_path / "splits")
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse_source(str(tmp_path / text))


def test_a_text_of_another_encoding_is_a_bad_record(tmp_path):
    (tmp_path / "a.txt").write_bytes("Ça va".encode("latin-1"))
    (record,) = read(tmp_path)
    assert (record.location, record.data) == (f"{tmp_path / 'a.txt'}:1", None)
    assert record.problem.startswith("not UTF-8")


@pytest.mark.parametrize("text", ["", " ", "a=", "hub:", "a=hub:", "hub::c", "hub:a:b:c:d", "hub:a b"])
def test_sources_without_a_place_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r}; give a file|{text!r}: give hub:DATASET"):
        parse_source(text)


@pytest.mark.parametrize(
    "name", ["a.txt.gz", "a.jsonl.gz", "a.txt.xz", "a.jsonl.bz2", "a.parquet", "cut.txt.gz", "cut.txt.xz"]
)
def test_damaged_files_are_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"no such format")
    if name.startswith("cut"):
        compress = gzip.compress if name.endswith("gz") else lzma.compress
        path.write_bytes(compress(b"text " * 1000)[:-10])
    with pytest.raises(ValueError, match=f"--input: {path} cannot be read .*; repair it or leave it out"):
        read(path)


def test_damaged_saved_dataset_is_named(tmp_path):
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match=f"--input: {tmp_path} cannot be read"):
        read(tmp_path)


def test_source_names(tmp_path):
    path = tmp_path / "my books.txt.gz"
    path.touch()
    assert parse_source(str(path)).name == "my-books"
    assert parse_source(f"novels={path}") == Source("novels", str(path))
    assert parse_source("hub:a/b:c:train") == Source("a-b-c-train", "hub:a/b:c:train")
    strange = tmp_path / "a=b.txt"
    strange.touch()
    assert parse_source(str(strange)).location == str(strange)

"""Odd rows and records: each is used or refused in words, without a traceback."""

import json

import datasets
import pyarrow as pa
import pytest
from fuzzing import INTEGERS, few
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCABULARY
from tokenizer_styles import tokenizer_of_style

from easy_context.data.preparation.sources import Source, read_source
from easy_context.data.preparation.tokenising import DocumentTokenizer
from easy_context.data.token_rows import TokenRows, UnusableRow

IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=6))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
# What a column of input_ids may hold, most of it wrong.
COLUMN = st.one_of(
    st.lists(IDS, min_size=3, max_size=3),
    st.lists(st.lists(st.none() | st.integers(-200, 2**40), max_size=4), min_size=3, max_size=3),
    st.lists(st.none() | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(), max_size=3), min_size=3, max_size=3),
    st.lists(st.text(max_size=4) | st.none(), min_size=3, max_size=3),
    st.lists(st.binary(max_size=4), min_size=3, max_size=3),
    st.lists(st.integers(-5, 300), min_size=3, max_size=3),
)
NAMES = ("input_ids", "labels", "attention_mask", "position_ids", "tokens", "loss_mask", "seq_lengths", "text")
TABLES = st.dictionaries(st.sampled_from(NAMES), COLUMN, min_size=1, max_size=3)
KEYS = st.sampled_from(("text", "prompt", "response", "messages", "conversations", "role", "content", "tools", "x"))
LINES = st.one_of(
    st.dictionaries(KEYS, VALUES | st.lists(st.dictionaries(KEYS, VALUES, max_size=3), max_size=3), max_size=4).map(
        lambda record: json.dumps(record).encode()
    ),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=30),
    st.sampled_from(
        [b"[" * 5000, b'{"text": "a\\ud800"}', b'{"text": 1e999}', b'{"text": ' + b"9" * 5000 + b"}", b"{"]
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def read_all(name: str) -> None:
    try:
        rows = TokenRows(name, "--dataset", VOCABULARY, 4)
    except ValueError as error:
        assert "--dataset" in str(error)
        return
    rows.lengths(9)
    for index in range(len(rows)):
        rows.content(index)
        try:
            ids, labels, *_ = rows[index]
        except UnusableRow as error:
            assert "--dataset" in str(error) and "row" in str(error)
        else:
            assert len(ids) == len(labels) and (not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < VOCABULARY)


@few(100)
@given(table=TABLES)
def test_columns_of_any_kind(folder, table):
    datasets.Dataset(pa.table(table)).save_to_disk(folder / "rows")
    read_all(str(folder / "rows"))


@few(12)
@given(lines=st.lists(LINES | IDS.map(lambda ids: json.dumps({"input_ids": ids}).encode()), min_size=1, max_size=3))
def test_lines_of_any_kind_as_rows(folder, lines):
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines))
    read_all(str(folder / "rows.jsonl"))


@few(100)
@given(lines=st.lists(LINES, max_size=4), whole=st.booleans())
def test_lines_of_any_kind_as_documents(folder, lines, whole):
    file = folder / ("records.json" if whole else "records.jsonl")
    file.write_bytes(b"\n".join(lines))
    tokenise = DocumentTokenizer(tokenizer_of_style("bytes"), 1)
    try:
        for record in read_source(Source("source", str(file))):
            document = tokenise(record)
            assert (document.ids is None or not len(document.ids)) or document.problem is None
            assert document.problem is None or document.location
    except ValueError as error:
        assert str(file) in str(error)

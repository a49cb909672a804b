"""Rows of token ids: which columns of a dataset are read, and what is refused before training."""

import contextlib

import datasets
import pytest
import torch

from easy_context.common.constants import IGNORE_INDEX
from easy_context.data import token_rows
from easy_context.data.documents import DocumentRule
from easy_context.data.token_rows import TokenRows, UnusableRow, check_rows, load_rows

VOCABULARY = 32


def test_only_the_columns_of_training_are_read(tmp_path):
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "source": ["x"]})
    table.to_parquet(tmp_path / "rows.parquet")
    rows = load_rows(str(tmp_path / "rows.parquet"), "--dataset")
    assert rows.column_names == ["input_ids", "attention_mask"]
    assert rows[0]["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"text": ["a"]}, r"--dataset .* has columns \['text'\] and no input_ids.* prepare_data.py makes such rows"),
        ({"input_ids": ["a"]}, "input_ids must be lists of integers"),
        ({"input_ids": [[0.5]]}, "input_ids must be lists of integers"),
        ({"input_ids": [[1]], "labels": [["a"]]}, "labels must be lists of integers"),
    ],
)
def test_what_holds_no_token_ids_is_refused(tmp_path, columns, message):
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=message):
        load_rows(str(tmp_path / "rows.parquet"), "--dataset")


def test_the_output_of_prepare_data_gives_each_flag_its_split(tmp_path):
    for split, token in (("train", 1), ("validation", 2)):
        datasets.Dataset.from_dict({"input_ids": [[token, token]]}).save_to_disk(tmp_path / "rows" / split)
    (tmp_path / "rows" / "report.json").write_text("{}")
    name = str(tmp_path / "rows")
    assert load_rows(name, "--dataset")[0]["input_ids"].tolist() == [1, 1]
    assert load_rows(name, "--eval-dataset")[0]["input_ids"].tolist() == [2, 2]


@pytest.mark.parametrize("checked", [100, 4])  # at the start, or when the row is read
@pytest.mark.parametrize(
    "columns, message",
    [
        ({"input_ids": [3, 99]}, "token ids from [13] to 99, but the model's vocabulary has 32"),
        ({"input_ids": [-1, 3]}, "token ids from -1"),
        ({"input_ids": [1, 2], "labels": [IGNORE_INDEX, 40]}, "labels from [01] to 40"),
        ({"input_ids": [1, 2], "labels": [-1, 2]}, "labels from -1"),
        ({"input_ids": [1, 2], "labels": [2]}, "row 40 has 2 input_ids and 1 labels"),
    ],
)
def test_rows_of_other_ids_are_refused_wherever_they_are(tmp_path, monkeypatch, checked, columns, message):
    good = {"input_ids": [1, 2], **({"labels": [1, 2]} if "labels" in columns else {})}
    datasets.Dataset.from_list([good] * 40 + [columns]).to_parquet(tmp_path / "rows.parquet")
    monkeypatch.setattr(token_rows, "_TOKENS_CHECKED", checked)
    with pytest.raises(UnusableRow if checked == 4 else ValueError, match=message):
        rows = TokenRows(str(tmp_path / "rows.parquet"), "--dataset", VOCABULARY, 8)
        assert checked == 4
        assert rows[39][0].tolist() == [1, 2]
        rows[40]


def test_a_row_is_checked_once(tmp_path, monkeypatch):
    datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 40}).to_parquet(tmp_path / "rows.parquet")
    checks = []
    monkeypatch.setattr(token_rows, "refuse_ids", lambda *values: checks.append(values))
    monkeypatch.setattr(token_rows, "_TOKENS_CHECKED", 32)  # tables of 16 rows of two tokens
    rows = TokenRows(str(tmp_path / "rows.parquet"), "--dataset", VOCABULARY, 8)
    assert len(checks) == 1
    rows[15]
    assert len(checks) == 1
    rows[16]
    assert len(checks) == 3, "ids and labels"


@pytest.mark.parametrize("target, learnable", [(0, False), (1, True), (3, True), (4, False)])
def test_a_target_must_lie_behind_the_first_token_and_within_seq_length(tmp_path, target, learnable):
    labels = [IGNORE_INDEX] * 6
    labels[target] = 9
    datasets.Dataset.from_dict({"input_ids": [[9] * 6], "labels": [labels]}).to_parquet(tmp_path / "rows.parquet")
    rows = load_rows(str(tmp_path / "rows.parquet"), "--dataset")
    with contextlib.nullcontext() if learnable else pytest.raises(ValueError, match="no token to learn"):
        check_rows(rows, VOCABULARY, 4, "--dataset x")


def packed_rows(folder, **columns) -> str:
    datasets.Dataset.from_list([{"input_ids": [5, 6, 2, 7, 2, 8], **columns}] * 2).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


@pytest.mark.parametrize(
    "columns, rule, expected",
    [
        ({"document_lengths": [3, 3]}, DocumentRule(), [0, 3]),
        ({"position_ids": [0, 1, 2, 0, 1, 0]}, DocumentRule(), [0, 3, 5]),
        ({}, DocumentRule(end_with=2), [0, 3, 5]),
        ({}, DocumentRule(begin_with=2), [0, 2, 4]),
        ({"document_lengths": [3, 3]}, None, None),
    ],
)
def test_rows_tell_where_their_documents_start(tmp_path, columns, rule, expected):
    rows = TokenRows(packed_rows(tmp_path, **columns), "--dataset", VOCABULARY, 8, rule)
    assert rows[0].documents == expected
    assert rows[0].ids.tolist() == [5, 6, 2, 7, 2, 8]


@pytest.mark.parametrize(
    "columns, rule, message",
    [
        ({}, DocumentRule(), "--respect-documents: no column of --dataset .*document_lengths.* --documents-end-with"),
        ({"text": "a"}, DocumentRule(), "no column of --dataset"),
        ({}, DocumentRule(end_with=30), "--documents-end-with 30: the token marks no document in the first 2 rows"),
        ({"document_lengths": [3, 3]}, DocumentRule(end_with=2), "row 0: its columns tell .*leave out --documents-end"),
        ({"document_lengths": [3, 4]}, DocumentRule(), "row 0: document_lengths .3, 4. adds up to 7"),
        ({"document_lengths": [1] * 6}, DocumentRule(), "no token to learn"),
        ({"position_ids": None, "seq_idx": [[1]]}, DocumentRule(), "no column tells where its documents start"),
    ],
)
def test_rows_that_do_not_tell_documents_apart_are_refused(tmp_path, columns, rule, message):
    with pytest.raises(ValueError, match=message):
        TokenRows(packed_rows(tmp_path, **columns), "--dataset", VOCABULARY, 8, rule)


def test_the_log_says_once_that_documents_are_not_kept_apart(tmp_path, caplog):
    name = packed_rows(tmp_path, document_lengths=[3, 3])
    for rule in (DocumentRule(), None, None):
        TokenRows(name, "--eval-dataset", VOCABULARY, 8, rule)
    said = [record.message for record in caplog.records if "read as one text" in record.message]
    assert len(said) == 1 and said[0].startswith(f"--eval-dataset {name}: ") and "--respect-documents" in said[0]
    caplog.clear()
    (tmp_path / "single").mkdir()
    TokenRows(packed_rows(tmp_path / "single", document_lengths=[6]), "--dataset", VOCABULARY, 8)
    assert not caplog.records, "a row that is one document needs no word"

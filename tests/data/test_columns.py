"""Columns beside the token ids: honoured, refused by name, or named as not used; alike in training and evaluation."""

import tempfile

import datasets
import numpy as np
import pytest
import torch

from easy_context.data import token_rows
from easy_context.data.columns import apply_columns, describe_columns, kind_of
from easy_context.data.documents import KINDS, DocumentRule
from easy_context.data.token_rows import TokenRows, UnusableRow, load_rows, read_row
from easy_context.evaluation.perplexity.documents import tokenized_documents
from easy_context.training.batches import collate

IDS = [5, 6, 7, 8, 9, 3]
LENGTH = len(IDS)
LEARNED = [-100, -100, 7, 8, -100, 3]  # labels of which a column may be a copy
VOCABULARY = 16

# What says nothing about a row without padding.
HARMLESS = [
    {"attention_mask": [1] * LENGTH},
    {"attention_mask": [True] * LENGTH},
    {"position_ids": list(range(LENGTH))},
    {"input_pos": list(range(LENGTH)), "segment_ids": [4] * LENGTH},
    {"document_id": 17, "seq_idx": [0] * LENGTH, "token_type_ids": [0] * LENGTH},
    {"doc_ids": [3, 8]},  # from which texts the row was made, not token by token
    {"seq_lengths": [LENGTH]},
    {"cu_seqlens": [0, LENGTH]},
    {"cu_seqlens": [0, LENGTH, LENGTH]},
    {"loss_mask": [1] * LENGTH},
    {"special_tokens_mask": [0] * LENGTH},
    {"loss_weights": [1.0] * LENGTH},
    {"labels": LEARNED, "completion_mask": [int(label != -100) for label in LEARNED]},
    {"labels": LEARNED, "special_tokens_mask": [1, 0, 0, 0, 0, 0]},
    {"labels": LEARNED, "label_ids": LEARNED},
    {"labels": LEARNED, "loss_weights": [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]},
    {"target_ids": IDS},
    {"position_ids": None, "attention_mask": None, "length": 3, "source": ["a", "b"]},
]
# What would be dropped without a word: column and value, and what the message says.
PACKED = [0, 0, 0, 1, 1, 1]
HARMFUL = [
    ("attention_mask", [1, 1, 0, 1, 1, 1], "padding between its tokens"),
    (
        "attention_mask",
        [1, 1, 1, 2, 2, 2],
        "other values than 0 and 1: packed documents",
    ),  # LLaMA-Factory, neat packing
    ("attention_mask", [[1, 1], [1, 0]], "must be a list of numbers"),
    ("attention_mask", [1, 1], "2 values for 6 tokens"),
    ("position_ids", [0, 1, 2, 0, 1, 2], r"\[0, 1, 2, 0, ...\] tells documents apart: packed"),  # Axolotl, TRL
    ("position_ids", [1, 2, 3, 4, 5, 6], "does not count from 0"),
    ("position_ids", [[0, 1], [2, 3, 4]], "must be a list of numbers"),
    ("input_pos", [0, 1, 2, 0, 1, 2], "packed documents would be read as one text.*--respect-documents"),  # torchtune
    ("inputs_position", [0, 1, 2, 0, 1, 2], "packed documents"),  # MaxText
    ("segment_ids", PACKED, "tells documents apart"),
    ("document_ids", PACKED, "tells documents apart"),
    ("seq_idx", PACKED, "tells documents apart"),  # TRL, Mamba
    ("sequence_id", PACKED, "tells documents apart"),  # LLM Foundry
    ("inputs_segmentation", PACKED, "tells documents apart"),
    ("token_type_ids", PACKED, "tells documents apart"),
    ("seq_lengths", [3, 3], r"\[3, 3\] tells documents apart: packed"),  # TRL
    ("seq_lens", [3, 3], "tells documents apart"),
    ("cu_seqlens", [0, 3, 6], "tells documents apart"),
    ("cu_seq_lens_q", [0, 3, 6], "tells documents apart"),
    ("seq_start_id", [0, 3], "tells documents apart"),  # NeMo
    ("loss_mask", PACKED, "not to be learned, but only labels are read: give labels"),  # Megatron
    ("completion_mask", PACKED, "give labels"),  # TRL
    ("assistant_masks", PACKED, "give labels"),  # TRL, apply_chat_template
    ("mask", PACKED, "give labels"),
    ("special_tokens_mask", PACKED, "give labels"),
    ("prompt_mask", PACKED, "give labels"),
    ("loss_weights", [1.0, 0.5, 1.0, 1.0, 1.0, 1.0], "weighs tokens"),
    ("loss_scale", [0.0, 0.0, 1.0, 1.0, 1.0, 1.0], "weighs tokens"),  # ms-swift
    ("label_ids", LEARNED, "only labels are read"),
    ("targets", [*IDS[1:], 0], "only labels are read"),
]


def evaluated(row: dict):
    """As a dataset in a file, through all that evaluation does."""
    with tempfile.TemporaryDirectory() as folder:
        datasets.Dataset.from_list([row]).to_parquet(f"{folder}/rows.parquet")
        (document,) = tokenized_documents(f"{folder}/rows.parquet")
    return document.input_ids, document.targets


def trained(row: dict):
    """As a dataset in a file, through all that training does."""
    with tempfile.TemporaryDirectory() as folder:
        datasets.Dataset.from_list([row]).to_parquet(f"{folder}/rows.parquet")
        batch = collate([TokenRows(f"{folder}/rows.parquet", "--dataset", VOCABULARY, LENGTH)[0]], LENGTH)
    return batch["input_ids"][0], batch["targets"][0]


@pytest.mark.parametrize("read", [trained, evaluated])
@pytest.mark.parametrize("columns", HARMLESS)
def test_columns_that_say_nothing_are_no_obstacle(read, columns):
    ids, targets = read({"input_ids": IDS, **columns})
    assert ids.tolist() == IDS
    assert targets.tolist() == [*columns.get("labels", IDS)[1:], -100]


@pytest.mark.parametrize("read", [trained, evaluated])
@pytest.mark.parametrize("column, value, message", HARMFUL)
def test_columns_that_cannot_be_honoured_are_refused_by_name(read, column, value, message):
    with pytest.raises(ValueError, match=rf"row 0: {column} .*{message}"):
        read({"input_ids": IDS, column: value})


# Three documents of 3, 1 and 2 tokens, as each library tells them apart.
APART = [
    {"document_lengths": [3, 1, 2]},  # prepare_data.py
    {"position_ids": [0, 1, 2, 0, 0, 1]},
    {"segment_ids": [1, 1, 1, 2, 3, 3]},
    {"document_ids": [7, 7, 7, 0, 9, 9], "position_ids": list(range(LENGTH))},
    {"seq_lengths": [3, 1, 2], "position_ids": [0, 1, 2, 0, 0, 1]},
    {"cu_seqlens": [0, 3, 4, 6]},
    {"cu_seqlens": [0, 3, 4, 6, 6, 6]},
    {"seq_start_id": [0, 3, 4]},
    {"seq_lengths": [0, 3, 1, 0, 2]},
]


@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
@pytest.mark.parametrize("columns", APART)
def test_columns_tell_where_documents_start(columns, padding):
    """Padding at both ends is left out; columns that count documents are those of the tokens without it."""
    left, right = padding
    by_token = {
        name: [9] * left + values + [9] * right
        for name, values in columns.items()
        if kind_of(name) in ("positions", "documents")
    }
    row = {**columns, **by_token, "attention_mask": [0] * left + [1] * LENGTH + [0] * right}
    if "seq_start_id" in row:
        row["seq_start_id"] = [left + start for start in row["seq_start_id"]]
    ids, labels, starts = apply_columns(row, np.arange(left + LENGTH + right), apart=True)
    assert starts == [0, 3, 4]
    assert ids.tolist() == labels.tolist() == list(range(left, left + LENGTH))


@pytest.mark.parametrize("columns", HARMLESS)
def test_a_row_that_is_one_document_or_tells_nothing(columns):
    starts = apply_columns({key: value for key, value in columns.items() if key != "labels"}, np.array(IDS), np.array(
        columns.get("labels", IDS)), apart=True)[2]  # fmt: skip
    told = any(kind_of(name) in KINDS and isinstance(value, list) for name, value in columns.items())
    assert starts == ([0] if told and columns != {"doc_ids": [3, 8]} else None)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"document_lengths": [3, 1]}, r"document_lengths \[3, 1\] adds up to 4, but the row has 6 tokens"),
        ({"document_lengths": [3, -1, 4]}, "does not divide a row of 6 tokens"),
        ({"cu_seqlens": [0, 4, 3, 6]}, "does not divide"),
        ({"cu_seqlens": [0, 3, 9]}, "does not divide"),
        ({"cu_seqlens": [[0, 3], [3, 6]]}, "must be a list of numbers"),
        ({"position_ids": [0, 1, 3, 0, 1, 2]}, "does not count from 0 by ones"),
        ({"position_ids": [1, 2, 3, 0, 1, 2]}, "does not count from 0 by ones"),
        ({"segment_ids": [1, 1, 2, 2, 1, 1]}, "the tokens of a document must lie together"),
        (
            {"segment_ids": PACKED, "cu_seqlens": [0, 2, 6]},
            r"cu_seqlens divides the row at \[2\], segment_ids at \[3\]",
        ),
    ],
)
def test_columns_that_contradict_themselves_or_each_other_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        apply_columns(columns, np.array(IDS), apart=True)


@pytest.mark.parametrize(
    "rule, expected", [(DocumentRule(end_with=7), [0, 3, 4]), (DocumentRule(begin_with=7), [0, 2, 3])]
)
def test_a_token_tells_where_documents_start(rule, expected):
    assert rule.starts(torch.tensor([5, 6, 7, 7, 8, 9]), None) == expected
    assert rule.starts(np.array([5, 6, 8]), None) == [0]
    assert rule.starts(np.array([7, 5, 7]), [0]) == ([0, 1] if rule.end_with else [0, 2])
    assert rule.starts(np.array([], int), None) == []
    with pytest.raises(ValueError, match=r"columns tell documents apart already: leave out --documents-\w+-with 7"):
        rule.starts(np.array([5, 6, 7]), [0, 2])


@pytest.mark.parametrize("read", [trained, evaluated])
@pytest.mark.parametrize("left, right", [(0, 2), (2, 0), (1, 3), (0, 5)])
def test_padding_is_left_out_and_other_columns_are_read_without_it(read, left, right):
    mask = [0] * left + [1] * (LENGTH - left - right) + [0] * right
    kept = slice(left, LENGTH - right)
    row = {
        "input_ids": IDS,
        "labels": IDS,
        "attention_mask": mask,
        "position_ids": [0] * left + list(range(LENGTH - left - right)) + [1] * right,
        "segment_ids": [0] * left + [1] * (LENGTH - left - right) + [2] * right,
        "loss_mask": mask,
        "cu_seqlens": [0, LENGTH - right, LENGTH],
    }
    if LENGTH - left - right == 1 and read is trained:
        with pytest.raises(ValueError, match="no token to learn"):
            read(row)
        return
    ids, targets = read(row)
    assert ids.tolist() == IDS[kept]
    assert targets.tolist() == [*IDS[kept][1:], -100]


def test_the_issue_of_padded_rows():
    """20 tokens and 28 of padding have 19 targets, not 47."""
    row = {"input_ids": torch.tensor([5] * 20 + [0] * 28), "attention_mask": torch.tensor([1] * 20 + [0] * 28)}
    other = {"input_ids": torch.tensor([3] * 30)}
    batch = collate([read_row(each, "a row") for each in (row, other)], 48)
    assert batch["input_ids"].shape == (2, 30)
    assert (batch["targets"] != -100).sum(1).tolist() == [19, 29]


def test_rows_behind_the_first_are_checked_at_the_start_or_when_they_are_read(tmp_path, monkeypatch):
    rows = [{"input_ids": IDS, "segment_ids": [0] * LENGTH}] * 40 + [{"input_ids": IDS, "segment_ids": PACKED}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    name = str(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=f"--dataset {name}: row 40: segment_ids .* tells documents apart"):
        TokenRows(name, "--dataset", VOCABULARY, LENGTH)
    monkeypatch.setattr(token_rows, "_TOKENS_CHECKED", 32 * LENGTH)
    rows = TokenRows(name, "--dataset", VOCABULARY, LENGTH)
    assert rows[39][0].tolist() == IDS
    with pytest.raises(UnusableRow, match=f"--dataset {name}: row 40: segment_ids .* tells documents apart"):
        rows[40]


def test_rows_of_nothing_but_padding_count_as_empty():
    ids, labels, _ = apply_columns({"attention_mask": [0, 0]}, np.array([1, 2]))
    assert len(ids) == len(labels) == 0


def test_the_log_says_once_what_is_used_and_what_is_not(tmp_path, caplog):
    row = {"input_ids": IDS, "labels": LEARNED, "attention_mask": [1] * LENGTH, "source": "x", "length": 6, "doc_id": 9}
    datasets.Dataset.from_list([row, row]).to_parquet(tmp_path / "rows.parquet")
    name = str(tmp_path / "rows.parquet")
    note = (
        f"{name}: labels say which tokens are learned (-100: none); what attention_mask hides at the ends of a row is "
        "left out; not used: doc_id, length, source"
    )
    for _ in range(2):
        assert load_rows(name, "--eval-dataset").column_names == ["input_ids", "labels", "attention_mask"]
        assert len(list(tokenized_documents(name))) == 2
    said = [record.message for record in caplog.records if record.name.startswith("easy_context")]
    assert said == [f"--eval-dataset {note}", f"--tokenized {note}"]


def test_rows_of_ids_alone_need_no_word():
    assert describe_columns(["input_ids"], ["input_ids"]) is None
    assert describe_columns(["input_ids", "text"], ["input_ids"]) == "not used: text"


@pytest.mark.parametrize("column", ["input_ids", "labels", "source", "text", "length", "id", "meta", "offset_mapping"])
def test_common_columns_without_a_meaning_have_no_kind(column):
    assert kind_of(column) is None

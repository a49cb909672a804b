"""Documents to evaluate: text files, rows of text, rows of tokens; what is none of these is named."""

import gzip
import lzma

import pytest
import torch
from datasets import Dataset, DatasetDict
from ppl_runs import document, random_ids
from tiny_models import VOCABULARY

import eval_ppl
from easy_context.evaluation.perplexity import documents

ROW = '{"input_ids": [1, 2, 3]}\n'
LEARNED = '{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}\n'


def saved(folder, *rows):
    Dataset.from_list(list(rows)).save_to_disk(folder)
    return str(folder)


def test_padding_of_a_tokenized_row_is_cut_off(tmp_path):
    padded = {"input_ids": [9, 9, 1, 2, 3, 9], "attention_mask": [0, 0, 1, 1, 1, 0]}
    name = saved(tmp_path / "rows", {**padded, "labels": [-100, -100, 1, -100, 3, 9]})
    (only,) = documents.tokenized_documents(name)
    assert only.input_ids.tolist() == [1, 2, 3]
    assert only.targets.tolist() == [-100, 3, -100]
    name = saved(tmp_path / "holes", {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]})
    with pytest.raises(ValueError, match="--tokenized .*holes: row 0: attention_mask has padding between its tokens"):
        list(documents.tokenized_documents(name))
    with pytest.raises(ValueError, match=r"has columns \['text'\] and no input_ids"):
        list(documents.tokenized_documents(saved(tmp_path / "text", {"text": "a"})))


def test_tokens_may_be_called_tokens_and_have_a_split(tmp_path):
    parts = {name: Dataset.from_dict({"tokens": [[number, number]]}) for number, name in enumerate(("train", "test"))}
    DatasetDict(parts).save_to_disk(tmp_path / "rows")
    for split, number in ((None, 1), ("train", 0)):
        (only,) = documents.tokenized_documents(str(tmp_path / "rows"), split)
        assert only.input_ids.tolist() == only.labels.tolist() == [number, number]


def test_a_fingerprint_is_of_tokens_labels_names_and_their_order():
    ids, other = random_ids(20), random_ids(20, seed=1)
    labels = ids.where(ids > 100, -100)
    cases = [[document(ids)], [document(ids, labels)], [document(other)], [document(ids), document(other)]]
    cases += [[document(other), document(ids)], [document(ids[:10]), document(ids[10:])]]
    prints = [documents.documents_fingerprint(case) for case in cases]
    assert len(set(prints)) == len(cases)
    assert documents.documents_fingerprint([document(ids.clone())]) == prints[0]


def test_tokens_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="--text d has token id 300 but the model's vocabulary is 0 to 257"):
        documents.choose([document(torch.tensor([1, 300]))], 2, None, VOCABULARY)
    kept = document(torch.tensor([1, 2]), torch.tensor([-100, 257]))
    assert documents.choose([kept], 2, None, VOCABULARY) == [kept]


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no rows: name another dataset"),
        (ROW + '{"input_ids": [1, 2', "cannot be read as a dataset .* line 2 is not JSON"),
        (ROW + '{"input_ids": null}\n', "row 1 holds nulls in input_ids"),
        ('{"input_ids": [1, null]}\n', "row 0 holds nulls in input_ids"),
        ('{"input_ids": [1, 2.5]}\n', "input_ids must be lists of integers"),
        ('{"input_ids": "abc"}\n', "input_ids must be lists of integers"),
        ('{"input_ids": ["a", "b"]}\n', "input_ids must be lists of integers"),
        ('{"input_ids": [[1], [2, 3]]}\n', "input_ids must be lists of integers"),
        ('{"input_ids": 7}\n', "input_ids must be lists of integers"),
        ('{"input_ids": [1, 99999999999999999999]}\n', "input_ids must be lists of integers"),
        ("7\n", "cannot be read as a dataset .* line 1 is not a JSON object: 7"),
        ('{"input_ids": [1, -1, 2]}\n', "row 0 has token id -1 but the model's vocabulary is 0 to 257"),
        ('{"input_ids": [1, -100, 2]}\n', "row 0 has token id -100 but"),
        (LEARNED + '{"input_ids": [1, 2], "labels": [1, 258]}\n', "row 1 has label 258 but"),
        (LEARNED + ROW, "row 1 holds nulls in labels"),
        ('{"input_ids": [1, 2], "labels": [1, -1]}\n', "row 0 has label -1 but"),
        ('{"input_ids": [1, 2], "labels": [1]}\n', "row 0 has 2 input_ids and 1 labels"),
        ('{"input_ids": [1, 2], "attention_mask": [1]}\n', "row 0: attention_mask has 1 values for 2 tokens"),
    ],
)
def test_rows_that_are_no_tokens_are_refused_by_file_and_row(model_folder, tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    arguments = ["--tokenized", str(file), "--min-tokens", "2", "--output-file", str(tmp_path / "o.csv")]
    with pytest.raises(SystemExit, match=f"--tokenized {file}:? {message}"):
        eval_ppl.main(["-m", model_folder, *arguments])
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize("name", ["a.txt.gz", "cut.txt.gz", "garbled.txt.gz", "a.txt.xz", "cut.txt.xz"])
def test_a_packed_text_that_cannot_be_unpacked_is_named(model_folder, tmp_path, name):
    file = tmp_path / name
    packed = (gzip if file.suffix == ".gz" else lzma).compress(b"All happy families are alike. " * 99)
    if "garbled" in name:
        packed = packed[:12] + b"\xff" * 20 + packed[32:]
    file.write_bytes(packed[:-20] if "cut" in name else packed if "garbled" in name else b"plain text")
    with pytest.raises(SystemExit, match=f"--text {file}: cannot be read .*is it cut off, or no {file.suffix}"):
        eval_ppl.main(["-m", model_folder, "--text", str(file), "--output-file", str(tmp_path / "o.csv")])

"""The quickstart's own parts: tokenizer, model, rows with needles, table. The run itself is a step of .ci/run."""

import json
import random

import pytest

from examples import quickstart
from train_scripts.quickstart import table

TEXT = "It was a bright day, and the garden of the old house lay still; nobody spoke of the year 1815. " * 40
LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer():
    return quickstart.build_tokenizer(TEXT)


@pytest.fixture(scope="module")
def encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def text_rows(encode, count=4):
    ids = encode(TEXT)
    return [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(count)]


def test_tokenizer_keeps_digits_apart_and_text_whole(tokenizer, encode):
    assert encode(" 48213") == [*encode(" "), *(encode(digit)[0] for digit in "48213")]
    assert tokenizer.decode(encode("Größe: 5 €\n")) == "Größe: 5 €\n"
    assert len(tokenizer) <= quickstart.VOCABULARY


def test_model_starts_with_equal_but_separate_embeddings():
    model = quickstart.build_model(LENGTH)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.lm_head.weight.equal(model.model.embed_tokens.weight)
    assert model.config.max_position_embeddings == LENGTH


def test_needle_row_teaches_the_answers_only(tokenizer, encode):
    for seed in range(20):
        rng = random.Random(seed)
        ids, labels = quickstart.needle_row(rng, text_rows(encode)[0], encode, 2).values()
        assert len(ids) == len(labels) == LENGTH
        learned = [(token, label) for token, label in zip(ids, labels, strict=True) if label != -100]
        assert all(token == label for token, label in learned)
        answers = tokenizer.decode([label for _, label in learned]).split(".")
        assert answers[0] == answers[1] and answers[0].strip().isdigit() and len(answers[0]) == 1 + quickstart.DIGITS
        text = tokenizer.decode(ids)
        assert text.count(quickstart.NEEDLE.format(value=answers[0].strip())) == 3
        assert text.endswith(f"{answers[0]}.")


def test_needle_row_that_is_too_short_says_so(encode):
    with pytest.raises(ValueError, match="--most-questions 9.*longer than a row of 64.*ask fewer"):
        quickstart.needle_row(random.Random(0), text_rows(encode)[0], encode, 9)


def test_make_rows_is_repeatable_and_mixes_text_with_needles(encode):
    rows = quickstart.make_rows(text_rows(encode), encode, 100, 2)
    assert rows == quickstart.make_rows(text_rows(encode), encode, 100, 2)
    plain = sum(row["labels"] == row["input_ids"] for row in rows)
    assert 10 <= plain <= 45  # a quarter of 100, give or take five standard deviations
    assert {len(row["input_ids"]) for row in rows} == {LENGTH}


def test_table_shows_the_numbers_of_the_files(tmp_path):
    for stage, length, factor in (("stage1", 64, 1.0), ("stage2", 256, 0.5)):
        (tmp_path / stage).mkdir()
        losses = [factor * (6 - 0.1 * step) for step in range(40)]
        (tmp_path / stage / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in losses))
        (tmp_path / stage / "args.json").write_text(json.dumps({"seq_length": length}))
    models = {
        str(tmp_path / stage): {"by_position": [{"from": 64, "to": 128, "perplexity": perplexity}]}
        for stage, perplexity in (("stage1", 50.04), ("stage2", 33.3))
    }
    (tmp_path / "perplexity.json").write_text(json.dumps({"models": models}))
    for name, accuracy in (("needle-before", 0.12), ("needle-after", 0.97)):
        (tmp_path / name).mkdir()
        summary = {"tasks": {"needle": {"by_length": {"256": {"accuracy": accuracy}}}}}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    lines = [line.split() for line in table(tmp_path).splitlines()]
    assert ["stage1,", "rows", "of", "64", "tokens", "5.05", "3.05"] in lines
    assert ["perplexity,", "unseen", "text,", "tokens", "64-128", "50.0", "33.3"] in lines
    assert ["needle", "found", "in", "256", "tokens", "12", "%", "97", "%"] in lines

"""Retrieval rows: facts can be found, answers are right and learned, the rest keeps its length and order."""

import json
import re

import numpy as np
import pytest
from tokenizer_styles import text, tokenizer_of_style

from easy_context.data_preparation.facts import FACT_TEMPLATES, FRAMES, FactTemplate, draw_facts
from easy_context.data_preparation.retrieval import RetrievalSettings, RetrievalWriter, read_templates
from easy_context.data_preparation.rows import Row

STYLES = ("llama2", "mistral", "llama3", "qwen", "smollm2", "bytes", "unpositioned")


def row_of(tokenizer, length):
    ids = np.array(tokenizer(text(), add_special_tokens=False)["input_ids"][:length], np.int32)
    assert len(ids) == length
    return Row(ids, ids.copy())


def learned_runs(row):
    """Lists of token ids whose labels stand side by side."""
    kept = np.flatnonzero(row.labels != -100)
    return [row.ids[run].tolist() for run in np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1) if len(run)]


@pytest.mark.parametrize("style", STYLES)
def test_every_answer_is_learned_and_stands_in_the_text_before(style):
    tokenizer = tokenizer_of_style(style)
    writer = RetrievalWriter(tokenizer, RetrievalSettings(1.0, 2.0, text_labels=0.0))
    row = writer(np.random.default_rng(0), row_of(tokenizer, 6000))
    assert len(row.ids) == len(row.labels) == 6000
    kept = row.labels != -100
    assert (row.labels[kept] == row.ids[kept]).all()
    answers = [re.search(r"\d+", tokenizer.decode(run)) for run in learned_runs(row)]
    assert len(answers) == writer.facts == 12
    whole = tokenizer.decode(row.ids.tolist())
    for answer in answers:
        # Once in the fact, once in the answer; the first digit must not be given away by the prompt.
        assert len(re.findall(rf"(?<!\d){answer[0]}(?!\d)", whole)) >= 2
        assert len(answer[0]) >= 4


def test_text_keeps_its_order_and_share_of_labels():
    tokenizer = tokenizer_of_style("smollm2")
    row = row_of(tokenizer, 20_000)
    writer = RetrievalWriter(tokenizer, RetrievalSettings(1.0, 1.0, text_labels=0.25))
    new = writer(np.random.default_rng(1), row)
    share = (new.labels != -100).mean()
    assert 0.22 < share < 0.3
    # What is left after the cut end is a subsequence of the new row.
    position = 0
    for token in row.ids[: len(row.ids) // 2]:
        position += int(np.flatnonzero(new.ids[position:] == token)[0]) + 1
    assert not (writer(np.random.default_rng(2), row).ids == new.ids).all()


def test_prompts_of_the_text_stay_unlearned():
    tokenizer = tokenizer_of_style("smollm2")
    row = row_of(tokenizer, 4000)
    writer = RetrievalWriter(tokenizer, RetrievalSettings(1.0, 1.0, text_labels=1.0))
    masked = writer(np.random.default_rng(0), Row(row.ids, np.full(4000, -100, np.int32)))
    assert (masked.labels != -100).sum() < 100


def test_half_of_the_questions_stand_at_the_end_and_distances_are_spread():
    tokenizer = tokenizer_of_style("smollm2")
    writer = RetrievalWriter(tokenizer, RetrievalSettings(1.0, 2.0, text_labels=0.0))
    row = writer(np.random.default_rng(0), row_of(tokenizer, 20_000))
    places = np.flatnonzero(row.labels != -100)
    last_block = places > 20_000 - 20 * 60
    assert 0.3 < last_block.mean() < 0.7
    assert places.min() < 10_000


def test_one_fact_stands_before_all_text():
    tokenizer = tokenizer_of_style("smollm2")
    template = FactTemplate("The code of {name} is {value}.", "What is the code of {name}?", " It is {value}.")
    writer = RetrievalWriter(tokenizer, RetrievalSettings(1.0, 2.0, templates=(template,)))
    text = tokenizer.decode(writer(np.random.default_rng(3), row_of(tokenizer, 4000)).ids)
    assert text.lstrip().startswith("The code of ")


@pytest.mark.parametrize("style", STYLES)
def test_places_are_ends_of_sentences_not_titles_and_numbers(style):
    tokenizer = tokenizer_of_style(style)
    writer = RetrievalWriter(tokenizer, RetrievalSettings(1.0))
    ids = np.array(tokenizer("Soon Mr. J. Elliot paid 3.14 pounds. " * 100, add_special_tokens=False)["input_ids"])
    candidates = np.flatnonzero(writer._may_end_sentence[ids]) + 1
    ends = {writer._next_end(ids, candidates, place, reach=50) for place in range(len(ids) - 50)}
    assert len(ends) == pytest.approx(100, abs=5)
    assert all(tokenizer.decode(ids[:end]).endswith(" pounds.") for end in ends)


def test_the_end_of_a_document_is_a_place():
    tokenizer = tokenizer_of_style("smollm2")
    writer = RetrievalWriter(tokenizer, RetrievalSettings(1.0))
    ids = np.array(tokenizer("They left.<|im_end|>They left.", add_special_tokens=False)["input_ids"])
    ends = np.flatnonzero(writer._may_end_sentence[ids]) + 1
    assert len(ends) == 2 and ends[1] == len(ids)
    assert [writer._next_end(ids, ends, place, 9) for place in (1, len(ids) - 1)] == ends.tolist()


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.3, 0.5, 1.0])
def test_fraction_is_exact(fraction):
    writer = RetrievalWriter(tokenizer_of_style("bytes"), RetrievalSettings(fraction))
    taken = [writer.takes(i) for i in range(200)]
    assert sum(taken) == pytest.approx(200 * fraction)


def test_facts_have_different_names_and_numbers_of_the_asked_length():
    facts = draw_facts(np.random.default_rng(0), 2000, FACT_TEMPLATES, FRAMES, (5, 5))
    assert all(re.fullmatch(r" \d{5}\D*", fact.answer) for fact in facts)
    assert all(re.search(r"\d{5}", fact.answer)[0] in fact.statement for fact in facts)
    assert len({fact.statement for fact in facts}) == 2000
    assert not any(re.search(r"\d", fact.question) for fact in facts)


def test_own_templates_fit_short_rows(tmp_path):
    path = tmp_path / "templates.json"
    path.write_text(
        json.dumps([{"statement": "{name} is {value}.", "question": "{name}?", "answer": "It is {value}."}])
    )
    tokenizer = tokenizer_of_style("bytes")
    settings = RetrievalSettings(1.0, 1.0, 0.1, (3, 3), read_templates(str(path)))
    row = RetrievalWriter(tokenizer, settings)(np.random.default_rng(0), row_of(tokenizer, 160))
    assert len(row.ids) == 160
    assert re.search(r"\? It is \d\d\d\.", tokenizer.decode(row.ids.tolist()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "retrieval-templates"),
        ("[]", "no template"),
        ('[{"statement": "x", "question": "", "answer": "{value}"}]', "must hold {name} and {value}"),
        ('[{"statement": "{name} {value}", "question": "", "answer": "x"}]', "must hold {value} exactly once"),
        ('[{"fact": "x"}]', "fact"),
    ],
)
def test_bad_templates(tmp_path, content, message):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_templates(str(tmp_path / "t.json"))


def test_template_needs_its_marks():
    with pytest.raises(ValueError, match="exactly once"):
        FactTemplate("{name} {value}", "", "{value}{value}")

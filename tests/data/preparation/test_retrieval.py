"""Retrieval rows: facts can be found, answers are right and learned, the rest keeps its length and order."""

import argparse
import functools
import json
import re

import numpy as np
import pytest
from tokenizer_styles import STYLES, STYLES_WITH_BOS, text, tokenizer_of_style

from easy_context.data.preparation import retrieval
from easy_context.data.preparation.facts import FACT_TEMPLATES, FRAMES, FactTemplate, draw_facts
from easy_context.data.preparation.retrieval import RetrievalSettings, RetrievalWriter, _interleave, read_templates
from easy_context.data.preparation.writing import Row

OWN_TEMPLATES = (
    FactTemplate("{name} is {value}.", "{name}?", "It is {value}."),
    FactTemplate("{name}: {value}.", "And {name}?", "{value}, yes."),
)


@functools.cache
def ids_of_text(tokenizer):
    return np.array(tokenizer(text(), add_special_tokens=False)["input_ids"], np.int32)


def row_of(tokenizer, length):
    ids = ids_of_text(tokenizer)[:length]
    assert len(ids) == length
    return Row(ids, ids.copy(), [len(ids)])


def learned_runs(row):
    """Lists of token ids whose labels stand side by side."""
    kept = np.flatnonzero(row.labels != -100)
    return [row.ids[run].tolist() for run in np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1) if len(run)]


def write(tokenizer, row, seed=0, **settings):
    """Make a retrieval row; return it, its facts, and where each fact's statement and question begin in its tokens."""
    facts, inserts = [], []
    writer = RetrievalWriter(tokenizer, RetrievalSettings(1.0, **settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "draw_facts", lambda *x: facts.extend(draw_facts(*x)) or facts)
        patch.setattr(retrieval, "_interleave", lambda *x: inserts.extend(x[2]) or _interleave(*x))
        new = writer(np.random.default_rng(seed), row)
    assert len(new.ids) == len(new.labels) == len(row.ids)
    return new, facts[: writer.facts], inserts


def text_of(tokenizer, ids):
    """Decode ids that stand further on in a text, so that no decoder takes a space from their start."""
    before = tokenizer("x\n", add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode([*before, *map(int, ids)], clean_up_tokenization_spaces=False)
    return whole.removeprefix(tokenizer.decode(before, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_the_text_with_facts_and_questions_as_they_are_written(style, seed):
    """No character more, none less: without them the row is the beginning of its text."""
    tokenizer = tokenizer_of_style(style)
    row = row_of(tokenizer, 6000)
    new, facts, inserts = write(tokenizer, row, seed, facts_per_thousand=2.0)
    assert len(facts) == 12 and len(inserts) == 24
    whole = text_of(tokenizer, new.ids)
    for fact in facts:
        for inserted in (fact.question + fact.answer + fact.after, fact.statement):  # the one may hold the other
            assert whole.count(inserted) == 1
            whole = whole.replace(inserted, "")
    assert whole == text_of(tokenizer, row.ids[: new.text_tokens])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("templates", [FACT_TEMPLATES, OWN_TEMPLATES])
def test_exactly_the_answers_are_learned(style, templates):
    """Every token of an answer, none of what is before it and behind it; a token that reaches behind it is left out."""
    tokenizer = tokenizer_of_style(style)
    settings = {"facts_per_thousand": 3.0, "text_labels": 0.0, "templates": templates}
    new, facts, _ = write(tokenizer, row_of(tokenizer, 6000), **settings)
    kept = np.flatnonzero(new.labels != -100)
    assert (new.labels[kept] == new.ids[kept]).all()
    runs = np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1)
    assert len(runs) == len(facts) == 18
    answers = {fact.question: fact.answer for fact in facts}
    before = [text_of(tokenizer, new.ids[: run[0]]) for run in runs]
    for run, given in zip(runs, before, strict=True):
        (answer,) = (answer for question, answer in answers.items() if given.endswith(question))
        learned = text_of(tokenizer, new.ids[run])
        behind = text_of(tokenizer, new.ids[run[-1] + 1 : run[-1] + 3])
        assert learned == answer or (learned == answer[:-1] and behind.startswith(f"{answer[-1]}\n"))
        assert style in ("llama2", "llama3", "qwen") or learned == answer  # those have a token ".\n"


@pytest.mark.parametrize("length", [160, 600])
def test_every_question_stands_behind_its_fact(length):
    """At every place, and where several inserts stand at one place, as they often do in short rows."""
    tokenizer = tokenizer_of_style("bytes")
    settings = {"facts_per_thousand": 15.0, "templates": OWN_TEMPLATES, "digits": (3, 3), "text_labels": 0.0}
    together = 0
    for seed in range(60):
        new, facts, inserts = write(tokenizer, row_of(tokenizer, length), seed, **settings)
        whole = text_of(tokenizer, new.ids)
        for fact in facts:
            assert 0 <= whole.find(fact.statement) < whole.find(fact.question + fact.answer)
        places = [insert.place for insert in inserts]
        assert places == sorted(places)
        together += any(a.place == b.place < new.text_tokens for a, b in zip(inserts, inserts[1:], strict=False))
    assert together > 5


def test_questions_at_one_place_are_not_in_the_order_in_which_facts_were_drawn():
    """Else the fact at the start of a row would always be asked for first."""
    tokenizer = tokenizer_of_style("bytes")
    first, rows = 0, 0
    for seed in range(40):
        new, facts, inserts = write(tokenizer, row_of(tokenizer, 4000), seed, facts_per_thousand=3.0)
        asked = [text_of(tokenizer, x.ids) for x in inserts if x.place == new.text_tokens and x.learn.any()]
        places = [place for place, text in enumerate(asked) if text.startswith(facts[0].question)]
        if places and len(asked) > 3:
            rows, first = rows + 1, first + (places == [0])
    assert rows > 8 and first < 0.6 * rows  # one of four or more is to be expected


def test_questions_within_the_text_are_far_behind_their_facts():
    """Anywhere between fact and end: not right behind the fact, which would ask for little looking back."""
    tokenizer = tokenizer_of_style("bytes")
    shares = []
    for seed in range(20):
        new, facts, inserts = write(tokenizer, row_of(tokenizer, 8000), seed, facts_per_thousand=2.0)
        told = {text_of(tokenizer, x.ids): x.place for x in inserts if not x.learn.any()}
        asked = {text_of(tokenizer, x.ids): x.place for x in inserts if x.learn.any()}
        for fact in facts:
            place, behind = told[fact.statement], asked[fact.question + fact.answer + fact.after]
            if behind < new.text_tokens and place < 0.9 * new.text_tokens:
                shares.append((behind - place) / (new.text_tokens - place))
    assert len(shares) > 60
    assert 0.4 < np.mean(shares) < 0.65
    assert np.mean(np.array(shares) < 0.05) < 0.2


def test_places_of_facts_are_spread_evenly():
    tokenizer = tokenizer_of_style("bytes")
    places = []
    for seed in range(30):
        new, facts, _ = write(tokenizer, row_of(tokenizer, 8000), seed, facts_per_thousand=2.0)
        whole = text_of(tokenizer, new.ids)
        places += sorted(whole.find(fact.statement) / len(whole) for fact in facts)[1:]  # one is at the start
    # Questions of the last block take the end of a row. The mean of so many has a standard deviation of about 0.013.
    assert len(places) > 400
    assert 0.36 < np.mean(places) < 0.5
    assert np.histogram(places, 4, (0, 1))[0].min() > 0.08 * len(places)


@pytest.mark.parametrize("style", STYLES_WITH_BOS)
def test_only_bos_comes_before_the_first_fact(style):
    tokenizer = tokenizer_of_style(style)
    row = row_of(tokenizer, 3000)
    bos = np.array([tokenizer.bos_token_id], np.int32)
    begun = Row(np.concatenate([bos, row.ids]), np.concatenate([bos, row.labels]), row.document_lengths)
    for given, start in ((row, 0), (begun, 1)):
        new, facts, inserts = write(tokenizer, given, templates=OWN_TEMPLATES)
        assert inserts[0].place == start
        assert [new.ids[0]] == bos.tolist() if start else new.ids[0] != bos[0]
        assert text_of(tokenizer, new.ids[start:]).startswith(facts[0].statement)


@pytest.mark.parametrize("style", ["llama2", "llama3", "qwen", "smollm2", "bytes"])
def test_no_character_is_cut_where_text_has_no_sentences(style):
    tokenizer = tokenizer_of_style(style)
    ids = np.array(tokenizer("山高水長日月星辰🙂" * 400, add_special_tokens=False)["input_ids"][:4000], np.int32)
    for seed in range(3):
        new, _, inserts = write(tokenizer, Row(ids, ids.copy(), [len(ids)]), seed, facts_per_thousand=3.0)
        places = {insert.place for insert in inserts if insert.place < new.text_tokens}
        assert len(places) > 10
        assert not any("\ufffd" in text_of(tokenizer, ids[:place]) for place in places)


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
    masked = writer(np.random.default_rng(0), Row(row.ids, np.full(4000, -100, np.int32), [4000]))
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
        ("[", "t.json: Expecting value"),
        ("[]", "no template"),
        ('[{"statement": "x", "question": "", "answer": "{value}"}]', "must hold {name} and {value}"),
        ('[{"statement": "{name} {value}", "question": "", "answer": "x"}]', "must hold {value} exactly once"),
        ('[{"fact": "x"}]', "fact"),
    ],
)
def test_bad_templates(tmp_path, content, message):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
        read_templates(str(tmp_path / "t.json"))


def test_template_needs_its_marks():
    with pytest.raises(ValueError, match="exactly once"):
        FactTemplate("{name} {value}", "", "{value}{value}")

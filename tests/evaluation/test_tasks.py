"""Needle variants and the RULER-like tasks: what is hidden, what is asked, seeds, rows for every tokenizer style."""

import random
import re
from collections import Counter

import pytest
from tokenizer_styles import STYLES, TEXT_FILE, tokenizer_of_style

from easy_context.evaluation.encoding import TextEncoder
from easy_context.evaluation.haystack import Haystack
from easy_context.evaluation.needle import _ADJECTIVES, _NOUNS, KEYS, NeedleTask
from easy_context.evaluation.prompts import PromptBuilder
from easy_context.evaluation.tasks import RULER_TASKS, CommonWordsTask, ruler_task, vocabulary_of

TEXT = TEXT_FILE.read_text(encoding="utf-8")[:80_000]


def example(task, seed="seed", depth=0.5, size=400):
    return task.example(random.Random(seed), depth, size)


def test_keys_are_distinct():
    assert len(set(KEYS)) == len(KEYS) == len(_ADJECTIVES.split()) * len(_NOUNS.split())


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_seed_fixes_an_example_and_another_changes_it(name):
    task = ruler_task(name, TEXT)
    assert task.name == name
    assert example(task) == example(task)
    assert example(task).answers != example(task, seed="other").answers


@pytest.mark.parametrize("name", RULER_TASKS)
@pytest.mark.parametrize("style", STYLES)
def test_rows_of_every_task_and_style(name, style):
    encoder = TextEncoder(tokenizer_of_style(style))
    builder = PromptBuilder(encoder, Haystack(TEXT[:30_000], encoder), shots=1)
    task = ruler_task(name, TEXT)
    row = builder.build(task, 3500, 0.3, "a", "b")
    assert 0.95 * 3500 <= len(row.ids) <= 3500 if task.smallest_size else len(row.ids) == 3500
    decode = encoder.tokenizer.decode
    answers = [decode(row.ids[item.start : item.stop].tolist()).strip().rstrip(",") for item in row.items]
    assert decode(row.ids[row.answer_start :].tolist()).strip() == ", ".join(answers)
    assert len(answers) == len(set(answers)) == len(example(task, "a", 0.3).answers)
    for before, after in zip(row.items, row.items[1:], strict=False):
        assert before.stop <= after.start


def test_the_needles_are_the_answers_and_the_distractors_are_not():
    task = NeedleTask(needles=3, ask="all", distractors=4)
    made = example(task, depth=0.4)
    assert [round(depth, 6) for depth, _ in made.inserts[:3]] == [0.4, 0.6, 0.8]
    values = [re.search(r"is (\d{7})\.$", text).group(1) for _, text in made.inserts]
    assert tuple(values[:3]) == made.answers and len(set(values)) == 7
    keys = [re.search(r"of the (.*) is", text).group(1) for _, text in made.inserts]
    assert len(set(keys)) == 7 and ", ".join(keys[:3]) in made.question
    one = example(NeedleTask(needles=3, ask="one", distractors=4), depth=0.4)
    assert one.answers == made.answers[:1]


def test_no_two_needles_or_distractors_share_a_key_or_a_number():
    made = example(NeedleTask(needles=2, distractors=len(KEYS) - 2, digits=4))  # every key there is
    found = [re.search(r"of the (.*) is (\d+)\.$", text).groups() for _, text in made.inserts]
    assert sorted(key for key, _ in found) == sorted(KEYS)
    assert len({value for _, value in found}) == len(KEYS)
    made = example(NeedleTask(distractors=8, digits=1))  # every number there is
    assert sorted(re.search(r"\d", text)[0] for _, text in made.inserts) == list("123456789")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"needles": 0}, "--num_needles 0"),
        ({"needles": 1000, "distractors": 1000}, "together at most"),
        ({"digits": 1, "distractors": 9}, "--rnd_number_digits 1 does not give 10 different numbers"),
        ({"needle_template": "no value"}, "--needle-template 'no value' must hold {value}"),
        ({"needle_template": "#{value}", "distractors": 1}, "must hold {key} to tell 2 needles and distractors apart"),
        ({"answer_template": "it"}, "--answer-template 'it' must hold {value} exactly once"),
    ],
)
def test_bad_needles_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        NeedleTask(**options)


def test_multi_value_gives_all_values_of_one_key_in_the_order_of_the_text():
    made = example(ruler_task("niah_multivalue", TEXT), depth=0.2)
    assert [depth for depth, _ in made.inserts] == sorted(depth for depth, _ in made.inserts)
    assert made.answers == tuple(re.search(r"(\d+)\.$", text).group(1) for _, text in made.inserts)
    assert len({re.search(r"of the (.*) is", text).group(1) for _, text in made.inserts}) == 1


def test_variable_tracking_follows_only_the_chain_that_is_asked_for():
    made = example(ruler_task("variable_tracking", TEXT))
    asked = re.search(r"value (\d+)\?", made.question).group(1)
    values = {}
    for _, text in sorted(made.inserts, key=lambda insert: insert[0]):  # as the text has them
        name, value = re.fullmatch(r" Let (\w+) be (?:equal to )?(\w+)\.", text).groups()
        values[name] = values.get(value, value)
    assert len(values) == 10
    assert tuple(name for name, value in values.items() if value == asked) == made.answers
    assert len(made.answers) == 5


@pytest.mark.parametrize("name", sorted({*RULER_TASKS} - {"common_words"}))
@pytest.mark.parametrize("digits", [None, 3, 7])
def test_numbers_have_the_digits_asked_for(name, digits):
    wanted = digits or (5 if name == "variable_tracking" else 7)
    texts = [text for _, text in example(ruler_task(name, TEXT, digits)).inserts]
    assert {len(number) for number in re.findall(r"\d+", " ".join(texts))} == {wanted}


@pytest.mark.parametrize("size", [40, 41, 99, 100, 109, 110, 150, 200, 300, 399, 400, 599, 600, 601, 1000, 5000, 50000])
@pytest.mark.parametrize("words", [100, 2000])
def test_common_words_are_common(size, words):
    task = CommonWordsTask([f"word{i:05d}" for i in range(words)])
    made = example(task, size=size)
    entries = [line.split(". ")[1] for line in made.context.splitlines()]
    assert len(entries) == size
    counts = Counter(entries)
    common = {word for word, _ in counts.most_common(10)}
    assert set(made.answers) == common
    rarest = max(n for word, n in counts.items() if word not in common)
    (often,) = {counts[word] for word in common}
    if size >= 110 and (size, words) != (200, 100):
        assert often / rarest == pytest.approx(10, rel=0.005)  # 90 words in 50,000 lines do not come out even
    elif size < 110:  # ten other words must fit as well
        assert (often, rarest) == (size // 10 - 1, 1)
    else:  # 90 other words do not fill it
        assert (often, rarest) == (18, 2)
    assert len(counts) >= 20
    assert list(made.answers) == sorted(common, key=entries.index)
    if size >= 600 and words == 2000:
        assert rarest == (3 if size <= 5000 else 24)


def test_the_question_is_in_the_number_of_what_is_asked():
    one, every = (example(NeedleTask(needles=3, ask=ask)) for ask in ("one", "all"))
    assert re.fullmatch(r"What is the secret number of the \S+ \S+\?", one.question)
    assert re.fullmatch(r"The secret number of the \S+ \S+ is ", one.lead_in)
    assert every.question.startswith("What are the secret numbers of these, in this order: ")
    assert every.lead_in == "The secret numbers are "


def test_common_words_need_a_vocabulary():
    assert vocabulary_of("A few words, words of some Length and some more") == ["more", "some", "words"]
    with pytest.raises(ValueError, match="--task common_words needs 100 different words .* found 3"):
        CommonWordsTask(["a", "b", "c"])
    with pytest.raises(ValueError, match="--task nonsense: choose from needle, niah_single"):
        ruler_task("nonsense", TEXT)

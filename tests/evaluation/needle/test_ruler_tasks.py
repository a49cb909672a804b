"""The RULER-like tasks: what is hidden, what is asked, seeds, rows for every style of tokenizer."""

import random
import re
from collections import Counter

import pytest
from tokenizer_styles import STYLES, TEXT_FILE, tokenizer_of_style

from easy_context.evaluation.needle.encoding import TextEncoder
from easy_context.evaluation.needle.haystack import Haystack
from easy_context.evaluation.needle.prompts import PromptBuilder
from easy_context.evaluation.needle.ruler_tasks import RULER_TASKS, CommonWordsTask, vocabulary_of

TEXT = TEXT_FILE.read_text(encoding="utf-8")[:80_000]


def example(task, seed="seed", depth=0.5, size=400):
    return task.example(random.Random(seed), depth, size)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_seed_fixes_an_example_and_another_changes_it(name):
    task = RULER_TASKS[name](TEXT, None)
    assert task.name == name
    assert example(task) == example(task)
    assert example(task).answers != example(task, seed="other").answers


@pytest.mark.parametrize("name", RULER_TASKS)
@pytest.mark.parametrize("style", STYLES)
def test_rows_of_every_task_and_style(name, style):
    encoder = TextEncoder(tokenizer_of_style(style))
    builder = PromptBuilder(encoder, Haystack(TEXT[:30_000], encoder), shots=1)
    task = RULER_TASKS[name](TEXT, None)
    row = builder.build(task, 3500, 0.3, "a", "b")
    assert 0.95 * 3500 <= len(row.ids) <= 3500 if task.smallest_size else len(row.ids) == 3500
    decode = encoder.tokenizer.decode
    answers = [decode(row.ids[item.start : item.stop].tolist()).strip().rstrip(",") for item in row.items]
    assert decode(row.ids[row.answer_start :].tolist()).strip() == ", ".join(answers)
    assert len(answers) == len(set(answers)) == len(example(task, "a", 0.3).answers)
    for before, after in zip(row.items, row.items[1:], strict=False):
        assert before.stop <= after.start


def test_multi_value_gives_all_values_of_one_key_in_the_order_of_the_text():
    made = example(RULER_TASKS["niah_multivalue"](TEXT, None), depth=0.2)
    assert [depth for depth, _ in made.inserts] == sorted(depth for depth, _ in made.inserts)
    assert made.answers == tuple(re.search(r"(\d+)\.$", text).group(1) for _, text in made.inserts)
    assert len({re.search(r"of the (.*) is", text).group(1) for _, text in made.inserts}) == 1


def test_variable_tracking_follows_only_the_chain_that_is_asked_for():
    made = example(RULER_TASKS["variable_tracking"](TEXT, None))
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
    texts = [text for _, text in example(RULER_TASKS[name](TEXT, digits)).inserts]
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


def test_common_words_need_a_vocabulary():
    assert vocabulary_of("A few words, words of some Length and some more") == ["more", "some", "words"]
    with pytest.raises(ValueError, match="--task common_words needs 100 different words .* found 3"):
        CommonWordsTask(["a", "b", "c"])

"""The needle task: what is hidden, what is asked, and templates that cannot work."""

import random
import re

import pytest

from easy_context.evaluation.needle.needle_task import KEYS, NeedleTask


def example(task, depth=0.5):
    return task.example(random.Random("seed"), depth)


def test_keys_are_distinct():
    adjectives, nouns = ({key.split()[place] for key in KEYS} for place in (0, 1))
    assert len(set(KEYS)) == len(KEYS) == len(adjectives) * len(nouns) > 1000


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


def test_the_question_is_in_the_number_of_what_is_asked():
    one, every = (example(NeedleTask(needles=3, ask=ask)) for ask in ("one", "all"))
    assert re.fullmatch(r"What is the secret number of the \S+ \S+\?", one.question)
    assert re.fullmatch(r"The secret number of the \S+ \S+ is ", one.lead_in)
    assert every.question.startswith("What are the secret numbers of these, in this order: ")
    assert every.lead_in == "The secret numbers are "

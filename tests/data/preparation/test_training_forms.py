"""What trains retrieval shares no form with what tests it: compared with names, kinds of number and numbers masked."""

import random
import re

import numpy as np
import pytest

from easy_context.data.preparation import facts
from easy_context.data.preparation.facts import FACT_TEMPLATES, FRAMES, draw_facts
from easy_context.evaluation.needle import needle_task, prompts
from easy_context.evaluation.needle.ruler_tasks import RULER_TASKS

MOST_ALIKE = 0.5  # of 1.0; "The T of N is V" and "Know that the T for N is V" are 1.0 alike


def masked(text: str) -> list[str]:
    """The words of a sentence, with its variable parts as marks."""
    for mark, pattern in (
        ("N", r"\{name\}|\{key\}"),
        ("T", r"\{thing\}|secret numbers?|variables?"),
        ("V", r"\{value\}|\b\d+\b"),
        ("N", r"the [a-z]+ [a-z]+(?= (is|are)\b)"),
        ("of", r"\b(of|for)\b"),
    ):
        text = re.sub(pattern, f" {mark} ", text)
    return re.findall(r"[\w']+|[:,?]", re.sub(r"\bthe N\b", "N", text).replace("N's", "N 's"))


def alike(first: str, second: str) -> float:
    """The longest run of words that two forms share, as a share of the shorter form."""
    a, b = sorted((masked(first.lower_form), masked(second.lower_form)), key=len)
    runs = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]  # how long a shared run ends behind word i and word j
    for i, word in enumerate(a):
        for j, other in enumerate(b):
            runs[i + 1][j + 1] = runs[i][j] + 1 if word == other else 0
    return max(map(max, runs)) / len(a)


class Form(str):
    """A sentence whose own words are compared in lower case, its marks as they are."""

    @property
    def lower_form(self) -> str:
        return self[:1].lower() + self[1:]


def evaluation_forms() -> dict[str, list[Form]]:
    """Every sentence that the evaluation hides, asks and has answered."""
    rng = random.Random(0)
    said = {
        "statement": [needle_task.NEEDLE_TEMPLATE],
        "answer": [needle_task.ANSWER_TEMPLATE, needle_task.ANSWER_TEMPLATE_ALL],
    }
    said["question"] = [needle_task.QUESTION_TEMPLATE, needle_task.QUESTION_TEMPLATE_ALL]
    for name in ("niah_multivalue", "variable_tracking"):
        example = RULER_TASKS[name]("", None).example(rng, 0.5)
        said["statement"] += [text for _, text in example.inserts[:2]]
        said["question"].append(example.question)
        said["answer"].append(example.lead_in + " ".join(example.answers[:1]))
    return {part: [Form(text.strip()) for text in texts] for part, texts in said.items()}


@pytest.mark.parametrize("part", ["statement", "question", "answer"])
def test_no_template_has_the_form_of_the_evaluation(part):
    for template in FACT_TEMPLATES:
        trained = Form(getattr(template, part))
        for tested in evaluation_forms()[part]:
            likeness = alike(trained, tested)
            assert likeness <= MOST_ALIKE, f"{trained!r} is {likeness:.2f} like {tested!r}"


@pytest.mark.parametrize(
    "part,form",
    [
        ("statement", "The {thing} of {name} is {value}."),
        ("statement", "Keep in mind that the {thing} for {name} is {value}."),
        ("question", "What is the {thing} of {name}?"),
        ("answer", "The {thing} for {name} is {value}."),
    ],
)
def test_the_comparison_sees_a_form_with_other_words(part, form):
    assert max(alike(Form(form), tested) for tested in evaluation_forms()[part]) > MOST_ALIKE


def test_no_frame_is_the_prompt_of_the_evaluation():
    before, after = prompts.PLAIN_TEMPLATE.split(prompts.QUESTION_MARK)
    lead_in, answer_mark = before.split()[-1], after.split()[0]
    assert (lead_in, answer_mark) == ("Question:", "Answer:")
    for frame in FRAMES:
        assert not {lead_in, answer_mark} & set(frame.split())
        assert not re.search(r"(?i)\bq(uestion)?\s*:", frame) and not re.search(r"(?i)\ba(nswer)?\s*:", frame)


def test_no_name_or_kind_of_number_is_tested():
    tested = {word for key in needle_task.KEYS for word in key.split()}
    assert not tested & {*facts.ADJECTIVES, *facts.NOUNS}
    assert "secret number" not in facts.THINGS


def test_drawn_facts_hold_nothing_of_the_evaluation_s_sentences():
    drawn = draw_facts(np.random.default_rng(0), 2000, FACT_TEMPLATES, FRAMES, (4, 9))
    text = " ".join(fact.statement + fact.question + fact.answer for fact in drawn)
    assert not re.search(r"(?i)secret|\b(of|for) the \w+ \w+ (is|are) \d|what (is|are) the|question:|let \w+ be", text)

"""Needle in a haystack: sentences that give a number to a name, hidden in a long text, asked for at its end."""

import random

from .examples import ANSWER_SEPARATOR, Example, check_marks

DIGITS = 7  # of a number, unless --rnd_number_digits says otherwise
MOST_DIGITS = 18  # of a number that fits 64 bits
KEY_MARK, VALUE_MARK = "{key}", "{value}"
NEEDLE_TEMPLATE = " The secret number of the {key} is {value}."
QUESTION_TEMPLATE = "What is the secret number of the {key}?"
QUESTION_TEMPLATE_ALL = "What are the secret numbers of these, in this order: {key}?"
ANSWER_TEMPLATE = "The secret number of the {key} is {value}"
ANSWER_TEMPLATE_ALL = "The secret numbers are {value}"
_ADJECTIVES = (
    "amber ancient brass bright copper crimson crooked distant double empty frozen golden grey hollow iron ivory "
    "little lonely marble narrow northern old painted patient quiet red round rusty scarlet silent silver small "
    "southern spotted steep striped velvet wandering white wooden yellow"
)
_NOUNS = (
    "anchor badger barrel beacon bell bridge candle canal castle clock cottage falcon ferry forest fountain garden "
    "gate harbour heron island kettle ladder lantern library lighthouse meadow mill mirror orchard owl piano pier "
    "quarry railway river ship station statue tower village violin"
)
KEYS = tuple(f"{adjective} {noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split())


def distinct_numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """Return `count` different numbers of exactly `digits` decimal digits, none starting with 0."""
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def spread(depth: float, count: int) -> list[float]:
    """Return the depths of several needles: the first at `depth`, the others at even steps towards the end."""
    return [depth + i * (1 - depth) / count for i in range(count)]


class NeedleTask:
    """The classical test: needles and distractors of one form; one needle is asked for, or all of them."""

    has_depth = True
    smallest_size = 0

    def __init__(
        self,
        name: str = "needle",
        needle_template: str = NEEDLE_TEMPLATE,
        question_template: str = "",
        answer_template: str = "",
        digits: int = DIGITS,
        needles: int = 1,
        ask: str = "one",
        distractors: int = 0,
    ):
        """Check the templates.

        Args:
            name: of the task.
            needle_template: text to hide, with {value} and, unless there is only one, {key}; put in as it is.
            question_template: asked after the haystack, may use {key}; empty takes a default for `ask`.
            answer_template: everything before {value} is given to the model, the rest must be produced.
            digits: decimal digits of a value.
            needles: how many are spread from the cell's depth to the end.
            ask: "one" asks for the needle at the cell's depth, "all" for every one in the order of the text.
            distractors: further sentences of the same form at random depths, never asked for.

        Raises:
            ValueError: naming the flag that cannot work.
        """
        everything = needles + distractors
        if needles < 1 or distractors < 0 or everything > len(KEYS):
            raise ValueError(
                f"--num_needles {needles} and --num_distractor {distractors}: at least 1 and 0, "
                f"together at most {len(KEYS)}"
            )
        if not 1 <= digits <= MOST_DIGITS:
            raise ValueError(f"--rnd_number_digits {digits}: give 1 to {MOST_DIGITS}")
        if everything > 9 * 10 ** (digits - 1):
            raise ValueError(f"--rnd_number_digits {digits} does not give {everything} different numbers; raise it")
        self.name, self.digits, self.needles, self.ask, self.distractors = name, digits, needles, ask, distractors
        self.needle_template = needle_template
        self.question_template = question_template or (QUESTION_TEMPLATE_ALL if ask == "all" else QUESTION_TEMPLATE)
        self.answer_template = answer_template or (ANSWER_TEMPLATE_ALL if ask == "all" else ANSWER_TEMPLATE)
        self._check_templates(everything)

    def _check_templates(self, everything: int) -> None:
        needle_template, asking = self.needle_template, self.question_template + self.answer_template
        check_marks("--needle-template", needle_template, (KEY_MARK, VALUE_MARK))
        check_marks("--question-template", self.question_template, (KEY_MARK,))
        check_marks("--answer-template", self.answer_template, (KEY_MARK, VALUE_MARK))
        if VALUE_MARK not in needle_template:
            raise ValueError(f"--needle-template {needle_template!r} must hold {VALUE_MARK}")
        if everything > 1 and KEY_MARK not in needle_template:
            raise ValueError(
                f"--needle-template {needle_template!r} must hold {KEY_MARK} to tell {everything} needles "
                "and distractors apart"
            )
        if self.answer_template.count(VALUE_MARK) != 1:
            raise ValueError(f"--answer-template {self.answer_template!r} must hold {VALUE_MARK} exactly once")
        if KEY_MARK in asking and KEY_MARK not in needle_template:
            raise ValueError(
                f"--needle-template {needle_template!r} has no {KEY_MARK}, but the question or answer names it: give "
                f"--question-template and --answer-template without {KEY_MARK}, or put it into the needle"
            )
        if self.distractors and KEY_MARK not in self.question_template + self.answer_template.split(VALUE_MARK)[0]:
            raise ValueError(
                f"--question-template {self.question_template!r} must hold {KEY_MARK}: nothing else tells the needle "
                f"from the {self.distractors} of --num_distractor"
            )

    def example(self, rng: random.Random, depth: float, size: int = 0) -> Example:
        """Return new keys and numbers, the first needle at `depth`."""
        count = self.needles + self.distractors
        keys, values = rng.sample(KEYS, count), distinct_numbers(rng, count, self.digits)
        depths = spread(depth, self.needles) + [rng.random() for _ in range(self.distractors)]
        asked = self.needles if self.ask == "all" else 1
        key = ANSWER_SEPARATOR.join(keys[:asked])
        lead_in, closing = self.answer_template.replace(KEY_MARK, key).split(VALUE_MARK)
        return Example(
            question=self.question_template.replace(KEY_MARK, key),
            lead_in=lead_in,
            answers=tuple(values[:asked]),
            closing=closing,
            inserts=tuple(
                (at, self.needle_template.replace(KEY_MARK, key).replace(VALUE_MARK, value))
                for at, key, value in zip(depths, keys, values, strict=True)
            ),
        )

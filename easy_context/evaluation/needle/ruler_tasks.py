"""A set of tasks after RULER (Hsieh et al. 2024, arXiv 2404.06654), seeded and scored by exact match.

A task is a class with `example` and an entry of RULER_TASKS; `--task` offers every entry.

The kinds of task, their counts (four keys, values and queries, chains of four hops, ten common words, thirty against
three occurrences) follow the paper; the wording is our own, and two things differ so that one forward pass can score an
answer: every list has a stated order, and all of it must match. Scores are therefore not RULER's scores.
"""

import math
import random
import re
import string
from collections.abc import Callable

from .examples import Example, Task
from .needle_task import DIGITS, NeedleTask, distinct_numbers, spread
from .needle_task import KEYS as NEEDLE_KEYS

MANY = 4  # keys, values and queries of the multi-needle tasks
HOPS = 4
VARIABLE_DIGITS = 5  # of a value, as in the paper's examples
CHAINS = 2  # the second chain is there so that naming every variable is not the answer
NAME_LENGTH = 5  # letters of a variable
COMMON_WORDS = 10
COMMON_TO_RARE = 10  # occurrences of a common word to those of another
RARE_REPEATS = 3  # in a long list
ROOMY = 2 * COMMON_WORDS * COMMON_TO_RARE  # entries for each repeat of a rare word: half the list, or more, is rare
FEWEST_WORDS = 90  # beyond the common ones, so that none of these becomes common in a long list


class MultiValueTask:
    """Several numbers for one key; all of them are asked for, in the order of the text."""

    name = "niah_multivalue"
    has_depth = True
    smallest_size = 0

    def __init__(self, digits: int = DIGITS):
        self.digits = digits

    def example(self, rng: random.Random, depth: float, size: int = 0) -> Example:
        """Return numbers of one key: the first at `depth`, the others spread to the end."""
        key = rng.choice(NEEDLE_KEYS)
        values = distinct_numbers(rng, MANY, self.digits)
        return Example(
            question=f"What are all the secret numbers of the {key}, in the order in which the text gives them?",
            lead_in=f"The secret numbers of the {key} are ",
            answers=tuple(values),
            inserts=tuple(
                (at, f" One of the secret numbers of the {key} is {value}.")
                for at, value in zip(spread(depth, MANY), values, strict=True)
            ),
        )


class VariableTrackingTask:
    """Chains of assignments scattered over the text; all variables that hold one value are asked for."""

    name = "variable_tracking"
    has_depth = False
    smallest_size = 0

    def __init__(self, digits: int = VARIABLE_DIGITS):
        self.digits = digits

    def example(self, rng: random.Random, depth: float = 0.0, size: int = 0) -> Example:
        """Return two chains of one value and four hops each, every chain in its order at random depths."""
        names = distinct_names(rng, CHAINS * (HOPS + 1))
        values = distinct_numbers(rng, CHAINS, self.digits)
        chains = [names[i * (HOPS + 1) : (i + 1) * (HOPS + 1)] for i in range(CHAINS)]
        inserts = []
        for chain, value in zip(chains, values, strict=True):
            depths = sorted(rng.random() for _ in chain)
            inserts.append((depths[0], f" Let {chain[0]} be {value}."))
            for at, previous, name in zip(depths[1:], chain, chain[1:], strict=False):
                inserts.append((at, f" Let {name} be equal to {previous}."))
        return Example(
            question=f"Which variables have the value {values[0]}? Name them in the order of the text.",
            lead_in=f"The variables with the value {values[0]} are ",
            answers=tuple(chains[0]),
            inserts=tuple(inserts),
        )


class CommonWordsTask:
    """A numbered list of words in which ten occur far more often than the others; the ten are asked for."""

    name = "common_words"
    has_depth = False
    smallest_size = 40

    def __init__(self, vocabulary: list[str]):
        """Take the words to draw from.

        Raises:
            ValueError: there are too few.
        """
        if len(vocabulary) < COMMON_WORDS + FEWEST_WORDS:
            raise ValueError(
                f"--task common_words needs {COMMON_WORDS + FEWEST_WORDS} different words of 4 to 9 letters in "
                f"--haystack_dir and found {len(vocabulary)}; give it more text"
            )
        self.vocabulary = vocabulary

    def example(self, rng: random.Random, depth: float, size: int) -> Example:
        """Return a list of `size` entries, at least `smallest_size`."""
        common_repeats, rare_repeats = self._repeats(size)
        rare_entries = size - COMMON_WORDS * common_repeats
        words = rng.sample(self.vocabulary, COMMON_WORDS + math.ceil(rare_entries / rare_repeats))
        common, rare = words[:COMMON_WORDS], words[COMMON_WORDS:]
        entries = common * common_repeats + (rare * rare_repeats)[:rare_entries]
        rng.shuffle(entries)
        return Example(
            question=f"Which {COMMON_WORDS} words occur most often in the list? Name them in the order of the list.",
            lead_in="The most common words are ",
            answers=tuple(sorted(common, key=entries.index)),
            context="\n".join(f"{i}. {word}" for i, word in enumerate(entries, start=1)),
        )

    def _repeats(self, size: int) -> tuple[int, int]:
        """Return how often a common and a rare word occur: ten to one, and 30 to 3 as in the paper if the list is long.

        As many rare words as common ones stay in a list that is too short for that. A list that would use up the
        vocabulary repeats all words more often.
        """
        fewest_rare = math.ceil(size / (COMMON_WORDS * COMMON_TO_RARE + len(self.vocabulary) - COMMON_WORDS))
        rare = max(1, fewest_rare, min(RARE_REPEATS, size // ROOMY))
        return min(COMMON_TO_RARE * rare, size // COMMON_WORDS - rare), rare


def distinct_names(rng: random.Random, count: int) -> list[str]:
    """Return `count` different names of capital letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=NAME_LENGTH))] = None
    return list(names)


def vocabulary_of(text: str) -> list[str]:
    """Return the different lower-case words of 4 to 9 letters in a text, sorted."""
    return sorted(set(re.findall(r"\b[a-z]{4,9}\b", text)))


# Name -> what makes the task from the text of the haystack and the digits of its numbers (None for its own default).
RULER_TASKS: dict[str, Callable[[str, int | None], Task]] = {
    "niah_single": lambda text, digits: NeedleTask("niah_single", digits=digits or DIGITS),
    "niah_multikey": lambda text, digits: NeedleTask("niah_multikey", digits=digits or DIGITS, distractors=MANY - 1),
    "niah_multivalue": lambda text, digits: MultiValueTask(digits or DIGITS),
    "niah_multiquery": lambda text, digits: NeedleTask(
        "niah_multiquery", digits=digits or DIGITS, needles=MANY, ask="all"
    ),
    "variable_tracking": lambda text, digits: VariableTrackingTask(digits or VARIABLE_DIGITS),
    "common_words": lambda text, digits: CommonWordsTask(vocabulary_of(text)),
}

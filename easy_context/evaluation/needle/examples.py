"""An example of a task, as text: what to hide, what to ask and what to answer."""

import random
import re
from dataclasses import dataclass
from typing import Protocol

ANSWER_SEPARATOR = ", "
PLACEHOLDER = re.compile(r"\{\w*\}")


@dataclass(frozen=True)
class Example:
    """One instance of a task, still as text.

    Attributes:
        question: what is asked after the haystack.
        lead_in: start of the answer, given to the model.
        answers: what the model must produce, joined by ", "; compared exactly and in this order.
        closing: text after the answers, to be produced as well.
        inserts: (depth from 0 to 1, text) of what is hidden; the text goes in as it is, leading space included.
        context: replaces the haystack, for tasks whose context is not prose.
    """

    question: str
    lead_in: str
    answers: tuple[str, ...]
    closing: str = ""
    inserts: tuple[tuple[float, str], ...] = ()
    context: str | None = None


class Task(Protocol):
    """A family of examples.

    Attributes:
        name: as in `--task`.
        has_depth: whether a cell of the result has a depth.
        smallest_size: units of the shortest context that the task writes itself; 0 if it hides things in the haystack.
    """

    name: str
    has_depth: bool
    smallest_size: int

    def example(self, rng: random.Random, depth: float, size: int) -> Example:
        """Return a new example; the same `rng` state, depth and size give the same one."""


def check_marks(flag: str, template: str, known: tuple[str, ...]) -> None:
    """Raise ValueError if `template` has a placeholder that nothing would fill: the model would read it as it stands.

    Braces around anything but one word are text.
    """
    unknown = [mark for mark in PLACEHOLDER.findall(template) if mark not in known]
    if unknown:
        raise ValueError(f"{flag} {template!r} holds {unknown[0]}, which nothing fills; it may hold {', '.join(known)}")

"""From a task's example to the token ids of a prompt of a given length, with the answer's place in them.

Layout: special tokens | text before the haystack | haystack with the inserts | question | start of the answer | answer.
The haystack is cut so that the whole, answer included, has exactly the length asked for.
"""

import random
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .encoding import Encoded, TextEncoder
from .haystack import Haystack

HAYSTACK_MARK = "{haystack}"
QUESTION_MARK = "{question}"
PLAIN_TEMPLATE = (
    "Read the text. A question about it follows.\n\n{haystack}\n\nQuestion: {question}\nAnswer: "  # answer goes here
)
CHAT_TEMPLATE = "Read the text and answer the question at its end.\n\n{haystack}\n\n{question}"
SHOT_SENTENCES = 4  # prose in a worked example
SHOT_LIST_SIZE = 40  # entries in a worked example of a task that fills the context with a list
ANSWER_SEPARATOR = ", "
PLACEHOLDER = re.compile(r"\{\w*\}")


def check_marks(flag: str, template: str, known: tuple[str, ...]) -> None:
    """Raises ValueError if `template` has a placeholder that nothing would fill: the model would read it as it stands.

    Braces around anything but one word are text.
    """
    unknown = [mark for mark in PLACEHOLDER.findall(template) if mark not in known]
    if unknown:
        raise ValueError(f"{flag} {template!r} holds {unknown[0]}, which nothing fills; it may hold {', '.join(known)}")


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
        """A new example; the same `rng` state, depth and size give the same one."""


@dataclass(frozen=True)
class Row:
    """A prompt with its answer.

    Attributes:
        ids: int64 `[length]`, prompt and answer.
        answer_start: index of the first token that the model must produce; the rest of the row follows it.
        items: for each answer, the range of tokens that spell it.
        places: index of each insert's first token.
    """

    ids: np.ndarray
    answer_start: int
    items: tuple[range, ...]
    places: tuple[int, ...]


class PromptBuilder:
    """Builds rows for one tokenizer, haystack and prompt format."""

    def __init__(
        self, encoder: TextEncoder, haystack: Haystack, prompt_format: str = "plain", template: str = "", shots: int = 0
    ):
        """Checks the format.

        Args:
            prompt_format: "plain" text or "chat", the tokenizer's chat template.
            template: the prompt with {haystack} and {question}; empty takes the default of the format.
            shots: worked examples before the question.

        Raises:
            ValueError: the template lacks a mark or has an unknown one, or the tokenizer has no chat template.
        """
        if prompt_format == "chat" and not encoder.tokenizer.chat_template:
            raise ValueError("--format chat: this tokenizer has no chat template; use --format plain")
        self.template = template or (CHAT_TEMPLATE if prompt_format == "chat" else PLAIN_TEMPLATE)
        check_marks("--prompt-template", self.template, (HAYSTACK_MARK, QUESTION_MARK))
        for mark in (HAYSTACK_MARK, QUESTION_MARK):
            if self.template.count(mark) != 1:
                raise ValueError(f"--prompt-template {self.template!r} must hold {mark} exactly once")
        self.encoder, self.haystack, self.shots = encoder, haystack, shots
        self.chat = prompt_format == "chat"
        self._opening = encoder.opening()

    def build(self, task: Task, length: int, depth: float, seed: str, passage_seed: str) -> Row:
        """A row of exactly `length` tokens (at most `length` for tasks that fill the context themselves).

        Args:
            task: what to ask.
            length: tokens of prompt and answer together.
            depth: where the first insert goes, 0 to 1.
            seed: fixes the example.
            passage_seed: fixes the stretch of haystack; cells that share it differ in nothing else.

        Raises:
            ValueError: the fixed parts leave no room for a haystack.
        """
        if task.smallest_size:
            return self._build_listing(task, length, depth, seed)
        example = task.example(random.Random(seed), depth, 0)
        head, tail, answer_offset = self._frame(task, example, seed)
        inserts = [self.encoder.encode(text).ids for _, text in example.inserts]
        room = self._room(task, length, len(head) + len(tail.ids) + sum(map(len, inserts)))
        passage = self.haystack.passage(self.haystack.random_start(random.Random(passage_seed)), room)
        placed = sorted(range(len(inserts)), key=lambda i: passage.place(example.inserts[i][0]))
        pieces, places, done, position = [head], {}, 0, len(head)
        for i in placed:
            place = passage.place(example.inserts[i][0])
            places[i] = position + place - done
            pieces += [passage.ids[done:place], inserts[i]]
            position = places[i] + len(inserts[i])
            done = place
        pieces.append(passage.ids[done:])
        return _row(pieces, tail, answer_offset, example, tuple(places[i] for i in range(len(inserts))))

    def _build_listing(self, task: Task, length: int, depth: float, seed: str) -> Row:
        """A row whose context is as large as fits."""

        def parts(size: int):
            example = task.example(random.Random(seed), depth, size)
            head, tail, answer_offset = self._frame(task, example, seed)
            context = self.encoder.encode(example.context).ids
            return example, head, context, tail, answer_offset

        def tokens(built) -> int:
            return len(built[1]) + len(built[2]) + len(built[3].ids)

        built = parts(task.smallest_size)
        self._room(task, length, tokens(built) - 1)
        size = task.smallest_size
        # Proportional guesses that never overshoot by much; each costs one tokenization of the context.
        for _ in range(4):
            room = length - (tokens(built) - len(built[2]))
            guess = int(size * room / len(built[2]))
            candidate = parts(max(guess, task.smallest_size))
            while tokens(candidate) > length:
                guess -= max(1, int(guess * (tokens(candidate) - length) / len(candidate[2])))
                candidate = parts(max(guess, task.smallest_size))
            if guess <= size:
                break
            built, size = candidate, guess
        example, head, context, tail, answer_offset = built
        return _row([head, context], tail, answer_offset, example, ())

    def _room(self, task: Task, length: int, fixed: int) -> int:
        if length <= fixed:
            raise ValueError(
                f"a context of {length} tokens cannot hold task {task.name}: its fixed text alone has {fixed}; "
                "raise --min_context_length, or use shorter templates, fewer needles or fewer examples"
            )
        return length - fixed

    def _frame(self, task: Task, example: Example, seed: str) -> tuple[list[int], Encoded, int]:
        """What stands around the context: ids before, tail with the answer, and where in its text the answer starts."""
        shots = [self._shot(task, f"{seed} shot {i}") for i in range(self.shots)]
        content = self.template.replace(QUESTION_MARK, example.question)
        if self.chat:
            turns = [turn for question, answer in shots for turn in _turns(question, answer)]
            turns.append({"role": "user", "content": content})
            text = self.encoder.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        else:
            text = "".join(question + answer + "\n\n" for question, answer in shots) + content
        before, after = text.split(HAYSTACK_MARK)
        head = self.encoder.encode(before, in_context=False).ids
        if head[: len(self._opening)] != self._opening:  # a chat template may spell BOS out
            head = self._opening + head
        after += example.lead_in
        return head, self.encoder.encode(after + _answer_text(example)), len(after)

    def _shot(self, task: Task, seed: str) -> tuple[str, str]:
        """A worked example: a short prompt and its whole answer."""
        rng = random.Random(seed)
        example = task.example(rng, 0.5, SHOT_LIST_SIZE)
        context = example.context
        if context is None:
            pieces = self.haystack.sentences(rng, SHOT_SENTENCES)
            for depth, text in sorted(example.inserts, key=lambda insert: insert[0], reverse=True):
                pieces.insert(round(depth * len(pieces)), text)
            context = "".join(pieces).strip()
        prompt = self.template.replace(QUESTION_MARK, example.question).replace(HAYSTACK_MARK, context)
        return prompt, example.lead_in + _answer_text(example)


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _answer_text(example: Example) -> str:
    return ANSWER_SEPARATOR.join(example.answers) + example.closing


def _row(pieces: list, tail: Encoded, answer_offset: int, example: Example, places: tuple[int, ...]) -> Row:
    """Joins the pieces and finds the answer's tokens: all that end after its first character.

    A token that spans the border (" 12" after "is", asked for "12") belongs to the answer: the prompt then ends before
    it, which is where a model that writes that token would have to start.
    """
    ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in [*pieces, tail.ids]])
    shift = len(ids) - len(tail.ids)
    items, start = [], answer_offset
    for answer in example.answers:
        stop = start + len(answer)
        first = bisect_right(tail.ends, start)
        # A character split over several tokens gives them all the same end.
        last_end = tail.ends[min(bisect_left(tail.ends, stop), len(tail.ends) - 1)]
        items.append(range(shift + first, shift + bisect_right(tail.ends, last_end)))
        start = stop + len(ANSWER_SEPARATOR)
    return Row(ids, shift + bisect_right(tail.ends, answer_offset), tuple(items), places)

"""From a task's example to the token ids of a prompt of a given length, with the answer's place in them.

Layout: special tokens | text before the haystack | haystack with the inserts | question | start of the answer | answer.
The haystack is cut so that the whole, answer included, has exactly the length asked for.
"""

import itertools
import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from .encoding import Encoded, TextEncoder
from .examples import ANSWER_SEPARATOR, Example, Task, check_marks
from .haystack import Haystack

HAYSTACK_MARK = "{haystack}"
QUESTION_MARK = "{question}"
PLAIN_TEMPLATE = (
    "Read the text. A question about it follows.\n\n{haystack}\n\nQuestion: {question}\nAnswer: "  # answer goes here
)
CHAT_TEMPLATE = "Read the text and answer the question at its end.\n\n{haystack}\n\n{question}"
SHOT_SENTENCES = 4  # prose in a worked example
SHOT_LIST_SIZE = 40  # entries in a worked example of a task that fills the context with a list


class ContextTooShort(ValueError):
    """A length that the fixed parts of a prompt fill or exceed; the message is for the user."""

    def __init__(self, task: str, length: int, shortest: int):
        super().__init__(
            f"a context of {length} tokens cannot hold task {task}: its prompts need up to {shortest} of them; "
            "raise --min_context_length, or use shorter templates, fewer needles or fewer examples"
        )


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
    """A builder of rows for one tokenizer, haystack and prompt format."""

    def __init__(
        self, encoder: TextEncoder, haystack: Haystack, prompt_format: str = "plain", template: str = "", shots: int = 0
    ):
        """Check the format.

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
        self._opening = [] if self.chat else encoder.opening()  # a chat template writes its own, or none

    def build(self, task: Task, length: int, depth: float, seed: str, passage_seed: str) -> Row:
        """Return a row of exactly `length` tokens (at most `length` for tasks that fill the context themselves).

        Args:
            task: what to ask.
            length: tokens of prompt and answer together.
            depth: where the first insert goes, 0 to 1.
            seed: fixes the example.
            passage_seed: fixes the stretch of haystack; cells that share it differ in nothing else.

        Raises:
            ContextTooShort: the fixed parts leave no room for a haystack.
        """
        parts = self._parts(task, depth, seed, task.smallest_size)
        if length < parts.shortest:
            raise ContextTooShort(task.name, length, parts.shortest)
        if task.smallest_size:
            return self._build_listing(task, length, depth, seed, parts)
        head, inserts, example = parts.head, parts.inserts, parts.example
        room = length - parts.fixed
        passage = self.haystack.passage(self.haystack.random_start(random.Random(passage_seed)), room)
        placed = sorted(range(len(inserts)), key=lambda i: passage.place(example.inserts[i][0]))
        pieces: list[Any] = [head]
        places, done, position = {}, 0, len(head)
        for i in placed:
            place = passage.place(example.inserts[i][0])
            places[i] = position + place - done
            pieces += [passage.ids[done:place], inserts[i]]
            position = places[i] + len(inserts[i])
            done = place
        pieces.append(passage.ids[done:])
        return _row(pieces, parts, tuple(places[i] for i in range(len(inserts))))

    def shortest(self, task: Task, depth: float, seed: str) -> int:
        """Return the tokens of the shortest row that `build` can make of this example, without making a passage."""
        return self._parts(task, depth, seed, task.smallest_size).shortest

    def _parts(self, task: Task, depth: float, seed: str, size: int) -> "_Parts":
        """Return everything but the haystack."""
        example = task.example(random.Random(seed), depth, size)
        head, tail, answer_offset = self._frame(task, example, seed)
        context = [] if example.context is None else self.encoder.encode(example.context).ids
        inserts = [self.encoder.encode(text).ids for _, text in example.inserts]
        return _Parts(example, head, context, inserts, tail, answer_offset)

    def _build_listing(self, task: Task, length: int, depth: float, seed: str, smallest: "_Parts") -> Row:
        """Return a row whose context is as large as fits."""
        built, size = smallest, task.smallest_size
        # Proportional guesses that never overshoot by much; each costs one tokenization of the context.
        for _ in range(4):
            room = length - (built.fixed - len(built.context))
            guess = int(size * room / len(built.context))
            candidate = self._parts(task, depth, seed, max(guess, task.smallest_size))
            while candidate.fixed > length:
                guess -= max(1, int(guess * (candidate.fixed - length) / len(candidate.context)))
                candidate = self._parts(task, depth, seed, max(guess, task.smallest_size))
            if guess <= size:
                break
            built, size = candidate, guess
        return _row([built.head, built.context], built, ())

    def _frame(self, task: Task, example: Example, seed: str) -> tuple[list[int], Encoded, int]:
        """Return the ids before the context, the tail with the answer, and where in its text the answer starts."""
        shots = [self._shot(task, f"{seed} shot {i}") for i in range(self.shots)]
        before, after = self.template.replace(QUESTION_MARK, example.question).split(HAYSTACK_MARK)
        if self.chat:
            before, after = self._chat_frame(shots, before, after)
        else:
            before = "".join(question + answer + "\n\n" for question, answer in shots) + before
        head = self.encoder.encode(before, in_context=False).ids
        if head[: len(self._opening)] != self._opening:  # --prompt-template may spell BOS out
            head = self._opening + head
        after += example.lead_in
        return head, self.encoder.encode(after + _answer_text(example)), len(after)

    def _chat_frame(self, shots: list[tuple[str, str]], before: str, after: str) -> tuple[str, str]:
        """Return the chat template's text before and after the place of the haystack.

        The place is marked while the template is applied, by something that no text of the chat holds.
        """
        turns = [turn for question, answer in shots for turn in _turns(question, answer)]
        texts = [before, after, *(turn["content"] for turn in turns)]
        marks = (f"{{haystack {i}}}" for i in itertools.count())
        mark = next(mark for mark in marks if not any(mark in text for text in texts))
        turns.append({"role": "user", "content": before + mark + after})
        text = self.encoder.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        if text.count(mark) != 1:
            raise ValueError(
                f"--format chat: this tokenizer's chat template gives the user's text {text.count(mark)} times "
                "instead of once; use --format plain"
            )
        before, after = text.split(mark)
        return before, after

    def _shot(self, task: Task, seed: str) -> tuple[str, str]:
        """Return a worked example: a short prompt and its whole answer."""
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


@dataclass(frozen=True)
class _Parts:
    """What a row holds besides the haystack.

    Attributes:
        example: of the task.
        head: token ids before the context.
        context: token ids of a context that the task writes itself; else empty.
        inserts: token ids of what is hidden in the haystack.
        tail: question and answer.
        answer_offset: where in the tail's text the answer starts.
    """

    example: Example
    head: list[int]
    context: list[int]
    inserts: list[list[int]]
    tail: Encoded
    answer_offset: int

    @property
    def fixed(self) -> int:
        """Tokens of all parts."""
        return len(self.head) + len(self.context) + sum(map(len, self.inserts)) + len(self.tail.ids)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row: with one token of haystack, if the task needs any."""
        return self.fixed + (not self.context)


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _answer_text(example: Example) -> str:
    return ANSWER_SEPARATOR.join(example.answers) + example.closing


def _row(pieces: list, parts: _Parts, places: tuple[int, ...]) -> Row:
    """Join the pieces and find the answer's tokens: all that end after its first character.

    A token that spans the border (" 12" after "is", asked for "12") belongs to the answer: the prompt then ends before
    it, which is where a model that writes that token would have to start.
    """
    tail = parts.tail
    ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in [*pieces, tail.ids]])
    shift = len(ids) - len(tail.ids)
    items, start = [], parts.answer_offset
    for answer in parts.example.answers:
        stop = start + len(answer)
        first = bisect_right(tail.ends, start)
        # A character split over several tokens gives them all the same end.
        last_end = tail.ends[min(bisect_left(tail.ends, stop), len(tail.ends) - 1)]
        items.append(range(shift + first, shift + bisect_right(tail.ends, last_end)))
        start = stop + len(ANSWER_SEPARATOR)
    return Row(ids, shift + bisect_right(tail.ends, parts.answer_offset), tuple(items), places)

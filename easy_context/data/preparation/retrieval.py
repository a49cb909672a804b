"""Retrieval-rich rows: key-value facts hidden in real text, and questions about them further on.

Long real text alone teaches little about looking something up far back, because few of its tokens need that. A
retrieval row interleaves many facts ("The hasty baker has 48213 as locker code.") with the text and asks for each
one later, half of them in a block at the end of the row. Labels: every token of an answer, none of the facts and
questions (a random number cannot be predicted), and only a share of the text, so that answers weigh more in the mean
over learned tokens.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...common.constants import IGNORE_INDEX
from ...common.sentences import ends_sentence
from .facts import FACT_TEMPLATES, FRAMES, Fact, FactTemplate, draw_facts
from .spans import Span, SpanEncoder
from .writing import Row

MOST_INSERTED = 0.9  # share of a row
QUESTIONS_AT_END = 0.5
LABEL_BLOCK = 512  # learned text comes in stretches of so many tokens
TOKENS_BEFORE = 32  # a sentence's end: enough to read the last word of it
MOST_BYTES, REPLACEMENT = 4, "\ufffd"  # of a character; what decoders write for a part of one


@dataclass(frozen=True)
class RetrievalSettings:
    """How retrieval rows are made.

    Attributes:
        fraction: share of the train rows.
        facts_per_thousand: facts for 1000 tokens of a row, at least one a row.
        text_labels: share of the text that is learned.
        digits: fewest and most digits of a value.
        templates: ways to tell a fact and to ask for it.
    """

    fraction: float = 0.0
    facts_per_thousand: float = 1.0
    text_labels: float = 0.25
    digits: tuple[int, int] = (4, 9)
    templates: tuple[FactTemplate, ...] = FACT_TEMPLATES


def read_templates(path: str) -> tuple[FactTemplate, ...]:
    """Read templates from a JSON file, a list of {"statement", "question", "answer"}; an argparse type.

    Raises:
        argparse.ArgumentTypeError: no such file, or not a list of templates with the marks that they need.
    """
    try:
        templates = tuple(FactTemplate(**template) for template in json.loads(Path(path).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    if not templates:
        raise argparse.ArgumentTypeError(f"{path}: no template in it")
    return templates


@dataclass(frozen=True)
class _Insert:
    """Tokens that go in before text token `place`; `learn` marks the answer."""

    place: int
    ids: np.ndarray
    learn: np.ndarray


class RetrievalWriter:
    """Write facts and questions into rows of one length.

    Args:
        tokenizer: a Hugging Face tokenizer.
        settings: how.

    Attributes:
        rows: retrieval rows written so far.
        facts: facts in them.
    """

    def __init__(self, tokenizer: Any, settings: RetrievalSettings):
        self.tokenizer = tokenizer
        self.encoder = SpanEncoder(tokenizer)
        self.settings = settings
        self.rows = self.facts = 0
        self.frames = FRAMES if settings.templates == FACT_TEMPLATES else FRAMES[:1]
        self._special_ids = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        endings = tuple(mark + quote for mark in ".!?" for quote in ("", *"\"'”’)]"))
        self._may_end_sentence = np.array([bool(token) and token.endswith(endings) for token in tokens])

    def takes(self, index: int) -> bool:
        """Return whether train row `index` becomes a retrieval row: evenly spread, in exactly the share asked for."""
        fraction = self.settings.fraction
        return int((index + 1) * fraction + 1e-9) > int(index * fraction + 1e-9)

    def facts_in(self, length: int) -> int:
        """Return the number of facts that a row of `length` tokens is meant to hold."""
        return max(1, round(length * self.settings.facts_per_thousand / 1000))

    def __call__(self, rng: np.random.Generator, row: Row) -> Row:
        """Return a row of the same length: the text of `row` with facts and questions, its own end cut off.

        Raises:
            ValueError: the row is too short for one fact and its question.
        """
        length = len(row.ids)
        facts = draw_facts(rng, self.facts_in(length), self.settings.templates, self.frames, self.settings.digits)
        encoded, inserted = [], 0
        for fact in facts:
            pair = self._encode(fact)
            inserted += sum(len(ids) for ids, _ in pair)
            if inserted > MOST_INSERTED * length:
                inserted -= sum(len(ids) for ids, _ in pair)
                break
            encoded.append(pair)
        if not encoded:
            raise ValueError(
                f"--seq-length {length}: a fact and its question alone take over {MOST_INSERTED:.0%} of a row; use "
                "longer rows or shorter --retrieval-templates"
            )
        self.rows += 1
        self.facts += len(encoded)
        text = row.ids[: length - inserted]
        labels = self._text_labels(rng, row.labels[: len(text)])
        return _interleave(text, labels, self._place(rng, text, encoded))

    def _encode(self, fact: Fact) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Tokenise the statement and the question with its answer, as text between text; each is (ids, learn)."""
        start = len(fact.question)
        answer = Span(start, start + len(fact.answer))
        told, nothing = self.encoder.encode(fact.statement, continues=True)
        asked, learn = self.encoder.encode(fact.question + fact.answer + fact.after, [answer], continues=True)
        return (np.array(told, np.int32), nothing), (np.array(asked, np.int32), learn)

    def _place(self, rng: np.random.Generator, text: np.ndarray, encoded: list) -> list[_Insert]:
        """Give every fact the end of a random sentence, and its question the end of a later one.

        One fact comes before all text, where random places almost never fall and looking back is hardest. Only the BOS
        token precedes it, as in every text.
        """
        start = int(len(text) > 0 and text[0] == self.tokenizer.bos_token_id)
        ends = np.flatnonzero(self._may_end_sentence[text]) + 1
        reach = max(1, len(text) // 64)
        inserts = []
        for index, (statement, question) in enumerate(encoded):
            place = self._next_end(text, ends, int(rng.integers(len(text) + 1)), reach) if index else start
            at_end = rng.random() < QUESTIONS_AT_END
            asked = len(text)
            if not at_end:
                asked = self._next_end(text, ends, int(rng.integers(place, len(text) + 1)), reach)
            inserts += [_Insert(place, *statement), _Insert(asked, *question)]
        return _ordered(rng, inserts)

    def _next_end(self, text: np.ndarray, ends: np.ndarray, place: int, reach: int) -> int:
        """Return the next sentence end at or after `place` if one is within `reach` tokens, otherwise about `place`.

        Args:
            text: token ids.
            ends: sorted places behind tokens that may end a sentence.
            place: number of tokens before it.
            reach: tokens.
        """
        for end in ends[np.searchsorted(ends, place) : np.searchsorted(ends, place + reach, side="right")]:
            if self._is_sentence_end(text, int(end)):
                return int(end)
        return self._character_end(text, place)

    def _character_end(self, text: np.ndarray, place: int) -> int:
        """Return the first place from `place` on that is not within a character, whose bytes may be several tokens."""
        for end in range(place, min(place + MOST_BYTES, len(text))):
            for start in range(end - 1, max(end - 1 - MOST_BYTES, -1), -1):
                if REPLACEMENT not in self.tokenizer.decode(text[start:end], clean_up_tokenization_spaces=False):
                    return end  # the last tokens before it are whole characters
        return place

    def _is_sentence_end(self, text: np.ndarray, end: int) -> bool:
        before = text[max(0, end - TOKENS_BEFORE) : end].tolist()
        words = self.tokenizer.decode(before, clean_up_tokenization_spaces=False)
        if not ends_sentence(words):
            return False
        if end == len(text) or int(text[end]) in self._special_ids:
            return True
        further = self.tokenizer.decode([*before, int(text[end])], clean_up_tokenization_spaces=False)
        return further[len(words) :][:1].isspace()  # not so in "3.14"

    def _text_labels(self, rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
        block = max(1, min(LABEL_BLOCK, len(labels) // 8))
        blocks = -(-len(labels) // block)
        kept = np.zeros(blocks, bool)
        kept[rng.permutation(blocks)[: round(blocks * self.settings.text_labels)]] = True
        return np.where(np.repeat(kept, block)[: len(labels)], labels, np.int32(IGNORE_INDEX))


def _ordered(rng: np.random.Generator, inserts: list[_Insert]) -> list[_Insert]:
    """Sort by place; at one place statements come first, questions in random order behind them."""
    keys = [(insert.place, bool(insert.learn.any()), float(rng.random())) for insert in inserts]
    return [inserts[index] for index in sorted(range(len(inserts)), key=keys.__getitem__)]


def _interleave(text: np.ndarray, labels: np.ndarray, inserts: list[_Insert]) -> Row:
    ids, targets, done = [], [], 0
    for insert in inserts:
        ids += [text[done : insert.place], insert.ids]
        targets += [labels[done : insert.place], np.where(insert.learn, insert.ids, np.int32(IGNORE_INDEX))]
        done = insert.place
    whole = np.concatenate([*ids, text[done:]])
    # One document: questions ask for facts that may stand in another one.
    return Row(whole, np.concatenate([*targets, labels[done:]]), [len(whole)], len(text))

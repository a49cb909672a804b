"""Tokenise a record: plain text, a prompt/response pair or chat messages."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import chats
from .sources import Record
from .spans import Span, SpanEncoder

LONGEST_END = 8  # tokens in which white space behind a separator ends


@dataclass(frozen=True)
class TokenisedDocument:
    """The token ids of one record, or the `problem` that excludes it.

    Attributes:
        location: file and line (or row) of the record.
        ids: int32 `[tokens]`, with the separator at the end; none where there is a problem.
        learn: bool `[tokens]`, False where the label is −100; None where every token is learned.
        answers_left_out: answers of a chat that are not learned, because its template rewrites earlier turns.
    """

    location: str
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    learn: np.ndarray | None = None
    problem: str | None = None
    answers_left_out: int = 0

    def marked_ids(self) -> np.ndarray:
        """Return the ids int32 `[tokens]`, inverted (~id) where the token is not learned."""
        return self.ids if self.learn is None else np.where(self.learn, self.ids, ~self.ids)


class DocumentTokenizer:
    """Turns one record into token ids.

    A text or pair starts with the BOS token if the tokenizer puts one before a text by itself, a chat as its template
    writes it. All end with the separator, if they do not end so already.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or not.
        separator_id: token between documents.
        text_field: the field of plain text, which then is taken whatever else a record holds. None: "text", and a
            record with messages or conversations is a chat.

    Attributes:
        fields: names of the fields that are read.
    """

    def __init__(self, tokenizer: Any, separator_id: int, text_field: str | None = None):
        self.tokenizer = tokenizer
        self.encoder = SpanEncoder(tokenizer)
        self.separator_id = separator_id
        self.text_field = text_field or "text"
        self.text_first = text_field is not None
        self.fields = (self.text_field, *chats.FIELDS, "prompt", "response", *chats.OTHER_FIELDS)
        first = tokenizer("a")["input_ids"][:1]
        self.start_ids = first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []

    def __call__(self, record: Record) -> TokenisedDocument:
        """Tokenise one record; problems are returned, not raised."""
        if record.data is None:
            return TokenisedDocument(record.location, problem=record.problem)
        try:
            return self._tokenise(record.location, record.data)
        except ValueError as error:
            return TokenisedDocument(record.location, problem=str(error))
        except Exception as error:  # each tokenizer and chat template has errors of its own
            return TokenisedDocument(record.location, problem=f"{type(error).__name__}: {error}")

    def _tokenise(self, location: str, data: dict[str, Any]) -> TokenisedDocument:
        kind, left_out = self._kind(data), 0
        if kind == "chat":
            chat = chats.render_chat(self.tokenizer, data)
            text, spans, left_out = chat.text, chat.answers, chat.left_out
        elif kind == "pair":
            prompt = _text_of(data, "prompt", empty=True)
            text = prompt + _text_of(data, "response")
            spans = [Span(len(prompt), len(text))]
        else:
            text, spans = _text_of(data, self.text_field), []
        ids, learn = self.encoder.encode(text, spans)
        start = [] if kind == "chat" or ids[:1] == self.start_ids else self.start_ids
        # A chat has ended already, in its template's own way; a response ends with the separator.
        end, end_is_learned = ([], []) if self._has_ended(ids) else ([self.separator_id], [kind == "pair"])
        ids = np.concatenate([start, ids, end]).astype(np.int32)
        if kind == "text":
            return TokenisedDocument(location, ids)
        learn = np.concatenate([[False] * len(start), learn, end_is_learned]).astype(bool)
        return TokenisedDocument(location, ids, learn, answers_left_out=left_out)

    def _has_ended(self, ids: list[int]) -> bool:
        """Whether the last token is the separator, white space behind it aside."""
        behind = ids[-LONGEST_END:]
        while self.separator_id in behind:
            behind = behind[behind.index(self.separator_id) + 1 :]
            if not self.tokenizer.decode(behind).strip():
                return True
        return False

    def _kind(self, data: dict[str, Any]) -> str:
        """Say what a record holds: "text", a "chat", or a "pair" of prompt and response; null counts as not there."""
        given = [name for name in self.fields if data.get(name) is not None]
        if self.text_first and self.text_field in given:
            return "text"
        if any(name in given for name in chats.FIELDS):
            return "chat"
        pair = [name for name in given if name in ("prompt", "response")]
        if pair and self.text_field in given and str(data[self.text_field]).strip():
            raise ValueError(
                f"has {self.text_field!r} and also {' and '.join(map(repr, pair))}; --text-field {self.text_field} "
                f"takes {self.text_field!r}, and where that is left out prompt and response are taken"
            )
        return "pair" if pair else "text"


def _text_of(data: dict[str, Any], field: str, empty: bool = False) -> str:
    if field not in data:
        found = ", ".join(sorted(map(str, data))) or "none"
        raise ValueError(f"no field {field!r} (fields: {found})")
    text = data[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is {'null' if text is None else type(text).__name__}, not text")
    if not empty and not text.strip():
        raise ValueError(f"field {field!r} is empty")
    return text

"""Tokenise a record: plain text, a prompt/response pair or chat messages."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from easy_context.data_preparation.sources import Record


@dataclass(frozen=True)
class TokenisedDocument:
    """Token ids of one record, or the `problem` that keeps it out.

    Attributes:
        location: file and line (or row) of the record.
        ids: uint32 `[tokens]`, with the separator at the end.
        learn: bool `[tokens]`, False where the label is −100; None where every token is learned.
    """

    location: str
    ids: np.ndarray | None = None
    learn: np.ndarray | None = None
    problem: str | None = None


class DocumentTokenizer:
    """Turns one record into token ids.

    A document starts with the BOS token if the tokenizer puts one before a text by itself, and ends with the
    separator.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or not.
        separator_id: token between documents.
        text_field: the field of plain text, which then is taken whatever else a record holds. None: "text", and a
            record with messages is a chat.

    Attributes:
        fields: those that are looked at.
    """

    def __init__(self, tokenizer: Any, separator_id: int, text_field: str | None = None):
        self.tokenizer = tokenizer
        self.separator_id = separator_id
        self.text_field = text_field or "text"
        self.text_first = text_field is not None
        self.fields = (self.text_field, "messages", "prompt", "response")
        first = tokenizer("a")["input_ids"][:1]
        self.start_ids = first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []

    def __call__(self, record: Record) -> TokenisedDocument:
        """Tokenise one record; what is wrong with it is returned, not raised."""
        if record.data is None:
            return TokenisedDocument(record.location, problem=record.problem)
        try:
            return self._tokenise(record)
        except ValueError as error:
            return TokenisedDocument(record.location, problem=str(error))
        except Exception as error:  # each tokenizer and chat template has errors of its own
            return TokenisedDocument(record.location, problem=f"{type(error).__name__}: {error}")

    def _tokenise(self, record: Record) -> TokenisedDocument:
        kind = self._kind(record.data)
        parts = self._parts(record.data, kind)
        tokens = [self._encode(text) for text, _ in parts]
        # A chat template may spell the BOS token out.
        start = [] if tokens[0][:1] == self.start_ids else self.start_ids
        ids = np.concatenate([start, *tokens, [self.separator_id]]).astype(np.uint32)
        if kind == "text":
            return TokenisedDocument(record.location, ids)
        learn = [np.full(len(start), False)]
        learn += [np.full(len(part), learned) for part, (_, learned) in zip(tokens, parts, strict=True)]
        # A chat has ended already, in its template's own way; a response ends with the separator.
        learn.append(np.array([kind == "pair"]))
        return TokenisedDocument(record.location, ids, np.concatenate(learn))

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"not Unicode: {error}") from error
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _kind(self, data: dict[str, Any]) -> str:
        """Say what a record holds: "text", a "chat", or a "pair" of prompt and response; null counts as not there."""
        given = [name for name in self.fields if data.get(name) is not None]
        if self.text_first and self.text_field in given:
            return "text"
        if "messages" in given:
            return "chat"
        pair = [name for name in given if name in ("prompt", "response")]
        if pair and self.text_field in given and str(data[self.text_field]).strip():
            raise ValueError(
                f"has {self.text_field!r} and also {' and '.join(map(repr, pair))}; --text-field {self.text_field} "
                f"takes {self.text_field!r}, and where that is left out prompt and response are taken"
            )
        return "pair" if pair else "text"

    def _parts(self, data: dict[str, Any], kind: str) -> list[tuple[str, bool]]:
        """Split a record into pieces of text, each with whether it is learned."""
        if kind == "chat":
            return self._chat_parts(data["messages"])
        if kind == "pair":
            return [(_text_of(data, "prompt", empty=True), False), (_text_of(data, "response"), True)]
        return [(_text_of(data, self.text_field), True)]

    def _chat_parts(self, messages: Any) -> list[tuple[str, bool]]:
        """Cut a rendered chat where the assistant's turns start and end.

        The pieces are tokenised apart, as they are when a model answers: the prompt first, then its own tokens.
        """
        _check_messages(messages)
        parts, done = [], ""
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(messages[:turn], generation_prompt=True)
                whole = self._render(messages[: turn + 1])
                if not (prompt.startswith(done) and whole.startswith(prompt)):
                    raise ValueError("the chat template rewrites earlier turns, so labels cannot be placed")
                parts += [(prompt[len(done) :], False), (whole[len(prompt) :], True)]
                done = whole
        return parts

    def _render(self, messages: list[dict], generation_prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        except Exception as error:  # jinja raises what the template's author chose
            raise ValueError(f"the chat template failed: {error}") from error


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


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a list of {role, content}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message has no role")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"the content of a message of role {message['role']!r} is not text")
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("no message of role 'assistant', so nothing to learn")

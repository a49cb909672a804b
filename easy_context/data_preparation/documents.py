"""Tokenise records: plain text, prompt/response pairs and chat messages, in several processes."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from easy_context.data_preparation.sources import Record

BATCH_CHARACTERS = 1 << 19
BATCH_RECORDS = 256


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


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += _size(record.data)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(data: Any) -> int:
    """Return the characters in a record, at any depth; all that is not text counts as a few."""
    size, waiting = 0, [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        else:
            size += len(value) if isinstance(value, str | bytes) else 8
    return size


_worker_tokenizer: DocumentTokenizer | None = None


def _start_worker(document_tokenizer: DocumentTokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = document_tokenizer
    # A terminal sends its interrupt to the workers too; the parent ends them, and its own handler is not for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent has ended, which a killed parent cannot ask for."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _tokenise_batch(batch: list[Record]) -> list[TokenisedDocument]:
    return [_worker_tokenizer(record) for record in batch]


def _documents(batch: list[Record], future: Future, document_tokenizer: DocumentTokenizer) -> list[TokenisedDocument]:
    try:
        return future.result()
    except RecursionError:  # a record nested too deep to be sent to a worker: take the batch here
        return [document_tokenizer(record) for record in batch]


def tokenise(
    records: Iterable[Record], document_tokenizer: DocumentTokenizer, workers: int
) -> Iterator[TokenisedDocument]:
    """Tokenise records in order, with at most two batches a worker in memory.

    Args:
        records: read lazily.
        document_tokenizer: what is applied to each record.
        workers: number of processes; with 1 everything runs in this one. They end at once when the iteration is
            broken off or this process ends.
    """
    if workers == 1:
        yield from map(document_tokenizer, records)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # Forked workers share the imported libraries; spawned ones would import torch again, each.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    context = multiprocessing.get_context(method)
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(document_tokenizer,)) as pool:
        try:
            pending = deque()
            for batch in _batches(records):
                pending.append((batch, pool.submit(_tokenise_batch, batch)))
                if len(pending) >= 2 * workers:
                    yield from _documents(*pending.popleft(), document_tokenizer)
            while pending:
                yield from _documents(*pending.popleft(), document_tokenizer)
        except BaseException:  # an interrupt, or nobody wants the rest: do not wait for what is under way
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise

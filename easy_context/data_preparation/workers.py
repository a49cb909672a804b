"""Tokenise records in several processes, in their order and in bounded memory."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from easy_context.data_preparation.documents import DocumentTokenizer, TokenisedDocument
from easy_context.data_preparation.sources import Record

BATCH_CHARACTERS = 1 << 19
BATCH_RECORDS = 256


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

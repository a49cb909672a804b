"""Tokenise records in several processes, in their order and in bounded memory.

Every worker has a pipe of its own, so nothing is shared between them: a worker that is killed while it writes harms
nobody. In a pool with one queue of results it leaves half a message there, for whose end the pool's reader waits for
ever, because other processes hold the queue open.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from .sources import Record
from .tokenising import DocumentTokenizer, TokenisedDocument

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


class _Worker:
    """A process that tokenises one batch after the other.

    Attributes:
        connection: its pipe; has a result, or ends, when the worker does.
    """

    def __init__(self, context: multiprocessing.context.BaseContext, document_tokenizer: DocumentTokenizer):
        self.connection, end_of_worker = context.Pipe()
        self._process = context.Process(target=_serve, args=(end_of_worker, document_tokenizer), daemon=True)
        self._process.start()
        end_of_worker.close()  # it is the worker's alone, so that the pipe ends with the worker

    def send(self, batch: list[Record]) -> None:
        """Give the worker, which must be idle, a batch.

        Raises:
            RecursionError: a record nested too deep to be sent; nothing was.
            ChildProcessError: the worker has ended.
        """
        try:
            self.connection.send(batch)
        except ConnectionError:
            self._raise_ended()

    def receive(self) -> list[TokenisedDocument]:
        """Return the documents of the batch that it was given.

        Raises:
            ChildProcessError: the worker has ended.
        """
        try:
            return self.connection.recv()
        except (EOFError, OSError):  # nothing of a message, or a part of one
            self._raise_ended()

    def _raise_ended(self) -> None:
        self._process.join()
        raise ChildProcessError(
            f"--num-workers: a tokenising process ended by itself (exit code {self._process.exitcode}; -9 often means "
            "that memory ran out); run again to continue, with fewer workers"
        ) from None

    def end(self) -> None:
        """End the worker at once; it keeps nothing that could be lost."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, document_tokenizer: DocumentTokenizer) -> None:
    # A terminal sends its interrupt to the workers too; the parent ends them, and its own handler is not for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        while True:
            connection.send([document_tokenizer(record) for record in connection.recv()])


def _end_with_parent() -> None:
    """End this worker when its parent has ended, which a killed parent cannot ask for."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def tokenise(
    records: Iterable[Record], document_tokenizer: DocumentTokenizer, workers: int
) -> Iterator[TokenisedDocument]:
    """Tokenise records in order, with at most two batches a worker in memory.

    Args:
        records: read lazily.
        document_tokenizer: what is applied to each record.
        workers: number of processes; with 1 everything runs in this one. They end at once when the iteration is
            broken off or this process ends.

    Raises:
        ChildProcessError: a worker has ended, for want of memory perhaps.
    """
    if workers == 1:
        yield from map(document_tokenizer, records)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    # Forked workers share the imported libraries; spawned ones would import torch again, each.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    context = multiprocessing.get_context(method)
    with contextlib.ExitStack() as ends:
        idle = []
        for _ in range(workers):
            idle.append(_Worker(context, document_tokenizer))
            ends.callback(idle[-1].end)
        for documents in _in_order(_batches(records), document_tokenizer, idle):
            yield from documents


def _in_order(
    batches: Iterator[list[Record]], document_tokenizer: DocumentTokenizer, idle: list[_Worker]
) -> Iterator[list[TokenisedDocument]]:
    """Yield the documents of each batch in order, while every worker has a batch if there is one."""
    most_waiting = 2 * len(idle)
    busy: dict[Connection, tuple[int, _Worker]] = {}
    done: dict[int, list[TokenisedDocument]] = {}
    sent = yielded = 0
    while True:
        while idle and sent - yielded < most_waiting and (batch := next(batches, None)) is not None:
            try:
                idle[-1].send(batch)
            except RecursionError:  # a record nested too deep to be sent to a worker: take the batch here
                done[sent] = [document_tokenizer(record) for record in batch]
            else:
                worker = idle.pop()
                busy[worker.connection] = (sent, worker)
            sent += 1
        if sent == yielded:
            return
        ready = multiprocessing.connection.wait(list(busy), timeout=0 if yielded in done else None)
        for connection in ready:
            number, worker = busy.pop(connection)
            done[number] = worker.receive()
            idle.append(worker)
        if not ready:  # every worker has enough to do while the caller has the documents
            yield done.pop(yielded)
            yielded += 1

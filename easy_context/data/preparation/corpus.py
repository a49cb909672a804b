"""Tokenise the records of a source in several processes and keep the tokens on disk.

`datasets.map` tokenises one shard after the other and caches each in a file of its own, so that an interrupted run
keeps those that are whole, for any number of processes. The processes are started here and not by `map(num_proc=...)`:
its pool waits forever if an idle worker is ended from outside, by a signal to the whole job or because memory ran out.
"""

import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .sources import Record
from .tokenising import DocumentTokenizer

BATCH_BYTES, BATCH_RECORDS = 1 << 19, 256  # records of a batch; the last one may be longer
SHARD_BATCHES, MOST_SHARDS = 8, 64  # a shard is at least 4 MB of text
ROWS_IN_MEMORY = 16  # batches that wait to be written


class Corpus:
    """The tokenised documents of one source.

    Attributes:
        lengths: int64 `[documents]`, tokens of each document, separator included.
        bad_records: `{"location", "problem"}` for every record without a usable document.
        answers_left_out: number of chat answers that are not learned because the template rewrites earlier turns.
        has_prompts: whether some tokens are excluded from the loss.
    """

    def __init__(self, batches: Any):
        """Read a dataset of rows that `_tokenise_batch` made."""
        import pyarrow.compute as pc

        columns = {name: batches.data.column(name) for name in batches.column_names}
        self.lengths = pc.list_flatten(columns["lengths"]).to_numpy()
        self.bad_records = pc.list_flatten(columns["problems"]).to_pylist()
        self.answers_left_out = pc.sum(columns["answers_left_out"]).as_py()
        # Memory-mapped: each chunk holds the tokens of some batches, one document behind the other.
        self._chunks = [chunk.flatten() for chunk in columns["tokens"].chunks]
        self._chunk_starts = np.cumsum([0] + [len(chunk) for chunk in self._chunks])
        self._starts = np.cumsum([0, *self.lengths])
        self.has_prompts = any(len(chunk) and pc.min(chunk).as_py() < 0 for chunk in self._chunks)

    def read(self, document: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (int32) and learn (bool) of tokens `start:end` of a document, both `[end - start]`."""
        first = int(self._starts[document]) + start
        chunk = int(np.searchsorted(self._chunk_starts, first, side="right")) - 1
        tokens = self._chunks[chunk].slice(first - int(self._chunk_starts[chunk]), end - start).to_numpy()
        return np.where(tokens < 0, ~tokens, tokens), tokens >= 0


def tokenise_source(
    records: Iterable[Record],
    document_tokenizer: DocumentTokenizer,
    folder: Path,
    workers: int = 1,
    strict: bool = False,
) -> Corpus:
    """Tokenise records, reusing the shards in `folder` that an earlier run with the same input and tokenizer finished.

    Args:
        records: records, which are read once, in this process.
        document_tokenizer: tokenizer that is applied to each record.
        folder: folder for this source only, named `<source>-<digest>`, for the records and their tokens.
        workers: number of worker processes, which end with this function or with this process.
        strict: whether a bad record is an error instead of being listed.

    Raises:
        ValueError: records cannot be read, or one is bad and `strict` is set.
        ChildProcessError: a worker process ended unexpectedly, for example because memory ran out.
    """
    from datasets import Dataset, concatenate_datasets

    batches = _save_records(records, folder)
    count = min(MOST_SHARDS, -(-len(batches) // SHARD_BATCHES))
    files = [folder / f"tokens-{index:02}-of-{count:02}.arrow" for index in range(count)]
    shards = [batches.shard(count, index) for index in range(count)]
    waiting = [job for job in zip(files, shards, strict=True) if not job[0].exists()]
    with tqdm(desc=f"tokenise {folder.name[:-17]}", unit=" shards", total=count, initial=count - len(waiting)) as bar:
        for file in _map_shards(waiting, document_tokenizer, workers):
            bar.update()
            if strict:
                _refuse_bad_records(Dataset.from_file(str(file)))
    tokens = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    if strict:
        _refuse_bad_records(tokens)
    return Corpus(tokens)


def _refuse_bad_records(tokens: Any) -> None:
    for record in itertools.chain(*tokens["problems"]):
        raise ValueError("--strict: bad record at {location}: {problem}".format(**record))


def _save_records(records: Iterable[Record], folder: Path) -> Any:
    """Return the records on disk, pickled, a batch of them a row."""
    from datasets import Dataset, Features, List, Value
    from datasets.exceptions import DatasetGenerationError

    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob("tmp*"):  # left by `map` in a run that was killed
        unfinished.unlink()
    try:
        return Dataset.from_generator(
            lambda: _batches(records),
            features=Features({"records": List(Value("large_binary"))}),
            cache_dir=str(folder / "records"),
            fingerprint=folder.name[-16:],
            writer_batch_size=ROWS_IN_MEMORY,
        )
    except DatasetGenerationError as error:
        raise error.__cause__ from None


def _batches(records: Iterable[Record]) -> Iterator[dict[str, list[bytes]]]:
    batch, size = [], 0
    for record in records:
        batch.append(_pickled(record))
        size += len(batch[-1])
        if size >= BATCH_BYTES or len(batch) == BATCH_RECORDS:
            yield {"records": batch}
            batch, size = [], 0
    yield {"records": batch}  # perhaps none: a dataset has at least one row


def _pickled(record: Record) -> bytes:
    try:
        return pickle.dumps(record)
    except RecursionError:
        return pickle.dumps(Record(record.location, None, "nested too deep"))


def _map_shards(waiting: list[tuple[Path, Any]], document_tokenizer: DocumentTokenizer, workers: int) -> Iterator[Path]:
    """Tokenise shards into files, a process a shard, and yield each file once it is whole."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    context = multiprocessing.get_context("fork")  # spawned processes would import torch again, each
    running: dict[Any, tuple[Any, Path]] = {}  # by the sentinel of the process
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                file, shard = waiting.pop(0)
                process = context.Process(target=_map_shard, args=(file, shard, document_tokenizer), daemon=True)
                with _signals_held_back():
                    process.start()
                    running[process.sentinel] = process, file
            for sentinel in multiprocessing.connection.wait(list(running)):
                process, file = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    raise ChildProcessError(
                        f"--num-workers: a tokenising process ended by itself (exit code {process.exitcode}; -9 often "
                        "means that memory ran out); run again to continue, with fewer workers"
                    )
                yield file
    finally:
        for process, _ in running.values():
            process.kill()  # it keeps nothing that could be lost
            process.join()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Handle interrupts behind the block: Python drops an exception that a handler raises within a fork."""
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, frame: held.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for caught in held:
            signal.raise_signal(caught)


def _map_shard(file: Path, shard: Any, document_tokenizer: DocumentTokenizer) -> None:
    """Tokenise a shard into a file; the work of one process."""
    import datasets

    # A terminal sends its interrupt to this process too; the parent ends it, and the parent's handler is not for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    datasets.disable_progress_bars()
    columns = {
        "tokens": datasets.List(datasets.Value("int32")),  # ids, inverted (~id) where not learned
        "lengths": datasets.List(datasets.Value("int64")),
        "answers_left_out": datasets.Value("int64"),
        "problems": datasets.List({name: datasets.Value("string") for name in ("location", "problem")}),
    }
    try:
        shard.map(
            functools.partial(_tokenise_batch, document_tokenizer=document_tokenizer),
            remove_columns=["records"],
            features=datasets.Features(columns),
            cache_file_name=str(file),
            new_fingerprint=file.stem,
            writer_batch_size=ROWS_IN_MEMORY,
        )
    except OSError as error:  # a full disk, as a rule
        sys.exit(f"prepare_data.py: {error}")


def _end_with_parent() -> None:
    """End this worker when its parent has ended, which a killed parent cannot ask for."""
    if parent := multiprocessing.parent_process():
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _tokenise_batch(batch: dict[str, list[bytes]], document_tokenizer: DocumentTokenizer) -> dict[str, Any]:
    """Tokenise a batch of pickled records into one row of a token dataset."""
    documents = [document_tokenizer(pickle.loads(record)) for record in batch["records"]]
    good = [document for document in documents if document.problem is None]
    return {
        "tokens": np.concatenate([np.zeros(0, np.int32), *(document.marked_ids() for document in good)]),
        "lengths": [len(document.ids) for document in good],
        "answers_left_out": sum(document.answers_left_out for document in good),
        "problems": [
            {"location": document.location, "problem": document.problem}
            for document in documents
            if document.problem is not None
        ],
    }

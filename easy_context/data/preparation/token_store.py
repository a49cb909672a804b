"""Tokenised documents of one source on disk, in shards, so that an interrupted run continues behind the last whole one.

Shards grow with what is done: so little is lost to an interruption, and a large source still has few files.
"""

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import numpy as np

from .sources import Record
from .tokenising import TokenisedDocument

FIRST_SHARD_TOKENS, MOST_SHARD_TOKENS = 1 << 20, 1 << 24
SHARD_SHARE = 1 / 8  # of the tokens in the shards before it
SHARD_RECORDS = 1 << 16


class TokenStore:
    """Read access to a finished store.

    Attributes:
        lengths: int64 `[documents]`, tokens of each document, separator included.
        problems: number of bad records.
        answers_left_out: answers of chats that are not learned, because the chat template rewrites earlier turns.
        has_prompts: whether some tokens are not to be learned.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._shards = list(_finished_shards(folder))
        metas = [_meta(shard) for shard in self._shards]
        self.problems = sum(meta["problems"] for meta in metas)
        self.answers_left_out = sum(meta["answers_left_out"] for meta in metas)
        lengths = [np.load(shard / "lengths.npy") for shard in self._shards]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
        self._first_document = np.cumsum([0] + [len(part) for part in lengths])
        self._starts = [np.concatenate([[0], np.cumsum(part)]) for part in lengths]
        self._with_prompts = {number for number, shard in enumerate(self._shards) if (shard / "learn.bin").exists()}
        self.has_prompts = bool(self._with_prompts)

    def read(self, document: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (uint32) and learn (bool) of tokens `start:end` of a document, both `[end - start]`."""
        number = int(np.searchsorted(self._first_document, document, side="right")) - 1
        offset = int(self._starts[number][document - self._first_document[number]])
        shard = self._shards[number]
        ids = _read_array(shard / "tokens.bin", np.uint32, offset + start, offset + end)
        if number in self._with_prompts:
            return ids, _read_array(shard / "learn.bin", np.bool_, offset + start, offset + end)
        return ids, np.ones(len(ids), np.bool_)

    def bad_records(self) -> Iterator[dict[str, str]]:
        """Yield `{"location", "problem"}` of every bad record."""
        for shard in self._shards:
            with (shard / "problems.jsonl").open() as file:
                yield from map(json.loads, file)


def _read_array(path: Path, dtype: type, start: int, end: int) -> np.ndarray:
    """Read elements `start:end`; no file stays open, because a large source has more than a process may open."""
    size = np.dtype(dtype).itemsize
    with open(path, "rb", buffering=0) as file:
        file.seek(size * start)
        return np.frombuffer(file.read(size * (end - start)), dtype)


def fill_token_store(
    folder: Path,
    records: Iterable[Record],
    tokenise: Callable[[Iterable[Record]], Generator[TokenisedDocument]],
    strict: bool = False,
    on_document: Callable[[TokenisedDocument], None] = lambda document: None,
) -> TokenStore:
    """Tokenise records into shards, skipping those that finished shards of an earlier run hold already.

    Args:
        folder: of this source.
        records: every record, in the same order at each run.
        tokenise: maps records to documents in order; closed when this function ends, however it does.
        strict: raise at the first bad record instead of counting it.
        on_document: called once for each record that is tokenised now, for progress.

    Raises:
        ValueError: a bad record, if strict.
    """
    store = TokenStore(folder)
    bad_record = next(store.bad_records(), None) if strict else None  # that an earlier run only counted
    if bad_record:
        raise _bad_record_error(**bad_record)
    if (folder / "complete").exists():
        return store
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_finished_shards(folder))
    done = sum(_meta(shard)["records"] for shard in shards)
    tokens = int(store.lengths.sum())
    with contextlib.closing(tokenise(itertools.islice(records, done, None))) as documents:
        for number in itertools.count(len(shards)):
            shard = folder / f"shard-{number:05d}"
            most_tokens = min(max(int(tokens * SHARD_SHARE), FIRST_SHARD_TOKENS), MOST_SHARD_TOKENS)
            if not _write_shard(shard, documents, most_tokens, strict, on_document):
                break
            tokens += int(np.load(shard / "lengths.npy").sum())
    (folder / "complete").touch()
    return TokenStore(folder)


def _bad_record_error(location: str, problem: str) -> ValueError:
    return ValueError(f"--strict: bad record at {location}: {problem}")


def _finished_shards(folder: Path) -> Iterator[Path]:
    for number in itertools.count():
        shard = folder / f"shard-{number:05d}"
        if not shard.exists():
            return
        yield shard


def _meta(shard: Path) -> dict[str, int]:
    try:
        meta = json.loads((shard / "meta.json").read_text())
        return {key: int(meta[key]) for key in ("records", "problems", "answers_left_out")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--work-dir: {shard} is damaged ({error}); delete {shard.parent} and run again") from error


def _write_shard(
    shard: Path,
    documents: Iterator[TokenisedDocument],
    most_tokens: int,
    strict: bool,
    on_document: Callable[[TokenisedDocument], None],
) -> bool:
    """Write one shard under a passing name and rename it once whole; return False where no document was left.

    It ends with the document that makes it `most_tokens` or more.
    """
    part = shard.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    lengths: list[int] = []
    records, problems, left_out, tokens, prompts = 0, 0, 0, 0, False
    with (
        (part / "tokens.bin").open("wb") as token_file,
        (part / "learn.bin").open("wb") as learn_file,
        (part / "problems.jsonl").open("w") as problem_file,
    ):
        for document in documents:
            records += 1
            on_document(document)
            if document.problem is not None:
                if strict:
                    raise _bad_record_error(document.location, document.problem)
                problems += 1
                problem_file.write(json.dumps({"location": document.location, "problem": document.problem}) + "\n")
            else:
                token_file.write(document.ids.tobytes())
                learn = np.ones(len(document.ids), np.bool_) if document.learn is None else document.learn
                learn_file.write(learn.tobytes())
                prompts |= document.learn is not None
                left_out += document.answers_left_out
                lengths.append(len(document.ids))
                tokens += len(document.ids)
            if tokens >= most_tokens or records >= SHARD_RECORDS:
                break
    if not records:
        shutil.rmtree(part)
        return False
    if not prompts:
        (part / "learn.bin").unlink()
    np.save(part / "lengths.npy", np.array(lengths, np.int64))
    meta = {"records": records, "problems": problems, "answers_left_out": left_out}
    (part / "meta.json").write_text(json.dumps(meta))
    part.rename(shard)
    return True

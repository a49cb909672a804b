"""Tokenised documents of one source on disk, in shards, so that an interrupted run continues where it was."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from easy_context.data_preparation.documents import TokenisedDocument
from easy_context.data_preparation.sources import Record

SHARD_TOKENS = 1 << 24
SHARD_RECORDS = 1 << 16


class TokenStore:
    """Read access to a finished store.

    Attributes:
        lengths: int64 `[documents]`, tokens of each document, separator included.
        problems: number of bad records.
        has_prompts: whether some tokens are not to be learned.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._shards = list(_finished_shards(folder))
        lengths = [np.load(shard / "lengths.npy") for shard in self._shards]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
        self._first_document = np.cumsum([0] + [len(part) for part in lengths])
        self._starts = [np.concatenate([[0], np.cumsum(part)]) for part in lengths]
        self._maps: dict[Path, np.memmap] = {}
        self.problems = sum(_meta(shard)["problems"] for shard in self._shards)
        self.has_prompts = any((shard / "learn.bin").exists() for shard in self._shards)

    def read(self, document: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (uint32) and learn (bool) of tokens `start:end` of a document, both `[end - start]`."""
        number = int(np.searchsorted(self._first_document, document, side="right")) - 1
        offset = int(self._starts[number][document - self._first_document[number]])
        part = slice(offset + start, offset + end)
        shard = self._shards[number]
        ids = self._map(shard / "tokens.bin", np.uint32)[part]
        if (shard / "learn.bin").exists():
            return ids, self._map(shard / "learn.bin", np.bool_)[part]
        return ids, np.ones(len(ids), np.bool_)

    def bad_records(self) -> Iterator[dict[str, str]]:
        """Yield `{"location", "problem"}` of every bad record."""
        for shard in self._shards:
            with (shard / "problems.jsonl").open() as file:
                yield from map(json.loads, file)

    def _map(self, path: Path, dtype: type) -> np.ndarray:
        if path not in self._maps:
            self._maps[path] = np.memmap(path, dtype, mode="r")
        return self._maps[path]


def fill_token_store(
    folder: Path,
    records: Iterable[Record],
    tokenise: Callable[[Iterable[Record]], Iterator[TokenisedDocument]],
    strict: bool = False,
    on_document: Callable[[TokenisedDocument], None] = lambda document: None,
) -> TokenStore:
    """Tokenise records into shards, skipping those that finished shards of an earlier run hold already.

    Args:
        folder: of this source.
        records: every record, in the same order at each run.
        tokenise: maps records to documents in order.
        strict: raise at the first bad record instead of counting it.
        on_document: called once for each record that is tokenised now, for progress.

    Raises:
        ValueError: a bad record, if strict.
    """
    if (folder / "complete").exists():
        return TokenStore(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_finished_shards(folder))
    done = sum(_meta(shard)["records"] for shard in shards)
    documents = tokenise(itertools.islice(records, done, None))
    for number in itertools.count(len(shards)):
        if not _write_shard(folder / f"shard-{number:05d}", documents, strict, on_document):
            break
    (folder / "complete").touch()
    return TokenStore(folder)


def _finished_shards(folder: Path) -> Iterator[Path]:
    for number in itertools.count():
        shard = folder / f"shard-{number:05d}"
        if not shard.exists():
            return
        yield shard


def _meta(shard: Path) -> dict[str, int]:
    try:
        return {key: int(json.loads((shard / "meta.json").read_text())[key]) for key in ("records", "problems")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--work-dir: {shard} is damaged ({error}); delete {shard.parent} and run again") from error


def _write_shard(
    shard: Path,
    documents: Iterator[TokenisedDocument],
    strict: bool,
    on_document: Callable[[TokenisedDocument], None],
) -> bool:
    """Write one shard under a passing name and rename it once whole; return False where no document was left."""
    part = shard.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    lengths: list[int] = []
    records, problems, tokens, prompts = 0, 0, 0, False
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
                    raise ValueError(f"--strict: bad record at {document.location}: {document.problem}")
                problems += 1
                problem_file.write(json.dumps({"location": document.location, "problem": document.problem}) + "\n")
            else:
                token_file.write(document.ids.tobytes())
                learn = np.ones(len(document.ids), np.bool_) if document.learn is None else document.learn
                learn_file.write(learn.tobytes())
                prompts |= document.learn is not None
                lengths.append(len(document.ids))
                tokens += len(document.ids)
            if tokens >= SHARD_TOKENS or records >= SHARD_RECORDS:
                break
    if not records:
        shutil.rmtree(part)
        return False
    if not prompts:
        (part / "learn.bin").unlink()
    np.save(part / "lengths.npy", np.array(lengths, np.int64))
    (part / "meta.json").write_text(json.dumps({"records": records, "problems": problems}))
    part.rename(shard)
    return True

"""Read records, one at a time, from text, JSONL and parquet files, saved datasets and the hub."""

import argparse
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.files import format_suffix, open_unpacked
from ..datasets import open_dataset
from .input_files import JSON_SUFFIXES, TEXT_SUFFIXES, list_files

HUB_PREFIX = "hub:"
BATCH_ROWS = 16  # of a table that are in memory at once


@dataclass(frozen=True)
class Source:
    """One named input; the shares of the sources in all tokens are the mix that length upsampling keeps."""

    name: str
    location: str

    @property
    def on_hub(self) -> bool:
        return self.location.startswith(HUB_PREFIX)


@dataclass(frozen=True)
class Record:
    """One raw record: `data` as it was read, or None and the `problem` that made it unreadable."""

    location: str
    data: dict[str, Any] | None
    problem: str | None = None


def parse_source(text: str) -> Source:
    """Read `PATH`, `NAME=PATH` or `[NAME=]hub:DATASET[:CONFIG[:SPLIT]]`; an argparse type.

    Raises:
        argparse.ArgumentTypeError: the path does not exist or has no usable file, or no path or dataset is given.
    """
    name, sign, location = text.partition("=")
    if not sign or not re.fullmatch(r"[\w.-]+", name) or Path(text).exists():
        name, location = "", text
    if not location.strip():
        raise argparse.ArgumentTypeError(f"no path in {text!r}; give a file, a folder or {HUB_PREFIX}DATASET")
    if location.startswith(HUB_PREFIX) and not re.fullmatch(
        r"[\w./-]+(:[^:]*){0,2}", location.removeprefix(HUB_PREFIX)
    ):
        raise argparse.ArgumentTypeError(f"{text!r}: give {HUB_PREFIX}DATASET[:CONFIG[:SPLIT]]")
    source = Source(name or _default_name(location), location)
    if not source.on_hub:
        try:
            list_files(Path(location))
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return source


def _default_name(location: str) -> str:
    if location.startswith(HUB_PREFIX):
        return re.sub(r"[^\w.-]+", "-", location.removeprefix(HUB_PREFIX))
    return re.sub(r"[^\w.-]+", "-", Path(location).resolve().name.split(".")[0]) or "source"


def read_source(
    source: Source,
    document_start: str | None = None,
    fields: Collection[str] | None = None,
    text_field: str = "text",
) -> Iterator[Record]:
    """Yield every record of a source in a fixed order, holding one at a time.

    Args:
        source: what to read.
        document_start: regular expression; in text files a document begins at each line it matches. Without it a text
            file is one document.
        fields: those that are read of JSON, parquet and saved datasets; the others are None in the records. None: all.
        text_field: the field in which the records of text files have their text.

    Raises:
        ValueError: a file or dataset that cannot be read; names it.
    """
    if source.on_hub:
        yield from _naming(source.location, _read_hub(source.location))
        return
    for path in list_files(Path(source.location)):
        yield from _naming(path, _read_path(path, document_start, fields, text_field))


def _naming(location: Path | str, records: Iterable[Record]) -> Iterator[Record]:
    """Pass records on; what the libraries of compression, parquet and datasets raise does not say where."""
    try:
        yield from records
    except Exception as error:  # each library has classes of its own
        raise ValueError(
            f"--input: {location} cannot be read ({type(error).__name__}: {error}); repair it or leave it out"
        ) from error


def _read_path(
    path: Path, document_start: str | None, fields: Collection[str] | None, text_field: str
) -> Iterator[Record]:
    if path.is_dir():
        return _read_saved_dataset(path, fields)
    if format_suffix(path) in TEXT_SUFFIXES:
        return _read_text(path, document_start, text_field)
    if format_suffix(path) in JSON_SUFFIXES:
        return _read_json(path, fields)
    return _read_parquet(path, fields)


def _read_text(path: Path, document_start: str | None, text_field: str) -> Iterator[Record]:
    pattern = re.compile(document_start) if document_start else None
    lines: list[bytes] = []
    first_line = 1
    with open_unpacked(path) as file:
        for number, line in enumerate(file, start=1):
            if pattern and lines and pattern.search(line.decode(errors="replace")):
                yield _text_record(f"{path}:{first_line}", lines, text_field)
                lines, first_line = [], number
            lines.append(line)
    yield _text_record(f"{path}:{first_line}", lines, text_field)


def _text_record(location: str, lines: list[bytes], text_field: str) -> Record:
    try:
        text = b"".join(lines).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        return Record(location, None, f"not UTF-8: {error}")
    return Record(location, {text_field: text})


def _read_json(path: Path, fields: Collection[str] | None) -> Iterator[Record]:
    """Yield a record for each line, or for each element of a .json file that is one list."""
    with open_unpacked(path) as file:
        if format_suffix(path) == ".json" and file.read(1) == b"[":
            file.seek(0)
            for number, data in enumerate(json.load(file), start=1):
                yield _object_record(f"{path}:{number}", data, fields)
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _json_record(f"{path}:{number}", line, fields)


def _json_record(location: str, line: bytes, fields: Collection[str] | None) -> Record:
    try:
        data = json.loads(line)
    except ValueError as error:  # also a line that is not UTF-8
        return Record(location, None, f"not JSON: {error}")
    except RecursionError:
        return Record(location, None, "nested too deep")
    return _object_record(location, data, fields)


def _object_record(location: str, data: Any, fields: Collection[str] | None) -> Record:
    if not isinstance(data, dict):
        return Record(location, None, f"a JSON object is needed, this is a {type(data).__name__}")
    return Record(location, {name: value if fields is None or name in fields else None for name, value in data.items()})


def _read_parquet(path: Path, fields: Collection[str] | None) -> Iterator[Record]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = _columns(file.schema_arrow.names, fields)
        yield from _table_records(path, file.iter_batches(BATCH_ROWS, columns=columns), file.schema_arrow.names)


def _read_saved_dataset(path: Path, fields: Collection[str] | None) -> Iterator[Record]:
    dataset = open_dataset(str(path), "--input").with_format("arrow")
    columns = _columns(dataset.column_names, fields)
    yield from _table_records(path, dataset.select_columns(columns).iter(BATCH_ROWS), dataset.column_names)


def _columns(names: list[str], fields: Collection[str] | None) -> list[str]:
    """Return the columns to read: those in `fields`, else the first, because a table without columns has no rows."""
    return [name for name in names if fields is None or name in fields] or names[:1]


def _table_records(path: Path, batches: Iterable[Any], names: list[str]) -> Iterator[Record]:
    """Yield the rows of Arrow tables, with all `names` as fields, one at a time, so that a bad one spoils no other."""
    row = 0
    for batch in batches:
        for start in range(batch.num_rows):
            row += 1
            try:
                (data,) = batch.slice(start, 1).to_pylist()
            except ValueError as error:  # a string that is not UTF-8
                yield Record(f"{path}:{row}", None, f"cannot be read: {error}")
            else:
                yield Record(f"{path}:{row}", dict.fromkeys(names) | data)


def _read_hub(location: str) -> Iterator[Record]:
    from datasets import load_dataset

    name, config, split = (location.removeprefix(HUB_PREFIX).split(":") + ["", ""])[:3]
    dataset = load_dataset(name, config or None, split=split or "train", streaming=True)
    for row, data in enumerate(dataset, start=1):
        yield Record(f"{location}:{row}", data)

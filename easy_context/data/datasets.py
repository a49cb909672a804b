"""Open a dataset: one set of rules for training, evaluation and data preparation."""

import contextlib
import json
import lzma
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.errors import first_line
from ..common.files import format_suffix, open_unpacked
from ..common.notes import say_once

HELD_OUT_FIRST = ("test", "validation", "train")  # the order in which evaluation looks for a split
JSON_LINES = (".jsonl", ".ndjson")
_FILE_KINDS = {".parquet": "parquet", ".json": "json", **dict.fromkeys(JSON_LINES, "json")}
_EXPECTED = "give a hub name, a folder of save_to_disk, or parquet, json or jsonl files of one kind"


def open_dataset(
    name: str,
    flag: str,
    preferred: Sequence[str] = ("train",),
    split: str | None = None,
    subset: str | None = None,
) -> Any:
    """Open one split of a dataset.

    Args:
        name: a hub name; a folder written by `save_to_disk`, or a folder of several, each of which is a split (the
            output of prepare_data.py); a parquet, json or jsonl file, or a folder of those.
        flag: the flag that `name` comes from, for errors.
        preferred: split names in order of preference, used if there are several splits.
        split: the split to open, regardless of `preferred`.
        subset: configuration of a dataset on the hub; None for its default.

    Returns:
        A `datasets.Dataset` with at least one row.

    Raises:
        ValueError: the dataset or split does not exist, its format is not supported, a file is damaged, or it is empty.
    """
    import datasets

    if os.environ.get("RANK", "0") != "0":
        datasets.disable_progress_bars()  # rank 0 shows them
    parts = [part.name for part in saved_parts(Path(name))] if name else []
    if parts:
        name, split = str(Path(name, choose_split(parts, f"{flag} {name}", preferred, split))), None
    what, path = f"{flag} {name}", Path(name)
    saved = bool(name) and is_saved_dataset(path)
    if subset and (saved or path.is_file()):
        raise ValueError(f"--subset {subset}: {what} is on disk and has none; leave the flag out")
    files = _data_files(path, what) if name and path.exists() and not saved else []
    try:
        opened = datasets.load_from_disk(name) if saved else _load(name, files, subset)
    except (StopIteration, IndexError):  # an empty file or folder
        opened = {}
    except Exception as error:  # malformed files and unknown hub names raise a dozen types
        if "corresponds to no data" not in str(error):
            reason = _first_bad_line(files) or first_line(error.__cause__ or error)
            raise ValueError(f"{what} cannot be read as a dataset ({reason}): {_EXPECTED}") from error
        opened = {}
    if isinstance(opened, datasets.DatasetDict):
        key = choose_split(list(opened), what, preferred, split)
        opened, what = opened[key], f"{what}, split {key},"
    elif split:
        raise ValueError(f"--split {split}: {what} has no splits; leave the flag out")
    if not len(opened):
        raise ValueError(f"{what} has no rows: name another dataset")
    return opened


def is_saved_dataset(path: Path) -> bool:
    """Return whether `path` was written by the `save_to_disk` of one dataset."""
    return (path / "dataset_info.json").exists()


def saved_parts(path: Path) -> list[Path]:
    """Return the datasets in a folder: the splits that `save_to_disk` or prepare_data.py wrote into it."""
    return sorted(part for part in path.iterdir() if is_saved_dataset(part)) if path.is_dir() else []


def _load(name: str, files: list[Path], subset: str | None) -> Any:
    """Return the Dataset of `files`, or of the hub where there are none; a DatasetDict if they tell splits apart."""
    import datasets

    path = Path(name)
    if files == [path]:
        return datasets.load_dataset(_FILE_KINDS[format_suffix(path)], data_files=name)["train"]
    if files:
        builder = datasets.load_dataset_builder(str(path.resolve()), subset)
        read = {Path(file).resolve() for split in builder.config.data_files.values() for file in split}
        if left_out := [str(file) for file in files if file.resolve() not in read]:
            raise ValueError(f"{', '.join(left_out[:3])} would be left out, because other names tell splits apart")
        builder.download_and_prepare()
        opened = builder.as_dataset()
        return opened["train"] if list(opened) == ["train"] else opened
    if not name or name.startswith((os.sep, ".", "~")) or name.count(os.sep) > 1:
        raise FileNotFoundError("no such file or folder")
    return datasets.load_dataset(name, subset)


def _data_files(path: Path, what: str) -> list[Path]:
    """Return the parquet or JSON files that `path` is or holds, all of one kind."""
    files = [path]
    if path.is_dir():
        inside = [file for file in sorted(path.rglob("*")) if format_suffix(file) in _FILE_KINDS]
        hidden = (".", "__")  # left out by the datasets library, too
        files = [file for file in inside if not any(part.startswith(hidden) for part in file.relative_to(path).parts)]
    kinds = {_FILE_KINDS.get(format_suffix(file)) for file in files}
    if len(kinds) != 1 or None in kinds:
        found = ", ".join(sorted({format_suffix(file) or file.name for file in files})) or "nothing of the kind"
        raise ValueError(f"{what} holds {found}: {_EXPECTED}")
    return files


def _first_bad_line(files: list[Path]) -> str | None:
    """Return the JSONL line that is not a JSON object; None if all lines are, or the files cannot be unpacked."""
    for file in files:
        if format_suffix(file) in JSON_LINES:
            with contextlib.suppress(OSError, EOFError, lzma.LZMAError), open_unpacked(file) as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip() and (problem := _problem_of_line(line)):
                        return f"{file}: line {number} {problem}"
    return None


def _problem_of_line(line: bytes) -> str | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {first_line(error)}"
    return None if isinstance(value, dict) else f"is not a JSON object: {value!r:.60}"


def choose_split(splits: list[str], what: str, preferred: Sequence[str] = ("train",), split: str | None = None) -> str:
    """Return `split`, else the first of the preferred splits that exists, else the only one.

    Raises:
        ValueError: there is none to return; the message begins with `what`.
    """
    if split is not None:
        if split not in splits:
            raise ValueError(f"--split {split}: {what} has {', '.join(splits)}")
        return split
    chosen = next((key for key in preferred if key in splits), splits[0] if len(splits) == 1 else None)
    if chosen is None:
        raise ValueError(
            f"{what} has splits {', '.join(sorted(splits))} and none called {' or '.join(preferred)}: name the folder "
            "of one, or in evaluation --split"
        )
    if len(splits) > 1:
        say_once(f"{what}: split {chosen} of {', '.join(splits)}")
    return chosen

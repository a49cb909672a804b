"""Helpers for files: read compressed ones, check that a path is writable, write atomically, store NaN as null."""

import bz2
import gzip
import itertools
import lzma
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

OPENERS: dict[str, Callable[..., IO]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def open_unpacked(path: Path, mode: str = "rb", **options: Any) -> IO:
    """Open a file for reading; a file with a suffix in `OPENERS` is decompressed."""
    return OPENERS.get(path.suffix.lower(), open)(path, mode, **options)


def format_suffix(path: Path) -> str:
    """Return the suffix of the format in lower case, which comes before a suffix of compression."""
    return (path.with_suffix("") if path.suffix.lower() in OPENERS else path).suffix.lower()


def null_for_nan(value: Any) -> Any:
    """Return the same dicts and lists with None for every NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: null_for_nan(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [null_for_nan(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that `path` contains either the old or the complete new text.

    Args:
        path: the file; its folder is made if it does not exist.
        text: content, written as UTF-8 without changes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def first_free(folder: Path, name: str) -> Path:
    """Return the first path that does not exist in `folder`, with 1, 2, 3, ... in place of {} in `name`."""
    return next(path for number in itertools.count(1) if not (path := folder / name.format(number)).exists())


def nearest_existing(path: Path) -> Path:
    """Return `path` itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def probe_folder(folder: Path) -> None:
    """Raise OSError unless a file can be written in `folder`; mode bits do not show read-only or full disks."""
    tempfile.TemporaryFile(dir=folder).close()


def check_writable(path: Path, flag: str) -> None:
    """Raise ValueError with the flag's name unless `path` can be written; existing files are not changed."""
    try:
        folder = nearest_existing(path.parent)  # raises if a name is too long
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if path.exists():
            with path.open("a"):  # checks that the file is writable, and adds nothing
                pass
        probe_folder(folder)
    except OSError as reason:
        raise ValueError(f"{flag} {path}: cannot be written ({reason.strerror}); name another file") from reason

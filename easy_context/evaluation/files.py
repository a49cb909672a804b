"""Result files that are whole or not there: a run that fails or is killed leaves no half of one."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file under another name and then renames it, so that `path` holds either the old text or all of the new.

    Args:
        path: the file; its folder is made if need be.
        text: UTF-8, written as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_writable(path: Path, flag: str) -> None:
    """Raises ValueError naming the flag unless `path` can be written; leaves no trace, whatever is there already."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if path.exists():
            with path.open("a"):  # adds nothing
                pass
        tempfile.TemporaryFile(dir=folder).close()  # the mode bits do not know of read-only or full disks
    except OSError as reason:
        raise ValueError(f"{flag} {path}: cannot be written ({reason.strerror}); name another file") from reason

"""The output folders of prepare_data.py, which are built in a temporary folder and moved into place when complete."""

import contextlib
import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...common.files import first_free, nearest_existing

MARK = ".prepare_data"
REPORT_KEYS = {"run", "sources", "splits", "retrieval"}


def is_own(folder: Path) -> bool:
    """Return whether `folder` was made by prepare_data.py."""
    return (folder / MARK).is_file()


def read_report(output_dir: Path) -> dict[str, Any] | None:
    """Return the report of a finished run, None if there is none.

    Raises:
        ValueError: a `report.json` that no run can have written.
    """
    path = output_dir / "report.json"
    if not path.exists():
        return None
    try:
        report = json.loads(path.read_text())
        if not isinstance(report, dict) or not report.keys() >= REPORT_KEYS:
            raise ValueError(f"it must hold {', '.join(sorted(REPORT_KEYS))}")
    except ValueError as error:
        raise ValueError(
            f"--output-dir {output_dir}: {path} is damaged ({error}); replace it with --overwrite"
        ) from error
    return report


def check_folder(flag: str, folder: Path) -> None:
    """Check that a folder can be created and contains no files of other programs, without changing anything.

    Raises:
        ValueError: the check fails; the message names `flag`, the folder and the remedy.
    """
    try:
        existing = nearest_existing(folder)
    except OSError as error:  # a name that is too long
        raise ValueError(f"{flag} {folder}: cannot be made ({error.strerror}); take another folder") from error
    if not existing.is_dir():
        raise ValueError(f"{flag} {folder}: {existing} is a file, a folder is needed; take another")
    if existing == folder and any(folder.iterdir()) and not is_own(folder):
        raise ValueError(
            f"{flag} {folder}: is not empty and was not made by prepare_data.py, so nothing in it is touched; "
            "take a new or an empty folder"
        )


def check_output_dir(folder: Path) -> None:
    """Check that a new folder can replace the output folder, without changing anything.

    Raises:
        ValueError: as for `check_folder`, or if the folder cannot be renamed.
    """
    check_folder("--output-dir", folder)
    if os.path.ismount(folder) or Path.cwd().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--output-dir {folder}: cannot be replaced by a new folder, because it is a mount point or holds the "
            "current folder; take a folder in it"
        )


def folder_aside(output_dir: Path) -> Path:
    """Return the folder beside the output folder in which a run works until its results are whole."""
    resolved = output_dir.resolve()
    return resolved.with_name(f"{resolved.name}.part")


@contextlib.contextmanager
def claim_folder(flag: str, folder: Path) -> Iterator[None]:
    """Make the folder, mark it as one whose contents later runs may continue or replace, and hold it for one run.

    Raises:
        ValueError: as `check_folder`, the folder cannot be made or written, or another run holds it.
    """
    check_folder(flag, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = (folder / MARK).open("a+")
    except OSError as error:
        raise ValueError(f"{flag}: {folder} cannot be written ({error.strerror}); take another folder") from error
    with mark:
        try:
            fcntl.lockf(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this process's alone: it ends with it, whatever ends it
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(
                f"{flag}: another prepare_data.py is writing in {folder}; wait for it or take another folder"
            ) from error
        except OSError as error:  # a file system without locks
            warnings.warn(f"{flag}: {folder} cannot be locked ({error.strerror}); run once at a time", stacklevel=2)
        yield


def swap_in(new: Path, output_dir: Path) -> Path | None:
    """Replace the output folder by a complete new folder.

    Args:
        new: on the same file system; its list of files is added to it.
        output_dir: replaced. It is kept under another name if it holds a file that is not on its own list.

    Returns:
        Where the old folder is kept, None if it is not.
    """
    (new / MARK).write_text("".join(f"{name}\n" for name in sorted(_files_in(new))))
    output_dir = output_dir.resolve()
    if not output_dir.exists():
        new.rename(output_dir)
        return None
    old = first_free(output_dir.parent, f"{output_dir.name}.old-{{}}")
    output_dir.rename(old)
    new.rename(output_dir)
    if _files_in(old) <= ({MARK, *(old / MARK).read_text().splitlines()} if is_own(old) else set()):
        shutil.rmtree(old)
        return None
    return old


def _files_in(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths}


def remove_aside(aside: Path) -> None:
    """Remove the folder aside after a run that is finished; what others put there stays."""
    for name in ("tokens", "new"):
        shutil.rmtree(aside / name, ignore_errors=True)
    (aside / MARK).unlink()
    with contextlib.suppress(OSError):  # it is not empty
        aside.rmdir()

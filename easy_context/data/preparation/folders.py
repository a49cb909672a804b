"""The folders that prepare_data.py writes: it marks its own, leaves all others alone, and swaps rows in once whole."""

import contextlib
import fcntl
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...common.files import nearest_existing

MARK = ".prepare_data"
STAGING = "new.part"
WORK = "work"
RESULTS = ("train", "validation", "bad_records.jsonl", "lengths.png", "report.json")
REPORT_KEYS = {"run", "sources", "splits", "retrieval"}

STORE = r"[\w.-]+-[0-9a-f]{16}"
STORE_FILE = rf"{STORE}/(complete|shard-\d+(\.part)?/(tokens\.bin|learn\.bin|problems\.jsonl|lengths\.npy|meta\.json))"
DATASET_FILE = r"(rows|data-\d+-of-\d+|cache-\w+)\.arrow|dataset_info\.json|state\.json"
OWN_FILE = re.compile(
    rf"({re.escape(STAGING)}/)?(train|validation)(\.part(/dataset)?)?/({DATASET_FILE})"
    rf"|{re.escape(STAGING)}/({'|'.join(map(re.escape, RESULTS[2:]))})"
    rf"|{WORK}/{STORE_FILE}"
)


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
    return {"notes": [], **report}  # earlier versions wrote no notes


def is_own(folder: Path) -> bool:
    """Whether `folder` was made by prepare_data.py: marked, or from before there were marks."""
    if (folder / MARK).is_file():
        return True
    try:
        if read_report(folder) is not None:
            return True
    except ValueError:
        return False
    files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()]
    return bool(files) and all(re.fullmatch(STORE_FILE, file) for file in files)


def is_own_file(folder: Path, file: Path) -> bool:
    """Whether `file`, which need not be below it, is one that prepare_data.py writes into a `folder` of its own."""
    if not file.is_relative_to(folder):
        return False
    name = file.relative_to(folder).as_posix()
    return name in (MARK, *RESULTS) or bool(OWN_FILE.fullmatch(name) or re.fullmatch(STORE_FILE, name))


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that cannot be written or that holds what others wrote; changes nothing.

    Raises:
        ValueError: names `flag`, the folder and the remedy.
    """
    existing = nearest_existing(folder)
    if not existing.is_dir():
        raise ValueError(f"{flag} {folder}: {existing} is a file, a folder is needed; take another")
    if existing == folder and any(folder.iterdir()) and not is_own(folder):
        raise ValueError(
            f"{flag} {folder}: is not empty and was not made by prepare_data.py, so nothing in it is touched; "
            "take a new or an empty folder"
        )


@contextlib.contextmanager
def claim_folder(flag: str, folder: Path) -> Iterator[None]:
    """Make the folder, mark it as one whose contents later runs may continue or replace, and hold it for one run.

    Raises:
        ValueError: as `check_folder`, the folder cannot be made or written, or another run holds it.
    """
    check_folder(flag, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text("Made by prepare_data.py, which continues or replaces its own files here.\n")
        mark = (folder / MARK).open("r+")
    except OSError as error:
        raise ValueError(f"{flag} {folder}: cannot be written ({error.strerror}); take another folder") from error
    with mark:
        try:
            fcntl.lockf(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this process's alone: it ends with it, whatever ends it
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(
                f"{flag} {folder}: another prepare_data.py is writing there; wait for it or take another folder"
            ) from error
        except OSError as error:  # a file system without locks
            warnings.warn(f"{flag} {folder}: cannot be locked ({error.strerror}); run once at a time", stacklevel=2)
        yield


def refuse_foreign_files(output_dir: Path) -> None:
    """Check that the folders to be replaced hold only what prepare_data.py writes.

    Raises:
        ValueError: names the first file that somebody else put there.
    """
    for name in (*RESULTS[:2], STAGING, WORK):
        folder = output_dir / name
        files = [folder] if folder.is_symlink() or folder.is_file() else folder.rglob("*")
        for file in files:
            is_folder = file.is_dir() and not file.is_symlink()
            if not is_folder and not OWN_FILE.fullmatch(file.relative_to(output_dir).as_posix()):
                raise ValueError(
                    f"--output-dir {output_dir}: {file} is not from prepare_data.py and would be lost; "
                    "move it away or take another folder"
                )


def install_results(output_dir: Path) -> None:
    """Replace the results of an earlier run by the whole new ones in the staging folder, the report last.

    Raises:
        ValueError: as `refuse_foreign_files`; then nothing is replaced.
    """
    refuse_foreign_files(output_dir)
    for name in reversed(RESULTS):  # the report first: without it the rows do not count as finished
        path = output_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name in RESULTS:
        if (output_dir / STAGING / name).exists():
            (output_dir / STAGING / name).rename(output_dir / name)


def remove_token_stores(folder: Path) -> None:
    """Remove the token stores in `folder`, and `folder` if nothing else is in it."""
    for path in folder.iterdir():
        if re.fullmatch(STORE, path.name):
            shutil.rmtree(path)
    if not any(folder.iterdir()):
        folder.rmdir()

"""Files of a `checkpoint-<step>/`: synced to disk, listed with checksums, and renamed when all are complete."""

import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

from ...common.errors import first_line
from ...common.files import write_whole

MANIFEST = "manifest.json"
PARTIAL = ".saving-checkpoint"
FORMAT = 2
SECONDS_BETWEEN_LOOKS = 0.2  # for the files of other processes
SECONDS_UNTIL_VISIBLE = 60.0  # a network file system shows a new folder to other machines some time later
_NAME = re.compile(r"checkpoint-(\d+)")


def file_of(process: int) -> str:
    """Return the name of the file that a process writes."""
    return f"rank-{process:05d}.pt"


def read_states(folder: Path, processes: int) -> list[dict[str, Any]]:
    """Return the state that each process saved; tensors are read from disk when they are used."""
    import torch

    return [
        torch.load(folder / file_of(process), map_location="cpu", weights_only=True, mmap=True)
        for process in range(processes)
    ]


def write_state(folder: Path, process: int, state: dict[str, Any]) -> None:
    """Write one process's file, sync it to disk, and write its manifest entry next to it."""
    import torch

    path = folder / file_of(process)
    try:
        torch.save(state, path)
    except RuntimeError as error:  # whatever the system's reason was
        raise OSError(f"{path.name} cannot be written, perhaps as the disk is full: {first_line(error)}") from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    entry = {"size": path.stat().st_size, "sha256": digest}
    write_whole(folder / _report_of(process), json.dumps(entry))


def _report_of(process: int) -> str:
    return f"{file_of(process)}.written"


def wait_for_files(folder: Path, processes: int, failed: threading.Event) -> dict[str, dict[str, Any]]:
    """Wait until every process has written its file; return size and checksum of each.

    Raises:
        OSError: a process could not write its file, as `failed` tells.
    """
    files = {}
    for process in range(processes):
        report = folder / _report_of(process)
        while not report.exists():
            if failed.wait(SECONDS_BETWEEN_LOOKS):
                raise OSError("another process could not write its file")
        files[file_of(process)] = json.loads(report.read_text())
        report.unlink()
    return files


def make_partial(folder: Path) -> Path:
    """Return a new empty folder for the files of a checkpoint that is not whole yet."""
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def not_visible(partial: Path) -> str | None:
    """Return why this process cannot write into the folder that the first process has made; None if it can."""
    deadline = time.monotonic() + SECONDS_UNTIL_VISIBLE
    while not partial.is_dir():
        if time.monotonic() > deadline:
            return f"{socket.gethostname()} does not see {partial}: all machines must share --output-dir"
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return None


def finish(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest and give the folder its name: from then on the checkpoint exists."""
    partial, target = folder / PARTIAL, folder / f"checkpoint-{manifest['step']}"
    with open(partial / MANIFEST, "w") as file:
        json.dump({"format": FORMAT} | manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    if target.exists():  # damaged, or a run with --resume none came by again
        shutil.rmtree(target)
    partial.rename(target)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a run's folder by step, whole or not, the latest first."""
    steps = {int(match[1]): path for path in folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(steps.items(), reverse=True))


def newest_in(folder: Path) -> str | None:
    """Return the name of the latest checkpoint that has a manifest; None if there is none."""
    return next((path.name for path in checkpoints_in(folder).values() if (path / MANIFEST).exists()), None)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the latest `keep` checkpoints."""
    for old in list(checkpoints_in(folder).values())[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def missing_room(folder: Path, size: int) -> str | None:
    """Return why `size` bytes cannot be written in `folder`; None if they can."""
    free = shutil.disk_usage(folder).free
    return f"it takes {size / 1e9:.3g} GB and the disk has {free / 1e9:.3g} GB left" if free < size else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are there, with their sizes.

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format {manifest['format']} is not {FORMAT}")
        sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
        _ = [manifest[key] for key in ("step", "processes", "settings")]
    except FileNotFoundError:
        raise ValueError(f"it holds no {MANIFEST}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its {MANIFEST} cannot be read ({first_line(error)})") from error
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found != size:
            raise ValueError(f"{name} has {found} bytes and should have {size}")
    return manifest


def damage(folder: Path, manifest: dict[str, Any], process: int, processes: int) -> str | None:
    """Return a checkpoint's checksum problem, or None. The processes share the work of reading."""
    for name in sorted(manifest["files"])[process::processes]:
        with open(folder / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest["files"][name]["sha256"]:
                return f"{name} is damaged: its checksum is another"
    return None

"""Files of a `checkpoint-<step>/`: written through to the disk, listed with checksums, renamed once they are whole."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
PARTIAL = ".saving-checkpoint"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")


def file_of(process: int) -> str:
    """Return the name of the file that a process writes."""
    return f"rank-{process:05d}.pt"


def read(folder: Path, process: int) -> dict[str, Any]:
    """Return what one process saved; tensors are read when they are used."""
    import torch

    return torch.load(folder / file_of(process), map_location="cpu", weights_only=True, mmap=True)


def write_own(path: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Write one process's file through to the disk; return its entry of the manifest."""
    import torch

    torch.save(state, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {path.name: {"size": path.stat().st_size, "sha256": digest}}


def finish(folder: Path, step: int, manifest: dict[str, Any]) -> None:
    """Write the manifest and give the folder its name: from then on the checkpoint exists."""
    partial, target = folder / PARTIAL, folder / f"checkpoint-{step}"
    with open(partial / MANIFEST, "w") as file:
        json.dump({"step": step} | manifest, file, indent=2)
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


def damage(folder: Path, manifest: dict[str, Any], process: int, processes: int) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing is.

    Every process looks at all sizes; the reading for checksums is shared out between them.
    """
    if manifest["format"] != FORMAT:
        return f"format {manifest['format']} is not {FORMAT}"
    for name, entry in manifest["files"].items():
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size != entry["size"]:
            return f"{name} has {size} bytes and should have {entry['size']}"
    for name in sorted(manifest["files"])[process::processes]:
        with open(folder / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest["files"][name]["sha256"]:
                return f"{name} is damaged: its checksum is another"
    return None

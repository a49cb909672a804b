"""A JSONL file of finished cells that a later run continues, and never one with other settings.

The first line holds the settings; every further line is one finished cell. Results that do not belong together never
share a file: a run with other settings is refused. More lengths or depths are welcome.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

_PROBED_BLOCKS, _BLOCK_BYTES = 16, 4096


@dataclass(frozen=True)
class Cell:
    """One square of the heatmap; depth is None for tasks without one."""

    task: str
    length: int
    depth: float | None


class Journal:
    """The JSONL file of a run. Only the process that writes results may hold one."""

    def __init__(self, path: Path, settings: dict):
        """Opens a new file, or an earlier one to go on with.

        Raises:
            ValueError: the file belongs to other settings, or is something else.
        """
        self.path = path
        self.finished: dict[Cell, dict] = {}
        settings = json.loads(json.dumps(settings))  # as they will be when read back
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # the last run was killed while it wrote
            lines.pop()
            path.write_text("".join(lines))
        if lines:
            self._read(lines, settings)
        else:
            path.write_text(json.dumps({"settings": settings}) + "\n")

    def _read(self, lines: list[str], settings: dict) -> None:
        try:
            records = [json.loads(line) for line in lines]
            earlier = records[0]["settings"]
        except (ValueError, KeyError, TypeError) as reason:
            raise ValueError(f"{self.path} is not a file of this script; choose another --output_dir") from reason
        changed = sorted(
            key for key in {*earlier, *settings} if earlier.get(key, "absent") != settings.get(key, "absent")
        )
        if changed:
            what = "; ".join(f"{key}: {earlier.get(key)!r} then, {settings.get(key)!r} now" for key in changed)
            raise ValueError(
                f"{self.path} holds results of other settings ({what}); choose another --output_dir, or --overwrite"
            )
        for record in records[1:]:
            self.finished[Cell(record["task"], record["length"], record["depth"])] = record

    def add(self, record: dict) -> None:
        """Appends a finished cell and makes sure that it is on disk."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.finished[Cell(record["task"], record["length"], record["depth"])] = record


def model_fingerprint(name: str, config) -> str:
    """Changes when a model does: the hub's commit, or a hash over the configuration and samples of the weight files."""
    folder = Path(name)
    if not folder.is_dir():
        return getattr(config, "_commit_hash", None) or name
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for block in range(_PROBED_BLOCKS):
                weights.seek(size * block // _PROBED_BLOCKS)
                digest.update(weights.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def text_fingerprint(text: str) -> str:
    """Changes when a text does."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

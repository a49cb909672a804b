"""A JSONL file of finished cells that a later run continues, and never one with other settings.

The first line holds the settings; every further line is one finished cell. Results that do not belong together never
share a file: a run with other settings is refused. More lengths or depths are welcome.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ..common.files import write_whole

_PROBED_BLOCKS, _BLOCK_BYTES = 16, 4096
# What Transformers reads a tokenizer from: its own files, SentencePiece's, those of BPE and WordPiece, chat templates.
_TOKENIZER_FILES = ("*token*.json", "*.model", "*.tiktoken", "vocab*", "merges.txt", "tekken.json")
_TOKENIZER_FILES += ("*chat_template*", "*chat_template*/*")


@dataclass(frozen=True)
class Cell:
    """One square of the heatmap; depth is None for tasks without one."""

    task: str
    length: int
    depth: float | None


class Journal:
    """The JSONL file of a run. Only the process that writes results may hold one."""

    def __init__(self, path: Path, settings: dict, model: str = ""):
        """Opens a new file, or an earlier one to go on with.

        Args:
            path: the file.
            settings: what cells that belong together share.
            model: its name, for pictures; the same model may have another when the run goes on.

        Raises:
            ValueError: the file belongs to other settings, or is something else.
        """
        self.path = path
        self.finished: dict[Cell, dict] = {}
        settings = json.loads(json.dumps(settings))  # as they will be when read back
        try:
            lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        except UnicodeDecodeError as reason:
            raise ValueError(f"{path} is not a file of this script; choose another --output_dir") from reason
        if lines == [""]:
            write_whole(path, json.dumps({"model": model, "settings": settings}) + "\n")
            return
        unfinished = lines.pop()  # of a run that was killed while it wrote
        if not lines:  # never of this script, which writes its first line whole
            lines = [unfinished]
        self._read(lines, settings)
        if unfinished:
            write_whole(path, "".join(line + "\n" for line in lines))

    def _read(self, lines: list[str], settings: dict) -> None:
        try:
            earlier = json.loads(lines[0])["settings"]
            known = earlier.keys()
        except (ValueError, KeyError, TypeError, AttributeError) as reason:
            raise ValueError(f"{self.path} is not a file of this script; choose another --output_dir") from reason
        changed = sorted(
            key for key in {*known, *settings} if earlier.get(key, "absent") != settings.get(key, "absent")
        )
        if changed:
            what = "; ".join(f"{key}: {_shown(earlier, key)} then, {_shown(settings, key)} now" for key in changed)
            raise ValueError(
                f"{self.path} holds results of other settings ({what}); choose another --output_dir, or --overwrite"
            )
        for number, line in enumerate(lines[1:], start=2):
            record = _finished_cell(line)
            if record is None:
                raise ValueError(
                    f"{self.path}, line {number}: no finished cell; take the line out, choose another --output_dir, or "
                    "--overwrite"
                )
            self.finished[Cell(record["task"], record["length"], record["depth"])] = record

    def add(self, record: dict) -> None:
        """Appends a finished cell and makes sure that it is on disk."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.finished[Cell(record["task"], record["length"], record["depth"])] = record


def _shown(settings: dict, key: str) -> str:
    """A setting for a message; another version of the script may not have had it."""
    return repr(settings[key]) if key in settings else "not recorded"


def _finished_cell(line: str) -> dict | None:
    """The record in a line, None if it is not one."""
    try:
        record = json.loads(line)
        samples = [(sample["exact"], bool(sample["items"])) for sample in record["samples"]]
        numbers = (record["length"], record["depth"] or 0.0, record["accuracy"], record["item_accuracy"])
        fits = isinstance(record["task"], str) and all(isinstance(number, int | float) for number in numbers)
    except (ValueError, KeyError, TypeError):
        return None
    return record if fits and samples and all(items for _, items in samples) else None


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


def tokenizer_fingerprint(name: str) -> str:
    """Changes when a folder's tokenizer or chat template does; a hub name's is that of its commit, in the model's."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}".encode() + content)
    return digest.hexdigest()[:16]


def text_fingerprint(text: str) -> str:
    """Changes when a text does."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

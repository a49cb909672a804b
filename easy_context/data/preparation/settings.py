"""The settings that determine the rows, and the digests that identify an interrupted or finished run."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .input_files import list_files
from .retrieval import RetrievalSettings
from .sources import Source

TOKENS_VERSION = 4  # raised where the same records give other tokens or labels, so that old ones are not taken


@dataclass(frozen=True)
class Settings:
    """All settings that determine the rows; `prepare_data.py --help` describes each field."""

    sources: list[Source]
    tokenizer: str
    seq_length: int
    validation_sources: list[Source] = field(default_factory=list)
    text_field: str | None = None
    document_start: str | None = None
    separator: str | None = None
    validation_fraction: float = 0.0
    upsample_long: float = 1.0
    long_from: int = 4096
    train_tokens: int | None = None
    retrieval: RetrievalSettings = RetrievalSettings()
    strict: bool = False
    seed: int = 0

    def random_generator(self, *purpose: int) -> np.random.Generator:
        """Return a random generator for one purpose, independent of the use of other generators."""
        return np.random.default_rng([self.seed, *purpose])


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that identify a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a tokenizer's rules, vocabulary and chat template, wherever it was loaded from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return digest([rules, tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token])


def source_digest(source: Source, settings: Settings, rules: str) -> str:
    """Digest of all that decides a source's tokens: names, sizes and times of its files, tokenizer, text options.

    Args:
        source: the input.
        settings: of the run.
        rules: `tokenizer_digest` of the run's tokenizer.
    """
    files = []
    if not source.on_hub:
        for path in list_files(Path(source.location)):
            parts = [path] if path.is_file() else sorted(path.iterdir())
            files += [[str(part), part.stat().st_size, part.stat().st_mtime_ns] for part in parts]
    options = [settings.text_field, settings.document_start, settings.separator]
    return digest([TOKENS_VERSION, source.location, files, rules, *options])


def run_digest(settings: Settings, source_digests: list[str]) -> str:
    """Digest of a whole run: equal digests give equal rows."""
    return digest([asdict(settings), source_digests])

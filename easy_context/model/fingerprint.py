"""Fingerprints by which a resumed run recognises its model and tokenizer."""

import hashlib
from pathlib import Path
from typing import Any

_PROBED_BLOCKS, _BLOCK_BYTES = 16, 4096
# What Transformers reads a tokenizer from: its own files, SentencePiece's, those of BPE and WordPiece, chat templates.
_TOKENIZER_FILES = (
    *("*token*.json", "*.model", "*.tiktoken", "vocab*", "merges.txt", "tekken.json"),
    *("*chat_template*", "*chat_template*/*"),
)


def model_fingerprint(name: str, config: Any) -> str:
    """Return a hub model's commit, or a hash of a folder's config and of samples of its weight files."""
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
    """Return a hash of a folder's tokenizer and chat template, or the hub name (its commit is in the model's)."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}".encode() + content)
    return digest.hexdigest()[:16]

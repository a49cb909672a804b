"""Documents to take the perplexity of: text files, rows of text, or rows that are token ids already."""

import hashlib
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...common.constants import IGNORE_INDEX
from ...common.files import OPENERS, open_unpacked
from ...data.datasets import HELD_OUT_FIRST, open_dataset
from ...data.token_rows import load_rows, read_row
from ...loss import next_token_targets


@dataclass(frozen=True)
class Document:
    """A document as tokens.

    Attributes:
        name: for the result file.
        input_ids: int64 `[seq]`.
        labels: int64 `[seq]`, input_ids with -100 where a token is not to be scored.
        source: flag, file and row, for errors.
    """

    name: str
    input_ids: torch.Tensor
    labels: torch.Tensor
    source: str

    @property
    def targets(self) -> torch.Tensor:
        """Targets `[seq]`: targets[i] is the label of token i + 1, the last one -100."""
        return next_token_targets(self.labels.unsqueeze(0)).squeeze(0)


def text_documents(files: list[str], tokenizer: Any) -> Iterator[Document]:
    """Yield a document for each file (`.gz`, `.xz` and `.bz2` are unpacked), with the tokenizer's special tokens.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file holds no text, or cannot be read or unpacked.
    """
    for file in map(Path, files):
        if not file.is_file():
            raise FileNotFoundError(f"--text {file}: no such file")
        try:
            with open_unpacked(file, "rt", encoding="utf-8", errors="replace") as opened:
                text = opened.read()
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as reason:
            raise ValueError(
                f"--text {file}: cannot be read ({reason}); is it cut off, or no {file.suffix}?"
            ) from reason
        if not text.strip():
            raise ValueError(f"--text {file}: the file holds no text")
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        name = file.name.removesuffix(file.suffix) if file.suffix in OPENERS else file.name
        yield Document(name, ids, ids, f"--text {file}")


def dataset_documents(
    name: str, feature: str, tokenizer: Any, split: str | None = None, subset: str | None = None
) -> Iterator[Document]:
    """Yield a document for each row of a dataset of text, with the tokenizer's special tokens.

    Args:
        name: as `open_dataset` takes it.
        feature: the column of the text.
        tokenizer: of Hugging Face.
        split, subset: as `open_dataset` takes them.

    Raises:
        ValueError: there is no such dataset, or a row whose column is missing or holds no text.
    """
    for number, row in enumerate(open_dataset(name, "--dataset", HELD_OUT_FIRST, split, subset)):
        where = f"--dataset {name}: row {number}"
        if feature not in row:
            columns = ", ".join(sorted(row))
            raise ValueError(f"{where} has no column {feature} (its columns: {columns}); name one with --feature")
        if not isinstance(row[feature], str):
            raise ValueError(f"{where}: column {feature} holds {type(row[feature]).__name__} instead of text")
        ids = torch.tensor(tokenizer(row[feature], verbose=False)["input_ids"], dtype=torch.int64)
        yield Document(f"row-{number}", ids, ids, where)


def tokenized_documents(name: str, split: str | None = None, subset: str | None = None) -> Iterator[Document]:
    """Yield a document for each row of token ids; padding (attention_mask 0 at either end) is cut off.

    Args:
        name: of a dataset with `input_ids` (or `tokens`), `labels` where there are any, and other columns; see
            data/columns.py.
        split, subset: as `open_dataset` takes them.

    Raises:
        ValueError: there is no such dataset, or a row of it cannot be honoured.
    """
    for number, row in enumerate(load_rows(name, "--tokenized", split, subset)):
        where = f"--tokenized {name}: row {number}"
        tokens = read_row(row, where)
        yield Document(f"row-{number}", tokens.ids, tokens.labels, where)


def save_tokenized(documents: Iterable[Document], folder: Path) -> tuple[int, int]:
    """Save documents as rows that `--tokenized` reads: `input_ids`, and `tokenized_len` as the original project has it.

    Returns:
        The number of documents, and of their tokens.
    """
    from datasets import Dataset

    rows: list[dict[str, Any]] = [
        {"input_ids": document.input_ids.tolist(), "tokenized_len": len(document.input_ids)} for document in documents
    ]
    Dataset.from_list(rows).save_to_disk(folder)
    return len(rows), sum(row["tokenized_len"] for row in rows)


def choose(documents: Iterable[Document], shortest: int, samples: int | None, vocabulary: int) -> list[Document]:
    """Return the first `samples` documents with at least `shortest` tokens.

    Args:
        documents: all.
        shortest: tokens; at least 2, since a single token predicts nothing.
        samples: how many; None for all.
        vocabulary: ids must be below it.

    Raises:
        ValueError: none is long enough, or an id or label is beyond the vocabulary.
    """
    chosen: list[Document] = []
    longest = 0
    for document in documents:
        if samples is not None and len(chosen) == samples:
            break
        length = len(document.input_ids)
        longest = max(longest, length)
        if length < max(shortest, 2):
            continue
        for what, ids in (("token id", document.input_ids), ("label", document.labels)):
            wrong = ids[((ids < 0) | (ids >= vocabulary)) & ((ids != IGNORE_INDEX) | (what == "token id"))]
            if len(wrong):
                raise ValueError(
                    f"{document.source} has {what} {int(wrong[0])} but the model's vocabulary is 0 to "
                    f"{vocabulary - 1}: it was tokenized for another model, or is no tokenized text"
                )
        chosen.append(document)
    if not chosen:
        raise ValueError(
            f"no document has at least {max(shortest, 2)} tokens (the longest has {longest}): lower "
            "--dataset-min-tokens or --min-tokens, or give longer text"
        )
    return chosen


def documents_fingerprint(documents: Iterable[Document]) -> str:
    """Return a hash over the names, tokens and labels of documents, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name} {len(document.input_ids)}".encode())
        digest.update(document.input_ids.numpy().tobytes() + document.labels.numpy().tobytes())
    return digest.hexdigest()[:16]

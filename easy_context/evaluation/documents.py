"""Documents to take the perplexity of: plain text files, or rows that are token ids already."""

import gzip
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..loss import shift_labels

TOKEN_COLUMNS = ("input_ids", "tokens")
_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_ROW_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


@dataclass(frozen=True)
class Document:
    """A document as tokens.

    Attributes:
        name: for the result file.
        input_ids: int64 `[seq]`.
        labels: int64 `[seq]`, input_ids with -100 where a token is not to be scored.
    """

    name: str
    input_ids: torch.Tensor
    labels: torch.Tensor


def text_documents(files: list[str], tokenizer) -> Iterator[Document]:
    """One document a file (`.gz` and `.xz` are unpacked), with the special tokens that the tokenizer adds.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file holds no text.
    """
    for file in map(Path, files):
        if not file.is_file():
            raise FileNotFoundError(f"--text {file}: no such file")
        with _OPENERS.get(file.suffix, open)(file, "rt", encoding="utf-8", errors="replace") as opened:
            text = opened.read()
        if not text.strip():
            raise ValueError(f"--text {file}: the file holds no text")
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        yield Document(file.name.removesuffix(file.suffix) if file.suffix in _OPENERS else file.name, ids, ids)


def tokenized_documents(rows: Iterable[dict]) -> Iterator[Document]:
    """One document a row of a tokenized dataset; padding (attention_mask 0 at either end) is cut off.

    Args:
        rows: with `input_ids` (or `tokens`), and `labels` and `attention_mask` where there are any.

    Raises:
        ValueError: no token column, or a mask with a hole.
    """
    for number, row in enumerate(rows):
        column = next((name for name in TOKEN_COLUMNS if name in row), None)
        if column is None:
            raise ValueError(f"--tokenized: rows have columns {sorted(row)}, none of {' or '.join(TOKEN_COLUMNS)}")
        ids = torch.as_tensor(row[column], dtype=torch.int64)
        labels = torch.as_tensor(row["labels"], dtype=torch.int64) if row.get("labels") is not None else ids
        if row.get("attention_mask") is not None:
            kept = torch.as_tensor(row["attention_mask"]).nonzero().flatten()
            first, last = (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)
            if last - first != len(kept):
                raise ValueError(f"--tokenized: row {number} has padding between its tokens; keep padding at the ends")
            ids, labels = ids[first:last], labels[first:last]
        yield Document(f"row-{number}", ids, labels)


def load_rows(name: str, split: str | None) -> Iterable[dict]:
    """A tokenized dataset: a folder from `save_to_disk`, a parquet or JSON file, or a name on the hub.

    Args:
        name: path or hub name.
        split: of a dataset that has several; None takes the only one, else test, validation or train.

    Raises:
        ValueError: it cannot be read, or has no such split.
    """
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = Path(name)
    try:
        if path.is_dir() and any((path / file).exists() for file in ("dataset_dict.json", "dataset_info.json")):
            dataset = load_from_disk(name)
        elif path.suffix in _ROW_FILES:
            dataset = load_dataset(_ROW_FILES[path.suffix], data_files=name)
        else:
            dataset = load_dataset(name)
    except (OSError, ValueError) as reason:
        raise ValueError(f"--tokenized {name}: not a dataset on disk or on the hub: {reason}") from reason
    if not isinstance(dataset, DatasetDict):
        return dataset
    wanted = [split] if split else ["test", "validation", "train", *dataset]
    chosen = next((key for key in wanted if key in dataset), None)
    if chosen is None:
        raise ValueError(f"--split {split}: {name} has {', '.join(dataset)}")
    return dataset[chosen]


def choose(documents: Iterable[Document], shortest: int, samples: int | None, vocabulary: int) -> list[Document]:
    """The first `samples` documents with at least `shortest` tokens.

    Args:
        documents: all.
        shortest: tokens; at least 2, since a single token predicts nothing.
        samples: how many; None for all.
        vocabulary: ids must be below it.

    Raises:
        ValueError: none is long enough, or an id is beyond the vocabulary.
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
        if int(document.input_ids.max()) >= vocabulary:
            raise ValueError(
                f"{document.name} has token id {int(document.input_ids.max())} but the model's vocabulary has "
                f"{vocabulary}: it was tokenized for another model"
            )
        chosen.append(document)
    if not chosen:
        raise ValueError(
            f"no document has at least {max(shortest, 2)} tokens (the longest has {longest}): lower "
            "--dataset-min-tokens or --min-tokens, or give longer text"
        )
    return chosen


def targets_of(document: Document) -> torch.Tensor:
    """Targets `[seq]`: targets[i] is the label of token i + 1, the last one -100."""
    return shift_labels(document.labels.unsqueeze(0)).squeeze(0)

"""Turn planned rows into a dataset on disk that `datasets.load_from_disk` reads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ...common.constants import IGNORE_INDEX
from ..documents import COLUMN
from .corpus import Corpus
from .packing import Segment

BATCH_TOKENS = 1 << 21


@dataclass(frozen=True)
class Row:
    """The tokens of one row.

    Attributes:
        ids: int32 `[tokens]`.
        labels: int32 `[tokens]`, −100 where nothing is learned.
        document_lengths: tokens of each document, or part of one, in order; they add up to the row.
        text_tokens: number of the planned tokens that it holds, the first ones; None: all.
    """

    ids: np.ndarray
    labels: np.ndarray
    document_lengths: list[int]
    text_tokens: int | None = None


def assemble_row(segments: list[Segment], corpora: list[Corpus]) -> Row:
    """Read the tokens of one planned row."""
    parts = [corpora[part.source].read(part.document, part.start, part.end) for part in segments]
    ids = np.concatenate([ids for ids, _ in parts])
    learn = np.concatenate([learn for _, learn in parts])
    return Row(ids, np.where(learn, ids, np.int32(IGNORE_INDEX)), [len(part) for part in segments])


def write_rows(
    folder: Path,
    plan: list[list[Segment]],
    corpora: list[Corpus],
    with_labels: bool,
    transform: Callable[[int, Row], Row] = lambda index, row: row,
) -> dict[str, int]:
    """Write rows to a new `folder` with `save_to_disk`, a few at a time; no rows make no folder.

    The columns are `input_ids`, perhaps `labels`, and `document_lengths`, which `train.py --respect-documents` reads.

    Args:
        folder: must not exist.
        plan: the segments of each row.
        corpora: tokens, by source number.
        with_labels: write the column `labels`; otherwise `train.py` learns every token.
        transform: changes row number `index`.

    Returns:
        `{"rows", "tokens", "learned_tokens"}`.
    """
    count = {"rows": 0, "tokens": 0, "learned_tokens": 0}
    if not plan:
        return count

    from datasets import Dataset, Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    columns = ("input_ids", "labels", COLUMN) if with_labels else ("input_ids", COLUMN)
    features = Features({name: List(Value("int32")) for name in columns})
    longest = max(sum(map(len, segments)) for segments in plan)
    file = folder.with_name(f"{folder.name}.arrow")
    with ArrowWriter(path=str(file), features=features, writer_batch_size=max(1, BATCH_TOKENS // longest)) as writer:
        for index, segments in enumerate(tqdm(plan, desc=f"write {folder.name}", unit=" rows")):
            row = transform(index, assemble_row(segments, corpora))
            count["rows"] += 1
            count["tokens"] += len(row.ids)
            count["learned_tokens"] += int((row.labels != IGNORE_INDEX).sum())
            values = {"input_ids": row.ids, "labels": row.labels, COLUMN: row.document_lengths}
            writer.write({name: values[name] for name in columns})
        writer.finalize()
    Dataset.from_file(str(file)).save_to_disk(str(folder))
    file.unlink()
    return count

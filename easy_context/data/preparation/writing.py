"""Turn planned rows into a dataset on disk that `datasets.load_from_disk` reads."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...common.constants import IGNORE_INDEX
from .packing import Segment
from .token_store import TokenStore

BATCH_TOKENS = 1 << 21


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        ids: int32 `[tokens]`.
        labels: int32 `[tokens]`, −100 where nothing is learned.
        text_tokens: how many of the tokens planned for it are in it; None: all.
    """

    ids: np.ndarray
    labels: np.ndarray
    text_tokens: int | None = None


def assemble_row(segments: list[Segment], stores: list[TokenStore]) -> Row:
    """Read the tokens of one planned row from the stores of the sources."""
    parts = [stores[part.source].read(part.document, part.start, part.end) for part in segments]
    ids = np.concatenate([ids for ids, _ in parts]).astype(np.int32)
    learn = np.concatenate([learn for _, learn in parts])
    return Row(ids, np.where(learn, ids, np.int32(IGNORE_INDEX)))


def write_rows(
    folder: Path,
    plan: list[list[Segment]],
    stores: list[TokenStore],
    with_labels: bool,
    transform: Callable[[int, Row], Row] = lambda index, row: row,
    progress: Callable[[Iterator], Iterator] = iter,
) -> dict[str, int]:
    """Write rows to `folder` with `save_to_disk`, a few at a time; `folder` appears only when it is whole.

    Args:
        folder: replaced if it exists.
        plan: the segments of each row.
        stores: token stores, by source number.
        with_labels: write the column `labels`; otherwise `train.py` learns every token.
        transform: changes row number `index`.
        progress: wraps the iteration over rows.

    Returns:
        `{"rows", "tokens", "learned_tokens"}`.
    """
    from datasets import Dataset, Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    columns = ("input_ids", "labels") if with_labels else ("input_ids",)
    features = Features({name: List(Value("int32")) for name in columns})
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    longest = max((sum(map(len, segments)) for segments in plan), default=1)
    count = {"rows": 0, "tokens": 0, "learned_tokens": 0}
    file = part / "rows.arrow"
    with ArrowWriter(path=str(file), features=features, writer_batch_size=max(1, BATCH_TOKENS // longest)) as writer:
        for index, segments in progress(enumerate(plan)):
            row = transform(index, assemble_row(segments, stores))
            count["rows"] += 1
            count["tokens"] += len(row.ids)
            count["learned_tokens"] += int((row.labels != IGNORE_INDEX).sum())
            writer.write({"input_ids": row.ids, "labels": row.labels} if with_labels else {"input_ids": row.ids})
        writer.finalize()
    shutil.rmtree(folder, ignore_errors=True)
    dataset = Dataset.from_file(str(file)) if plan else Dataset.from_dict({}, features=features)
    dataset.save_to_disk(str(part / "dataset"))
    (part / "dataset").rename(folder)
    shutil.rmtree(part)
    return count

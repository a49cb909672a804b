"""The cells of a needle evaluation: lengths x depths x samples of each task."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...loss import IGNORE_INDEX
from ..scorer import Scorer
from .examples import Task
from .prompts import ContextTooShort, PromptBuilder, Row

AMPLE = 8  # times the longest prompt seen without its haystack: a context that holds any other prompt too


class Cell(NamedTuple):
    """One square of the heatmap; depth is None for tasks without one."""

    task: str
    length: int
    depth: float | None

    @classmethod
    def of(cls, record: dict) -> "Cell":
        """Return the cell that a record is about."""
        return cls(record["task"], record["length"], record["depth"])


def is_finished_cell(record: dict) -> bool:
    """Return whether a JSON value is a record of `score_cell`; KeyError and TypeError say that it is not, as well."""
    samples = [(sample["exact"], bool(sample["items"])) for sample in record["samples"]]
    numbers = (record["length"], record["depth"] or 0.0, record["accuracy"], record["item_accuracy"])
    fits = isinstance(record["task"], str) and all(isinstance(number, int | float) for number in numbers)
    return fits and bool(samples) and all(items for _, items in samples)


def grid(tasks: Iterable[Task], lengths: list[int], depths: list[float]) -> list[Cell]:
    """Return all cells, the short ones first."""
    tasks = list(tasks)
    return [
        Cell(task.name, length, depth)
        for length in lengths
        for task in tasks
        for depth in (depths if task.has_depth else [None])
    ]


def check_lengths(
    builder: PromptBuilder, tasks: Iterable[Task], lengths: list[int], depths: list[float], samples: int, seed: int
) -> None:
    """Try the prompts of a grid without their haystacks: keys, examples and answers differ in length.

    All prompts of the shortest length are tried, and of longer ones up to AMPLE times what a task needs.

    Args:
        builder: of prompts.
        tasks: all that are wanted.
        lengths, depths: of the grid; lengths in ascending order.
        samples: prompts in a cell.
        seed: of the run.

    Raises:
        ContextTooShort: a length does not hold one of its prompts.
    """

    def longest_prompt(task: Task, length: int) -> int:
        return max(
            builder.shortest(task, _depth_of(cell), _example_seed(cell, seed, i))
            for cell in grid([task], [length], depths)
            for i in range(samples)
        )

    for task in tasks:
        for length in lengths:
            longest = longest_prompt(task, length)
            if length < longest:
                enough = longest
                while (more := longest_prompt(task, enough)) > enough:  # another length draws other names
                    enough = more
                raise ContextTooShort(task.name, length, enough)
            if length >= AMPLE * longest:
                break


def _depth_of(cell: Cell) -> float:
    return 0.0 if cell.depth is None else cell.depth


def _example_seed(cell: Cell, seed: int, sample: int) -> str:
    return f"{seed} {cell.task} {cell.length} {_depth_of(cell)} {sample}"


def rows_of(builder: PromptBuilder, task: Task, cell: Cell, samples: int, seed: int) -> list[Row]:
    """Return the prompts of a cell. Samples of one number share their stretch of haystack at all lengths and depths."""
    return [
        builder.build(task, cell.length, _depth_of(cell), _example_seed(cell, seed, i), f"{seed} {i}")
        for i in range(samples)
    ]


def score_cell(
    scorer: Scorer, builder: PromptBuilder, task: Task, cell: Cell, samples: int, seed: int, batch_tokens: int
) -> dict:
    """Run one cell.

    Args:
        scorer: the model.
        builder: of prompts.
        task: of the cell.
        cell: length and depth.
        samples: prompts in this cell.
        seed: of the run.
        batch_tokens: rows go through the model together up to this many tokens, at least one row.

    Returns:
        The record for the journal: task, length, depth, accuracy (share of samples whose answer is all right),
        item_accuracy (share of their single values) and what happened to each sample.
    """
    rows = rows_of(builder, task, cell, samples, seed)
    together = rows_at_once(cell.length, batch_tokens)
    outcomes = []
    for first in range(0, samples, together):
        outcomes += score_rows(scorer, builder, rows[first : first + together])
    items = [right for outcome in outcomes for right in outcome["items"]]
    return {
        "task": cell.task,
        "length": cell.length,
        "depth": cell.depth,
        "accuracy": sum(outcome["exact"] for outcome in outcomes) / samples,
        "item_accuracy": sum(items) / len(items),
        "samples": outcomes,
    }


def rows_at_once(length: int, batch_tokens: int) -> int:
    """Return how many rows of `length` tokens go through the model together."""
    return max(1, batch_tokens // length)


def score_rows(scorer: Scorer, builder: PromptBuilder, rows: list[Row]) -> list[dict]:
    """Score several rows in one pass; shorter ones are padded at the end, which a causal model does not see.

    Returns:
        For each row: "exact", "items" (is each value right?), "tokens", "places", "answer" and "predicted" as text.
    """
    input_ids = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.int64)
    targets = torch.full_like(input_ids, IGNORE_INDEX)
    for i, row in enumerate(rows):
        input_ids[i, : len(row.ids)] = torch.from_numpy(row.ids)
        targets[i, row.answer_start - 1 : len(row.ids) - 1] = input_ids[i, row.answer_start : len(row.ids)]
    predictions = scorer.predictions(input_ids, targets)
    decode = builder.encoder.tokenizer.decode
    outcomes = []
    for i, row in enumerate(rows):
        answer = slice(row.answer_start - 1, len(row.ids) - 1)
        right = predictions[i] == targets[i]
        outcomes.append(
            {
                "exact": bool(right[answer].all()),
                "items": [bool(right[item.start - 1 : item.stop - 1].all()) for item in row.items],
                "tokens": len(row.ids),
                "places": list(row.places),
                "answer": decode(targets[i, answer].tolist()),
                "predicted": decode(predictions[i, answer].tolist()),
            }
        )
    return outcomes


def summarize(records: Iterable[dict]) -> dict:
    """Return the mean accuracy per task, and per length and depth of each task, over all samples.

    Returns:
        task -> {"accuracy", "item_accuracy", "samples", "by_length": {length: ...}, "by_depth": {depth: ...}}.
    """
    by_task: dict[str, list[dict]] = defaultdict(list)
    for record in records:
        by_task[record["task"]].append(record)
    summary = {}
    for task, own in by_task.items():
        summary[task] = mean_of(own)
        for axis in ("length", "depth"):
            values = sorted({record[axis] for record in own if record[axis] is not None})
            summary[task][f"by_{axis}"] = {v: mean_of([record for record in own if record[axis] == v]) for v in values}
    return summary


def mean_of(records: Iterable[dict]) -> dict:
    """Return accuracy and item accuracy over all samples of some cells, and how many samples there are."""
    samples = [sample for record in records for sample in record["samples"]]
    items = [right for sample in samples for right in sample["items"]]
    return {
        "accuracy": sum(sample["exact"] for sample in samples) / len(samples),
        "item_accuracy": sum(items) / len(items),
        "samples": len(samples),
    }

"""Writes results as JSON, and reads the files that are drawn; what does not belong in one is named by file and line."""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..files import null_for_nan


def json_text(value: Any) -> str:
    """A result file's text; JSON has no NaN and no infinity, so that numbers which are not finite become null."""
    return json.dumps(null_for_nan(value), indent=2, allow_nan=False) + "\n"


def read_perplexity(file: str | Path) -> dict[str, dict[int, tuple[float, int]]]:
    """A CSV of eval_ppl.py: model -> length -> (summed loss, tokens) over its documents.

    Raises:
        ValueError: the file has other columns, no rows, a row that is no result, or a model without a scored token.
    """
    curves: dict[str, dict[int, tuple[float, int]]] = {}
    for where, row in _table(file, ("model", "length", "tokens", "loss"), "a CSV of eval_ppl.py"):
        length, own = _number(row, "length", where, int, least=1), _number(row, "tokens", where, int)
        # A document whose labels are all -100 so far has no tokens and a loss that is not a number.
        added = _number(row, "loss", where, float) * own if own else 0.0
        curve = curves.setdefault(row["model"], {})
        loss, tokens = curve.get(length, (0.0, 0))
        curve[length] = (loss + added, tokens + own)
    if not curves:
        raise ValueError(f"{file} has no rows")
    for model, curve in curves.items():
        if not any(tokens for _, tokens in curve.values()):
            raise ValueError(f"{file}: {model} has no scored token at any length (tokens is 0), so there is no curve")
    return curves


def read_cells(file: str | Path) -> list[dict]:
    """Finished cells of eval_needle.py, from its JSONL or its CSV: task, length, depth (or None) and accuracy.

    Raises:
        ValueError: the file is neither, has no cells, or a line that is no cell.
    """
    if _text(file).startswith("{"):
        records = [(where, record) for where, record in _records(file) if "settings" not in record]
    else:
        records = list(_table(file, ("task", "length", "depth", "accuracy"), "a JSONL or CSV of eval_needle.py"))
    cells = []
    for where, record in records:
        if not record.get("task") or not isinstance(record["task"], str):
            raise ValueError(f"{where}: no task; it is no cell of eval_needle.py")
        depth = None if record.get("depth") in (None, "") else _number(record, "depth", where, float, most=1)
        cell = {"task": record["task"], "length": _number(record, "length", where, int, least=1), "depth": depth}
        cells.append({**cell, "accuracy": _number(record, "accuracy", where, float, most=1)})
    if not cells:
        raise ValueError(f"{file} holds no cells of eval_needle.py")
    return cells


def read_metrics(file: str | Path) -> list[dict]:
    """The lines of a training run's metrics.jsonl that hold a step's loss; null, a loss that was not finite, is NaN.

    Raises:
        ValueError: there are none, or a line that is no record.
    """
    steps = [(where, record) for where, record in _records(file) if "loss" in record and "step" in record]
    if not steps:
        raise ValueError(f"{file} has no lines with step and loss: it is not a metrics.jsonl of train.py")
    for where, record in steps:
        if record["loss"] is None:  # a fact about the run
            record["loss"] = math.nan
        for key in ("step", "loss"):
            if not isinstance(record[key], int | float) or isinstance(record[key], bool):
                raise ValueError(f"{where}: {key} {record[key]!r} must be a number")
    return [record for _, record in steps]


def _text(file: str | Path) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as reason:
        raise ValueError(f"{file} is no text file ({reason.reason} at byte {reason.start})") from reason


def _records(file: str | Path) -> Iterator[tuple[str, dict]]:
    """(file and line, record) of a JSONL file; half a last line, as a killed run leaves it, is skipped with a note."""
    lines = _text(file).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as reason:
            if number == len(lines) > 1:
                print(f"{where} is unfinished and left out", file=sys.stderr)
                continue
            raise ValueError(f"{where} is not JSON ({reason.msg})") from reason
        if not isinstance(record, dict):
            raise ValueError(f"{where} is not a JSON object")
        yield where, record


def _table(file: str | Path, columns: tuple[str, ...], kind: str) -> Iterator[tuple[str, dict]]:
    """(file and line, row) of a CSV with at least `columns`."""
    rows = csv.DictReader(_text(file).splitlines())
    try:
        missing = sorted(set(columns) - set(rows.fieldnames or ()))
        if missing:
            raise ValueError(f"{file} lacks the columns {missing}: it is not {kind}")
        for row in rows:
            where = f"{file}, line {rows.line_num}"
            if None in row or None in row.values():
                raise ValueError(f"{where} does not have the {len(rows.fieldnames)} fields of the first line")
            yield where, row
    except csv.Error as reason:
        raise ValueError(f"{file}, line {rows.line_num + 1}: {reason}; it is not {kind}") from reason


def _number(
    record: dict, key: str, where: str, kind: Callable, least: float = 0, most: float = math.inf
) -> int | float:
    """A field as a finite number of that kind within bounds."""
    value = record.get(key)
    wanted = "a whole number" if kind is int else "a number"
    bounds = f"{wanted} of at least {least}" if most == math.inf else f"{wanted} from {least} to {most}"
    try:
        number = kind(value)
        fits = not isinstance(value, bool) and least <= number <= most and number != math.inf and number == float(value)
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{where}: {key} {value!r} must be {bounds}")
    return number

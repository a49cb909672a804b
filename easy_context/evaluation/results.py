"""Writes results as JSON, and reads the files that are drawn; what does not belong in one is named by file and line."""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.files import null_for_nan


def json_text(value: Any) -> str:
    """A result file's text; JSON has no NaN and no infinity, so that numbers which are not finite become null."""
    return json.dumps(null_for_nan(value), indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Curve:
    """A model's perplexity over context length.

    Attributes:
        label: its name.
        sums: length -> (summed loss, tokens).
        trained_length: tokens of the rows it was trained on; None if not known.
    """

    label: str
    sums: dict[int, tuple[float, int]]
    trained_length: int | None = None

    @property
    def points(self) -> list[tuple[int, float]]:
        """(length, perplexity), by length, of all lengths with a scored token."""
        return [(n, math.exp(min(loss / tokens, 700))) for n, (loss, tokens) in sorted(self.sums.items()) if tokens]


def read_perplexity(file: str | Path) -> list[Curve]:
    """Read a CSV of eval_ppl.py, each model's documents summed up, or one of the original project's script.

    Raises:
        ValueError: the file has other columns, no rows, a row that is no result, or a model without a scored token.
    """
    text = _text(file)
    curves = _wide_curves(file, text) if text.startswith(",") else _curves(file)
    if not curves:
        raise ValueError(f"{file} has no rows")
    for curve in curves:
        if not curve.points:
            raise ValueError(f"{file}: {curve.label} has no scored token at any length, so there is no curve")
    return curves


def _curves(file: str | Path) -> list[Curve]:
    """The curves of a CSV with a row for each model, document and length."""
    sums: dict[str, dict[int, tuple[float, int]]] = {}
    trained: dict[str, int | None] = {}
    for where, row in _table(file, ("model", "length", "tokens", "loss"), "a CSV of eval_ppl.py"):
        length, own = _number(row, "length", where, int, least=1), _number(row, "tokens", where, int)
        # A document whose labels are all -100 so far has no tokens and a loss that is not a number.
        added = _number(row, "loss", where, float) * own if own else 0.0
        curve = sums.setdefault(row["model"], {})
        loss, tokens = curve.get(length, (0.0, 0))
        curve[length] = (loss + added, tokens + own)
        # The column is absent in files of earlier versions, and empty where the config does not know.
        known = row.get("trained_length")
        trained[row["model"]] = _number(row, "trained_length", where, int, least=1) if known else None
    return [Curve(model, curve, trained[model]) for model, curve in sums.items()]


def _wide_curves(file: str | Path, text: str) -> list[Curve]:
    """The curves of the original project's CSV: a first line of lengths, then a model and its perplexities in each."""
    (_, *header), *rows = csv.reader(text.splitlines())
    lengths = [_number({"length": cell}, "length", f"{file}, line 1", int, least=1) for cell in header]
    curves: dict[str, Curve] = {}
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        where, (label, *cells) = f"{file}, line {number}", row
        if len(cells) != len(lengths) or label in curves:
            fault = "has another number of fields than line 1" if label not in curves else f"gives {label} again"
            raise ValueError(f"{where} {fault}")
        sums = {}
        for length, cell in zip(lengths, cells, strict=True):
            broken = cell.strip().lower() in ("nan", "inf")  # a fact about the model: there is no point
            perplexity = 1.0 if broken else _number({"perplexity": cell}, "perplexity", where, float, least=1)
            sums[length] = (math.log(perplexity), 0 if broken else 1)
        curves[label] = Curve(label, sums)
    return list(curves.values())


def read_cells(file: str | Path) -> tuple[str, list[dict]]:
    """Read finished cells of eval_needle.py from its JSONL or its CSV.

    Returns:
        The model's name, empty where the file does not have it, and the cells: task, length, depth (or None), accuracy.

    Raises:
        ValueError: the file is neither, has no cells, or a line that is no cell.
    """
    model = ""
    if _text(file).startswith("{"):
        records = list(_records(file))
        if "settings" in records[0][1]:
            model = str(records.pop(0)[1].get("model", ""))
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
    return model, cells


def read_metrics(file: str | Path) -> list[dict]:
    """Read a training run's metrics.jsonl, one step a line; null, a loss that was not finite, becomes NaN.

    Raises:
        ValueError: there are no lines, or one that holds no step's loss.
    """
    records = []
    for where, record in _records(file):
        if "step" not in record or "loss" not in record:
            raise ValueError(f"{where} has no step and loss: it is no line of a metrics.jsonl of train.py")
        if record["loss"] is None:  # a fact about the run
            record["loss"] = math.nan
        for key in ("step", "loss"):
            if not isinstance(record[key], int | float) or isinstance(record[key], bool):
                raise ValueError(f"{where}: {key} {record[key]!r} must be a number")
        records.append(record)
    if not records:
        raise ValueError(f"{file} has no lines: it is no metrics.jsonl of train.py")
    return records


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

"""Write results as JSON and read the files that are drawn; errors name file and line.

Files are read into pandas tables whose index is the line number.
"""

import csv
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from ..common.files import null_for_nan

MOST_LOSS = 700.0  # The exponential of a larger loss overflows.


def json_text(value: Any) -> str:
    """Return results as JSON. Numbers that are not finite become null, because JSON has no NaN and no infinity."""
    return json.dumps(null_for_nan(value), indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Curve:
    """A model's perplexity over context length.

    Attributes:
        label: name of the model.
        points: (length, perplexity) for each length with a scored token, in order of length.
        trained_length: number of tokens in its training rows; None if unknown.
    """

    label: str
    points: list[tuple[int, float]]
    trained_length: int | None = None


def read_perplexity(file: str | Path) -> list[Curve]:
    """Read a CSV of eval_ppl.py, or one of the original project's script; each model's documents are summed up.

    Raises:
        ValueError: the file has other columns, no rows, an invalid row, or a model without a scored token.
    """
    table = _original_table(file) if _text(file).startswith(",") else _perplexity_table(file)
    if table.empty:
        raise ValueError(f"{file} has no rows")
    # A document whose labels are all -100 so far has no tokens and a loss that is not a number.
    table["loss"] = (table["loss"] * table["tokens"]).where(table["tokens"] > 0, 0.0)
    curves = []
    for label, own in table.groupby("model", sort=False):
        sums = own.groupby("length")[["loss", "tokens"]].sum().query("tokens > 0")
        if sums.empty:
            raise ValueError(f"{file}: {label} has no scored token at any length, so there is no curve")
        perplexity = np.exp((sums["loss"] / sums["tokens"]).clip(upper=MOST_LOSS))
        trained = own["trained_length"].iloc[-1]
        points = [(int(length), float(value)) for length, value in perplexity.items()]
        curves.append(Curve(label, points, None if math.isnan(trained) else int(trained)))
    return curves


def _perplexity_table(file: str | Path) -> pandas.DataFrame:
    """Return model, length, tokens, mean loss and trained length of a CSV of eval_ppl.py."""
    table = _csv_table(file, ("model", "length", "tokens", "loss"), "a CSV of eval_ppl.py")
    table["length"] = _numbers(file, table["length"], least=1, whole=True)
    table["tokens"] = _numbers(file, table["tokens"], whole=True)
    table["loss"] = _numbers(file, table["loss"].where(table["tokens"] > 0, "0"))
    # The column is absent in files of earlier versions, and empty where the config does not know.
    trained = table.get("trained_length", pandas.Series("", table.index))
    table["trained_length"] = _numbers(file, trained.rename("trained_length"), least=1, whole=True, empty=True)
    return table


def _original_table(file: str | Path) -> pandas.DataFrame:
    """Return the same columns from the original project's CSV: lengths first, then perplexities of each model."""
    wide = _csv_table(file, (), "a table of perplexities")
    lengths = pandas.Series(wide.columns[1:], index=[1] * (len(wide.columns) - 1), name="length")
    _numbers(file, lengths, least=1, whole=True)
    again = wide[""].duplicated()
    if again.any():
        raise ValueError(f"{file}, line {again.idxmax()} gives {wide[''][again.idxmax()]} again")
    table = wide.melt("", var_name="length", value_name="perplexity", ignore_index=False).rename(columns={"": "model"})
    # The model has no perplexity at such a length, so there is no point.
    broken = table["perplexity"].str.strip().str.lower().isin(["nan", "inf"])
    table["loss"] = np.log(_numbers(file, table["perplexity"].mask(broken, "1"), least=1))
    return table.assign(length=table["length"].astype(int), tokens=(~broken).astype(int), trained_length=math.nan)


def read_cells(file: str | Path) -> tuple[str, list[dict]]:
    """Read finished cells of eval_needle.py from its JSONL or its CSV.

    Returns:
        The model's name, empty if the file lacks it, and the cells: task, length, depth (or None), accuracy.

    Raises:
        ValueError: the file is neither of them, has no cells, or has an invalid line.
    """
    model, columns = "", ["task", "length", "depth", "accuracy"]
    if _text(file).startswith("{"):
        records = _json_records(file)
        if "settings" in records.get(1, {}):
            model = str(records.pop(1).get("model", ""))
        table = pandas.DataFrame(records.values(), index=list(records), columns=columns, dtype=object)
    else:
        table = _csv_table(file, columns, "a JSONL or CSV of eval_needle.py")
    if table.empty:
        raise ValueError(f"{file} holds no cells of eval_needle.py")
    unnamed = ~table["task"].map(lambda task: isinstance(task, str) and task != "")
    if unnamed.any():
        raise ValueError(f"{file}, line {unnamed.idxmax()}: no task; it is no cell of eval_needle.py")
    lengths = _numbers(file, table["length"], least=1, whole=True)
    depths = _numbers(file, table["depth"], most=1, empty=True)
    accuracies = _numbers(file, table["accuracy"], most=1)
    rows = zip(table["task"], lengths, depths, accuracies, strict=True)
    return model, [
        {"task": task, "length": int(length), "depth": None if math.isnan(depth) else depth, "accuracy": accuracy}
        for task, length, depth, accuracy in rows
    ]


def read_metrics(file: str | Path) -> pandas.DataFrame:
    """Read steps and losses of a training run's metrics.jsonl; null, a loss that was not finite, becomes NaN.

    Raises:
        ValueError: the file has no lines, or a line without step and loss.
    """
    records = _json_records(file)
    if not records:
        raise ValueError(f"{file} has no lines: it is no metrics.jsonl of train.py")
    for line, record in records.items():
        if "step" not in record or "loss" not in record:
            raise ValueError(f"{file}, line {line} has no step and loss: it is no line of a metrics.jsonl of train.py")
    table = pandas.DataFrame(records.values(), index=list(records), columns=["step", "loss"], dtype=object)
    finite = table["loss"].map(lambda loss: not isinstance(loss, float) or math.isfinite(loss))
    return pandas.DataFrame(
        {
            "step": _numbers(file, table["step"], whole=True),
            "loss": _numbers(file, table["loss"].where(finite, None), least=-math.inf, empty=True),
        }
    )


def _text(file: str | Path) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as reason:
        raise ValueError(f"{file} is no text file ({reason.reason} at byte {reason.start})") from reason


def _json_records(file: str | Path) -> dict[int, dict]:
    """Return the records of a JSONL file by line number, without an incomplete last line, as a killed run leaves it."""
    records, lines = {}, _text(file).split("\n")
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
        records[number] = record
    return records


def _csv_table(file: str | Path, columns: Iterable[str], kind: str) -> pandas.DataFrame:
    """Return a CSV with at least `columns`, every field as text. (The reader of pandas would fill up short rows.)"""
    reader = csv.reader(_text(file).splitlines())
    names = next(reader, [])
    missing = sorted(set(columns) - set(names))
    if missing:
        raise ValueError(f"{file} lacks the columns {missing}: it is not {kind}")
    rows = {}
    for row in filter(None, reader):
        if len(row) != len(names):
            raise ValueError(f"{file}, line {reader.line_num} does not have the {len(names)} fields of the first line")
        rows[reader.line_num] = row
    return pandas.DataFrame(rows.values(), index=list(rows), columns=names, dtype=object)


def _numbers(
    file: str | Path,
    column: pandas.Series,
    least: float = 0,
    most: float = math.inf,
    whole: bool = False,
    empty: bool = False,
) -> pandas.Series:
    """Return a column as finite numbers from `least` to `most`; with `empty`, empty fields and nulls become NaN."""
    missing = column.map(lambda value: empty and (value is None or value == "")).astype(bool)
    flags = column.map(lambda value: isinstance(value, bool)).astype(bool)
    values = pandas.to_numeric(column.mask(flags), errors="coerce")
    fits = values.between(least, most) & ~np.isinf(values)
    if whole:
        fits &= values % 1 == 0
    wrong = ~(fits | missing)
    if wrong.any():
        place = int(np.argmax(wrong.to_numpy()))
        wanted = "a whole number" if whole else "a number"
        bounds = f" of at least {least}" if most == math.inf else f" from {least} to {most}"
        raise ValueError(
            f"{file}, line {column.index[place]}: {column.name} {column.iloc[place]!r} must be {wanted}"
            + (bounds if math.isfinite(least) else "")
        )
    return values

"""Pictures of results: perplexity curves, needle heatmaps, training curves. Drawn without a display."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from .axes import Limits, length_axis, length_label, tokens_label, value_axis
from .results import Curve

DPI = 150
FORMATS = tuple(plt.Figure().canvas.get_supported_filetypes())
NO_LIMITS = Limits()
_WIDEST_LEVEL_LABEL = 5  # characters of a label that fit below a cell of a heatmap
SMOOTHED_SHARE = 0.05  # share of a run's steps that the window of the running mean covers
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "font.size": 10,
}


def draw_perplexity(curves: Sequence[Curve], output: str | Path, title: str = "", limits: Limits = NO_LIMITS) -> None:
    """Draw perplexity by context length, a line for each model, with a dotted line at its trained length.

    Args:
        curves: at least one, each with a point.
        output: path of the picture.
        title: title of the picture.
        limits: ends of the axes.

    Raises:
        ValueError: no point lies within the limits.
    """
    visible = limits.visible([point for curve in curves for point in curve.points])
    lengths = sorted({length for length, _ in visible})
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.2))
        colors: dict[int | None, list[Any]] = {}
        for curve in curves:
            (line,) = axes.plot(*zip(*curve.points, strict=True), marker="o", markersize=4, label=curve.label)
            colors.setdefault(curve.trained_length, []).append(line.get_color())
        for trained, own in colors.items():
            if trained is not None and lengths[0] <= trained <= lengths[-1]:
                color = own[0] if len(own) == 1 else "0.4"
                axes.axvline(trained, color=color, linestyle=":", label=f"trained length {tokens_label(trained)}")
        length_axis(axes, lengths, limits)
        value_axis(axes, [value for _, value in visible], limits)
        limits.apply(axes)
        axes.set_ylabel("perplexity over the whole context")
        axes.legend(framealpha=1, edgecolor="none")  # Dotted lines stay behind the legend.
        _save(figure, axes, output, title or "Perplexity by context length")


def short_names(names: Sequence[str]) -> list[str]:
    """Return the last part of each path, or the complete names if two last parts are equal."""
    short = [Path(name).name for name in names]
    return short if len(set(short)) == len(short) else list(names)


def needle_title(cells: Sequence[dict], model: str = "") -> str:
    """Return the title of a heatmap: the model, if its name is known, the task, and the lengths."""
    lengths = [cell["length"] for cell in cells]
    ends = " to ".join(tokens_label(n) for n in sorted({min(lengths), max(lengths)}))
    return f"{Path(model).name}: {cells[0]['task']}, {ends} tokens".removeprefix(": ")


def draw_needle(cells: Sequence[dict], output: str | Path, title: str = "") -> None:
    """Draw a heatmap of accuracy by length (to the right) and depth (downwards), with percentages in the cells.

    Args:
        cells: with "length", "depth" (None: a single row) and "accuracy", of one task.
        output: path of the PNG.
        title: title of the picture.
    """
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells}, key=lambda depth: -1 if depth is None else depth)
    values = {(cell["depth"], cell["length"]): cell["accuracy"] for cell in cells}
    table = [[values.get((depth, length), math.nan) for length in lengths] for depth in depths]
    labels = [tokens_label(length) for length in lengths]
    with plt.rc_context({**_STYLE, "axes.grid": False}):
        size = (max(4.5, 2.0 + 0.55 * len(lengths)), 1.5 + 0.42 * len(depths))
        figure, axes = plt.subplots(figsize=size)
        # Cividis keeps its order for readers who do not tell red from green.
        image = axes.pcolormesh(table, cmap="cividis", vmin=0, vmax=1, edgecolors="white", linewidth=1)
        for row, accuracies in enumerate(table):
            for column, accuracy in enumerate(accuracies):
                if not math.isnan(accuracy):
                    color = "black" if accuracy > 0.55 else "white"
                    axes.text(
                        column + 0.5, row + 0.5, f"{100 * accuracy:.0f}", ha="center", va="center", color=color, size=9
                    )
        axes.invert_yaxis()
        axes.set_xticks([i + 0.5 for i in range(len(lengths))], labels)
        if max(map(len, labels)) > _WIDEST_LEVEL_LABEL:
            axes.tick_params("x", rotation=45)
            plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
        axes.set_yticks(
            [i + 0.5 for i in range(len(depths))], ["" if d is None else f"{100 * d:.0f} %" for d in depths]
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(length_label(lengths))
        if depths != [None]:
            axes.set_ylabel("depth of the needle")
        figure.colorbar(
            image, ax=axes, format=FuncFormatter(lambda value, _: f"{100 * value:.0f} %"), label="right answers"
        )
        _save(figure, axes, output, title or needle_title(cells))


def draw_loss(
    runs: Sequence[tuple[str, pandas.DataFrame]], output: str | Path, title: str = "", limits: Limits = NO_LIMITS
) -> None:
    """Draw training loss by step, a colour for each run: single steps in a pale line, the running mean in a strong one.

    Args:
        runs: (label, steps), with the columns "step" and "loss".
        output: path of the picture.
        title: title of the picture.
        limits: ends of the axes.

    Raises:
        ValueError: no point lies within the limits.
    """
    limits.visible([tuple(point) for _, steps in runs for point in steps[["step", "loss"]].to_numpy()])
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.2))
        for label, steps in runs:
            width = max(1, round(SMOOTHED_SHARE * len(steps)))
            smooth: dict[str, Any] = {} if width == 1 else {"alpha": 0.3, "label": None}
            (line,) = axes.plot(steps["step"], steps["loss"], **{"label": label, **smooth})
            if width > 1:
                mean = steps["loss"].rolling(width, min_periods=1).mean()
                axes.plot(steps["step"], mean, color=line.get_color(), label=label)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats per learned token)")
        axes.legend(frameon=False)
        limits.apply(axes)
        _save(figure, axes, output, title or "Training loss")


def _save(figure, axes, output: str | Path, title: str) -> None:
    axes.set_title(title, fontsize=11)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DPI, bbox_inches="tight")
    plt.close(figure)

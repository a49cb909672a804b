"""Pictures of results: perplexity curves, needle heatmaps, training curves. Drawn without a display."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

DPI = 150
FORMATS = tuple(plt.Figure().canvas.get_supported_filetypes())
LOG_RATIO = 8  # largest over smallest value from which a perplexity axis is logarithmic
SMOOTHED_SHARE = 0.05  # of a run's steps, in the window of the smoothed loss
_STYLE = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "font.size": 10,
}


def tokens_label(tokens: float, _=None) -> str:
    """A length as people write it: 512, 4K (4096), 50K (50,000), 1M (either); K is 1024 unless 1000 is rounder."""
    kilo = 1024 if tokens % 1000 and tokens % 512 == 0 else 1000
    if tokens >= kilo**2 and tokens % (kilo**2 // 4) == 0:
        return f"{tokens / kilo**2:g}M"
    if tokens % (kilo // 2) == 0 and tokens >= kilo:
        return f"{tokens / kilo:g}K"
    return f"{tokens / 1000:.0f}K" if tokens >= 10_000 else f"{tokens:g}"


def draw_perplexity(
    curves: Sequence[tuple[str, dict[int, tuple[float, int]]]], output: str | Path, title: str = ""
) -> None:
    """Perplexity over context length, one line a model.

    Args:
        curves: (label, length -> (summed loss, tokens)).
        output: the PNG.
        title: above the picture.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.2))
        everything, lengths = [], set()
        for label, curve in curves:
            points = [(n, math.exp(min(loss / tokens, 700))) for n, (loss, tokens) in sorted(curve.items()) if tokens]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
            everything += [value for _, value in points]
            lengths |= {n for n, _ in points}
        _length_axis(axes, sorted(lengths))
        if max(everything) > LOG_RATIO * min(everything):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel("perplexity over the whole context")
        axes.legend(frameon=False)
        _save(figure, axes, output, title)


def _length_axis(axes, lengths: list[int]) -> None:
    """Ticks at the lengths themselves: logarithmic if they grow by factors, else even and thinned out."""
    steps = {b - a for a, b in zip(lengths, lengths[1:], strict=False)}
    if len(steps) > 2:  # an even grid has one step, and perhaps a last one that is shorter
        axes.set_xscale("log", base=2)
    axes.set_xticks(lengths[:: math.ceil(len(lengths) / 12)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(tokens_label))


def draw_needle(cells: Sequence[dict], output: str | Path, title: str = "") -> None:
    """A heatmap of accuracy, length to the right and depth downwards, each cell with its number in per cent.

    Args:
        cells: with "length", "depth" (None: a single row) and "accuracy", of one task.
        output: the PNG.
        title: above the picture.
    """
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells}, key=lambda depth: -1 if depth is None else depth)
    values = {(cell["depth"], cell["length"]): cell["accuracy"] for cell in cells}
    table = [[values.get((depth, length), math.nan) for length in lengths] for depth in depths]
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
        axes.set_xticks([i + 0.5 for i in range(len(lengths))], [tokens_label(length) for length in lengths])
        axes.set_yticks(
            [i + 0.5 for i in range(len(depths))], ["" if d is None else f"{100 * d:.0f} %" for d in depths]
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("context length (tokens)")
        if depths != [None]:
            axes.set_ylabel("depth of the needle")
        figure.colorbar(
            image, ax=axes, format=FuncFormatter(lambda value, _: f"{100 * value:.0f} %"), label="right answers"
        )
        _save(figure, axes, output, title)


def draw_loss(runs: Sequence[tuple[str, list[dict]]], output: str | Path, title: str = "") -> None:
    """Training loss over steps, one colour a run: every step pale, a running mean strong.

    Args:
        runs: (label, steps), each step with "step" and "loss".
        output: the PNG.
        title: above the picture.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(7, 4.2))
        for label, records in runs:
            steps, losses = [record["step"] for record in records], [record["loss"] for record in records]
            width = max(1, round(SMOOTHED_SHARE * len(losses)))
            (line,) = axes.plot(steps, losses, alpha=0.3 if width > 1 else 1, label=None if width > 1 else label)
            if width > 1:
                axes.plot(steps, running_mean(losses, width), color=line.get_color(), label=label)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats per learned token)")
        axes.legend(frameon=False)
        _save(figure, axes, output, title)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to width - 1 before it."""
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _save(figure, axes, output: str | Path, title: str) -> None:
    axes.set_title(title, fontsize=11)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DPI, bbox_inches="tight")
    plt.close(figure)

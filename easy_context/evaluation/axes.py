"""Axes of pictures: lengths in tokens, values that span decades, and the limits that a user sets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

KIBI = 1024
LOG_RATIO = 8  # ratio of the largest to the smallest value from which a perplexity axis is logarithmic
SPAN = 4  # the same ratio for lengths that are not round decimal numbers
# Maximum decades of an axis -> values labelled in each decade. Flat curves need a label nearby.
_SUBDIVISIONS = ((3, (1, 2, 3, 5)), (6, (1, 3)), (math.inf, (1,)))
_INCHES, _INCHES_A_CHARACTER = 5.9, 0.09  # width of the axes of curves, and of their tick labels


@dataclass(frozen=True)
class Limits:
    """Ends of the axes; None fits them to the data. An end of 0 or less keeps its axis linear."""

    xmin: float | None = None
    xmax: float | None = None
    ymin: float | None = None
    ymax: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the ends cannot be those of an axis."""
        for low, high in (("xmin", "xmax"), ("ymin", "ymax")):
            ends = getattr(self, low), getattr(self, high)
            if None not in ends and ends[0] >= ends[1]:
                raise ValueError(f"--{low} {ends[0]:g} must be below --{high} {ends[1]:g}")

    def visible(self, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the points within the limits.

        Args:
            points: (x, y) of all curves.

        Raises:
            ValueError: no point lies within the limits, so the picture would be empty.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        inside = [
            (x, y) for x, y in points if _is_between(x, self.xmin, self.xmax) and _is_between(y, self.ymin, self.ymax)
        ]
        if given and not inside:
            xs, ys = zip(*([point for point in points if math.isfinite(point[1])] or points), strict=True)
            raise ValueError(
                f"{' '.join(f'--{name} {value:g}' for name, value in given.items())}: no point lies there; x goes from "
                f"{min(xs):g} to {max(xs):g} and y from {min(ys):g} to {max(ys):g}"
            )
        return inside

    def apply(self, axes) -> None:
        """Set the ends that are given, after everything is drawn and scaled."""
        axes.set_xlim(self.xmin, self.xmax)
        axes.set_ylim(self.ymin, self.ymax)


def _is_between(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def tokens_label(tokens: float, _=None) -> str:
    """Return a length as text: 512, 4K (4096), 1.5K (1536), 1M (1,048,576); other numbers in full: 1000, 50,000.

    K is 1024 and M is 1024 K, never 1000 of something, and nothing is rounded, so that each length has a label of its
    own.
    """
    if tokens % 1000:
        for letter, unit, steps in (("M", KIBI**2, 4), ("K", KIBI, 2)):
            if tokens >= unit and tokens % (unit // steps) == 0:
                return f"{tokens / unit:g}{letter}"
    return f"{tokens:,.0f}" if tokens >= 10_000 else f"{tokens:g}"


def length_label(lengths: Sequence[float]) -> str:
    """Return the label of an axis of lengths; it explains K if a tick has one."""
    binary = any(tokens_label(n)[-1] in "KM" for n in lengths)
    return "context length (tokens, K = 1024)" if binary else "context length (tokens)"


def length_axis(axes, lengths: Sequence[float], limits: Limits) -> None:
    """Make the x-axis one of context lengths.

    The axis is logarithmic, with ticks at powers of two, if the lengths grow by factors, or if they span a large factor
    and are not round decimal numbers. Otherwise ticks are at the lengths themselves, as many as fit.

    Args:
        axes: Matplotlib axes on which everything is drawn.
        lengths: in ascending order, within the limits.
        limits: ends of the axes.
    """
    decimal = sum(n % 1000 == 0 for n in lengths) > len(lengths) / 2
    # An even grid has one step, and perhaps a last one that is shorter.
    grows = len({b - a for a, b in zip(lengths, lengths[1:], strict=False)}) > 2
    powers = [2**i for i in range(64) if lengths[0] <= 2**i <= lengths[-1]]
    ticks = list(lengths)
    if (grows or (not decimal and lengths[-1] >= SPAN * lengths[0])) and (limits.xmin is None or limits.xmin > 0):
        axes.set_xscale("log", base=2)
        if not decimal and len(powers) > 1:
            ticks = powers
    widest = max(len(tokens_label(n)) for n in ticks) + 1
    thinning = math.ceil(len(ticks) * widest * _INCHES_A_CHARACTER / _INCHES)
    axes.set_xticks(sorted(ticks[::-thinning]))  # The last tick stays.
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(tokens_label))
    axes.set_xlabel(length_label(ticks))


def value_axis(axes, values: Sequence[float], limits: Limits) -> None:
    """Make the y-axis logarithmic if the values, all positive, span a large factor; it has labels within each decade.

    Args:
        axes: Matplotlib axes on which everything is drawn.
        values: within the limits.
        limits: ends of the axes.
    """
    ratio = max(values) / min(values)
    if ratio <= LOG_RATIO or (limits.ymin is not None and limits.ymin <= 0):
        return
    axes.set_yscale("log")
    subdivisions = next(subs for decades, subs in _SUBDIVISIONS if math.log10(ratio) <= decades)
    axes.yaxis.set_major_locator(LogLocator(subs=subdivisions))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())

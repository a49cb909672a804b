"""Types and checks of flags that both benchmarks share; imports nothing heavy."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

from easy_context.common.files import check_writable


def make_parser(description: str, name: str, time_budget: float) -> argparse.ArgumentParser:
    """Return a parser with the flags that both benchmarks have; `name` is that of the benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--batch-size", type=at_least(1), default=1, help="rows that go through the model together")
    budget = f"seconds; rows that do not fit are left out; default {time_budget:g}"
    parser.add_argument("--time-budget", type=at_least(1, float), default=time_budget, help=budget)
    parser.add_argument("--seed", type=int, default=0)
    output = f"output/{name}.json"
    parser.add_argument("--output", default=output, help=f"file for the results as JSON; default {output}")
    return parser


def at_least(least: int, number: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return an argparse type that takes finite numbers from `least` on."""

    def parse(text: str) -> float:
        value = number(text)
        if not least <= value < math.inf:  # NaN compares false
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    parse.__name__ = number.__name__  # argparse writes "invalid int value" where int() fails
    return parse


def check_distinct(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """Exit with a message that names the first flag that repeats a value: its rows would share a name."""
    for name in names:
        values = getattr(args, name) or []
        if len(set(values)) != len(values):
            parser.error(f"--{name.replace('_', '-')} {' '.join(map(str, values))}: give each once")


def launched_processes() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_lengths(parser: argparse.ArgumentParser, flag: str, lengths: list[int], ranks: list[int]) -> None:
    """Exit with a message unless every method can split rows of these lengths over these numbers of ranks.

    Zigzag gives each rank two chunks. Lengths are multiples of 16 in any case, so that up to eight ranks can time the
    same rows.
    """
    multiple = math.lcm(16, *(2 * size for size in ranks))
    for length in lengths:
        if length % multiple:
            parser.error(
                f"{flag} {length}: a row must be a multiple of {multiple} tokens to be split over "
                f"{' and '.join(map(str, ranks))} ranks by every method"
            )


def check_output(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message unless `--output` can be written, before anything is measured."""
    try:
        check_writable(Path(args.output), "--output")
    except ValueError as reason:
        parser.error(str(reason))

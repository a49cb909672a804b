"""Checks of flags that both benchmarks share; imports nothing heavy."""

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # torchrun puts only this folder on the path

from easy_context.common.files import check_writable


def check_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """End with a message that names the first flag among `names` with a number below 1 (alone or in its list).

    A flag that is not given and has no default passes.
    """
    for name in names:
        value = getattr(args, name)
        numbers = value if isinstance(value, list) else [value]
        if value is not None and not all(1 <= number < math.inf for number in numbers):
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")


def check_distinct(parser: argparse.ArgumentParser, args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """End with a message that names the first flag among `names` that repeats a value: its rows would share a name."""
    for name in names:
        values = getattr(args, name) or []
        if len(set(values)) != len(values):
            parser.error(f"--{name.replace('_', '-')} {' '.join(map(str, values))}: give each once")


def launched_processes() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def check_lengths(parser: argparse.ArgumentParser, flag: str, lengths: list[int], ranks: list[int]) -> None:
    """End with a message unless every method can split rows of these lengths over so many ranks.

    Zigzag gives each rank two chunks. A multiple of 16 in any case, so that up to eight ranks can time the same rows.
    """
    multiple = math.lcm(16, *(2 * size for size in ranks))
    for length in lengths:
        if length % multiple:
            parser.error(
                f"{flag} {length}: a row must be a multiple of {multiple} tokens to be split over "
                f"{' and '.join(map(str, ranks))} ranks by every method"
            )


def check_output(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message unless `--output` can be written, before anything is measured."""
    try:
        check_writable(Path(args.output), "--output")
    except ValueError as reason:
        parser.error(str(reason))

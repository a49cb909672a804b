"""Checks of flags that both benchmarks share; imports nothing heavy."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # torchrun puts only this folder on the path

from easy_context.files import check_writable


def check_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """End with a message that names the first flag among `names` with a number below 1 (alone or in its list)."""
    for name in names:
        value = getattr(args, name)
        if any(number < 1 for number in (value if isinstance(value, list) else [value])):
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")


def check_output(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message unless `--output` can be written, before anything is measured."""
    try:
        check_writable(Path(args.output), "--output")
    except ValueError as reason:
        parser.error(str(reason))

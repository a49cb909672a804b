"""Checks of flags that both benchmarks share; imports nothing heavy."""

import argparse
import os
from pathlib import Path


def check_positive(parser: argparse.ArgumentParser, args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """End with a message that names the first flag among `names` with a number below 1 (alone or in its list)."""
    for name in names:
        value = getattr(args, name)
        if any(number < 1 for number in (value if isinstance(value, list) else [value])):
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")


def check_output(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message unless `--output` can be written, before anything is measured."""
    target = Path(args.output)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {target}: {error.strerror} ({error.filename}); name another file")
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        parser.error(f"--output {target}: cannot be written; name another file")

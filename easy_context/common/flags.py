"""Command lines: how flags are spelled, types that check a value, and refusals that are said once."""

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


class FlagParser(argparse.ArgumentParser):
    """An argument parser that takes every flag with dashes or underscores between its words, and none abbreviated.

    The original project spells some flags one way and some the other; a user should not have to remember which. An
    abbreviation would take a flag that a script does not have for another one that begins alike. What is wrong is said
    by one of the launched processes only.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        """Give known flags their own spelling before they are parsed."""
        known = {flag.replace("_", "-"): flag for flag in self._option_string_actions if flag.startswith("--")}
        spelled = []
        for word in sys.argv[1:] if args is None else args:
            flag, equals, value = word.partition("=")
            spelled.append(known.get(flag.replace("_", "-"), flag) + equals + value if flag.startswith("--") else word)
        return super().parse_known_args(spelled, namespace)

    def error(self, message: str) -> NoReturn:
        """Print usage and `message`, and exit with code 2."""
        let_first_process_speak()
        super().error(message)


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return an argparse type for a whole number from `least` to `most`."""
    return _number(int, "a whole number", least, most)


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for a finite number from `least` to `most`."""
    return _number(float, "a finite number", least, most)


def positive(text: str) -> float:
    """Read a flag's value that must be a finite number above 0."""
    value = number()(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return value


def _number(kind: Callable[[str], Any], wanted: str, least: float, most: float) -> Callable[[str], Any]:
    if most < math.inf:
        wanted += f" from {least} to {most}"
    elif least > -math.inf:
        wanted += f", at least {least}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            raise argparse.ArgumentTypeError(f"{text or repr(text)} must be {wanted}")
        return value

    return read


@contextlib.contextmanager
def refusals(script: str, kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Turn an error about what the user gave into one message, and exit with code 1.

    Args:
        script: its name, which begins the message.
        kinds: the errors that are the user's to mend.
    """
    try:
        yield
    except kinds as reason:
        let_first_process_speak()
        sys.exit(f"{script}: {reason}")


def let_first_process_speak(seconds: float = 30.0) -> None:
    """Wait so long, except on the first process of each machine, which meets the same problem and says so.

    The launcher ends all processes as soon as one exits, so this returns only where the first process has no problem.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(seconds)

"""Command lines: the spelling of flags, types that check a value, and errors that only one process prints."""

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_UNUSABLE = object()  # stands in for a value that could not be converted


class FlagParser(argparse.ArgumentParser):
    """An argument parser that accepts flags with dashes or underscores between their words, but not abbreviated.

    The original project uses both spellings; a user should not have to remember which. With abbreviations, a flag that
    a script does not have could be read as another one that begins with the same letters. All values that cannot be
    used are named together, and only one of the launched processes prints them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._problems: list[str] = []

    def parse_known_args(self, args=None, namespace=None):
        """Replace the spelling of known flags by the registered one before parsing."""
        known = {flag.replace("_", "-"): flag for flag in self._option_string_actions if flag.startswith("--")}
        spelled = []
        for word in sys.argv[1:] if args is None else args:
            flag, equals, value = word.partition("=")
            spelled.append(known.get(flag.replace("_", "-"), flag) + equals + value if flag.startswith("--") else word)
        self._problems = []
        parsed = super().parse_known_args(spelled, namespace)
        if self._problems:
            self.error(self._problems.pop())
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print usage, the values that could not be used so far and `message`, and exit with code 2."""
        let_first_process_speak()
        super().error("\n  ".join([*self._problems, message]))

    def _get_value(self, action, arg_string):
        """Convert one value; note a problem instead of stopping, so that the other flags are read as well."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as problem:
            self._problems.append(str(problem))
            return _UNUSABLE

    def _check_value(self, action, value):
        """Compare a value with the flag's choices; note a problem instead of stopping."""
        try:
            if value is not _UNUSABLE:
                super()._check_value(action, value)
        except argparse.ArgumentError as problem:
            self._problems.append(str(problem))


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
    """Turn an error about the user's input into one message, and exit with code 1.

    Args:
        script: name of the script, with which the message begins.
        kinds: the errors that the user can correct.
    """
    try:
        yield
    except kinds as reason:
        let_first_process_speak()
        sys.exit(f"{script}: {reason}")


def let_first_process_speak(seconds: float = 30.0) -> None:
    """Wait for some seconds on all but the first process of each machine, which usually prints the same problem.

    The launcher ends all processes as soon as one exits, so this returns only if the first process has no problem.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(seconds)

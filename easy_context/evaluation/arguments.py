"""Flags that both evaluations share, and their checks."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..kernels import KERNELS
from ..model.config import is_rope_base
from ..modes import MODES

DTYPES = ("auto", "bfloat16", "float16", "float32")
MOST_LENGTHS = 100_000  # in a grid; more are a slip of the pen


class FlagParser(argparse.ArgumentParser):
    """An argument parser that takes every flag with dashes or underscores between its words, and none abbreviated.

    The original project spells some flags one way and some the other; a user should not have to remember which. An
    abbreviation would take a flag that a script does not have for another one that begins alike.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        """Gives known flags their own spelling before they are parsed."""
        known = {flag.replace("_", "-"): flag for flag in self._option_string_actions if flag.startswith("--")}
        spelled = []
        for word in sys.argv[1:] if args is None else args:
            flag, equals, value = word.partition("=")
            spelled.append(known.get(flag.replace("_", "-"), flag) + equals + value if flag.startswith("--") else word)
        return super().parse_known_args(spelled, namespace)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how a model is loaded and spread over processes."""
    group = parser.add_argument_group("running the model")
    group.add_argument(
        "--parallel_mode",
        choices=MODES,
        help="how one row is split over processes; default: data_parallel on one process, zigzag_ring_attn on several",
    )
    group.add_argument(
        "--sequence-parallel-size",
        type=int,
        help="processes that share a row (default: all); groups of them work on different rows",
    )
    group.add_argument("--attn-kernel", default="auto", choices=("auto", *KERNELS), help="attention backend")
    group.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="of the weights; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    group.add_argument(
        "--rope-theta",
        type=float,
        help="RoPE base to evaluate with instead of the checkpoint's (other scaling is kept)",
    )


def context_lengths(shortest: int, longest: int, step: int, flags: tuple[str, str, str]) -> list[int]:
    """The grid of lengths: `shortest`, every `step` tokens from there (step 0 doubles instead), and `longest`.

    Args:
        shortest, longest: tokens, both included.
        step: tokens, or 0.
        flags: names of the three, for errors.

    Raises:
        ValueError: the numbers give no grid.
    """
    if shortest < 2 or longest < shortest:
        raise ValueError(f"{flags[0]} {shortest} and {flags[1]} {longest}: need 2 <= {flags[0]} <= {flags[1]}")
    if step < 0:
        raise ValueError(f"{flags[2]} {step}: give a number of tokens, or 0 to double the length from one to the next")
    if step and (longest - shortest) // step >= MOST_LENGTHS:
        raise ValueError(
            f"{flags[2]} {step}: from {shortest} to {longest} tokens that is {(longest - shortest) // step + 1:,} "
            f"lengths, more than {MOST_LENGTHS:,}; give a larger step"
        )
    lengths = [shortest]
    while lengths[-1] < longest:
        lengths.append(min(lengths[-1] + (step or lengths[-1]), longest))
    return lengths


@contextlib.contextmanager
def refusals(script: str) -> Iterator[None]:
    """Turn an error about what the user gave into a message, and exit with code 1."""
    try:
        yield
    except (ValueError, OSError) as reason:
        sys.exit(f"{script}: {reason}")


def check_model_flags(args: argparse.Namespace) -> None:
    """Raises ValueError for a value of `add_model_flags` that no model can run with."""
    if args.rope_theta is not None and not is_rope_base(args.rope_theta):
        raise ValueError(f"--rope-theta {args.rope_theta}: give a positive, finite number")

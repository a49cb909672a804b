"""Flags that both evaluations share."""

import argparse

from ..common.flags import positive, whole_number
from ..kernels import KERNELS
from ..modes import MODES

DTYPES = ("auto", "bfloat16", "float16", "float32")
MOST_LENGTHS = 100_000  # in a grid; more are a slip of the pen


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how a model is loaded and spread over processes."""
    group = parser.add_argument_group("running the model")
    group.add_argument(
        "--parallel_mode",
        choices=MODES,
        help="how one row is split over processes; default: data_parallel on one process, zigzag_ring_attn on several",
    )
    group.add_argument(
        "--sequence-parallel-size",
        type=whole_number(1),
        help="processes that share a row (default: all); groups of them work on different rows",
    )
    group.add_argument("--attn-kernel", default="auto", choices=("auto", *KERNELS), help="attention backend")
    group.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="of the weights; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    group.add_argument(
        "--rope-theta",
        type=positive,
        help="RoPE base to evaluate with instead of the checkpoint's (other scaling is kept)",
    )


def add_resume_flag(parser: argparse.ArgumentParser, output: str) -> None:
    """Add `--resume`; `output` is the flag that names where results go."""
    parser.add_argument(
        "--resume",
        choices=("auto", "none"),
        default="auto",
        help=f"auto, the default: go on with an unfinished run of the same settings in {output}; none: start anew",
    )


def context_lengths(shortest: int, longest: int, step: int, flags: tuple[str, str, str]) -> list[int]:
    """Return the grid of lengths: `shortest`, every `step` tokens from there (step 0 doubles instead), and `longest`.

    Args:
        shortest, longest: tokens, both included.
        step: tokens, 0 or more.
        flags: names of the three, for errors.

    Raises:
        ValueError: the numbers give no grid.
    """
    if shortest < 2 or longest < shortest:
        raise ValueError(f"{flags[0]} {shortest} and {flags[1]} {longest}: need 2 <= {flags[0]} <= {flags[1]}")
    if step and (longest - shortest) // step >= MOST_LENGTHS:
        raise ValueError(
            f"{flags[2]} {step}: from {shortest} to {longest} tokens that is {(longest - shortest) // step + 1:,} "
            f"lengths, more than {MOST_LENGTHS:,}; give a larger step"
        )
    lengths = [shortest]
    while lengths[-1] < longest:
        lengths.append(min(lengths[-1] + (step or lengths[-1]), longest))
    return lengths

"""The flags that `eval_ppl.py` and `eval_needle.py` share."""

import argparse

from ..common.flags import positive, whole_number
from ..kernels import KERNELS
from ..modes import MODES

DTYPES = ("auto", "bfloat16", "float16", "float32")
MOST_LENGTHS = 100_000  # A longer grid is taken for a typing error.


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set how a model is loaded and run on several processes."""
    group = parser.add_argument_group("running the model")
    group.add_argument(
        "--parallel_mode",
        choices=MODES,
        help="how a row is split over processes; default: data_parallel on one process, zigzag_ring_attn on several",
    )
    group.add_argument(
        "--sequence-parallel-size",
        type=whole_number(1),
        help="number of processes that share a row (default: all); several groups evaluate different rows",
    )
    group.add_argument(
        "--attn-kernel", default="auto", choices=("auto", *KERNELS), help="attention kernel (default: the fastest)"
    )
    group.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="dtype of the weights; auto: bfloat16 on GPUs, else float32"
    )
    group.add_argument(
        "--rope-theta",
        type=positive,
        help="RoPE base in place of the checkpoint's; any other scaling is kept",
    )


def add_resume_flag(parser: argparse.ArgumentParser, output: str) -> None:
    """Add `--resume`; `output` is the flag that names the place of the results."""
    parser.add_argument(
        "--resume",
        choices=("auto", "none"),
        default="auto",
        help=f"auto (default): resume an unfinished run with the same settings in {output}; none: start again",
    )


def context_lengths(shortest: int, longest: int, step: int, flags: tuple[str, str, str]) -> list[int]:
    """Return the grid of lengths: `shortest`, every `step` tokens from there (step 0 doubles instead), and `longest`.

    Args:
        shortest, longest: tokens, both included.
        step: tokens, 0 or more.
        flags: names of the three, for errors.

    Raises:
        ValueError: the numbers do not describe a grid.
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

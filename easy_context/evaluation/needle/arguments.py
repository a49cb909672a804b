"""eval_needle.py's flags, and the checks of them that load nothing."""

import argparse
from pathlib import Path

from ...common.files import check_writable
from ...common.flags import FlagParser, number, whole_number
from ..arguments import add_model_flags, add_resume_flag, context_lengths
from .needle_task import MOST_DIGITS, NEEDLE_TEMPLATE
from .ruler_tasks import RULER_TASKS

MODEL = "PY007/Llama2-7B-64K"  # as in the original project
SMALLEST_DEPTH_INTERVAL = 0.001  # a smaller one is a typing error


def build_parser() -> FlagParser:
    """Return the parser."""
    parser = FlagParser(
        description="Run needle in a haystack, or a RULER-like set of tasks, over lengths x depths x samples."
    )
    parser.add_argument("--model", default=MODEL, help="folder or hub name (default: %(default)s)")
    parser.add_argument(
        "--task",
        nargs="+",
        default=["needle"],
        choices=("needle", "ruler", *RULER_TASKS),
        help="tasks to run (default: needle); ruler runs all but needle",
    )
    parser.add_argument("--output_dir", type=Path, help="folder for results (default: output/needle/MODEL'S NAME)")
    add_resume_flag(parser, "--output_dir")
    parser.add_argument(
        "--overwrite", dest="resume", action="store_const", const="none", help="the same as --resume none"
    )
    _add_grid_flags(parser.add_argument_group("grid"))
    _add_prompt_flags(parser.add_argument_group("prompt"))
    _add_needle_flags(parser.add_argument_group("task needle"))
    add_model_flags(parser)
    return parser


def _add_grid_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--min_context_length",
        type=int,
        default=1024,
        help="shortest prompt in tokens, including its answer (default: %(default)s)",
    )
    group.add_argument(
        "--max_context_length", type=int, default=8192, help="longest prompt in tokens (default: %(default)s)"
    )
    group.add_argument(
        "--context_interval",
        type=whole_number(0),
        default=0,
        help="step between lengths in tokens; with 0 (default) each length is twice the previous one",
    )
    group.add_argument(
        "--depth_interval",
        type=number(SMALLEST_DEPTH_INTERVAL, 1),
        default=0.1,
        help="step between depths, as a share of the haystack (default: %(default)s)",
    )
    group.add_argument(
        "--num_samples", type=whole_number(1), default=1, help="number of prompts in a cell (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of numbers, names and passages (default: %(default)s)")
    group.add_argument(
        "--batch_tokens",
        type=whole_number(1),
        default=65536,
        help="maximum number of tokens in a batch of a cell's samples (default: %(default)s)",
    )


def _add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--haystack_dir", default="data/haystack", help="folder of .txt files (default: %(default)s)")
    group.add_argument(
        "--format",
        choices=("plain", "chat"),
        default="plain",
        help="plain text (default), or the tokenizer's chat template",
    )
    group.add_argument(
        "--few_shot", type=whole_number(0), default=0, help="solved examples before the question (default: %(default)s)"
    )
    group.add_argument("--prompt-template", default="", help="complete prompt, with {haystack} and {question}")


def _add_needle_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num_needles",
        type=whole_number(1),
        default=1,
        help="number of needles, spread from the cell's depth to the end (default: %(default)s)",
    )
    group.add_argument(
        "--ask", choices=("one", "all"), default="one", help="ask for the first needle (default), or for all of them"
    )
    group.add_argument(
        "--num_distractor",
        type=whole_number(0),
        default=0,
        help="number of sentences in the needle's form at random depths (default: %(default)s)",
    )
    group.add_argument(
        "--rnd_number_digits",
        "--digits",
        type=whole_number(1, MOST_DIGITS),
        help="number of digits in the numbers of all tasks (default: 7, and 5 for variable_tracking)",
    )
    group.add_argument(
        "--needle-template", default=NEEDLE_TEMPLATE, help="sentence with {key} and {value} (default: %(default)r)"
    )
    group.add_argument("--question-template", default="", help="question, which may use {key}")
    group.add_argument(
        "--answer-template",
        default="",
        help="answer with {value}; the part before {value} is given to the model, which must write the rest",
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, with the `lengths` and `depths` of the grid.

    Raises:
        ValueError: a value is not supported; the message names its flag.
    """
    args = build_parser().parse_args(arguments)
    flags = ("--min_context_length", "--max_context_length", "--context_interval")
    args.lengths = context_lengths(args.min_context_length, args.max_context_length, args.context_interval, flags)
    steps = int(1 / args.depth_interval + 1e-9)
    args.depths = [round(i * args.depth_interval, 6) for i in range(steps + 1)]
    if args.output_dir is None:
        args.output_dir = Path("output/needle", Path(args.model).name)
    check_writable(args.output_dir / "cells.jsonl", "--output_dir")
    return args

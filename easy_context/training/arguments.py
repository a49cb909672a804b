"""train.py's flags; argument_checks.py holds what is checked before anything heavy loads."""

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

# As in modes/, engines.py and kernels/, spelled out here so that --help need not import PyTorch; a test compares them.
MODES = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "data_parallel")
ENGINES = ("easy_context", "library")
KERNELS = ("auto", "flash_attn_4", "cudnn", "flash_attn", "torch_flash", "cpu", "reference")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong on one of the launched processes only; takes no flag for another that begins alike."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print usage and `message`, and exit with code 2."""
        _let_first_process_speak()
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of train.py; each flag has a default, shown by --help."""
    parser = _Parser(
        description="Train a Hugging Face language model on long rows, each split over several processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_model_and_data(parser)
    _add_optimisation(parser)
    _add_parallelism(parser)
    _add_saving(parser)
    _add_logging(parser)
    return parser


def _add_model_and_data(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("model and data")
    what.add_argument(
        "--model", default="meta-llama/Llama-2-7b-hf", help="hub name or folder of the model to start from"
    )
    what.add_argument(
        "--dataset",
        default="PY007/slimpajama_llama_tokenized_upsample_4096_chunk_1M",
        help="rows of input_ids (and labels, if some tokens should not be learnt): hub name, a folder of save_to_disk, "
        "or parquet, json or jsonl files",
    )
    what.add_argument(
        "--output-dir", default="./output", help="where metrics, arguments and the trained model are saved"
    )
    what.add_argument(
        "--overwrite",
        action="store_true",
        help="train anew into an --output-dir that holds a model; the same line goes on if that is cut off",
    )
    what.add_argument(
        "--seq-length",
        type=int,
        default=16384,
        help="most tokens of a row: longer rows are cut, shorter are padded to the longest of their batch",
    )
    what.add_argument(
        "--rope-theta", type=float, help="new base of the rotary embeddings; the model's own if not given"
    )
    what.add_argument("--eval-dataset", help="rows to report a loss on, in the forms that --dataset takes")
    what.add_argument("--eval-every", type=int, default=100, help="optimizer steps between evaluations")


def _add_optimisation(parser: argparse.ArgumentParser) -> None:
    step = parser.add_argument_group("optimisation")
    step.add_argument("--batch-size", type=int, default=1, help="rows of a micro-batch in each data-parallel group")
    step.add_argument("--gradient-accumulate-every", type=int, default=8, help="micro-batches in an optimizer step")
    step.add_argument("--max-train-steps", type=int, default=400, help="optimizer steps; epochs repeat until then")
    step.add_argument("--learning-rate", type=float, default=2e-5, help="of AdamW, after warm-up")
    step.add_argument("--warmup-steps", type=int, default=0, help="steps over which the learning rate rises linearly")
    step.add_argument(
        "--lr-scheduler", choices=("constant", "cosine", "linear"), default="constant", help="what follows the warm-up"
    )
    step.add_argument("--weight-decay", type=float, default=0.0, help="of AdamW, on matrices only")
    step.add_argument("--adam-betas", type=float, nargs=2, default=[0.9, 0.95], metavar="BETA", help="of AdamW")
    step.add_argument(
        "--max-grad-norm", type=float, default=1.0, help="gradients are clipped to this norm; 0 for never"
    )
    step.add_argument("--seed", type=int, default=42, help="of the order of the rows and of dropout")


def _mode(name: str) -> str:
    """Say of the original's fifth mode what to take in its place."""
    if name == "usp_attn":
        raise argparse.ArgumentTypeError(
            "usp_attn (rings of all-to-all groups) is not here yet: use ulysses_attn where the processes divide the "
            "query heads and the links are fast, else zigzag_ring_attn"
        )
    return name


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("parallelism, speed and memory")
    how.add_argument(
        "--parallel_mode",
        "--parallel-mode",
        type=_mode,
        choices=MODES,
        default="zigzag_ring_attn",
        help="how a row is split over processes",
    )
    how.add_argument(
        "--ring_degree",
        "--ring-degree",
        type=int,
        default=1,
        help="processes in a ring of usp_attn, which is not here yet; the other modes take the flag and ignore it",
    )
    how.add_argument(
        "--sequence-parallel-size",
        type=int,
        help="processes that share a row; all of them if not given (data_parallel: 1)",
    )
    how.add_argument("--attn-kernel", choices=KERNELS, default="auto", help="auto takes the fastest that can serve")
    how.add_argument(
        "--attn-engine",
        choices=ENGINES,
        default="easy_context",
        help="who computes the split attention; library: ring-flash-attn or yunchang on flash-attn, to compare with",
    )
    how.add_argument(
        "--gradient-checkpointing",
        choices=("none", "full", "offload"),
        default="offload",
        help="recompute layers in backward, their inputs kept on the device (full) or in host memory (offload)",
    )
    how.add_argument(
        "--keep-attention",
        choices=("gpu", "cpu", "none"),
        default="gpu",
        help="where checkpointing keeps attention outputs, which spares a second attention forward",
    )
    how.add_argument(
        "--offload",
        choices=("auto", "none", "optimizer", "all"),
        default="auto",
        help="what DeepSpeed ZeRO-3 keeps in host memory: nothing, the optimizer, or weights too; auto takes the first "
        "that fits the memory that is free. A DeepSpeed JSON that names a device wins",
    )
    how.add_argument(
        "--mlp-tile-size",
        type=int,
        default=0,
        help="run each MLP in tiles of this many local tokens, for shards beyond 100K tokens; 0 for whole",
    )
    how.add_argument(
        "--liger",
        action=argparse.BooleanOptionalAction,
        help="Liger's fused RMSNorm, RoPE, SwiGLU and loss; used by default where CUDA and liger-kernel are there",
    )
    how.add_argument("--mixed-precision", choices=("bf16", "no"), default="bf16", help="bf16, or float32 throughout")


def _add_saving(parser: argparse.ArgumentParser) -> None:
    saving = parser.add_argument_group("saving and resuming")
    saving.add_argument(
        "--save-every", type=int, default=0, help="steps between checkpoints to resume from; 0 for none"
    )
    saving.add_argument("--save-minutes", type=float, default=0.0, help="minutes between checkpoints; 0 for none")
    saving.add_argument("--keep-last", type=int, default=2, help="checkpoints to keep; older ones are removed")
    saving.add_argument(
        "--resume",
        default="auto",
        help="folder of a checkpoint to go on from; auto: the last whole one in --output-dir, if any; none: start anew",
    )
    saving.add_argument(
        "--resume-anyway", action="store_true", help="resume although settings that change the weights are others"
    )


def _add_logging(parser: argparse.ArgumentParser) -> None:
    log = parser.add_argument_group("logging")
    log.add_argument(
        "--report-to",
        choices=("none", "wandb", "tensorboard", "all"),
        help="trackers; wandb if --wandb is given, else none",
    )
    log.add_argument("--wandb", help="wandb project; offline if there is no API key")
    log.add_argument(
        "--log-every", type=int, default=1, help="steps between reports to the trackers and the progress bar"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags, spelled with dashes or underscores; `argv` is the process's own if None."""
    words = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args([re.sub("^--[a-z_]+", _with_dashes, word) for word in words])
    if args.report_to is None:
        args.report_to = "wandb" if args.wandb else "none"
    return args


def _with_dashes(flag: re.Match) -> str:
    return flag[0].replace("_", "-")


def check_arguments(args: argparse.Namespace) -> None:
    """Check everything that can be checked before the model loads; print all problems together, and exit if any.

    Args:
        args: from `parse_arguments`; not changed.
    """
    from .checks import find_problems, launch_problems

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if problems := launch_problems(world_size) + find_problems(args, world_size):
        cannot_start(problems)


@contextlib.contextmanager
def refusal() -> Iterator[None]:
    """Turn a ValueError into the message that train.py cannot start, and exit."""
    try:
        yield
    except ValueError as error:
        cannot_start([str(error)])


def cannot_start(problems: list[str]) -> NoReturn:
    """Print all problems together, on the first process of each machine, and exit with code 2."""
    _let_first_process_speak()
    print("train.py cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems), file=sys.stderr)
    sys.exit(2)


def _let_first_process_speak() -> None:
    """Wait, except on the first process of each machine, which meets the same problem and says so.

    The launcher ends all processes as soon as one exits, so this returns only where the first process has no problem.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(30)

"""train.py's flags, and every check of them, before anything heavy loads."""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

MODES = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "data_parallel")
KERNELS = ("auto", "flash_attn_4", "cudnn", "flash_attn", "torch_flash", "cpu", "reference")


def build_parser() -> argparse.ArgumentParser:
    """The parser of train.py; each flag has a default, shown by --help."""
    parser = argparse.ArgumentParser(
        description="Train a Hugging Face language model on long rows, each split over several processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
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
    what.add_argument("--overwrite", action="store_true", help="train anew into an --output-dir that holds a model")
    what.add_argument(
        "--seq-length", type=int, default=16384, help="tokens of a row; longer rows are cut, shorter padded"
    )
    what.add_argument(
        "--rope-theta", type=float, help="new base of the rotary embeddings; the model's own if not given"
    )
    what.add_argument("--eval-dataset", help="rows to report a loss on, in the forms that --dataset takes")
    what.add_argument("--eval-every", type=int, default=100, help="optimizer steps between evaluations")

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

    how = parser.add_argument_group("parallelism, speed and memory")
    how.add_argument(
        "--parallel_mode", choices=MODES, default="zigzag_ring_attn", help="how a row is split over processes"
    )
    how.add_argument(
        "--sequence-parallel-size",
        type=int,
        help="processes that share a row; all of them if not given (data_parallel: 1)",
    )
    how.add_argument("--attn-kernel", choices=KERNELS, default="auto", help="auto takes the fastest that can serve")
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
        "--mlp-tile-size",
        type=int,
        default=0,
        help="run each MLP in tiles of this many local tokens, for shards beyond 100K tokens; 0 for whole",
    )
    how.add_argument(
        "--liger",
        action=argparse.BooleanOptionalAction,
        help="Liger's fused RMSNorm, RoPE and SwiGLU; used by default where CUDA and liger-kernel are there",
    )
    how.add_argument("--mixed-precision", choices=("bf16", "no"), default="bf16", help="bf16, or float32 throughout")

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
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; `argv` is the process's own if None."""
    args = build_parser().parse_args(argv)
    if args.report_to is None:
        args.report_to = "wandb" if args.wandb else "none"
    return args


def check_arguments(args: argparse.Namespace) -> Any:
    """Check everything that can be checked before the model loads; print all problems together, and exit if any.

    Args:
        args: from `parse_arguments`.

    Returns:
        The model's config, with the RoPE base and window that the flags ask for.
    """
    problems, config = find_problems(args, int(os.environ.get("WORLD_SIZE", "1")))
    if problems:
        if int(os.environ.get("RANK", "0")) == 0:
            print("train.py cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems), file=sys.stderr)
            sys.stderr.flush()
        else:
            time.sleep(5)  # the launcher ends all ranks when one exits; let rank 0 speak first
        sys.exit(2)
    return config


def find_problems(args: argparse.Namespace, world_size: int) -> tuple[list[str], Any]:
    """All problems of these arguments on `world_size` processes, each naming flag, value and remedy, and the config."""
    problems = _number_problems(args)
    problems += _output_problems(args)
    size, problem = _sequence_parallel_size(args, world_size)
    problems += problem
    config, problem = _load_config(args.model)
    problems += problem
    if config is not None and not problems:
        problems += _model_problems(args, config, size)
    problems += _dataset_problems(args, config)
    return problems, config


def _number_problems(args: argparse.Namespace) -> list[str]:
    problems = []
    at_least_one = (
        "seq_length",
        "batch_size",
        "gradient_accumulate_every",
        "max_train_steps",
        "eval_every",
        "log_every",
    )
    not_negative = ("warmup_steps", "weight_decay", "max_grad_norm", "mlp_tile_size", "learning_rate")
    for names, least in ((at_least_one, 1), (not_negative, 0)):
        for name in names:
            value = getattr(args, name)
            if not (math.isfinite(value) and value >= least):
                problems.append(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if args.rope_theta is not None and not (math.isfinite(args.rope_theta) and args.rope_theta > 0):
        problems.append(f"--rope-theta {args.rope_theta} must be positive")
    if not all(0 <= beta < 1 for beta in args.adam_betas):
        problems.append(f"--adam-betas {args.adam_betas} must lie in [0, 1)")
    if args.wandb and args.report_to not in ("wandb", "all"):
        problems.append(f"--wandb {args.wandb} has no effect with --report-to {args.report_to}: use wandb or all")
    if args.mlp_tile_size and args.gradient_checkpointing == "none":
        problems.append(
            f"--mlp-tile-size {args.mlp_tile_size} needs --gradient-checkpointing full or offload: without it the MLP "
            "would be computed twice"
        )
    return problems


def _output_problems(args: argparse.Namespace) -> list[str]:
    from .checkpoints import is_finished

    output_dir = Path(args.output_dir)
    existing = output_dir
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return [f"--output-dir {args.output_dir} cannot be written: {existing} is no folder that you may write to"]
    if is_finished(output_dir) and not args.overwrite:
        return [f"--output-dir {args.output_dir} holds a finished model: choose another folder, or pass --overwrite"]
    return []


def _sequence_parallel_size(args: argparse.Namespace, world_size: int) -> tuple[int, list[str]]:
    size = args.sequence_parallel_size
    if args.parallel_mode == "data_parallel":
        if size not in (None, 1):
            return 1, [f"--sequence-parallel-size {size} has no meaning with data_parallel: leave it out"]
        return 1, []
    size = world_size if size is None else size
    if size < 1 or world_size % size:
        return 1, [
            f"--sequence-parallel-size {size} must divide the number of processes, {world_size}: launch a multiple of "
            f"it (--num_processes) or choose a divisor of {world_size}"
        ]
    return size, []


def _load_config(model: str) -> tuple[Any, list[str]]:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model), []
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        return None, [f"--model {model} has no config that loads ({first_line}): give a hub name or a model's folder"]


def _model_problems(args: argparse.Namespace, config: Any, size: int) -> list[str]:
    """What this model cannot do with these flags; also sets the RoPE base in `config`."""
    from .huggingface import modeling_module, refuse_model_features
    from .kernels import check_kernel_name
    from .modes import get_mode
    from .rope import set_rope_theta

    problems = []
    checks = (
        lambda: modeling_module(config.model_type),
        lambda: check_kernel_name(args.attn_kernel),
        lambda: get_mode(args.parallel_mode).check(config, args.seq_length, size),
        lambda: refuse_model_features(config, args.seq_length, size),
        lambda: set_rope_theta(config, args.rope_theta, args.seq_length),
        lambda: _check_dropout(config),
        lambda: _check_liger(args, config),
    )
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(f"--model {args.model}: {error}" if "--" not in str(error) else str(error))
    return problems


def _check_dropout(config: Any) -> None:
    dropout = getattr(config, "attention_dropout", 0.0)
    if dropout:
        raise ValueError(
            f"attention dropout {dropout} cannot be honoured: set attention_dropout to 0 in its config.json"
        )


def _check_liger(args: argparse.Namespace, config: Any) -> None:
    from .liger import liger_available, liger_refusal

    refusal = liger_refusal(config)
    if args.liger is None:
        args.liger = liger_available() and refusal is None
    elif args.liger and not liger_available():
        raise ValueError("--liger needs a CUDA device and the package liger-kernel: install it, or use --no-liger")
    elif args.liger and refusal:
        raise ValueError(f"--liger: {refusal}; use --no-liger")


def _dataset_problems(args: argparse.Namespace, config: Any) -> list[str]:
    from .data import check_token_ids, load_rows

    problems = []
    for flag, name in (("--dataset", args.dataset), ("--eval-dataset", args.eval_dataset)):
        if name is None:
            continue
        try:
            rows = load_rows(name, flag)
            if config is not None:
                check_token_ids(rows, config.vocab_size, flag)
        except ValueError as error:
            problems.append(str(error))
    return problems

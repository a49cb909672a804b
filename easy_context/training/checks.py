"""Every check of train.py's flags that needs no model weights; each problem names flag, value and remedy."""

import copy
import dataclasses
import importlib.util
import math
import os
from pathlib import Path
from typing import Any

from ..common.errors import first_line, name_flags
from ..model.config import is_rope_base, load_config, model_problems, problems_of, set_rope_theta
from .arguments import Arguments
from .refusal import end_run


def check_arguments(args: Arguments) -> tuple[Any, Any]:
    """Check everything that can be checked before the model loads; print all problems together, and exit if any.

    Args:
        args: from `parse_arguments`; not changed.

    Returns:
        The rows of --dataset and of --eval-dataset (None without one), which are checked.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    problems, rows, eval_rows = find_problems(args, world_size)
    problems = launch_problems(world_size) + problems
    if problems:
        end_run(problems)
    return rows, eval_rows


def find_problems(args: Arguments, world_size: int) -> tuple[list[str], Any, Any]:
    """Check everything at once, and change nothing.

    Args:
        args: from `parse_arguments`.
        world_size: processes of the launch.

    Returns:
        All problems, and the rows of --dataset and --eval-dataset (None without one, or if they cannot be used).
    """
    problems = _output_problems(args) + _resume_problems(args.resume) + _tracker_problems(args)
    config, problem = _checkpoint(args.model)
    problems += problem + flag_problems(args, config, world_size)
    rows, problem = _load_rows("--dataset", args.dataset, args, config)
    eval_rows = None
    eval_problem: list[str] = []
    if args.eval_dataset is not None:
        eval_rows, eval_problem = _load_rows("--eval-dataset", args.eval_dataset, args, config)
    return problems + problem + eval_problem, rows, eval_rows


def flag_problems(args: Arguments, config: Any, world_size: int, here: bool = True) -> list[str]:
    """Return what is wrong with numbers, and what the model cannot do with these flags on so many processes.

    Args:
        args: from `parse_arguments`; not changed.
        config: of the model; None leaves out what depends on it.
        world_size: processes of the launch.
        here: whether the run is on this machine, whose packages and GPUs are then checked, too.
    """
    from ..model.adapters import adapter_problems

    problems = _number_problems(args) + _document_problems(args) + _optimizer_problems(args, here)
    problems += adapter_problems(args, None if problems else config)
    size, problem = _sequence_parallel_size(args, world_size)
    if config is not None and size is not None and not problems:
        problem += _model_problems(args, config, size, here)
    return problems + problem


def launch_problems(world_size: int) -> list[str]:
    """Return what is wrong with how this process was started."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world_size > 1 and missing:
        return [
            f"WORLD_SIZE={world_size} is in the environment, but not {', '.join(missing)}: start with accelerate "
            "launch or torchrun, which set them all, or unset WORLD_SIZE for one process"
        ]
    return []


def _number_problems(args: Arguments) -> list[str]:
    problems = []
    for field in dataclasses.fields(Arguments):
        least, value = field.metadata["least"], getattr(args, field.name)
        if None not in (least, value) and not (math.isfinite(value) and value >= least):
            kind = "a whole number" if isinstance(value, int) else "a finite number"
            problems.append(f"--{field.name.replace('_', '-')} {value} must be {kind}, at least {least}")
    if args.rope_theta is not None and not is_rope_base(args.rope_theta):
        problems.append(f"--rope-theta {args.rope_theta} must be positive and finite")
    if args.lora_alpha is not None and not (math.isfinite(args.lora_alpha) and args.lora_alpha > 0):
        problems.append(f"--lora-alpha {args.lora_alpha} must be positive and finite")
    if not 0 <= args.seed < 2**32:  # numpy takes no other
        problems.append(f"--seed {args.seed} must lie in [0, 2^32)")
    if not all(0 <= beta < 1 for beta in args.adam_betas):
        problems.append(f"--adam-betas {args.adam_betas} must lie in [0, 1)")
    return problems


def _document_problems(args: Arguments) -> list[str]:
    flags = {
        f"--{name.replace('_', '-')} {value}": value
        for name in ("documents_end_with", "documents_begin_with")
        if (value := getattr(args, name)) is not None
    }
    if not args.respect_documents:
        given = [*flags, *(["--document-positions continue"] if args.document_positions == "continue" else [])]
        return [f"{' and '.join(given)} without --respect-documents has no effect: give it, too"] if given else []
    return [f"{' and '.join(flags)}: give one of them"] if len(flags) > 1 else []


def _optimizer_problems(args: Arguments, here: bool) -> list[str]:
    if args.optimizer == "adamw":
        return []
    from .accelerator import launched_for_deepspeed

    problems = []
    if args.offload != "auto":
        problems.append(
            f"--offload {args.offload} is DeepSpeed's, without which --optimizer {args.optimizer} runs: leave it out"
        )
    if here and launched_for_deepspeed():
        problems.append(
            f"--optimizer {args.optimizer} does not run under DeepSpeed, which shards the states of its own AdamW: "
            "launch with --config_file accelerate_configs/single_gpu_plain.yaml or torchrun, or choose adamw"
        )
    if here and importlib.util.find_spec("torchao") is None:
        problems.append(f"--optimizer {args.optimizer} needs the package torchao: pip install 'torchao>=0.18'")
    return problems


def _output_problems(args: Arguments) -> list[str]:
    from ..common.files import nearest_existing, probe_folder
    from .saving import is_finished

    if not args.output_dir.strip():
        return ["--output-dir is empty: name a folder"]
    output_dir = existing = Path(args.output_dir)
    try:
        existing = nearest_existing(output_dir)  # raises if a name is too long
        probe_folder(existing)
    except OSError as error:
        return [f"--output-dir {args.output_dir} cannot be written ({existing}: {error.strerror}): name another folder"]
    if os.path.realpath(args.output_dir) == os.path.realpath(args.model):
        return [f"--output-dir {args.output_dir} is --model, which training would overwrite: choose another folder"]
    for flag, dataset in (("--dataset", args.dataset), ("--eval-dataset", args.eval_dataset)):
        if dataset and os.path.isdir(dataset) and output_dir.resolve().is_relative_to(Path(dataset).resolve()):
            return [
                f"--output-dir {args.output_dir} lies in {flag} {dataset}, whose rows it would mix with other files: "
                "choose a folder outside of it"
            ]
    if is_finished(output_dir) and not args.overwrite:
        return [f"--output-dir {args.output_dir} holds a finished model: choose another folder, or pass --overwrite"]
    return []


def _resume_problems(resume: str) -> list[str]:
    """Return what is wrong with a checkpoint that --resume names; its checksums are read when it is loaded."""
    from .checkpoints.files import read_manifest

    if resume in ("auto", "none"):
        return []
    remedy = "give the folder of a checkpoint, auto or none"
    if not resume.strip():
        return [f"--resume is empty: {remedy}"]
    try:
        read_manifest(Path(resume))
    except (ValueError, OSError) as error:
        return [f"--resume {resume} cannot be used: {first_line(error)}; {remedy}"]
    return []


def _tracker_problems(args: Arguments) -> list[str]:
    problems = []
    if args.wandb and args.report_to not in ("wandb", "all"):
        problems.append(f"--wandb {args.wandb} has no effect with --report-to {args.report_to}: use wandb or all")
    for tracker in ("wandb", "tensorboard"):
        # Accelerate would leave a tracker out without a word.
        if args.report_to in (tracker, "all") and importlib.util.find_spec(tracker) is None:
            problems.append(
                f"--report-to {args.report_to} needs the package {tracker}: pip install {tracker}, or choose another"
            )
    return problems


def _sequence_parallel_size(args: Arguments, world_size: int) -> tuple[int | None, list[str]]:
    """Return the number of processes that share a row (None if the flag is wrong), and what is wrong with it."""
    from ..modes import find_mode

    try:
        return find_mode(args.parallel_mode).sequence_size(args.sequence_parallel_size, world_size), []
    except ValueError as error:
        return None, [name_flags(str(error))]


def _checkpoint(model: str) -> tuple[Any, list[str]]:
    """Return the config of a model that can be trained (None without one), and what is wrong with it or its weights."""
    from ..huggingface import modeling_module
    from ..model.weights import check_weights

    try:
        config = load_config(model)
    except ValueError as error:
        return None, [str(error)]
    # The config of another family may lack what the other checks read.
    problems = list(problems_of(model, (lambda: modeling_module(config.model_type),)))
    if not problems:
        problems = list(problems_of(model, (lambda: check_weights(model, config),)))
    return (None if problems else config), problems


def _model_problems(args: Arguments, config: Any, size: int, here: bool) -> list[str]:
    """Return what this model cannot do with these flags, and on this machine if the run is `here`."""
    import torch

    from ..model.liger import choose_liger
    from .memory_choice import requested_plan

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shared = model_problems(
        args.model,
        config,
        mode=args.parallel_mode,
        engine=args.attn_engine,
        ring_degree=args.ring_degree,
        kernel=args.attn_kernel,
        size=size,
        seq_length=args.seq_length,
        device=device if here else None,
        dtype=torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32,
        documents=args.respect_documents,
    )
    checks = [
        lambda: set_rope_theta(copy.deepcopy(config), args.rope_theta, args.seq_length),
        lambda: _check_dropout(config),
        lambda: here and choose_liger(args.liger, config),
        lambda: requested_plan(args, config.num_hidden_layers),
    ]
    return [*shared, *problems_of(args.model, checks)]


def _check_dropout(config: Any) -> None:
    dropout = getattr(config, "attention_dropout", 0.0)
    if dropout:
        raise ValueError(
            f"attention dropout {dropout} cannot be honoured: set attention_dropout to 0 in its config.json"
        )


def _load_rows(flag: str, name: str, args: Arguments, config: Any) -> tuple[Any, list[str]]:
    from ..data.documents import DocumentRule
    from ..data.token_rows import TokenRows

    documents = DocumentRule(args.documents_begin_with, args.documents_end_with) if args.respect_documents else None
    try:
        return TokenRows(
            name, flag, None if config is None else config.vocab_size, max(2, args.seq_length), documents
        ), []
    except ValueError as error:
        return None, [str(error)]

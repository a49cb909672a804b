"""train.py's flags, a documented field each; checks.py holds what is checked before anything heavy loads."""

import argparse
import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from ..common.flags import FlagParser
from ..kernels import KERNELS
from ..memory.plan import SYNTAX
from ..modes import ENGINES, MODES


def _flag(default: Any, help: str, *, least: float | None = None, **options: Any) -> Any:
    """Describe a flag of train.py.

    Args:
        default: its value where it is not given.
        help: what it does, its unit, and what its default means.
        least: smallest number that it takes.
        options: further keyword arguments of `ArgumentParser.add_argument`.
    """
    metadata = {"least": least, "options": {"help": help, **options}}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Arguments:
    """The settings of a run. Each field is the flag of its name, with dashes."""

    # Model and data.
    model: str = _flag("meta-llama/Llama-2-7b-hf", "hub name or folder of the model to start from")
    dataset: str = _flag(
        "PY007/slimpajama_llama_tokenized_upsample_4096_chunk_1M",
        "rows of input_ids (and labels, if some tokens should not be learnt): a hub name, a folder of save_to_disk, or "
        "parquet, json or jsonl files",
    )
    output_dir: str = _flag("./output", "folder for metrics, arguments and the trained model")
    overwrite: bool = _flag(
        False, "train anew into an --output-dir that holds a model; the same line goes on if that is cut off"
    )
    seq_length: int = _flag(
        16384,
        "most tokens of a row: longer rows are cut, shorter ones are padded to the longest of their micro-batch",
        least=2,
    )
    respect_documents: bool = _flag(
        False,
        "keep the documents of a row apart: attention and targets stay within each, and positions start anew. Where "
        "documents start is told by a column (prepare_data.py writes document_lengths) or by one of the next two flags",
    )
    documents_end_with: int | None = _flag(None, "id of the token that ends each document, such as EOS", least=0)
    documents_begin_with: int | None = _flag(None, "id of the token that begins each document, such as BOS", least=0)
    rope_theta: float | None = _flag(None, "new base of the rotary embeddings; the model's own if not given")
    eval_dataset: str | None = _flag(None, "rows to report a loss on, in the forms that --dataset takes")
    eval_every: int = _flag(100, "optimizer steps between evaluations", least=1)

    # Optimisation.
    batch_size: int = _flag(1, "rows of a micro-batch in each data-parallel group", least=1)
    gradient_accumulate_every: int = _flag(8, "micro-batches in an optimizer step", least=1)
    max_train_steps: int = _flag(400, "optimizer steps; epochs repeat until then", least=1)
    learning_rate: float = _flag(2e-5, "AdamW learning rate after the warm-up", least=0)
    warmup_steps: int = _flag(0, "optimizer steps over which the learning rate rises linearly", least=0)
    lr_scheduler: str = _flag(
        "constant", "course of the learning rate after the warm-up", choices=("constant", "cosine", "linear")
    )
    weight_decay: float = _flag(0.0, "AdamW weight decay, applied to matrices only", least=0)
    adam_betas: list[float] = _flag([0.9, 0.95], "AdamW betas", nargs=2, metavar="BETA")
    optimizer: str = _flag(
        "adamw",
        "adamw: float32 weights and moments. adamw8bit: torchao's, with moments of 8 bits and no float32 copy of bf16 "
        "weights, which are rounded stochastically; 6 bytes a parameter instead of 16, not shared out over GPUs. It "
        "runs without DeepSpeed",
        choices=("adamw", "adamw8bit"),
    )
    max_grad_norm: float = _flag(1.0, "norm to which gradients are clipped; 0 for no clipping", least=0)
    seed: int = _flag(42, "seed of the order of the rows and of dropout")

    # Parallelism, speed and memory.
    parallel_mode: str = _flag("zigzag_ring_attn", "how a row is split over processes", choices=MODES)
    ring_degree: int | None = _flag(
        None,
        "processes in a ring of usp_attn; by default the smallest number that keeps all-to-all inside a node and lets "
        "it divide the query heads",
    )
    sequence_parallel_size: int | None = _flag(
        None, "processes that share a row; all of them if not given (data_parallel: 1)"
    )
    attn_kernel: str = _flag(
        "auto",
        "attention kernel; auto takes the first that can serve, fastest on long rows first",
        choices=("auto", *KERNELS),
    )
    attn_engine: str = _flag(
        "easy_context",
        "easy_context, or for comparison only library: ring-flash-attn, yunchang or both, which need flash-attn",
        choices=ENGINES,
    )
    memory_plan: str = _flag(
        "auto",
        "what each layer keeps for backward; the rest is recomputed. auto: the fastest plan that fits the free memory. "
        f"Else {SYNTAX}",
    )
    gradient_checkpointing: str | None = _flag(
        None,
        "short for a plan that keeps all (none), or of every layer the input on the GPU (full) or in host memory "
        "(offload) and attention as --keep-attention says",
        choices=("none", "full", "offload"),
    )
    keep_attention: str | None = _flag(
        None,
        "short for a plan that keeps inputs in host memory, or as --gradient-checkpointing says, and attention here",
        choices=("gpu", "cpu", "none"),
    )
    offload: str = _flag(
        "auto",
        "what DeepSpeed ZeRO-3 keeps in host memory: nothing, the optimizer, or weights too; auto takes the first that "
        "fits the memory that is free. A DeepSpeed JSON that names a device wins",
        choices=("auto", "none", "optimizer", "all"),
    )
    mlp_tile_size: int | None = _flag(
        None,
        "run the MLPs of recomputed layers in tiles of this many local tokens; 0 for whole. By default whole where "
        "that fits, else 16384",
        least=0,
    )
    liger: bool | None = _flag(
        None,
        "Liger's fused RMSNorm, RoPE, SwiGLU and loss; by default used on CUDA where liger-kernel is installed and can "
        "run this model",
    )
    mixed_precision: str = _flag("bf16", "bf16, or float32 throughout", choices=("bf16", "no"))

    # Saving and resuming.
    save_every: int = _flag(
        0,
        "optimizer steps between checkpoints to resume from; 0 for none. Whatever is set here, a first SIGTERM or "
        "SIGUSR1 ends the run behind the step that is being made, with a checkpoint and exit code 0",
        least=0,
    )
    save_minutes: float = _flag(0.0, "minutes between checkpoints to resume from; 0 for none", least=0)
    keep_last: int = _flag(2, "checkpoints to keep; older ones are removed", least=1)
    resume: str = _flag(
        "auto",
        "folder of a checkpoint to go on from; auto: the last whole one in --output-dir, if any; none: start anew",
    )
    resume_anyway: bool = _flag(False, "resume although settings that change the weights are others")

    # Faults.
    skip_nonfinite: int = _flag(
        0,
        "steps that may be left out because their loss or gradient norm is not finite; the next one ends the run, "
        "weights untouched",
        least=0,
    )
    hang_timeout: float = _flag(
        7200.0,
        "seconds without progress after which the run ends and every process prints where it is; must be longer than "
        "the longest step. A process that sends no sign of life for 60 s (or for this time, if less) counts as frozen. "
        "0 turns both off",
        least=0,
    )

    # Logging.
    report_to: str | None = _flag(
        None, "trackers; wandb if --wandb is given, else none", choices=("none", "wandb", "tensorboard", "all")
    )
    wandb: str | None = _flag(None, "wandb project; offline if there is no API key")
    log_every: int = _flag(1, "optimizer steps between reports to the trackers and the progress bar", least=1)


# The first field of each group in --help.
_GROUPS = {
    "model": "model and data",
    "batch_size": "optimisation",
    "parallel_mode": "parallelism, speed and memory",
    "save_every": "saving and resuming",
    "skip_nonfinite": "faults",
    "report_to": "logging",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of train.py; --help shows each flag's default."""
    parser = FlagParser(
        description="Train a Hugging Face language model on long rows, each split over several processes. "
        "Flags may be spelled with dashes or underscores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    group: Any = parser
    for field in dataclasses.fields(Arguments):
        if field.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[field.name])
        group.add_argument(f"--{field.name.replace('_', '-')}", **_options(field))
    return parser


def _options(field: dataclasses.Field) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a field."""
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    options = {"default": default, **field.metadata["options"]}
    if field.type is bool:
        return options | {"action": "store_true"}
    inner = [kind for kind in typing.get_args(field.type) if kind is not types.NoneType]
    kind = inner[0] if inner else field.type
    if kind is bool:  # neither given nor refused is a third value
        return options | {"action": argparse.BooleanOptionalAction}
    return {"type": kind} | options


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    """Parse the flags, spelled with dashes or underscores; `argv` is the process's own if None."""
    args = Arguments(**vars(build_parser().parse_args(argv)))
    if args.report_to is None:
        args.report_to = "wandb" if args.wandb else "none"
    return args

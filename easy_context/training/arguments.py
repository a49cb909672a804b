"""train.py's flags, each a documented field. checks.py checks their values before anything heavy loads."""

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
        default: value if the flag is not given.
        help: help text with the effect of the flag, its unit, and the meaning of its default.
        least: smallest accepted number.
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
        "rows of input_ids, and of labels where some tokens should not be learned: a hub name, a folder of "
        "save_to_disk, or parquet, json or jsonl files",
    )
    output_dir: str = _flag("./output", "folder for metrics, arguments and the trained model")
    overwrite: bool = _flag(
        False, "train again into an --output-dir that holds a model; the same command resumes such a run"
    )
    seq_length: int = _flag(
        16384,
        "maximum number of tokens in a row: longer rows are truncated, shorter ones padded to the longest in their "
        "micro-batch",
        least=2,
    )
    respect_documents: bool = _flag(
        False,
        "keep the documents of a row apart: attention and targets stay within each. A column (document_lengths of "
        "prepare_data.py) or one of the next two flags tells where documents start",
    )
    documents_end_with: int | None = _flag(None, "id of the token that ends each document, such as EOS", least=0)
    documents_begin_with: int | None = _flag(None, "id of the token that begins each document, such as BOS", least=0)
    document_positions: str = _flag(
        "restart",
        "positions under --respect-documents: restart at 0 in each document, or continue over the row; with RoPE both "
        "give the same result up to rounding",
        choices=("restart", "continue"),
    )
    rope_theta: float | None = _flag(None, "new base of the rotary position embeddings; default: the base of --model")
    eval_dataset: str | None = _flag(None, "rows for an evaluation loss, in any form that --dataset takes")
    eval_every: int = _flag(100, "optimizer steps between evaluations", least=1)

    # Optimisation.
    batch_size: int = _flag(1, "rows in a micro-batch of each data-parallel group", least=1)
    gradient_accumulate_every: int = _flag(8, "micro-batches in an optimizer step", least=1)
    max_train_steps: int = _flag(400, "number of optimizer steps; the dataset is repeated as often as needed", least=1)
    learning_rate: float = _flag(2e-5, "AdamW learning rate after the warm-up", least=0)
    warmup_steps: int = _flag(0, "optimizer steps over which the learning rate rises linearly", least=0)
    lr_scheduler: str = _flag(
        "constant", "learning-rate schedule after the warm-up", choices=("constant", "cosine", "linear")
    )
    weight_decay: float = _flag(0.0, "AdamW weight decay, applied to matrices only", least=0)
    adam_betas: list[float] = _flag([0.9, 0.95], "AdamW betas", nargs=2, metavar="BETA")
    optimizer: str = _flag(
        "adamw",
        "adamw: float32 weights and moments. adamw8bit: torchao's AdamW with 8-bit moments and stochastically rounded "
        "bf16 weights; 6 bytes a parameter instead of 16, not divided over GPUs, only without DeepSpeed",
        choices=("adamw", "adamw8bit"),
    )
    max_grad_norm: float = _flag(
        1.0, "maximum gradient norm, to which larger ones are scaled down; 0: no clipping", least=0
    )
    seed: int = _flag(42, "random seed for the order of rows and for dropout")

    # What is trained.
    lora_r: int | None = _flag(
        None,
        "rank of LoRA's matrices, which are trained in place of the model's weights; all weights are trained if not "
        "given",
        least=1,
    )
    lora_alpha: float | None = _flag(
        None, "LoRA's scale: what the matrices add is multiplied by this over --lora-r. Twice --lora-r if not given"
    )
    lora_targets: list[str] = _flag(
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        "linear layers that get LoRA's matrices: ends of their names, one regular expression that matches whole names, "
        "or all-linear for all but the output layer",
        nargs="+",
        metavar="NAME",
    )
    train_embeddings: bool = _flag(
        False,
        "with LoRA: train the input embeddings, too (LongLoRA, arXiv 2309.12307), and with them an output that is tied",
    )
    train_norms: bool = _flag(False, "with LoRA: train the norms, too (LongLoRA, arXiv 2309.12307)")
    merge: bool = _flag(False, "with LoRA: save a plain model with the matrices added to its weights, not the adapter")
    train_only: str | None = _flag(
        None,
        "train only the weights in whose names this regular expression is found, such as self_attn, without LoRA",
        metavar="REGEX",
    )

    # Parallelism, speed and memory.
    parallel_mode: str = _flag(
        "zigzag_ring_attn", "how a row is split over processes (data_parallel: not at all)", choices=MODES
    )
    ring_degree: int | None = _flag(
        None,
        "processes in each ring of usp_attn; default: the smallest number for which all-to-all stays inside a node and "
        "its size divides the number of query heads",
    )
    sequence_parallel_size: int | None = _flag(
        None, "number of processes that share a row; default: all (data_parallel: 1)"
    )
    attn_kernel: str = _flag(
        "auto",
        "attention kernel; auto: the first one that supports this model and GPU, in the order of speed on long rows",
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
        f"Otherwise {SYNTAX}",
    )
    gradient_checkpointing: str | None = _flag(
        None,
        "shorthand for a memory plan. none: every layer keeps everything. full, offload: every layer keeps its input, "
        "on the GPU or in host memory, and attention as --keep-attention says",
        choices=("none", "full", "offload"),
    )
    keep_attention: str | None = _flag(
        None,
        "shorthand for a memory plan: where layers keep attention's results (none: attention runs twice); inputs stay "
        "in host memory unless --gradient-checkpointing is full",
        choices=("gpu", "cpu", "none"),
    )
    offload: str = _flag(
        "auto",
        "what DeepSpeed ZeRO-3 keeps in host memory: nothing, the optimizer, or the optimizer and the weights (all). "
        "auto: as little as fits the free memory. A device named in the DeepSpeed JSON overrides this flag",
        choices=("auto", "none", "optimizer", "all"),
    )
    mlp_tile_size: int | None = _flag(
        None,
        "run the MLPs of recomputed layers in tiles of this many local tokens; 0: no tiles; default: no tiles if that "
        "fits, else 16384",
        least=0,
    )
    liger: bool | None = _flag(
        None,
        "use Liger's fused RMSNorm, RoPE, SwiGLU and loss; default: on CUDA, if liger-kernel is installed and supports "
        "this model",
    )
    mixed_precision: str = _flag("bf16", "bf16: bf16 computation; no: float32 throughout", choices=("bf16", "no"))

    # Saving and resuming.
    save_every: int = _flag(
        0,
        "optimizer steps between checkpoints; 0: none. In any case the first SIGTERM or SIGUSR1 ends the run after the "
        "current step, with a checkpoint and exit code 0",
        least=0,
    )
    save_minutes: float = _flag(0.0, "minutes between checkpoints; 0: none", least=0)
    keep_last: int = _flag(2, "number of checkpoints to keep; older ones are deleted", least=1)
    resume: str = _flag(
        "auto",
        "folder of the checkpoint to resume from; auto: the last complete one in --output-dir, if there is one; none: "
        "start from --model",
    )
    resume_anyway: bool = _flag(False, "resume even if settings that affect the weights have changed")

    # Faults.
    skip_nonfinite: int = _flag(
        0,
        "maximum number of steps to skip because their loss or gradient norm is not finite; the next such step ends "
        "the run before it changes the weights",
        least=0,
    )
    hang_timeout: float = _flag(
        7200.0,
        "seconds without progress after which the run ends and every process prints its position; must exceed the "
        "longest step. A process that does not respond for 60 s, or for this time if it is shorter, counts as frozen. "
        "0 turns both checks off",
        least=0,
    )

    # Logging.
    report_to: str | None = _flag(
        None,
        "experiment trackers; default: wandb if --wandb is given, else none",
        choices=("none", "wandb", "tensorboard", "all"),
    )
    wandb: str | None = _flag(None, "name of the wandb project; without an API key wandb logs offline")
    log_every: int = _flag(1, "optimizer steps between reports to the trackers and the progress bar", least=1)


# The first field of each group in --help.
_GROUPS = {
    "model": "model and data",
    "batch_size": "optimisation",
    "lora_r": "what is trained",
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

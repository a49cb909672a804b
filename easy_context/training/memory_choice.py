"""Choose what each layer keeps for backward, and what ZeRO-3 keeps in host memory, before the model loads."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..huggingface import head_dim
from ..memory.forecast import Load, Memory, Shape, activation_memory, micro_batch_seconds
from ..memory.plan import MemoryPlan, format_memory_plan, parse_memory_plan, plan_of_flags
from ..memory.plan_search import TILE_SIZE, fastest_plan, most_frugal_plan
from ..model.adapters import trained_share
from ..modes import find_mode
from .arguments import Arguments
from .flops import peak_flops
from .free_memory import USABLE, USABLE_WITHOUT_LIGER, least_free
from .optimizer import keeps_weights_in_bf16
from .refusal import exit_on
from .state_memory import optimizer_step_memory, state_memory
from .zero_offload import CHOICES, IN_WORDS, is_zero_3, named_by_json, write_offload

logger = logging.getLogger(__name__)

GIB = 2**30
BUCKETS = GIB  # for weights and gradients while they are gathered and reduced


@dataclass(frozen=True)
class Launch:
    """The launch, on which the choice depends together with flags and model.

    Attributes:
        processes: number of processes, each with a GPU.
        kernel: name of the attention kernel.
        room: the memory that a process may use.
        plugin: Accelerate's DeepSpeed plugin; None without DeepSpeed, or if ZeRO-3 is assumed.
        trained_share: share of the model's parameters that are trained.
    """

    processes: int
    kernel: str
    room: Memory
    plugin: Any = None
    trained_share: float = 1.0


@dataclass(frozen=True)
class Option:
    """One way to use memory.

    Attributes:
        offload: what ZeRO-3 keeps in host memory; None without ZeRO-3.
        plan: what each layer keeps.
        load: a micro-batch of the longest rows, with the tile size of recomputed MLPs.
        need: the peak memory of a process.
    """

    offload: str | None
    plan: MemoryPlan
    load: Load
    need: Memory


@exit_on(ValueError)
def choose_memory(args: Arguments, config: Any, accelerator: Any) -> tuple[MemoryPlan, int]:
    """Choose what each layer keeps and what ZeRO-3 offloads: as the flags say, or else the fastest that fits.

    The DeepSpeed JSON or --offload determines what ZeRO-3 offloads; if neither does, it is as little as fits. The
    choice is written into the launch's DeepSpeed configuration. All processes make the same choice, from the least free
    memory among them, and one line of the log shows it. If nothing fits, or a flag does not suit the launch, the run
    ends with a message.

    Args:
        args: train.py's arguments.
        config: the model's config.
        accelerator: the Accelerator, before anything is prepared.

    Returns:
        The memory plan, and the number of tokens in a tile of recomputed MLPs (0 for no tiles).
    """
    plugin = accelerator.state.deepspeed_plugin
    on_gpu = accelerator.device.type == "cuda"
    if args.offload != "auto" and not is_zero_3(plugin):
        raise ValueError(
            f"--offload {args.offload} needs DeepSpeed ZeRO-3: launch with a configuration of accelerate_configs/, "
            "or leave it out"
        )
    named = named_by_json(plugin) if is_zero_3(plugin) else None
    free = least_free(accelerator)
    room = Memory(free.gpu * (USABLE if args.liger else USABLE_WITHOUT_LIGER), free.host * USABLE)
    kernel = find_mode(args.parallel_mode, args.attn_engine).select_kernel(
        args.attn_kernel, accelerator.device, _dtype(args), head_dim(config)
    )
    launch = Launch(accelerator.num_processes, kernel.name, room, plugin, trained_share(args, config))
    options = options_until_one_fits(_offloads(args, plugin, named, on_gpu), args, config, launch)
    option = options[-1]
    fits = option.need.fits(room)
    if len(options) > 1 and not fits:
        raise ValueError(_nothing_fits(options, free))
    if option.offload is not None and not named and (on_gpu or args.offload != "auto"):
        write_offload(plugin, option.offload)
    _log_choice(option, args, named, _needed(option, config, free, accelerator.device) if on_gpu else None)
    if on_gpu and not fits:
        logger.warning(
            "this probably does not fit this machine: leave --offload and --memory-plan at auto, or use more GPUs or a "
            "shorter --seq-length"
        )
    return option.plan, option.load.mlp_tile_size


def requested_plan(args: Arguments, layers: int) -> MemoryPlan | None:
    """Return the plan that the flags ask for, or None if they leave the choice open.

    Raises:
        ValueError: the flags contradict each other, or the plan is invalid.
    """
    older = {"--gradient-checkpointing": args.gradient_checkpointing, "--keep-attention": args.keep_attention}
    given = [f"{flag} {value}" for flag, value in older.items() if value is not None]
    if args.memory_plan != "auto":
        if given:
            several = " and ".join([f"--memory-plan {args.memory_plan}", *given])
            raise ValueError(f"{several} both set what layers keep: give only --memory-plan, or leave it out")
        plan = parse_memory_plan(args.memory_plan, layers)
    elif given:
        plan = (plan_of_flags(args.gradient_checkpointing or "offload", args.keep_attention or "gpu"),) * layers
    else:
        return None
    if args.mlp_tile_size and all(keeps.everything for keeps in plan):
        raise ValueError(
            f"--mlp-tile-size {args.mlp_tile_size} cuts the MLPs of recomputed layers, and --memory-plan all or "
            "--gradient-checkpointing none recomputes none"
        )
    return plan


def _offloads(args: Arguments, plugin: Any, named: str | None, on_gpu: bool) -> tuple[str | None, ...]:
    """Return what ZeRO-3 may keep in host memory, fastest first."""
    if not is_zero_3(plugin):
        return (None,)
    if named or args.offload != "auto":
        return (named or args.offload,)
    return CHOICES if on_gpu else ("none",)  # Without a GPU everything is in host memory anyway.


def options_until_one_fits(
    offloads: tuple[str | None, ...], args: Arguments, config: Any, launch: Launch
) -> list[Option]:
    """Return the best option for each offloading in turn, up to the first that fits."""
    options: list[Option] = []
    for offload in offloads:
        options.append(best_option(offload, args, config, launch))
        if options[-1].need.fits(launch.room):
            break
    return options


def best_option(offload: str | None, args: Arguments, config: Any, launch: Launch) -> Option:
    """Return the fastest option with this offloading that fits, or else the one that needs the least memory."""
    shape = Shape.of(config)
    launched = (offload, args, launch.plugin, shape, launch.processes, launch.trained_share)
    states, optimizer_step = state_memory(*launched), optimizer_step_memory(*launched)

    def whole(activations: Memory) -> Memory:
        return states + Memory(max(activations.gpu, optimizer_step) + BUCKETS, activations.host)

    plan, load = requested_plan(args, shape.layers), micro_batch(args, launch)
    if offload is None and launch.plugin is None and not keeps_weights_in_bf16(args):
        load = replace(load, size=4)  # Autocast leaves hidden states in float32; the rest is counted so, too.
    tile_sizes: tuple[int, ...] = (0,)
    if args.mlp_tile_size is not None:
        tile_sizes = (args.mlp_tile_size,)
    elif load.tokens > TILE_SIZE:
        tile_sizes = (0, TILE_SIZE)
    found = fastest_plan(shape, load, lambda need: whole(need).fits(launch.room), tile_sizes, plan)
    plan, tile_size = found or (plan or most_frugal_plan(shape.layers), tile_sizes[-1])
    load = replace(load, mlp_tile_size=tile_size)
    return Option(offload, plan, load, whole(activation_memory(shape, load, plan)))


def micro_batch(args: Arguments, launch: Launch) -> Load:
    """Return what a process computes in a micro-batch of the longest rows."""
    mode = find_mode(args.parallel_mode, args.attn_engine)
    sharing = mode.sequence_size(args.sequence_parallel_size, launch.processes)
    return Load(
        tokens=args.batch_size * math.ceil(args.seq_length / sharing),
        row=args.seq_length,
        size=_dtype(args).itemsize,
        liger=bool(args.liger),
        kernel=launch.kernel,
        trained_share=launch.trained_share,
    )


def _dtype(args: Arguments) -> torch.dtype:
    return torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32


def _nothing_fits(options: list[Option], free: Memory) -> str:
    tried = "; ".join(f"{option.offload}: {_compared(option.need, free)}" for option in options)
    return (
        f"--offload auto finds no way to fit this model and rows of this length into memory ({tried}). Use more GPUs, "
        "a shorter --seq-length or --memory-plan input@cpu, which keeps least; --offload all tries it nevertheless"
    )


def _compared(need: Memory, free: Memory) -> str:
    return (
        f"about {need.gpu / GIB:.0f} of {free.gpu / GIB:.0f} GiB on each GPU and {need.host / GIB:.0f} of "
        f"{free.host / GIB:.0f} GiB of host memory a process"
    )


def _needed(option: Option, config: Any, free: Memory, device: torch.device) -> str:
    """Return the forecast of memory, and of time on a card whose speed is known."""
    peak = peak_flops(device)
    if peak is None:
        return _compared(option.need, free)
    seconds = micro_batch_seconds(Shape.of(config), option.load, option.plan, peak)
    return f"{_compared(option.need, free)}; about {seconds:.3g} s for a micro-batch of the longest rows"


def _log_choice(option: Option, args: Arguments, named: str | None, needed: str | None) -> None:
    """Log the choice and its forecast in one line."""
    parts = [f"memory plan: {format_memory_plan(option.plan)}"]
    if option.load.mlp_tile_size:
        parts[0] += f", MLPs in tiles of {option.load.mlp_tile_size} tokens"
    if option.offload is not None:
        overruled = f"; --offload {args.offload} has no effect" if named and args.offload not in ("auto", named) else ""
        why = f" (as the DeepSpeed JSON says{overruled})" if named else ""
        parts.append(f"offload: {option.offload}, {IN_WORDS[option.offload]}{why}")
    if needed is not None:
        parts.append(needed)
    logger.info("; ".join(parts))

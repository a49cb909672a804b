"""Forecast memory, step time and the longest possible row of a training run, without needing its GPUs."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..memory.forecast import H200_PEAK, HOST_RATE, MEMORY_RATE, Memory, Shape, activation_peak, micro_batch_seconds
from ..memory.plan import format_memory_plan
from ..model.adapters import trained_share
from .arguments import Arguments
from .flops import PEAK_FLOPS, flops_per_token
from .free_memory import USABLE
from .memory_choice import BUCKETS, GIB, Launch, Option, options_until_one_fits
from .state_memory import state_memory
from .zero_offload import CHOICES, IN_WORDS

# Gigabytes of known cards, as sold.
CARD_MEMORY = {
    **{"B200": 192, "H200": 141, "GH200": 96, "H100 NVL": 94, "H100": 80, "H100 PCIe": 80, "H800": 80},
    **{"A100": 80, "A800": 80, "L40S": 48, "A40": 48, "A6000": 48, "4090": 24, "3090": 24},
}
_HOPPER_OR_NEWER = ("B200", "H200", "GH200", "H100", "H800")
_USABLE = 0.985  # share of a card's memory (in GiB, as many as its gigabytes); driver and CUDA take the rest
_ALONE_TO_SEVERAL = 0.95  # ratio of the speed of a GPU among others, with communication, to its speed alone
_HOST_OPTIMIZER_RATE = 1e9  # parameters/s of DeepSpeed's AdamW on the host; assumed, not measured
# Bytes that a step reads and writes for each parameter; those of adamw8bit are assumed, not measured.
_OPTIMIZER_BYTES = {"adamw": 30, "adamw8bit": 10}


@dataclass(frozen=True)
class Machines:
    """The GPUs to train on.

    Attributes:
        gpus: total number of GPUs; one process runs on each.
        card: name of the GPU, a key of CARD_MEMORY.
        free: memory that is free for one process: on its GPU, and its share of the host's memory.
    """

    gpus: int
    card: str
    free: Memory

    @classmethod
    def of(cls, gpus: int, card: str, gpu_memory: float, host_memory: float, gpus_per_machine: int) -> "Machines":
        """Return machines with `gpu_memory` gigabytes on each GPU and `host_memory` gigabytes each."""
        sharing = min(gpus, gpus_per_machine)
        return cls(gpus, card, Memory(_USABLE * gpu_memory * GIB, host_memory * 1e9 / sharing))


@dataclass(frozen=True)
class Forecast:
    """The memory and time that a run needs.

    Attributes:
        option: the memory plan and ZeRO-3's offloading.
        fits: whether the run fits into the free memory.
        gpu: bytes on each GPU by part, at the peak.
        host: bytes of host memory of each process by part.
        seconds: duration of an optimizer step by part.
        tokens_per_second: throughput of all GPUs together.
        mfu: model FLOPs utilisation.
    """

    option: Option
    fits: bool
    gpu: dict[str, float]
    host: dict[str, float]
    seconds: dict[str, float]
    tokens_per_second: float
    mfu: float


def forecast(args: Arguments, config: Any, machines: Machines) -> Forecast:
    """Forecast a run under ZeRO-3, or without DeepSpeed where --optimizer runs so.

    Args:
        args: train.py's arguments; --offload, --memory-plan and --mlp-tile-size may be left to be chosen here.
        config: config of the model.
        machines: machines to run on.

    Raises:
        ValueError: flags that contradict each other, or that do not go with the number of GPUs.
    """
    launch = _launch(args, config, machines)
    option = options_until_one_fits(_offloads(args), args, config, launch)[-1]
    shape = Shape.of(config)
    gpu, host = _parts(option, shape, args, machines.gpus)
    seconds = _seconds(option, shape, args, machines)
    step = sum(seconds.values())
    groups = machines.gpus * option.load.tokens / (args.batch_size * args.seq_length)
    tokens = args.batch_size * args.seq_length * args.gradient_accumulate_every * groups
    trained = None if launch.trained_share == 1 else launch.trained_share * shape.parameters
    flops = tokens * flops_per_token(config, shape.parameters, args.seq_length, trained)
    mfu = flops / step / (PEAK_FLOPS[machines.card] * machines.gpus)
    return Forecast(option, option.need.fits(launch.room), gpu, host, seconds, tokens / step, mfu)


def longest_row(args: Arguments, config: Any, machines: Machines) -> int:
    """Return the most tokens of a row, to 2 %, for which some memory plan fits; 0 if none of 1024 does."""

    launch = _launch(args, config, machines)

    def fits(seq_length: int) -> bool:
        longer = dataclasses.replace(args, seq_length=seq_length, offload="auto")
        options = options_until_one_fits(_offloads(longer), longer, config, launch)
        return options[-1].need.fits(launch.room)

    if not fits(1024):
        return 0
    short = 1024
    while fits(2 * short):
        short *= 2
    long = 2 * short
    while long - short > max(1024, short // 50):
        middle = (short + long) // 2048 * 1024
        short, long = (middle, long) if fits(middle) else (short, middle)
    return short


def describe(result: Forecast, args: Arguments, config: Any, machines: Machines) -> str:
    """Return the forecast as text."""
    option, free = result.option, machines.free
    parameters = Shape.of(config).parameters
    tiles = f", MLPs in tiles of {option.load.mlp_tile_size} tokens" if option.load.mlp_tile_size else ""
    lines = [
        f"{args.model}: {parameters / 1e9:.2f}e9 parameters, rows of {args.seq_length:,} tokens, "
        f"{option.load.tokens:,} of a micro-batch on each of {machines.gpus} x {machines.card}",
        "",
        *_table("GPU", result.gpu, free.gpu),
        "",
        *_table("host, each process", result.host, free.host),
        "",
        f"memory plan: {format_memory_plan(option.plan)}{tiles}",
        f"offload: {option.offload or 'none'}, {IN_WORDS[option.offload or 'none']}",
        f"step of {args.gradient_accumulate_every} micro-batches: {sum(result.seconds.values()):.1f} s ("
        + ", ".join(f"{part} {seconds:.1f}" for part, seconds in result.seconds.items())
        + f"), {result.tokens_per_second:,.0f} tokens/s, MFU {result.mfu:.0%}",
    ]
    if not result.fits:
        lines.append(f"does not fit: more than {USABLE:.0%} of what is free. Use more GPUs or shorter rows")
    return "\n".join(lines)


def _table(what: str, parts: dict[str, float], free: float) -> list[str]:
    rows = [*parts.items(), ("together", sum(parts.values())), ("free", free)]
    return [f"{what:<32}{'GiB':>8}", *(f"  {part:<30}{size / GIB:8.1f}" for part, size in rows)]


def _launch(args: Arguments, config: Any, machines: Machines) -> Launch:
    # On Ampere FlashAttention-2 reaches the share of the peak that cuDNN reaches on Hopper.
    fastest = "flash_attn_4" if machines.card.split()[0] in _HOPPER_OR_NEWER else "cudnn"
    kernel = fastest if args.attn_kernel == "auto" else args.attn_kernel
    room = Memory(USABLE * machines.free.gpu, USABLE * machines.free.host)
    return Launch(machines.gpus, kernel, room, trained_share=trained_share(args, config))


def _offloads(args: Arguments) -> tuple[str | None, ...]:
    """Return what ZeRO-3 may keep in host memory, fastest first; None for a run without DeepSpeed."""
    if args.optimizer == "adamw8bit":
        return (None,)
    return CHOICES if args.offload == "auto" else (args.offload,)


def _parts(option: Option, shape: Shape, args: Arguments, processes: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes of the peak on the GPU and on the host, by part."""
    own = shape.parameters / (1 if option.offload is None else processes)  # Only ZeRO divides them.
    peak = activation_peak(shape, option.load, option.plan)
    weights = 0.0 if option.offload == "all" else option.load.size * own
    states = state_memory(option.offload, args, None, shape, processes, option.load.trained_share)
    gpu = {
        "weights": weights,
        "gradients and optimizer": states.gpu - weights,
        "kept for backward": peak.kept,
        f"work in {peak.moment}": peak.work,
        "buckets": BUCKETS,
    }
    rest = option.need.gpu - sum(gpu.values())
    if rest > 1:  # The optimizer's step needs more than the activations.
        gpu["optimizer's step beyond that"] = rest
    host = {"weights, gradients, optimizer": option.need.host - peak.host, "kept for backward": peak.host}
    return gpu, host


def _seconds(option: Option, shape: Shape, args: Arguments, machines: Machines) -> dict[str, float]:
    """Return the time of an optimizer step by part."""
    slower = H200_PEAK / PEAK_FLOPS[machines.card]
    own = shape.parameters / (1 if option.offload is None else machines.gpus)
    computing = micro_batch_seconds(shape, option.load, option.plan, PEAK_FLOPS[machines.card])
    if machines.gpus > 1:
        computing /= _ALONE_TO_SEVERAL
    micro_batches = args.gradient_accumulate_every
    seconds = {"forward and backward": micro_batches * computing}
    trained = option.load.trained_share * own
    if option.offload == "all":  # fetched in forward and in backward; gradients go back
        seconds["weights to and from the host"] = micro_batches * option.load.size * (2 * own + trained) / HOST_RATE
    if option.offload in (None, "none"):
        seconds["optimizer"] = _OPTIMIZER_BYTES[args.optimizer] * trained / MEMORY_RATE * slower
    else:
        seconds["optimizer on the host"] = trained / _HOST_OPTIMIZER_RATE
    return seconds

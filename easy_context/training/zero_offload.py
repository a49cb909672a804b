"""Choose what DeepSpeed ZeRO-3 keeps in host memory, from the memory that is there, before the model loads."""

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..huggingface import head_dim
from ..modes import find_mode
from .arguments import Arguments
from .refusal import refusal

logger = logging.getLogger(__name__)

CHOICES = ("none", "optimizer", "all")  # fastest first
MARGIN = 0.92  # of free memory: the rest is for fragments, buckets and what the estimate leaves out
GIB = 2**30
_IN_WORDS = {
    "none": "weights and optimizer stay on the GPU",
    "optimizer": "the optimizer waits in host memory, weights stay on the GPU",
    "all": "weights and optimizer wait in host memory",
}


@dataclass(frozen=True)
class Memory:
    """Bytes for one process: needed or free.

    Attributes:
        gpu: on its GPU.
        host: in host memory; of what is free, the share of each process of the machine.
    """

    gpu: float
    host: float

    def fits(self, free: "Memory") -> bool:
        """Return whether this need fits what is free, with the margin."""
        return self.gpu <= MARGIN * free.gpu and self.host <= MARGIN * free.host


@refusal()
def choose_offload(args: Arguments, config: Any, accelerator: Any) -> None:
    """Settle `zero_optimization.offload_*` of a ZeRO-3 launch: the JSON's word, --offload, or what fits.

    All processes decide alike, by the least free memory among them; one line in the log says what was chosen. Where
    nothing fits, or the flag has no meaning in this launch, the run ends with a message.

    Args:
        args: train.py's arguments.
        config: of the model.
        accelerator: with its process group; nothing has been prepared.
    """
    plugin = accelerator.state.deepspeed_plugin
    zero = {} if plugin is None else plugin.deepspeed_config.get("zero_optimization", {})
    if zero.get("stage") != 3:
        if args.offload != "auto":
            raise ValueError(
                f"--offload {args.offload} needs DeepSpeed ZeRO-3: launch with a configuration of accelerate_configs/, "
                "or leave it out"
            )
        return
    named = _named_by_json(zero)
    on_cpu = accelerator.device.type != "cuda"
    if on_cpu and args.offload == "auto":
        return  # everything is in host memory anyway
    needs = {choice: memory_needed(choice, args, config, accelerator.num_processes) for choice in CHOICES}
    free = _least_free(accelerator)
    choice = named or (_first_that_fits(needs, free) if args.offload == "auto" else args.offload)
    overruled = f"; --offload {args.offload} has no effect" if named and args.offload not in ("auto", named) else ""
    why = f" (as the DeepSpeed JSON says{overruled})" if named else ""
    logger.info("offload: %s, %s%s; %s", choice, _IN_WORDS[choice], why, _compared(needs[choice], free))
    if not on_cpu and not needs[choice].fits(free):
        logger.warning("offload %s probably does not fit this machine; --offload auto would choose", choice)
    if not named:
        _write(plugin, choice)


def _named_by_json(zero: dict[str, Any]) -> str | None:
    """Return the choice that the launch configuration makes, None if it leaves it open."""
    devices = {kind: (zero.get(f"offload_{kind}") or {}).get("device") for kind in ("optimizer", "param")}
    if devices["param"] in ("cpu", "nvme"):
        return "all"
    if devices["optimizer"] in ("cpu", "nvme"):
        return "optimizer"
    # Accelerate writes "none" itself where a YAML file describes DeepSpeed without a JSON.
    from_json = "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ
    return "none" if from_json and "none" in devices.values() else None


def _write(plugin: Any, choice: str) -> None:
    zero = plugin.deepspeed_config["zero_optimization"]
    for kind, offloaded in (("optimizer", choice != "none"), ("param", choice == "all")):
        zero.pop(f"offload_{kind}", None)
        if offloaded:
            zero[f"offload_{kind}"] = {"device": "cpu", "pin_memory": True}
    if choice != "none" and torch.cuda.is_available():
        # PyTorch's AdamW would run on the host, many times slower than DeepSpeed's for CPUs.
        plugin.deepspeed_config.get("optimizer", {}).get("params", {}).pop("torch_adam", None)
    plugin.set_deepspeed_weakref()  # from_pretrained reads a copy


def _first_that_fits(needs: dict[str, Memory], free: Memory) -> str:
    for choice, need in needs.items():
        if need.fits(free):
            return choice
    tried = "; ".join(f"{choice}: {_compared(need, free)}" for choice, need in needs.items())
    raise ValueError(
        f"--offload auto finds no way to fit this model and rows of this length into memory ({tried}). Use more GPUs, "
        "a shorter --seq-length, --keep-attention cpu or --mlp-tile-size 16384; --offload all tries it nevertheless"
    )


def _compared(need: Memory, free: Memory) -> str:
    return (
        f"about {need.gpu / GIB:.0f} of {free.gpu / GIB:.0f} GiB on each GPU and {need.host / GIB:.0f} of "
        f"{free.host / GIB:.0f} GiB of host memory a process"
    )


def memory_needed(choice: str, args: Arguments, config: Any, processes: int) -> Memory:
    """Estimate the peak of one process under ZeRO-3.

    Mixed-precision AdamW holds 16 bytes a parameter: bf16 weights and gradients, float32 weights and two moments.
    Offloaded, DeepSpeed adds float32 gradients on the host (20 bytes a parameter were counted there with all
    offloaded, 18 without the weights). Activations: see `activation_bytes`.

    Args:
        choice: one of CHOICES.
        args: train.py's arguments.
        config: of the model.
        processes: of the launch; they share weights, gradients and optimizer.

    Returns:
        Bytes on the GPU and on the host.
    """
    own = parameter_count(config) / processes
    in_half = args.mixed_precision == "bf16"
    states = {
        "none": Memory(16 * own, 0.0),
        "optimizer": Memory((2 if in_half else 4) * own, 18 * own),
        "all": Memory(0.0, 20 * own),
    }[choice]
    sharing = find_mode(args.parallel_mode).sequence_size(args.sequence_parallel_size, processes)
    tokens = args.batch_size * math.ceil(args.seq_length / sharing)
    activations = activation_bytes(args, config, tokens)
    # The optimizer works on up to 1e9 parameters at a time, when activations are gone.
    step = 12 * min(own, 1e9) if choice == "none" else 0.0
    return Memory(states.gpu + max(activations.gpu, step), states.host + activations.host)


def activation_bytes(args: Arguments, config: Any, tokens: int) -> Memory:
    """Estimate what `tokens` local tokens keep and what one layer and the loss work in.

    The factors of one layer's work were fitted to the peaks of a Llama-3-8B shape at 256K tokens on an H200, with
    Liger's layers; without them a layer keeps about 1.4 times as much.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    size = 2 if args.mixed_precision == "bf16" else 4
    heads, plain_layers = config.num_attention_heads, 1.0 if args.liger else 1.4
    layer_input = tokens * hidden * size
    attention = tokens * heads * (head_dim(config) * size + 4)  # the output and its log-sum-exp
    mlp_tokens = min(tokens, args.mlp_tile_size or tokens)
    work = plain_layers * size * (15 * tokens * hidden + 2.7 * mlp_tokens * inner)
    loss = config.vocab_size * hidden * (2 * size + 4) + 0.75 * GIB
    if args.gradient_checkpointing == "none":
        return Memory(layers * plain_layers * size * tokens * (5 * hidden + 4 * inner) + work + loss + 2 * GIB, 0.0)
    on_gpu, on_host = work + loss + 2 * GIB, 0.0
    if args.gradient_checkpointing == "offload":
        on_host += layers * _power_of_two(layer_input)  # as PyTorch rounds pinned memory
    else:
        on_gpu += layers * layer_input
    if args.keep_attention == "gpu":
        on_gpu += layers * attention
    elif args.keep_attention == "cpu":
        on_host += layers * _power_of_two(attention)
    return Memory(on_gpu, on_host)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def parameter_count(config: Any) -> int:
    """Return the number of a Llama-like model's weights, tied ones once, without its norms and biases."""
    width = head_dim(config) * config.hidden_size
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    attention = 2 * width * (config.num_attention_heads + key_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_hidden_layers * (attention + mlp) + embeddings


def _least_free(accelerator: Any) -> Memory:
    """Return the least free memory of any process, the host's divided by the processes of its machine."""
    device = accelerator.device
    gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    host = free_host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    if not dist.is_initialized():
        return Memory(gpu, host)
    least = torch.tensor([gpu, host], dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return Memory(*least.tolist())


def free_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that this process can still take: of the machine, and of its container.

    Args:
        proc: where the kernel shows `meminfo` and `self/cgroup`.
        cgroups: where control groups are mounted, version 1 or 2.
    """
    available = next(
        int(line.split()[1]) * 1024
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    return min([available, *_left_in_cgroups(proc, cgroups)])


def _left_in_cgroups(proc: Path, cgroups: Path) -> list[int]:
    """Return what is left under each memory limit of this process's control group and of those above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, limit, usage = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = root / name.lstrip("/")
        for folder in (own, *own.parents):
            if folder != root and root not in folder.parents:
                break
            try:
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            except (OSError, ValueError):  # no such group in this namespace, or "max"
                continue
            left.append(max(0, most - used + _reclaimable(folder)))
    return left


def _reclaimable(folder: Path) -> int:
    """Return the bytes of a control group's usage that are only cached files."""
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))

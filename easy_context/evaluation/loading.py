"""Join the launcher's process group and load a model into it: complete on every rank, or partitioned by DeepSpeed."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..common.errors import naming_flags
from ..huggingface import SUPPORTED_MODELS
from ..memory.tiled_forward import gather_layers_whole
from ..mesh import CurrentMesh, Mesh
from ..model.config import load_config, model_problems, set_rope_theta
from ..model.weights import check_weights, load_whole
from ..modes import find_mode
from ..sequence_parallel import apply_seq_parallel_monkey_patch, remove_seq_parallel_monkey_patch
from ..training.accelerator import COLLECTIVE_TIMEOUT, compile_nothing_on_cpu, launched_for_deepspeed
from .scorer import Scorer, sizes_at_once


class UnusableModel(ValueError):
    """Raised for a model that cannot be used, as its loading shows; the message is for the user."""


@contextlib.contextmanager
def distributed() -> Iterator[torch.device]:
    """Join the process group of whatever launcher started this process, and leave it at the end.

    Any launcher that sets RANK, WORLD_SIZE and MASTER_ADDR works, such as `accelerate launch` and `torchrun`. Without a
    launcher there is one process and no group.

    Yields:
        This process's device.
    """
    device = own_device()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    started = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if started and not launched_for_deepspeed():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        yield device
    finally:
        if started and dist.is_initialized():
            dist.destroy_process_group()


def own_device() -> torch.device:
    """Return this process's GPU, or the CPU where there is none."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")


def dtype_of(args, device: torch.device | None = None) -> torch.dtype:
    """Return the dtype that --dtype names on a device, by default on this process's."""
    device = device or own_device()
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if args.dtype == "auto" else args.dtype)


def load_model_config(name: str, args: argparse.Namespace, longest: int) -> Any:
    """Load the config of a model to evaluate, with the RoPE base of the flags; only headers of weights are read.

    Args:
        name: path or hub name.
        args: the flags of `add_model_flags`.
        longest: tokens of the longest row.

    Raises:
        ValueError: there is no such model, its weights are incomplete, or the flags do not suit it.
    """
    config = load_config(name)
    check_weights(name, config)
    if args.rope_theta is not None:
        with naming_flags():
            set_rope_theta(config, args.rope_theta, longest)
    check_parallelism(name, config, args, longest)
    return config


@contextlib.contextmanager
def load_scorer(name: str, config, args, device: torch.device, frugal: bool = False) -> Iterator[Scorer]:
    """Load a model under the parallel mode that the flags ask for, and remove the patch at the end.

    Args:
        name: path or hub name.
        config: from `load_model_config`.
        args: the flags of `add_model_flags`.
        device: from `distributed`.
        frugal: whether to use less memory at some cost in time.

    Raises:
        UnusableModel: the model cannot be loaded, or its output layer does more than a matrix product, which the
            chunked loss would ignore.
    """
    accelerator = _deepspeed_accelerator(device) if launched_for_deepspeed() else None
    mode, mesh = _apply_mode(config, args)
    try:
        if accelerator is not None and mesh.data_size > 1:
            raise UnusableModel(
                f"--parallel_mode {mode} with {mesh.data_size} data-parallel groups cannot run under DeepSpeed, whose "
                "ranks must all do the same passes; use a sequence-parallel mode or a launch config without DeepSpeed"
            )
        try:
            model = load_whole(name, config, dtype_of(args, device))
            check_output_layer(model, name)
        except ValueError as reason:
            raise UnusableModel(str(reason)) from reason
        model.eval()
        if accelerator is None:
            model = model.to(device)
        else:
            if mode is not None:
                gather_layers_whole(model)
            model = accelerator.prepare(model).module
        tile, chunk = sizes_at_once(frugal)
        yield Scorer(model, mode, mesh, device, chunk, tile, frugal)
    finally:
        remove_seq_parallel_monkey_patch()


def _apply_mode(config, args) -> tuple[str | None, CurrentMesh | Mesh]:
    """Patch the model family for the mode of the flags or, by default, for one that suits the number of processes."""
    mode = mode_of(config.model_type, args)
    if mode is None:
        return None, Mesh()
    mesh = apply_seq_parallel_monkey_patch(
        mode,
        config.model_type,
        query_heads=config.num_attention_heads,
        attn_kernel=args.attn_kernel,
        sequence_parallel_size=args.sequence_parallel_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return mode, mesh


def mode_of(model_type: str, args) -> str | None:
    """Return the parallel mode; None for a family without modes, which runs on one process only."""
    if args.parallel_mode is None and processes() == 1 and model_type not in SUPPORTED_MODELS:
        return None
    return args.parallel_mode or ("zigzag_ring_attn" if processes() > 1 else "data_parallel")


def processes() -> int:
    """Return the number of processes that the launcher started."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def check_parallelism(name: str, config: Any, args: argparse.Namespace, longest: int) -> None:
    """Raise ValueError if a model cannot be evaluated on rows of `longest` tokens as the flags and the launcher ask.

    It is called before the model is loaded and before the process group is joined.
    """
    mode = mode_of(config.model_type, args)
    if mode is None:
        if args.attn_kernel != "auto":
            raise ValueError(
                f"--attn-kernel {args.attn_kernel}: model type {config.model_type!r} runs its own attention; leave the "
                "flag out"
            )
        return
    with naming_flags():
        size = find_mode(mode).sequence_size(args.sequence_parallel_size, processes())
    device = own_device()
    found = model_problems(
        name,
        config,
        mode=mode,
        size=size,
        seq_length=longest,
        kernel=args.attn_kernel,
        device=device,
        dtype=dtype_of(args, device),
    )
    if problems := list(found):
        raise ValueError("\n".join(problems))


def check_output_layer(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError unless the logits are the output embedding times the last hidden state."""
    head = model.get_output_embeddings()
    extras = [
        key for key in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(model.config, key, None)
    ]
    if head is None or getattr(head, "bias", None) is not None or extras:
        what = ", ".join(extras) or ("no output embedding" if head is None else "a bias")
        raise ValueError(f"--model {name}: its output layer has {what}, which is not supported; use a Llama-like model")


def _deepspeed_accelerator(device: torch.device):
    """Return Accelerate, set up by a launch config with DeepSpeed, which splits the model's weights over the ranks."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cpu":
        compile_nothing_on_cpu()
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=COLLECTIVE_TIMEOUT)])
    # Accelerate wants a batch size before it prepares a model without a data loader.
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    return accelerator

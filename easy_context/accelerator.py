"""The Accelerator, optimizer and scheduler, set up alike for DeepSpeed or plain PyTorch, on CUDA or CPU."""

import logging
import math
import os
import warnings
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

COLLECTIVE_TIMEOUT = timedelta(seconds=1_000_000)  # one rank may prepare data or save for hours


def build_accelerator(args: Namespace) -> Any:
    """Make the Accelerator that the launch configuration and the flags ask for.

    Args:
        args: train.py's arguments.

    Returns:
        An `accelerate.Accelerator` whose process group is initialised (gloo without CUDA) when launched on several
        processes.

    Raises:
        RuntimeError: Accelerate sees another number of processes than were launched.
    """
    from accelerate import Accelerator, InitProcessGroupKwargs

    trackers = {"none": None, "all": ["wandb", "tensorboard"]}.get(args.report_to, args.report_to)
    group_options: dict[str, Any] = {"timeout": COLLECTIVE_TIMEOUT}
    with_deepspeed = launched_for_deepspeed()
    on_cpu = not torch.cuda.is_available()
    if on_cpu and "WORLD_SIZE" in os.environ:
        group_options["backend"] = "gloo"  # without it Accelerate believes that there is one process
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns on each process that it found no GPU
    if on_cpu and with_deepspeed:
        compile_nothing_on_cpu()
    accelerator = Accelerator(
        # cpu=True wraps models in DDP; without it a launch by torchrun would train apart on every process. It also
        # switches DeepSpeed off.
        cpu=on_cpu and not with_deepspeed,
        gradient_accumulation_steps=args.gradient_accumulate_every,
        mixed_precision=args.mixed_precision,
        log_with=trackers,
        project_dir=args.output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(**group_options)],
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise RuntimeError(
            f"WORLD_SIZE is {launched}, but Accelerate sees {accelerator.num_processes} processes: start train.py with "
            "`accelerate launch` or torchrun, which set RANK and LOCAL_RANK too, or unset WORLD_SIZE"
        )
    if accelerator.state.deepspeed_plugin is not None:
        _configure_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, args)
    _set_up_logs(accelerator.is_main_process)
    return accelerator


def launched_for_deepspeed() -> bool:
    """Whether `accelerate launch` started this process with a DeepSpeed configuration."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _set_up_logs(is_main_process: bool) -> None:
    """Let rank 0 say what this package chose, and keep out what libraries say of their own calls, hundreds of times."""
    from transformers.utils.logging import disable_progress_bar

    logging.basicConfig(format="%(message)s")
    if not is_main_process:
        disable_progress_bar()  # of loading weights
    logging.getLogger("easy_context").setLevel(logging.INFO if is_main_process else logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)


def compile_nothing_on_cpu() -> None:
    """DeepSpeed would build a shared-memory collective with the C++ compiler at first use; gloo serves as well."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _configure_deepspeed(config: dict[str, Any], args: Namespace) -> None:
    """Give the flags the last word over the launch configuration's JSON, which describes only the cluster."""
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    config["gradient_accumulation_steps"] = args.gradient_accumulate_every
    config["gradient_clipping"] = args.max_grad_norm
    config.pop("scheduler", None)
    optimizer = config.setdefault("optimizer", {"type": "AdamW"})
    parameters = optimizer.setdefault("params", {})
    # Accelerate fills in only values that are "auto".
    parameters["lr"], parameters["weight_decay"] = args.learning_rate, args.weight_decay
    parameters["betas"] = list(args.adam_betas)
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    if not torch.cuda.is_available() or offload == "none":
        parameters["torch_adam"] = True  # PyTorch's AdamW: as fast on a GPU, and nothing is compiled


def learning_rate_factor(args: Namespace) -> Callable[[int], float]:
    """The learning rate's share of --learning-rate at each optimizer step, counted from 0.

    A linear warm-up over --warmup-steps, whose first step already trains, then --lr-scheduler: constant, or a cosine or
    linear decay that would reach 0 one step after --max-train-steps.
    """

    def factor(step: int) -> float:
        if step < args.warmup_steps:
            return (step + 1) / (args.warmup_steps + 1)
        progress = (step - args.warmup_steps) / max(1, args.max_train_steps - args.warmup_steps)
        if args.lr_scheduler == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        if args.lr_scheduler == "linear":
            return max(0.0, 1 - progress)
        return 1.0

    return factor


def prepare_training(args: Namespace, accelerator: Any, model: torch.nn.Module) -> tuple[Any, Any, Any]:
    """Hand the model to Accelerate with AdamW and its schedule, which DeepSpeed builds itself where it runs the step.

    Returns:
        The prepared model, the optimizer, and the scheduler, to be stepped once an optimizer step.
    """
    groups = _parameter_groups(model, args.weight_decay)
    factor = learning_rate_factor(args)
    if accelerator.state.deepspeed_plugin is not None:
        from accelerate.utils import DummyOptim, DummyScheduler

        optimizer = DummyOptim(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
        scheduler = DummyScheduler(
            optimizer, lr_scheduler_callable=lambda real: torch.optim.lr_scheduler.LambdaLR(real, factor)
        )
        return accelerator.prepare(model, optimizer, scheduler)
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=tuple(args.adam_betas))
    # Not prepared: Accelerate would step the schedule once a process, taking the processes for data-parallel ones.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return *accelerator.prepare(model, optimizer), scheduler


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms and biases. (Under ZeRO-3 a parameter's own shape is empty.)"""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) > 1]
    vectors = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def clip_gradients(accelerator: Any, model: torch.nn.Module, max_norm: float) -> float | None:
    """Clip at the end of an accumulation window; DeepSpeed has clipped inside backward.

    Args:
        accelerator: the Accelerator.
        model: the prepared model.
        max_norm: greatest norm; 0 for no clipping.

    Returns:
        The global gradient norm before clipping, None inside the window.
    """
    if not accelerator.sync_gradients:
        return None
    if accelerator.state.deepspeed_plugin is not None:
        return float(model.get_global_grad_norm())
    return float(accelerator.clip_grad_norm_(model.parameters(), max_norm or math.inf))

"""Create the Accelerator and prepare model and optimizer, for DeepSpeed or plain PyTorch, on CUDA or CPU."""

import logging
import math
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ..model.weights import load_whole
from .arguments import Arguments
from .gradient_release import UpdatesInBackward, updates_in_backward
from .launch_settings import settle_launch
from .optimizer import keeps_weights_in_bf16
from .refusal import exit_on

_log = logging.getLogger(__name__)
_BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}  # as x86 and ARM name them in /proc/cpuinfo
COLLECTIVE_TIMEOUT = timedelta(seconds=1_000_000)  # one rank may prepare data or save for hours


def build_accelerator(args: Arguments) -> Any:
    """Create the Accelerator for the launch configuration and the flags.

    Args:
        args: train.py's arguments.

    Returns:
        An `accelerate.Accelerator` whose process group is initialised (gloo without CUDA) when launched on several
        processes.

    Raises:
        RuntimeError: Accelerate's number of processes differs from the number of launched processes.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

    trackers: Any = {"none": None, "all": ["wandb", "tensorboard"]}.get(args.report_to or "none", args.report_to)
    group_options: dict[str, Any] = {"timeout": COLLECTIVE_TIMEOUT}
    with_deepspeed = launched_for_deepspeed()
    on_cpu = not torch.cuda.is_available()
    if on_cpu and "WORLD_SIZE" in os.environ:
        group_options["backend"] = "gloo"  # without it Accelerate believes that there is one process
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns on each process that it found no GPU
    if on_cpu and with_deepspeed:
        compile_nothing_on_cpu()
    plugin, note = settle_launch(args, with_deepspeed)
    if plugin is not None:
        _compile_no_optimizer(plugin.deepspeed_config)
    accelerator = Accelerator(
        # cpu=True wraps models in DDP; without it a launch by torchrun would train apart on every process. It also
        # switches DeepSpeed off.
        cpu=on_cpu and not with_deepspeed,
        gradient_accumulation_steps=args.gradient_accumulate_every,
        mixed_precision="no" if keeps_weights_in_bf16(args) else args.mixed_precision,  # that is, no autocast
        log_with=trackers,
        project_dir=args.output_dir,
        deepspeed_plugin=plugin,
        kwargs_handlers=[
            InitProcessGroupKwargs(**group_options),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # or DDP holds all gradients twice
        ],
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise RuntimeError(
            f"WORLD_SIZE is {launched}, but Accelerate sees {accelerator.num_processes} processes: start train.py with "
            "`accelerate launch` or torchrun, which set RANK and LOCAL_RANK too, or unset WORLD_SIZE"
        )
    _set_up_logs(accelerator.is_main_process)
    for line in (note, _slow_bf16(args.mixed_precision) if on_cpu else None):
        if line:
            _log.info(line)
    return accelerator


def _slow_bf16(mixed_precision: str, cpu: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return advice if this CPU has no instructions for bf16; None if it has them or if this is unknown."""
    if mixed_precision != "bf16" or not cpu.is_file() or _BF16_INSTRUCTIONS & set(cpu.read_text().split()):
        return None
    return (
        f"--mixed-precision bf16: this CPU has no instructions for bf16 ({', '.join(sorted(_BF16_INSTRUCTIONS))}) and "
        "computes it many times slower than float32: --mixed-precision no is faster here"
    )


def launched_for_deepspeed() -> bool:
    """Return whether `accelerate launch` started this process with a DeepSpeed configuration."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


class _BesideBar(logging.StreamHandler):
    """Prints a line of the log above a progress bar, not into its line."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=self.stream)


def _set_up_logs(is_main_process: bool) -> None:
    """Log this package's choices on rank 0, and suppress repeated messages of libraries."""
    from transformers.utils.logging import disable_progress_bar

    logging.basicConfig(format="%(message)s", handlers=[_BesideBar()])
    if not is_main_process:
        disable_progress_bar()  # of loading weights
    logging.getLogger("easy_context").setLevel(logging.INFO if is_main_process else logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing(_enable)?` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash_for_caching", UserWarning)


def compile_nothing_on_cpu() -> None:
    """DeepSpeed would build a shared-memory collective with the C++ compiler at first use; gloo serves as well."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _compile_no_optimizer(config: dict[str, Any]) -> None:
    """Choose PyTorch's AdamW, which is as fast on a GPU, where DeepSpeed's own would be compiled at its first use."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    if not torch.cuda.is_available() or offload == "none":
        config["optimizer"]["params"]["torch_adam"] = True


@exit_on(ValueError)
def load_model(args: Arguments, config: Any, accelerator: Any) -> torch.nn.Module:
    """Load the model of `--model` with this config; end the run with a message if any tensor is missing.

    DeepSpeed keeps float32 master weights beside a bf16 model, and --optimizer adamw8bit needs none; plain PyTorch
    trains float32 weights under autocast.
    """
    with_deepspeed = accelerator.state.deepspeed_plugin is not None
    in_bf16 = args.mixed_precision == "bf16" if with_deepspeed else keeps_weights_in_bf16(args)
    return load_whole(args.model, config, torch.bfloat16 if in_bf16 else torch.float32)


def prepare(accelerator: Any, model: torch.nn.Module, optimizer: Any, args: Arguments) -> tuple[Any, Any]:
    """Hand the model and its optimizer to Accelerate: to DDP, or to DeepSpeed, which builds both itself.

    Args:
        accelerator: the Accelerator.
        model: loaded and patched.
        optimizer: from `adamw`.
        args: train.py's arguments.

    Returns:
        The prepared model and optimizer. The optimizer steps in backward if that gives the same step.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        model, optimizer = accelerator.prepare(model, optimizer)
        if updates_in_backward(args, accelerator.num_processes, plugin):
            optimizer = UpdatesInBackward(optimizer.optimizer)
        return model, optimizer
    without_zero = plugin.deepspeed_config["zero_optimization"].get("stage", 0) == 0
    clip_here = without_zero and args.mixed_precision == "no"  # DeepSpeed's clipping would not return the norm
    if clip_here:
        plugin.deepspeed_config["gradient_clipping"] = 0.0
    engine, optimizer = accelerator.prepare(model, optimizer)
    if without_zero:
        # In bf16 DeepSpeed has made a step of zeros already, which would count in Adam's bias correction.
        engine.basic_optimizer.state.clear()
    if clip_here:
        _clip_in_engine(engine, args.max_grad_norm)
    return engine, optimizer


def _clip_in_engine(engine: Any, max_norm: float) -> None:
    """Make a DeepSpeed engine clip the reduced gradients, step only if they are finite, and return their norm."""
    norm, step = None, engine.optimizer.step

    def clip_and_step(*args: Any, **options: Any) -> None:
        nonlocal norm
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm or math.inf)
        if norm.isfinite():
            step(*args, **options)

    engine.optimizer.step = clip_and_step
    engine.get_global_grad_norm = lambda: norm


def clip_and_step(accelerator: Any, model: Any, optimizer: Any, max_norm: float) -> float | None:
    """At the end of an accumulation window, clip the gradients, and step the optimizer if their norm is finite.

    DeepSpeed has already done both inside backward, and `UpdatesInBackward` has already made its step. Gradients are
    zeroed whether or not there was a step.

    Args:
        accelerator: the Accelerator.
        model: prepared, like the optimizer.
        optimizer: a plain PyTorch optimizer.
        max_norm: largest gradient norm; 0 for no clipping.

    Returns:
        The norm of the gradients of all processes before clipping; None inside the window.
    """
    if not accelerator.sync_gradients:
        return None
    if accelerator.state.deepspeed_plugin is not None:
        return float(model.get_global_grad_norm())
    if isinstance(optimizer, UpdatesInBackward):
        return optimizer.finish_step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # PyTorch's own clipping would round the norm of bf16 gradients to bf16.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total = torch.linalg.vector_norm(torch.stack(norms))
    norm = float(total)
    if math.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm or math.inf, total)
        optimizer.step()
    optimizer.zero_grad()
    return norm

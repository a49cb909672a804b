"""What a step reports: loss, speed, memory, model FLOPs utilisation; to the progress bar, a file and trackers."""

import json
import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..common.files import null_for_nan
from ..huggingface import head_dim
from ..loss import IGNORE_INDEX
from ..mesh import Mesh
from .progress import StepProgress
from .saving import METRICS

# Dense bf16 peak in FLOP/s, from the vendors' datasheets; matched against torch.cuda.get_device_name().
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A40": 150e12,
    "A6000": 155e12,
    "4090": 165e12,
    "3090": 71e12,
}


def flops_per_token(config: Any, parameters: int, seq_length: float) -> float:
    """Model FLOPs to train on one token, forward and backward, without recomputation.

    Six for each weight that multiplies, and causal attention: on average a query meets half the row's keys (the
    convention of arXiv 2204.02311, appendix B, with the causal half).

    Args:
        config: of the model.
        parameters: all weights; the input embedding, which only looks up, is taken off unless it is the output layer.
        seq_length: tokens of a row, or the mean over all tokens of the length of their row.
    """
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * head_dim(config) * seq_length
    return 6 * (parameters - embedding) + attention


def count_parameters(model: torch.nn.Module) -> int:
    """Weights of the model, whole also under ZeRO-3, where each process holds a part."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None for one that is not in PEAK_FLOPS."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "Laptop" in name:  # slower than the card of the same number
        return None
    return next((flops for known, flops in PEAK_FLOPS.items() if re.search(rf"{known}\b", name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has used since the start: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def count_tokens(accelerator: Any, mesh: Mesh, targets: list[torch.Tensor]) -> tuple[int, torch.Tensor, float]:
    """Count the tokens of a step over all ranks.

    Args:
        accelerator: the Accelerator.
        mesh: of this rank.
        targets: of each micro-batch, this rank's shard `[batch, local tokens]`, -100 where there is no target.

    Returns:
        All tokens, padding included; those that have a target, an int64 tensor; and the length of a token's whole row,
        the mean over all tokens.
    """
    lengths = sum(target.numel() * target.shape[1] * mesh.sequence_size for target in targets)
    counts = torch.tensor([sum(target.numel() for target in targets), 0, lengths], device=accelerator.device)
    counts[1] = sum((target != IGNORE_INDEX).sum() for target in targets)
    tokens, valid_tokens, lengths = accelerator.reduce(counts, reduction="sum").unbind()
    return int(tokens), valid_tokens, (lengths / tokens).item()


class StepMeter:
    """Times optimizer steps and makes each step's record."""

    def __init__(self, device: torch.device, devices: int, token_flops: Callable[[float], float]) -> None:
        """Start the clock.

        Args:
            device: of this process.
            devices: processes in the run.
            token_flops: `flops_per_token` of this model, by the length of a row.
        """
        self._device, self._devices, self._token_flops = device, devices, token_flops
        self._peak = peak_flops(device)
        self.restart()

    def restart(self) -> None:
        """Start the clock anew: what came before (an evaluation) is no training time."""
        self._start = time.perf_counter()

    def record(
        self,
        step: int,
        loss: float,
        learning_rate: float,
        grad_norm: float,
        tokens: int,
        valid_tokens: int,
        row_length: float,
    ) -> dict[str, Any]:
        """The record of the step that ends now, with the keys of a `metrics.jsonl` line.

        Args:
            step: counted from 1.
            loss: mean over the valid tokens of all ranks and the whole accumulation window, in nats.
            learning_rate: of this step.
            grad_norm: before clipping.
            tokens: of this step, over all ranks, padding included.
            valid_tokens: those that have a target.
            row_length: of the rows in this step, the mean over their tokens.
        """
        now = time.perf_counter()
        speed = tokens / (now - self._start)
        self._start = now
        mfu = None if self._peak is None else speed / self._devices * self._token_flops(row_length) / self._peak
        return {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "tokens_per_second": speed,
            "tokens_per_second_per_device": speed / self._devices,
            "mfu": mfu,
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "valid_tokens": valid_tokens,
            "time": time.time(),
        }


class MetricsLog:
    """Writes records on rank 0: a line of `metrics.jsonl`, the trackers, the progress bar."""

    def __init__(self, accelerator: Any, args: Any, step: int = 0) -> None:
        """Open the file, the trackers and the bar.

        Args:
            accelerator: the Accelerator, made with `log_with`.
            args: train.py's arguments.
            step: the last one of an earlier run that this one continues.
        """
        from tqdm import tqdm

        self._accelerator, self._log_every = accelerator, args.log_every
        if args.report_to in ("wandb", "all"):
            _wandb_offline_without_key(accelerator.is_main_process)
        if args.report_to != "none":
            settings = {
                key: str(value) if isinstance(value, (list, tuple)) else value for key, value in vars(args).items()
            }
            accelerator.init_trackers(
                args.wandb or "easy-context", config=settings, init_kwargs={"wandb": {"dir": args.output_dir}}
            )
        main = accelerator.is_main_process
        self._file = open(Path(args.output_dir) / METRICS, "a") if main else None  # noqa: SIM115
        self._bar = tqdm(total=args.max_train_steps, initial=step, unit="step", disable=not main)
        self.progress = StepProgress(self._bar, enabled=main)

    def write(self, record: dict[str, Any]) -> None:
        """Log one optimizer step; the trackers and the bar get every `--log-every`-th."""
        self.progress.finish_step()
        if self._file is not None:
            self._file.write(json.dumps(null_for_nan(record)) + "\n")
            self._file.flush()
        report = record["step"] % self._log_every == 0 or "eval_loss" in record
        if report:
            self._bar.set_postfix_str(describe(record), refresh=False)
        self._bar.update()
        if report:
            values = {key: value for key, value in record.items() if key not in ("step", "time") and value is not None}
            self._accelerator.log(values, step=record["step"])

    def close(self) -> None:
        """Finish the bar, the file and the trackers."""
        self._bar.close()
        if self._file is not None:
            self._file.close()
        for tracker in self._accelerator.trackers:
            tracker.finish()


def describe(record: dict[str, Any]) -> str:
    """One record as a short line for people."""
    parts = [
        f"loss {record['loss']:.4f}",
        f"lr {record['learning_rate']:.2e}",
        f"grad {record['grad_norm']:.2f}",
        f"{record['tokens_per_second']:,.0f} tok/s",
        f"{record['tokens_per_second_per_device']:,.0f} tok/s/device",
        f"{record['peak_memory_bytes'] / 2**30:.1f} GiB",
    ]
    if record["mfu"] is not None:
        parts.insert(5, f"MFU {record['mfu']:.1%}")
    if "eval_loss" in record:
        parts.append(f"eval {record['eval_loss']:.4f}")
    return ", ".join(parts)


def _wandb_offline_without_key(announce: bool) -> None:
    """Without a key wandb would ask for one and wait; write offline instead, and say so."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    if netrc.exists() and "api.wandb.ai" in netrc.read_text():
        return
    os.environ["WANDB_MODE"] = "offline"
    if announce:
        print("wandb has no API key: the run is logged offline; `wandb sync` uploads it later")

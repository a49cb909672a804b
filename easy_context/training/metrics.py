"""Report loss, speed, memory and model FLOPs utilisation of each step to the progress bar, a file and trackers."""

import json
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..common.files import null_for_nan
from ..common.notes import say_once
from ..loss import IGNORE_INDEX
from ..mesh import Mesh
from .arguments import Arguments
from .flops import count_parameters, count_trained, flops_per_token, peak_flops
from .progress import StepProgress
from .saving import METRICS, prepare_metrics
from .trackers import start_trackers
from .watch.watch import Watch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has used: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


class StepMeter:
    """The count of tokens, the time and the record of each optimizer step."""

    def __init__(self, accelerator: Any, mesh: Mesh, config: Any, model: torch.nn.Module) -> None:
        """Start the clock.

        Args:
            accelerator: the Accelerator.
            mesh: the grid of ranks.
            config: of the model.
            model: the model, prepared or not.
        """
        self._accelerator, self._mesh = accelerator, mesh
        self._config, self._parameters = config, count_parameters(model)
        self._trained = count_trained(model, config)
        self._peak = peak_flops(accelerator.device)
        self.restart()

    def restart(self) -> None:
        """Restart the clock, so that an evaluation or a checkpoint does not count as training time."""
        self._start = time.perf_counter()

    def count(self, shards: list[dict[str, Any]]) -> torch.Tensor:
        """Count the tokens of the step that begins, over all ranks; collective.

        Args:
            shards: this rank's shard of each micro-batch, from `shard_batch`.

        Returns:
            The number of targets, at least 1, int64.
        """
        targets = [shard["shift_labels"] for shard in shards]
        counts = torch.tensor(
            [
                sum(target.numel() for target in targets),
                0,
                sum(map(self._squared_lengths, shards)),
            ],
            device=self._accelerator.device,
        )
        counts[1] = sum((target != IGNORE_INDEX).sum() for target in targets)
        tokens, valid_tokens, squares = self._accelerator.reduce(counts, reduction="sum").unbind()
        self._tokens, self._valid_tokens = int(tokens), int(valid_tokens)
        self._mean_length = (squares // self._mesh.sequence_size / tokens).item()  # each rank counted whole rows
        return valid_tokens.clamp(min=1)

    def _squared_lengths(self, shard: dict[str, Any]) -> int:
        """Return the sum of the squared lengths of the whole rows of a shard, or of their documents if kept apart."""
        if documents := shard.get("documents"):
            return documents.squared_lengths
        rows, tokens = shard["shift_labels"].shape
        return rows * (tokens * self._mesh.sequence_size) ** 2

    def record(self, step: int, loss: float, learning_rate: float, grad_norm: float) -> dict[str, Any]:
        """Return the record of the step that ends now: the keys of a `metrics.jsonl` line except `eval_loss`.

        Args:
            step: counted from 1.
            loss: mean over the valid tokens of all ranks and the whole accumulation window, in nats.
            learning_rate: of this step.
            grad_norm: before clipping.
        """
        now, devices = time.perf_counter(), self._accelerator.num_processes
        speed = self._tokens / (now - self._start)
        self._start = now
        token_flops = flops_per_token(self._config, self._parameters, self._mean_length, self._trained)
        return {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "tokens": self._tokens,  # padding included
            "tokens_per_second": speed,
            "tokens_per_second_per_device": speed / devices,
            "mfu": None if self._peak is None else speed / devices * token_flops / self._peak,
            "peak_memory_bytes": peak_memory_bytes(self._accelerator.device),
            "valid_tokens": self._valid_tokens,
            "time": time.time(),
        }


@torch.no_grad()
def mean_loss(accelerator: Any, model: torch.nn.Module, shards: Iterable[dict[str, Any]]) -> float:
    """Return the mean loss over every target of the shards of all ranks, in nats; collective."""
    model.eval()
    total = torch.zeros((), device=accelerator.device)
    valid = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    for shard in shards:
        total += model(**shard, num_items_in_batch=1, use_cache=False).loss.float()
        valid += (shard["shift_labels"] != IGNORE_INDEX).sum()
    model.train()
    return (accelerator.reduce(total) / accelerator.reduce(valid).clamp(min=1)).item()


class MetricsLog:
    """The outputs of rank 0: a line of `metrics.jsonl` for each step, the trackers, the progress bar."""

    def __init__(self, accelerator: Any, args: Arguments, watch: Watch, step: int = 0) -> None:
        """Open the file, the trackers and the bar.

        Args:
            accelerator: the Accelerator, made with `log_with`.
            args: train.py's arguments.
            watch: is told where this process is.
            step: the last one of an earlier run that this one continues.
        """
        from tqdm import tqdm

        if accelerator.is_main_process:
            prepare_metrics(Path(args.output_dir), step)
        self._accelerator, self._log_every = accelerator, args.log_every
        start_trackers(accelerator, args, step)
        main = accelerator.is_main_process
        self._file = open(Path(args.output_dir) / METRICS, "ab", buffering=0) if main else None  # noqa: SIM115
        self._unwritten = b""
        self._bar = tqdm(total=args.max_train_steps, initial=step, unit="step", disable=not main)
        self.progress = StepProgress(self._bar, watch, step, enabled=main)

    def write(self, record: dict[str, Any]) -> None:
        """Log one optimizer step; the trackers and the bar get every `--log-every`-th."""
        self.progress.finish_step()
        self._append(json.dumps(null_for_nan(record)) + "\n")
        report = record["step"] % self._log_every == 0 or "eval_loss" in record
        if report:
            self._bar.set_postfix_str(describe(record), refresh=False)
        self._bar.update()
        if report:
            values = {key: value for key, value in record.items() if key not in ("step", "time") and value is not None}
            self._accelerator.log(values, step=record["step"])

    def _append(self, line: str) -> None:
        """Write a line of the file, if this rank has it; on a full disk, keep the line until it can be written."""
        if self._file is None:
            return
        self._unwritten += line.encode()
        try:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            say_once(f"{METRICS} cannot be written ({error.strerror}); its lines follow when it can be")

    def close(self) -> None:
        """Finish the bar, the file and the trackers."""
        self._bar.close()
        if self._file is not None:
            self._file.close()
        for tracker in self._accelerator.trackers:
            tracker.finish()


def describe(record: dict[str, Any]) -> str:
    """Return a record as a short line for people."""
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

"""Exchange small values between the processes of a launch. All functions are collective."""

from typing import Any

import torch
import torch.distributed as dist


def any_process(accelerator: Any, *flags: bool) -> list[bool]:
    """Return for each flag whether any process raised it, with one all-reduce."""
    if accelerator.num_processes == 1:
        return list(flags)
    raised = torch.tensor(flags, dtype=torch.int32, device=accelerator.device)
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def every_process(accelerator: Any, value: Any) -> list[Any]:
    """Return the small picklable `value` of every process, in the order of ranks."""
    values = [value] * accelerator.num_processes
    if accelerator.num_processes > 1:
        dist.all_gather_object(values, value)
    return values


def first_problem(accelerator: Any, problem: str | None) -> str | None:
    """Return the problem of the first process that has one, on every process."""
    return next((each for each in every_process(accelerator, problem) if each is not None), None)

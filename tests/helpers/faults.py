"""Faults for the processes of a `ForkedRun`: at the n-th call of a function, one dies, freezes, fails, and so on."""

import functools
import importlib
import math
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = {
    "before a save": "easy_context.training.checkpoints.state:TrainingState.take",  # the earlier one is whole then
    "one file is written": "torch:save",
    "before the manifest": "easy_context.training.checkpoints.background:finish",
    "before the rename": "easy_context.training.checkpoints.files:Path.rename",
    "the model is written": "easy_context.training.saving:_follow_umask",
    "a file is moved": "os:replace",
    "loss": "easy_context.training.nonfinite:nan_unless_finite",
    "rows are checked": "easy_context.data.token_rows:check_rows",
    "row": "easy_context.data.token_rows:TokenRows.__getitem__",
    "step": "easy_context.training.metrics:MetricsLog.write",
    "end": "easy_context.training.saving:save_model",
}


class Broken(Exception):
    """What a fault raises."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        action: one of ACTIONS.
        call: one of CALLS.
        number: of the call, counted from 1.
        rank: of the process that it befalls; None for all.
        argument: only calls count whose first argument contains this.
        behind: whether it happens after the call instead of before.
    """

    action: str
    call: str
    number: int = 1
    rank: int | None = None
    argument: str = ""
    behind: bool = False


def put_in(rank: int, *faults: Fault) -> None:
    """Prepare the faults that befall this process; for `ForkedRun`."""
    for fault in faults:
        if fault.rank in (None, rank):
            _put_in(fault)


def _put_in(fault: Fault) -> None:
    module, path = CALLS[fault.call].split(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, count = getattr(owner, name), 0

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal count
        counts = not fault.argument or fault.argument in str(args[0])
        count += counts
        strikes = counts and count == fault.number
        if strikes and not fault.behind:
            args = _strike(fault, args)
        result = original(*args, **options)
        if strikes and fault.behind:
            _strike(fault, args)
        return result

    setattr(owner, name, call)


def _strike(fault: Fault, args: tuple) -> tuple:
    os.write(2, f"\n[fault at {time.time()}]\n".encode())
    return ACTIONS[fault.action](*args) or args


def seconds_since_fault(said: str) -> float:
    """Return the time since the first fault that the processes met."""
    return time.time() - float(re.search(r"\[fault at ([\d.]+)\]", said)[1])


def _send(number: signal.Signals, *_: Any) -> None:
    os.kill(os.getpid(), number)


def _halve(_: Any, path: Path) -> None:
    """Leave half of the file that was just written, and die."""
    os.truncate(path, path.stat().st_size // 2)
    _send(signal.SIGKILL)


def _fail(*_: Any) -> None:
    raise Broken("this was planned")


def _sleep(*_: Any) -> None:
    time.sleep(1000)


def _spoil_gradient(loss: Any) -> tuple:
    """Let the gradient be NaN where the loss is a number."""
    loss.register_hook(lambda gradient: gradient * math.nan)
    return (loss,)


def _set_disk(size: int) -> Callable[..., None]:
    """Let no file of this process grow beyond so many bytes, as on a full disk."""

    def act(*_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return act


def _check_few_rows(*_: Any) -> None:
    """Leave the rows behind the first sixteen to be checked when they are read."""
    importlib.import_module(CALLS["rows are checked"].split(":")[0])._TOKENS_CHECKED = 1


ACTIONS: dict[str, Callable[..., tuple | None]] = {
    "kill": functools.partial(_send, signal.SIGKILL),
    "freeze": functools.partial(_send, signal.SIGSTOP),
    "terminate": functools.partial(_send, signal.SIGTERM),
    "halve": _halve,
    "fail": _fail,
    "sleep": _sleep,
    "spoil": _spoil_gradient,
    "check few": _check_few_rows,
    "fill the disk": _set_disk(100_000),  # weights are longer, what is printed is shorter
    "fill it to the brim": _set_disk(3000),
    "empty the disk": _set_disk(resource.RLIM_INFINITY),
}

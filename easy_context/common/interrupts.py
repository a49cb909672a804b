"""Ctrl-C and SIGTERM end a script with one line that says what is saved, instead of a stack trace from each process."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..training.resume_files import MANIFEST, checkpoints_in
from ..training.saving import METRICS, MODEL_CONFIG

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_SECONDS_OF_SILENCE = 3.0  # for which other processes stay, so that the first can speak before it sees them gone


@contextlib.contextmanager
def stops_in_one_line(describe: Callable[[], str]) -> Iterator[None]:
    """End this process at once when it is interrupted, with exit code 128 + signal; the first says what is saved.

    A thread does it, because the main thread may be waiting in a collective for a process that has gone already.
    Signals that are ignored (as under nohup) stay so.

    Args:
        describe: says what is saved; called in that thread, of the first process, when the end has come.
    """
    signals = [number for number in _NAMES if signal.getsignal(number) is not signal.SIG_IGN]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in signals}
    earlier = signal.set_wakeup_fd(writer)
    waiting = threading.Thread(target=_wait_and_end, args=(reader, describe), daemon=True)
    waiting.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        waiting.join()
        os.close(reader)


def _wait_and_end(reader: int, describe: Callable[[], str]) -> None:
    """Read the numbers of the signals that arrive, until one ends the process or nothing can arrive any more."""
    while number := os.read(reader, 1):
        if number[0] not in _NAMES:
            continue
        if os.environ.get("RANK", "0") == "0":
            print(f"\nstopped by {_NAMES[signal.Signals(number[0])]}: {describe()}", file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_OF_SILENCE)
        os._exit(128 + number[0])


def what_is_saved(output_dir: Path) -> Callable[[], str]:
    """Return a function that says what train.py has saved in the folder since now."""
    before = {name: _signature(output_dir / name) for name in (METRICS, MODEL_CONFIG)}

    def describe() -> str:
        metrics, config = output_dir / METRICS, output_dir / MODEL_CONFIG
        if config.exists() and _signature(config) != before[MODEL_CONFIG]:
            return f"the model is saved in {output_dir}"
        steps = metrics.read_bytes().count(b"\n") if _signature(metrics) not in (None, before[METRICS]) else 0
        if not steps:
            return f"no step was finished and nothing was saved in {output_dir}"
        saved = [step for step, path in checkpoints_in(output_dir).items() if (path / MANIFEST).exists()]
        model = "the model of an earlier run is unchanged" if config.exists() else "no model is saved"
        goes_on = f"goes on from checkpoint-{max(saved)}" if saved else "begins again at step 1"
        return f"{steps} steps are in {metrics}, {model}; the same command {goes_on}"

    return describe


def _signature(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written anew; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

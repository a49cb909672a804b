"""Ctrl-C, SIGTERM and SIGUSR1 end a script with one line that says what is saved, without a stack trace.

A script that can save its work lets the first SIGTERM or SIGUSR1 only ask for that: job systems send them some time
before they kill.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}
_SECONDS_OF_SILENCE = 3.0  # for which other processes stay, so that the first can speak before it sees them gone
_SECONDS_OF_REPETITION = 5.0  # a launcher passes on the signal that the job system has sent to all processes


class Interrupts:
    """What signals have asked of this process.

    Attributes:
        asked_to_stop: whether the script is to save its work and end.
        ending: whether this process is about to end, without saving.
    """

    def __init__(self) -> None:
        self.asked_to_stop = self.ending = False
        self._promise: str | None = None
        self._asked_at = 0.0

    def save_first(self, promise: str | None) -> None:
        """From now on, let the first SIGTERM or SIGUSR1 set `asked_to_stop`, and only a second one end this process.

        Args:
            promise: says what the script does then; None to let every signal end it at once again.
        """
        self._promise = promise

    def postpones(self, number: int) -> bool:
        """Return whether the signal that has arrived need not end this process now; the first process says so."""
        if number == signal.SIGINT or self._promise is None:
            return False
        if self.asked_to_stop:
            return time.monotonic() - self._asked_at < _SECONDS_OF_REPETITION
        self.asked_to_stop, self._asked_at = True, time.monotonic()
        if _is_first_process():
            print(
                f"\n{_NAMES[signal.Signals(number)]}: {self._promise}; a second signal ends it at once",
                file=sys.stderr,
                flush=True,
            )
        return True


@contextlib.contextmanager
def end_on_signals(describe: Callable[[], str]) -> Iterator[Interrupts]:
    """End this process at once when it is interrupted, with exit code 128 + signal; the first says what is saved.

    A thread does it, because the main thread may be waiting in a collective for a process that has gone already.
    Signals that are ignored (as under nohup) stay so.

    Args:
        describe: says what is saved; called in that thread, of the first process, when the end has come.

    Yields:
        What signals ask for, where the script can save its work first.
    """
    signals = [number for number in _NAMES if signal.getsignal(number) is not signal.SIG_IGN]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in signals}
    earlier = signal.set_wakeup_fd(writer)
    interrupts = Interrupts()
    waiting = threading.Thread(target=_wait_and_end, args=(reader, interrupts, describe), daemon=True)
    waiting.start()
    try:
        yield interrupts
    finally:
        signal.set_wakeup_fd(earlier)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        waiting.join()
        os.close(reader)


def _wait_and_end(reader: int, interrupts: Interrupts, describe: Callable[[], str]) -> None:
    """Read the numbers of the signals that arrive, until one ends the process or nothing can arrive any more."""
    while number := os.read(reader, 1):
        if number[0] not in _NAMES or interrupts.postpones(number[0]):
            continue
        interrupts.ending = True
        if _is_first_process():
            print(f"\nstopped by {_NAMES[signal.Signals(number[0])]}: {describe()}", file=sys.stderr, flush=True)
        else:
            time.sleep(_SECONDS_OF_SILENCE)
        os._exit(128 + number[0])


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"

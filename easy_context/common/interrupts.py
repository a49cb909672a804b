"""Handle Ctrl-C, SIGTERM and SIGUSR1: end a script with one line about what is saved, without a stack trace.

In a script that can save its work, the first SIGTERM or SIGUSR1 only requests that: job systems send these signals
some time before they kill a process.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}
_SECONDS_OF_SILENCE = 3.0  # other processes wait so long, so that the first can print its line before it sees their end
_SECONDS_OF_REPETITION = 5.0  # a launcher passes on a signal that the job system has already sent to all processes


class Interrupts:
    """The requests of signals to this process.

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
            promise: text about what the script does then; None: every signal ends the process at once again.
        """
        self._promise = promise

    def postpones(self, number: int) -> bool:
        """Return whether the arrived signal does not end this process now; the first process prints a line about it."""
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
    """End this process at once on a signal, with exit code 128 + signal; the first process prints what is saved.

    A thread does this, because the main thread may be waiting in a collective for a process that has already ended.
    Ignored signals (as under nohup) stay ignored.

    Args:
        describe: returns a text about what is saved; called in that thread, on the first process, at the end.

    Yields:
        The requests of signals, for a script that can save its work first.
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
    """Read the numbers of arriving signals until one ends the process or no more can arrive."""
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

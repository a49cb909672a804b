"""Every process says where it is, and ends with the others when one of them fails, freezes or hangs."""

import contextlib
import multiprocessing.connection as connections
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from types import TracebackType
from typing import Any

from ...common.errors import first_line
from ...common.interrupts import Interrupts
from .judge import FROZEN_AFTER, Judge, Verdict

_BEAT = 1.0  # seconds between messages
_SECONDS_TO_REPORT = 10.0  # for all processes to say where they stand, before any of them ends
_REPORTED, _OVER = "reported", "over"  # messages: this process has said all; the first one has ended as it should


class Watch:
    """This process's part of the watch: a thread that goes on whatever the main thread does.

    Use it as a context manager around the run; `start` begins the watch. An exception that leaves the block on one
    process is printed first, and ends all others.

    Attributes:
        interrupts: what signals have asked of this process.
    """

    def __init__(self, hang_timeout: float, interrupts: Interrupts) -> None:
        """Watch nothing yet.

        Args:
            hang_timeout: seconds for which nothing may move; 0 for any time.
            interrupts: what signals have asked of this process.
        """
        self.interrupts, self._hang_timeout = interrupts, hang_timeout
        self._rank, self._size = 0, 1
        self._where, self._moves, self._patient = "starting", 0, True
        self._error, self._exit_code = "", 1
        self._failure: str | None = None
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._still, self._seen_moves, self._looked_at = 0.0, 0, 0.0

    def start(self, accelerator: Any) -> None:
        """Begin to watch; collective. One process without a hang timeout is not watched."""
        import torch.distributed as dist

        self._rank, self._size = accelerator.process_index, accelerator.num_processes
        if self._size == 1 and not self._hang_timeout:
            return
        listener: Any = None
        address: list[Any] = [None]
        if self._rank == 0:
            listener = Listener(("", 0), authkey=(key := secrets.token_bytes(16)), backlog=self._size)
            address = [(listener.address[1], key)]
        if self._size > 1:
            dist.broadcast_object_list(address, src=0, device=accelerator.device)
        run = (self._lead, listener) if self._rank == 0 else (self._follow, *address[0])
        self._thread = threading.Thread(target=run[0], args=run[1:], name="watch", daemon=True)
        self._looked_at = time.monotonic()
        self._thread.start()

    def at(self, where: str, patient: bool = False) -> None:
        """Say which phase the main thread enters.

        Args:
            where: in words, such as "in step 3, micro-batch 2 of 4".
            patient: whether the phase may take longer than the hang timeout.
        """
        self._where, self._moves, self._patient = where, self._moves + 1, patient

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the watch; where an exception is on its way and there are other processes, end the run."""
        if self._thread is None:
            return
        if self._size > 1 and error is not None and getattr(error, "code", 1) not in (None, 0):
            if isinstance(error, SystemExit):  # it has said why, or Python would at the very end
                self._error = f"{error.code}\n" if isinstance(error.code, str) else ""
                self._failure, self._exit_code = "its message is above", error.code if error.code == 2 else 1
            else:
                self._error = "".join(traceback.format_exception(kind, error, trace))
                self._failure = f"{type(error).__name__}: {first_line(error)}"
            self._thread.join(3 * _SECONDS_TO_REPORT)  # it ends the process
        self._finished.set()
        self._thread.join(_SECONDS_TO_REPORT)

    def _look(self) -> tuple[dict[str, Any], float]:
        """Return what there is to say of this process, and the seconds since the last look.

        A process that was stopped for a while has not looked meanwhile, and counts no more than two beats.
        """
        now = time.monotonic()
        elapsed, self._looked_at = min(now - self._looked_at, 2 * _BEAT), now
        self._still = 0.0 if self._patient or self._moves != self._seen_moves else self._still + elapsed
        self._seen_moves = self._moves
        state = {"host": socket.gethostname(), "where": self._where, "moves": self._moves, "still": self._still}
        return state | {"finished": self._finished.is_set(), "failure": self._failure}, elapsed

    def _lead(self, listener: Listener) -> None:
        """Hear all processes, on the first one, until it has finished or the run must end."""
        links: dict[Connection, int] = {}
        while len(links) < self._size - 1:
            with contextlib.suppress(AuthenticationError, OSError, EOFError):
                link = listener.accept()
                links[link] = link.recv()
        listener.close()
        judge, next_beat = Judge(self._size, self._hang_timeout), time.monotonic()
        while not self._finished.is_set():
            for link in _ready(list(links), _BEAT):
                try:
                    judge.hear(links[link], link.recv())
                except (EOFError, OSError):
                    judge.processes[links.pop(link)].gone = True
            state, elapsed = self._look()
            judge.hear(0, state)
            verdict = judge.judge(elapsed)
            if verdict is not None:
                self._end_all(links, verdict)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT
                _send_all(links, None)
        _send_all(links, _OVER)

    def _end_all(self, links: dict[Connection, int], verdict: Verdict) -> None:
        """Let the process to blame speak first, then all others, and end this one."""
        blamed = [link for link, rank in links.items() if rank == verdict.rank]
        if verdict.rank == 0:
            self._report(verdict)
        _send_all(blamed, verdict)
        _wait_for_reports(blamed)
        others = [link for link in links if link not in blamed]
        _send_all(others, verdict)
        if verdict.rank != 0:
            self._report(verdict)
        _wait_for_reports(others)
        os._exit(self._exit_code)

    def _follow(self, port: int, key: bytes) -> None:
        """Tell the first process where this one is, until this one has finished or the run must end."""
        link = connections.Client((os.environ["MASTER_ADDR"], port), authkey=key)
        verdict, silent = None, 0.0
        try:
            link.send(self._rank)
            while verdict is None:
                state, elapsed = self._look()
                link.send(state)
                if state["finished"]:
                    return
                silent += elapsed
                while link.poll(_BEAT if silent else 0):
                    message, silent = link.recv(), 0.0
                    if message == _OVER:
                        return
                    verdict = message or verdict
                if self._hang_timeout and silent > min(FROZEN_AFTER, self._hang_timeout):
                    verdict = Verdict(f"rank 0 has not answered for {silent:.0f} s", 0, hang=True, unheard=True)
        except (EOFError, OSError):
            time.sleep(_BEAT)  # the signal that has ended it may be on its way to this process as well
            reason = "rank 0 has ended without a word, or the link to it is lost"
            verdict = Verdict(reason, 0, hang=False, unheard=True)
        self._report(verdict)
        with contextlib.suppress(EOFError, OSError):
            link.send(_REPORTED)
            _wait_for_reports([link])  # which never comes: until the first process ends
        os._exit(self._exit_code)

    def _report(self, verdict: Verdict) -> None:
        """Print this process's error, or why it ends and where it stands, in one piece."""
        sys.stdout.flush()
        if self.interrupts.ending:
            time.sleep(_SECONDS_TO_REPORT)  # the signal ends this process
        own_error = self._error if self._failure and (verdict.rank == self._rank or verdict.unheard) else ""
        print(self._last_words(verdict) + own_error, file=sys.stderr, end="", flush=True)

    def _last_words(self, verdict: Verdict) -> str:
        """Return why this process ends, on the first one that is left, and in a hang where it stands, on all."""
        first_here = os.environ.get("LOCAL_RANK", "0") == "0" or self._rank == 1
        says_why = verdict.unheard or not self._failure
        speaks = says_why and (first_here if verdict.rank == 0 else self._rank == 0)
        text = f"\nthe run ends: {verdict.reason}\n" if speaks else ""
        if verdict.hang:
            main = threading.main_thread().ident or 0
            stack = "".join(traceback.format_stack(sys._current_frames()[main]))
            text += f"rank {self._rank} is {self._where}:\n{stack}"
        return text


def _ready(links: list[Connection], seconds: float) -> list[Connection]:
    """Return the links that have something to read within so many seconds."""
    ready = connections.wait(links, seconds)
    return [link for link in links if link in ready]


def _send_all(links: Any, message: Any) -> None:
    for link in links:
        with contextlib.suppress(OSError):
            link.send(message)


def _wait_for_reports(links: list[Connection]) -> None:
    """Wait until each process has said all, or has gone."""
    waiting, deadline = list(links), time.monotonic() + _SECONDS_TO_REPORT
    while waiting and (ready := _ready(waiting, max(0.0, deadline - time.monotonic()))):
        for link in ready:
            try:
                if link.recv() == _REPORTED:
                    waiting.remove(link)
            except (EOFError, OSError):
                waiting.remove(link)

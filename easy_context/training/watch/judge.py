"""The decision that a run is at its end, from what its processes say of themselves and from their silence."""

from dataclasses import dataclass, field
from typing import Any

FROZEN_AFTER = 60.0  # seconds without a message from a process, whose thread sends one every second
_SECONDS_FOR_THE_CAUSE = 1.0  # to see that a process was killed, before others fail because it has gone


@dataclass
class Process:
    """What is known of a process.

    Attributes:
        host: its machine.
        where: the step and phase it is in.
        moves: how many phases it has entered.
        still: seconds for which it has been in this phase; 0 where a phase may take any time.
        silent: seconds since its last message.
        finished: whether it has ended as it should.
        gone: whether its connection has closed.
        failure: its error in a line; None without one.
    """

    host: str = ""
    where: str = "starting"
    moves: int = 0
    still: float = 0.0
    silent: float = 0.0
    finished: bool = False
    gone: bool = False
    failure: str | None = None


@dataclass
class Verdict:
    """Why the run ends.

    Attributes:
        reason: in words.
        rank: of the process that is to blame, or the first to be noticed.
        hang: whether processes must say where they stand, as none of them has an error to show.
        unheard: whether the first process could not be asked, so that this one shows its own error, if any.
    """

    reason: str
    rank: int
    hang: bool
    unheard: bool = False


@dataclass
class Judge:
    """Keeps what is known of every process.

    Attributes:
        size: number of processes.
        hang_timeout: seconds for which a process may stay in one phase; 0 for any time.
    """

    size: int
    hang_timeout: float
    processes: list[Process] = field(init=False)
    _first_failed: int | None = None
    _failed_for: float = 0.0

    def __post_init__(self) -> None:
        self.processes = [Process() for _ in range(self.size)]

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Take a message: values for the attributes of `Process`."""
        process = self.processes[rank]
        process.silent = 0.0
        for name, value in message.items():
            setattr(process, name, value)
        if process.failure is not None and self._first_failed is None:
            self._first_failed = rank

    def judge(self, elapsed: float) -> Verdict | None:
        """Return why the run must end, if it must; call it regularly.

        Args:
            elapsed: seconds since the last call, in which messages could have been heard.
        """
        running = {rank: process for rank, process in enumerate(self.processes) if not process.finished}
        for process in running.values():
            process.silent += elapsed
        for rank, process in running.items():
            if process.gone and process.failure is None:
                return Verdict(
                    f"rank {rank} on {process.host} has ended without a word: killed, perhaps for lack of memory "
                    "(dmesg tells)",
                    *(rank, False),
                )
        if self._first_failed is not None:
            self._failed_for += elapsed
            if self._failed_for < _SECONDS_FOR_THE_CAUSE:
                return None
            failed = self._first_failed
            return Verdict(f"rank {failed} failed: {self.processes[failed].failure}", failed, False)
        return self._hanging(running) if self.hang_timeout else None

    def _hanging(self, running: dict[int, Process]) -> Verdict | None:
        for rank, process in running.items():
            if process.silent > min(FROZEN_AFTER, self.hang_timeout):
                return Verdict(
                    f"rank {rank} on {process.host} has not answered for {process.silent:.0f} s; last {process.where}",
                    *(rank, True),
                )
        if not any(process.still > self.hang_timeout for process in running.values()):
            return None
        # The others wait in a collective for the one that has not come as far.
        rank = min(running, key=lambda rank: running[rank].moves)
        process = running[rank]
        return Verdict(
            f"nothing has moved for {process.still:.0f} s (--hang-timeout {self.hang_timeout:g}); least far is rank "
            f"{rank} on {process.host}, {process.where}",
            *(rank, True),
        )

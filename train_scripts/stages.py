"""Run the stages of a recipe in order: skip those that finished, print each command, end at the first that fails."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOWN_LINES = 15  # of the log of a command that failed


def setting(name: str, default: str = "") -> str:
    """Return an environment variable, or `default` where it is unset or empty."""
    return os.environ.get(name) or default


def words(command: str, **values: Any) -> list[str]:
    """Split a command as a shell does, then fill in its {names}: a list becomes its words, anything else stays one."""
    found: list[str] = []
    for word in shlex.split(command):
        alone = re.fullmatch(r"\{(\w+)\}", word)
        value = values[alone[1]] if alone else word.format(**values)
        found += value if isinstance(value, list) else [str(value)]
    return found


def is_finished(model: Path) -> bool:
    """Return whether train.py's output folder holds the model of its last run, not only checkpoints to go on from."""
    config = model / "config.json"
    if not config.exists():
        return False
    return all(path.stat().st_mtime <= config.stat().st_mtime for path in model.glob("checkpoint-*"))


def run(command: Sequence[str], output: TextIO | None = None) -> int:
    """Run a command to its end; Ctrl-C, SIGTERM and SIGHUP go to it and to all that it started.

    Args:
        command: its words.
        output: file for what it prints; None for the terminal.

    Returns:
        Its exit status as a shell counts it; 128 + number where a signal was passed on, however the command ended.
    """
    child, arrived, early = None, [], []

    def pass_on(number: int, _: Any = None) -> None:
        arrived.append(number)
        if child is None:
            early.append(number)
        elif _is_alive(child.pid):
            os.killpg(child.pid, number)

    earlier = {number: signal.signal(number, pass_on) for number in _PASSED_ON if _is_heard(number)}
    try:
        # In a process group of its own, so that a signal arrives once, whether the terminal or `kill` sent it.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output and subprocess.STDOUT, process_group=0
        )
        for number in early:
            pass_on(number)
        status = child.wait()
        while arrived and _is_alive(child.pid):  # a launcher may end before what it launched
            time.sleep(0.1)
    except OSError as error:
        print(error, file=output or sys.stderr)
        status = 127
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if arrived:
        return 128 + arrived[0]
    return status if status >= 0 else 128 - status


def _is_heard(number: int) -> bool:
    return signal.getsignal(number) is not signal.SIG_IGN  # as under nohup


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Recipe:
    """A script that makes its results in stages, of one or more commands each.

    Attributes:
        script: name of the launcher that users run, for messages.
        output: folder of the results.
        logs: folder for what the commands print; None for the terminal.
        dry_run: only print the commands; the environment variable DRY_RUN asks for it.
    """

    def __init__(
        self, script: str, output: str | Path, arguments: Sequence[str] = (), logs: Path | None = None
    ) -> None:
        self.script, self.output, self.logs = script, Path(output), logs
        self.dry_run = setting("DRY_RUN", "0") not in ("0", "no", "false")
        if arguments:
            self.fail(f"takes no arguments ({shlex.join(arguments)}), only the variables that its header lists", 2)

    def fail(self, message: str, status: int = 1) -> NoReturn:
        """Print a message and exit."""
        print(f"{self.script}: {message}", file=sys.stderr)
        sys.exit(status)

    def say(self, message: str) -> None:
        """Print a heading; a comment in a dry run, whose output is commands."""
        print("#" if self.dry_run else "==", message, flush=True)

    def stage(
        self,
        name: str,
        *commands: list[str],
        title: str = "",
        settings: str = "",
        model: Path | None = None,
        replaces: Path | None = None,
    ) -> None:
        """Run the commands of a stage one after the other, unless an earlier run of the script finished it.

        The first command that fails ends the script with its exit status.

        Args:
            name: of the stage.
            commands: their words.
            title: heading in place of the name.
            settings: all that decides the result. OUTPUT/finished-NAME holds them once the stage has ended well; the
                script ends where it was made with other settings.
            model: train.py's output folder, which tells whether a stage without settings is finished.
            replaces: folder that a run of the stage that was cut off may have left; it is removed.
        """
        finished = self._has_settings(name, settings, model) if settings else bool(model and is_finished(model))
        self.say((title or name) + (": finished earlier" if finished else ""))
        if finished:
            return
        if self.dry_run:
            print("\n".join(map(shlex.join, commands)), flush=True)
            return
        start = time.monotonic()
        self.output.mkdir(parents=True, exist_ok=True)
        begun, marker = self._markers(name)
        if settings:
            begun.write_text(settings + "\n")
        if replaces is not None:
            shutil.rmtree(replaces, ignore_errors=True)
        again = "; run the script again to go on with it" if settings or model else ""
        for command in commands:
            status = self._run(name, command)
            if status - 128 in _PASSED_ON:
                self.fail(f"{title or name} was interrupted{again}", status)
            if status:
                self.fail(f"{title or name} failed with status {status}{again}\n  {shlex.join(command)}", status)
        if model is not None and not is_finished(model):
            self.fail(f"{name} has saved no model yet{again}")
        if settings:
            begun.replace(marker)
        if self.logs:
            print(f"   {time.monotonic() - start:.0f} s, {self.logs / name}.log", flush=True)

    def _markers(self, name: str) -> tuple[Path, Path]:
        return self.output / f"begun-{name}", self.output / f"finished-{name}"

    def _has_settings(self, name: str, settings: str, model: Path | None) -> bool:
        """Return whether a stage is finished; fail where it was finished with other settings, or its model begun."""
        begun, marker = self._markers(name)
        # train.py goes on from a checkpoint; other commands start anew or look at settings of their own.
        for made in (marker, begun) if model else (marker,):
            made_with = made.read_text().strip() if made.exists() else ""  # earlier versions left it empty
            if made_with not in ("", settings):
                self.fail(
                    f"{name} in OUTPUT={self.output} was made with other settings; take another OUTPUT, or remove "
                    f"{made} and {model or self.output / name} to make it anew\n"
                    f"  made with: {made_with}\n  now:       {settings}"
                )
        return marker.exists()

    def _run(self, name: str, command: list[str]) -> int:
        if self.logs is None:
            print(shlex.join(command), flush=True)
            return run(command)
        path = self.logs / f"{name}.log"
        with open(path, "a") as log:
            print(shlex.join(command), file=log, flush=True)
            status = run(command, log)
        if status and status - 128 not in _PASSED_ON:
            lines = path.read_text(errors="replace").replace("\r", "\n").splitlines()
            print(*lines[-_SHOWN_LINES:], f"   all lines: {path}", sep="\n", file=sys.stderr)
        return status

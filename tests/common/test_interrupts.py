"""Ctrl-C and SIGTERM: one line about what is saved from the first process, silence from the others, no stack trace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import REPOSITORY

from easy_context.training.outcome import what_is_saved

# A run that "trains" until it is stopped; its main thread waits where no Python code runs, as in a collective.
SCRIPT = """
import pathlib, sys, threading
from easy_context.common.interrupts import end_on_signals
from easy_context.training.outcome import what_is_saved
with end_on_signals(what_is_saved(pathlib.Path(sys.argv[1]))) as interrupts:
    {first}
    print("ready", flush=True)
    {wait}
"""
WAITS = {
    "in Python": "while True: pass",
    "in C": "import ctypes; ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))",
}


def start(wait: str, folder: Path, rank: str, ignored: bool = False, first: str = "") -> subprocess.Popen:
    def signals():  # the tests themselves may run where Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)

    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(wait=wait, first=first), str(folder)],
        cwd=REPOSITORY,
        env=os.environ | {"RANK": rank},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=signals,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("number, name", [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_first_process_says_a_line_and_ends_at_once(tmp_path, wait, number, name):
    process = start(WAITS[wait], tmp_path, "0")
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said == f"\nstopped by {name}: no step was finished and nothing was saved in {tmp_path}\n"


def test_other_processes_say_nothing_and_end_later(tmp_path):
    process = start(WAITS["in C"], tmp_path, "1")
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said == ""
    assert time.monotonic() - started > 1


SAVES_FIRST = """
    import easy_context.common.interrupts, time
    easy_context.common.interrupts._SECONDS_OF_REPETITION = 1.0
    interrupts.save_first("the step is finished")
"""


@pytest.mark.parametrize("number, name", [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1")])
def test_a_script_that_saves_first_is_only_asked_to_stop(tmp_path, number, name):
    """The launcher repeats the signal at once, which asks for nothing more."""
    wait = "while not interrupts.asked_to_stop: time.sleep(0.1)\n    time.sleep(0.5)"
    process = start(wait, tmp_path, "0", first=SAVES_FIRST)
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said == f"\n{name}: the step is finished; a second signal ends it at once\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_script_that_saves_first(tmp_path, number):
    process = start("time.sleep(100)", tmp_path, "0", first=SAVES_FIRST)
    process.send_signal(signal.SIGUSR1)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "nothing was saved" in said


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    process = start("import time; time.sleep(1)", tmp_path, "0", ignored=True)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0


def test_afterwards_signals_are_as_before(tmp_path):
    from easy_context.common.interrupts import end_on_signals

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError), end_on_signals(what_is_saved(tmp_path)):
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_what_is_said_follows_from_what_this_run_has_written(tmp_path):
    metrics, config = tmp_path / "metrics.jsonl", tmp_path / "config.json"
    metrics.write_text("{}\n" * 9)
    config.write_text("{}")
    describe = what_is_saved(tmp_path)
    assert describe() == f"no step was finished and nothing was saved in {tmp_path}"
    metrics.unlink()
    assert describe() == f"no step was finished and nothing was saved in {tmp_path}"
    (tmp_path / "new").write_text("{}\n" * 3 + '{"step"')
    (tmp_path / "new").rename(metrics)
    steps = f"3 steps are in {metrics}"
    again = "the same command begins again at step 1"
    assert describe() == f"{steps}, the model of an earlier run is unchanged; {again}"
    config.unlink()
    assert describe() == f"{steps}, no model is saved; {again}"
    for step, whole in ((1, True), (2, True), (3, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{step}" / "manifest.json").write_text("{}")
    assert describe() == f"{steps}, no model is saved; the same command goes on from checkpoint-2"
    config.write_text("{ }")
    assert describe() == f"the model is saved in {tmp_path}"

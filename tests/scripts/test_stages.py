"""The stages of a recipe: what is skipped, what fails, and how signals reach what runs."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from launching import REPOSITORY, start_python

from train_scripts.stages import Recipe, is_finished, run, words


@pytest.fixture
def recipe(tmp_path):
    return Recipe("recipe.sh", tmp_path / "out")


def shell(line: str) -> list[str]:
    return ["bash", "-c", line]


def test_words_stay_whole_and_lists_become_words():
    assert words("a {x} '{x} b' {several} {none} c", x="1 2", several=["3", "4 5"], none=[]) == (
        ["a", "1 2", "1 2 b", "3", "4 5", "c"]
    )
    with pytest.raises(KeyError):
        words("{unknown}")


def test_a_model_is_finished_once_nothing_newer_goes_on(tmp_path):
    assert not is_finished(tmp_path)
    config, checkpoint = tmp_path / "config.json", tmp_path / "checkpoint-5"
    config.touch()
    assert is_finished(tmp_path)
    checkpoint.mkdir()
    os.utime(config, (100, 100))
    assert not is_finished(tmp_path), "an earlier run's model, and a later run that was cut off"
    os.utime(checkpoint, (99, 99))
    assert is_finished(tmp_path)


def test_the_first_command_that_fails_ends_the_script_with_its_status(recipe, capfd):
    with pytest.raises(SystemExit) as ended:
        recipe.stage("name", shell("echo one"), shell("echo two >&2; exit 5"), shell("echo three"), settings="A=1")
    assert ended.value.code == 5
    printed = capfd.readouterr()
    assert printed.out.splitlines() == ["== name", "bash -c 'echo one'", "one", "bash -c 'echo two >&2; exit 5'"]
    assert printed.err == (
        "two\nrecipe.sh: name failed with status 5; run the script again to go on with it\n"
        "  bash -c 'echo two >&2; exit 5'\n"
    )
    assert not (recipe.output / "finished-name").exists()


def test_a_command_that_is_not_there_and_one_that_is_killed(recipe, capfd):
    for command, status in ((["no-such-program"], 127), (shell("kill -9 $$"), 137)):
        with pytest.raises(SystemExit) as ended:
            recipe.stage("name", command)
        assert ended.value.code == status
    assert "No such file or directory: 'no-such-program'" in capfd.readouterr().err


def test_a_stage_that_was_cut_off_is_made_anew(recipe):
    left = recipe.output / "start"
    left.mkdir(parents=True)
    command = shell(f"mkdir {left}")  # fails where it is there
    recipe.stage("start", command, settings="A=1", replaces=left)
    recipe.stage("start", command, settings="A=1", replaces=left)
    assert (recipe.output / "finished-start").read_text() == "A=1\n"
    assert not (recipe.output / "begun-start").exists()


def test_training_that_ends_well_without_a_model_is_not_finished(recipe, capsys):
    """train.py saves a checkpoint and exits with 0 where a signal stops it."""
    with pytest.raises(SystemExit) as ended:
        recipe.stage("train", ["true"], settings="A=1", model=recipe.output / "model")
    assert ended.value.code == 1
    assert "train has saved no model yet; run the script again to go on with it" in capsys.readouterr().err
    assert not (recipe.output / "finished-train").exists()


def test_logs_keep_what_commands_print_and_the_end_is_shown(tmp_path, capsys):
    recipe = Recipe("recipe.sh", tmp_path, logs=tmp_path)
    recipe.stage("good", shell("echo one"), shell("echo two"), title="a good one")
    assert re.fullmatch(f"== a good one\n   \\d+ s, {tmp_path}/good.log\n", capsys.readouterr().out)
    assert (tmp_path / "good.log").read_text().splitlines()[1::2] == ["one", "two"]
    with pytest.raises(SystemExit):
        recipe.stage("bad", shell("seq 100; printf 'bar 1\\rbar 2\\n'; exit 3"), title="a bad one")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["88", "89"] and lines[13:] == [
        *("bar 1", "bar 2", f"   all lines: {tmp_path}/bad.log", "recipe.sh: a bad one failed with status 3"),
        "  " + shlex.join(shell("seq 100; printf 'bar 1\\rbar 2\\n'; exit 3")),
    ]


@pytest.mark.parametrize(("value", "runs_dry"), [("1", True), ("yes", True), ("0", False), ("no", False), ("", False)])
def test_what_asks_for_a_dry_run(recipe, monkeypatch, capsys, value, runs_dry):
    monkeypatch.setenv("DRY_RUN", value)
    recipe = Recipe(recipe.script, recipe.output)
    recipe.stage("name", ["touch", f"{recipe.output}/a b"], settings="A=1")
    assert capsys.readouterr().out == f"{'#' if runs_dry else '=='} name\ntouch '{recipe.output}/a b'\n"
    assert recipe.output.exists() != runs_dry


CHILD = "trap 'echo stopping; sleep 0.3; echo saved; exit 0' {signal}; echo ready; while :; do sleep 0.05; done"


def test_an_interruption_is_one_line_without_the_end_of_the_log(tmp_path):
    program = f"""from train_scripts.stages import Recipe
from pathlib import Path
Recipe("recipe.sh", {str(tmp_path)!r}, logs=Path({str(tmp_path)!r})).stage("name", {shell("echo ready; sleep 60")!r})"""
    process = start_python("-c", program)
    while not ((log := tmp_path / "name.log").exists() and log.read_text().endswith("\nready\n")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("== name\n", "recipe.sh: name was interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_and_the_script_waits_for_it(number, tmp_path):
    """Sent to the script only; the command saves, ends well, and the stage is not taken for finished."""
    command = shell(CHILD.format(signal=number.name))
    program = f"""from train_scripts.stages import Recipe
Recipe("recipe.sh", {str(tmp_path)!r}).stage("name", {command!r}, settings="A=1")"""
    process = start_python("-c", program)
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out == "stopping\nsaved\n"
    assert err.endswith("recipe.sh: name was interrupted; run the script again to go on with it\n")
    assert process.returncode == 128 + number
    assert not (tmp_path / "finished-name").exists()


def test_what_a_launcher_leaves_behind_is_waited_for(tmp_path):
    """The launcher dies of the signal at once, what it launched takes its time."""
    worker = f"trap 'sleep 0.5; echo saved >> {tmp_path}/log; exit' TERM; touch {tmp_path}/ready; "
    worker += "while :; do sleep 0.05; done"
    launcher = f"bash -c {shlex.quote(worker)} & wait"
    program = f"import sys; from train_scripts.stages import run; sys.exit(run({shell(launcher)!r}))"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert (tmp_path / "log").read_text() == "saved\n"


def test_ignored_signals_stay_ignored():
    """As under nohup."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(shell("kill -HUP $$; exit 4")) == 4
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_a_signal_that_arrives_while_the_command_starts_is_passed_on(monkeypatch, tmp_path):
    start = subprocess.Popen

    def start_slowly(*words, **options):
        child = start(*words, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # the handler runs before the caller knows the child
        return child

    monkeypatch.setattr(subprocess, "Popen", start_slowly)
    assert run(shell(f"sleep 5; touch {tmp_path}/undisturbed")) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())

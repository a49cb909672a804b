"""The SmolLM2 recipe: its commands parse, finished stages are skipped, other settings and wrong variables are named."""

import importlib
import os
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from launching import REPOSITORY

from train_scripts import smollm2, stages

LAUNCHER = REPOSITORY / "train_scripts" / "SmolLM2-135M-128K.sh"


@pytest.fixture
def recipe(tmp_path, monkeypatch, capsys):
    """`recipe(NAME=value, ...)`: run the recipe, whose commands are noted and end well; return (commands, headings)."""
    ran: list[list[str]] = []

    def note(command, output=None):
        ran.append(command)
        if "train.py" in command:
            model = Path(command[command.index("--output-dir") + 1])
            model.mkdir(exist_ok=True)
            (model / "config.json").touch()
        return 0

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(stages, "run", note)
    for name in ("treasury_of_david.txt", "world_english_bible.txt.xz"):
        (tmp_path / name).touch()
    given = {"TEXTS": str(tmp_path), "OUTPUT": str(tmp_path / "out"), "GPUS": "2"}

    def run(**variables):
        ran.clear()
        with pytest.MonkeyPatch.context() as environment:
            for name in ("DRY_RUN", *(field.name.upper() for field in fields(smollm2.Settings))):
                environment.delenv(name, raising=False)
            for name, value in (given | variables).items():
                environment.setenv(name, value)
            smollm2.main()
        lines = capsys.readouterr().out.splitlines()
        if variables.get("DRY_RUN") == "1":
            assert not ran
            ran.extend(shlex.split(line) for line in lines if not line.startswith("#"))
        return [script_and_flags(command) for command in ran], [line for line in lines if line[:2] in ("# ", "==")]

    run.output = tmp_path / "out"
    return run


def script_and_flags(command):
    place = next(i for i, word in enumerate(command) if word.endswith(".py"))
    return command[place], command[place + 1 :]


def parse(script, flags):
    homes = {
        "train.py": "easy_context.training.arguments",
        "prepare_data.py": "easy_context.data.preparation.arguments",
        "tools/scale_rope.py": "tools.scale_rope",
    }
    return importlib.import_module(homes.get(script, script.removesuffix(".py"))).parse_arguments(flags)


@pytest.mark.parametrize(
    "variables", [{}, {"ROPE": "2e7", "GPUS": "1", "SAVE_MINUTES": "0.5"}, {"GPUS": "8", "ROPE": "linear"}]
)
def test_every_command_of_the_recipe_parses(recipe, variables):
    commands, _ = recipe(DRY_RUN="1", **variables)
    scripts = [script for script, _ in commands]
    assert scripts.count("train.py") == 2
    assert scripts.count("prepare_data.py") == 2
    assert ("tools/scale_rope.py" in scripts) == ("2e7" not in variables.values())
    parsed = [(script, parse(script, flags)) for script, flags in commands if script != "plot.py"]  # needs the results
    train = [options for script, options in parsed if script == "train.py"]
    assert [options.seq_length for options in train] == [65536, 131072]
    assert train[1].model == train[0].output_dir
    mode = "data_parallel" if variables.get("GPUS") == "1" else "zigzag_ring_attn"
    assert {options.parallel_mode for options in train} == {mode}
    assert {options.save_minutes for options in train} == {float(variables.get("SAVE_MINUTES", 30))}
    assert not recipe.output.exists()


def test_what_is_printed_is_what_runs(recipe):
    assert recipe(DRY_RUN="1")[0] == recipe()[0]


def test_a_second_run_does_nothing_on_any_number_of_gpus(recipe):
    recipe()
    commands, headings = recipe(GPUS="8")
    assert commands == []
    assert len(headings) == 9 and all(heading.endswith(": finished earlier") for heading in headings)
    # Runs of earlier versions are recognised by these words.
    assert (recipe.output / "finished-train-131072").read_text() == (
        "MODEL=HuggingFaceTB/SmolLM2-135M-Instruct ROPE=yarn FACTOR=16 ATTENTION_FACTOR=1 "
        f"TEXTS={recipe.output.parent} RETRIEVAL=0.5 FACTS=2 TEXT_LABELS=0.1 "
        "STAGE=65536:100:3e-4 STAGE=131072:50:2e-4\n"
    )


def test_markers_of_earlier_versions_are_empty(recipe):
    recipe()
    for step in ("rows-65536", "rows-131072", "start", "train-65536"):
        (recipe.output / f"finished-{step}").write_text("")
    (recipe.output / "finished-train-131072").unlink()
    (script, flags), *rest = recipe()[0]
    assert script == "train.py" and "131072" in flags and not rest


@pytest.mark.parametrize(
    ("variable", "value", "step"),
    [
        ("FACTS", "3", "rows-65536"),
        ("RETRIEVAL", "0.25", "rows-65536"),
        ("TEXT_LABELS", "0.2", "rows-65536"),
        ("MODEL", "other/model", "rows-65536"),
        ("STAGES", "65536:99:3e-4 131072:50:2e-4", "rows-65536"),
        ("STAGES", "65536:100:3e-4 131072:51:2e-4", "rows-131072"),
        ("FACTOR", "32", "start"),
        ("ATTENTION_FACTOR", "", "start"),
        ("ROPE", "linear", "start"),
        ("ROPE", "2e7", "train-65536"),
        ("STAGES", "65536:100:1e-4 131072:50:2e-4", "train-65536"),
        ("STAGES", "65536:100:3e-4 131072:50:1e-4", "train-131072"),
        ("STAGES", "65536:100:3e-4", "perplexity"),
        ("SAMPLES", "5", "needle"),
    ],
)
@pytest.mark.parametrize("dry_run", ["0", "1"])
def test_a_step_made_with_other_settings_stops_the_run(recipe, capsys, variable, value, step, dry_run):
    recipe()
    with pytest.raises(SystemExit) as ended:
        recipe(DRY_RUN=dry_run, **{variable: value})
    printed = capsys.readouterr()
    marker = recipe.output / f"finished-{step}"
    first, then, now = printed.err.splitlines()
    assert ended.value.code == 1
    assert first.startswith(f"SmolLM2-135M-128K.sh: {step} in OUTPUT=")
    folder = step.replace("train", "model")
    assert f"take another OUTPUT, or remove {marker} and {recipe.output / folder} to" in first
    assert then == f"  made with: {marker.read_text().strip()}"
    assert now.startswith("  now:       MODEL=") and now.split(":", 1)[1] != then.split(":", 1)[1]
    if variable != "STAGES":
        assert f" {variable}={value}" in now and f" {variable}={value} " not in then
    # Nothing was made before the script stopped: all steps before this one are the same.
    assert all(line.endswith(": finished earlier") for line in printed.out.splitlines())


def test_training_does_not_go_on_from_checkpoints_of_other_settings(recipe, capsys, monkeypatch):
    """Rows are made anew with other facts, beside a stage that was cut off: its checkpoint saw the old rows."""
    note = stages.run
    monkeypatch.setattr(stages, "run", lambda command, output=None: 130 if "train.py" in command else note(command))
    with pytest.raises(SystemExit) as ended:
        recipe()
    assert ended.value.code == 130
    for length in (65536, 131072):
        (recipe.output / f"finished-rows-{length}").unlink()
    monkeypatch.setattr(stages, "run", note)
    with pytest.raises(SystemExit):
        recipe(FACTS="3")
    printed = capsys.readouterr()
    assert "== rows-131072\n" in printed.out and printed.out.endswith("== start: finished earlier\n")
    assert f"remove {recipe.output}/begun-train-65536 and {recipe.output}/model-65536 to" in printed.err


def test_stages_can_go_on(recipe):
    stages = "65536:4:3e-4 131072:3:2e-4 262144:2:1e-4"
    commands, _ = recipe(STAGES=stages, FACTOR="32")
    train = [parse(script, flags) for script, flags in commands if script == "train.py"]
    assert [f"{x.seq_length}:{x.max_train_steps}:{x.learning_rate:.0e}".replace("e-0", "e-") for x in train] == (
        stages.split()
    )
    needle = next(flags for script, flags in commands if script == "eval_needle.py")
    assert needle[needle.index("--max_context_length") + 1] == "262144"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("STAGES", "65536:100", "one or more LENGTH:STEPS:RATE, such as 65536:100:3e-4"),
        ("STAGES", "65536:0:1e-4", "one or more LENGTH:STEPS:RATE"),
        ("STAGES", "65536:9:1e", "one or more LENGTH:STEPS:RATE"),
        ("STAGES", " ", "one or more LENGTH:STEPS:RATE"),
        ("STAGES", "*", "one or more LENGTH:STEPS:RATE"),
        ("STAGES", "99999999999999999999:50:2e-4", "one or more LENGTH:STEPS:RATE"),
        ("GPUS", "-1", "a number of GPUs"),
        ("ROPE", "foo", "yarn, llama3, linear, or a base"),
        ("ROPE", "0", "yarn, llama3, linear, or a base"),
        ("ROPE", ".5", "yarn, llama3, linear, or a base"),
        ("RETRIEVAL", "7", "a share from 0 to 1"),
        ("TEXT_LABELS", "-0.1", "a share from 0 to 1"),
        ("FACTS", "1.5", "a whole number"),
        ("ATTENTION_FACTOR", "x", "a number above 0"),
        ("FACTOR", "0", "a number above 1"),
        ("FACTOR", "0.5", "a number above 1"),
        ("FACTOR", "1", "a number above 1"),
        ("SAVE_MINUTES", "-1", "a number of minutes"),
        ("SAMPLES", "0", "a whole number above 0"),
    ],
)
def test_wrong_variables_are_named(recipe, capsys, name, value, said):
    with pytest.raises(SystemExit):
        recipe(**{name: value})
    assert capsys.readouterr().err.startswith(f"SmolLM2-135M-128K.sh: {name}='{value}' must be {said}")


def test_two_stages_of_one_length_are_refused(recipe, capsys):
    with pytest.raises(SystemExit):
        recipe(STAGES="65536:10:3e-4 65536:20:1e-4")
    assert "STAGES='65536:10:3e-4 65536:20:1e-4' gives rows of 65536 twice" in capsys.readouterr().err


def test_missing_texts_are_named_where_they_are_read(recipe, capsys, tmp_path):
    recipe(DRY_RUN="1", TEXTS=str(tmp_path / "none"))
    with pytest.raises(SystemExit):
        recipe(TEXTS=str(tmp_path / "none"))
    assert "none holds no treasury_of_david.txt (nor .gz, .xz, .bz2)" in capsys.readouterr().err
    assert not recipe.output.exists()


def test_the_header_of_the_launcher_has_every_variable_with_its_default():
    header = LAUNCHER.read_text()
    listed = dict(re.findall(r"^#   ([A-Z_]+) .*\((.*)\)$", header, re.MULTILINE))
    assert listed == {field.name.upper(): field.default for field in fields(smollm2.Settings)}


def test_the_launcher_starts_the_recipe_from_anywhere(tmp_path):
    """Its variables arrive, a word with a space stays one, and arguments are refused."""
    environment = os.environ | {"DRY_RUN": "yes", "OUTPUT": f"{tmp_path}/a folder", "GPUS": "1"}
    process = subprocess.run(
        ["bash", LAUNCHER], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    train = [line for line in process.stdout.splitlines() if " train.py " in line]
    assert f"{tmp_path}/a folder/model-65536" in shlex.split(train[0])
    assert not list(tmp_path.iterdir())
    refused = subprocess.run(["bash", LAUNCHER, "--help"], env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "takes no arguments (--help)" in refused.stderr

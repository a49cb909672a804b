"""Recipes and launch configurations: every printed command parses, the stages are the published ones and chain."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from launching import REPOSITORY

from easy_context.training.arguments import parse_arguments

CONFIGS = REPOSITORY / "accelerate_configs"
PROCESSES = 8  # of single_node.yaml, which the recipes use
# length, RoPE base, steps
LLAMA_2 = [
    (32_768, 1e6, 1000),
    (65_536, 5e6, 1000),
    (256_000, 10e6, 500),
    (256_000, 25e6, 500),
    (256_000, 50e6, 150),
    (512_000, 100e6, 300),
    (512_000, 250e6, 90),
]
DANUBE_2 = [
    (16_000, 30e3, 400),
    (32_000, 100e3, 400),
    (32_000, 300e3, 400),
    (64_000, 1e6, 400),
    (64_000, 2.5e6, 400),
    (64_000, 5e6, 400),
    (128_000, 10e6, 300),
    (128_000, 30e6, 200),
    (256_000, 100e6, 200),
]
RECIPES = {"EasyContext-1M-Llama-2-7B.sh": LLAMA_2, "EasyContext-256K-danube2.sh": DANUBE_2}


def run(recipe, environment, **options):
    clean = {key: value for key, value in os.environ.items() if key not in ("MODEL", "DATA", "CONFIG", "NUM_PROCESSES")}
    return subprocess.run(
        ["bash", str(REPOSITORY / "train_scripts" / recipe)],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def dry_run(recipe, **environment):
    """The words of every command that a recipe prints."""
    result = run(recipe, {"DRY_RUN": "1"} | environment, check=True)
    return [shlex.split(line) for line in result.stdout.splitlines()]


def train_arguments(command):
    """What train.py understands of an `accelerate launch ... train.py ...` command."""
    assert command[:2] == ["accelerate", "launch"]
    return parse_arguments(command[command.index("train.py") + 1 :])


@pytest.mark.parametrize("recipe", RECIPES)
def test_stages_are_the_published_ones_and_every_flag_parses(recipe):
    stages = [train_arguments(command) for command in dry_run(recipe)]
    assert [(s.seq_length, s.rope_theta, s.max_train_steps) for s in stages] == RECIPES[recipe]
    for stage in stages:
        split = stage.parallel_mode != "data_parallel"
        assert stage.parallel_mode == ("zigzag_ring_attn" if stage.seq_length >= 128_000 else "data_parallel")
        rows = stage.batch_size * stage.gradient_accumulate_every * (1 if split else PROCESSES)
        assert 0.9e6 < rows * stage.seq_length < 1.1e6, "about 1M tokens a step"
        assert stage.seq_length % (2 * PROCESSES) == 0, "nothing to pad"
        assert stage.lr_scheduler == "constant" and stage.warmup_steps == 0 and stage.mixed_precision == "bf16"
    assert len({stage.seed for stage in stages}) == len(stages), "no stage repeats the rows of another in their order"


def test_learning_rates():
    rates = {recipe: [train_arguments(command).learning_rate for command in dry_run(recipe)] for recipe in RECIPES}
    assert rates["EasyContext-1M-Llama-2-7B.sh"] == [2e-5] * 6 + [1e-5]
    assert rates["EasyContext-256K-danube2.sh"] == [2e-5] * 9


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_stage_starts_from_the_one_before(recipe):
    stages = [train_arguments(command) for command in dry_run(recipe, OUTPUT="out", MODEL="start")]
    assert stages[0].model == "start"
    for before, after in zip(stages, stages[1:], strict=False):
        assert after.model == before.output_dir
    assert len({stage.output_dir for stage in stages}) == len(stages)
    assert all(stage.output_dir.startswith("out/") for stage in stages)


@pytest.mark.parametrize("recipe", RECIPES)
def test_variables_reach_every_command(recipe):
    commands = dry_run(
        recipe,
        CONFIG="accelerate_configs/two_node.yaml",
        NUM_PROCESSES="16",
        DATA="a folder/rows",
        EXTRA="--keep-attention cpu --sequence-parallel-size 8",
    )
    for command in commands:
        launch = command[: command.index("train.py")]
        assert launch[2:] == ["--config_file", "accelerate_configs/two_node.yaml", "--num_processes", "16"]
        args = train_arguments(command)
        assert args.dataset == "a folder/rows" and args.keep_attention == "cpu" and args.sequence_parallel_size == 8


@pytest.fixture
def fake_accelerate(tmp_path):
    """`accelerate` that notes its arguments and saves a "model"; fails at the stage that FAIL_AT names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "accelerate").write_text(
        "#!/usr/bin/env bash\n"
        'while [ "$1" != --output-dir ]; do shift; done\n'
        'echo "$2" >> "$LOG"\n'
        'case $2 in *"${FAIL_AT:-nothing}"*) exit 3;; esac\n'
        'mkdir -p "$2" && touch "$2/config.json"\n'
    )
    (folder / "accelerate").chmod(0o755)
    log = tmp_path / "log"

    def call(recipe, **environment):
        log.write_text("")
        paths = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "OUTPUT": str(tmp_path / "out")}
        result = run(recipe, paths | environment)
        return result, [Path(line).name for line in log.read_text().splitlines()]

    return call


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stage_that_fails_stops_the_script_and_a_second_run_goes_on_there(fake_accelerate, recipe):
    names = [Path(train_arguments(command).output_dir).name for command in dry_run(recipe)]
    result, ran = fake_accelerate(recipe, FAIL_AT=names[2])
    assert result.returncode != 0
    assert ran == names[:3]
    assert f"stage {names[2]} failed; run the script again" in result.stderr

    result, ran = fake_accelerate(recipe)
    assert result.returncode == 0, result.stderr
    assert ran == names[2:]
    assert f"== {names[0]} is finished" in result.stdout

    result, ran = fake_accelerate(recipe)
    assert result.returncode == 0 and ran == []


def yaml_of(name):
    return yaml.safe_load((CONFIGS / name).read_text())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_deepspeed_jsons_leave_training_to_the_flags(path):
    config = json.loads(path.read_text())
    assert config["zero_optimization"]["stage"] == 3
    assert "scheduler" not in config
    assert config.get("optimizer", {}).get("params", {}).get("lr", "auto") == "auto"


def test_offload_is_where_its_name_says():
    for name, expected in (("zero3_offload.json", "cpu"), ("zero3.json", "none")):
        zero = json.loads((CONFIGS / name).read_text())["zero_optimization"]
        for kind in ("offload_optimizer", "offload_param"):
            assert zero.get(kind, {}).get("device", "none") == expected


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_launch_configurations_load_and_name_files_that_exist(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))  # refuses unknown keys
    assert config.distributed_type == "DEEPSPEED"
    assert (REPOSITORY / config.deepspeed_config["deepspeed_config_file"]).is_file()


def test_launch_configurations_have_the_processes_their_names_say():
    expected = {"cpu": (1, 2), "single_gpu": (1, 1), "single_node": (1, 8), "two_node": (2, 16)}
    expected["deepspeed_inference"] = (1, 8)
    for name, (machines, processes) in expected.items():
        config = yaml_of(f"{name}.yaml")
        assert (config["num_machines"], config["num_processes"]) == (machines, processes)
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(expected)

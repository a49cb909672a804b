"""Recipes and launch configurations: every command parses, the stages are the published ones and chain."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from launching import REPOSITORY

from easy_context.training.arguments import parse_arguments
from train_scripts import multi_stage, stages

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
RECIPES = {multi_stage.llama_2_7b: LLAMA_2, multi_stage.danube2: DANUBE_2}
LAUNCHERS = ("EasyContext-1M-Llama-2-7B.sh", "EasyContext-256K-danube2.sh")
VARIABLES = ("MODEL", "DATA", "CONFIG", "NUM_PROCESSES", "OUTPUT", "SAVE_MINUTES", "EXTRA", "DRY_RUN")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run(recipe, NAME=value, ..., fails_at=name)`: the commands that it runs, each of which saves a model."""
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []

    def save_model(command, output=None):
        ran.append(command)
        folder = Path(command[command.index("--output-dir") + 1])
        if folder.name == fails_at:
            return 3
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        return 0

    fails_at = None
    monkeypatch.setattr(stages, "run", save_model)

    def start(recipe, fails_at_stage=None, **variables):
        nonlocal fails_at
        fails_at = fails_at_stage
        ran.clear()
        with pytest.MonkeyPatch.context() as environment:
            for name in VARIABLES:
                environment.delenv(name, raising=False)
            for name, value in variables.items():
                environment.setenv(name, value)
            recipe()
        return ran

    start.ran = ran
    return start


def train_arguments(command):
    """Return what train.py understands of an `accelerate launch ... train.py ...` command."""
    assert command[:2] == ["accelerate", "launch"]
    return parse_arguments(command[command.index("train.py") + 1 :])


@pytest.mark.parametrize("recipe", RECIPES)
def test_stages_are_the_published_ones_and_every_flag_parses(run, recipe):
    stages = [train_arguments(command) for command in run(recipe)]
    assert [(s.seq_length, s.rope_theta, s.max_train_steps) for s in stages] == RECIPES[recipe]
    for stage in stages:
        split = stage.parallel_mode != "data_parallel"
        assert stage.parallel_mode == ("zigzag_ring_attn" if stage.seq_length >= 128_000 else "data_parallel")
        rows = stage.batch_size * stage.gradient_accumulate_every * (1 if split else PROCESSES)
        assert 0.9e6 < rows * stage.seq_length < 1.1e6, "about 1M tokens a step"
        assert stage.seq_length % (2 * PROCESSES) == 0, "nothing to pad"
        assert stage.lr_scheduler == "constant" and stage.warmup_steps == 0 and stage.mixed_precision == "bf16"
        assert stage.save_minutes == 30
    assert len({stage.seed for stage in stages}) == len(stages), "no stage repeats the rows of another in their order"
    assert stages[-1].rope_theta > 0.0424 * stages[-1].seq_length ** 1.628, "the base that the last length needs"


def test_learning_rates(run):
    assert [train_arguments(command).learning_rate for command in run(multi_stage.llama_2_7b)] == [2e-5] * 6 + [1e-5]
    assert [train_arguments(command).learning_rate for command in run(multi_stage.danube2)] == [2e-5] * 9


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_stage_starts_from_the_one_before(run, recipe):
    stages = [train_arguments(command) for command in run(recipe, OUTPUT="out", MODEL="start")]
    assert stages[0].model == "start"
    for before, after in zip(stages, stages[1:], strict=False):
        assert after.model == before.output_dir
    assert len({stage.output_dir for stage in stages}) == len(stages)
    assert all(stage.output_dir.startswith("out/") for stage in stages)


@pytest.mark.parametrize("recipe", RECIPES)
def test_variables_reach_every_command(run, recipe):
    commands = run(
        recipe,
        CONFIG="accelerate_configs/two_node.yaml",
        NUM_PROCESSES="16",
        DATA="a folder/rows",
        SAVE_MINUTES="5",
        EXTRA="--keep-attention cpu  --sequence-parallel-size 8 --eval-dataset 'other rows'",
    )
    for command in commands:
        launch = command[: command.index("train.py")]
        assert launch[2:] == ["--config_file", "accelerate_configs/two_node.yaml", "--num_processes", "16"]
        args = train_arguments(command)
        assert args.dataset == "a folder/rows" and args.keep_attention == "cpu" and args.sequence_parallel_size == 8
        assert args.save_minutes == 5 and args.eval_dataset == "other rows"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stage_that_fails_stops_the_script_and_a_second_run_goes_on_there(run, recipe, capsys):
    names = [Path(train_arguments(command).output_dir).name for command in run(recipe, OUTPUT="first")]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(recipe, fails_at_stage=names[2])
    assert ended.value.code == 3
    assert [Path(train_arguments(command).output_dir).name for command in run.ran] == names[:3]
    printed = capsys.readouterr()
    assert f"{names[2]} failed with status 3; run the script again to go on with it\n" in printed.err
    assert shlex.split(printed.err.splitlines()[-1]) == run.ran[-1]

    assert [Path(train_arguments(command).output_dir).name for command in run(recipe)] == names[2:]
    assert f"== {names[0]}: finished earlier" in capsys.readouterr().out
    assert run(recipe) == []


def test_the_last_step_to_1m_tokens_is_told(run, capsys):
    run(multi_stage.llama_2_7b)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("== for 1M tokens") and "--rope-theta 1e9" in last and "output/7B_512K_rope_250M/" in last


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_prints_commands_that_a_shell_takes(launcher, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"DRY_RUN": "1", "DATA": "a folder/rows", "OUTPUT": str(tmp_path)}
    result = subprocess.run(
        ["bash", REPOSITORY / "train_scripts" / launcher],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    commands = [shlex.split(line) for line in result.stdout.splitlines() if not line.startswith("# ")]
    assert len(commands) == (7 if "Llama" in launcher else 9)
    assert {train_arguments(command).dataset for command in commands} == {"a folder/rows"}
    assert not list(tmp_path.iterdir())


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
    if path.name == "single_gpu_plain.yaml":  # for optimizers that DeepSpeed does not have
        assert config.distributed_type == "NO" and not config.deepspeed_config
        return
    assert config.distributed_type == "DEEPSPEED"
    assert (REPOSITORY / config.deepspeed_config["deepspeed_config_file"]).is_file()


def test_launch_configurations_have_the_processes_their_names_say():
    expected = {"cpu": (1, 2), "single_gpu": (1, 1), "single_node": (1, 8), "two_node": (2, 16)}
    expected |= {"deepspeed_inference": (1, 8), "single_gpu_plain": (1, 1)}
    for name, (machines, processes) in expected.items():
        config = yaml_of(f"{name}.yaml")
        assert (config["num_machines"], config["num_processes"]) == (machines, processes)
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(expected)

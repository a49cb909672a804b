"""The SmolLM2 recipe and the tools that it calls."""

import importlib
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import REPOSITORY
from tiny_models import save_tiny_llama

RECIPE = REPOSITORY / "train_scripts" / "SmolLM2-135M-128K.sh"
sys.path.insert(0, str(REPOSITORY / "tools"))


def dry_run(tmp_path, **variables):
    for name in ("treasury_of_david.txt", "world_english_bible.txt.xz"):
        (tmp_path / name).touch()
    environment = os.environ | {"DRY_RUN": "1", "TEXTS": str(tmp_path), "OUTPUT": str(tmp_path / "out"), "GPUS": "2"}
    result = subprocess.run(
        ["bash", RECIPE], env=environment | variables, capture_output=True, text=True, check=True, timeout=60
    )
    return [shlex.split(line) for line in result.stdout.splitlines() if not line.startswith("#")]


def flags_of(command):
    script = next(i for i, word in enumerate(command) if word.endswith(".py"))
    return command[script], command[script + 1 :]


def parsers():
    from easy_context.data.preparation.arguments import parse_arguments as prepare
    from easy_context.training.arguments import parse_arguments as train

    return {
        "train.py": train,
        "prepare_data.py": prepare,
        "tools/scale_rope.py": importlib.import_module("scale_rope").parse_arguments,
        "eval_ppl.py": importlib.import_module("eval_ppl").parse_arguments,
        "eval_needle.py": importlib.import_module("eval_needle").parse_arguments,
    }


@pytest.mark.parametrize("variables", [{}, {"ROPE": "2e7", "GPUS": "1"}, {"GPUS": "8", "ROPE": "yarn"}])
def test_every_command_of_the_recipe_parses(tmp_path, variables):
    commands = [flags_of(command) for command in dry_run(tmp_path, **variables)]
    scripts = [script for script, _ in commands]
    assert scripts.count("train.py") == 2
    assert scripts.count("prepare_data.py") == 2
    assert ("tools/scale_rope.py" in scripts) == ("2e7" not in variables.values())
    parse = parsers()
    for script, flags in commands:
        if script != "plot.py":  # its inputs exist only after the run
            parse[script](flags)
    train = [parse["train.py"](flags) for script, flags in commands if script == "train.py"]
    assert [options.seq_length for options in train] == [65536, 131072]
    assert train[1].model == train[0].output_dir
    assert {options.parallel_mode for options in train} == {
        "data_parallel" if variables.get("GPUS") == "1" else "zigzag_ring_attn"
    }


def test_finished_steps_are_skipped(tmp_path):
    (tmp_path / "out").mkdir()
    for step in ("rows-65536", "rows-131072", "start", "train-65536"):
        (tmp_path / "out" / f"finished-{step}").touch()
    commands = [flags_of(command) for command in dry_run(tmp_path)]
    assert commands[0][0] == "train.py"
    assert "131072" in commands[0][1]


@pytest.fixture
def finished_run(tmp_path):
    """The environment of a run whose steps all end well at once, after one such run."""
    for name in ("treasury_of_david.txt", "world_english_bible.txt"):
        (tmp_path / name).touch()
    environment = os.environ | {"TEXTS": str(tmp_path), "OUTPUT": str(tmp_path / "out"), "GPUS": "2", "PYTHON": "true"}
    run_again(environment)
    return environment


def run_again(environment, **variables):
    return subprocess.run(
        ["bash", RECIPE], env=environment | variables, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()


def steps_of(lines):
    return [line for line in lines if line.startswith("#")]


def test_a_second_run_does_nothing_on_any_number_of_gpus(finished_run):
    (*steps, last) = run_again(finished_run, GPUS="8")
    assert steps == steps_of(steps) and all(step.endswith(": finished earlier") for step in steps)
    assert len(steps) == 9
    assert last.startswith("the model is ")


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
def test_a_step_made_with_other_settings_stops_the_run(finished_run, variable, value, step, dry_run):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_again(finished_run, DRY_RUN=dry_run, **{variable: value})
    marker = Path(finished_run["OUTPUT"]) / f"finished-{step}"
    first, then, now = failed.value.stderr.splitlines()
    assert (
        first.startswith(f"SmolLM2-135M-128K.sh: {step} in OUTPUT=")
        and f"take another OUTPUT, or remove {marker}" in first
    )
    assert then == f"  made with: {marker.read_text().strip()}"
    assert now.startswith("  now:       MODEL=") and now.split(":", 1)[1] != then.split(":", 1)[1]
    if variable != "STAGES":
        assert f" {variable}={value}" in now and f" {variable}={value} " not in then
    # Nothing was made before the script stopped: all steps before this one are the same.
    assert all(line.endswith(": finished earlier") for line in failed.value.stdout.splitlines())


def test_what_builds_on_a_step_made_anew_is_not_taken_for_finished(finished_run):
    output = Path(finished_run["OUTPUT"])
    for length in (65536, 131072):
        (output / f"finished-rows-{length}").unlink()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_again(finished_run, FACTS="3")
    assert steps_of(failed.value.stdout.splitlines()) == ["# rows-65536", "# rows-131072", "# start: finished earlier"]
    assert f"remove {output}/finished-train-65536" in failed.value.stderr


def test_stages_can_go_on(tmp_path):
    stages = "65536:4:3e-4 131072:3:2e-4 262144:2:1e-4"
    commands = [flags_of(command) for command in dry_run(tmp_path, STAGES=stages, FACTOR="32")]
    parse = parsers()
    train = [parse["train.py"](flags) for script, flags in commands if script == "train.py"]
    assert [(x.seq_length, x.max_train_steps, x.learning_rate) for x in train] == [
        (65536, 4, 3e-4),
        (131072, 3, 2e-4),
        (262144, 2, 1e-4),
    ]
    needle = next(flags for script, flags in commands if script == "eval_needle.py")
    assert needle[needle.index("--max_context_length") + 1] == "262144"


@pytest.mark.parametrize(
    "name,value,said",
    [
        ("STAGES", "65536:100", "STAGE='65536:100' must be LENGTH:STEPS:RATE in STAGES"),
        ("STAGES", "65536:0:1e-4", "STAGE='65536:0:1e-4' must be LENGTH:STEPS:RATE"),
        ("STAGES", "65536:9:1e", "STAGE='65536:9:1e' must be LENGTH:STEPS:RATE"),
        ("STAGES", "65536:10:3e-4 65536:20:1e-4", "STAGES='65536:10:3e-4 65536:20:1e-4' gives rows of 65536 twice"),
        ("GPUS", "-1", "GPUS='-1' must be a number of GPUs"),
        ("ROPE", "foo", "ROPE='foo' must be yarn, llama3, linear, or a base"),
        ("ROPE", "0", "ROPE='0' must be"),
        ("STAGES", " ", "STAGES=' ' must be one or more LENGTH:STEPS:RATE"),
        ("STAGES", "*", "STAGE='*' must be LENGTH:STEPS:RATE"),
        ("STAGES", "99999999999999999999:50:2e-4", "STAGE='99999999999999999999:50:2e-4' must be"),
        ("ROPE", ".5", "ROPE='.5' must be"),
        ("RETRIEVAL", "7", "RETRIEVAL='7' must be a share from 0 to 1"),
        ("ATTENTION_FACTOR", "x", "ATTENTION_FACTOR='x' must be a number above 0"),
        ("FACTOR", "0", "FACTOR='0' must be a number above 1"),
        ("FACTOR", "0.5", "FACTOR='0.5' must be a number above 1"),
        ("FACTOR", "1", "FACTOR='1' must be a number above 1"),
        ("SAMPLES", "0", "SAMPLES='0' must be a whole number above 0"),
    ],
)
def test_wrong_variables_are_named(tmp_path, name, value, said):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        dry_run(tmp_path, **{name: value})
    assert said in failed.value.stderr


@pytest.mark.parametrize("value,runs_dry", [("1", True), ("yes", True), ("true", True), ("0", False), ("no", False)])
def test_what_asks_for_a_dry_run(tmp_path, value, runs_dry):
    environment = os.environ | {"DRY_RUN": value, "TEXTS": str(tmp_path / "none"), "OUTPUT": str(tmp_path), "GPUS": "1"}
    result = subprocess.run(["bash", RECIPE], env=environment, capture_output=True, text=True, timeout=60)
    if runs_dry:
        assert result.returncode == 0 and "train.py" in result.stdout
    else:
        assert result.returncode != 0 and "holds no treasury_of_david.txt" in result.stderr
    assert not list(tmp_path.iterdir())


def test_missing_texts_are_named(tmp_path):
    environment = os.environ | {"TEXTS": str(tmp_path / "none")}
    result = subprocess.run(["bash", RECIPE], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "holds no treasury_of_david.txt" in result.stderr


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_scaled_rope_is_saved_and_leaves_fast_frequencies(tmp_path, kind):
    from tokenizer_styles import tokenizer_of_style
    from transformers import AutoModelForCausalLM

    scale_rope = importlib.import_module("scale_rope")
    model = save_tiny_llama(tmp_path / "model")
    tokenizer_of_style("bytes").save_pretrained(model)
    scale_rope.main([model, str(tmp_path / "out"), "--type", kind, "--factor", "16"])
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "out"))
    ratio = before.model.rotary_emb.inv_freq / after.model.rotary_emb.inv_freq
    if kind != "linear":
        assert ratio[0] == pytest.approx(1.0)
    assert ratio.max() <= 16.001
    assert after.config.max_position_embeddings == 16 * before.config.max_position_embeddings
    for name, weight in before.state_dict().items():
        assert torch.equal(weight, after.state_dict()[name])
    with pytest.raises(ValueError, match="already, plain RoPE"):
        scale_rope.main([str(tmp_path / "out"), str(tmp_path / "again"), "--factor", "2"])
    for taken in (tmp_path / "out", Path(model)):
        with pytest.raises(ValueError, match="is there already: name another folder"):
            scale_rope.main([model, str(taken), "--factor", "2"])
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


@pytest.mark.parametrize("flags,scaling", [([], 0.1 * math.log(16) + 1), (["--attention-factor", "1"], 1.0)])
def test_attention_factor_of_yarn_holds_in_the_reloaded_model(tmp_path, flags, scaling):
    from tokenizer_styles import tokenizer_of_style
    from transformers import AutoModelForCausalLM

    model = save_tiny_llama(tmp_path / "model")
    tokenizer_of_style("bytes").save_pretrained(model)
    importlib.import_module("scale_rope").main(
        [model, str(tmp_path / "out"), "--type", "yarn", "--factor", "16", *flags]
    )
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert reloaded.model.rotary_emb.attention_scaling == pytest.approx(scaling)


def test_tools_check_their_arguments(tmp_path):
    scale_rope, convert = importlib.import_module("scale_rope"), importlib.import_module("convert_gguf")
    with pytest.raises(ValueError, match="--factor 1.0: must be above 1"):
        scale_rope.parse_arguments(["model", "out", "--factor", "1"])
    with pytest.raises(ValueError, match="--attention-factor 1.0: only --type yarn"):
        scale_rope.parse_arguments(["model", "out", "--type", "llama3", "--factor", "2", "--attention-factor", "1"])
    with pytest.raises(ValueError, match="--attention-factor 0.0: must be positive"):
        scale_rope.parse_arguments(["model", "out", "--type", "yarn", "--factor", "2", "--attention-factor", "0"])
    command = [sys.executable, "tools/scale_rope.py", "m", "o", "--factor", "0"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("scale_rope.py: --factor 0.0: must be above 1")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        convert.find_gguf(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"no \.gguf file"):
        convert.find_gguf(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    assert convert.find_gguf(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    with pytest.raises(ValueError, match="holds 2 GGUF files"):
        convert.find_gguf(tmp_path)

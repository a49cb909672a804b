"""Flags and the checks of them: what a newcomer gets wrong must be said in one message, before anything loads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import REPOSITORY
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config

from easy_context.training import arguments
from easy_context.training import checks as argument_checks
from easy_context.training.arguments import build_parser, parse_arguments
from easy_context.training.checks import check_arguments

ORIGINAL_FLAGS = (
    *("--batch-size", "--gradient-accumulate-every", "--output-dir", "--wandb", "--seed", "--max-train-steps"),
    *("--learning-rate", "--rope-theta", "--model", "--dataset", "--seq-length", "--parallel_mode", "--ring_degree"),
)
FLAGS = (
    *("--warmup-steps", "--weight-decay", "--lr-scheduler", "--max-grad-norm", "--adam-betas", "--report-to"),
    *("--attn-kernel", "--gradient-checkpointing", "--eval-dataset", "--eval-every", "--log-every"),
    *("--mixed-precision", "--sequence-parallel-size", "--keep-attention"),
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    """Models, which the checks must not load, and rows."""
    import datasets
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("arguments")
    small = {
        "vocab_size": 32,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    configs = {
        "llama": LlamaConfig(**small),
        "dynamic": LlamaConfig(**small, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "longrope": LlamaConfig(**small, rope_parameters=longrope),
        "yarn": LlamaConfig(**small, rope_parameters=yarn),
        "dropout": LlamaConfig(**small, attention_dropout=0.1),
        "unused-window": Qwen2Config(**small, use_sliding_window=False, sliding_window=16),
    }
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    LlamaConfig(**small).save_pretrained(folder / "no-weights")
    LlamaConfig(**small).save_pretrained(folder / "cut-off")
    save_file({"x": torch.ones(100)}, folder / "cut-off" / "model.safetensors")
    with open(folder / "cut-off" / "model.safetensors", "r+b") as file:
        file.truncate(200)
    AutoModelForCausalLM.from_config(configs["llama"]).save_pretrained(folder / "incomplete")
    tensors = load_file(folder / "incomplete" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "incomplete" / "model.safetensors", metadata={"format": "pt"})
    for model_type in ("gpt2", "no-such-type"):
        (folder / model_type).mkdir()
        save_file({}, folder / model_type / "model.safetensors")
        (folder / model_type / "config.json").write_text(f'{{"model_type": "{model_type}", "vocab_size": 32}}')
    datasets.Dataset.from_dict({"input_ids": [list(range(32)), [1, 2, 3]]}).save_to_disk(folder / "rows")
    datasets.Dataset.from_dict({"input_ids": [[1, 32]]}).save_to_disk(folder / "foreign")
    for name, rows in {
        "masked": {"input_ids": [[1, 2], [3, 4]], "labels": [[1, -100], [3, -100]]},
        "single": {"input_ids": [[1], [2]]},
        "late": {"input_ids": [[1] * 40], "labels": [[-100] * 36 + [1] * 4]},
        "null": {"input_ids": [[1, 2], None]},
        "hole": {"input_ids": [[1, None]]},
        "uneven": {"input_ids": [[1, 2], [1, 2, 3]], "labels": [[1, 2], [1, 2]]},
        "label": {"input_ids": [[1, 2]], "labels": [[1, 32]]},
    }.items():
        datasets.Dataset.from_dict(rows).save_to_disk(folder / name)
    datasets.Dataset.from_dict({"input_ids": [["a"]]}).save_to_disk(folder / "strings")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(folder / "text")
    datasets.Dataset.from_dict({"input_ids": [[1]]}).select([]).save_to_disk(folder / "empty")
    (folder / "finished").mkdir()
    (folder / "finished" / "config.json").write_text("{}")
    (folder / "file").write_text("")
    return folder


def find_problems(assets: Path, *flags: str, world_size: int = 1) -> list[str]:
    problems, *_ = argument_checks.find_problems(arguments_with(assets, *flags), world_size)
    return problems


def arguments_with(assets: Path, *flags: str):
    """Flags that are right except for those given."""
    right = ["--model", str(assets / "llama"), "--dataset", str(assets / "rows"), "--seq-length", "32"]
    return parse_arguments([*right, "--output-dir", str(assets / "new"), *(flag.format(assets) for flag in flags)])


HELP = """
import runpy, sys
script = sys.argv[1]
sys.argv = [script, "--help"]
try:
    runpy.run_path(script, run_name="__main__")
finally:
    heavy = {"torch", "transformers", "datasets", "accelerate"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize("script", ["train.py", "eval_ppl.py", "eval_needle.py", "plot.py", "prepare_data.py"])
def test_help_imports_nothing_heavy(script):
    result = subprocess.run([sys.executable, "-c", HELP, script], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {script}")


def test_help_says_something_of_every_flag():
    """Each flag has a sentence, and a default where it has one."""
    text = build_parser().format_help()
    for flag in ORIGINAL_FLAGS + FLAGS:
        assert flag.replace("_", "-") in text
    assert "(default: 2e-05)" in text
    for action in build_parser()._actions:
        assert action.help and len(action.help.split()) > 1, action


def test_the_originals_flags_and_defaults_parse():
    args = parse_arguments([])
    assert args.report_to == "none" and args.lr_scheduler == "constant" and args.mixed_precision == "bf16"
    command = """--batch-size 1 --gradient-accumulate-every 4 --output-dir ./output/x --wandb EasyContext --seed 2027
        --max-train-steps 90 --learning-rate 1e-5 --dataset PY007/rows --model output/y --seq-length 512000
        --rope-theta 250000000 --parallel_mode zigzag_ring_attn"""
    args = parse_arguments(command.split())
    assert args.rope_theta == 250e6 and args.parallel_mode == "zigzag_ring_attn"
    assert args.report_to == "wandb"


@pytest.mark.parametrize(
    "flags, fragments",
    [
        (["--seq-length", "1"], ["--seq-length 1", "at least 2"]),
        (["--batch-size", "-1"], ["--batch-size -1", "at least 1"]),
        (["--gradient-accumulate-every", "0"], ["--gradient-accumulate-every 0"]),
        (["--max-train-steps", "0"], ["--max-train-steps 0"]),
        (["--log-every", "0"], ["--log-every 0"]),
        (["--eval-every", "0"], ["--eval-every 0"]),
        (["--warmup-steps", "-1"], ["--warmup-steps -1", "a whole number, at least 0"]),
        (["--learning-rate", "nan"], ["--learning-rate nan", "finite number"]),
        (["--weight-decay", "-0.1"], ["--weight-decay -0.1"]),
        (["--max-grad-norm", "inf"], ["--max-grad-norm inf"]),
        (["--rope-theta", "-1"], ["--rope-theta -1", "positive"]),
        (["--adam-betas", "0.9", "1"], ["--adam-betas", "[0, 1)"]),
        (["--respect-documents"], ["--respect-documents: no column of --dataset", "--documents-end-with"]),
        (["--documents-end-with", "2"], ["--documents-end-with 2", "--respect-documents"]),
        (["--document-positions", "continue"], ["--document-positions continue", "--respect-documents"]),
        (["--respect-documents", "--documents-begin-with", "99"], ["--documents-begin-with 99", "marks no document"]),
        (
            ["--respect-documents", "--documents-end-with", "7", "--attn-engine", "library"],
            ["--attn-engine library attends across the documents of a row", "use --attn-engine easy_context"],
        ),
        (["--seed", "-1"], ["--seed -1"]),
        (
            ["--mlp-tile-size", "8", "--gradient-checkpointing", "none"],
            ["--mlp-tile-size 8 cuts the MLPs of recomputed"],
        ),
        (["--memory-plan", "input@disk"], ["--memory-plan 'input@disk'", "'disk'", "neither cpu nor gpu"]),
        (["--memory-plan", "5*all"], ["--memory-plan '5*all'", "for 5 layers, but the model has 1"]),
        (["--memory-plan", "nothing"], ["--memory-plan: layer 1 does not keep its input"]),
        (["--memory-plan", "all", "--keep-attention", "cpu"], ["--memory-plan all", "--keep-attention cpu"]),
        (["--output-dir", "{0}/file"], ["--output-dir", "another folder"]),
        (["--output-dir", "/proc/easy_context"], ["--output-dir /proc/easy_context", "cannot be written"]),
        (["--output-dir", "{0}/finished"], ["--output-dir", "finished model", "--overwrite"]),
        (["--output-dir", "{0}/llama/.", "--overwrite"], ["--output-dir", "is --model", "another folder"]),
        (["--model", "{0}/nothing"], ["--model", "no such folder", "hub name"]),
        (["--output-dir", ""], ["--output-dir is empty"]),
        (["--output-dir", "{0}/rows/."], ["--output-dir", "lies in --dataset", "outside of it"]),
        (["--output-dir", "{0}/rows/a/b"], ["--output-dir", "lies in --dataset", "outside of it"]),
        (["--output-dir", "{0}/" + 300 * "x"], ["--output-dir", "too long", "another folder"]),
        (["--attn-kernel", "cudnn"], ["--attn-kernel cudnn", "CUDA"]),
        (["--model", "{0}/no-weights"], ["--model", "holds no weights"]),
        (["--model", "{0}/cut-off"], ["--model", "model.safetensors is damaged", "again"]),
        (["--model", "{0}/incomplete"], ["--model", "its weights lack model.layers.0.mlp.up_proj.weight"]),
        (["--model", "{0}/rows"], ["--model", "holds no config.json"]),
        (["--model", "{0}/no-such-type"], ["--model", "no-such-type", "hub name or a model's folder"]),
        (["--model", "{0}/gpt2"], ["--model", "gpt2", "llama, mistral, qwen2, qwen3"]),
        (["--model", "{0}/dropout"], ["attention dropout 0.1", "attention_dropout to 0"]),
        (["--dataset", "{0}/nothing"], ["--dataset", "no such file or folder"]),
        (["--dataset", "{0}/empty"], ["--dataset", "no rows"]),
        (["--dataset", "{0}/text"], ["--dataset", "['text']", "input_ids", "prepare_data.py"]),
        (["--dataset", "{0}/strings"], ["--dataset", "lists of integers"]),
        (["--dataset", "{0}/foreign"], ["--dataset", "32", "vocabulary has 32", "another model"]),
        (["--eval-dataset", "{0}/foreign"], ["--eval-dataset", "foreign", "another model"]),
        (["--dataset", "{0}/masked"], ["--dataset", "masked", "no token to learn"]),
        (["--eval-dataset", "{0}/single"], ["--eval-dataset", "no token to learn"]),
        (["--dataset", "{0}/late"], ["--dataset", "no token to learn"]),  # its labels lie beyond --seq-length
        (["--dataset", "{0}/null"], ["--dataset", "nulls in input_ids"]),
        (["--dataset", "{0}/hole"], ["--dataset", "nulls in input_ids"]),
        (["--dataset", "{0}/uneven"], ["--dataset", "3 input_ids and 2 labels"]),
        (["--dataset", "{0}/label"], ["--dataset", "labels from 1 to 32"]),
        (["--wandb", "x", "--report-to", "none"], ["--wandb x", "--report-to none"]),
        (["--sequence-parallel-size", "2", "--parallel_mode", "data_parallel"], ["--sequence-parallel-size 2"]),
        (["--liger"], ["--liger", "--no-liger"]),
    ],
)
def test_each_mistake_is_named_with_its_remedy(assets, flags, fragments):
    problems = find_problems(assets, *flags)
    assert len(problems) == 1, problems
    for fragment in fragments:
        assert fragment in problems[0]


@pytest.mark.parametrize(
    "world_size, flags, fragments",
    [
        # Six query heads, two key-value heads.
        (4, ["--parallel_mode", "ulysses_attn"], ["6", "4", "zigzag_ring_attn", "dist_flash_attn"]),
        (8, ["--sequence-parallel-size", "3"], ["--sequence-parallel-size 3", "8", "--num_processes"]),
        (2, ["--sequence-parallel-size", "4"], ["--sequence-parallel-size 4", "2"]),
        (2, ["--sequence-parallel-size", "0"], ["--sequence-parallel-size 0"]),
        (4, ["--seq-length", "7"], ["--seq-length 7", "at least 8"]),
        (2, ["--model", "{0}/dynamic"], ["dynamic", "2 ranks", "yarn"]),
        (2, ["--model", "{0}/longrope"], ["longrope", "2 ranks", "yarn"]),
    ],
)
def test_what_so_many_processes_cannot_do(assets, world_size, flags, fragments):
    problems = find_problems(assets, *flags, world_size=world_size)
    assert len(problems) == 1, problems
    for fragment in fragments:
        assert fragment in problems[0]


@pytest.mark.parametrize(
    "world_size, flags",
    [
        (1, []),
        (2, ["--parallel_mode", "ulysses_attn"]),
        (6, ["--parallel_mode", "ulysses_attn"]),  # more ranks than key-value heads, which are repeated
        (3, ["--parallel_mode", "dist_flash_attn"]),
        (8, ["--sequence-parallel-size", "4"]),
        (8, ["--parallel_mode", "data_parallel"]),
        (2, ["--model", "{0}/yarn", "--rope-theta", "5e5"]),
        (1, ["--model", "{0}/unused-window"]),
        (1, ["--model", "{0}/dynamic"]),
        (1, ["--output-dir", "{0}/finished", "--overwrite"]),
        (1, ["--output-dir", "{0}/deep/er/still"]),
    ],
)
def test_what_works_has_no_problems(assets, world_size, flags):
    assert find_problems(assets, *flags, world_size=world_size) == []
    assert not (assets / "new").exists() and not (assets / "deep").exists()  # checking writes nothing


def test_checking_changes_no_argument(assets):
    """train.py itself sets the base and chooses Liger, where a reader sees it."""
    args = arguments_with(assets, "--rope-theta", "5e6", "--seq-length", "4096")
    before = dict(vars(args))
    problems, rows, eval_rows = argument_checks.find_problems(args, world_size=1)
    assert problems == [] and len(rows) > 0 and eval_rows is None
    assert vars(args) == before and args.liger is None


def test_all_problems_are_reported_together(assets):
    problems = find_problems(
        assets,
        *("--batch-size", "0", "--dataset", "{0}/empty", "--output-dir", "{0}/finished", "--model", "{0}/nothing"),
        *("--sequence-parallel-size", "5"),
        world_size=2,
    )
    assert len(problems) == 5
    for flag in ("--batch-size", "--dataset", "--output-dir", "--model", "--sequence-parallel-size"):
        assert sum(problem.startswith(flag) for problem in problems) == 1


def test_only_the_first_process_of_a_machine_speaks(assets, monkeypatch, capsys):
    """The launcher ends the others while they wait; one whose problem is its own speaks in the end."""
    args = parse_arguments(["--model", str(assets / "nothing"), "--dataset", str(assets / "empty")])
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    said_before_the_wait = []
    monkeypatch.setattr("time.sleep", lambda seconds: said_before_the_wait.append(capsys.readouterr().err))
    for rank, local_rank in ((0, 0), (1, 1), (8, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        for call, fragment in (
            (lambda: check_arguments(args), "train.py cannot start:\n  - --"),
            (lambda: parse_arguments(["--parallel_mode", "zigzag"]), "zigzag_ring_attn"),
        ):
            said_before_the_wait.clear()
            with pytest.raises(SystemExit) as stop:
                call()
            assert stop.value.code == 2
            assert fragment in capsys.readouterr().err
            assert said_before_the_wait == ([""] if local_rank else [])


def test_a_tracker_that_is_not_installed_is_named(assets, monkeypatch):
    monkeypatch.setattr(argument_checks.importlib.util, "find_spec", lambda name: None)
    problems = find_problems(assets, "--report-to", "tensorboard", "--no-liger")
    assert len(problems) == 1
    assert "--report-to tensorboard needs the package tensorboard: pip install tensorboard" in problems[0]


def test_torchao_that_is_not_installed_is_named(assets, monkeypatch):
    monkeypatch.setattr(argument_checks.importlib.util, "find_spec", lambda name: None)
    (problem,) = find_problems(assets, "--optimizer", "adamw8bit", "--no-liger")
    assert problem == "--optimizer adamw8bit needs the package torchao: pip install 'torchao>=0.18'"
    (problem,) = find_problems(assets, "--optimizer", "adamw8bit", "--no-liger", "--offload", "none")[:1]
    assert problem.startswith("--offload none is DeepSpeed's")


@pytest.mark.parametrize("flag", ORIGINAL_FLAGS)
def test_each_of_the_originals_flags_is_taken_with_dashes_and_with_underscores(flag):
    value = "ulysses_attn" if flag == "--parallel_mode" else "3"
    name = flag[2:].replace("-", "_")
    spellings = {f"--{name}", f"--{name.replace('_', '-')}"}
    read = [str(getattr(parse_arguments(words), name)) for s in spellings for words in ([s, value], [f"{s}={value}"])]
    assert set(read) <= {value, f"{value}.0"}
    assert parse_arguments(["--output-dir", "a_b-c"]).output_dir == "a_b-c"  # words that are no flags stay as they are


@pytest.mark.parametrize("words", [["--data", "x"], ["--seq", "8"], ["--max-grad", "1"], ["--parallel", "usp_attn"]])
def test_the_beginning_of_a_flag_is_not_taken_for_it(words, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert f"unrecognized arguments: {' '.join(words)}" in capsys.readouterr().err


def test_a_ring_degree_is_for_usp_attn(assets):
    """The original's default, 1, is taken by every mode."""
    for mode in arguments.MODES:
        assert find_problems(assets, "--parallel_mode", mode, "--ring_degree", "1") == []
    usp = ["--parallel_mode", "usp_attn", "--ring_degree"]
    assert find_problems(assets, *usp, "2", world_size=4) == []
    (problem,) = find_problems(assets, *usp, "3", world_size=4)
    assert problem == "--ring_degree 3 must divide the 4 ranks that share a row: choose a divisor of 4"
    (problem,) = find_problems(assets, *usp, "1", world_size=4)
    assert problem.startswith("--parallel_mode usp_attn cannot split 6 query heads over the 4 ranks")
    assert find_problems(assets, *usp[:-1], world_size=4) == []  # the choice of ring_degree sees the heads
    (problem,) = find_problems(assets, "--parallel_mode", "dist_flash_attn", "--ring-degree", "2")
    assert problem.startswith("--ring_degree 2 has no meaning with --parallel_mode dist_flash_attn")


def test_a_launch_without_a_launcher_is_named(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert argument_checks.launch_problems(1) == []
    (problem,) = argument_checks.launch_problems(2)
    assert "WORLD_SIZE=2" in problem and "RANK, LOCAL_RANK" in problem and "torchrun" in problem
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert argument_checks.launch_problems(2) == []

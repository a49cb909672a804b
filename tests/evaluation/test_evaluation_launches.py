"""eval_ppl.py launched as users launch it, on two processes: torchrun, and Accelerate with a model split by ZeRO-3.

The weights are on the devices, and in host memory as the original project's YAML, which users may have kept, asks for.
"""

import csv
import json
import signal
from pathlib import Path

import pytest
from launching import accelerate_launch, run_python, start_python, torchrun
from tiny_models import save_tiny_llama

pytestmark = pytest.mark.launch
ORIGINAL = {
    **{"compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "DEEPSPEED", "downcast_bf16": "no"},
    **{"machine_rank": 0, "main_training_function": "main", "num_machines": 1, "num_processes": 8},
    **{"rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False},
    "deepspeed_config": {
        "deepspeed_config_file": "accelerate_configs/zero3_offload_inference.json",
        "zero3_init_flag": False,
    },
    "use_cpu": False,
}


def losses(launcher: list[str], model: str, output_file: Path) -> dict[int, float]:
    """Return the losses that the script writes under a launcher, by length."""
    flags = ["--model", model, "--text", "data/haystack/emma.txt", "--output-file", str(output_file)]
    flags += ["--min-tokens", "61", "--max-tokens", "397", "--tokens-step", "112"]
    result = run_python(*launcher, "eval_ppl.py", *flags)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    with output_file.open() as lines:
        return {int(row["length"]): float(row["loss"]) for row in csv.DictReader(lines)}


def test_perplexity_is_that_of_one_process(tmp_path):
    model = save_tiny_llama(tmp_path / "model")
    original = tmp_path / "original.yaml"
    original.write_text(json.dumps(ORIGINAL))  # JSON is YAML
    expected = losses([], model, tmp_path / "none.csv")
    assert list(expected) == [61, 173, 285, 397]
    launchers = {
        "torchrun": torchrun(2),
        "deepspeed": accelerate_launch(2, "accelerate_configs/deepspeed_inference.yaml"),
        "original": accelerate_launch(2, str(original)),
    }
    for name, launcher in launchers.items():
        assert losses(launcher, model, tmp_path / f"{name}.csv") == pytest.approx(expected, rel=1e-6), name


STOPPED = """
import sys, threading, time
sys.path.insert(0, ".")
import {script} as script
from easy_context.evaluation.{folder} import run
def wait(*rest):  # where the second document or cell would be evaluated
    if done:
        print("waiting", flush=True)
        while True:
            time.sleep(1)
    done.append(1)
    return work(*rest)
done, work = [], run.{function}
run.{function} = wait
script.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "script, folder, function, piece, name",
    [
        ("eval_ppl", "perplexity", "measure", "document", "o.unfinished.jsonl"),
        ("eval_needle", "needle", "score_cell", "cell", "cells.jsonl"),
    ],
)
def test_ctrl_c_says_what_is_saved_in_one_line(tmp_path, script, folder, function, piece, name):
    models = [save_tiny_llama(tmp_path / seed, int(seed)) for seed in ("1", "2")]
    if script == "eval_ppl":
        words = ["-m", *models, "--text", "data/haystack/emma.txt", "--max-tokens", "256"]
        words += ["--output-file", str(tmp_path / "o.csv")]
    else:
        words = ["--model", models[0], "--max_context_length", "1024", "--output_dir", str(tmp_path)]
    process = start_python("-c", STOPPED.format(script=script, folder=folder, function=function), *words)
    assert "waiting\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    said = f"stopped by Ctrl-C: 1 {piece} saved in {tmp_path / name}; the same command goes on from there"
    assert errors.splitlines()[-1] == said and "Traceback" not in errors
    assert (tmp_path / name).is_file()

"""eval_ppl.py launched as users launch it, on two processes: torchrun, and Accelerate with a model split by ZeRO-3."""

import csv
from pathlib import Path

import pytest
from launching import free_port, run_python
from tiny_models import save_tiny_llama

LAUNCHERS = {
    "none": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "deepspeed": [
        *("-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/deepspeed_inference.yaml"),
        *("--num_processes", "2", "--main_process_port", "PORT"),
    ],
}


def losses(launcher: str, model: str, output_file: Path) -> dict[int, float]:
    """The losses that the script writes, by length."""
    command = [*(free_port() if word == "PORT" else word for word in LAUNCHERS[launcher])]
    command += ["eval_ppl.py", "--model", model, "--text", "data/haystack/emma.txt", "--output-file", str(output_file)]
    command += ["--min-tokens", "61", "--max-tokens", "397", "--tokens-step", "112"]
    result = run_python(*command)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    with output_file.open() as lines:
        return {int(row["length"]): float(row["loss"]) for row in csv.DictReader(lines)}


def test_perplexity_is_that_of_one_process(tmp_path):
    model = save_tiny_llama(tmp_path / "model")
    got = {launcher: losses(launcher, model, tmp_path / f"{launcher}.csv") for launcher in LAUNCHERS}
    assert list(got["none"]) == [61, 173, 285, 397]
    assert got["torchrun"] == pytest.approx(got["none"], rel=1e-6)
    assert got["deepspeed"] == pytest.approx(got["none"], rel=1e-6)

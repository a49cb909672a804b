"""What a checkpoint costs: train.py's steps before, while and after one is written.

    python -m benchmarks.saving --hidden 3072 --layers 28 --output output/saving.json

A model of random weights trains on random rows on one GPU under ZeRO-3 and saves one checkpoint in the middle. The disk
that holds the temporary folder needs 16 bytes a parameter.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from .flags import at_least, check_output, make_parser

COLUMNS = (
    ("parameters", "parameters", ",d"),
    ("GB", "gigabytes", ".1f"),
    ("written in s", "write_seconds", ".1f"),
    ("training waited s", "waited_seconds", ".2f"),
    ("a step s", "step_seconds", ".2f"),
    ("slowest step while writing s", "slowest_step_seconds", ".2f"),
    ("share of 30 minutes", "share_of_half_an_hour", ".2%"),
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = make_parser(__doc__, "saving", time_budget=500)
    parser.add_argument("--hidden", type=at_least(64), default=3072, help="width of the model, a multiple of 128")
    parser.add_argument("--layers", type=at_least(1), default=28)
    parser.add_argument("--vocab", type=at_least(16), default=128256)
    parser.add_argument("--seq-length", type=at_least(16), default=32768, help="tokens of a row")
    parser.add_argument("--steps", type=at_least(4), default=12, help="the checkpoint is saved after half of them")
    parser.add_argument("--config-file", default="accelerate_configs/single_gpu.yaml", help="of accelerate launch")
    args = parser.parse_args(arguments)
    check_output(parser, args)
    return args


def main(arguments: list[str] | None = None) -> None:
    """Measure, write JSON and print the table."""
    args = parse_arguments(arguments)
    import torch

    from .tables import environment, finish
    from .world import World

    world = World(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    results: dict[str, Any] = {"environment": environment(world), "arguments": vars(args), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_inputs(args, Path(folder))
        row = measure(args, Path(folder)) | {"parameters": parameters}
    results["rows"].append(row)
    finish(world, args.output, results, COLUMNS, "", "gigabytes")


def make_inputs(args: argparse.Namespace, folder: Path) -> int:
    """Save a model of random weights and random rows; return the number of parameters."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(args.seed)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64 if args.hidden < 1024 else args.hidden // 128,
        num_key_value_heads=1 if args.hidden < 1024 else args.hidden // 512,
        vocab_size=args.vocab,
        tie_word_embeddings=True,
        max_position_embeddings=args.seq_length,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    rows = torch.randint(args.vocab, (8, args.seq_length)).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / "rows")
    return sum(parameter.numel() for parameter in model.parameters())


def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Train, and return the seconds of a step and of the checkpoint."""
    saved_after = args.steps // 2
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", args.config_file),
        *("--num_processes", "1", "train.py", "--parallel_mode", "data_parallel"),
        *("--model", str(folder / "model"), "--dataset", str(folder / "rows"), "--output-dir", str(folder / "out")),
        *("--seq-length", str(args.seq_length), "--batch-size", str(args.batch_size)),
        *("--gradient-accumulate-every", "2", "--max-train-steps", str(args.steps), "--keep-last", "1"),
        *("--save-every", str(saved_after)),
    ]
    log = subprocess.run(command, capture_output=True, text=True, timeout=args.time_budget)
    said = re.search(r"saved checkpoint-\d+: ([\d.e+]+) GB, written in ([\d.]+) s, .* waited ([\d.]+) s", log.stderr)
    if log.returncode or said is None:
        sys.exit(f"{log.stdout[-2000:]}\n{log.stderr[-4000:]}\ntrain.py saved no checkpoint")
    records = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["tokens"] / record["tokens_per_second"] for record in records]
    gigabytes, write_seconds, waited = map(float, said.groups())
    usual = median(seconds[1:saved_after])
    while_writing = seconds[saved_after : saved_after + max(1, round(write_seconds / usual))]
    return {
        "gigabytes": gigabytes,
        "write_seconds": write_seconds,
        "waited_seconds": waited,
        "step_seconds": usual,
        "slowest_step_seconds": max(while_writing),
        "share_of_half_an_hour": (waited + sum(each - usual for each in while_writing)) / 1800,
    }


if __name__ == "__main__":
    main()

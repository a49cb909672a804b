"""Scoring rows with a Llama-3-8B-shaped model of random weights: peak memory and seconds, by tiles and plain.

    python -m benchmarks.evaluation --seq-length 131072 524288 1048576 --layers 32 --passes tiles
    torchrun --nproc_per_node 2 -m benchmarks.evaluation --seq-length 524288 --layers 4

A pass is what eval_ppl.py does with a document. The forecast, which eval_ppl.py prints, is for passes by tiles.
"""

import argparse
import functools
import time
from typing import Any

from easy_context.kernels import KERNELS

from .flags import at_least, check_distinct, check_lengths, check_output, launched_processes, make_parser

COLUMNS = (
    ("tokens", "seq_length", ",d"),
    ("passes", "passes", ""),
    ("layers", "layers", ""),
    ("GiB", "peak_memory_gib", ".2f"),
    ("forecast GiB", "forecast_gib", ".2f"),
    ("seconds", "seconds", ".2f"),
    ("mean loss", "loss", ".4f"),
    ("note", "note", ""),
)
LEGEND = "GiB: most memory allocated on a GPU, with the weights; none on a CPU. Both kinds of passes have equal losses."


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked flags."""
    parser = make_parser(__doc__, "evaluation", time_budget=540)
    count = at_least(1)
    parser.add_argument("--seq-length", type=count, nargs="+", default=[131072, 524288], help="tokens of a row")
    parser.add_argument("--layers", type=count, default=32, help="of the model")
    parser.add_argument("--passes", nargs="+", choices=("tiles", "plain"), default=["tiles", "plain"])
    parser.add_argument("--attn-kernel", choices=("auto", *KERNELS), default="auto", help="attention backend")
    parser.add_argument("--hidden-size", type=count, default=4096)
    parser.add_argument("--intermediate-size", type=count, default=14336)
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--kv-heads", type=count, default=8)
    parser.add_argument("--vocab-size", type=count, default=128256)
    args = parser.parse_args(arguments)
    check_distinct(parser, args, "seq_length", "passes")
    check_output(parser, args)
    check_lengths(parser, "--seq-length", args.seq_length, [launched_processes()])
    return args


def main(arguments: list[str] | None = None) -> None:
    """Measure every length, plain and by tiles, and write JSON after each."""
    args = parse_arguments(arguments)
    import torch
    from transformers import AutoModelForCausalLM

    import easy_context

    from .tables import environment, finish, write_json
    from .train_step_runs import model_config
    from .world import Budget, start_world

    world = start_world()
    budget = Budget(world, args.time_budget)
    rows: list[dict[str, Any]] = []
    results = {"benchmark": "evaluation", "environment": environment(world), "arguments": vars(args), "rows": rows}
    mode = "zigzag_ring_attn" if world.size > 1 else "data_parallel"
    mesh = easy_context.apply_seq_parallel_monkey_patch(mode, "llama", attn_kernel=args.attn_kernel)
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    with world.device:
        model = AutoModelForCausalLM.from_config(model_config(args, args.layers), dtype=dtype).eval()
    for length in sorted(args.seq_length):
        for passes in args.passes:
            row = {"seq_length": length, "passes": passes, "layers": args.layers}
            note = budget.overrun()
            if note is None:
                measured, note = world.attempt(
                    functools.partial(measure, model, mode, mesh, length, passes, args, world)
                )
                row |= measured or {}
            rows.append(row if note is None else row | {"note": note})
            write_json(world, args.output, results)
    easy_context.remove_seq_parallel_monkey_patch()
    finish(world, args.output, results, COLUMNS, LEGEND, measured="seconds")


def measure(model, mode: str, mesh, length: int, passes: str, args: argparse.Namespace, world) -> dict[str, Any]:
    """Return seconds, peak memory, forecast and mean loss of scoring random rows, after a short row as a warm-up."""
    import torch

    from easy_context.evaluation.scorer import Scorer, sizes_at_once
    from easy_context.kernels import select_kernel
    from easy_context.loss import next_token_targets
    from easy_context.memory.forecast import Load, Shape
    from easy_context.memory.forward_forecast import forward_memory

    on_gpu = world.device.type == "cuda"
    tile_size, chunk = sizes_at_once(frugal=False)
    scorer = Scorer(model, mode, mesh, world.device, chunk, tile_size if passes == "tiles" else 0)
    ids = torch.randint(args.vocab_size, (args.batch_size, length), generator=torch.Generator().manual_seed(args.seed))
    scorer.token_losses(*(x[:, : min(length, 4096)] for x in (ids, ids)))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    world.synchronize()
    start = time.perf_counter()
    losses = scorer.token_losses(ids, next_token_targets(ids))
    world.synchronize()
    seconds = time.perf_counter() - start
    kernel = select_kernel(args.attn_kernel, world.device, model.dtype, args.hidden_size // args.heads).name
    tokens = args.batch_size * length // world.size
    load = Load(tokens, length, model.dtype.itemsize, kernel=kernel)
    parts = forward_memory(Shape.of(model.config), load, world.size, tile_size, chunk)
    return {
        "seconds": world.largest(seconds),
        "peak_memory_gib": world.largest(torch.cuda.max_memory_allocated() / 2**30) if on_gpu else None,
        "forecast_gib": sum(parts.values()) / 2**30 if passes == "tiles" else None,
        "loss": losses.double().sum().item() / (losses.numel() - len(losses)),
        "kernel": kernel,
    }


if __name__ == "__main__":
    main()

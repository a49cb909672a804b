"""Whole training steps of a Llama-3-8B-shaped model with random weights: ours and other recipes, on the same rows.

    # one GPU: forward and backward, at two depths, extrapolated to 32 layers
    python benchmarks/train_step.py --seq-length 32768 131072 --layers 4 8 --methods ours original_liger original

    # two GPUs: whole optimizer steps under ZeRO-3, rows split over both
    torchrun --nproc_per_node 2 benchmarks/train_step.py --seq-length 131072 --layers 4 8 \
        --methods ours alst_cudnn alst_fa2

    # the same model at full depth, to check the extrapolation
    torchrun --nproc_per_node 2 benchmarks/train_step.py --seq-length 131072 262144 --layers 32 --methods ours --steps 1

MFU counts the model's FLOPs: six for each weight and token, and causal attention; no recomputation. A method that fails
becomes a row with the error. docs/performance.md explains the method and holds results.
"""

import argparse
import functools
import statistics
import sys
import time
from typing import Any

from argument_checks import check_distinct, check_lengths, check_output, check_positive, launched_processes

from easy_context.training.arguments import KERNELS, MODES

METHODS = ("ours", "original", "original_liger", "alst_cudnn", "alst_fa2", "alst_cudnn_tiled")
COLUMNS = (
    ("tokens", "seq_length", ","),
    ("method", "method", ""),
    ("kernel", "kernel", ""),
    ("layers", "depth", ""),
    ("× best peer", "vs_best_peer", ".2f"),
    ("× original", "vs_original", ".2f"),
    ("MFU", "mfu", ".1%"),
    ("tokens/s/GPU", "tokens_per_second_per_gpu", ",.0f"),
    ("step s", "step_seconds", ".3f"),
    ("s/layer", "seconds_per_layer", ".4f"),
    ("fixed s", "fixed_seconds", ".3f"),
    ("GiB", "peak_memory_gib", ".1f"),
    ("loss", "loss", ".3f"),
    ("note", "note", ""),
)
LEGEND = (
    "× best peer, × original: tokens/s over those of the fastest peer, of the original's recipe (FlashAttention-2 "
    "kernel, everything recomputed, all logits), at the same length and depth. '32 from 4, 8': extrapolated, with "
    "s/layer and fixed s from the two measured depths. GiB: most memory allocated on a GPU. loss: of the first step."
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seq-length", type=int, nargs="+", default=[32768, 131072], help="tokens of a row")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8], help="depths to measure; two extrapolate")
    parser.add_argument("--full-depth", type=int, default=32, help="layers of the whole model, to extrapolate to")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=None, help="default: ours and what fits")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=None, help="of ours; default zigzag_ring_attn")
    parser.add_argument("--attn-kernel", choices=KERNELS, default="auto", help="of ours")
    checkpointing = ("none", "full", "offload")
    parser.add_argument("--gradient-checkpointing", nargs="+", choices=checkpointing, default=["full"], help="of ours")
    parser.add_argument("--keep-attention", nargs="+", choices=("gpu", "cpu", "none"), default=["gpu"], help="of ours")
    parser.add_argument("--mlp-tile-size", type=int, default=0, help="tokens of a tile of our MLP; 0 for whole shards")
    parser.add_argument(
        "--liger",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Liger's layers, for ours, original_liger and ALST; default: where installed",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="rows in a micro-batch")
    parser.add_argument(
        "--tokens-per-step",
        type=int,
        default=None,
        help="least tokens of a step, reached by accumulation; default 262144 on several GPUs, one micro-batch on one",
    )
    parser.add_argument("--warmup", type=int, default=1, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed; the median counts")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--intermediate-size", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--time-budget", type=float, default=540, help="seconds; what does not fit is left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="output/train_step.json", help="results as JSON")
    args = parser.parse_args()
    sizes = ("hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size")
    counts = ("seq_length", "layers", "warmup", "steps", "batch_size", "full_depth", "tokens_per_step", "time_budget")
    check_positive(parser, args, (*counts, *sizes))
    check_distinct(
        parser, args, ("seq_length", "layers", "methods", "modes", "gradient_checkpointing", "keep_attention")
    )
    check_output(parser, args)
    if args.mlp_tile_size < 0:
        parser.error(f"--mlp-tile-size {args.mlp_tile_size}: give a number of tokens, or 0 for whole shards")
    if args.hidden_size % args.heads or args.heads % args.kv_heads:
        parser.error("--heads must divide --hidden-size, and --kv-heads must divide --heads")
    if launched_processes() > 1 and "data_parallel" in (args.modes or ()):
        parser.error("--modes data_parallel: here all processes share a row, which it does not split; use one process")
    if args.mlp_tile_size and "none" in args.gradient_checkpointing:
        parser.error(f"--mlp-tile-size {args.mlp_tile_size} needs --gradient-checkpointing full or offload")
    check_lengths(parser, "--seq-length", args.seq_length, [launched_processes()])
    args.seq_length, args.layers = sorted(args.seq_length), sorted(args.layers)
    return args


def model_config(args: argparse.Namespace, layers: int) -> Any:
    """Llama 3's shape, `layers` deep."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.hidden_size // args.heads,
        vocab_size=args.vocab_size,
        max_position_embeddings=max(args.seq_length),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        use_cache=False,
    )


def parameter_count(args: argparse.Namespace, layers: int) -> int:
    """Weights of the whole model."""
    head_dim = args.hidden_size // args.heads
    attention = 2 * args.hidden_size * head_dim * (args.heads + args.kv_heads)
    layer = attention + 3 * args.hidden_size * args.intermediate_size + 2 * args.hidden_size
    return layers * layer + 2 * args.vocab_size * args.hidden_size + args.hidden_size


def measure(engine, batch, micro_batches: int, args: argparse.Namespace, world) -> dict[str, float]:
    """Seconds of a step, the slowest rank's; the first step's loss; peak memory."""
    import torch

    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step in range(args.warmup + args.steps):
        world.synchronize()
        start = time.perf_counter()
        losses.append(engine.step(batch, micro_batches))
        world.synchronize()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {
        "step_seconds": world.largest(statistics.median(seconds)),
        "all_step_seconds": seconds,
        "loss": losses[0],
        "losses": losses,
        "peak_memory_gib": world.largest(peak) if on_gpu else None,
    }


def add_rates(row: dict, args: argparse.Namespace, world) -> None:
    """Tokens per second and GPU, and MFU, from the step's time."""
    from easy_context.training.flops import flops_per_token, peak_flops

    speed = row["tokens_per_step"] / row["step_seconds"] / world.size
    token_flops = flops_per_token(
        model_config(args, row["layers"]), parameter_count(args, row["layers"]), row["seq_length"]
    )
    peak = peak_flops(world.device)
    row["tokens_per_second_per_gpu"] = speed
    row["mfu"] = None if peak is None else speed * token_flops / peak


def extrapolate(rows: list[dict], args: argparse.Namespace, world) -> list[dict]:
    """Rows for the full depth, from the shallowest and the deepest measured one of each method and length."""
    results = []
    measured = [row for row in rows if "step_seconds" in row]
    for key in dict.fromkeys((row["method"], row["seq_length"]) for row in measured):
        depths = {row["layers"]: row for row in measured if (row["method"], row["seq_length"]) == key}
        few, many = min(depths), max(depths)
        if few == many or args.full_depth in depths:
            continue
        per_layer = (depths[many]["step_seconds"] - depths[few]["step_seconds"]) / (many - few)
        fixed = depths[few]["step_seconds"] - few * per_layer
        row = {name: depths[many][name] for name in ("seq_length", "method", "peer", "kernel", "tokens_per_step")}
        row |= {"layers": args.full_depth, "depth": f"{args.full_depth} from {few}, {many}"}
        row |= {"seconds_per_layer": per_layer, "fixed_seconds": fixed}
        if per_layer > 0:
            row["step_seconds"] = fixed + args.full_depth * per_layer
            add_rates(row, args, world)
        if per_layer <= 0 or fixed < 0:
            row["note"] = "a negative time: noise is larger than what a layer takes; raise --steps or --seq-length"
        results.append(row)
    return results


def add_ratios(rows: list[dict]) -> None:
    """Speed relative to the fastest peer and to the original's recipe, at the same length and depth."""
    for row in rows:
        if "step_seconds" not in row:
            continue
        same = [x for x in rows if (x["seq_length"], x["layers"]) == (row["seq_length"], row["layers"])]
        speeds = {x["method"]: x["tokens_per_second_per_gpu"] for x in same if x["peer"] and "step_seconds" in x}
        if speeds:
            row["vs_best_peer"] = row["tokens_per_second_per_gpu"] / max(speeds.values())
        if "original recipe" in speeds:
            row["vs_original"] = row["tokens_per_second_per_gpu"] / speeds["original recipe"]


def run_recipe(recipe, layers: int, args: argparse.Namespace, world, budget) -> list[dict]:
    """Build the model once and measure it at every length, the shortest first."""
    import torch
    from engines import PlainEngine, Zero3Engine, make_batch
    from recipes import applied, build_model

    from easy_context.kernels import select_kernel

    least = args.tokens_per_step or (262144 if world.size > 1 else 0)
    rows = [
        {
            "seq_length": length,
            "method": recipe.name,
            "peer": recipe.peer,
            "layers": layers,
            "depth": str(layers),
            "micro_batches": max(1, -(-least // (length * args.batch_size))),
        }
        for length in args.seq_length
    ]
    config = model_config(args, layers)

    def build(mpu):
        model = build_model(recipe, config, world.device, args.seed)
        if world.size == 1:
            return PlainEngine(model, recipe)
        return Zero3Engine(model, recipe, world, mpu, args.batch_size)

    def run() -> None:
        head_dim = args.hidden_size // args.heads
        kernel = recipe.kernel
        if not recipe.alst:
            kernel = select_kernel(kernel, world.device, torch.bfloat16, head_dim).name
        for row in rows:
            row["kernel"] = kernel
        with applied(recipe, config) as mpu:
            engine, problem = world.attempt(functools.partial(build, mpu))
            for row in rows:
                if problem is None and budget.spent():
                    problem = f"left out: the time budget of {budget.seconds:g} s is spent"
                if problem is not None:
                    row["note"] = problem
                    continue
                length, micro_batches = row["seq_length"], row["micro_batches"]
                batch = make_batch(recipe, world, args.batch_size, length, args.vocab_size, args.seed)
                times, problem = world.attempt(functools.partial(measure, engine, batch, micro_batches, args, world))
                if problem is not None:
                    row["note"] = problem
                    problem = f"not run: {length} tokens failed"
                    continue
                row |= times | {"tokens_per_step": length * args.batch_size * micro_batches}
                add_rates(row, args, world)
            if engine is not None:
                engine.close()

    _, problem = world.attempt(run)
    for row in rows:
        if problem is not None and "step_seconds" not in row:
            row.setdefault("note", problem)
    return rows


def main() -> None:
    args = parse_arguments()

    import report
    import torch
    from recipes import list_recipes

    from easy_context.model.liger import liger_unavailable

    world = report.start_world()
    budget = report.Budget(world, args.time_budget)
    facts = report.environment(world)
    args.liger = liger_unavailable() is None if args.liger is None else args.liger
    if args.methods is None:
        args.methods = ["ours", "alst_cudnn", "alst_fa2"] if world.size > 1 else ["ours", "original_liger", "original"]
    rows: list[dict] = []
    results = {"benchmark": "train_step", "environment": facts, "arguments": vars(args), "rows": rows}
    for recipe in list_recipes(args, world):
        for layers in args.layers:
            rows += run_recipe(recipe, layers, args, world, budget)
            world.say(report.markdown_table(rows[-len(args.seq_length) :], COLUMNS))
            report.write_json(world, args.output, results)
    rows += extrapolate(rows, args, world)
    add_ratios(rows)
    rows.sort(key=lambda row: (row["layers"], row["seq_length"]))
    report.write_json(world, args.output, results)
    world.say(f"\n{report.describe_environment(facts)}\n\n{report.markdown_table(rows, COLUMNS)}\n\n{LEGEND}")
    if world.size > 1:
        torch.distributed.destroy_process_group()
    if not any("step_seconds" in row for row in rows):
        sys.exit("nothing was measured; the notes in the table say why")


if __name__ == "__main__":
    main()

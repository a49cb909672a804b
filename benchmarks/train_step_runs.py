"""Measure the recipes of train_step.py, and extrapolate to a deeper model."""

import argparse
import functools
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig

from easy_context.kernels import select_kernel
from easy_context.training.flops import flops_per_token, peak_flops

from .recipes import Recipe, applied, build_model
from .steps import Batch, PlainStep, Zero3Step, make_batch
from .world import Budget, World


def model_config(args: argparse.Namespace, layers: int) -> LlamaConfig:
    """Return the config of a model of Llama 3's shape with `layers` layers."""
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
    """Return the number of weights of the whole model."""
    head_dim = args.hidden_size // args.heads
    attention = 2 * args.hidden_size * head_dim * (args.heads + args.kv_heads)
    layer = attention + 3 * args.hidden_size * args.intermediate_size + 2 * args.hidden_size
    return layers * layer + 2 * args.vocab_size * args.hidden_size + args.hidden_size


def measure(
    runner: PlainStep | Zero3Step, batch: Batch, micro_batches: int, args: argparse.Namespace, world: World
) -> dict[str, Any]:
    """Return the seconds of a step on the slowest rank, the losses and the peak memory."""
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step in range(args.warmup + args.steps):
        world.synchronize()
        start = time.perf_counter()
        losses.append(runner.step(batch, micro_batches))
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


def add_rates(row: dict[str, Any], args: argparse.Namespace, world: World) -> None:
    """Add tokens per second and GPU, and MFU, to a row with the time of a step."""
    speed = row["tokens_per_step"] / row["step_seconds"] / world.size
    token_flops = flops_per_token(
        model_config(args, row["layers"]), parameter_count(args, row["layers"]), row["seq_length"]
    )
    peak = peak_flops(world.device)
    row["tokens_per_second_per_gpu"] = speed
    row["mfu"] = None if peak is None else speed * token_flops / peak


def extrapolate(rows: list[dict], args: argparse.Namespace, world: World) -> list[dict]:
    """Return rows for the full depth, computed from the shallowest and the deepest row of each method and length."""
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
    """Add the speed relative to the fastest peer and to the original's recipe at the same length and depth."""
    for row in rows:
        if "step_seconds" not in row:
            continue
        same = [x for x in rows if (x["seq_length"], x["layers"]) == (row["seq_length"], row["layers"])]
        speeds = {x["method"]: x["tokens_per_second_per_gpu"] for x in same if x["peer"] and "step_seconds" in x}
        if speeds:
            row["vs_best_peer"] = row["tokens_per_second_per_gpu"] / max(speeds.values())
        if "original recipe" in speeds:
            row["vs_original"] = row["tokens_per_second_per_gpu"] / speeds["original recipe"]


def run_recipe(
    recipe: Recipe, layers: int, args: argparse.Namespace, world: World, budget: Budget
) -> list[dict[str, Any]]:
    """Build a recipe's model once and measure it at every length, the shortest first.

    Returns:
        One row for each length, with times or with a note that says why there are none.
    """
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
    _, problem = world.attempt(functools.partial(_measure_rows, rows, recipe, args, world, budget))
    for row in rows:
        if problem is not None and "step_seconds" not in row:
            row.setdefault("note", problem)
    return rows


def _measure_rows(
    rows: list[dict[str, Any]], recipe: Recipe, args: argparse.Namespace, world: World, budget: Budget
) -> None:
    """Add times or a note to the rows of one recipe and depth."""
    config = model_config(args, rows[0]["layers"])
    kernel = recipe.kernel
    if not recipe.alst:
        kernel = select_kernel(kernel, world.device, torch.bfloat16, config.head_dim).name
    for row in rows:
        row["kernel"] = kernel
    with applied(recipe, config) as mpu:

        def build() -> PlainStep | Zero3Step:
            model = build_model(recipe, config, world.device, args.seed)
            if world.size == 1:
                return PlainStep(model, recipe)
            return Zero3Step(model, recipe, world, mpu, args.batch_size)

        runner, problem = world.attempt(build)
        for row in rows:
            problem = problem or budget.overrun()
            if problem is not None:
                row["note"] = problem
                continue
            length, micro_batches = row["seq_length"], row["micro_batches"]
            batch = make_batch(recipe, world, args.batch_size, length, args.vocab_size, args.seed)
            times, problem = world.attempt(functools.partial(measure, runner, batch, micro_batches, args, world))
            if problem is not None:
                row["note"] = problem
                problem = f"not run: {length} tokens failed"
                continue
            row |= times | {"tokens_per_step": length * args.batch_size * micro_batches}
            add_rates(row, args, world)
        if runner is not None:
            runner.close()

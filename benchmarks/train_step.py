"""Whole training steps of a Llama-3-8B-shaped model with random weights: ours and other recipes, on the same rows.

    # one GPU: forward and backward, at two depths, extrapolated to 32 layers
    python -m benchmarks.train_step --seq-length 32768 131072 --layers 4 8 --methods ours original_liger original

    # two GPUs: whole optimizer steps under ZeRO-3, rows split over both
    torchrun --nproc_per_node 2 -m benchmarks.train_step --seq-length 131072 --layers 4 8 \
        --methods ours alst_cudnn alst_fa2

    # the same model at full depth, to check the extrapolation
    torchrun --nproc_per_node 2 -m benchmarks.train_step --seq-length 131072 262144 --layers 32 --methods ours --steps 1

MFU counts the model's FLOPs: six for each weight and token, and causal attention; no recomputation. A method that fails
becomes a row with the error. docs/performance.md explains the method and holds results.
"""

import argparse
import itertools

from easy_context.common.errors import name_flags
from easy_context.kernels import KERNELS
from easy_context.memory.plan import parse_memory_plan
from easy_context.modes import MODES

from .flags import at_least, check_distinct, check_lengths, check_output, launched_processes, make_parser

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
    """Return the checked flags."""
    parser = make_parser(__doc__, "train_step", time_budget=540)
    count = at_least(1)
    parser.add_argument("--seq-length", type=count, nargs="+", default=[32768, 131072], help="tokens of a row")
    parser.add_argument("--layers", type=count, nargs="+", default=[4, 8], help="depths to measure; two extrapolate")
    parser.add_argument("--full-depth", type=count, default=32, help="layers of the whole model, to extrapolate to")
    methods = "default: ours, alst_cudnn and alst_fa2 on several processes; ours, original_liger and original on one"
    parser.add_argument("--methods", nargs="+", choices=METHODS, help=methods)
    modes = "our parallel modes; default: zigzag_ring_attn on several processes, data_parallel on one"
    parser.add_argument("--modes", nargs="+", choices=MODES, help=modes)
    parser.add_argument("--attn-kernel", choices=("auto", *KERNELS), default="auto", help="our kernel")
    plan = "our memory plans, as in train.py; default: what the next two flags say"
    parser.add_argument("--memory-plan", nargs="+", help=plan)
    checkpointing = "our gradient checkpointing"
    parser.add_argument(
        "--gradient-checkpointing", nargs="+", choices=("none", "full", "offload"), default=["full"], help=checkpointing
    )
    keep = "where our checkpointing keeps attention outputs"
    parser.add_argument("--keep-attention", nargs="+", choices=("gpu", "cpu", "none"), default=["gpu"], help=keep)
    tile = "tokens of a tile of our MLP; 0 for whole shards"
    parser.add_argument("--mlp-tile-size", type=at_least(0), default=0, help=tile)
    liger = "Liger's layers, for ours, original_liger and ALST; default: where installed"
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, help=liger)
    least = "least tokens of a step, reached by accumulation; default: 262144 on several GPUs, one micro-batch on one"
    parser.add_argument("--tokens-per-step", type=count, help=least)
    parser.add_argument("--warmup", type=count, default=1, help="steps before the clock starts")
    parser.add_argument("--steps", type=count, default=2, help="steps that are timed; the median counts")
    parser.add_argument("--hidden-size", type=count, default=4096)
    parser.add_argument("--intermediate-size", type=count, default=14336)
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--kv-heads", type=count, default=8)
    parser.add_argument("--vocab-size", type=count, default=128256)
    args = parser.parse_args()
    names = ("seq_length", "layers", "methods", "modes", "memory_plan", "gradient_checkpointing", "keep_attention")
    check_distinct(parser, args, *names)
    for text, layers in itertools.product(args.memory_plan or (), args.layers):
        try:
            parse_memory_plan(text, layers)
        except ValueError as error:
            parser.error(name_flags(str(error)))
    check_output(parser, args)
    if args.hidden_size % args.heads or args.heads % args.kv_heads:
        parser.error("--heads must divide --hidden-size, and --kv-heads must divide --heads")
    if launched_processes() > 1 and "data_parallel" in (args.modes or ()):
        parser.error("--modes data_parallel: here all processes share a row, which it does not split; use one process")
    check_lengths(parser, "--seq-length", args.seq_length, [launched_processes()])
    args.seq_length, args.layers = sorted(args.seq_length), sorted(args.layers)
    return args


def main() -> None:
    """Measure every recipe at every depth and length, then extrapolate to the full depth."""
    args = parse_arguments()

    from easy_context.model.liger import liger_unavailable

    from .recipes import list_recipes
    from .tables import environment, finish, markdown_table, write_json
    from .train_step_runs import add_ratios, extrapolate, run_recipe
    from .world import Budget, start_world

    world = start_world()
    budget = Budget(world, args.time_budget)
    facts = environment(world)
    args.liger = liger_unavailable() is None if args.liger is None else args.liger
    if args.methods is None:
        args.methods = ["ours", "alst_cudnn", "alst_fa2"] if world.size > 1 else ["ours", "original_liger", "original"]
    rows: list[dict] = []
    results = {"benchmark": "train_step", "environment": facts, "arguments": vars(args), "rows": rows}
    for recipe in list_recipes(args, world):
        for layers in args.layers:
            rows += run_recipe(recipe, layers, args, world, budget)
            world.say(markdown_table(rows[-len(args.seq_length) :], COLUMNS))
            write_json(world, args.output, results)
    rows += extrapolate(rows, args, world)
    add_ratios(rows)
    rows.sort(key=lambda row: (row["layers"], row["seq_length"]))
    finish(world, args.output, results, COLUMNS, LEGEND, measured="step_seconds")


if __name__ == "__main__":
    main()

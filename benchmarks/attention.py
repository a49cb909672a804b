"""One attention layer, forward and backward: our modes and kernels beside other libraries, on the same inputs.

    torchrun --nproc_per_node 2 -m benchmarks.attention --output output/attention.json
    python -m benchmarks.attention --seq-length 16384 65536          # one GPU: the kernels alone
    python -m benchmarks.attention --alone 2 4 8     # one GPU: and what one rank of so many computes, nothing sent

Every method is first checked against float64 attention on a short row; then all run on the same whole rows, each rank
on its shard. A method that fails becomes a row with the error. The limit is the time of the same kernel on one GPU,
divided by the number of GPUs. docs/performance.md explains the method and holds results.
"""

import argparse

from easy_context.kernels import KERNELS

from .flags import at_least, check_distinct, check_lengths, check_output, launched_processes, make_parser

OUR_MODES = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn")
CANDIDATES = ("zigzag_all_gather",)  # not in the package
PEERS = ("ring_flash_attn", "yunchang_ulysses", "yunchang_usp", "context_parallel")
COLUMNS = (
    ("tokens", "seq_length", ","),
    ("method", "method", ""),
    ("kernel", "kernel", ""),
    ("of limit", "of_limit", ".3f"),
    ("× ring-f-a FA2", "vs_ring_flash_attn", ".2f"),
    ("× CP cuDNN", "vs_context_parallel", ".2f"),
    ("TF/s/GPU", "tflops_per_gpu", ".0f"),
    ("fwd", "forward_tflops", ".0f"),
    ("bwd", "backward_tflops", ".0f"),
    ("ms", "total_ms", ".2f"),
    ("extra GiB", "extra_memory_gib", ".2f"),
    ("error", "error", ".1e"),
    ("note", "note", ""),
)
LEGEND = (
    "of limit: the one-GPU time of the same kernel / GPUs / time. × ring-f-a FA2: time of ring-flash-attn's "
    "zigzag on the FlashAttention-2 kernel / time. × CP cuDNN: time of PyTorch's context_parallel with cuDNN / time. "
    "TF/s/GPU: forward and backward, then each alone. Errors: relative norm against float64 on a short row, the "
    "largest of out, dq, dk and dv. alone: what one rank computes, nothing sent. "
    "torch_flash is the FlashAttention-2 kernel in PyTorch."
)


def parse_arguments() -> argparse.Namespace:
    """Return the checked flags."""
    parser = make_parser(__doc__, "attention", time_budget=150)
    count = at_least(1)
    parser.add_argument("--seq-length", type=count, nargs="+", default=[16384, 65536, 131072], help="tokens of the row")
    parser.add_argument("--heads", type=count, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=count, default=8, help="key and value heads")
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--modes", nargs="*", choices=OUR_MODES + CANDIDATES, default=list(OUR_MODES))
    kernels = "default: flash_attn_4, cudnn and torch_flash on a GPU, cpu without one"
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, help=kernels)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    alone = "on one device: also time the first and the last of so many ranks of each mode, nothing sent"
    parser.add_argument("--alone", type=at_least(2), nargs="+", default=[], metavar="RANKS", help=alone)
    check_length = "tokens of the row that is checked; 0 for no check"
    parser.add_argument("--check-length", type=at_least(0), default=2048, help=check_length)
    repeats = "most repetitions of a measurement; the median counts"
    parser.add_argument("--repeats", type=count, default=20, help=repeats)
    args = parser.parse_args()
    check_distinct(parser, args, "seq_length", "modes", "kernels", "peers", "alone")
    check_output(parser, args)
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    if args.alone and launched_processes() > 1:
        parser.error(f"--alone {args.alone}: for one process without a launcher")
    ranks = [launched_processes(), *args.alone]
    check_lengths(parser, "--seq-length", args.seq_length, ranks)
    check_lengths(parser, "--check-length", [args.check_length], ranks[:1])
    return args


def main() -> None:
    """Check every method, then time all of them at every length."""
    args = parse_arguments()

    from .attention_cases import list_cases
    from .attention_runs import add_ratios, build_and_check, make_inputs, time_case
    from .tables import environment, finish, write_json
    from .world import Budget, start_world

    world = start_world()
    budget = Budget(world, args.time_budget)
    facts = environment(world)
    cases = list_cases(args, world)
    built = build_and_check(cases, args, world)
    checks = [
        {"method": method, "kernel": kernel, **{key: value for key, value in entry.items() if key != "method"}}
        for (method, kernel), entry in built.items()
    ]
    rows: list[dict] = []
    results = {"benchmark": "attention", "environment": facts, "arguments": vars(args), "checks": checks, "rows": rows}
    seconds = args.time_budget / (len(cases) * len(args.seq_length))
    for seq_length in args.seq_length:
        whole = make_inputs(args, world, seq_length)
        for case in cases:
            row = {"seq_length": seq_length, "method": case.method, "kernel": case.kernel}
            rows.append(row)
            row |= time_case(case, built[case.method, case.kernel], whole, budget, seconds, args, world)
            add_ratios(rows)
            write_json(world, args.output, results)
        del whole
    finish(world, args.output, results, COLUMNS, LEGEND, measured="total_ms")


if __name__ == "__main__":
    main()

"""One attention layer over rows of packed documents: beside the dense row, and beside the same documents apart.

    torchrun --nproc_per_node 2 -m benchmarks.packed --output output/packed.json
    python -m benchmarks.packed --seq-length 16384 65536              # one GPU: the kernels alone

Each row holds documents of log-normal lengths. Every mode runs it three times: as one text (dense), with attention
within documents (packed), and each document split over the ranks by itself (apart), as rows of one document would be.
"""

import argparse
import itertools

from easy_context.kernels import KERNELS

from .attention import OUR_MODES
from .flags import at_least, check_distinct, check_lengths, check_output, launched_processes, make_parser

COLUMNS = (
    ("tokens", "seq_length", ","),
    ("mean document", "mean_document", "s"),
    ("documents", "documents", ""),
    ("method", "method", ""),
    ("kernel", "kernel", ""),
    ("pairs", "pairs_of_dense", ".3f"),
    ("× dense", "vs_dense", ".2f"),
    ("× apart", "vs_apart", ".2f"),
    ("of pairs", "of_pairs", ".2f"),
    ("balance", "balance", ".2f"),
    ("dense ms", "dense_ms", ".2f"),
    ("packed ms", "packed_ms", ".2f"),
    ("apart ms", "apart_ms", ".2f"),
    ("error", "error", ".1e"),
    ("note", "note", ""),
)
LEGEND = (
    "pairs: (query, key) pairs within documents / those of the dense row. × dense, × apart: time of the dense row, and "
    "of the documents apart, / time of the packed row. of pairs: × dense times pairs, 1 where time falls as the pairs "
    "do. balance: pairs that a rank computes, the mean / the largest. Times are of forward and backward. Errors: "
    "relative norm of the packed row against float64 on a short one, the largest of out, dq, dk and dv."
)


def parse_arguments() -> argparse.Namespace:
    """Return the checked flags."""
    parser = make_parser(__doc__, "packed", time_budget=150)
    count = at_least(1)
    parser.add_argument("--seq-length", type=count, nargs="+", default=[65536], help="tokens of the row")
    documents = "mean length of a document as a part of the row: 8 for an eighth"
    parser.add_argument("--documents", type=count, nargs="+", default=[8, 64], metavar="PARTS", help=documents)
    sigma = "spread of the logarithm of document lengths"
    parser.add_argument("--sigma", type=at_least(0, float), default=1.0, help=sigma)
    parser.add_argument("--heads", type=count, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=count, default=8, help="key and value heads")
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--modes", nargs="+", choices=OUR_MODES, default=list(OUR_MODES))
    kernels = "default: flash_attn_4 and torch_flash on a GPU, cpu without one"
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, help=kernels)
    check_length = "tokens of the row that is checked; 0 for no check"
    parser.add_argument("--check-length", type=at_least(0), default=2048, help=check_length)
    repeats = "most repetitions of a measurement; the median counts"
    parser.add_argument("--repeats", type=count, default=20, help=repeats)
    args = parser.parse_args()
    check_distinct(parser, args, "seq_length", "documents", "modes", "kernels")
    check_output(parser, args)
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    check_lengths(parser, "--seq-length", args.seq_length, [launched_processes()])
    check_lengths(parser, "--check-length", [args.check_length], [launched_processes()])
    return args


def main() -> None:
    """Time each mode and kernel on every row."""
    args = parse_arguments()

    from .attention_cases import default_kernels, modes_here
    from .attention_runs import make_inputs
    from .packed_runs import PackedRow, run_case
    from .tables import environment, finish, write_json
    from .world import Budget, start_world

    world = start_world()
    budget = Budget(world, args.time_budget)
    modes = ["data_parallel"] if world.size == 1 else modes_here(args.modes, world)
    kernels = args.kernels or [kernel for kernel in default_kernels(world) if kernel != "cudnn"]
    rows: list[dict] = []
    results = {"benchmark": "packed", "environment": environment(world), "arguments": vars(args), "rows": rows}
    cases = len(args.seq_length) * len(args.documents) * len(modes) * len(kernels)
    for seq_length in args.seq_length:
        whole = make_inputs(args, world, seq_length)
        for parts, mode, kernel in itertools.product(args.documents, modes, kernels):
            packed = PackedRow.draw(whole, parts, args)
            row = {
                "seq_length": seq_length,
                "mean_document": f"1/{parts}",
                "documents": len(packed.lengths),
                "method": "one GPU" if world.size == 1 else mode,
                "kernel": kernel,
            }
            note = budget.overrun()
            row |= {"note": note} if note else run_case(mode, kernel, packed, args.time_budget / cases, args, world)
            rows.append(row)
            write_json(world, args.output, results)
        del whole, packed
    finish(world, args.output, results, COLUMNS, LEGEND, measured="packed_ms")


if __name__ == "__main__":
    main()

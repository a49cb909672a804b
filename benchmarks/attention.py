"""One attention layer, forward and backward: our modes and kernels beside other libraries, on the same inputs.

    torchrun --nproc_per_node 2 benchmarks/attention.py --output output/attention.json
    python benchmarks/attention.py --seq-length 16384 65536          # one GPU: the kernels alone
    python benchmarks/attention.py --alone 2 4 8     # one GPU: and what one rank of so many computes, nothing sent

Every method is first checked against float64 attention on a short row; then all run on the same whole rows, each rank
on its shard. A method that fails becomes a row with the error. The limit is the time of the same kernel on one GPU,
divided by the number of GPUs. docs/performance.md explains the method and holds results.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from argument_checks import check_distinct, check_lengths, check_output, check_positive, launched_processes

from easy_context.training.arguments import KERNELS as KERNEL_CHOICES

KERNELS = KERNEL_CHOICES[1:]  # without "auto": every row names its kernel
OUR_MODES = ("zigzag_ring_attn", "dist_flash_attn", "ulysses_attn")
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


@dataclass
class Case:
    """A method to run.

    Attributes:
        method: its name in the table.
        kernel: what computes a block.
        build: makes the `peers.AttentionMethod`; may fail.
        fallback: what to build if the first fails or is wrong.
        devices: how many share the row.
        checked: its result is right, and compared with float64.
    """

    method: str
    kernel: str
    build: Callable[[], Any]
    fallback: Callable[[], Any] | None = None
    devices: int = 1
    checked: bool = True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seq-length", type=int, nargs="+", default=[16384, 65536, 131072], help="tokens of the row")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="key and value heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--modes", nargs="*", choices=OUR_MODES + CANDIDATES, default=list(OUR_MODES))
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=KERNELS,
        default=None,
        help="default: flash_attn_4, cudnn and torch_flash on a GPU, cpu without one",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--alone",
        type=int,
        nargs="+",
        default=[],
        metavar="RANKS",
        help="on one device: also time the first and the last of so many ranks of each mode, nothing sent",
    )
    parser.add_argument("--check-length", type=int, default=2048, help="tokens of the row that is checked; 0: no check")
    parser.add_argument("--repeats", type=int, default=20, help="most repetitions of a measurement; the median counts")
    parser.add_argument("--time-budget", type=float, default=150, help="seconds; what does not fit is left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="output/attention.json", help="results as JSON")
    args = parser.parse_args()
    sizes = ("seq_length", "heads", "kv_heads", "head_dim", "batch_size")
    check_positive(parser, args, (*sizes, "repeats", "time_budget"))
    check_distinct(parser, args, ("seq_length", "modes", "kernels", "peers", "alone"))
    check_output(parser, args)
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    if args.alone and launched_processes() > 1:
        parser.error(f"--alone {args.alone}: for one process without a launcher")
    if min(args.alone, default=2) < 2:
        parser.error(f"--alone {args.alone}: a row is shared by at least 2 ranks")
    if args.check_length < 0:
        parser.error(f"--check-length {args.check_length}: give a number of tokens, or 0 for no check")
    ranks = [launched_processes(), *args.alone]
    check_lengths(parser, "--seq-length", args.seq_length, ranks)
    check_lengths(parser, "--check-length", [args.check_length], ranks[:1])
    return args


def list_cases(args: argparse.Namespace, world) -> list[Case]:
    """Single-GPU kernels first (they set the limit), then ours, then peers."""
    import peers

    kernels = args.kernels or (["flash_attn_4", "cudnn", "torch_flash"] if world.device.type == "cuda" else ["cpu"])
    own = functools.partial(own_method, args=args, world=world)
    cases = [Case("one GPU", kernel, functools.partial(own, "data_parallel", kernel)) for kernel in kernels]
    if world.size == 1:
        return cases + [
            Case(
                f"{mode}, rank {rank} of {size} alone",
                kernel,
                functools.partial(lone_method, mode, kernel, rank, size, args, world),
                devices=size,
                checked=False,
            )
            for size, mode, kernel in itertools.product(args.alone, args.modes, kernels)
            for rank in (0, size - 1)
        ]
    shared = functools.partial(Case, devices=world.size)
    cases += [shared(mode, kernel, functools.partial(own, mode, kernel)) for mode in args.modes for kernel in kernels]
    fa2 = "torch_flash"
    if "ring_flash_attn" in args.peers:
        cases.append(shared("ring-flash-attn zigzag", fa2, peers.ring_flash_attn))
    if "yunchang_ulysses" in args.peers:
        cases.append(shared("yunchang Ulysses", fa2, peers.yunchang_ulysses))
    if "yunchang_usp" in args.peers and world.size > 2:  # on two ranks it is one of the two above
        cases.append(shared("yunchang USP", fa2, peers.yunchang_usp))
    if "context_parallel" in args.peers:
        for kernel in ("cudnn", fa2):
            build = functools.partial(peers.torch_context_parallel, kernel, world.device)
            native, repeated = (functools.partial(build, repeat_kv=repeat) for repeat in (False, True))
            cases.append(shared("context_parallel", kernel, native, fallback=repeated))
    return cases


def our_plan(mode_name: str, kernel_name: str, args: argparse.Namespace, world):
    """How one of our modes with one kernel computes, over all processes of the run."""
    import torch
    import torch.distributed as dist

    from easy_context.attention import AttentionPlan
    from easy_context.kernels import AttentionMask, select_kernel
    from easy_context.modes import get_mode

    if mode_name in CANDIDATES:
        from zigzag_all_gather import ZigzagAllGather

        mode = ZigzagAllGather()
    else:
        mode = get_mode(mode_name)
    return AttentionPlan(
        mode=mode,
        scale=args.head_dim**-0.5,
        mask=AttentionMask(causal=True),
        kernel=select_kernel(kernel_name, world.device, torch.bfloat16, args.head_dim),
        group=None if mode_name == "data_parallel" or world.size == 1 else dist.group.WORLD,
    )


def own_method(mode_name: str, kernel_name: str, args: argparse.Namespace, world):
    """One of our modes with one kernel."""
    from peers import AttentionMethod, shard_as

    from easy_context.attention import sequence_parallel_attention

    plan = our_plan(mode_name, kernel_name, args, world)
    return AttentionMethod(functools.partial(sequence_parallel_attention, plan=plan), shard_as(plan.mode))


def lone_method(mode_name: str, kernel_name: str, rank: int, size: int, args: argparse.Namespace, world):
    """One rank's part of one of our modes, without communication."""
    from loopback import alone

    return alone(our_plan(mode_name, kernel_name, args, world), rank, size)


def build_and_check(cases: list[Case], args: argparse.Namespace, world) -> dict[tuple[str, str], dict]:
    """Each case's method, its errors against float64, or its problem, by (method, kernel)."""
    from attention_runs import check, expected_results, make_inputs

    whole = expected = None
    if args.check_length:
        whole = make_inputs(args, world, args.check_length)
        expected = expected_results(args, whole)
    built = {}
    for case in cases:
        problems = []
        for build in (case.build, case.fallback):
            if build is None:
                continue
            method, problem = world.attempt(build)
            errors = None
            if problem is None and args.check_length and case.checked:
                errors, problem = world.attempt(functools.partial(check, method, whole, expected, world))
            if problem is None:
                break
            problems.append(problem)
        entry = {"method": method, "errors": errors, "problem": problem, "first_problem": (problems or [None])[0]}
        built[case.method, case.kernel] = entry
        state = problem or (f"max relative error {max(errors.values()):.1e}" if errors else "not checked")
        world.say(f"{case.method}, {case.kernel}: {state}")
    return built


def main() -> None:
    args = parse_arguments()

    import report
    import torch
    from attention_runs import add_rates, add_ratios, make_inputs, measure

    world = report.start_world()
    budget = report.Budget(world, args.time_budget)
    facts = report.environment(world)
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
            entry = built[case.method, case.kernel]
            row: dict[str, Any] = {"seq_length": seq_length, "method": case.method, "kernel": case.kernel}
            rows.append(row)
            if entry["problem"] is not None:
                row["note"] = entry["problem"]
                continue
            row["error"] = max(entry["errors"].values()) if entry["errors"] else None
            row["note"] = entry["method"].note
            if budget.spent():
                row["note"] = f"left out: the time budget of {budget.seconds:g} s is spent"
                continue
            times, problem = world.attempt(functools.partial(measure, entry["method"], whole, args, world, seconds))
            if problem is not None:
                row["note"] = problem
                continue
            row |= times
            add_rates(row, args, case.devices)
            add_ratios(rows)
            report.write_json(world, args.output, results)
        del whole
    report.write_json(world, args.output, results)
    world.say(f"\n{report.describe_environment(facts)}\n\n{report.markdown_table(rows, COLUMNS)}\n\n{LEGEND}")
    if world.size > 1:
        torch.distributed.destroy_process_group()
    if not any("total_ms" in row for row in rows):
        sys.exit("nothing was measured; the notes in the table say why")


if __name__ == "__main__":
    main()

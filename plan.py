"""Forecast the memory and time of a training step and the longest row that fits, without GPUs or weights.

    # Llama-3-8B on eight H100s, rows of 512K tokens
    python plan.py --gpus 8 --card H100 --host-memory 1000 --model meta-llama/Meta-Llama-3-8B --seq-length 524288

    # known cards
    python plan.py --list

All flags of train.py work here, too, with the same meaning. The output is memory by part, the memory plan, the time of
a step, the longest row that fits, and the launch command. docs/training.md compares forecasts with measurements.
"""

import argparse
import math
import shlex
import sys

from easy_context.common.flags import FlagParser, number, refusals, whole_number
from easy_context.training.arguments import parse_arguments


def parse_machines() -> tuple[argparse.Namespace, list[str]]:
    """Return the flags about GPUs, and the remaining words, which are train.py's flags."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the known cards and exit")
    parser.add_argument("--gpus", type=whole_number(1), default=1, help="total number of GPUs (default: 1)")
    parser.add_argument("--card", default="H200", help="GPU model; --list shows the known ones (default: H200)")
    parser.add_argument("--gpu-memory", type=number(1), help="gigabytes of each GPU (default: as the card is sold)")
    parser.add_argument(
        "--host-memory", type=number(1), default=256.0, help="free gigabytes on each machine (default: 256)"
    )
    parser.add_argument(
        "--gpus-per-machine", type=whole_number(1), default=8, help="number of GPUs in a machine (default: 8)"
    )
    return parser.parse_known_args()


def launcher(gpus: int, gpus_per_machine: int, optimizer: str) -> str:
    """Return the command that starts train.py on this many GPUs, under DeepSpeed if the optimizer supports it."""
    machines = math.ceil(gpus / gpus_per_machine)
    if optimizer == "adamw" or gpus == 1:
        several = "single_node" if machines == 1 else "two_node"
        name = several if gpus > 1 else "single_gpu" if optimizer == "adamw" else "single_gpu_plain"
        return f"accelerate launch --config_file accelerate_configs/{name}.yaml --num_processes {gpus}"
    meeting = f" --nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if machines > 1 else ""
    return f"torchrun{meeting} --nproc-per-node {min(gpus, gpus_per_machine)}"


def main() -> None:
    """Print the forecast."""
    flags, words = parse_machines()
    args = parse_arguments(words)

    from easy_context.evaluation.scorer import sizes_at_once
    from easy_context.memory.forecast import Shape
    from easy_context.memory.forward_forecast import forward_memory
    from easy_context.model.config import load_config
    from easy_context.training.checks import flag_problems
    from easy_context.training.flops import PEAK_FLOPS
    from easy_context.training.planner import CARD_MEMORY, Machines, describe, forecast, longest_row

    if flags.list:
        for card, gigabytes in CARD_MEMORY.items():
            print(f"{card:<10}{gigabytes:4d} GB  {PEAK_FLOPS[card] / 1e12:6.0f} TFLOP/s in bf16")
        return
    with refusals("plan.py"):
        if flags.card not in CARD_MEMORY:
            raise ValueError(f"--card {flags.card} is unknown: choose one of {', '.join(CARD_MEMORY)}")
        args.liger = args.liger is not False
        gigabytes = flags.gpu_memory or CARD_MEMORY[flags.card]
        machines = Machines.of(flags.gpus, flags.card, gigabytes, flags.host_memory, flags.gpus_per_machine)
        config = load_config(args.model)
        if problems := flag_problems(args, config, flags.gpus, here=False):
            raise ValueError("\n  - ".join(["these flags do not go together:", *problems]))
        result = forecast(args, config, machines)
    print(describe(result, args, config, machines))
    print(f"longest row that fits: about {longest_row(args, config, machines):,} tokens")
    load = result.option.load
    ranks = args.batch_size * load.row // load.tokens
    evaluation = sum(forward_memory(Shape.of(config), load, ranks, *sizes_at_once(frugal=False)).values())
    print(f"eval_ppl.py on such rows: about {evaluation / 2**30:.1f} GiB of each GPU, with all weights on each")
    if result.fits:
        print(f"\n{launcher(flags.gpus, flags.gpus_per_machine, args.optimizer)} train.py {shlex.join(words)}")
    sys.exit(0 if result.fits else 1)


if __name__ == "__main__":
    main()

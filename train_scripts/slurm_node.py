"""Run `accelerate launch` on one node of a Slurm job, for slurm.sh; its arguments are those of `accelerate launch`.

Slurm signals what srun has started, which is the launcher. It would die of SIGUSR1, and train.py with it, so the signal
is passed on to the processes of train.py instead, which save a checkpoint and end.
"""

import os
import signal
import sys
from typing import Any

import psutil


def pass_on(number: int, _: Any) -> None:
    """Send a signal that has arrived to the processes that this one has started."""
    for child in psutil.Process().children():
        child.send_signal(number)


def main() -> None:
    """Launch, as the node that Slurm says this is."""
    signal.signal(signal.SIGUSR1, pass_on)  # before the import, which takes seconds

    from accelerate.commands.launch import main as launch

    sys.argv[1:1] = ["--machine_rank", os.environ["SLURM_NODEID"]]
    launch()


if __name__ == "__main__":
    main()

"""Runs of train.py on several processes, forked from one that has imported everything, with faults put in.

A launch by torchrun spends 13 to 29 seconds on imports; these spend them once. The processes are as real: each has a
number in the process table, can be killed, stopped and sent signals, and writes to the same two streams.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import Fault, put_in
from launching import REPOSITORY, free_port
from worker_pool import HEAVY_IMPORTS

# What `accelerate launch --config_file accelerate_configs/cpu.yaml` puts into the environment of each process.
ZERO_3_OFFLOAD = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "accelerate_configs/zero3_offload.json",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
}


class ForkedRun:
    """A run of train.py that has been started.

    Attributes:
        processes: by rank.
    """

    def __init__(self, output: Path, processes: int, flags: list[str], *faults: Fault, **variables: str):
        """Start `train.py FLAGS` on so many processes.

        Args:
            output: the file that gets what they print.
            processes: how many.
            flags: train.py's.
            faults: what goes wrong.
            variables: of the environment.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY_IMPORTS)  # without effect if it runs already
        self._output, port = output, free_port()
        output.write_text("")
        self.processes = [
            context.Process(
                target=_train, args=(rank, processes, port, str(output), flags, faults, variables), daemon=True
            )
            for rank in range(processes)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = 120.0) -> list[int]:
        """Return the exit codes, minus the signal of a process that was killed; none may take longer than that."""
        deadline = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
                assert process.exitcode is not None, f"no end after {seconds} s:\n{self.said()}"
        finally:
            self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
            process.join()

    def send(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to some ranks."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, number)

    def said(self) -> str:
        """Return what the processes have printed so far."""
        return self._output.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        """Wait until something is true of a run that goes on."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and any(process.is_alive() for process in self.processes), self.said()
            time.sleep(0.05)


def _train(
    rank: int, size: int, port: str, output: str, flags: list[str], faults: tuple[Fault, ...], variables: dict[str, str]
) -> None:
    """Be one process of a run."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.chdir(REPOSITORY)
    os.environ.update({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | variables)
    with_deepspeed = "ACCELERATE_USE_DEEPSPEED" in variables
    if size > 1 or with_deepspeed:  # else as `python train.py`
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        if not with_deepspeed:
            os.environ["ACCELERATE_USE_CPU"] = "true"  # with which Accelerate leaves DeepSpeed out, without a word
    import torch

    torch.set_num_threads(1)
    import train

    sys.argv = ["train.py", *flags]
    put_in(rank, *faults)
    train.main()

"""Starts the project's scripts as users do: in processes of their own, on CPUs, offline. Or makes it look so."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def free_port() -> str:
    """Return a port for processes to meet at, which nothing else takes before they listen there.

    It lies below those that the system gives to connections (from 32768 on Linux), and is drawn at random, whatever
    seed a test has set, so that test processes that run side by side do not choose the same one.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return str(port)


def torchrun(processes: int) -> list[str]:
    """Return the words between `python` and a script's name that launch it with torchrun."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def accelerate_launch(processes: int, config: str = "accelerate_configs/cpu.yaml") -> list[str]:
    """Return the words between `python` and a script's name that launch it with Accelerate."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", config]
    return [*launcher, "--num_processes", str(processes), "--main_process_port", free_port()]


def read_metrics(output_dir: Path) -> list[dict]:
    """Return the record of every step that a training run has logged."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def run_python(*words: str) -> subprocess.CompletedProcess:
    """Run Python with these words in the repository, outside of any launcher, and wait for its end."""
    return subprocess.run([sys.executable, *words], **_as_a_user(), timeout=300)


def start_python(*words: str) -> subprocess.Popen:
    """Start what `run_python` runs, in a process group of its own, which Ctrl-C reaches as in a terminal."""

    def listen() -> None:  # the tests themselves may run where Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.Popen([sys.executable, *words], **_as_a_user(), start_new_session=True, preexec_fn=listen)


def _as_a_user() -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return {"cwd": REPOSITORY, "env": environment, "text": True, **pipes}


@contextlib.contextmanager
def launched(rank: int, world_size: int, port: str):
    """The environment that torchrun makes, and Accelerate's singletons forgotten before and after."""
    from accelerate.state import AcceleratorState, GradientState

    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    before = dict(os.environ)
    if world_size > 1:
        os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def train_here(*flags: str) -> None:
    """Run train.main() in this process, one rank without a launcher, and undo all that it patched."""
    from unittest import mock

    import train

    launcher_or_key = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WANDB_API_KEY", "WANDB_MODE")
    with mock.patch.dict(os.environ), mock.patch.object(sys, "argv", ["train.py", *flags]):
        for variable in launcher_or_key:
            os.environ.pop(variable, None)
        try:
            train.main()
        finally:
            undo_training()


def undo_training() -> None:
    """Undo what train.main() patches and what Accelerate remembers of it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from easy_context import remove_seq_parallel_monkey_patch, remove_unsloth_offloaded_gradient_checkpoint_monkey_patch

    remove_seq_parallel_monkey_patch()
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()

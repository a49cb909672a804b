"""Two machines, each a network namespace with an address of its own: two_node.yaml trains as one process does."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import REPOSITORY, train_here
from tiny_models import VOCABULARY, save_tiny_llama

TOLERANCE = 1e-4  # relative, of losses and gradient norms: as between modes on one machine, in float32

pytestmark = pytest.mark.slow


class Machines:
    """Two network namespaces joined by a cable."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self.names = [f"node{index}-{os.getpid()}" for index in (0, 1)]

    def __enter__(self) -> "Machines":
        for name in self.names:
            ip("netns", "add", name)
        ip(*f"link add cable0 netns {self.names[0]} type veth peer name cable1 netns {self.names[1]}".split())
        for index, name in enumerate(self.names):
            ip("-n", name, "address", "add", f"{self.addresses[index]}/24", "dev", f"cable{index}")
            ip("-n", name, "link", "set", "lo", "up")
        self.set_cable("up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def set_cable(self, state: str) -> None:
        for index, name in enumerate(self.names):
            ip("-n", name, "link", "set", f"cable{index}", state)

    def start(self, index: int, log: Path, *flags: str) -> subprocess.Popen:
        """Start train.py on one machine, as docs/training.md says for two; two processes on each."""
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": f"cable{index}"}
        launch = [
            *("ip", "netns", "exec", self.names[index], sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", "accelerate_configs/two_node.yaml", "--num_processes", "4"),
            *("--main_process_ip", self.addresses[0], "--machine_rank", str(index), "train.py", *flags),
        ]
        with open(log, "w") as file:
            return subprocess.Popen(launch, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def machines():
    try:
        with Machines() as two:
            yield two
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")


@pytest.fixture
def flags(tmp_path) -> list[str]:
    import datasets

    save_tiny_llama(tmp_path / "model")
    rows = torch.randint(0, VOCABULARY, (6, 64), generator=torch.Generator().manual_seed(0)).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "rows")
    return [
        *("--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows"), "--seq-length", "64"),
        *("--gradient-accumulate-every", "2", "--learning-rate", "3e-3", "--mixed-precision", "no"),
    ]


def records(output_dir: Path) -> list[dict]:
    file = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_machines_train_as_one_process_does_also_after_the_link_was_cut(machines, flags, tmp_path):
    """A row over the four processes of both: shards, gradients and ZeRO-3's weights cross the cable."""
    two, one = tmp_path / "two", tmp_path / "one"
    logs = [tmp_path / "log0", tmp_path / "log1"]

    def start(*more: str) -> list[subprocess.Popen]:
        words = (*flags, "--save-every", "2", "--output-dir", str(two), *more)
        return [machines.start(index, log, *words) for index, log in enumerate(logs)]

    def said() -> str:
        return "\n".join(log.read_text()[-4000:] for log in logs)

    running = start("--max-train-steps", "100000")
    try:
        wait_until(lambda: len(records(two)) > 2 or any(process.poll() is not None for process in running), 600)
        assert not any(process.poll() is not None for process in running), said()
        machines.set_cable("down")
        wait_until(lambda: all(process.poll() is not None for process in running), 300)
    finally:
        machines.set_cable("up")
        for process in running:
            process.terminate()
    assert all(process.returncode for process in running)
    assert "1 data-parallel x 4 sequence-parallel processes" in logs[0].read_text()
    assert all("has not answered for" in log.read_text() for log in logs), said()

    steps = len(records(two)) + 2
    again = start("--max-train-steps", str(steps))
    assert [process.wait(timeout=900) for process in again] == [0, 0], said()
    assert "resumed from" in logs[0].read_text()
    train_here(*flags, "--parallel_mode", "data_parallel", "--max-train-steps", str(steps), "--output-dir", str(one))
    assert len(records(two)) == len(records(one)) == steps
    for got, expected in zip(records(two), records(one), strict=True):
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(expected[key], rel=TOLERANCE)

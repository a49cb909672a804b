"""Runs of train.py on real processes to which something happens, and what they leave."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from faults import Fault, seconds_since_fault
from forked_runs import ZERO_3_OFFLOAD, ForkedRun
from launching import read_metrics
from safetensors.torch import load_file
from tiny_models import VOCABULARY, save_tiny_llama

STEPS = 7  # of 2 rows each, over 5 rows: epochs end within steps 3 and 5
SECONDS_TO_END = 60  # from a fault until all processes have ended
ZERO_3 = ZERO_3_OFFLOAD | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "accelerate_configs/zero3.json"}


@dataclass(frozen=True)
class Setup:
    """How a run is launched; each makes steps of the same two rows."""

    processes: int
    flags: tuple[str, ...] = ("--gradient-accumulate-every", "2")
    variables: dict[str, str] = field(default_factory=dict)


SETUPS = {
    "one process": Setup(1),
    "two processes": Setup(2, ("--parallel_mode", "data_parallel", "--gradient-accumulate-every", "1")),
    "two that share rows": Setup(2),
    "ZeRO-3 with offload": Setup(2, variables=ZERO_3_OFFLOAD),
    "ZeRO-3": Setup(2, variables=ZERO_3),
    "three under ZeRO-3": Setup(3, variables=ZERO_3),
}


def save_assets(folder: Path) -> None:
    """Save a tiny model and five rows of 32 tokens."""
    import datasets

    save_tiny_llama(folder / "model")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (5, 32), generator=generator).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / "rows")


class Runs:
    """Starts runs and reads what they leave."""

    def __init__(self, assets: Path, folder: Path) -> None:
        self.assets, self.folder = assets, folder
        self._started: list[ForkedRun] = []

    def start(self, setup: str, name: str, *flags: str, faults: tuple[Fault, ...] = ()) -> ForkedRun:
        """Start train.py into the folder `name`; later flags take the place of earlier ones."""
        launch = SETUPS[setup]
        usual = [
            *("--model", str(self.assets / "model"), "--dataset", str(self.assets / "rows")),
            *("--seq-length", "32", "--max-train-steps", str(STEPS), "--output-dir", str(self.folder / name)),
            *("--learning-rate", "1e-2", "--warmup-steps", "3", "--lr-scheduler", "cosine", "--mixed-precision", "no"),
        ]
        output = self.folder / f"said-{len(self._started)}"
        run = ForkedRun(output, launch.processes, [*usual, *launch.flags, *flags], *faults, **launch.variables)
        self._started.append(run)
        return run

    def end(self, setup: str, name: str, *flags: str, faults: tuple[Fault, ...] = ()) -> tuple[list[int], str]:
        """Run train.py to its end; return exit codes and what was said. After a fault that end must come soon."""
        run = self.start(setup, name, *flags, faults=faults)
        codes, said = run.wait(), run.said()
        for fault in faults[:1]:
            assert "[fault at" in said, f"{fault} did not happen:\n{said}"
            assert seconds_since_fault(said) < SECONDS_TO_END
        return codes, said

    def kill(self) -> None:
        for run in self._started:
            run.kill()


def record_of(output_dir: Path) -> list[tuple]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [tuple(record[name] for name in names) for record in read_metrics(output_dir)]


def assert_same_run(got: Path, expected: Path) -> None:
    """Same losses, gradient norms and learning rates of every step, and the same weights, to the last bit."""
    assert record_of(got) == record_of(expected)
    weights, reference = (load_file(folder / "model.safetensors") for folder in (got, expected))
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[name], reference[name]) for name in reference)


def assert_like(got: Path, expected: Path) -> None:
    """The same rows in another way: sums in another order differ in the last bits of float32."""
    for record, reference in zip(record_of(got), record_of(expected), strict=True):
        assert record == pytest.approx(reference, rel=1e-4)
    weights, reference = (load_file(folder / "model.safetensors") for folder in (got, expected))
    for name in reference:  # a step of Adam moves a weight by 1e-2
        torch.testing.assert_close(weights[name], reference[name], rtol=0, atol=2e-4)


def saved_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint*"))

"""The Hugging Face Trainer on split rows against the plain Trainer on one process: losses, norms and weights to 1e-5."""

import contextlib
import dataclasses
import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from family_models import VOCABULARY, family_model, patched
from launching import free_port
from plain_attention import relative_error

import easy_context

TOLERANCE = 1e-5
PADDING_TOKEN = 7  # also a token of the rows, as where the end-of-text token pads


@dataclasses.dataclass(frozen=True)
class Case:
    """A short training; its text is the repro that a failing test prints."""

    mode: str
    world_size: int
    sequence_size: int
    rows: int
    batch_size: int  # of a data-parallel group
    eval_rows: int
    checkpointing: bool = False
    sampling: str = "random"

    @property
    def groups(self) -> int:
        return self.world_size // self.sequence_size


# The last accumulation window of an epoch is incomplete in each: 5 micro-batches, 2 a step.
CASES = (
    Case("zigzag_ring_attn", 2, 2, rows=9, batch_size=2, eval_rows=5),
    Case("ulysses_attn", 2, 2, rows=9, batch_size=2, eval_rows=4, checkpointing=True, sampling="sequential"),
    Case("data_parallel", 2, 1, rows=10, batch_size=1, eval_rows=5),
    Case("zigzag_ring_attn", 4, 2, rows=10, batch_size=1, eval_rows=7),
    Case("dist_flash_attn", 4, 2, rows=20, batch_size=2, eval_rows=1),
)


def make_rows(count: int, seed: int = 3) -> list[dict]:
    """Rows of 5 to 40 tokens with labels, about a third of them -100, and a column that no model takes."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(5, 41, (), generator=generator))
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = ids.masked_fill(torch.rand(length, generator=generator) < 0.3, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist(), "note": f"row {index}"})
    return rows


def pad_right(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A collator that pads at the right end, with an attention_mask."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        real, padding = len(row["input_ids"]), longest - len(row["input_ids"])
        batch["input_ids"].append(list(row["input_ids"]) + [PADDING_TOKEN] * padding)
        batch["labels"].append(list(row["labels"]) + [-100] * padding)
        batch["attention_mask"].append([1] * real + [0] * padding)
    return {name: torch.tensor(values) for name, values in batch.items()}


@contextlib.contextmanager
def launched(rank: int, world_size: int, port: str):
    """The environment that torchrun makes, and Accelerate's singletons forgotten before and after."""
    from accelerate.state import AcceleratorState, GradientState

    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    before = {name: os.environ.get(name) for name in environment}
    if world_size > 1:
        os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def make_trainer(folder: str, *bases: type, model=None, rows=9, eval_rows=None, collator=pad_right, **settings):
    """A Trainer of these base classes on a tiny model in float32."""
    import datasets
    from transformers import Trainer, TrainingArguments

    defaults = {
        "output_dir": folder,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",  # whose steps, unlike AdamW's, scale with the gradients
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "include_num_input_tokens_seen": "non_padding",
    }
    trainer_arguments = {name: settings.pop(name) for name in ("compute_metrics", "compute_loss_func") if name in settings}
    return type("TrainerUnderTest", (*bases, Trainer), {})(
        model=model or family_model("llama", heads=4),
        args=TrainingArguments(**{**defaults, **settings}),
        train_dataset=datasets.Dataset.from_list(make_rows(rows)),
        eval_dataset=datasets.Dataset.from_list(make_rows(eval_rows, seed=5)) if eval_rows else None,
        data_collator=collator,
        **trainer_arguments,
    )


def train(trainer) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Train and evaluate: what was logged, and the weights."""
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def train_plainly(rank: int, world_size: int, case: Case):
    """The plain Trainer on one process, with the rows of all groups in a batch."""
    with launched(0, 1, ""), tempfile.TemporaryDirectory() as folder:
        return train(
            make_trainer(
                folder,
                rows=case.rows,
                eval_rows=case.eval_rows,
                per_device_train_batch_size=case.batch_size * case.groups,
                train_sampling_strategy=case.sampling,
            )
        )


def train_split(rank: int, world_size: int, case: Case, port: str):
    from easy_context import SequenceParallelTrainerMixin

    torch.manual_seed(rank)  # the user's own random numbers, which need not agree
    with launched(rank, world_size, port), tempfile.TemporaryDirectory() as folder:
        with patched(case.mode, sequence_parallel_size=case.sequence_size) as mesh:
            assert (mesh.data_size, mesh.sequence_size) == (case.groups, case.sequence_size)
            model = easy_context.apply_fused_loss(family_model("llama", heads=4))
            if case.checkpointing:
                easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
            try:
                trainer = make_trainer(
                    folder,
                    SequenceParallelTrainerMixin,
                    model=model,
                    rows=case.rows,
                    eval_rows=case.eval_rows,
                    per_device_train_batch_size=case.batch_size,
                    train_sampling_strategy=case.sampling,
                    gradient_checkpointing=case.checkpointing,
                )
                torch.manual_seed(rank)
                return train(trainer)
            finally:
                easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mode}-{case.groups}x{case.sequence_size}")
def test_losses_norms_and_weights_are_those_of_the_plain_trainer_on_one_process(pool, case):
    expected_logs, expected_weights = pool.run(train_plainly, 1, case, timeout=300)[0]
    for rank, (logs, weights) in enumerate(pool.run(train_split, case.world_size, case, free_port(), timeout=300)):
        assert len(logs) == len(expected_logs) == 3 * 2 + 2, case  # 3 steps an epoch, train's and evaluate's summaries
        for entry, expected in zip(logs, expected_logs, strict=True):
            for name in {"loss", "grad_norm", "train_loss", "eval_loss", "epoch", "learning_rate"} & expected.keys():
                assert entry[name] == pytest.approx(expected[name], rel=TOLERANCE), (case, rank, name, entry)
            assert entry["num_input_tokens_seen"] == expected["num_input_tokens_seen"], (case, rank)
        for name, weight in expected_weights.items():
            error = relative_error(weights[name], weight)
            assert error < TOLERANCE, f"{name} is off by {error:.2e} on rank {rank}: {case}"

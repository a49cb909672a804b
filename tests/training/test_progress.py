"""What the bar shows within a step that takes long."""

import pytest
import torch
from tiny_models import VOCABULARY, tiny_llama

from easy_context import (
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch,
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch,
)
from easy_context.common.interrupts import Interrupts
from easy_context.training import progress
from easy_context.training.progress import StepProgress
from easy_context.training.watch.watch import Watch


class Bar:
    def __init__(self):
        self.shown = []

    def set_description_str(self, text, refresh=True):
        self.shown.append(text)


def quiet() -> Watch:
    return Watch(0, Interrupts())


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_SIGNS", -1.0)


def step(model) -> None:
    ids = torch.zeros((1, 4), dtype=torch.int64)
    model(ids, labels=ids % VOCABULARY, use_cache=False).loss.backward()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_first_step_shows_micro_batches_and_layers_and_later_ones_only_micro_batches(impatient, checkpointing):
    model = tiny_llama().train()
    if checkpointing:
        apply_unsloth_offloaded_gradient_checkpoint_monkey_patch()
        model.gradient_checkpointing_enable()
    bar = Bar()
    shown = StepProgress(bar, quiet(), 0, enabled=True)
    shown.show_layers_of_first_step(torch.nn.ModuleDict({"module": model}))  # within a wrapper, as DeepSpeed's
    try:
        for number in (1, 2):
            shown.start_micro_batch(number, 2)
            step(model)
        backward = ["backward, layer 2 of 2", "backward, layer 1 of 2"] if checkpointing else []
        within = ["forward, layer 1 of 2", "forward, layer 2 of 2", *backward]
        expected = []
        for number in (1, 2):
            expected += [f"micro-batch {number} of 2", *(f"micro-batch {number} of 2, {where}" for where in within)]
        assert bar.shown == expected
        shown.finish_step()
        bar.shown.clear()
        shown.start_micro_batch(1, 2)
        step(model)
        assert bar.shown == ["micro-batch 1 of 2"]
    finally:
        remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()


def test_short_steps_and_other_processes_show_nothing(impatient, monkeypatch):
    bar = Bar()
    StepProgress(bar, quiet(), 0, enabled=False).start_micro_batch(1, 2)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_SIGNS", 60.0)
    StepProgress(bar, quiet(), 0, enabled=True).start_micro_batch(1, 2)
    assert bar.shown == []


def test_what_was_shown_is_taken_away_after_the_step(impatient):
    bar = Bar()
    shown = StepProgress(bar, quiet(), 0, enabled=True)
    shown.start_micro_batch(1, 1)
    shown.finish_step()
    assert bar.shown == ["micro-batch 1 of 1", ""]

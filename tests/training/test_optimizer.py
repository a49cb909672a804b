"""The course of the learning rate, and which parameters decay."""

import pytest
import torch

from easy_context.training.arguments import Arguments
from easy_context.training.optimizer import parameter_groups, warmup_then


def factors(steps, **settings):
    factor = warmup_then(Arguments(**settings))
    return [factor(step) for step in range(steps)]


def test_constant_is_constant_from_the_first_step():
    assert factors(5, max_train_steps=5) == [1.0] * 5


def test_warm_up_rises_linearly_and_its_first_step_trains():
    assert factors(6, warmup_steps=3, max_train_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_decay_falls_from_one_and_never_reaches_zero_while_training(name):
    values = factors(10, warmup_steps=2, lr_scheduler=name, max_train_steps=10)
    assert values[2] == 1.0
    assert all(a > b for a, b in zip(values[2:], values[3:], strict=False))
    assert 0 < values[-1] < 0.2
    middle = values[6]  # half of the 8 steps after warm-up
    assert middle == pytest.approx(0.5)
    beyond = factors(15, warmup_steps=2, lr_scheduler=name, max_train_steps=10)[10:]
    assert beyond == pytest.approx([0.0] * 5, abs=1e-12)


def test_warm_up_longer_than_the_run_divides_by_nothing():
    assert factors(3, warmup_steps=9, max_train_steps=3, lr_scheduler="cosine") == pytest.approx([0.1, 0.2, 0.3])


def test_matrices_decay_and_vectors_do_not():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    model[0].weight.requires_grad_(True)
    matrices, vectors = parameter_groups(model, 0.1)
    assert matrices["weight_decay"] == 0.1 and [p.shape for p in matrices["params"]] == [(2, 3)]
    assert vectors["weight_decay"] == 0.0 and [p.shape for p in vectors["params"]] == [(2,), (2,), (2,)]
    for parameter in model.parameters():  # as ZeRO-3 leaves them: the shape is elsewhere
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1, 3]
    model[0].weight.requires_grad_(False)
    (vectors,) = parameter_groups(model, 0.1)  # DeepSpeed could not take an empty group
    assert vectors["weight_decay"] == 0.0

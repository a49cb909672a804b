"""Gradient checkpointing under every mode: identical gradients, and attention and its collectives run once."""

import contextlib

import pytest
from family_models import (
    CHECKPOINTING_SETTINGS,
    FAMILIES,
    assert_identical,
    checkpointing,
    counted_calls,
    family_model,
    patched,
    random_rows,
    sharded_step,
)

import easy_context
from easy_context.modes import MODES

LAYERS = 3


def step(mode, mesh, model, rows, settings: dict | None):
    """(loss, gradients, calls) of one step, checkpointed unless settings is None."""
    manager = contextlib.nullcontext() if settings is None else checkpointing(model, **settings)
    with manager, counted_calls() as calls:
        result = sharded_step(mode, mesh, model, *rows, fused=True)
    return result.loss, result.gradients, dict(calls)


def compare_settings(rank: int, world_size: int, mode: str, family: str, settings_list) -> None:
    heads = (8, 2) if world_size == 4 else (4, 2)
    with patched(mode, family, attn_kernel="cpu") as mesh:
        model = family_model(family, "sdpa", heads=heads[0], kv_heads=heads[1], layers=LAYERS)
        easy_context.apply_fused_loss(model)
        rows = random_rows(2 * mesh.data_size, 45)
        loss, gradients, calls = step(mode, mesh, model, rows, None)
        if mesh.sequence_size == 1:
            assert calls["forward"] == calls["backward"] == LAYERS
        for settings in settings_list:
            case = f"{mode} {family} W={world_size} {settings}"
            own_loss, own_gradients, own_calls = step(mode, mesh, model, rows, settings)
            assert own_loss == loss, case
            assert_identical(own_gradients, gradients, case)
            if settings["keep_attention"] == "none":
                assert own_calls["forward"] == 2 * calls["forward"], case
            else:
                assert own_calls == calls, f"{own_calls} instead of {calls}: {case}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_identical_and_attention_and_its_collectives_run_once(pool, mode, world_size):
    """One kernel forward a layer and step, or what the mode needs without checkpointing; not twice that."""
    pool.run(compare_settings, world_size, mode, "llama", CHECKPOINTING_SETTINGS)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_other_families(pool, family):
    pool.run(compare_settings, 2, "zigzag_ring_attn", family, CHECKPOINTING_SETTINGS[:1])


def compare_frozen(rank: int, world_size: int, mode: str) -> None:
    """One trainable projection over frozen embeddings; the layers below it have no backward at all."""
    with patched(mode, attn_kernel="cpu") as mesh:
        model = easy_context.apply_fused_loss(family_model("llama", layers=LAYERS))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1.self_attn.k_proj" in name)
        rows = random_rows(2 * mesh.data_size, 30)
        _, gradients, calls = step(mode, mesh, model, rows, None)
        assert len(gradients) == 1
        for settings in CHECKPOINTING_SETTINGS:
            _, own_gradients, own_calls = step(mode, mesh, model, rows, settings)
            assert_identical(own_gradients, gradients, f"{mode} {settings}")
            if settings["keep_attention"] != "none":
                assert own_calls["forward"] == calls["forward"], f"{mode} {settings}"


def test_a_frozen_base_on_several_ranks(pool):
    for mode in MODES:
        pool.run(compare_frozen, 2, mode)

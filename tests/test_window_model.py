"""Hugging Face models with sliding windows, their rows split, against the same plain model on one process."""

import dataclasses

import pytest
import torch
from family_models import assert_same_step, checkpointing, family_model, patched, plain_step, random_rows, sharded_step
from plain_attention import relative_error

from easy_context.memory.tiled_forward import tiled_forward
from easy_context.modes import MODES

TOLERANCE = 1e-5
LENGTH = 45  # is padded in every mode that splits
HEADS = {1: (4, 2), 2: (4, 2), 3: (6, 2), 4: (8, 2)}
WINDOWS = (4, 17, LENGTH - 1)
# Some layers with a window and some without, by either way to say so.
FAMILIES = {
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and how it runs; its text is the repro that a failing test prints."""

    mode: str
    family: str
    window: int
    heads: tuple[int, int]
    checkpointed: bool = False

    def model(self, attn_implementation: str):
        heads, kv_heads = self.heads
        settings = {**FAMILIES[self.family], "sliding_window": self.window}
        return family_model(self.family, attn_implementation, heads=heads, kv_heads=kv_heads, **settings)


def run_settings(rank: int, world_size: int, settings: list[Setting]) -> list:
    results = []
    for setting in settings:
        with patched(setting.mode, setting.family, attn_kernel="cpu") as mesh:
            model, rows = setting.model("sdpa"), random_rows(2 * mesh.data_size, LENGTH)
            if setting.checkpointed:
                with checkpointing(model, keep_attention="none"):
                    results.append(sharded_step(setting.mode, mesh, model, *rows))
            else:
                results.append(sharded_step(setting.mode, mesh, model, *rows))
    return results if rank == 0 else None


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), 4]
)
@pytest.mark.parametrize("mode", MODES)
def test_logits_loss_and_gradients_are_those_of_the_plain_model(pool, mode, world_size):
    heads = HEADS[world_size]
    settings = [
        Setting(mode, family, window, heads, checkpointed=i == 1)
        for i, (family, window) in enumerate(zip(FAMILIES, WINDOWS, strict=True))
    ]
    for setting, actual in zip(settings, pool.run(run_settings, world_size, settings)[0], strict=True):
        rows = random_rows(2 * (world_size if mode == "data_parallel" else 1), LENGTH)
        expected = plain_step(setting.model("eager"), *rows)
        assert_same_step(actual, expected, TOLERANCE, f"W={world_size} {setting}")


def test_a_window_matters_and_includes_the_tokens_own_key():
    """Windows one token apart give other logits, so that parity with the plain model pins its convention."""
    ids, _ = random_rows(1, LENGTH)
    with torch.no_grad():
        logits = [family_model("mistral", sliding_window=window)(ids).logits for window in (4, 5, LENGTH, None)]
    assert relative_error(logits[0], logits[1]) > 0.01
    assert torch.equal(logits[2], logits[3])


def test_a_window_that_is_switched_off_hides_nothing():
    ids, _ = random_rows(1, LENGTH)
    with patched("zigzag_ring_attn", "qwen2"), torch.no_grad():
        off = family_model("qwen2", sliding_window=4, use_sliding_window=False)(ids).logits
        assert torch.equal(off, family_model("qwen2")(ids).logits)


def test_a_forward_pass_by_tiles_keeps_the_window():
    ids, _ = random_rows(1, LENGTH)
    model = family_model("qwen2", sliding_window=4, **FAMILIES["qwen2"]).eval()
    with torch.no_grad():
        expected = model.base_model(ids).last_hidden_state
        with patched("data_parallel", "qwen2", attn_kernel="cpu"), tiled_forward(model.base_model, 7):
            actual = model.base_model(ids, use_cache=False).last_hidden_state
    assert relative_error(actual, expected) < TOLERANCE

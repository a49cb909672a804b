"""The forecast of a forward pass by tiles beside the bytes that such a pass holds on a CPU."""

import pytest
import torch
from family_models import family_model, patched, random_rows
from tensor_sizes import LivePeak

from easy_context.evaluation.scorer import Scorer
from easy_context.memory.forecast import Load, Shape
from easy_context.memory.forward_forecast import forward_memory
from easy_context.modes import MODES

GIB = 2**30
LLAMA_8B = Shape(4096, 14336, 4096, 1024, 32, 8, 32, 128256, False)
RATIOS_OF_8B = {"hidden_size": 128, "intermediate_size": 448, "heads": 8, "kv_heads": 2, "head_dim": 16}
RATIOS_OF_0_6B = {"hidden_size": 64, "intermediate_size": 192, "heads": 8, "kv_heads": 4, "head_dim": 16}


def held_and_forecast(mode, sizes, dtype, tokens, tile_size, loss_chunk) -> tuple[float, float]:
    """Return the bytes that scoring a row holds beside the weights, and the forecast."""
    model = family_model("qwen3", layers=3, max_position_embeddings=8192, **sizes).eval().to(dtype)
    with patched(mode, "qwen3", attn_kernel="cpu") as mesh:
        ids, targets = random_rows(1, tokens * mesh.sequence_size)
        scorer = Scorer(model, mode, mesh, torch.device("cpu"), loss_chunk, tile_size)
        with LivePeak() as seen:
            scorer.token_losses(ids, targets)
        load = Load(tokens, tokens * mesh.sequence_size, dtype.itemsize, kernel="cpu")
        parts = forward_memory(Shape.of(model.config), load, mesh.sequence_size, tile_size, loss_chunk)
    return seen.peak, sum(parts.values()) - parts["weights"]


@pytest.mark.parametrize("sizes", [RATIOS_OF_8B, RATIOS_OF_0_6B])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_size", [8, 512])
def test_one_process_holds_what_is_forecast(sizes, dtype, tile_size):
    """Attention or, in one tile, the MLP takes most."""
    held, forecast = held_and_forecast("data_parallel", sizes, dtype, 512, tile_size, 16)
    assert held == pytest.approx(forecast, rel=0.1)


def test_the_loss_can_take_most():
    sizes = RATIOS_OF_8B | {"vocab_size": 4000}
    held, forecast = held_and_forecast("data_parallel", sizes, torch.float32, 256, 16, 256)
    assert held == pytest.approx(forecast, rel=0.1)


def split_row_on_rank(rank: int, size: int, mode: str) -> tuple[float, float]:
    return held_and_forecast(mode, RATIOS_OF_8B, torch.float32, 256, 8, 16)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "data_parallel"])
def test_processes_that_share_a_row_hold_no_more_than_is_forecast(pool, mode, size):
    pairs = pool.run(split_row_on_rank, size, mode)
    most, forecast = max(held for held, _ in pairs), pairs[0][1]
    assert 0.65 * forecast < most < 1.05 * forecast


def test_a_million_tokens_of_an_8b_shape_fit_one_card():
    """In units of a hidden-sized tensor of 8 GiB: 1 is kept, attention takes 2.5; the weights are 15 GiB."""
    million = forward_memory(LLAMA_8B, Load(2**20, 2**20), 1, 16384, 1024)
    assert million["weights"] / GIB == pytest.approx(15, abs=0.1)
    assert million["hidden states"] / (8 * GIB) == pytest.approx(1, abs=0.1)
    assert million["attention"] / (8 * GIB) == pytest.approx(2.5, abs=0.05)
    cudnn = forward_memory(LLAMA_8B, Load(2**20, 2**20, kernel="cudnn"), 1, 16384, 1024)
    assert cudnn["attention"] / million["attention"] == pytest.approx(1.5, abs=0.01)
    assert "loss" in forward_memory(LLAMA_8B, Load(4096, 4096), 1, 16384, 1024)
    assert "MLP" in forward_memory(LLAMA_8B, Load(16384, 16384), 1, 16384, 1024)

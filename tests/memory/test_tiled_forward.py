"""Forward passes by tiles: the values of plain ones, in every mode and family, and less memory."""

import contextlib

import pytest
import torch
from family_models import FAMILIES, VOCABULARY, family_model, patched, random_rows
from tensor_sizes import LivePeak

import easy_context
from easy_context.memory.tiled_forward import tiled_forward
from easy_context.modes import MODES
from easy_context.shards import shard_batch

ROW = 96
DOCUMENTS = [[0, 5, 40, 41], [0, 50]]  # where they start in each of two rows
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
MODELS: dict = {}


def model_of(family: str):
    if family not in MODELS:
        MODELS[family] = family_model(family).eval()
    return MODELS[family]


@torch.no_grad()
def hidden_states(model, tile_size: int | None = None, **inputs) -> torch.Tensor:
    with contextlib.nullcontext() if tile_size is None else tiled_forward(model.base_model, tile_size):
        return model.base_model(**inputs, use_cache=False).last_hidden_state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tile_size", [1, 7, ROW, 1000])
def test_every_family_gives_its_plain_hidden_states(family, tile_size):
    ids, _ = random_rows(2, ROW)
    with patched("data_parallel", family, attn_kernel="cpu"):
        plain = hidden_states(model_of(family), input_ids=ids)
        torch.testing.assert_close(hidden_states(model_of(family), tile_size, input_ids=ids), plain, **TOLERANCE)


def test_a_layer_s_sliding_window_is_that_of_the_whole_row():
    model, (ids, _) = family_model("mistral", sliding_window=20).eval(), random_rows(2, ROW)
    with patched("data_parallel", "mistral", attn_kernel="cpu"):
        plain = hidden_states(model, input_ids=ids)
        torch.testing.assert_close(hidden_states(model, 7, input_ids=ids), plain, **TOLERANCE)
        assert not torch.allclose(hidden_states(model_of("mistral"), 7, input_ids=ids), plain, **TOLERANCE)


def split_rows_on_rank(rank: int, size: int, mode: str) -> None:
    model, (ids, targets) = model_of("qwen3"), random_rows(2, ROW)
    with patched("data_parallel", "qwen3", attn_kernel="cpu"):
        expected = hidden_states(model, input_ids=ids)
    with patched(mode, "qwen3", attn_kernel="cpu") as mesh:
        for documents in (None, DOCUMENTS):
            shard = shard_batch(mode, ids, targets, mesh, "cpu", documents=documents)
            shard.pop("shift_labels")
            plain, by_tiles = (hidden_states(model, tile, **shard) for tile in (None, 7))
            torch.testing.assert_close(by_tiles, plain, **TOLERANCE)
            if documents is None and mode != "data_parallel":
                whole = easy_context.gather_seq_parallel_outputs(mode, by_tiles, length=ROW)
                torch.testing.assert_close(whole, expected, **TOLERANCE)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_hidden_states_of_plain_passes_on_split_and_packed_rows(pool, mode, size):
    if size == 1:
        split_rows_on_rank(0, 1, mode)
    else:
        pool.run(split_rows_on_rank, size, mode)


def test_passes_with_gradients_and_later_ones_are_plain():
    model, (ids, _) = model_of("llama"), random_rows(1, ROW)
    with patched("data_parallel", attn_kernel="cpu"):
        plain = hidden_states(model, input_ids=ids)
        with tiled_forward(model.base_model, 7):
            model(ids, use_cache=False).logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert not any("forward" in vars(module) for module in model.modules())
        with LivePeak() as seen:
            assert torch.equal(hidden_states(model, input_ids=ids), plain)
    assert any(str([1, ROW, 48]) in name for name in seen.alive_at_peak)  # the whole MLP's


def test_a_tile_needs_a_token():
    with (
        pytest.raises(ValueError, match="tile_size must be a positive number of tokens, got 0"),
        tiled_forward(None, 0),
    ):
        pass


def ratios_of_8b(family: str = "llama", dtype: torch.dtype = torch.float32, layers: int = 3):
    """A tiny model with the ratios of Llama-3-8B's widths: 32 heads, 8 of keys, an MLP of 3.5 times the hidden size."""
    sizes = {"hidden_size": 128, "intermediate_size": 448, "heads": 32, "kv_heads": 8, "head_dim": 4}
    return family_model(family, layers=layers, max_position_embeddings=8192, **sizes).eval().to(dtype)


@pytest.mark.parametrize("family, dtype", [("llama", torch.float32), ("qwen3", torch.bfloat16)])
def test_a_pass_holds_four_hidden_sized_tensors_where_it_held_fourteen(family, dtype):
    """The input, q, k and v, and attention's output: 3.5 times 128 numbers a token.

    The log-sum-exp of 32 heads and RoPE's tables are 0.3 to 0.6 of it here; with heads of 128 they are 1/16.
    """
    tokens = 1024
    unit = tokens * 128 * dtype.itemsize
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    model = ratios_of_8b(family, dtype)
    peaks = {}
    with patched("data_parallel", family, attn_kernel="cpu"):
        for tile_size in (None, 32):
            with LivePeak() as seen:
                hidden_states(model, tile_size, input_ids=ids)
            peaks[tile_size] = seen.peak / unit
    assert 14 < peaks[None] < 15
    assert 3.5 < peaks[32] < 4.2

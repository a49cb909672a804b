"""A kernel under a sliding window, and the tiles that a window is cut into."""

import random

import pytest
import torch
from packed_rows import documents_apart, packed_mask, random_starts
from plain_attention import attention_with_gradients, random_inputs, relative_error

from easy_context.kernels import FULL, AttentionMask, _kernel, select_kernel
from easy_context.kernels.tiles import window_tiles

NAMES = ("out", "lse", "dq", "dk", "dv")


def results_of(kernel, q, k, v, dout, scale, mask) -> dict[str, torch.Tensor]:
    out, lse = kernel.forward(q, k, v, scale, mask)
    return dict(zip(NAMES, (out, lse, *kernel.backward(dout, q, k, v, out, lse, scale, mask)), strict=True))


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("window", [2, 3, 7, 20, 36, 37, 50])
def test_a_window_is_as_plain_attention_with_one(name, window):
    """Windows that divide the row of 37 tokens and that do not, up to longer ones."""
    for batch, kv_heads in ((1, 4), (2, 2)):
        q, k, v, dout = random_inputs(window, batch, 37, 37, 4, kv_heads, 16)
        expected = attention_with_gradients(q, k, v, dout, 0.3, window=window)
        for what, actual in results_of(_kernel(name), q, k, v, dout, 0.3, AttentionMask(window=window)).items():
            assert relative_error(actual, getattr(expected, what)) < 1e-5, (what, batch)


def test_a_window_of_one_token_gives_its_own_value():
    """All scores are those of the query's own key, so that q and k have no gradient."""
    q, k, v, dout = random_inputs(40, 2, 9, 9, 4, 4, 8)
    results = results_of(_kernel("cpu"), q, k, v, dout, 0.3, AttentionMask(window=1))
    torch.testing.assert_close(results["out"], v)
    torch.testing.assert_close(results["dv"], dout)
    assert max(results["dq"].abs().max(), results["dk"].abs().max()) < 1e-5


def test_a_window_stays_within_documents():
    rng = random.Random(41)
    for batch in (1, 2, 3):
        starts, window = random_starts(rng, batch, 40), rng.randint(2, 20)
        q, k, v, dout = random_inputs(41, batch, 40, 40, 4, 2, 8)
        expected = documents_apart(q, k, v, dout, 0.3, starts, window)
        for what, actual in results_of(_kernel("cpu"), q, k, v, dout, 0.3, packed_mask(starts, 40, window)).items():
            assert relative_error(actual, getattr(expected, what)) < 1e-5, (what, starts, window)


def test_bfloat16_is_as_exact_as_without_a_window():
    """At most 1.5 times the error of the kernel on the row without a window: sums over tiles are float32."""
    q, k, v, dout = random_inputs(42, 1, 200, 200, 4, 2, 16, torch.bfloat16)
    errors = {}
    for window in (None, 23, 64):
        expected = attention_with_gradients(q, k, v, dout, 0.3, window=window)
        results = results_of(_kernel("cpu"), q, k, v, dout, 0.3, AttentionMask(window=window))
        errors[window] = {what: relative_error(actual, getattr(expected, what)) for what, actual in results.items()}
        for what, error in errors[window].items():
            assert error <= max(1.5 * errors[None][what], 1e-5), (what, window)


def seen_by_tiles(tiles, queries: int, keys: int, row: int = 0) -> torch.Tensor:
    """How often each pair of a block is computed."""
    count = torch.zeros(queries, keys, dtype=torch.int64)
    for tile in tiles:
        if tile.row in (None, row):
            pairs = torch.ones_like(count[tile.queries, tile.keys])
            assert tile.shape == "full" or pairs.shape[0] == pairs.shape[1]
            count[tile.queries, tile.keys] += {"full": pairs, "causal": pairs.tril(), "from_own": pairs.triu()}[
                tile.shape
            ]
    return count


def test_tiles_hold_each_pair_of_a_window_once():
    """In blocks of every mode: a rank with itself and with others, zigzag and contiguous, documents or none."""
    rng = random.Random(43)
    for _ in range(400):
        size, chunk = rng.randint(1, 4), rng.randint(1, 10)
        length = 2 * size * chunk
        window = rng.randint(1, length + 2)
        (starts,) = random_starts(rng, 1, length, edges=2 * size) if rng.random() < 0.5 else ((0,),)
        mask = packed_mask((starts,), length, window) if len(starts) > 1 else AttentionMask(window=window)
        document = torch.zeros(length, dtype=torch.int64)
        document[list(starts[1:])] = 1
        document = document.cumsum(0)
        parts = []
        for _ in range(2):
            rank = rng.randrange(size)
            parts.append(
                (range(rank * chunk, (rank + 1) * chunk), range(length - (rank + 1) * chunk, length - rank * chunk))
            )
        queries, keys = parts
        at_q, at_k = (torch.tensor([place for part in each for place in part]) for each in parts)
        distance = at_q[:, None] - at_k
        sees = (distance >= 0) & (distance < window) & (document[at_q][:, None] == document[at_k])
        case = queries, keys, window, starts
        assert torch.equal(
            seen_by_tiles(window_tiles(window, mask.documents, queries, keys), *sees.shape), sees.long()
        ), case
        if queries != keys:
            block, in_block = mask.block(queries, keys), torch.zeros_like(sees, dtype=torch.int64)
            if block is not None:
                view = in_block[block.queries, block.keys]
                view += 1 if block.mask == FULL else seen_by_tiles(block.mask.tiles, *view.shape)
            assert torch.equal(in_block, sees.long()), case


def test_a_window_that_hides_nothing_of_a_block_leaves_plain_masks():
    mask = AttentionMask(window=8)
    assert mask.among((range(4, 12),)) == AttentionMask()
    assert mask.block((range(4, 8),), (range(1, 4),)).mask == FULL
    assert mask.block((range(11, 14),), (range(4),)) is None


def test_a_window_asks_for_a_causal_row():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="window=2 asks for a causal mask"):
        _kernel("cpu").forward(x, x, x, 1.0, AttentionMask(causal=False, window=2))
    with pytest.raises(ValueError, match="as many keys as queries"):
        _kernel("cpu").forward(x, x[:, :3], x[:, :3], 1.0, AttentionMask(window=2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_attn_4", "cudnn", "flash_attn", "torch_flash"])
def test_windows_on_gpu(name):
    """Within 1.5 times the error of the same kernel without a window."""
    try:
        kernel = select_kernel(name, torch.device("cuda"), torch.bfloat16, 64)
    except ValueError as error:
        pytest.skip(str(error))
    q, k, v, dout = random_inputs(44, 2, 700, 700, 8, 2, 64, torch.bfloat16, "cuda")
    limits = {}
    for window in (None, 64, 129, 500):
        expected = attention_with_gradients(q, k, v, dout, 0.2, window=window)
        for what, actual in results_of(kernel, q, k, v, dout, 0.2, AttentionMask(window=window)).items():
            error = relative_error(actual, getattr(expected, what))
            assert error <= max(1.5 * limits.setdefault(what, error), 1e-5), (what, window)

"""Sums and merges of more than two terms are made in float32, whatever the dtype of the tensors.

A stand-in for a kernel returns the same numbers, representable in bfloat16, in every dtype. So a mode run in bfloat16
must give what it gives in float64, rounded once: an intermediate result in bfloat16 shows in hundreds of elements.
"""

import pytest
import torch

from easy_context.kernels import AttentionMask
from easy_context.kernels.merge import merge_block_
from easy_context.mesh import CurrentMesh
from easy_context.modes import MODES, build_mode
from easy_context.modes.base import accumulator

SPLITTING_MODES = tuple(name for name in MODES if name != "data_parallel")
HEADS, DIM = 12, 8
KV_HEADS = {name: 1 for name in SPLITTING_MODES}  # ulysses_attn repeats it and sums the copies' gradients
KV_HEADS["usp_attn"] = 6  # no copies: the ring rounds their gradients, as a kernel does, before they are summed


class BlocksOfRandomNumbers:
    """Stands in for a kernel: call n of a rank gives the same numbers in every run, and no input matters but shapes."""

    name = "random"

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(rank)
        self._dtype = dtype

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(torch.bfloat16).to(self._dtype)

    def forward(self, q, k, v, scale, mask):
        lse = self._numbers(q.shape[0], q.shape[2], q.shape[1])
        return self._numbers(*q.shape), lse.to(torch.promote_types(self._dtype, torch.float32))

    def backward(self, dout, q, k, v, out, lse, scale, mask):
        assert lse.is_contiguous(), "some backends read it as if it were"
        return tuple(self._numbers(*x.shape) for x in (q, k, v))


def results_in_both_dtypes(rank: int, world_size: int, name: str) -> list[tuple[torch.Tensor, ...]]:
    """(out, lse, dq, dk, dv) of this rank in bfloat16 and in float64."""
    mode = build_mode(name, CurrentMesh(ring_degree=lambda size: 2 if name == "usp_attn" and size % 2 == 0 else 1))
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        tokens = 2 * mode.multiple_of
        kv_heads = KV_HEADS[name]
        q, k, v = (torch.zeros(1, tokens, heads, DIM, dtype=dtype) for heads in (HEADS, kv_heads, kv_heads))
        settings = {"scale": 1.0, "mask": AttentionMask()}
        out, (lse,) = mode.forward(q, k, v, kernel=BlocksOfRandomNumbers(rank, dtype), **settings)
        # out and lse are not read by the stand-in; the same ones for both dtypes.
        grads = mode.backward(q, q, k, v, q, (lse,), kernel=BlocksOfRandomNumbers(rank, dtype), **settings)
        results.append((out, lse, *grads))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
@pytest.mark.parametrize("name", SPLITTING_MODES)
def test_a_mode_rounds_its_sums_once(pool, name, world_size):
    for rank, (half, wide) in enumerate(pool.run(results_in_both_dtypes, world_size, name)):
        for what, actual, exact in zip(("out", "lse", "dq", "dk", "dv"), half, wide, strict=True):
            case = f"{what} of {name}, W={world_size} rank={rank}"
            if what == "lse":
                assert actual.dtype == torch.float32 and (actual - exact).abs().max() < 1e-6, case
                continue
            assert actual.dtype == torch.bfloat16 and exact.dtype == torch.float64
            # An exact value may lie so near the middle of two bfloat16 numbers that float32 rounds it to the other one.
            different = (actual != exact.to(torch.bfloat16)).sum().item()
            assert different <= actual.numel() // 500, f"{different} of {actual.numel()} elements of {case}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_more_than_two_terms_are_accumulated_in_float32(dtype):
    first = torch.zeros(2, dtype=dtype)
    assert accumulator(first, 2) is first, "a sum of two is rounded once either way"
    for terms in (3, 4, 5, 8):
        assert accumulator(first, terms).dtype == torch.promote_types(dtype, torch.float32)


def random_blocks(dtype: torch.dtype, lse_dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """out, lse, block_out, block_lse; in one head each no key was seen by the first, the second, neither."""
    generator = torch.Generator().manual_seed(3)
    outs = torch.randn(2, 2, 50, 4, 16, generator=generator).to(dtype)
    lses = (8 * torch.randn(2, 2, 4, 50, generator=generator)).to(lse_dtype)
    for block, head in ((0, 0), (1, 1), (0, 2), (1, 2)):
        outs[block, :, :, head] = 0
        lses[block, :, head] = -torch.inf
    return [outs[0], lses[0], outs[1], lses[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_merge_is_computed_wider_and_rounded_once(dtype):
    out, lse, block_out, block_lse = random_blocks(dtype, torch.promote_types(dtype, torch.float32))
    total = torch.logaddexp(lse.double(), block_lse.double())
    shares = [(x.double() - total).exp().nan_to_num(nan=0.0).transpose(1, 2)[..., None] for x in (lse, block_lse)]
    expected = shares[0] * out.double() + shares[1] * block_out.double()
    kept = block_out.clone(), block_lse.clone()
    merge_block_(out, lse, block_out, block_lse)
    assert torch.equal(block_out, kept[0]) and torch.equal(block_lse, kept[1])
    assert torch.isneginf(lse[:, 2]).all() and (out[:, :, 2] == 0).all()
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=0)
    if dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)
    else:
        assert (out != expected.to(dtype)).sum() <= out.numel() // 500  # as above


@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_a_merge_takes_the_block_that_outweighs_the_other(gap):
    """Neither weight may overflow."""
    out, lse, block_out, block_lse = (x[:, ..., 3:] if x.dim() == 3 else x for x in random_blocks(torch.float32))
    lse, block_lse = torch.zeros(2, 4, 50), torch.full((2, 4, 50), gap)
    expected = (block_out if gap > 0 else out).clone()
    merge_block_(out, lse, block_out, block_lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, torch.full((2, 4, 50), max(gap, 0.0)))

"""Blocks that are too large for a backend's indices are computed in parts: the parts cover the block and fit."""

import random
import sys

import pytest
import torch
from plain_attention import attention_with_gradients, random_inputs, relative_error

from easy_context.kernels import AttentionMask, select_kernel
from easy_context.kernels.base import AttentionKernel
from easy_context.kernels.cpu import CpuKernel
from easy_context.kernels.splitting import parts_within

CAUSAL, FULL = AttentionMask(causal=True), AttentionMask(causal=False)


def random_block(rng: random.Random) -> tuple[int, int, int, int, int]:
    """(batch, seq_q, seq_k, heads, kv_heads), small."""
    kv_heads = rng.choice([1, 2, 3, 5])
    return rng.randint(1, 5), rng.randint(1, 9), rng.randint(1, 9), kv_heads * rng.choice([1, 2, 3, 7]), kv_heads


def test_parts_cover_each_query_head_once_and_fit():
    rng = random.Random(31)
    cut_by_heads = cut_in_groups = 0
    for _ in range(300):
        batch, seq_q, seq_k, heads, kv_heads = random_block(rng)
        q, k = torch.empty(batch, seq_q, heads, 8), torch.empty(batch, seq_k, kv_heads, 8)
        limit = rng.randint(8 * max(seq_q, seq_k), max(q.numel(), k.numel(), 8 * max(seq_q, seq_k)))
        seen = torch.zeros(batch, heads, dtype=torch.int64)
        parts = parts_within(limit, q, k)
        for part in parts:
            (part_q,), (part_k,) = part.of_queries(q), part.of_keys(k)
            assert 0 < part_q.numel() <= limit and 0 < part_k.numel() <= limit
            seen[part.rows, part.heads] += 1
            # Within the part, query head h reads key head h // (heads / kv_heads), as in the whole block.
            repeats = part_q.shape[2] // part_k.shape[2]
            for head in range(part.heads.start, part.heads.stop):
                read = part.kv_heads.start + (head - part.heads.start) // repeats
                assert read == head // (heads // kv_heads)
        assert (seen == 1).all()
        part_heads = parts[0].heads.stop - parts[0].heads.start
        cut_by_heads += part_heads < heads
        cut_in_groups += part_heads < heads // kv_heads
    assert cut_by_heads > 50 and cut_in_groups > 20  # the draws reach every case


def test_parts_give_the_results_of_the_whole_block(monkeypatch):
    rng = random.Random(32)
    kernel = CpuKernel()
    for _ in range(60):
        batch, seq_q, seq_k, heads, kv_heads = random_block(rng)
        mask = rng.choice([CAUSAL, FULL])
        seq_k = seq_q if mask.causal else seq_k
        q, k, v, dout = random_inputs(rng.randrange(1000), batch, seq_q, seq_k, heads, kv_heads, 8)
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)  # strides as a model gives them
        whole = kernel.forward(q, k, v, 0.3, mask)
        whole = *whole, *kernel.backward(dout, q, k, v, *whole, 0.3, mask)
        monkeypatch.setattr(CpuKernel, "max_elements", rng.randint(8 * max(seq_q, seq_k), q.numel() + k.numel()))
        in_parts = kernel.forward(q, k, v, 0.3, mask)
        in_parts = *in_parts, *kernel.backward(dout, q, k, v, *in_parts, 0.3, mask)
        monkeypatch.setattr(CpuKernel, "max_elements", AttentionKernel.max_elements)
        for actual, expected in zip(in_parts, whole, strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_backward_in_parts_gives_the_same_gradients_with_smaller_sums(monkeypatch):
    rng = random.Random(33)
    kernel, largest = CpuKernel(), []

    def watched(self, dout, q, k, *others, whole=CpuKernel._backward):
        largest.append(q.numel())
        return whole(self, dout, q, k, *others)

    monkeypatch.setattr(CpuKernel, "_backward", watched)
    parts = 0
    for _ in range(60):
        batch, seq_q, seq_k, heads, kv_heads = random_block(rng)
        q, k, v, dout = random_inputs(rng.randrange(1000), batch, seq_q, seq_k, heads, kv_heads, 8)
        out, lse = kernel.forward(q, k, v, 0.3, FULL)
        whole = kernel.backward(dout, q, k, v, out, lse, 0.3, FULL)
        limit = rng.randint(1, q.numel())
        monkeypatch.setattr(CpuKernel, "backward_elements", limit)
        largest.clear()
        in_parts = kernel.backward(dout, q, k, v, out, lse, 0.3, FULL)
        monkeypatch.setattr(CpuKernel, "backward_elements", sys.maxsize)
        assert max(largest) <= max(limit, seq_q * heads // kv_heads * 8, seq_k * 8)
        parts += len(largest) > 1
        for actual, expected in zip(in_parts, whole, strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert parts > 20


def test_a_backend_is_never_given_a_view_that_reaches_too_far(monkeypatch):
    """Slices of few elements, but of a large tensor: cuDNN is wrong for those too."""
    distances = []

    def note(*tensors):
        distances.extend((x[-1, -1, -1, -1].data_ptr() - x.data_ptr()) // x.element_size() for x in tensors)

    class Watching(CpuKernel):
        max_elements = 2000

        def _forward(self, q, k, v, scale, mask):
            note(q, k, v)
            return super()._forward(q, k, v, scale, mask)

        def _backward(self, dout, q, k, v, out, lse, scale, mask):
            note(dout, q, k, v, out)
            return super()._backward(dout, q, k, v, out, lse, scale, mask)

    tensors = random_inputs(36, 4, 40, 40, 8, 2, 8)
    for cut in (slice(None), slice(20, None)):  # a whole block of 10,240 elements, and its late half
        q, k, v, dout = (x[:, cut] for x in tensors)
        out, lse = Watching().forward(q, k, v, 0.3, CAUSAL)
        Watching().backward(dout, q, k, v, out, lse, 0.3, CAUSAL)
        expected, _ = CpuKernel().forward(q, k, v, 0.3, CAUSAL)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    few = [x[:, 30:32, :1] for x in tensors]  # fits by its elements; its rows lie 2560 apart
    out, lse = Watching().forward(*few[:3], 0.3, CAUSAL)
    Watching().backward(few[3], *few[:3], out, lse, 0.3, CAUSAL)
    assert max(distances) < 2000


def test_gradients_of_a_shared_key_head_are_summed_in_float32(monkeypatch):
    """One key head, 64 query heads, each in a part of its own: a bf16 sum would lose what the later parts add."""
    q, k, v, dout = random_inputs(33, 1, 24, 24, 64, 1, 16, torch.bfloat16)
    expected = attention_with_gradients(q, k, v, dout, 0.25)
    monkeypatch.setattr(CpuKernel, "max_elements", 24 * 16)
    kernel = CpuKernel()
    out, lse = kernel.forward(q, k, v, 0.25, CAUSAL)
    _, dk, dv = kernel.backward(dout, q, k, v, out, lse, 0.25, CAUSAL)
    assert relative_error(dk, expected.dk) < 4e-3 and relative_error(dv, expected.dv) < 4e-3


def test_a_head_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(CpuKernel, "max_elements", 100)
    q, k, v, _ = random_inputs(34, 1, 20, 20, 2, 2, 8)
    with pytest.raises(ValueError, match="one head of 20 tokens x 8 has more than the 100 elements"):
        CpuKernel().forward(q, k, v, 0.25, CAUSAL)


def compare_on_gpu(name: str, q, k, v, dout) -> None:
    """Against PyTorch's flash kernel, whole and at the far end, which 32-bit indices miss."""
    try:
        kernel = select_kernel(name, q.device, q.dtype, 128)
    except ValueError as reason:
        pytest.skip(str(reason))
    results = []
    for each in (kernel, select_kernel("torch_flash", q.device, q.dtype, 128)):
        out, lse = each.forward(q, k, v, 0.1, CAUSAL)
        results.append((out, *each.backward(dout, q, k, v, out, lse, 0.1, CAUSAL)))
    for what, actual, expected in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        for place in (slice(None), (-1, slice(None), slice(-8, None)), (slice(None), slice(-64, None))):
            error = (actual[place] - expected[place]).float().norm() / expected[place].float().norm()
            assert error < 1.2e-2, f"{what} at {place} is off by {error:.2e}"


def gpu_inputs(batch, length, heads, kv_heads):
    torch.manual_seed(35)
    return tuple(
        torch.randn(batch, length, count, 128, device="cuda", dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads, heads)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_attn_4", "cudnn"])
@pytest.mark.parametrize(
    "batch,length,heads,kv_heads",
    [(2064, 256, 32, 8), (1, 4160, 4096, 512), (1, 4160, 4096, 1), (3, 4160, 1376, 172)],
    ids=["rows", "heads", "one key head", "both"],
)
def test_more_than_two_to_the_31_elements_on_gpu(name, batch, length, heads, kv_heads):
    assert batch * length * heads * 128 > 2**31
    compare_on_gpu(name, *gpu_inputs(batch, length, heads, kv_heads))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_attn_4", "cudnn"])
def test_late_halves_that_reach_beyond_two_to_the_31_on_gpu(name):
    """As zigzag hands them over: few elements of a tensor of many."""
    q, k, v, dout = (x[:, 2080:] for x in gpu_inputs(4, 4160, 1248, 156))
    assert q.numel() < 2**31 < q[-1, -1, -1, -1].storage_offset() - q.storage_offset()
    compare_on_gpu(name, q, k, v, dout)

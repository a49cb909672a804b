"""A kernel within documents, and the bookkeeping of which slices of a block belong together."""

import random

import pytest
import torch
from packed_rows import documents_apart, packed_mask, random_starts
from plain_attention import random_inputs, relative_error

from easy_context.kernels import AttentionMask, _kernel, select_kernel
from easy_context.kernels.documents import Documents
from easy_context.kernels.merge import merge_block_
from easy_context.kernels.reference import ReferenceKernel

CAUSAL = AttentionMask()
PACKED_GPU_KERNELS = ("flash_attn_4", "flash_attn", "torch_flash")


class PackedReference(ReferenceKernel):
    """As the kernels for GPUs: all documents of a batch in one call, tokens laid end to end, some heads at a time."""

    takes_documents = True
    max_elements = 60 * 16 * 2

    def _forward_packed(self, q, k, v, scale, borders, longest):
        assert longest == borders.diff().max()
        parts = [self._forward(*(x[None, s] for x in (q, k, v)), scale, CAUSAL) for s in _slices(borders)]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=1)

    def _backward_packed(self, dout, q, k, v, out, lse, scale, borders, longest):
        parts = [
            self._backward(*(x[None, s] for x in (dout, q, k, v, out)), lse[None, :, s], scale, CAUSAL)
            for s in _slices(borders)
        ]
        return [torch.cat([part[i][0] for part in parts]) for i in range(3)]


def _slices(borders: torch.Tensor) -> list[slice]:
    return [slice(a, b) for a, b in zip(borders.tolist(), borders.tolist()[1:], strict=False)]


def errors_against_documents_apart(kernel, starts, device, dtype, shape, seed) -> dict[str, float]:
    """Relative norm of the error against float64; `shape` is (batch, length, heads, kv_heads, head_dim)."""
    batch, length, *rest = shape
    q, k, v, dout = random_inputs(seed, batch, length, length, *rest, dtype=dtype, device=device)
    scale, mask = 1.3 * rest[-1] ** -0.5, packed_mask(starts, length)
    expected = documents_apart(q, k, v, dout, scale, starts)
    out, lse = kernel.forward(q, k, v, scale, mask)
    gradients = kernel.backward(dout, q, k, v, out, lse, scale, mask)
    names = ("out", "lse", "dq", "dk", "dv")
    return {
        name: relative_error(actual, getattr(expected, name))
        for name, actual in zip(names, (out, lse, *gradients), strict=True)
    }


@pytest.mark.parametrize("kernel", [_kernel("cpu"), _kernel("reference"), PackedReference()], ids=lambda x: type(x))
def test_documents_are_as_if_each_were_alone(kernel):
    rng = random.Random(31)
    for batch, kv_heads in ((1, 2), (2, 4), (3, 1)):
        length = rng.randint(20, 60)
        starts = random_starts(rng, batch, length)
        shape = batch, length, 4, kv_heads, 16
        errors = errors_against_documents_apart(kernel, starts, "cpu", torch.float32, shape, 31)
        assert max(errors.values()) < 1e-5, (errors, starts)


@pytest.mark.parametrize("kernel", [_kernel("cpu"), PackedReference()], ids=lambda x: type(x))
def test_a_view_with_heads_first_is_taken(kernel):
    """As Hugging Face's layers give q, k and v."""
    q, k, v, dout = random_inputs(32, 2, 24, 24, 4, 2, 8)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)]
    mask = packed_mask(((0, 5, 9), (0, 20)), 24)
    expected, lse = kernel.forward(q, k, v, 0.3, mask)
    out, _ = kernel.forward(*views[:3], 0.3, mask)
    assert torch.equal(out, expected)
    gradients = kernel.backward(dout, q, k, v, out, lse, 0.3, mask)
    for actual, wanted in zip(kernel.backward(views[3], *views[:3], out, lse, 0.3, mask), gradients, strict=True):
        assert torch.equal(actual, wanted)


def test_a_block_without_keys_for_some_queries_merges_as_nothing():
    """Row 0 has a document from keys to queries, row 1 none: its out is 0, its lse -inf, which merges as nothing."""
    q, k, v, _ = random_inputs(33, 2, 8, 8, 2, 2, 8)
    block = packed_mask(((0, 4), (0, 8)), 16).block((range(8, 16),), (range(8),))
    assert (block.queries, block.keys) == (slice(0, 8), slice(4, 8))
    kernel = select_kernel("cpu", q.device, q.dtype, 8)
    out, lse = kernel.forward(q, k[:, block.keys], v[:, block.keys], 0.3, block.mask)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all() and torch.isfinite(lse[0]).all()
    for merged, merged_lse in ((torch.ones_like(out), torch.zeros_like(lse)), (out.clone(), lse.clone())):
        before, before_lse = merged[1].clone(), merged_lse[1].clone()
        merge_block_(merged, merged_lse, out, lse)
        assert torch.equal(merged[1], before) and torch.equal(merged_lse[1], before_lse)
        assert torch.isfinite(merged).all()
    gradients = kernel.backward(q, q, k[:, block.keys], v[:, block.keys], out, lse, 0.3, block.mask)
    assert all((grad[1] == 0).all() and torch.isfinite(grad).all() and (grad[0] != 0).any() for grad in gradients)


def test_a_block_off_the_diagonal_is_one_slice_of_each():
    """Every place where a border can lie, against a mask of all pairs."""
    rng, length = random.Random(34), 24
    for _ in range(200):
        (places,) = random_starts(rng, 1, length, edges=4)
        document = torch.zeros(length, dtype=torch.int64)
        document[list(places[1:])] = 1
        document = document.cumsum(0)
        mask = packed_mask((places,), length)
        for queries, keys in (
            ((range(12, 18),), (range(6, 12),)),
            ((range(3, 6), range(18, 21)), (range(3), range(21, 24))),  # zigzag: only the early chunk is seen
            ((range(3), range(21, 24)), (range(3, 6), range(18, 21))),  # only the late chunk sees anything
        ):
            at_q, at_k = (torch.tensor([place for part in parts for place in part]) for parts in (queries, keys))
            sees = (document[at_q][:, None] == document[at_k]) & (at_q[:, None] >= at_k)
            block = mask.block(queries, keys)
            if block is None:
                assert not sees.any(), (places, queries, keys)
                continue
            assert block.mask == AttentionMask(causal=False), "one row needs no mask inside of its slices"
            assert sees[block.queries, block.keys].all() and sees.sum() == sees[block.queries, block.keys].numel()


def test_a_row_of_one_document_is_plain():
    mask = packed_mask(((0,), (0,)), 12)
    assert mask.among((range(4), range(8, 12))) == AttentionMask()
    assert mask.block((range(4, 8),), (range(4),)) == AttentionMask().block((range(4, 8),), (range(4),))


def test_parts_are_made_once():
    """Every layer asks for the same ones."""
    documents = Documents.of_rows([(0, 3), (0, 7)], 12)
    first = documents.among((range(6),), (range(6),))
    assert documents.among((range(6),), (range(6),)) is first
    assert first.cumulative_lengths(torch.device("cpu"))[0] is first.cumulative_lengths(torch.device("cpu"))[0]
    borders, longest = first.joined.cumulative_lengths(torch.device("cpu"))
    assert (borders.tolist(), longest) == ([0, 3, 6, 12], 6)


@pytest.mark.parametrize("starts", [(), (1, 4), (0, 4, 4), (0, 5, 3), (0, 12), (0, -1)])
def test_starts_that_are_none_are_refused(starts):
    with pytest.raises(ValueError, match="(?s)row 1 start at.*0 first.*12 tokens"):
        Documents.of_rows([(0,), starts], 12)


@pytest.mark.parametrize("starts,length", [(((0, 3),), 8), (((0, 3), (0,)), 9)])
def test_documents_of_another_batch_are_refused(starts, length):
    x = torch.zeros(2, 8, 2, 8)
    with pytest.raises(
        ValueError, match=f"documents are given for {len(starts)} rows of {length} queries.*2 rows of 8"
    ):
        _kernel("cpu").forward(x, x, x, 1.0, packed_mask(starts, length))


def test_a_kernel_that_plans_anew_for_every_length_is_passed_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    what = torch.device("cuda"), torch.bfloat16, 128
    assert select_kernel("cudnn", *what).name == "cudnn"
    with pytest.raises(ValueError, match="cudnn.*anew for every length.*attn_kernel auto"):
        select_kernel("cudnn", *what, documents=True)
    assert select_kernel("auto", *what, documents=True).takes_documents


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PACKED_GPU_KERNELS)
def test_documents_on_gpu(name, head_dim):
    """Within 1.5 times the error of the same kernel on plain rows of that length."""
    try:
        kernel = select_kernel(name, torch.device("cuda"), torch.bfloat16, head_dim, documents=True)
    except ValueError as error:
        pytest.skip(str(error))
    rng = random.Random(35)
    for batch, heads, kv_heads in ((1, 4, 4), (2, 8, 2), (3, 4, 1)):
        shape = batch, rng.randint(300, 900), heads, kv_heads, head_dim
        plain = tuple((0,) for _ in range(batch))
        limits = errors_against_documents_apart(kernel, plain, "cuda", torch.bfloat16, shape, 35)
        errors = errors_against_documents_apart(
            kernel, random_starts(rng, batch, shape[1]), "cuda", torch.bfloat16, shape, 35
        )
        for what, error in errors.items():
            assert error < max(1.5 * limits[what], 1e-5), (what, errors, limits)

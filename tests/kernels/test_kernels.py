"""Every kernel against float64 attention: forward, backward, backward of one block out of several, selection.

The same tests run for CPU kernels everywhere and, marked `gpu`, for CUDA kernels where there is a device.
"""

import logging
import random
import sys

import pytest
import torch
from plain_attention import attention_with_gradients, merge, random_inputs, relative_error

from easy_context.kernels import KERNELS, AttentionMask, _kernel, check_kernel, select_kernel

CAUSAL, FULL = AttentionMask(causal=True), AttentionMask(causal=False)
CPU_KERNELS = ("reference", "cpu")
GPU_KERNELS = ("flash_attn_4", "cudnn", "torch_flash", "flash_attn")
# Relative norm against float64 on the same (rounded) inputs: a few roundings of the dtype. lse is float32 or wider, and
# its largest error is absolute.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
LSE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}

cpu_kernels = pytest.mark.parametrize("name", CPU_KERNELS)
gpu_kernels = pytest.mark.parametrize("name", GPU_KERNELS)


def heads_layouts(rng: random.Random) -> list[tuple[int, int]]:
    """(heads, kv_heads): equal, grouped, single."""
    heads = rng.choice([2, 3, 4])
    return [(heads, heads), (heads * 2, heads), (heads, 1)]


def kernel_or_skip(name: str, device: str, dtype: torch.dtype, head_dim: int):
    """The kernel, or a skip with the kernel's own reason why it cannot serve on this machine."""
    try:
        return select_kernel(name, torch.device(device), dtype, head_dim)
    except (ValueError, ImportError) as reason:
        pytest.skip(str(reason))


def run_kernel(kernel, q, k, v, dout, scale, mask):
    out, lse = kernel.forward(q, k, v, scale, mask)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype in (torch.float32, torch.float64)
    gradients = kernel.backward(dout, q, k, v, out, lse, scale, mask)
    for gradient, leaf in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == leaf.shape
    return out, lse, *gradients


def assert_close_to_float64(name, device, dtype, shape, seed):
    """Forward and backward, causal and full, of one kernel on random inputs of `shape`."""
    batch, length, heads, kv_heads, dim = shape
    kernel = kernel_or_skip(name, device, dtype, dim)
    assert name == kernel.name
    for mask, seq_k in ((CAUSAL, length), (FULL, length), (FULL, 2 * length + 3)):
        q, k, v, dout = random_inputs(seed, batch, length, seq_k, heads, kv_heads, dim, dtype, device)
        scale = dim**-0.5 * 1.3  # not the default, which a kernel might assume
        expected = attention_with_gradients(q, k, v, dout, scale, mask.causal)
        out, lse, *gradients = run_kernel(kernel, q, k, v, dout, scale, mask)
        case = f"seed={seed} {name} {dtype} {shape=} {mask=} {seq_k=}"
        assert (lse.double() - expected.lse).abs().max() < LSE_TOLERANCE[dtype], case
        for what, actual in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
            error = relative_error(actual, getattr(expected, what))
            if seq_k == 1 and what in ("dq", "dk"):  # one key: the right gradient is exactly 0
                error = (actual.double() - getattr(expected, what)).norm().item()
            assert error < TOLERANCE[dtype], f"{what} is off by {error:.2e}: {case}"


def assert_backward_accepts_merged(name, device, dtype, shape, seed):
    """Late queries over early keys (full) and late keys (causal): each block's backward gets the merged out and lse."""
    batch, length, heads, kv_heads, dim = shape
    kernel = kernel_or_skip(name, device, dtype, dim)
    scale = dim**-0.5
    q, k, v, dout = random_inputs(seed, batch, 2 * length, 2 * length, heads, kv_heads, dim, dtype, device)
    dout[:, :length] = 0  # the early queries are not part of this test
    expected = attention_with_gradients(q, k, v, dout, scale)

    q, dout = q[:, length:].contiguous(), dout[:, length:].contiguous()
    blocks = [(k[:, :length].contiguous(), v[:, :length].contiguous(), FULL)]
    blocks += [(k[:, length:].contiguous(), v[:, length:].contiguous(), CAUSAL)]
    out, lse = merge([kernel.forward(q, key, value, scale, mask) for key, value, mask in blocks])
    out, lse = out.to(dtype), lse.float()
    parts = [kernel.backward(dout, q, key, value, out, lse, scale, mask) for key, value, mask in blocks]

    case = f"seed={seed} {name} {dtype} {shape=}"
    actual = {
        "out": out,
        "dq": parts[0][0].double() + parts[1][0].double(),
        "dk": torch.cat([part[1] for part in parts], dim=1),
        "dv": torch.cat([part[2] for part in parts], dim=1),
    }
    for what, value in actual.items():
        reference = getattr(expected, what)
        reference = reference[:, length:] if what in ("out", "dq") else reference
        error = relative_error(value, reference)
        assert error < TOLERANCE[dtype], f"{what} is off by {error:.2e}: {case}"


@cpu_kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matches_float64_on_cpu(name, dtype):
    seed = 11
    rng = random.Random(seed)
    for batch in (1, 2):
        for heads, kv_heads in heads_layouts(rng):
            shape = (batch, rng.randint(1, 70), heads, kv_heads, rng.choice([8, 16, 24, 64]))
            assert_close_to_float64(name, "cpu", dtype, shape, seed)
    assert_close_to_float64(name, "cpu", dtype, (1, 1, 2, 1, 16), seed)
    assert_close_to_float64(name, "cpu", dtype, (1, 700, 2, 1, 32), seed)  # longer than a tile


@cpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_accepts_out_and_lse_of_several_blocks_on_cpu(name, dtype):
    rng = random.Random(12)
    for heads, kv_heads in heads_layouts(rng):
        assert_backward_accepts_merged(name, "cpu", dtype, (2, rng.randint(1, 60), heads, kv_heads, 16), 12)


@cpu_kernels
def test_strided_inputs_are_read_right(name):
    """Modes hand over slices and transposed views."""
    kernel = select_kernel(name, torch.device("cpu"), torch.float32, 16)
    tensors = random_inputs(13, 2, 24, 24, 4, 2, 16)
    expected = run_kernel(kernel, *tensors, 0.25, CAUSAL)
    views = [torch.cat([x, x], dim=1)[:, : x.shape[1]].transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    views = [torch.stack([x, x + 1], dim=-1)[..., 0] for x in views]
    for actual, reference in zip(run_kernel(kernel, *views, 0.25, CAUSAL), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-6, atol=1e-6)


@cpu_kernels
def test_large_scores_stay_finite(name):
    kernel = select_kernel(name, torch.device("cpu"), torch.float32, 16)
    q, k, v, dout = random_inputs(14, 1, 20, 20, 2, 2, 16)
    expected = attention_with_gradients(q * 40, k * 40, v, dout, 0.25)
    out, lse, *gradients = run_kernel(kernel, q * 40, k * 40, v, dout, 0.25, CAUSAL)
    assert relative_error(lse, expected.lse) < 1e-6
    # Scores near 1e3 carry 1e-4 of rounding themselves, which the exponential passes on.
    assert relative_error(out, expected.out) < 1e-3
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@cpu_kernels
def test_queries_without_keys_give_zero_and_minus_infinity(name):
    kernel = select_kernel(name, torch.device("cpu"), torch.float32, 16)
    q, k, v, dout = random_inputs(15, 2, 5, 0, 4, 2, 16)
    out, lse = kernel.forward(q, k, v, 0.25, FULL)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == (2, 4, 5) and (lse == float("-inf")).all()


@cpu_kernels
def test_causal_needs_equal_lengths(name):
    """Backends align unequal lengths differently, so none of them may guess."""
    kernel = select_kernel(name, torch.device("cpu"), torch.float32, 16)
    q, k, v, _ = random_inputs(16, 1, 4, 6, 2, 2, 16)
    with pytest.raises(ValueError, match="(?i)causal"):
        kernel.forward(q, k, v, 0.25, CAUSAL)


def test_mask_is_a_small_frozen_value():
    assert AttentionMask() == AttentionMask(causal=True, window=None)
    assert hash(AttentionMask()) == hash(AttentionMask())
    with pytest.raises(AttributeError):
        AttentionMask().causal = False


@pytest.mark.parametrize("name", KERNELS)
def test_the_table_of_kernels_names_what_its_files_hold(name):
    """The names stand there as text, so that --help need not import PyTorch."""
    assert _kernel(name).name == name


def test_auto_takes_the_first_kernel_that_can_serve():
    assert set(KERNELS) == {*CPU_KERNELS, *GPU_KERNELS}
    cpu = torch.device("cpu")
    assert select_kernel("auto", cpu, torch.float32, 64).name == "cpu"
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        chosen = select_kernel("auto", cpu, dtype, 64).name
        able = [
            n
            for n in KERNELS
            if n in CPU_KERNELS and not select_kernel(n, cpu, dtype, 64).unsupported_reason(cpu, dtype, 64)
        ]
        assert chosen == able[0]


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_a_named_kernel_that_cannot_serve_says_why(name):
    with pytest.raises(ValueError, match=f"(?is){name}.*(cuda|cpu|install)"):
        select_kernel(name, torch.device("cpu"), torch.float32, 64)


@pytest.mark.parametrize("name,broken", [("flash_attn_4", "flash_attn"), ("flash_attn", "flash_attn_2_cuda")])
def test_a_package_that_does_not_import_is_passed_over(name, broken, tmp_path, monkeypatch):
    """As a wheel built for another PyTorch: present, but its import fails."""
    (tmp_path / f"{broken}.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, broken, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = _kernel(name).unsupported_reason(torch.device("cuda"), torch.bfloat16, 128)
    assert "is installed but does not import (ImportError: undefined symbol: _ZN3c104cuda)" in reason


def test_the_log_names_the_kernel_after_a_check_too(caplog):
    """train.py checks the kernel before its log is set up."""
    select_kernel.cache_clear()
    what = torch.device("cpu"), torch.float32, 64
    with caplog.at_level(logging.INFO, "easy_context"):
        check_kernel("auto", *what)
        assert not caplog.messages
        select_kernel("auto", *what)
        select_kernel("auto", *what)
    assert caplog.messages == ["attention kernel: cpu"]


def test_an_unknown_kernel_is_named_with_the_valid_ones():
    with pytest.raises(ValueError, match="(?s)flash_attn_9.*reference"):
        select_kernel("flash_attn_9", torch.device("cpu"), torch.float32, 64)


@pytest.mark.gpu
@gpu_kernels
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matches_float64_on_gpu(name, head_dim, dtype):
    rng = random.Random(21)
    for heads, kv_heads in ((4, 4), (8, 2), (4, 1)):
        for length in (64, 256, rng.randint(65, 500)):
            assert_close_to_float64(name, "cuda", dtype, (rng.choice([1, 2]), length, heads, kv_heads, head_dim), 21)


@pytest.mark.gpu
@gpu_kernels
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_backward_accepts_out_and_lse_of_several_blocks_on_gpu(name, head_dim):
    for heads, kv_heads in ((4, 4), (8, 2), (4, 1)):
        for length in (128, 200):
            shape = (2, length, heads, kv_heads, head_dim)
            assert_backward_accepts_merged(name, "cuda", torch.bfloat16, shape, 22)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference_on_gpu(dtype):
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    assert_close_to_float64("reference", "cuda", dtype, (2, 70, 6, 3, 64), 23)
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.gpu
@gpu_kernels
def test_float32_is_refused_by_half_precision_kernels(name):
    with pytest.raises(ValueError, match=f"(?s){name}"):
        select_kernel(name, torch.device("cuda"), torch.float32, 64)


@pytest.mark.gpu
def test_auto_serves_every_dtype_and_head_dim_on_gpu():
    cuda = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (16, 64, 80, 96, 128, 256):
            kernel = select_kernel("auto", cuda, dtype, head_dim)
            assert kernel.unsupported_reason(cuda, dtype, head_dim) is None
            assert_close_to_float64(kernel.name, "cuda", dtype, (1, 130, 4, 2, head_dim), 24)

"""Who computes attention over a split row: our modes, or published libraries for the same algorithms.

`--attn-engine library` runs zigzag_ring_attn through ring-flash-attn and ulysses_attn through yunchang, on flash-attn.
It is there to compare with: rows are split as in our modes, so that a run differs in nothing but its attention.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

from .communication import group_size
from .kernels import AttentionKernel, check_kernel_name, select_kernel
from .kernels.flash_attn import FlashAttnKernel
from .modes import ParallelMode, get_mode
from .modes.base import require_plain_causal
from .modes.ulysses_attn import UlyssesAttention, check_query_heads, kv_repeats, repeat_heads, sum_copies
from .modes.zigzag_ring_attn import ZigzagRingAttention

ENGINES = ("easy_context", "library")
SelectKernel = Callable[[torch.device, torch.dtype, int], AttentionKernel]


def check_engine(engine: str, mode: str, attn_kernel: str) -> None:
    """Raise ValueError unless `engine` is one of ENGINES and has this mode and this kernel; imports no library."""
    if engine not in ENGINES:
        raise ValueError(f"attn_engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if engine == "easy_context":
        return
    if mode not in _LIBRARY_MODES:
        raise ValueError(
            f"attn_engine {engine} has no library for seq_algo {mode}: use {' or '.join(_LIBRARY_MODES)}, or "
            "attn_engine easy_context"
        )
    if attn_kernel not in ("auto", FlashAttnKernel.name):
        raise ValueError(
            f"attn_kernel {attn_kernel} cannot be used with attn_engine {engine}, whose libraries call flash-attn: "
            f"use attn_kernel auto or {FlashAttnKernel.name}"
        )


def get_engine(engine: str, mode: str, attn_kernel: str = "auto") -> tuple[ParallelMode, SelectKernel]:
    """The mode as this engine computes it, and what chooses its kernel.

    Args:
        engine: one of ENGINES.
        mode: one of `easy_context.modes.MODES`; the library engine has zigzag_ring_attn and ulysses_attn.
        attn_kernel: "auto" or one of `easy_context.kernels.KERNELS`.

    Returns:
        the mode, and a function from device, dtype and head_dim to the kernel.

    Raises:
        ValueError: an unknown name, a combination that the engine lacks, or a package that does not import.
    """
    own_mode = get_mode(mode)
    check_kernel_name(attn_kernel)
    check_engine(engine, mode, attn_kernel)
    if engine == "easy_context":
        return own_mode, functools.partial(select_kernel, attn_kernel)
    _import("flash_attn.flash_attn_interface", "flash-attn --no-build-isolation")
    # Not by name: what is found under flash-attn's names may be a stand-in, which also serves without CUDA.
    return _LIBRARY_MODES[mode](), lambda device, dtype, head_dim: FlashAttnKernel()


def import_without_package(module: str) -> Any:
    """Import `package.module` without running the package's `__init__`, for packages whose `__init__` no longer works.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    package = module.partition(".")[0]
    if package not in sys.modules:
        if (spec := importlib.util.find_spec(package)) is None:
            raise ModuleNotFoundError(f"{package.replace('_', '-')} is not installed")
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(module)


def _import(module: str, requirement: str, importer: Callable[[str], Any] = importlib.import_module) -> Any:
    try:
        return importer(module)
    except ImportError as error:
        raise ValueError(
            f"attn_engine library cannot import {module} ({error}): pip install {requirement}, or use "
            "attn_engine easy_context"
        ) from error


class LibraryZigzag(ZigzagRingAttention):
    """ring-flash-attn's zigzag ring, which calls flash-attn itself: `kernel` serves a group of one process only."""

    def __init__(self) -> None:
        # Its __init__ imports a Hugging Face adapter that transformers 5 breaks.
        self._ring = _import("ring_flash_attn.zigzag_ring_flash_attn", "ring-flash-attn==0.1.8", import_without_package)

    def forward(self, q, k, v, *, scale, mask, kernel, group):
        if group_size(group) == 1:
            return super().forward(q, k, v, scale=scale, mask=mask, kernel=kernel, group=group)
        require_plain_causal(mask, self.name)
        if q.dtype == torch.float32:  # its sums would be the very buffers that the next block is written to
            raise ValueError("attn_engine library: ring-flash-attn's gradients are wrong in float32, use bfloat16")
        k, v = k.contiguous(), v.contiguous()
        out, lse = self._ring.zigzag_ring_flash_attn_forward(group, q, k, v, softmax_scale=scale)
        return out, (lse,)

    def backward(self, dout, q, k, v, out, residuals, *, scale, mask, kernel, group):
        if group_size(group) == 1:
            return super().backward(dout, q, k, v, out, residuals, scale=scale, mask=mask, kernel=kernel, group=group)
        k, v, lse = (x.contiguous() for x in (k, v, *residuals))
        return self._ring.zigzag_ring_flash_attn_backward(group, dout, q, k, v, out, lse, softmax_scale=scale)


class LibraryUlysses(UlyssesAttention):
    """yunchang's all-to-all, a tensor at a time, around flash-attn; key heads are repeated as in our mode."""

    def __init__(self) -> None:
        exchange = _import("yunchang.comm.all_to_all", "yunchang==0.6.4").all_to_all_4D
        self._scatter_heads = functools.partial(exchange, scatter_idx=2, gather_idx=1)
        self._gather_heads = functools.partial(exchange, scatter_idx=1, gather_idx=2)

    def forward(self, q, k, v, *, scale, mask, kernel, group):
        if group_size(group) == 1:
            return super().forward(q, k, v, scale=scale, mask=mask, kernel=kernel, group=group)
        require_plain_causal(mask, self.name)
        check_query_heads(q.shape[2], group_size(group))
        out, lse = kernel.forward(*self._scatter_qkv(q, k, v, group), scale, mask)
        return self._gather_heads(out, group=group), (lse,)

    def backward(self, dout, q, k, v, out, residuals, *, scale, mask, kernel, group):
        if group_size(group) == 1:
            return super().backward(dout, q, k, v, out, residuals, scale=scale, mask=mask, kernel=kernel, group=group)
        dout, out = (self._scatter_heads(x, group=group) for x in (dout, out))
        grads = kernel.backward(dout, *self._scatter_qkv(q, k, v, group), out, *residuals, scale, mask)
        dq, *dkv = (self._gather_heads(grad, group=group) for grad in grads)
        repeats = kv_repeats(k.shape[2], group_size(group))
        return dq, *(sum_copies(grad, repeats) for grad in dkv)

    def _scatter_qkv(self, q, k, v, group) -> list[torch.Tensor]:
        k, v = repeat_heads((k, v), group_size(group))
        return [self._scatter_heads(x, group=group) for x in (q, k, v)]


_LIBRARY_MODES = {mode.name: mode for mode in (LibraryZigzag, LibraryUlysses)}

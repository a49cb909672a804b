"""PyTorch's own FlashAttention-2 op under flash-attn's names, for peers on machines where flash-attn is missing.

It is the same kernel, built by PyTorch. Beside what flash-attn does, the backward copies its gradients into the buffers
that the caller gave (under 0.5 % of the time at 16K tokens, less at longer rows).
"""

import importlib.machinery
import importlib.util
import sys
import types

import torch

from easy_context.attention import AttentionSettings, sequence_parallel_attention
from easy_context.kernels import AttentionMask, select_kernel
from easy_context.kernels.base import AttentionKernel
from easy_context.mesh import Mesh
from easy_context.modes import build_mode

NOTE = "PyTorch's FA2 op in place of flash-attn"


def ensure_flash_attn() -> str | None:
    """Make `flash_attn.flash_attn_interface` importable: other libraries call it, and `--attn-engine library` does.

    Returns:
        None if flash-attn 2 is installed, otherwise a note that this stand-in took its place.
    """
    if importlib.util.find_spec("flash_attn_2_cuda") is not None:
        return None
    if "flash_attn.flash_attn_interface" not in sys.modules:
        interface = types.ModuleType("flash_attn.flash_attn_interface")
        for function in (_flash_attn_forward, _flash_attn_backward, flash_attn_func):
            setattr(interface, function.__name__, function)
        for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):  # imported, but not called
            setattr(interface, name, None)
        package = _package()
        package.__version__, package.flash_attn_func = "2.8.0", flash_attn_func
        package.flash_attn_interface = sys.modules["flash_attn.flash_attn_interface"] = interface
    return NOTE


def _package() -> types.ModuleType:
    """Return the package flash_attn: flash-attn-4's, which lacks this module, or else a new empty one."""
    if importlib.util.find_spec("flash_attn") is not None:
        return importlib.import_module("flash_attn")
    package = types.ModuleType("flash_attn")
    package.__path__ = []
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
    sys.modules["flash_attn"] = package
    return package


def _kernel(q: torch.Tensor) -> AttentionKernel:
    return select_kernel("torch_flash" if q.is_cuda else "cpu", q.device, q.dtype, q.shape[-1])


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    """flash-attn 2.7's signature: out `[batch, seq, heads, head_dim]`, lse `[batch, heads, seq]`, and two unused."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    out, lse = _kernel(q).forward(q, k, v, softmax_scale, AttentionMask(causal=causal))
    return out, lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
):  # fmt: skip
    """flash-attn 2.7's signature; the gradients are written into dq, dk and dv."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    mask = AttentionMask(causal=causal)
    grads = _kernel(q).backward(dout, q, k, v, out, softmax_lse, softmax_scale, mask)
    for buffer, grad in zip((dq, dk, dv), grads, strict=True):
        buffer.copy_(grad)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn's differentiable function on one device."""
    _refuse(dropout_p, *window_size, softcap, alibi_slopes)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    settings = AttentionSettings(build_mode("data_parallel", Mesh()), _kernel(q), scale, AttentionMask(causal=causal))
    return sequence_parallel_attention(q, k, v, settings)


def _refuse(dropout, window_left, window_right, softcap, alibi_slopes) -> None:
    if dropout or window_left >= 0 or window_right >= 0 or softcap or alibi_slopes is not None:
        raise NotImplementedError("this stand-in for flash-attn computes plain attention only")

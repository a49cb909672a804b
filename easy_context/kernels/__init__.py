"""Attention kernels: one block of exact attention each, and the choice among them."""

import functools
import logging

import torch

from .base import FULL, AttentionKernel, AttentionMask
from .cpu import CpuKernel
from .cudnn import CudnnKernel
from .flash_attn import FlashAttnKernel
from .flash_attn_4 import FlashAttn4Kernel
from .reference import ReferenceKernel
from .torch_flash import TorchFlashKernel

__all__ = ["FULL", "KERNELS", "AttentionKernel", "AttentionMask", "check_kernel", "select_kernel"]

logger = logging.getLogger(__name__)

_KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        FlashAttn4Kernel(),
        CudnnKernel(),
        FlashAttnKernel(),
        TorchFlashKernel(),
        CpuKernel(),
        ReferenceKernel(),
    )
}
KERNELS = tuple(_KERNELS)  # fastest first


@functools.cache
def select_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
    """The attention kernel called `name`, or with "auto" the fastest that can serve; the log says which and why.

    Args:
        name: one of KERNELS, or "auto".
        device: where q, k and v lie.
        dtype: their dtype.
        head_dim: elements per head.

    Raises:
        ValueError: as `check_kernel`.
    """
    kernel, passed_over = _choose_kernel(name, device, dtype, head_dim)
    if name == "auto":
        # On a CPU nobody wonders why the kernels for CUDA are not used.
        why = f" (not {'; not '.join(passed_over)})" if passed_over and device.type == "cuda" else ""
        logger.info("attention kernel: %s%s", kernel.name, why)
    return kernel


def check_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Check that `select_kernel` will find a kernel.

    Raises:
        ValueError: an unknown name, or a named kernel that cannot serve these inputs (the message says why).
    """
    _choose_kernel(name, device, dtype, head_dim)


def _choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[AttentionKernel, list[str]]:
    """The kernel, and why each faster one is passed over."""
    if name != "auto":
        check_kernel_name(name)
        if reason := _KERNELS[name].unsupported_reason(device, dtype, head_dim):
            raise ValueError(f"attn_kernel {name} cannot be used here: {reason}. Use attn_kernel auto.")
        return _KERNELS[name], []
    passed_over: list[str] = []
    for kernel in _KERNELS.values():
        reason = kernel.unsupported_reason(device, dtype, head_dim)
        if reason is None:
            return kernel, passed_over
        passed_over.append(f"{kernel.name}: {reason}")
    raise ValueError(f"no attention kernel serves {dtype} on {device}: {'; '.join(passed_over)}")


def check_kernel_name(name: str) -> None:
    """Raise ValueError unless `name` is "auto" or one of KERNELS."""
    if name != "auto" and name not in _KERNELS:
        raise ValueError(f"attn_kernel {name!r} is unknown; choose auto, {', '.join(KERNELS)}")

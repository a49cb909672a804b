"""Attention kernels, each computing one block of exact attention, and the choice among them.

This module loads no PyTorch, so that flags can import the names. A kernel's module is imported when it is needed.
"""

import functools
import importlib
import logging
from typing import TYPE_CHECKING

from .mask import FULL, AttentionMask

if TYPE_CHECKING:
    import torch

    from .base import AttentionKernel

__all__ = ["FULL", "KERNELS", "AttentionMask", "check_kernel", "check_kernel_name", "select_kernel"]

logger = logging.getLogger(__name__)

# Module and class inside this package, fastest first. A new kernel is one more line.
_CLASSES = {
    "flash_attn_4": "flash_attn_4.FlashAttn4Kernel",
    "cudnn": "cudnn.CudnnKernel",
    "flash_attn": "flash_attn.FlashAttnKernel",
    "torch_flash": "torch_flash.TorchFlashKernel",
    "cpu": "cpu.CpuKernel",
    "reference": "reference.ReferenceKernel",
}
KERNELS = tuple(_CLASSES)


@functools.cache
def select_kernel(
    name: str, device: "torch.device", dtype: "torch.dtype", head_dim: int, documents: bool = False
) -> "AttentionKernel":
    """Return the attention kernel called `name`, or the fastest usable one for "auto", and log the choice.

    Args:
        name: one of KERNELS, or "auto".
        device: device of q, k and v.
        dtype: dtype of q, k and v.
        head_dim: elements per head.
        documents: whether the rows hold packed documents, which are slow with some kernels.

    Raises:
        ValueError: as for `check_kernel`.
    """
    kernel, passed_over = _choose_kernel(name, device, dtype, head_dim, documents)
    if name == "auto":
        # On a CPU the log need not explain why CUDA kernels are not used.
        why = f" (not {'; not '.join(passed_over)})" if passed_over and device.type == "cuda" else ""
        logger.info("attention kernel: %s%s", kernel.name, why)
    return kernel


def check_kernel(
    name: str, device: "torch.device", dtype: "torch.dtype", head_dim: int, documents: bool = False
) -> None:
    """Check that `select_kernel` will find a kernel.

    Raises:
        ValueError: the name is unknown, or the named kernel does not support these inputs.
    """
    _choose_kernel(name, device, dtype, head_dim, documents)


def check_kernel_name(name: str) -> None:
    """Raise ValueError unless `name` is "auto" or one of KERNELS."""
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"attn_kernel {name!r} is unknown; choose auto, {', '.join(KERNELS)}")


def _choose_kernel(
    name: str, device: "torch.device", dtype: "torch.dtype", head_dim: int, documents: bool
) -> tuple["AttentionKernel", list[str]]:
    """Return the kernel, and the reasons why faster ones are not used."""
    check_kernel_name(name)

    def reason_against(kernel: "AttentionKernel") -> str | None:
        reason = kernel.unsupported_reason(device, dtype, head_dim)
        return kernel.unfit_for_documents if reason is None and documents else reason

    if name != "auto":
        kernel = _kernel(name)
        if reason := reason_against(kernel):
            raise ValueError(f"attn_kernel {name} cannot be used here: {reason}. Use attn_kernel auto.")
        return kernel, []
    passed_over: list[str] = []
    for kernel in map(_kernel, KERNELS):
        reason = reason_against(kernel)
        if reason is None:
            return kernel, passed_over
        passed_over.append(f"{kernel.name}: {reason}")
    raise ValueError(f"no attention kernel serves {dtype} on {device}: {'; '.join(passed_over)}")


@functools.cache
def _kernel(name: str) -> "AttentionKernel":
    module, class_name = _CLASSES[name].split(".")
    return getattr(importlib.import_module(f".{module}", __name__), class_name)()

"""The global record of the applied patch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .mesh import CurrentMesh
from .modes.base import ParallelMode


@dataclass
class Patch:
    """An applied patch.

    Attributes:
        mode: the applied parallel mode.
        family: the patched model type.
        mesh: the grid of ranks.
        attn_kernel: name of the kernel, or "auto".
        restore: function that undoes the patch.
        layer_unchecked: whether a forward pass has begun and its first layer has not been checked yet.
    """

    mode: ParallelMode
    family: str
    mesh: CurrentMesh
    attn_kernel: str
    restore: Callable[[], None]
    layer_unchecked: bool = False


_patch: Patch | None = None


def current_patch() -> Patch:
    """Return the applied patch.

    Raises:
        RuntimeError: no patch is applied.
    """
    if _patch is None:
        raise RuntimeError("no mode is applied: call apply_seq_parallel_monkey_patch first")
    return _patch


def applied_patch() -> Patch | None:
    """Return the applied patch, or None without one."""
    return _patch


def record_patch(patch: Patch | None) -> None:
    """Record `patch` as the applied patch."""
    global _patch
    _patch = patch


def group_sharing_rows_of(model: Any) -> dist.ProcessGroup | None:
    """Return the ranks among which the patch splits the rows of a Hugging Face model; None if it splits none."""
    if _patch is None or model.config.model_type != _patch.family or _patch.mesh.sequence_size == 1:
        return None
    return _patch.mesh.sequence_group

"""Helpers for torch.autocast inside custom autograd functions."""

import contextlib
import functools
from collections.abc import Callable

import torch


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of `tensor` runs: autocast's if it is on, else the tensor's."""
    if torch.is_autocast_enabled(tensor.device.type):
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


def autocast_as_now(device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    """Return a function that restores the current autocast setting, because backward runs outside of it."""
    return functools.partial(
        torch.autocast,
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
    )

"""Mixed precision by torch.autocast, inside of functions that autograd cannot see through."""

import contextlib
import functools
from collections.abc import Callable

import torch


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which a matrix product of `tensor` runs here: autocast's if it is on, else the tensor's own."""
    if torch.is_autocast_enabled(tensor.device.type):
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


def autocast_as_now(device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    """A function that enters the present autocast setting again: backward runs outside of it."""
    return functools.partial(
        torch.autocast,
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
    )

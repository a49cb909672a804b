"""A process's share of a ZeRO-3 optimizer, saved so that any number of processes can take it up again.

DeepSpeed cuts every parameter, flattened and padded, into equal pieces, one for each process, and joins a process's
pieces of many parameters into flat float32 buffers. Beside the buffers we save where each piece lies in them, so that
another number of processes can put its own pieces together from the saved ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_WEIGHTS = "weights"


@dataclass(frozen=True)
class Piece:
    """One process's piece of a parameter.

    Attributes:
        buffer: index of the flat buffer that holds it.
        offset: where it starts there.
        length: its elements, the last process's padding included.
        numel: elements of the whole parameter.
    """

    buffer: int
    offset: int
    length: int
    numel: int


def layout_of(zero: Any, model: torch.nn.Module) -> dict[str, Piece]:
    """Return where this process's piece of each trained parameter lies.

    Args:
        zero: DeepSpeed's ZeRO-3 optimizer.
        model: the model inside the engine.
    """
    return {
        name: Piece(*zero.grad_position[zero.get_param_id(parameter)], parameter.ds_numel)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def shares(zero: Any, model: torch.nn.Module) -> dict[str, Any]:
    """Return this process's float32 weights, moments and step counts, without copying them."""
    state = zero.state_dict()
    optimizer = state["optimizer_state_dict"]
    return {
        "layout": {name: vars(piece) for name, piece in layout_of(zero, model).items()},
        _WEIGHTS: [tensor.data for tensor in state["fp32_flat_groups"]],
        "states": [optimizer["state"][index] for index in range(len(state["fp32_flat_groups"]))],
        "groups": [{key: value for key, value in g.items() if key != "params"} for g in optimizer["param_groups"]],
    }


def load_shares(
    zero: Any, model: torch.nn.Module, read: Callable[[int], dict[str, Any]], processes: int, rank: int
) -> None:
    """Put this process's buffers together from the saved ones, and give them to DeepSpeed.

    Args:
        zero: DeepSpeed's ZeRO-3 optimizer, right after it was made.
        model: the model inside the engine.
        read: returns what `shares` gave on a process of the run that saved.
        processes: of that run.
        rank: of this process in this run.

    Raises:
        ValueError: the model has other parameters than the one that was saved.
    """
    layout, saved = layout_of(zero, model), read(0)
    sizes = {name: piece["numel"] for name, piece in saved["layout"].items()}
    if sizes != {name: piece.numel for name, piece in layout.items()}:
        raise ValueError("the checkpoint is of a model with other parameters")
    state = zero.state_dict()
    # In host memory: a second copy would not fit a GPU that the first one fills.
    weights = [torch.zeros_like(tensor.data, device="cpu") for tensor in state["fp32_flat_groups"]]
    moments = [key for key, value in saved["states"][0].items() if torch.is_tensor(value) and value.dim()]
    buffers = {_WEIGHTS: weights} | {key: [torch.zeros_like(tensor) for tensor in weights] for key in moments}
    for source in range(processes):
        _copy_overlaps(buffers, layout, read(source), source, rank)
    # Step counts and the like are the same in every buffer.
    counts = {key: value for key, value in saved["states"][0].items() if key not in moments}
    optimizer = state["optimizer_state_dict"]
    optimizer["state"] = {
        index: {key: _own(value) for key, value in counts.items()} | {key: buffers[key][index] for key in moments}
        for index in range(len(weights))
    }
    for group, saved_group in zip(optimizer["param_groups"], saved["groups"], strict=True):
        group |= saved_group
    zero.checkpoint_event_prologue()  # parameters that every process keeps whole are cut as well
    zero.load_state_dict({rank: state | {"fp32_flat_groups": weights}})
    zero.checkpoint_event_epilogue()


def _own(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _copy_overlaps(
    buffers: dict[str, list[torch.Tensor]], layout: dict[str, Piece], saved: dict[str, Any], source: int, rank: int
) -> None:
    """Copy what process `source` of the earlier run has of this process's pieces."""
    for name, own in layout.items():
        other = Piece(**saved["layout"][name])
        start = max(rank * own.length, source * other.length)
        stop = min((rank + 1) * own.length, (source + 1) * other.length, own.numel)
        if start >= stop:
            continue
        into = slice(own.offset + start - rank * own.length, own.offset + stop - rank * own.length)
        out_of = slice(other.offset + start - source * other.length, other.offset + stop - source * other.length)
        for key, flat in buffers.items():
            kept = saved[_WEIGHTS][other.buffer] if key == _WEIGHTS else saved["states"][other.buffer][key]
            flat[own.buffer][into] = kept[out_of]

"""Check before rows are split that all ranks of a group have the same rows."""

from typing import Any

import torch

_CHUNK = 1 << 15  # elements at a time, which stay in the processor's cache
_FACTORS = (-7046029254386353131, -4658895280553007687)  # odd, bits well mixed


def check_columns(input_ids: torch.Tensor, position_ids: torch.Tensor, target_ids: torch.Tensor | None) -> None:
    """Raise ValueError unless the tensors `[batch, seq]` have the same length."""
    for name, tensor in (("position_ids", position_ids), ("target_ids", target_ids)):
        if tensor is not None and tensor.shape[1] != input_ids.shape[1]:
            raise ValueError(
                f"{name} has {tensor.shape[1]} columns and input_ids {input_ids.shape[1]}: pass whole rows of one "
                "length, targets already shifted"
            )


def describe_rows(
    input_ids: torch.Tensor, position_ids: torch.Tensor, target_ids: torch.Tensor | None
) -> dict[str, Any]:
    """Return the rows' shape and checksums, which must be equal on every rank that shares the rows.

    Raises:
        ValueError: as for `check_columns`.
    """
    check_columns(input_ids, position_ids, target_ids)
    return {
        "shape of input_ids": tuple(input_ids.shape),
        "checksum of input_ids": checksum(input_ids),
        "checksum of position_ids": checksum(position_ids),
        "checksum of target_ids": None if target_ids is None else checksum(target_ids),
    }


def checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit sum of integers, each multiplied by a number that depends on its position."""
    flat = tensor.reshape(-1)
    places = torch.arange(1, min(_CHUNK, flat.numel()) + 1, device=flat.device)
    places = places * _FACTORS[0]
    places = (places ^ (places >> 32)) * _FACTORS[1]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in flat.split(_CHUNK):
        total = total * _FACTORS[0] + (chunk * places[: len(chunk)]).sum()
    return int(total)

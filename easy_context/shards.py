"""This rank's part of whole rows, as keyword arguments of the model."""

from typing import cast

import torch

from .mesh import CurrentMesh, Mesh
from .sequence_parallel import prepare_seq_parallel_inputs


def shard_batch(
    mode: str,
    input_ids: torch.Tensor,
    targets: torch.Tensor,
    mesh: CurrentMesh | Mesh,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    """Return this rank's shard of a batch of whole rows, which `model(**shard, num_items_in_batch=n)` takes.

    With the fused loss, `.loss` is then the sum of the losses of this rank's targets divided by n; added up over the
    ranks, it is the loss of the whole rows if n counts all their targets.

    Args:
        mode: the parallel mode.
        input_ids: `[batch, seq]` int64, the same on every rank of a sequence-parallel group.
        targets: `[batch, seq]` int64 from `next_token_targets`: labels are shifted on whole rows, so that no token at
            the edge of a shard loses its target.
        mesh: the grid of ranks, from `apply_seq_parallel_monkey_patch`.
        device: where the shard goes.

    Returns:
        `input_ids`, `position_ids` and `shift_labels` `[batch, shard]` int64.

    Raises:
        ValueError: as `prepare_seq_parallel_inputs`.
    """
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    local = prepare_seq_parallel_inputs(
        mode, input_ids, position_ids, targets, mesh.sequence_rank, mesh.sequence_size, device
    )
    shard = {
        "input_ids": local["local_input_ids"],
        "position_ids": local["local_position_ids"],
        "shift_labels": local["local_target_ids"],
    }
    return cast(dict[str, torch.Tensor], shard)  # none is None, as there are targets

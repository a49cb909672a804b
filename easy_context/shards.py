"""Split whole rows into this rank's shard, as keyword arguments of the model."""

from collections.abc import Sequence
from typing import Any

import torch

from .mesh import CurrentMesh, Mesh
from .packing import find_documents, restarting_positions
from .sequence_parallel import prepare_seq_parallel_inputs


def shard_batch(
    mode: str,
    input_ids: torch.Tensor,
    targets: torch.Tensor,
    mesh: CurrentMesh | Mesh,
    device: torch.device | str,
    *,
    documents: Sequence[Sequence[int]] | None = None,
    restart_positions: bool = True,
) -> dict[str, Any]:
    """Return this rank's shard of a batch of whole rows, which `model(**shard, num_items_in_batch=n)` takes.

    With the fused loss, `.loss` is then the sum of the losses of this rank's targets divided by n; added up over the
    ranks, it is the loss of the whole rows if n counts all their targets.

    Args:
        mode: the parallel mode.
        input_ids: `[batch, seq]` int64, the same on every rank of a sequence-parallel group.
        targets: `[batch, seq]` int64 from `next_token_targets`: labels are shifted on whole rows, so that no token at
            the edge of a shard loses its target.
        mesh: the grid of ranks, from `apply_seq_parallel_monkey_patch`.
        device: device of the returned shard.
        documents: for packed rows, the start positions of the documents in each row, 0 first. Attention then stays
            within documents, and targets at their ends become -100.
        restart_positions: whether positions count from 0 in each document; otherwise they continue over the row. With
            RoPE the results are the same up to rounding.

    Returns:
        `input_ids`, `position_ids` and `shift_labels` `[batch, shard]` int64, and "documents" if they are given.

    Raises:
        ValueError: as for `prepare_seq_parallel_inputs`.
    """
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if documents is not None and restart_positions:
        position_ids = restarting_positions(find_documents(documents, input_ids.shape, position_ids), input_ids.device)
    place = mesh.sequence_rank, mesh.sequence_size, device
    local = prepare_seq_parallel_inputs(mode, input_ids, position_ids, targets, *place, documents=documents)
    shard = {
        "input_ids": local["local_input_ids"],
        "position_ids": local["local_position_ids"],
        "shift_labels": local["local_target_ids"],
    }
    return shard if documents is None else {**shard, "documents": local["documents"]}

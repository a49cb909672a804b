"""The names that the original EasyContext's package exported, for scripts that were written for it."""

import functools

import torch

from .patch import applied_patch
from .sequence_parallel import apply_seq_parallel_monkey_patch, prepare_seq_parallel_inputs

prepare_zigzag_ring_attn_inputs = functools.partial(prepare_seq_parallel_inputs, "zigzag_ring_attn")
prepare_dist_flash_attn_inputs = functools.partial(prepare_seq_parallel_inputs, "dist_flash_attn")
prepare_ulysses_attn_inputs = functools.partial(prepare_seq_parallel_inputs, "ulysses_attn")

apply_zigzag_ring_attn_monkey_patch_llama = functools.partial(
    apply_seq_parallel_monkey_patch, "zigzag_ring_attn", "llama"
)
apply_zigzag_ring_attn_monkey_patch_mistral = functools.partial(
    apply_seq_parallel_monkey_patch, "zigzag_ring_attn", "mistral"
)
apply_dist_flash_attn_monkey_patch_llama = functools.partial(
    apply_seq_parallel_monkey_patch, "dist_flash_attn", "llama"
)
apply_ulysses_attn_monkey_patch_llama = functools.partial(apply_seq_parallel_monkey_patch, "ulysses_attn", "llama")
apply_usp_attn_monkey_patch_llama = functools.partial(apply_seq_parallel_monkey_patch, "usp_attn", "llama")


def prepare_usp_attn_inputs(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    target_ids: torch.Tensor | None,
    rank: int,
    world_size: int,
    device: torch.device | str,
    ring_degree: int,
    ulysses_degree: int,
) -> dict[str, torch.Tensor | None]:
    """Return this rank's shard of whole rows, as `prepare_seq_parallel_inputs` does.

    In the original this call also set the degrees that attention uses. So an applied patch of usp_attn over so many
    ranks is applied anew here if its ring degree is another one, which is collective over all ranks.

    Raises:
        ValueError: as `prepare_seq_parallel_inputs`, or the degrees do not multiply to `world_size`.
    """
    if ring_degree * ulysses_degree != world_size:
        raise ValueError(f"ring_degree {ring_degree} x ulysses_degree {ulysses_degree} must be {world_size} ranks")
    patch = applied_patch()
    if (
        patch is not None
        and patch.mode.name == "usp_attn"
        and patch.mesh.sequence_size == world_size
        and patch.mesh.ring_degree != ring_degree
    ):
        apply_seq_parallel_monkey_patch(
            "usp_attn",
            patch.family,
            sequence_parallel_size=world_size,
            ring_degree=ring_degree,
            attn_kernel=patch.attn_kernel,
        )
    return prepare_seq_parallel_inputs(
        "usp_attn", input_ids, position_ids, target_ids, rank, world_size, device, ring_degree
    )

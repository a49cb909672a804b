"""The public functions: swap a model's attention for a sequence-parallel one, split rows over ranks, gather them."""

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import huggingface
from .agreement import check_together
from .kernels.documents import Documents
from .loss import IGNORE_INDEX
from .mesh import CurrentMesh, Mesh, launched_processes
from .model_hooks import attention_function, create_mask, loss_of_shards
from .modes import build_mode, find_mode
from .modes.base import ParallelMode
from .packing import DocumentStarts, find_documents, targets_within
from .patch import Patch, applied_patch, current_patch, record_patch
from .row_checks import check_columns, describe_rows


def apply_seq_parallel_monkey_patch(
    seq_algo: str,
    model: str = "llama",
    *,
    sequence_parallel_size: int | None = None,
    ring_degree: int | None = None,
    query_heads: int | None = None,
    attn_kernel: str = "auto",
    attn_engine: str = "easy_context",
    timeout: timedelta | None = None,
) -> CurrentMesh:
    """Make every model of a Hugging Face family, loaded before or after, use sequence-parallel attention.

    Call it on every rank, before or after torch.distributed is initialised. It replaces an earlier patch.

    Args:
        seq_algo: one of `easy_context.modes.MODES`.
        model: the model type (`config.model_type`): llama, mistral, qwen2 or qwen3.
        sequence_parallel_size: number of ranks that share a row; None for all of them. data_parallel always has 1.
        ring_degree: number of ranks in a ring of usp_attn. It must divide the number of ranks that share a row, and
            that number / ring_degree must divide the query heads. None for the smallest value that keeps each
            all-to-all inside a node (LOCAL_WORLD_SIZE) and is valid for `query_heads`, if given.
        query_heads: number of query heads of the model.
        attn_kernel: "auto" or one of `easy_context.kernels.KERNELS`.
        attn_engine: one of `easy_context.modes.ENGINES`; "library" needs flash-attn and a library for the mode.
        timeout: timeout of the collectives of groups created here; None for the backend's default.

    Returns:
        The grid of ranks, with this process's ranks in it; see `CurrentMesh` for when its groups are created.

    Raises:
        ValueError: the mode, kernel, engine or family is unknown, the engine cannot be used, or a size or ring_degree
            does not divide the number of processes (raised at first use if that number is not known yet).
    """
    mode_class = find_mode(seq_algo, attn_engine)
    mode_class.check_kernel_name(attn_kernel)
    huggingface.modeling_module(model)
    if not mode_class.splits_rows:
        sequence_parallel_size = mode_class.sequence_size(sequence_parallel_size, 1)
    mesh = CurrentMesh(
        sequence_parallel_size, timeout, lambda size: mode_class.ring_degree(ring_degree, size, query_heads)
    )
    mode = mode_class.over(mesh)
    if dist.is_initialized():
        mode.make_groups()  # here, where all ranks are
    elif launched_processes() > 1:
        size = mode_class.sequence_size(sequence_parallel_size, launched_processes())
        mode_class.ring_degree(ring_degree, size, query_heads)
    remove_seq_parallel_monkey_patch()
    restore = huggingface.rebind(model, mode.name, attention_function, create_mask, loss_of_shards)
    record_patch(Patch(mode, model, mesh, attn_kernel, restore))
    return mesh


def remove_seq_parallel_monkey_patch() -> None:
    """Undo `apply_seq_parallel_monkey_patch` exactly; without one, do nothing."""
    if (patch := applied_patch()) is not None:
        patch.restore()
        record_patch(None)


def prepare_seq_parallel_inputs(
    seq_algo: str,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    target_ids: torch.Tensor | None,
    rank: int,
    world_size: int,
    device: torch.device | str,
    ring_degree: int | None = None,
    *,
    documents: DocumentStarts | None = None,
    check_rows: bool = True,
) -> dict[str, Any]:
    """Return this rank's shard of a batch of whole rows, on `device`.

    Rows whose length is not divisible are padded at the end: positions continue, targets are -100, and under causal
    attention no real token attends to the padding. `gather_seq_parallel_outputs(..., length=...)` removes it again.

    With `documents` the rows are packed: pass the returned "documents" to a patched model, and it attends only within
    each document. Positions that restart are not enough: the model rejects them without documents.

    Args:
        seq_algo: the mode.
        input_ids: `[batch, seq]` int64.
        position_ids: `[batch, seq]` or `[1, seq]` int64, positions in the whole row; with `documents` they may count
            from 0 in each.
        target_ids: `[batch, seq]` int64, already shifted (`target_ids[i]` is the token after `input_ids[i]`), -100
            where there is none; or None.
        rank: rank in the sequence-parallel group.
        world_size: size of the sequence-parallel group.
        device: device of the returned shards.
        ring_degree: number of ranks in a ring of usp_attn; None for the applied patch's value, or the value that a
            patch would choose. Other modes accept 1 or None.
        documents: start positions of the documents in each row, 0 first; or "position_ids" if positions restart from 0
            in each document. Targets at the end of a document become -100.
        check_rows: whether to compare checksums of the rows over the group, if the applied patch splits rows and `rank`
            and `world_size` are this process's own. The comparison is collective: every rank of the group must call
            this function for the same batches.

    Returns:
        "local_input_ids", "local_position_ids" and "local_target_ids" (None if target_ids is), `[batch, shard]`; with
        `documents` also "documents", of the whole rows, to be passed to the model under this name.

    Raises:
        ValueError: tensors have different lengths, the documents are invalid, or rows differ between ranks; in that
            case every rank raises.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a sequence-parallel group of {world_size}")
    ring_degree = _ring_degree(seq_algo, world_size, ring_degree)
    mode = build_mode(seq_algo, Mesh(sequence_rank=rank, sequence_size=world_size, ring_degree=ring_degree))
    rows = input_ids, position_ids, target_ids

    @functools.cache  # the check together with other ranks has found them already
    def find() -> Documents | None:
        check_columns(*rows)
        return None if documents is None else find_documents(documents, rows[0].shape, rows[1])

    def check() -> dict[str, Any]:
        found = find()
        return {**describe_rows(*rows), "checksum of documents": found and found.checksum}

    if check_rows and _is_own_shard(mode):
        check_together(
            check,
            current_patch().mesh.sequence_group,
            "the ranks that share a row were given different rows (prepare_dataloader gives them the same)",
        )
    packed = find()
    padding = -input_ids.shape[1] % mode.multiple_of
    if padding:
        input_ids = F.pad(input_ids, (0, padding), value=0)
        following = torch.arange(1, padding + 1, device=position_ids.device, dtype=position_ids.dtype)
        position_ids = torch.cat((position_ids, position_ids[:, -1:] + following), dim=1)
        target_ids = F.pad(target_ids, (0, padding), value=IGNORE_INDEX) if target_ids is not None else None
    if packed is not None:
        packed = packed.lengthened(padding)
        target_ids = None if target_ids is None else targets_within(packed, target_ids)

    def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else mode.shard(tensor).to(device)

    return {
        "local_input_ids": local(input_ids),
        "local_position_ids": local(position_ids),
        "local_target_ids": local(target_ids),
        **({} if packed is None else {"documents": packed}),
    }


def _ring_degree(seq_algo: str, size: int, requested: int | None) -> int:
    """Return the ring degree of a split: the requested one, the applied patch's, or what the patch would choose."""
    patch = applied_patch()
    if requested is None and patch is not None and patch.mode.name == seq_algo and patch.mesh.sequence_size == size:
        return patch.mesh.ring_degree
    return find_mode(seq_algo).ring_degree(requested, size)


def _is_own_shard(mode: ParallelMode) -> bool:
    """Return whether the applied patch makes this split on this process, so that its group makes it as well."""
    patch = applied_patch()
    if patch is None or patch.mode.name != mode.name or patch.mesh.sequence_size == 1:
        return False
    rank, size = patch.mesh.sequence_rank, patch.mesh.sequence_size
    return (mode.ranks.rank, mode.ranks.size) == (rank, size) and (
        mode.chunk_indices(rank) == patch.mode.chunk_indices(rank)
    )


@torch.no_grad()
def gather_seq_parallel_outputs(
    seq_algo: str, local: torch.Tensor, dim: int = 1, length: int | None = None
) -> torch.Tensor:
    """Return the whole tensor from every rank's shard, on every rank of the group, without gradient.

    This is the inverse of the split.

    Args:
        seq_algo: the mode that split it, which must be the applied one.
        local: this rank's shard; all ranks of the group have the same shape and dtype.
        dim: the sequence dimension.
        length: number of tokens in the row before padding; None keeps the padding.

    Returns:
        The gathered tensor, `length` long along `dim`.

    Raises:
        ValueError: another mode is applied, or the ranks' shards differ in shape or dtype; every rank raises then.
    """
    patch = current_patch()
    require_applied(seq_algo, patch, "shards are gathered")
    dim, ranks = dim % local.dim(), patch.mode.ranks
    if ranks.size == 1:
        whole = local
    else:
        check_together(
            lambda: {"shape": tuple(local.shape), "dtype": local.dtype, "dim": dim, "length": length},
            ranks.group,
            "the ranks that share a row gather different shards",
        )
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
        dist.all_gather(shards, local.contiguous(), group=ranks.group)
        whole = patch.mode.unshard(shards, dim)
    return whole if length is None else whole.narrow(dim, 0, length)


def require_applied(seq_algo: str, patch: Patch, what: str) -> None:
    """Raise ValueError unless `patch` is of this mode."""
    if find_mode(seq_algo).name != patch.mode.name:
        raise ValueError(f"{what} for {seq_algo}, but {patch.mode.name} is applied")

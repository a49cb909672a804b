"""The public functions: swap a model's attention for a sequence-parallel one, split rows over ranks, gather them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import huggingface
from .attention import AttentionPlan, sequence_parallel_attention
from .autocast import autocast_dtype
from .engines import SelectKernel, get_engine
from .kernels import AttentionMask
from .loss import IGNORE_INDEX
from .mesh import Mesh, build_mesh, sequence_size
from .modes import ParallelMode, get_mode


@dataclass
class _Patch:
    """What was applied."""

    mode: ParallelMode
    mesh: Mesh
    select_kernel: SelectKernel
    restore: Callable[[], None]


_patch: _Patch | None = None


def apply_seq_parallel_monkey_patch(
    seq_algo: str,
    model: str = "llama",
    *,
    sequence_parallel_size: int | None = None,
    attn_kernel: str = "auto",
    attn_engine: str = "easy_context",
    timeout: timedelta | None = None,
) -> Mesh:
    """Make every model of a Hugging Face family, loaded before or after, attend sequence-parallel.

    Call it on every rank, after torch.distributed is initialised (without it there is one process). It replaces an
    earlier patch.

    Args:
        seq_algo: one of `easy_context.modes.MODES`.
        model: the model type (`config.model_type`): llama, mistral, qwen2 or qwen3.
        sequence_parallel_size: ranks that share a row; None for all of them. data_parallel always has 1.
        attn_kernel: "auto" or one of `easy_context.kernels.KERNELS`.
        attn_engine: one of `easy_context.engines.ENGINES`; "library" needs flash-attn and a library for the mode.
        timeout: of the collectives of groups made here; None for the backend's default.

    Returns:
        The grid of ranks, with this process's place in it.

    Raises:
        ValueError: an unknown mode, kernel, engine or family, an engine that cannot serve, or a size that does not
            divide the number of processes.
    """
    global _patch
    mode, select_kernel = get_engine(attn_engine, seq_algo, attn_kernel)
    huggingface.modeling_module(model)
    if mode.name == "data_parallel":
        sequence_parallel_size = sequence_size(sequence_parallel_size, 1, mode.name)
    mesh = build_mesh(sequence_parallel_size, timeout)
    remove_seq_parallel_monkey_patch()
    restore = huggingface.rebind(model, mode.name, _attention_function, _create_mask)
    _patch = _Patch(mode, mesh, select_kernel, restore)
    return mesh


def remove_seq_parallel_monkey_patch() -> None:
    """Undo `apply_seq_parallel_monkey_patch` exactly; without one, do nothing."""
    global _patch
    if _patch is not None:
        _patch.restore()
        _patch = None


def prepare_seq_parallel_inputs(
    seq_algo: str,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    target_ids: torch.Tensor | None,
    rank: int,
    world_size: int,
    device: torch.device | str,
) -> dict[str, torch.Tensor | None]:
    """This rank's shard of a batch of whole rows, on `device`.

    A length that does not divide is padded at the end: positions go on, targets are -100, and under causal attention
    no real token sees the padding. `gather_seq_parallel_outputs(..., length=...)` cuts it off again.

    Args:
        seq_algo: the mode.
        input_ids: `[batch, seq]` int64.
        position_ids: `[batch, seq]` or `[1, seq]` int64, positions in the whole row.
        target_ids: `[batch, seq]` int64, already shifted (`target_ids[i]` is the token after `input_ids[i]`), -100
            where there is none; or None.
        rank: in the sequence-parallel group.
        world_size: of the sequence-parallel group.
        device: where the shards go.

    Returns:
        "local_input_ids", "local_position_ids" and "local_target_ids" (None if target_ids is), `[batch, shard]`.
    """
    mode = get_mode(seq_algo)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a sequence-parallel group of {world_size}")
    for name, tensor in (("position_ids", position_ids), ("target_ids", target_ids)):
        if tensor is not None and tensor.shape[1] != input_ids.shape[1]:
            raise ValueError(
                f"{name} has {tensor.shape[1]} columns and input_ids {input_ids.shape[1]}: pass whole rows of one "
                "length, targets already shifted"
            )
    padding = -input_ids.shape[1] % mode.multiple_of(world_size)
    if padding:
        input_ids = F.pad(input_ids, (0, padding), value=0)
        following = torch.arange(1, padding + 1, device=position_ids.device, dtype=position_ids.dtype)
        position_ids = torch.cat((position_ids, position_ids[:, -1:] + following), dim=1)
        target_ids = F.pad(target_ids, (0, padding), value=IGNORE_INDEX) if target_ids is not None else None

    def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else mode.shard(tensor, rank, world_size).to(device)

    return {
        "local_input_ids": local(input_ids),
        "local_position_ids": local(position_ids),
        "local_target_ids": local(target_ids),
    }


@torch.no_grad()
def gather_seq_parallel_outputs(
    seq_algo: str, local: torch.Tensor, dim: int = 1, length: int | None = None
) -> torch.Tensor:
    """The whole tensor from every rank's shard, on every rank of the group: the inverse of the split. No gradient.

    Args:
        seq_algo: the mode that split it.
        local: this rank's shard; all ranks of the group have the same shape and dtype.
        dim: the sequence dimension.
        length: tokens of the row before it was padded; None keeps the padding.

    Returns:
        The gathered tensor, `length` long along `dim`.
    """
    mode, mesh = get_mode(seq_algo), _current_patch().mesh
    dim = dim % local.dim()
    if mode.name == "data_parallel" or mesh.sequence_size == 1:
        whole = mode.unshard([local], dim)
    else:
        shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(mesh.sequence_size)]
        dist.all_gather(shards, local.contiguous(), group=mesh.sequence_group)
        whole = mode.unshard(shards, dim)
    return whole if length is None else whole.narrow(dim, 0, length)


def prepare_dataloader(seq_algo: str, dataloader: Any, accelerator: Any) -> Any:
    """Share a dataloader's batches out: the ranks of a sequence-parallel group get the same, other groups others.

    Args:
        seq_algo: the mode, which must be the applied one.
        dataloader: a torch DataLoader that is the same on every rank.
        accelerator: an accelerate Accelerator.

    Returns:
        The dataloader to iterate.
    """
    from accelerate.data_loader import prepare_data_loader

    patch = _current_patch()
    if get_mode(seq_algo).name != patch.mode.name:
        raise ValueError(f"the dataloader is prepared for {seq_algo}, but {patch.mode.name} is applied")
    return prepare_data_loader(
        dataloader,
        device=accelerator.device,
        num_processes=patch.mesh.data_size,
        process_index=patch.mesh.data_rank,
        put_on_device=False,  # whole rows stay on the host; prepare_seq_parallel_inputs moves the shard
    )


def _current_patch() -> _Patch:
    if _patch is None:
        raise RuntimeError("no mode is applied: call apply_seq_parallel_monkey_patch first")
    return _patch


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's interface: query `[batch, heads, shard, head_dim]` to out `[batch, shard, heads, head_dim]`."""
    patch = _current_patch()
    huggingface.refuse_layer_features(module, dropout, options)
    huggingface.refuse_padding_mask(attention_mask)
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"{key.shape[2]} keys for {query.shape[2]} queries: a key-value cache cannot be honoured")
    query, key, value = (x.to(autocast_dtype(x)) for x in (query, key, value))
    head_dim = query.shape[-1]
    plan = AttentionPlan(
        mode=patch.mode,
        scale=head_dim**-0.5 if scaling is None else scaling,
        mask=AttentionMask(causal=True),
        kernel=patch.select_kernel(query.device, query.dtype, head_dim),
        group=patch.mesh.sequence_group,
    )
    out = sequence_parallel_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), plan)
    return out, None


def _create_mask(
    config: Any, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
) -> None:
    """Stands in for Hugging Face's mask builders: refuse what cannot be honoured, once a forward; build nothing."""
    mesh = _current_patch().mesh
    rows = inputs_embeds.shape[1]
    huggingface.refuse_cache(options.get("cache", options.get("past_key_values")), rows)
    huggingface.refuse_padding_mask(attention_mask)
    huggingface.refuse_model_features(config, rows * mesh.sequence_size, mesh.sequence_size)
    _check_positions(options.get("position_ids"), rows)


def _check_positions(position_ids: torch.Tensor | None, rows: int) -> None:
    """Raise ValueError unless the positions are this rank's shard of 0, 1, 2, ...: no packed documents.

    One process may start anywhere. A shard must come from a row that starts at 0, so that wrong shards are refused on
    every rank: with any start some would be right by chance, and wait in a collective for those that raised.
    """
    patch = _current_patch()
    if position_ids is None or position_ids.dim() != 2:
        return
    rank, size = patch.mesh.sequence_rank, patch.mesh.sequence_size
    if size > 1 and rows * size % patch.mode.multiple_of(size):
        raise ValueError(
            f"a shard of {rows} tokens on each of {size} ranks does not come from prepare_seq_parallel_inputs: "
            f"{patch.mode.name} splits rows into multiples of {patch.mode.multiple_of(size)} tokens"
        )
    whole = torch.arange(rows * size, device=position_ids.device).unsqueeze(0)
    expected = whole if size == 1 else patch.mode.shard(whole, rank, size)  # one process takes any length
    start = position_ids[:, :1] if size == 1 else 0
    if not bool((position_ids == expected + start).all()):
        raise ValueError(
            f"position_ids are not rank {rank}'s shard of one row under {patch.mode.name}: split whole rows that start "
            "at position 0 with prepare_seq_parallel_inputs and pass its local_position_ids; documents packed with "
            "restarting positions cannot be honoured"
        )

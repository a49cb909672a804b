"""What a patched Hugging Face model calls in place of its own attention, mask builders and loss.

Every check here that can fail on one rank alone is made together with the other ranks (`agreement`): once when a
forward pass builds its mask, and once in its first layer. Recomputed layers check nothing that needs the others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import huggingface
from .agreement import check_together
from .attention import AttentionSettings, sequence_parallel_attention
from .kernels import AttentionMask
from .kernels.base import AttentionKernel
from .loss import count_targets
from .memory.autocast import autocast_dtype
from .modes.base import ParallelMode
from .patch import Patch, current_patch


def attention_function(
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
    patch = current_patch()
    query, key, value = (x.to(autocast_dtype(x)) for x in (query, key, value))

    def check() -> dict[str, Any]:
        huggingface.refuse_layer_features(module, dropout, options)
        huggingface.refuse_padding_mask(attention_mask)
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"{key.shape[2]} keys for {query.shape[2]} queries: a key-value cache cannot be honoured")
        _select_kernel(patch, query)
        return {"queries": tuple(query.shape), "keys": tuple(key.shape), "dtype": query.dtype}

    if patch.layer_unchecked:  # the layers after it, and those run again in backward, are like it
        patch.layer_unchecked = False
        check_together(check, patch.mesh.sequence_group, "the ranks that share a row compute different attention")
    else:
        check()
    head_dim = query.shape[-1]
    settings = AttentionSettings(
        mode=patch.mode,
        kernel=_select_kernel(patch, query),
        scale=head_dim**-0.5 if scaling is None else scaling,
        mask=AttentionMask(causal=True),
    )
    out = sequence_parallel_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), settings)
    return out, None


def _select_kernel(patch: Patch, query: torch.Tensor) -> AttentionKernel:
    return patch.mode.select_kernel(patch.attn_kernel, query.device, query.dtype, query.shape[-1])


def create_mask(
    config: Any, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
) -> None:
    """Stand in for Hugging Face's mask builders: refuse what cannot be honoured, once a forward; build nothing."""
    patch = current_patch()
    ranks = patch.mode.ranks
    batch, tokens, _ = inputs_embeds.shape

    def check() -> dict[str, Any]:
        huggingface.refuse_cache(options.get("cache", options.get("past_key_values")), tokens)
        huggingface.refuse_padding_mask(attention_mask)
        huggingface.refuse_model_features(config, tokens * ranks.size, ranks.size)
        _check_positions(options.get("position_ids"), tokens, patch.mode)
        return {"batch size": batch, "tokens of the shard": tokens, "dtype": inputs_embeds.dtype}

    check_together(check, ranks.group, "the ranks that share a row run the model on different shards")
    patch.layer_unchecked = True


def _check_positions(position_ids: torch.Tensor | None, tokens: int, mode: ParallelMode) -> None:
    """Raise ValueError unless the positions of a shard of `tokens` are this rank's part of 0, 1, 2, ...

    One process may start anywhere. A shard must come from a row that starts at 0: ranks given different rows would
    agree by chance. Documents packed with restarting positions are refused.
    """
    rank, size = mode.ranks.rank, mode.ranks.size
    if size > 1 and tokens * size % mode.multiple_of:
        raise ValueError(
            f"a shard of {tokens} tokens on each of {size} ranks does not come from prepare_seq_parallel_inputs: "
            f"{mode.name} splits rows into multiples of {mode.multiple_of} tokens"
        )
    if position_ids is None:
        return
    if position_ids.dim() != 2 or position_ids.shape[1] != tokens:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} do not go with {tokens} tokens: give [batch, {tokens}]"
        )
    whole = torch.arange(tokens * size, device=position_ids.device).unsqueeze(0)
    expected = whole if size == 1 else mode.shard(whole)  # one process takes any length
    start = position_ids[:, :1] if size == 1 else 0
    if not bool((position_ids == expected + start).all()):
        raise ValueError(
            f"position_ids are not rank {rank}'s shard of one row under {mode.name}: split whole rows that start "
            "at position 0 with prepare_seq_parallel_inputs and pass its local_position_ids; documents packed with "
            "restarting positions cannot be honoured"
        )


def loss_of_shards(loss_function: Callable) -> Callable:
    """Hugging Face's loss, which would shift `labels` inside a shard and divide by the targets of one rank."""

    @functools.wraps(loss_function)
    def loss(*args: Any, **options: Any) -> torch.Tensor:
        mesh = current_patch().mesh
        if mesh.sequence_size > 1:
            targets = options.get("shift_labels")
            if targets is None:
                raise ValueError(
                    "labels= cannot be honoured on a shard of a row, inside of which they would be shifted once more: "
                    "shift whole rows with easy_context.next_token_targets, split them with shard_batch or "
                    "prepare_seq_parallel_inputs, and pass the shard's targets as shift_labels="
                )
            if options.get("num_items_in_batch") is None:
                options["num_items_in_batch"] = count_targets(targets, mesh.sequence_group)
        return loss_function(*args, **options)

    return loss

"""Replacements for the attention, mask builders and loss of a patched Hugging Face model.

Every check here that can fail on a single rank is made together with the other ranks (`agreement`), once when a forward
pass builds its mask and once in its first layer. Recomputed layers make no checks that need the other ranks.
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
from .kernels.documents import Documents
from .loss import count_targets
from .memory.autocast import autocast_dtype
from .modes.base import ParallelMode
from .packing import restarting_positions
from .patch import current_patch


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    documents: Documents | None = None,
    sliding_window: int | None = None,
    collect: Callable | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's interface: query `[batch, heads, shard, head_dim]` to out `[batch, shard, heads, head_dim]`.

    A model passes keyword arguments that it does not know on to every layer, also when a layer is run again in
    backward. So `documents`, which `prepare_seq_parallel_inputs` makes of whole rows, arrives here. A layer that has a
    `sliding_window` gives it: a query sees so many keys, its own the last of them. `collect`, of
    `memory.tiled_forward`, takes a tile's tensors, and a function that will compute attention of the whole shard.
    """
    if collect is not None:
        given: dict[str, Any] = {"attention_mask": attention_mask, "scaling": scaling, "dropout": dropout}
        given |= {"sliding_window": sliding_window, "documents": documents}
        attention = functools.partial(attention_function, module, **given, **options)
        return collect(query, key, value, attention), None
    patch = current_patch()
    query, key, value = (x.to(autocast_dtype(x)) for x in (query, key, value))
    if documents is not None and documents.is_single:
        documents = None  # each row is one document: nothing is to be kept apart
    row_length = query.shape[2] * patch.mode.ranks.size
    window = sliding_window if sliding_window is not None and sliding_window < row_length else None

    def select_kernel() -> AttentionKernel:
        what = query.device, query.dtype, query.shape[-1]
        return patch.mode.select_kernel(patch.attn_kernel, *what, documents=documents is not None)

    def check() -> dict[str, Any]:
        huggingface.refuse_layer_features(module, dropout, options)
        huggingface.refuse_padding_mask(attention_mask)
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"{key.shape[2]} keys for {query.shape[2]} queries: a key-value cache cannot be honoured")
        select_kernel()
        patch.mode.check_window(window)
        return {
            "queries": tuple(query.shape),
            "keys": tuple(key.shape),
            "dtype": query.dtype,
            "window": window,
            "checksum of documents": documents and documents.checksum,
        }

    def check_first_layer() -> dict[str, Any]:
        _check_documents(documents, query.shape[0], row_length)
        if (position_ids := options.get("position_ids")) is not None:
            _check_positions(position_ids, patch.mode, documents)
        return check()

    if patch.layer_unchecked:  # the layers after it, and those run again in backward, are like it
        patch.layer_unchecked = False
        check_together(
            check_first_layer, patch.mesh.sequence_group, "the ranks that share a row compute different attention"
        )
    else:
        check()
    head_dim = query.shape[-1]
    settings = AttentionSettings(
        mode=patch.mode,
        kernel=select_kernel(),
        scale=head_dim**-0.5 if scaling is None else scaling,
        mask=AttentionMask(window=window, documents=documents),
    )
    out = sequence_parallel_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), settings)
    return out, None


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
        huggingface.refuse_model_features(config, ranks.size)
        _check_lengths(tokens, options.get("position_ids"), patch.mode)
        return {"batch size": batch, "tokens of the shard": tokens, "dtype": inputs_embeds.dtype}

    check_together(check, ranks.group, "the ranks that share a row run the model on different shards")
    patch.layer_unchecked = True


def _check_lengths(tokens: int, position_ids: torch.Tensor | None, mode: ParallelMode) -> None:
    """Raise ValueError unless shards of `tokens` tokens can make up a row, and the positions are as many."""
    size = mode.ranks.size
    if size > 1 and tokens * size % mode.multiple_of:
        raise ValueError(
            f"a shard of {tokens} tokens on each of {size} ranks does not come from prepare_seq_parallel_inputs: "
            f"{mode.name} splits rows into multiples of {mode.multiple_of} tokens"
        )
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != tokens):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} do not go with {tokens} tokens: give [batch, {tokens}]"
        )


def _check_documents(documents: Documents | None, batch: int, tokens: int) -> None:
    """Raise ValueError unless `documents` are those of `batch` whole rows of `tokens` tokens."""
    if documents is not None and (len(documents.queries), documents.length) != (batch, tokens):
        raise ValueError(
            f"documents are those of {len(documents.queries)} rows of {documents.length} tokens, but {batch} rows of "
            f"{tokens} tokens are attended to: pass both to the model as prepare_seq_parallel_inputs returns them"
        )


def _check_positions(position_ids: torch.Tensor, mode: ParallelMode, documents: Documents | None) -> None:
    """Raise ValueError unless the positions of a shard `[batch, shard]` are this rank's part of 0, 1, 2, ...

    One process may start anywhere. A shard must come from a row that starts at 0: ranks given different rows would
    agree by chance. Positions may count from 0 in each document, if it is said where these start.
    """
    rank, size = mode.ranks.rank, mode.ranks.size

    def differ_from(whole: torch.Tensor) -> bool:
        expected = whole if size == 1 else mode.shard(whole)  # one process takes any length
        return bool((position_ids != expected).any())

    whole = torch.arange(position_ids.shape[1] * size, device=position_ids.device).unsqueeze(0)
    if size == 1:
        whole = whole + position_ids[:, :1]
    if differ_from(whole) and (documents is None or differ_from(restarting_positions(documents, position_ids.device))):
        raise ValueError(
            f"position_ids are not rank {rank}'s shard of one row under {mode.name}: split whole rows that start "
            "at position 0 with prepare_seq_parallel_inputs and pass its local_position_ids; for packed documents also "
            "give it documents= and pass what it returns"
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

"""A forward pass without gradients that holds little more than one layer's attention: evaluation of long rows.

Everything in a decoder layer but attention treats each token by itself. So q, k and v are made some tokens at a time,
attention runs once over the whole shard, and what follows it is again done by tiles, which overwrite the layer's input.
At the peak, in attention, the hidden states, q, k, v and attention's output are alive, and nothing else of their size.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

TILE_SIZE, SMALL_TILE_SIZE = 16384, 4096  # tokens


@contextlib.contextmanager
def tiled_forward(decoder: Any, tile_size: int = TILE_SIZE) -> Iterator[None]:
    """Inside the block, run the decoder's forward passes without gradients by tiles; others run as usual.

    Layers overwrite their input. So do not give the decoder `inputs_embeds` that are still needed, nor ask it for
    `output_hidden_states`.

    Args:
        decoder: a Hugging Face decoder of a patched family, without its output layer: `model.base_model`.
        tile_size: tokens of the local shard that are computed together outside of attention.

    Raises:
        ValueError: tile_size is not positive.
    """
    if tile_size < 1:
        raise ValueError(f"tile_size must be a positive number of tokens, got {tile_size}")
    with contextlib.ExitStack() as replaced:
        for layer in decoder.layers:
            forward = functools.partial(_run_layer, layer, layer.forward, tile_size)
            replaced.enter_context(_replaced_forward(layer, forward))
        forward = functools.partial(_run_norm, decoder.norm.forward, tile_size)
        replaced.enter_context(_replaced_forward(decoder.norm, forward))
        yield


def gather_layers_whole(model: Any) -> None:
    """Let ZeRO-3 gather a layer's weights once a pass, not once a tile; call it before DeepSpeed wraps the model."""
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, [type(model.base_model.layers[0])])


@contextlib.contextmanager
def _replaced_forward(module: torch.nn.Module, forward: Callable) -> Iterator[None]:
    """Give a module another forward inside the block; its hooks run as before."""
    own = vars(module).get("forward")  # None: its class's
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _run_norm(plain_forward: Callable, tile_size: int, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the last norm where `hidden` `[batch, shard, hidden_size]` lies."""
    if torch.is_grad_enabled():
        return plain_forward(hidden)
    for rows in hidden.split(tile_size, dim=1):
        rows.copy_(plain_forward(rows))
    return hidden


def _run_layer(
    layer: Any, plain_forward: Callable, tile_size: int, hidden_states: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Run a layer in place of its `plain_forward`, and return its input `[batch, shard, hidden_size]`, overwritten."""
    if torch.is_grad_enabled() or options.get("cache", options.get("past_key_values")) is not None:
        return plain_forward(hidden_states, **options)
    attention = layer.self_attn
    outs = _attend(layer, tile_size, hidden_states, options)
    for rows, out in zip(*(x.split(tile_size, dim=1) for x in (hidden_states, outs)), strict=True):
        # The layer's own forward adds residuals and runs the MLP; attention is done but for its last projection.
        with _replaced_forward(attention, lambda out=out, **_: (attention.o_proj(out.flatten(2)), None)):
            rows.copy_(plain_forward(rows, **options))
    return hidden_states


def _attend(layer: Any, tile_size: int, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return what attention gives to a layer's output projection, `[batch, shard, heads, head_dim]`."""
    row = _CollectedRow(hidden.shape[1])
    tiles = (x.split(tile_size, dim=1) for x in (hidden, *options["position_embeddings"]))
    with _replaced_forward(layer.self_attn.o_proj, lambda out: out):  # of this call only q, k and v are wanted
        for rows, *embeddings in zip(*tiles, strict=True):
            own = {"hidden_states": layer.input_layernorm(rows), "position_embeddings": tuple(embeddings)}
            layer.self_attn(**{**options, **own}, collect=row.collect)
    return row.attend()


class _CollectedRow:
    """q, k and v of a shard, put together from those of its tiles."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._collected = tokens, 0
        self._tensors: list[torch.Tensor] = []  # each [batch, tokens, heads, head_dim]
        self._attention: Callable | None = None

    def collect(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Callable) -> torch.Tensor:
        """Take a tile's tensors `[batch, heads, tile, head_dim]` and the attention that the row is to have.

        Returns:
            A tensor that may stand for attention's output where nothing reads it.
        """
        parts = [part.transpose(1, 2) for part in (query, key, value)]
        if not self._tensors:
            self._tensors = [x.new_empty(x.shape[0], self._tokens, *x.shape[2:]) for x in parts]
        for whole, part in zip(self._tensors, parts, strict=True):
            whole.narrow(1, self._collected, part.shape[1]).copy_(part)
        self._collected += parts[0].shape[1]
        self._attention = attention
        return parts[0]

    def attend(self) -> torch.Tensor:
        """Return attention's output for the whole shard."""
        assert self._attention is not None
        out, _ = self._attention(*(whole.transpose(1, 2) for whole in self._tensors))
        return out

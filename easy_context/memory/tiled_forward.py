"""A forward pass without gradients for evaluating long rows. It needs little more memory than one layer's attention.

Except for attention, a decoder layer treats each token independently. Therefore q, k and v are computed tile by tile,
attention runs once over the whole shard, and the rest of the layer runs tile by tile and overwrites the layer's input.
At the peak, during attention, the only large tensors are the hidden states, q, k, v and attention's output.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

TILE_SIZE, SMALL_TILE_SIZE = 16384, 4096  # tokens


@contextlib.contextmanager
def tiled_forward(decoder: Any, tile_size: int = TILE_SIZE) -> Iterator[None]:
    """Run the decoder's forward passes without gradients tile by tile inside the block; others run as usual.

    Layers overwrite their input. Do not pass `inputs_embeds` that are still needed, and do not request
    `output_hidden_states`.

    Args:
        decoder: a Hugging Face decoder of a patched family, without its output layer: `model.base_model`.
        tile_size: number of local tokens that are computed together outside of attention.

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
    """Make ZeRO-3 gather a layer's weights once per pass, not per tile. Call it before DeepSpeed wraps the model."""
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, [type(model.base_model.layers[0])])


@contextlib.contextmanager
def _replaced_forward(module: torch.nn.Module, forward: Callable) -> Iterator[None]:
    """Replace a module's forward inside the block; its hooks run as before."""
    own = vars(module).get("forward")  # None if forward is the class's method
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _run_norm(plain_forward: Callable, tile_size: int, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the last norm in place to `hidden` `[batch, shard, hidden_size]`."""
    if torch.is_grad_enabled():
        return plain_forward(hidden)
    for rows in hidden.split(tile_size, dim=1):
        rows.copy_(plain_forward(rows))
    return hidden


def _run_layer(
    layer: Any, plain_forward: Callable, tile_size: int, hidden_states: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Run a layer tile by tile, and return its output `[batch, shard, hidden_size]` in the memory of its input."""
    if torch.is_grad_enabled() or options.get("cache", options.get("past_key_values")) is not None:
        return plain_forward(hidden_states, **options)
    attention = layer.self_attn
    outs = _attend(layer, tile_size, hidden_states, options)
    for rows, out in zip(*(x.split(tile_size, dim=1) for x in (hidden_states, outs)), strict=True):
        # The layer's own forward adds residuals and runs the MLP. Only attention's last projection is still missing.
        with _replaced_forward(attention, lambda out=out, **_: (attention.o_proj(out.flatten(2)), None)):
            rows.copy_(plain_forward(rows, **options))
    return hidden_states


def _attend(layer: Any, tile_size: int, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return attention's output before the layer's output projection, `[batch, shard, heads, head_dim]`."""
    row = _CollectedRow(hidden.shape[1])
    tiles = (x.split(tile_size, dim=1) for x in (hidden, *options["position_embeddings"]))
    with _replaced_forward(layer.self_attn.o_proj, lambda out: out):  # only q, k and v are used
        for rows, *embeddings in zip(*tiles, strict=True):
            own = {"hidden_states": layer.input_layernorm(rows), "position_embeddings": tuple(embeddings)}
            layer.self_attn(**{**options, **own}, collect=row.collect)
    return row.attend()


class _CollectedRow:
    """q, k and v of a shard, assembled from its tiles."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._collected = tokens, 0
        self._tensors: list[torch.Tensor] = []  # each [batch, tokens, heads, head_dim]
        self._attention: Callable | None = None

    def collect(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Callable) -> torch.Tensor:
        """Add a tile's tensors `[batch, heads, tile, head_dim]`, and remember the row's attention function.

        Returns:
            A placeholder for attention's output, which nothing reads.
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

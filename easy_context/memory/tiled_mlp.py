"""Run the MLP of a decoder layer in tiles of tokens, so that its wide intermediate activations stay small.

With this package's gradient checkpointing, tiling adds no computation. Nothing reads the output of a recomputed layer,
so the recomputation skips the MLP's forward, and its backward runs forward and backward tile by tile. (Arctic Long
Sequence Training, arXiv 2506.13996, uses the same tiles but runs the forward a third time.)
"""

import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .autocast import autocast_as_now, autocast_dtype
from .layer_run import LayerRun, current_layer_run, layer_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def apply_tiled_mlp(
    model: "PreTrainedModel", tile_size: int = 16384, layers: Iterable[Any] | None = None
) -> "PreTrainedModel":
    """Run the MLPs of decoder layers in tiles of the sequence.

    Args:
        model: a Hugging Face decoder with `model.layers[i].mlp`, trained with this package's gradient checkpointing.
            Call it before DeepSpeed or DDP wraps the model.
        tile_size: number of local tokens in one tile; shards up to this length run as usual.
        layers: layers of the model whose MLPs run in tiles; all layers if None.

    Returns:
        The same model.

    Raises:
        ValueError: tile_size is not positive.
    """
    if tile_size < 1:
        raise ValueError(f"tile_size must be a positive number of tokens, got {tile_size}")
    for layer in model.model.layers if layers is None else layers:
        mlp = layer.mlp
        mlp.forward = types.MethodType(_tiled_forward(mlp.forward, tile_size), mlp)
    # ZeRO-3 gathers all weights of a leaf module together, and a tile needs all weights of the MLP. The mark has no
    # effect without ZeRO-3, which may shard the weights before or after this call.
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
    return model


def _tiled_forward(whole_forward: Callable, tile_size: int) -> Callable:
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        run = current_layer_run()
        keeps_projections = run is not None and run.projections is not None
        if hidden.shape[1] <= tile_size or keeps_projections:
            return whole_forward(hidden)
        return _TiledMLP.apply(hidden, whole_forward, tile_size, *self.parameters())

    return forward


class _TiledMLP(torch.autograd.Function):
    """An MLP in tiles. Its parameters are arguments, since ZeRO's and DDP's hooks expect one gradient per backward."""

    @staticmethod
    def forward(ctx, hidden, mlp, tile_size, *parameters):
        ctx.save_for_backward(hidden)
        ctx.mlp, ctx.tile_size, ctx.parameters = mlp, tile_size, parameters
        ctx.autocast = autocast_as_now(hidden.device)
        out = torch.empty_like(hidden, dtype=autocast_dtype(hidden))
        run = current_layer_run()
        if run is None or not run.output_unread:
            for tile, rows in zip(hidden.split(tile_size, dim=1), out.split(tile_size, dim=1), strict=True):
                rows.copy_(mlp(tile))
        return out

    @staticmethod
    def backward(ctx, dout):
        (hidden,) = ctx.saved_tensors
        trained = [p for p, needs in zip(ctx.parameters, ctx.needs_input_grad[3:], strict=True) if needs]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained]
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[1], ctx.tile_size):
            rows = slice(start, start + ctx.tile_size)
            tile = hidden[:, rows].detach().requires_grad_(dhidden is not None)
            # Only the graph of a tile's output is needed, not its values.
            with torch.enable_grad(), ctx.autocast(), layer_run(LayerRun(recomputing=True, output_unread=True)):
                out = ctx.mlp(tile)
            inputs = ([tile] if dhidden is not None else []) + trained
            grads = list(torch.autograd.grad(out, inputs, dout[:, rows]))
            if dhidden is not None:
                dhidden[:, rows] = grads.pop(0)
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        gradients = (total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        dparameters = [next(gradients) if needs else None for needs in ctx.needs_input_grad[3:]]
        return dhidden, None, None, *dparameters

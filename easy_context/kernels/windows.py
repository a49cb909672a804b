"""Compute a block that is cut into tiles one after the other with any kernel, and merge the results."""

from typing import TYPE_CHECKING

import torch

from .mask import FULL, AttentionMask
from .merge import merge_block_
from .tiles import Tile

if TYPE_CHECKING:
    from .base import AttentionKernel


def forward(
    kernel: "AttentionKernel", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, tiles: tuple[Tile, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the tiles of a block; other arguments and results as of `AttentionKernel.forward`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=wide)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide)
    for tile in tiles:
        rows, mask = _rows(tile), _mask(tile)
        tile_q, tile_k, tile_v = _read(tile, q[rows, tile.queries], k[rows, tile.keys], v[rows, tile.keys])
        tile_out, tile_lse = kernel.forward(tile_q, tile_k, tile_v, scale, mask)
        (tile_out,), tile_lse = _read(tile, tile_out), tile_lse.flip(-1) if _backwards(tile) else tile_lse
        merge_block_(out[rows, tile.queries], lse[rows, :, tile.queries], tile_out, tile_lse)
    return out.to(q.dtype), lse


def backward(
    kernel: "AttentionKernel",
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    tiles: tuple[Tile, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients through the tiles of a block, summed in float32 or wider; see `AttentionKernel.backward`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for tile in tiles:
        rows = _rows(tile)
        tile_lse = lse[rows, :, tile.queries]
        tile_lse = tile_lse.flip(-1) if _backwards(tile) else tile_lse.contiguous()
        tile_dout, tile_q, tile_out = _read(tile, *(x[rows, tile.queries] for x in (dout, q, out)))
        tile_k, tile_v = _read(tile, k[rows, tile.keys], v[rows, tile.keys])
        grads = kernel.backward(tile_dout, tile_q, tile_k, tile_v, tile_out, tile_lse, scale, _mask(tile))
        tile_dq, tile_dk, tile_dv = _read(tile, *grads)
        dq[rows, tile.queries] += tile_dq
        dk[rows, tile.keys] += tile_dk
        dv[rows, tile.keys] += tile_dv
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _rows(tile: Tile) -> slice:
    return slice(None) if tile.row is None else slice(tile.row, tile.row + 1)


def _mask(tile: Tile) -> AttentionMask:
    return FULL if tile.shape == "full" else AttentionMask()


def _backwards(tile: Tile) -> bool:
    """Return whether queries and keys are read backwards, which makes the tile causal."""
    return tile.shape == "from_own"


def _read(tile: Tile, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors `[batch, seq, heads, head_dim]` in the order in which the kernel reads them, and back again."""
    return tuple(x.flip(1) for x in tensors) if _backwards(tile) else tensors

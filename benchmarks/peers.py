"""Adapters to other libraries: sequence-parallel attention, and DeepSpeed ALST for whole steps.

Every adapter imports its library when it is built, so that a missing one is a row in the table that says so.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from easy_context.attention import AttentionSettings, sequence_parallel_attention
from easy_context.kernels import AttentionMask
from easy_context.mesh import CurrentMesh
from easy_context.modes import build_mode

from .flash_attn_shim import ensure_flash_attn

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SDP_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash": SDPBackend.FLASH_ATTENTION}


@dataclass
class AttentionMethod:
    """One way to compute a layer's attention over a row that the ranks share.

    Attributes:
        run: local q, k, v to the local out, differentiable; `[batch, shard, heads, head_dim]`, or heads before shard
            if `heads_first`.
        shard: from a whole `[batch, seq, heads, head_dim]` tensor to this rank's part of it.
        heads_first: the layout that `run` takes and gives.
        note: what a reader of the table should know.
        session: a context in which `run` and its backward work, entered once for many calls.
    """

    run: Attention
    shard: Callable[[torch.Tensor], torch.Tensor]
    heads_first: bool = False
    note: str = ""
    session: Callable[[], contextlib.AbstractContextManager] = field(default=contextlib.nullcontext)


def shard_as(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """How a mode splits a row over all ranks of the run."""
    return build_mode(mode, CurrentMesh()).shard


def ring_flash_attn() -> AttentionMethod:
    """ring-flash-attn's zigzag ring on the FlashAttention-2 kernel: `--attn-engine library`.

    The engine makes the calls that the library's own autograd function makes, so the peer loses nothing.
    """
    note = ensure_flash_attn()
    mode = build_mode("zigzag_ring_attn", CurrentMesh(), engine="library")

    def run(q, k, v):
        kernel = mode.select_kernel("auto", q.device, q.dtype, q.shape[-1])
        settings = AttentionSettings(mode, kernel, q.shape[-1] ** -0.5, AttentionMask(causal=True))
        return sequence_parallel_attention(q, k, v, settings)

    return AttentionMethod(run, mode.shard, note=note or "")


def yunchang_ulysses() -> AttentionMethod:
    """yunchang's Ulysses on the FlashAttention-2 kernel.

    Its own layer, not `--attn-engine library`: the layer keeps q, k and v in head layout for backward, while the
    engine, made for checkpointed layers, sends them again.
    """
    note = ensure_flash_attn()
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA)
    shard = shard_as("ulysses_attn")
    return AttentionMethod(lambda q, k, v: layer(q, k, v, causal=True), shard, note=note or "")


def usp_ring_degree(size: int) -> int:
    """Return how many of `size` ranks form a ring, in ours and the peer: Ulysses over pairs, a ring over the rest."""
    return size // 2 if size % 2 == 0 and size > 2 else size


def usp_degrees(size: int) -> str:
    """Return both degrees as a note for the table."""
    return f"Ulysses {size // usp_ring_degree(size)} × ring {usp_ring_degree(size)}"


def yunchang_usp() -> AttentionMethod:
    """yunchang's unified sequence parallelism (arXiv 2405.07719)."""
    note = ensure_flash_attn()
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    rank, size = dist.get_rank(), dist.get_world_size()
    ring = usp_ring_degree(size)
    set_seq_parallel_pg(size // ring, ring, rank, size)
    layer = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.FA)
    shard = build_mode("usp_attn", CurrentMesh(ring_degree=usp_ring_degree)).shard
    note = "; ".join(filter(None, (usp_degrees(size), note)))
    return AttentionMethod(lambda q, k, v: layer(q, k, v, causal=True), shard, note=note)


def torch_context_parallel(kernel: str, device: torch.device, repeat_kv: bool) -> AttentionMethod:
    """PyTorch's context_parallel, load-balanced, with its default way of passing keys on.

    Args:
        kernel: "cudnn" or "torch_flash", the backend of scaled_dot_product_attention.
        device: of this process.
        repeat_kv: give each query head its own key head, for versions whose context_parallel lacks grouped heads.
    """
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor.experimental import context_parallel
    except ImportError:  # where it may move when it leaves the prototype state
        from torch.distributed.tensor import context_parallel

    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))

    @contextlib.contextmanager
    def session() -> Iterator[None]:
        # It shards the buffers it is given; q, k and v are shards already, so it gets one that nobody reads.
        unused = torch.zeros(1, 2 * size, device=device)
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[1]), sdpa_kernel(SDP_BACKENDS[kernel]):
            yield

    def run(q, k, v):
        if repeat_kv:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        # Looked up at every call: the session rebinds it.
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    note = "key heads repeated" if repeat_kv else ""
    return AttentionMethod(run, shard_as("zigzag_ring_attn"), heads_first=True, note=note, session=session)


@contextlib.contextmanager
def deepspeed_alst(kernel: str, config: Any, seq_length: int | None = None) -> Iterator[Any]:
    """DeepSpeed's Ulysses for Hugging Face models (arXiv 2506.13996) while the block runs.

    Args:
        kernel: "cudnn" or "torch_flash", the backend of scaled_dot_product_attention; "auto" leaves PyTorch the choice.
        config: of the model; its attn_implementation becomes sdpa.
        seq_length: of all rows; None if it varies.

    Yields:
        the `mpu` to pass to deepspeed.initialize.

    Raises:
        ValueError: there is one process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise ValueError("DeepSpeed ALST splits rows over several processes: launch with torchrun --nproc_per_node 2")
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
    import deepspeed.utils.groups
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config._attn_implementation = "sdpa"
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=_HasConfig(config),
        core_attn_implementation="sdpa",
        sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=1,
        seq_length=seq_length,
        seq_length_is_variable=seq_length is None,
    )
    try:
        with sdpa_kernel(SDP_BACKENDS[kernel]) if kernel in SDP_BACKENDS else contextlib.nullcontext():
            yield mpu
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original
        # It makes its groups once a process; the next model gets new ones, and other engines must not find these.
        mpu._SEQUENCE_PARALLEL_GROUP = mpu._SEQUENCE_DATA_PARALLEL_GROUP = None
        deepspeed.utils.groups.mpu = None


@dataclass
class _HasConfig:
    """register_with_transformers reads nothing of a model but its config."""

    config: Any


def tile_mlp_as_alst(model: torch.nn.Module) -> None:
    """Run every MLP in DeepSpeed's TiledMLP, with as many tiles as its documentation says: seq / hidden_size."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    for layer in model.model.layers:
        mlp = layer.mlp
        weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
        whole_forward = type(mlp).forward

        def tiled(hidden, mlp=mlp, weights=weights, whole_forward=whole_forward):
            tiles = math.ceil(hidden.shape[1] / hidden.shape[2])
            return TiledMLP.apply(whole_forward, mlp, hidden, tiles, weights)

        mlp.forward = tiled

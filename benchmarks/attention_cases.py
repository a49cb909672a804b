"""The methods that attention.py compares."""

import argparse
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from easy_context.attention import AttentionSettings, sequence_parallel_attention
from easy_context.kernels import AttentionMask, select_kernel
from easy_context.mesh import CurrentMesh
from easy_context.modes import find_mode

from . import peers
from .loopback import alone
from .world import World
from .zigzag_all_gather import ZigzagAllGather


@dataclass
class Case:
    """A method to run.

    Attributes:
        method: its name in the table.
        kernel: what computes a block.
        build: makes the method; may fail.
        fallback: what to build if the first fails or is wrong.
        devices: how many share the row.
        checked: its result is right, and compared with float64.
    """

    method: str
    kernel: str
    build: Callable[[], peers.AttentionMethod]
    fallback: Callable[[], peers.AttentionMethod] | None = None
    devices: int = 1
    checked: bool = True


def list_cases(args: argparse.Namespace, world: World) -> list[Case]:
    """Return single-GPU kernels first (they set the limit), then our modes, then peers."""
    kernels = args.kernels or default_kernels(world)
    own = functools.partial(own_method, args=args, world=world)
    cases = [Case("one GPU", kernel, functools.partial(own, "data_parallel", kernel)) for kernel in kernels]
    if world.size == 1:
        return cases + [
            Case(
                f"{mode}, rank {rank} of {size} alone",
                kernel,
                functools.partial(lone_method, mode, kernel, rank, size, args, world),
                devices=size,
                checked=False,
            )
            for size, mode, kernel in itertools.product(args.alone, args.modes, kernels)
            for rank in (0, size - 1)
        ]
    shared = functools.partial(Case, devices=world.size)
    modes = modes_here(args.modes, world)
    cases += [shared(mode, kernel, functools.partial(own, mode, kernel)) for mode in modes for kernel in kernels]
    fa2 = "torch_flash"
    if "ring_flash_attn" in args.peers:
        cases.append(shared("ring-flash-attn zigzag", fa2, peers.ring_flash_attn))
    if "yunchang_ulysses" in args.peers:
        cases.append(shared("yunchang Ulysses", fa2, peers.yunchang_ulysses))
    if "yunchang_usp" in args.peers and world.size > 2:  # on two ranks it is one of the two above
        cases.append(shared("yunchang USP", fa2, peers.yunchang_usp))
    if "context_parallel" in args.peers:
        for kernel in ("cudnn", fa2):
            build = functools.partial(peers.torch_context_parallel, kernel, world.device)
            native, repeated = (functools.partial(build, repeat_kv=repeat) for repeat in (False, True))
            cases.append(shared("context_parallel", kernel, native, fallback=repeated))
    return cases


def default_kernels(world: World) -> list[str]:
    """Return the kernels that are compared where none are asked for."""
    return ["flash_attn_4", "cudnn", "torch_flash"] if world.device.type == "cuda" else ["cpu"]


def modes_here(modes: list[str], world: World) -> list[str]:
    """Return the modes that differ on so many ranks: usp_attn on two is one of the others."""
    return [mode for mode in modes if mode != "usp_attn" or world.size > 2]


def our_settings(mode_name: str, kernel_name: str, args: argparse.Namespace, world: World) -> AttentionSettings:
    """Return how one of our modes computes with one kernel over all processes of the run."""
    mode_class = ZigzagAllGather if mode_name == ZigzagAllGather.name else find_mode(mode_name)
    return AttentionSettings(
        mode=mode_class.over(CurrentMesh(ring_degree=peers.usp_ring_degree)),
        kernel=select_kernel(kernel_name, world.device, torch.bfloat16, args.head_dim),
        scale=args.head_dim**-0.5,
        mask=AttentionMask(causal=True),
    )


def own_method(mode_name: str, kernel_name: str, args: argparse.Namespace, world: World) -> peers.AttentionMethod:
    """Return one of our modes with one kernel."""
    settings = our_settings(mode_name, kernel_name, args, world)
    run = functools.partial(sequence_parallel_attention, settings=settings)
    note = peers.usp_degrees(world.size) if mode_name == "usp_attn" else ""
    return peers.AttentionMethod(run, settings.mode.shard, note=note)


def lone_method(
    mode_name: str, kernel_name: str, rank: int, size: int, args: argparse.Namespace, world: World
) -> peers.AttentionMethod:
    """Return one rank's part of one of our modes, without communication."""
    return alone(our_settings(mode_name, kernel_name, args, world), rank, size)

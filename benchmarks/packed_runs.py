"""Check, count and time what packed.py compares."""

import argparse
import copy
import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from easy_context.attention import AttentionSettings, sequence_parallel_attention
from easy_context.kernels import AttentionMask, check_kernel
from easy_context.kernels.base import AttentionKernel
from easy_context.kernels.documents import Documents

from .attention_cases import our_settings
from .attention_runs import Tensors, check, expected_results, local_inputs, make_inputs, measure
from .peers import AttentionMethod
from .world import World


def draw_lengths(seq_length: int, parts: int, sigma: float, seed: int) -> list[int]:
    """Return lengths of documents that fill a row, log-normal with mean `seq_length` / `parts`; the last one is cut."""
    rng = random.Random(f"{seed} {seq_length} {parts}")
    lengths: list[int] = []
    while (rest := seq_length - sum(lengths)) > 0:
        drawn = rng.lognormvariate(math.log(seq_length / parts) - sigma**2 / 2, sigma)
        lengths.append(min(max(1, round(drawn)), rest))
    return lengths


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """A row of documents.

    Attributes:
        whole: q, k, v and dout of the whole row, `[batch, seq, heads, head_dim]`.
        parts: of the row that a document has on average.
        lengths: tokens of each document; the same in each row of the batch.
    """

    whole: Tensors
    parts: int
    lengths: list[int]

    @classmethod
    def draw(cls, whole: Tensors, parts: int, args: argparse.Namespace) -> "PackedRow":
        """Return a row with documents of random lengths, the same for the same flags."""
        return cls(whole, parts, draw_lengths(whole[0].shape[1], parts, args.sigma, args.seed))

    @property
    def mask(self) -> AttentionMask:
        """The causal mask within documents."""
        rows, length = self.whole[0].shape[:2]
        return AttentionMask(documents=Documents.of_rows([[0, *accumulate(self.lengths[:-1])]] * rows, length))


def method_of(settings: AttentionSettings) -> AttentionMethod:
    """Return a mode with one kernel over the whole row, dense or packed as its mask says."""
    return AttentionMethod(functools.partial(sequence_parallel_attention, settings=settings), settings.mode.shard)


def apart(settings: AttentionSettings, lengths: Sequence[int]) -> AttentionMethod:
    """Return a mode that gets each document as a row of its own, padded to what the mode can split."""
    multiple, size = settings.mode.multiple_of, settings.mode.ranks.size
    padded = [length + -length % multiple for length in lengths]

    def shard(whole: torch.Tensor) -> torch.Tensor:
        documents = whole.split(list(lengths), dim=1)
        rows = [F.pad(x, (0, 0, 0, 0, 0, n - x.shape[1])) for x, n in zip(documents, padded, strict=True)]
        return torch.cat([settings.mode.shard(row) for row in rows], dim=1)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = zip(*(x.split([n // size for n in padded], dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([sequence_parallel_attention(*row, settings) for row in rows], dim=1)

    return AttentionMethod(run, shard)


def pairs_of(mask: AttentionMask, queries: int, keys: int, rows: int) -> int:
    """Return the (query, key) pairs that a block's kernel has to compute for each head."""
    slices = [(queries, keys)] * rows
    if mask.documents is not None:
        slices = [(q.stop - q.start, k.stop - k.start) for _, q, k in mask.documents.slices]
    return sum(q * (q + 1) // 2 if mask.causal else q * k for q, k in slices)


def count_pairs(settings: AttentionSettings, inputs: Tensors) -> int:
    """Return the pairs that this rank's kernel computes in a forward pass, over all heads; collective.

    Args:
        settings: the mode, the kernel and the mask of the row.
        inputs: this rank's q, k and v, `[batch, shard, heads, head_dim]`.
    """
    counted = 0

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: AttentionMask) -> Tensors:
        nonlocal counted
        counted += q.shape[2] * pairs_of(mask, q.shape[1], k.shape[1], q.shape[0])
        return settings.kernel.forward(q, k, v, scale, mask)

    kernel: AttentionKernel = copy.copy(settings.kernel)
    kernel.forward = forward
    with torch.no_grad():
        sequence_parallel_attention(*inputs, dataclasses.replace(settings, kernel=kernel))
    return counted


def run_case(
    mode: str, kernel: str, row: PackedRow, seconds: float, args: argparse.Namespace, world: World
) -> dict[str, Any]:
    """Return what one mode with one kernel does with a row, with a note about what it cannot do.

    Args:
        mode, kernel: their names.
        row: to run on.
        seconds: for all measurements.
        args: of packed.py.
        world: the ranks.
    """
    found: dict[str, Any] = {}

    def run() -> None:
        check_kernel(kernel, world.device, torch.bfloat16, args.head_dim, documents=True)
        dense = our_settings(mode, kernel, args, world)
        packed = dataclasses.replace(dense, mask=row.mask)
        found.update(_errors(dense, row.parts, args, world))
        found.update(_balance(packed, row, world))
        methods = {"packed": method_of(packed), "dense": method_of(dense), "apart": apart(dense, row.lengths)}
        for name, method in methods.items():
            found[f"{name}_ms"] = measure(method, row.whole, args, world, seconds / 3)["total_ms"]

    _, problem = world.attempt(run)
    if problem is not None:
        found["note"] = problem
    if "apart_ms" in found:
        found["vs_dense"], found["vs_apart"] = (found[name] / found["packed_ms"] for name in ("dense_ms", "apart_ms"))
        found["of_pairs"] = found["vs_dense"] * found["pairs_of_dense"]
    world.say(f"{mode}, {kernel}, 1/{row.parts}: {found.get('note') or format(found['packed_ms'], '.2f') + ' ms'}")
    return found


def _errors(dense: AttentionSettings, parts: int, args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Return the largest error on a short row."""
    if not args.check_length:
        return {}
    row = PackedRow.draw(make_inputs(args, world, args.check_length), parts, args)
    method = method_of(dataclasses.replace(dense, mask=row.mask))
    return {"error": max(check(method, row.whole, expected_results(args, row.whole, row.mask), world).values())}


def _balance(packed: AttentionSettings, row: PackedRow, world: World) -> dict[str, Any]:
    """Return the pairs of all ranks as a part of the dense row's, and those of the mean rank as one of the largest."""
    own = count_pairs(packed, local_inputs(method_of(packed), row.whole)[0])
    total = int(world.total(torch.tensor(own, device=world.device)))
    batch, seq_length, heads, _ = row.whole[0].shape
    dense = heads * pairs_of(AttentionMask(), seq_length, seq_length, batch)
    return {"pairs_of_dense": total / dense, "balance": total / world.size / world.largest(own)}

"""USP: Ulysses inside, a zigzag ring outside (arXiv 2405.07719).

The ranks that share a row form `ring_degree` Ulysses groups of consecutive ranks. Ranks with the same position in their
groups form a ring. Each Ulysses group holds the shard of one zigzag_ring_attn rank, divided evenly among its ranks. An
all-to-all inside the group gives each rank the group's whole shard for some of the heads, and the rings compute
attention. The all-to-all can stay inside a node; only the ring, which overlaps with computation, crosses nodes.
"""

import logging
import math
import os
from typing import Any

from .base import ParallelMode
from .ulysses_attn import UlyssesAttention
from .zigzag_ring_attn import ZigzagRingAttention

logger = logging.getLogger(__name__)


class UspAttention(ParallelMode):
    """USP attention. The query heads must be divisible by the Ulysses group's size, number of ranks / ring_degree."""

    name = "usp_attn"
    ring_class: type[ZigzagRingAttention] = ZigzagRingAttention
    ulysses_class: type[UlyssesAttention] = UlyssesAttention

    def __init__(self, ranks, ring, ulysses) -> None:
        """Create the mode for `ranks`, which share a row, with this rank's `ring` and its `ulysses` group."""
        super().__init__(ranks)
        self._ring = self.ring_class(ring)
        self._ulysses = self.ulysses_class(ulysses)

    @classmethod
    def over(cls, mesh):
        return cls(mesh.sequence, mesh.ring, mesh.ulysses)

    def make_groups(self):
        ring, ulysses = self._ring.ranks.size, self._ulysses.ranks.size
        logger.info("usp_attn: all-to-all over %d ranks inside, a ring of %d outside", ulysses, ring)
        super().make_groups()
        for part in (self._ring, self._ulysses):
            if part.ranks.size > 1:
                part.make_groups()

    @classmethod
    def ring_degree(cls, requested, size, heads=None):
        """By default, make Ulysses groups as large as a node and the number of heads allow."""
        if requested is None:
            ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
            return size // math.gcd(size, ranks_of_node, heads or 0)
        if requested < 1 or size % requested:
            raise ValueError(
                f"ring_degree {requested} must divide the {size} ranks that share a row: choose a divisor of {size}"
            )
        return requested

    def check(self, config, seq_length):
        super().check(config, seq_length)
        self._check_query_heads(config.num_attention_heads)

    @property
    def multiple_of(self):
        return 2 * self.ranks.size

    def chunk_indices(self, rank):
        """Cut each ring chunk into one piece per rank of a Ulysses group; each rank holds two consecutive pieces."""
        size = self._ulysses.ranks.size
        of_group = [size * chunk + i for chunk in self._ring.chunk_indices(rank // size) for i in range(size)]
        first = 2 * (rank % size)
        return of_group[first : first + 2]

    def _forward(self, q, k, v, scale, mask, kernel):
        self._check_query_heads(q.shape[2])
        ring: Any = _RingKernel(self._ring, kernel)  # it has the methods of a kernel that Ulysses calls
        return self._ulysses.forward(q, k, v, scale=scale, mask=mask, kernel=ring)

    def _backward(self, dout, q, k, v, out, lse, scale, mask, kernel):
        ring: Any = _RingKernel(self._ring, kernel)
        return self._ulysses.backward(dout, q, k, v, out, (lse,), scale=scale, mask=mask, kernel=ring)

    def _check_query_heads(self, heads: int) -> None:
        size, group = self.ranks.size, self._ulysses.ranks.size
        if heads % group:
            raise ValueError(
                f"seq_algo usp_attn cannot split {heads} query heads over the {group} ranks of an all-to-all: use "
                f"ring_degree {size // math.gcd(size, heads)}, which leaves {math.gcd(size, heads)}"
            )


class _RingKernel:
    """An adapter that lets Ulysses call the ring as its kernel on some of the heads."""

    def __init__(self, ring: ZigzagRingAttention, kernel) -> None:
        self._ring = ring
        self._kernel = kernel

    def forward(self, q, k, v, scale, mask):
        out, (lse,) = self._ring.forward(q, k, v, scale=scale, mask=mask, kernel=self._kernel)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, scale, mask):
        return self._ring.backward(dout, q, k, v, out, (lse,), scale=scale, mask=mask, kernel=self._kernel)

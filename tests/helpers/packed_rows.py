"""Rows of packed documents, and float64 attention of each by itself, against which packed attention is held."""

import random

import torch
from plain_attention import Attention, attention_with_gradients

from easy_context.kernels import AttentionMask
from easy_context.kernels.documents import Documents

Starts = tuple[tuple[int, ...], ...]


def random_starts(rng: random.Random, batch: int, length: int, edges: int = 1) -> Starts:
    """Where documents start in each row: other places in each.

    Among them are documents of one token, borders at the edges of `edges` equal parts of the row (where shards end) and
    beside them, and now and then a document that reaches over all of these.
    """
    return tuple(_starts(rng, length, edges) for _ in range(batch))


def _starts(rng: random.Random, length: int, edges: int) -> tuple[int, ...]:
    places = {0}
    for edge in range(length // edges, length, max(1, length // edges)):
        places.update(rng.sample([edge - 1, edge, edge + 1], rng.randint(0, 3)))
    places.update(rng.randrange(length) for _ in range(rng.randint(0, 5)))
    if rng.random() < 0.5:  # one document over about half of the row
        first = rng.randrange(length)
        places -= set(range(first + 1, first + length // 2))
    return tuple(sorted(place for place in places if 0 <= place < length))


def packed_mask(starts: Starts, length: int, window: int | None = None) -> AttentionMask:
    return AttentionMask(window=window, documents=Documents.of_rows(starts, length))


def documents_apart(q, k, v, dout, scale: float, starts: Starts, window: int | None = None) -> Attention:
    """Plain causal attention, forward and backward, in float64, one document after the other, perhaps with a window."""
    rows = []
    for row, places in enumerate(starts):
        parts = []
        for start, end in zip(places, [*places[1:], q.shape[1]], strict=True):
            document = (x[row : row + 1, start:end] for x in (q, k, v, dout))
            parts.append(attention_with_gradients(*document, scale, window=window))
        rows.append({name: torch.cat([getattr(part, name) for part in parts], dim) for name, dim in _DIMENSIONS})
    return Attention(**{name: torch.cat([row[name] for row in rows]) for name, _ in _DIMENSIONS})


_DIMENSIONS = (("out", 1), ("lse", 2), ("dq", 1), ("dk", 1), ("dv", 1))

"""Perplexity as a function of context length and of position, exact over all tokens.

In a causal model the first L tokens of a long pass are the pass over L tokens, so one pass over a document gives its
perplexity at every length up to its own (`curve`), and by position (`by_position`). Documents longer than a model can
take are read through a sliding window instead (`sliding_window`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ...common.constants import IGNORE_INDEX

# Takes input_ids and targets, both int64 [batch, seq]; gives float32 [batch, seq], 0 where there is no target.
TokenLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Sum:
    """Summed negative log-likelihood (natural logarithm, float64) and how many tokens are in it."""

    loss: float = 0.0
    tokens: int = 0

    def add(self, other: "Sum") -> None:
        """Add another sum to this one."""
        self.loss += other.loss
        self.tokens += other.tokens

    @property
    def mean(self) -> float:
        """Mean loss over the tokens; NaN without any."""
        return self.loss / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """e to the mean loss; infinite rather than an error where that overflows."""
        return math.exp(self.mean) if not self.mean > 700 else math.inf


@dataclass(frozen=True)
class TokenSums:
    """Running sums over one document, so that any stretch of it costs one subtraction.

    Attributes:
        loss: float64 `[seq + 1]`; loss[n] is the sum over the first n targets.
        tokens: int64 `[seq + 1]`; how many of them were scored.
    """

    loss: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, losses: torch.Tensor, targets: torch.Tensor) -> "TokenSums":
        """Return the sums of float `[seq]` losses and int64 `[seq]` targets."""
        start = torch.zeros(1, dtype=torch.float64)
        scored = targets != IGNORE_INDEX
        return cls(
            torch.cat((start, losses.double().where(scored, 0).cumsum(0))),
            torch.cat((start.long(), scored.long().cumsum(0))),
        )

    def between(self, start: int, stop: int) -> Sum:
        """Return the sum over the targets start .. stop - 1."""
        return Sum(
            float(self.loss[stop] - self.loss[start]),
            int(self.tokens[stop] - self.tokens[start]),
        )


def curve(sums: TokenSums, lengths: Iterable[int]) -> dict[int, Sum]:
    """Return, for each length L that the document reaches, the sum over its first L tokens: L - 1 are predicted."""
    longest = len(sums.loss) - 1
    return {length: sums.between(0, length - 1) for length in lengths if length <= longest}


def by_position(sums: TokenSums, edges: list[int]) -> dict[tuple[int, int], Sum]:
    """Return sums over tokens at positions edges[i] to edges[i + 1] - 1; the first token of all is never predicted."""
    last = len(sums.loss) - 2  # position of the last token; token n is the target at index n - 1
    buckets = {}
    for start, stop in zip(edges, edges[1:], strict=False):
        if start <= last:
            buckets[start, stop] = sums.between(max(start - 1, 0), min(stop - 1, last))
    return buckets


def position_edges(first: int, longest: int) -> list[int]:
    """Return 0, `first`, its doubles and `longest`: the borders of the table of perplexity by position."""
    edges = [0]
    edge = first
    while edge < longest:
        edges.append(edge)
        edge *= 2
    return [*edges, longest]


def sliding_window(
    token_losses: TokenLosses, input_ids: torch.Tensor, targets: torch.Tensor, window: int, stride: int
) -> Sum:
    """Score every token of a document but its first once, by the first window that holds the token before it.

    Windows of `window` tokens begin every `stride` tokens. The last target of a window is the token just behind it. The
    first window scores all its targets, each later one its last `stride` (the last of all: what is left). So a token at
    position `window` or later has at least window - stride + 1 and at most `window` tokens before it, in its window.

    Args:
        token_losses: of the model.
        input_ids, targets: int64 `[seq]`.
        window, stride: tokens, 1 <= stride <= window.

    Returns:
        The sum over the whole document.
    """
    total, scored_until, length = Sum(), 0, len(input_ids)
    for start in range(0, length, stride):
        stop = min(start + window, length)
        ids, wanted = input_ids[None, start:stop], targets[None, start:stop].clone()
        wanted[:, : scored_until - start] = IGNORE_INDEX
        losses = token_losses(ids, wanted)
        total.add(Sum(float(losses.double().sum()), int((wanted != IGNORE_INDEX).sum())))
        scored_until = stop
        if stop == length:
            break
    return total


def pool(per_document: Iterable[dict]) -> dict:
    """Add up the sums of many documents, key by key, so that means are over tokens and not over documents."""
    totals: dict = defaultdict(Sum)
    for sums in per_document:
        for key, value in sums.items():
            totals[key].add(value)
    return dict(totals)

"""Which keys a query sees."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees.

    Attributes:
        causal: query i sees keys 0..i; asks for as many keys as queries.
        window: if given, query i sees only the last `window` keys up to and including key i.
    """

    causal: bool = True
    window: int | None = None


FULL = AttentionMask(causal=False)

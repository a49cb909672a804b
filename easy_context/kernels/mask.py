"""Which keys a query sees, in a whole row and in a block of it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from .documents import Documents

Ranges = tuple[range, ...]  # places in the row of the tokens that a rank holds, in their order


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees.

    Attributes:
        causal: query i sees keys 0..i; asks for as many keys as queries.
        window: if given, query i sees only the last `window` keys up to and including key i.
        documents: if given, a query sees keys of its own document only.
    """

    causal: bool = True
    window: int | None = None
    documents: Optional["Documents"] = None

    def among(self, tokens: Ranges) -> "AttentionMask":
        """Return the mask among those tokens of the row that one rank holds."""
        return self if self.documents is None else self._within(self.documents.among(tokens, tokens))

    def block(self, queries: Ranges, keys: Ranges, first: int = 0) -> Optional["Block"]:
        """Return what a causal row has to compute between the queries of one rank and the keys of another.

        Where queries and keys come in chunks, as in zigzag_ring_attn, early queries may see no key, and no query late
        keys; all others must lie in order, every query behind every key.

        Args:
            queries: their places in the row.
            keys: theirs.
            first: how many tokens of the first rank come before these queries.

        Returns:
            The part of the block that the documents leave, or None if they leave nothing.
        """
        shown = tuple(part for part in keys if part.start < queries[-1].start)
        seeing = tuple(part for part in queries if part.start > keys[0].start)
        first += sum(map(len, queries)) - sum(map(len, seeing))  # those that see nothing come first
        if self.documents is None:
            return Block(slice(first, first + sum(map(len, seeing))), slice(0, sum(map(len, shown))), FULL)
        own, others, documents = self.documents.among(seeing, shown).cut()
        if not own:
            return None
        return Block(
            slice(first + own.start, first + own.stop), slice(others.start, others.stop), FULL._within(documents)
        )

    def _within(self, documents: "Documents") -> "AttentionMask":
        """Return this mask within `documents`."""
        return replace(self, documents=None if documents.is_single else documents)


FULL = AttentionMask(causal=False)


@dataclass(frozen=True)
class Block:
    """Attention of one rank's queries to another rank's keys.

    Attributes:
        queries: the tokens of the first rank's shard that see any of the keys.
        keys: the tokens of the other rank's shard that they see.
        mask: which of these keys each of these queries sees.
    """

    queries: slice
    keys: slice
    mask: AttentionMask

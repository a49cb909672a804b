"""Attention masks of whole rows and of blocks of a row."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

from .tiles import Ranges, Tile, window_tiles

if TYPE_CHECKING:
    from .documents import Documents


@dataclass(frozen=True)
class AttentionMask:
    """An attention mask: the keys that each query attends to.

    Attributes:
        causal: whether query i attends only to keys 0..i; requires equal numbers of keys and queries.
        window: if given, query i of a causal row attends only to the last `window` keys up to and including key i.
        documents: if given, a query attends only to keys of its own document.
        tiles: if given, the tiles of a block with a window; attention is limited to the pairs inside these tiles.
    """

    causal: bool = True
    window: int | None = None
    documents: Optional["Documents"] = None
    tiles: tuple[Tile, ...] | None = None

    @property
    def leaves_out_keys(self) -> bool:
        """Whether ranks need only some of each other's keys."""
        return self.window is not None or self.documents is not None

    def among(self, tokens: Ranges) -> "AttentionMask":
        """Return the mask among the tokens of the row that one rank holds."""
        if self.window is not None:
            tiles, length = window_tiles(self.window, self.documents, tokens, tokens), sum(map(len, tokens))
            return _tiled(tiles, length, length)
        return self if self.documents is None else self._within(self.documents.among(tokens, tokens))

    def block(self, queries: Ranges, keys: Ranges, first: int = 0) -> Optional["Block"]:
        """Return what a causal row has to compute between the queries of one rank and the keys of another.

        Where queries and keys come in chunks, as in zigzag_ring_attn, early queries may see no key, and no query late
        keys; all others must lie in order, every query behind every key.

        Args:
            queries: positions of the queries in the row.
            keys: positions of the keys in the row.
            first: number of tokens of the first rank before these queries.

        Returns:
            The part of the block that window and documents do not mask, or None if they mask all of it.
        """
        if self.window is not None:
            return _cut(window_tiles(self.window, self.documents, queries, keys), first)
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
        queries: tokens of the first rank's shard that attend to any of the keys.
        keys: tokens of the other rank's shard that these queries attend to.
        mask: mask between these queries and these keys.
    """

    queries: slice
    keys: slice
    mask: AttentionMask


def _cut(tiles: tuple[Tile, ...], first: int) -> Block | None:
    """Return the part of a block that has tiles, whose first query is that of number `first`; None if there is none."""
    if not tiles:
        return None
    queries = slice(min(tile.queries.start for tile in tiles), max(tile.queries.stop for tile in tiles))
    keys = slice(min(tile.keys.start for tile in tiles), max(tile.keys.stop for tile in tiles))
    tiles = tuple(tile.moved(queries.start, keys.start) for tile in tiles)
    mask = _tiled(tiles, queries.stop - queries.start, keys.stop - keys.start)
    return Block(slice(first + queries.start, first + queries.stop), keys, mask)


def _tiled(tiles: tuple[Tile, ...], queries: int, keys: int) -> AttentionMask:
    """Return the mask of a block of these tiles, which is a plain one if a single tile fills the block."""
    whole = slice(0, queries), slice(0, keys)
    if tiles == (Tile(None, *whole, "causal"),):
        return AttentionMask()
    return FULL if tiles == (Tile(None, *whole, "full"),) else AttentionMask(causal=False, tiles=tiles)

"""Cut a sliding window into tiles that plain kernels can compute, without computing masked pairs.

A window of w tokens is a band along the diagonal. It is cut into pieces of w - 1 queries. Each piece attends to a
triangle of its own keys, which is causal attention, and to a triangle of the w - 1 keys before them. The second
triangle is causal as well if queries and keys are read backwards. Two separate parts of a row have at most one
rectangle, one such triangle and the rectangle beside it.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Optional

if TYPE_CHECKING:
    from .documents import Documents

Ranges = tuple[range, ...]  # places in the row of the tokens that a rank holds, in their order
Shape = Literal["full", "causal", "from_own"]


@dataclass(frozen=True)
class Tile:
    """Attention of some queries of a block to some of its keys.

    Attributes:
        row: row of the batch; None for all rows.
        queries: range of the block's queries.
        keys: range of the block's keys.
        shape: "full" if every query attends to every key, "causal" if query i attends to keys 0..i, or "from_own" if
            query i attends to keys i and later. The last two have as many keys as queries.
    """

    row: int | None
    queries: slice
    keys: slice
    shape: Shape

    def moved(self, queries: int, keys: int) -> "Tile":
        """Return this tile for a block that begins the given numbers of queries and keys later."""
        return Tile(
            self.row,
            slice(self.queries.start - queries, self.queries.stop - queries),
            slice(self.keys.start - keys, self.keys.stop - keys),
            self.shape,
        )


@functools.lru_cache(maxsize=1024)  # every layer asks for the same ones
def window_tiles(window: int, documents: Optional["Documents"], queries: Ranges, keys: Ranges) -> tuple[Tile, ...]:
    """Return tiles that contain each unmasked pair of a query and a key once, and no other pair.

    Args:
        window: number of keys that a query attends to, including its own.
        documents: documents of the whole row, if a query attends only to keys of its own document.
        queries: positions of the queries in the row; each range is also a range of keys or shares no token with one.
        keys: positions of the keys in the row.
    """
    rows: list[tuple[int | None, list[range]]] = [(None, [range(max(part.stop for part in queries + keys))])]
    if documents is not None:
        rows = [
            (row, [range(*ends) for ends in zip(borders, borders[1:], strict=False)])
            for row, borders in enumerate(documents.queries)
        ]
    tiles = []
    for own, first_query in _with_firsts(queries):
        for others, first_key in _with_firsts(keys):
            if others.start > own.start or own.start - others.stop + 1 >= window:
                continue  # no query of `own` sees any of these keys
            for row, documents_of_row in rows:
                for document in documents_of_row:
                    places = _common(own, document), _common(others, document)
                    if all(places):
                        tiles += [
                            tile.moved(own.start - first_query, others.start - first_key)
                            for tile in _tiles_of_ranges(row, *places, window)
                        ]
    return tuple(tiles)


def _with_firsts(parts: Ranges) -> list[tuple[range, int]]:
    """Return each range with the number of tokens in the ranges before it."""
    return [(part, sum(map(len, parts[:i]))) for i, part in enumerate(parts)]


def _common(part: range, document: range) -> range:
    return range(max(part.start, document.start), min(part.stop, document.stop))


def _tiles_of_ranges(row: int | None, queries: range, keys: range, window: int) -> Iterator[Tile]:
    """Yield the tiles of one range of queries and one of keys, which is the same or lies before; by their places."""
    if queries == keys:
        step = len(queries) if window >= len(queries) else max(window - 1, 1)
        for start in range(queries.start, queries.stop, step):
            own = range(start, min(start + step, queries.stop))
            yield Tile(row, slice(own.start, own.stop), slice(own.start, own.stop), "causal")
            yield from _tiles_of_ranges(row, own, range(max(keys.start, start - window + 1), start), window)
        return
    if not keys:
        return
    # The query at place p sees the keys from place p - window + 1 on: before `all_seen` it sees all of them, from
    # `none_seen` on none. The last query that sees all is the first of the triangle, if there is one.
    all_seen = max(keys.start + window - 1, queries.start)
    if keys.start + window >= queries.stop:
        all_seen = queries.stop
    none_seen = min(keys.stop + window - 1, queries.stop)
    if all_seen > queries.start:
        yield Tile(row, slice(queries.start, all_seen), slice(keys.start, keys.stop), "full")
    if none_seen > all_seen:
        first = all_seen - window + 1
        behind = first + none_seen - all_seen
        some = slice(all_seen, none_seen)
        yield Tile(row, some, slice(first, behind), "from_own")
        if behind < keys.stop:
            yield Tile(row, some, slice(behind, keys.stop), "full")

"""Comparing stored tiles of a Merkle tree with those that the entries call for.

A tree of ``size`` leaves has the full tiles that fit into it and one partial tile a level, none where the width is 0::

    leaves under a full tile    256 ** (level + 1)
    width of the partial tile   (size >> 8 * level) mod 256
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ledger.merkle import HASH_BYTES
from ledger.merkle.tiles import TILE_BYTES, TILE_HEIGHT, TILE_WIDTH, TileCoordinates

TILES_AT_ONCE = 32
"""Tiles worth one look at what is stored: a quarter of a megabyte."""

ReadTiles = Callable[[int, int, int], Awaitable[Mapping[int, bytes] | None]]
"""Stored tiles of one level, from the first to the last index given, by index; None where no tiles are stored."""


class TileBreak(NamedTuple):
    """A stored tile that is missing or is not that of the entries, at the first hash that differs."""

    seq: int
    """The first under that hash."""
    detail: str
    expected: str | None
    actual: str | None


def tile_break(level: int, index: int, computed: bytes, stored: Any) -> TileBreak | None:
    """What is wrong with a stored tile, given as it is stored, None for nothing."""
    stored = stored if isinstance(stored, bytes) else b""
    if stored == computed:
        return None
    at = next(
        offset
        for offset in range(0, TILE_BYTES + HASH_BYTES, HASH_BYTES)
        if stored[offset : offset + HASH_BYTES] != computed[offset : offset + HASH_BYTES]
    )
    leaves_before = (index * TILE_WIDTH + at // HASH_BYTES) << level * TILE_HEIGHT
    detail = f"tile {index} of level {level} of the stored tree is missing or is not that of the entries"
    expected, actual = computed[at : at + HASH_BYTES], stored[at : at + HASH_BYTES]
    return TileBreak(leaves_before + 1, detail, expected.hex() or None, actual.hex() or None)


class TileWalk:
    """Grows the tiles of a stored tree along with its entries, from the first on; compares each once it is whole."""

    def __init__(self, stored_size: int, read_tiles: ReadTiles, report: Callable[[TileBreak], object]) -> None:
        """The stored tree has ``stored_size`` leaves, 0 when there is none to compare with."""
        self._stored_size = stored_size
        self._read_tiles = read_tiles
        self._report = report
        self._partial: list[bytearray] = []
        """The last tile of each level, as far as it has grown."""
        self._to_compare: dict[TileCoordinates, bytes] = {}

    def grow(self, grown: Sequence[list[bytes]], size_before: int) -> None:
        """The next entries: what ``Frontier.grow`` gave for them at ``size_before``; they end at the size or before."""
        if size_before >= self._stored_size:
            return
        for level, hashes in enumerate(grown[::TILE_HEIGHT]):
            self._fill(level, hashes, size_before >> level * TILE_HEIGHT)
        if size_before + len(grown[0]) == self._stored_size:
            for level, partial in enumerate(self._partial):
                if partial:
                    self._to_compare[level, self._stored_size >> (level + 1) * TILE_HEIGHT] = bytes(partial)

    def _fill(self, level: int, hashes: list[bytes], first: int) -> None:
        """Put ``hashes``, of which the first is number ``first``, into tiles; full ones are to be compared."""
        if level == len(self._partial):
            self._partial.append(bytearray())
        partial, index = self._partial[level], first // TILE_WIDTH
        partial += b"".join(hashes)
        while len(partial) >= TILE_BYTES:
            self._to_compare[level, index] = bytes(partial[:TILE_BYTES])
            del partial[:TILE_BYTES]
            index += 1

    async def compare(self, *, at_least: int = 1) -> None:
        """Compare what is whole with the stored tiles, unless that is fewer than ``at_least``."""
        if len(self._to_compare) < at_least:
            return
        by_level: dict[int, list[int]] = {}
        for level, index in self._to_compare:
            by_level.setdefault(level, []).append(index)
        for level, indexes in by_level.items():
            stored = await self._read_tiles(level, min(indexes), max(indexes))
            if stored is None:
                continue
            for index in indexes:
                found = tile_break(level, index, self._to_compare[level, index], stored.get(index, b""))
                if found is not None:
                    self._report(found)
        self._to_compare.clear()

"""Comparing stored tiles of a Merkle tree with those that the entries call for.

A tree of ``size`` leaves has the full tiles that fit into it and one partial tile a level, none where the width is 0::

    leaves under a full tile    256 ** (level + 1)
    width of the partial tile   (size >> 8 * level) mod 256
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ledger.merkle import HASH_BYTES
from ledger.merkle.tiles import TILE_BYTES, TILE_HEIGHT, TILE_WIDTH

TILES_AT_ONCE = 32
"""Tiles worth one look at what is stored: a quarter of a megabyte."""


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
    leaves_before = (index * TILE_WIDTH + at // HASH_BYTES) << (level * TILE_HEIGHT)
    detail = f"tile {index} of level {level} of the stored tree is missing or is not that of the entries"
    expected, actual = computed[at : at + HASH_BYTES], stored[at : at + HASH_BYTES]
    return TileBreak(leaves_before + 1, detail, expected.hex() or None, actual.hex() or None)

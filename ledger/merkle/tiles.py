"""A Merkle tree kept in tiles (C2SP tlog-tiles, height 8), and the proofs read from them.

Tile ``index`` of tile level ``level`` is the concatenation of up to 256 hashes of 32 bytes: those of the
perfect subtrees of ``256 ** level`` leaves, from number ``256 * index`` on. Level 0 holds leaf hashes,
level 1 the roots of full tiles of level 0, and so on. In a tree of ``size`` leaves::

    hashes on a level       size >> (8 * level)      perfect subtrees only, so a hash never changes
    width of its last tile  that number mod 256      0: there is no partial tile

    example: size 70_000    level 0: 273 full tiles, (0, 273) of width 112
                            level 1: one full tile, (1, 1) of width 17;   level 2: (2, 0) of width 1

A tile only grows at its end, so a wider tile can replace a narrower one. Appending and every proof touch
O(log size) tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ledger import merkle
from ledger.errors import InvalidInputError, LedgerError, ProofError
from ledger.merkle import HASH_BYTES, TreeNode, subtrees

TILE_HEIGHT = 8
TILE_WIDTH = 1 << TILE_HEIGHT
TILE_BYTES = TILE_WIDTH * HASH_BYTES

TileCoordinates: TypeAlias = tuple[int, int]
"""(level, index) of a tile."""

GetTile: TypeAlias = Callable[[int, int], bytes]
"""Gives the tile at (level, index), as wide as needed or wider."""

_Range: TypeAlias = tuple[int, int]
"""Leaves begin..end - 1, where begin is a multiple of the largest power of two <= end - begin."""


class TileTree:
    """The right edge of one tenant's tree in memory, and the tiles that appending changed.

    After an append the caller MUST store ``changed`` and, once that is committed, call ``forget_changed``. If
    storing fails for good, it MUST drop this object and load the right edge again.
    """

    __slots__ = ("_filled", "_frontier", "_partial", "_touched")

    def __init__(self, size: int, tiles: Mapping[TileCoordinates, bytes]) -> None:
        """The tree of ``size`` leaves; ``tiles`` holds at least those of ``right_edge(size)``.

        Raises:
            ProofError: a tile is missing or too narrow.
        """
        get_tile = getter(tiles)
        self._frontier = merkle.Frontier.restore(size, [_node_hash(node, get_tile) for node in subtrees(0, size)])
        self._partial: list[bytearray] = []
        for level in range(_levels(size)):
            index, width = divmod(size >> (level * TILE_HEIGHT), TILE_WIDTH)
            self._partial.append(bytearray(get_tile(level, index)[: width * HASH_BYTES] if width else b""))
        self._filled: dict[TileCoordinates, bytes] = {}
        self._touched: set[int] = set()

    @property
    def size(self) -> int:
        """Number of leaves."""
        return self._frontier.size

    def root(self) -> bytes:
        """Root of the tree as it is now."""
        return self._frontier.root()

    def append_leaf_hashes(self, hashes: list[bytes]) -> None:
        """Append leaves in order; each hash MUST be 32 bytes."""
        size_before = self.size
        for level, nodes in enumerate(self._frontier.grow(hashes)):
            if level % TILE_HEIGHT == 0:
                self._put(level // TILE_HEIGHT, size_before >> level, nodes)

    @property
    def changed(self) -> dict[TileCoordinates, bytes]:
        """Tiles touched since the last ``forget_changed``, each whole, full or as wide as it is now."""
        tiles = dict(self._filled)
        for level in self._touched:
            if self._partial[level]:
                tiles[level, self.size >> ((level + 1) * TILE_HEIGHT)] = bytes(self._partial[level])
        return tiles

    def forget_changed(self) -> None:
        """Treat all tiles of ``changed`` as stored."""
        self._filled.clear()
        self._touched.clear()

    def _put(self, level: int, first: int, nodes: list[bytes]) -> None:
        """Append ``nodes``, of which the first is number ``first``, to the tiles of ``level``."""
        if level == len(self._partial):
            self._partial.append(bytearray())
        partial = self._partial[level]
        partial += b"".join(nodes)
        index = first // TILE_WIDTH
        while len(partial) >= TILE_BYTES:
            self._filled[level, index] = bytes(partial[:TILE_BYTES])
            del partial[:TILE_BYTES]
            index += 1
        self._touched.add(level)


def right_edge(size: int) -> list[TileCoordinates]:
    """The partial tiles of a tree of ``size`` leaves: what a ``TileTree`` of that size starts from."""
    edge = ((level, *divmod(size >> (level * TILE_HEIGHT), TILE_WIDTH)) for level in range(_levels(size)))
    return [(level, index) for level, index, width in edge if width]


def root_tiles(size: int) -> set[TileCoordinates]:
    """The tiles that ``root_at`` asks for."""
    return _tiles_of([(0, size)])


def root_at(size: int, get_tile: GetTile) -> bytes:
    """Root of the first ``size`` leaves.

    Raises:
        ProofError: a tile is too narrow.
    """
    return _range_hash((0, size), get_tile) if size else merkle.EMPTY_ROOT


def compact_range(size: int, get_tile: GetTile) -> list[bytes]:
    """Roots of the perfect subtrees of the first ``size`` leaves, the largest first; from the tiles of ``root_tiles``.

    Raises:
        ProofError: a tile is too narrow.
    """
    return [_node_hash(node, get_tile) for node in subtrees(0, size)]


def inclusion_tiles(index: int, size: int) -> set[TileCoordinates]:
    """The tiles that ``inclusion_proof`` asks for; raises what it raises."""
    return _tiles_of(_inclusion_ranges(index, size))


def inclusion_proof(index: int, size: int, get_tile: GetTile) -> list[bytes]:
    """PATH(index, D_size) of RFC 9162 2.1.3.1, from the leaf's sibling up.

    Raises:
        InvalidInputError: not 0 <= index < size.
        ProofError: a tile is too narrow.
    """
    return [_range_hash(each, get_tile) for each in _inclusion_ranges(index, size)]


def has_leaf(index: int, size: int, root: bytes, link: str | None, tiles: Mapping[TileCoordinates, bytes]) -> bool:
    """Whether ``tiles``, the stored ``inclusion_tiles``, prove that leaf ``index`` of the tree of this size and root is
    this chain link, in hex. Damaged tiles of any form prove nothing."""
    try:
        proof = inclusion_proof(index, size, lambda level, at: tiles[level, at])
        merkle.verify_inclusion(index, size, merkle.leaf_hash(bytes.fromhex(link or "")), proof, root)
    except (LedgerError, KeyError, ValueError, TypeError):
        return False
    return True


def consistency_tiles(first: int, second: int) -> set[TileCoordinates]:
    """The tiles that ``consistency_proof`` asks for; raises what it raises."""
    return _tiles_of(_consistency_ranges(first, second))


def consistency_proof(first: int, second: int, get_tile: GetTile) -> list[bytes]:
    """PROOF(first, D_second) of RFC 9162 2.1.4.1; empty when the sizes are equal.

    Raises:
        InvalidInputError: not 1 <= first <= second.
        ProofError: a tile is too narrow.
    """
    return [_range_hash(each, get_tile) for each in _consistency_ranges(first, second)]


def _levels(size: int) -> int:
    """Tile levels that have a hash in a tree of ``size`` leaves."""
    return -(-size.bit_length() // TILE_HEIGHT)


def _split(begin: int, end: int) -> int:
    """Where RFC 9162 splits the leaves begin..end - 1, at least two."""
    return begin + (1 << ((end - begin - 1).bit_length() - 1))


def _descend(leaves: int, size: int, *, to_subtree: bool = False) -> tuple[list[_Range], int]:
    """The ranges beside the path from the root down to leaf ``leaves - 1``, and the first leaf of the node where the
    path ends: that leaf, or, with ``to_subtree``, the first node on the path whose last leaf it is."""
    begin, end = 0, size
    ranges = []
    while end - begin > 1 and not (to_subtree and leaves == end):
        middle = _split(begin, end)
        if leaves <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((begin, middle))
            begin = middle
    return ranges, begin


def _inclusion_ranges(index: int, size: int) -> list[_Range]:
    """The leaf ranges of the hashes of an inclusion proof, in its order."""
    if not 0 <= index < size:
        raise InvalidInputError(f"leaf index {index} is not in a tree of size {size}")
    return _descend(index + 1, size)[0][::-1]


def _consistency_ranges(first: int, second: int) -> list[_Range]:
    """The leaf ranges of the hashes of a consistency proof, in its order."""
    if not 1 <= first <= second:
        raise InvalidInputError(f"sizes {first} and {second} are not 1 <= first <= second")
    ranges, begin = _descend(first, second, to_subtree=True)
    return [(begin, first), *ranges[::-1]] if begin else ranges[::-1]


def _tile_of(node: TreeNode) -> tuple[TileCoordinates, int, int]:
    """The tile that determines ``node``, and the first and the number of its hashes below it."""
    level, index = node
    tile_level, height = divmod(level, TILE_HEIGHT)
    tile_index, first = divmod(index << height, TILE_WIDTH)
    return (tile_level, tile_index), first, 1 << height


def _tiles_of(ranges: list[_Range]) -> set[TileCoordinates]:
    return {_tile_of(node)[0] for each in ranges for node in subtrees(*each)}


def _node_hash(node: TreeNode, get_tile: GetTile) -> bytes:
    (level, index), first, count = _tile_of(node)
    tile = get_tile(level, index)
    begin, end = first * HASH_BYTES, (first + count) * HASH_BYTES
    if len(tile) < end:
        raise ProofError(
            f"Merkle tile {index} of level {level} holds {len(tile) // HASH_BYTES} hashes, "
            f"{first + count} needed; the stored tree is behind or damaged: verify the chain"
        )
    return merkle.root(tile[at : at + HASH_BYTES] for at in range(begin, end, HASH_BYTES))


def _range_hash(leaves: _Range, get_tile: GetTile) -> bytes:
    """Root of the tree over ``leaves`` alone."""
    nodes = [_node_hash(node, get_tile) for node in subtrees(*leaves)]
    return merkle.Frontier.restore(leaves[1] - leaves[0], nodes).root()


def getter(tiles: Mapping[TileCoordinates, bytes]) -> GetTile:
    """A ``GetTile`` for a mapping; it gives an empty tile for missing ones."""
    return lambda level, index: tiles.get((level, index), b"")

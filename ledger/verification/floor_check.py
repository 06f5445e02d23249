"""Where a chain begins: what left it with a prune, as its newest PRUNED entry that counts says, and its stored tree.

The floor is found before the ranges are planned. What is kept of the index of jobs is in
:mod:`ledger.verification.left_index`. Of the stored tree the tiles stay. Every tile is compared with the one below, and
the roots with what the PRUNED entry says (:mod:`ledger.machines.retention`). So the tree over the entries that are
still there can be compared tile by tile, and a checkpoint from before the prune as well::

    level 0     leaf hashes of the entries that left, which nothing here can recompute
    level n     roots of full tiles of level n - 1                                      else tree
    root        that of the PRUNED entry                                                else tree
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from ledger import merkle
from ledger.errors import LedgerError
from ledger.machines.retention import Floor, Judge, can_loosen, retention_of
from ledger.merkle import HASH_BYTES, tiles
from ledger.merkle.tiles import TILE_BYTES, TILE_HEIGHT, TILE_WIDTH, TileCoordinates
from ledger.verification.entry_check import EntryRow
from ledger.verification.tree_check import TILES_AT_ONCE, tile_break
from ledger.verification.verdict import Findings

if TYPE_CHECKING:
    from ledger.verification.range_fold import ChainBounds


def floor_of(rows: Sequence[EntryRow], judge: Judge | None, findings: Findings) -> Floor | None:
    """What left the chain, by the newest PRUNED entry that counts of ``rows``, its entries about retention in seq
    order; reports statements that no admitted key made."""
    found = retention_of(rows, judge or (lambda *_: "not_checked"), is_strict=False)
    if any(map(can_loosen, rows)):
        findings.begin("signatures")
    for seq, action, verdict in found.doubted:
        if verdict == "not_checked":
            findings.leave_undecided("signatures")
        elif verdict == "unknown_key":
            detail = f"{action} is signed by a key that is not known, or was not valid then"
            findings.add("snapshot-signature", seq, detail, is_key_unknown=True)
        else:
            findings.add("malformed", seq, f"{action} has no statement of an admitted key about what it says")
    return found.floor


async def from_floor(
    ends: ChainBounds, read: ReadTiles | None, floor: Floor, findings: Findings, *, with_left: bool = True
) -> ChainBounds:
    """``ends`` of a chain that is verified from ``floor`` on, with the stored tree of what left, or its edge alone;
    without it if there is nothing that reads it."""
    ends = ends._replace(
        first_seq=floor.to_seq + 1,
        floor=floor,
        expected_prev=floor.chain_link,
        expected_snapshot=floor.snapshot,
        expected_frontier=[bytes.fromhex(each) for each in floor.compact_range],
    )
    if read is None:
        return ends
    left = left_tree(read, floor, ends.sizes, findings) if with_left else left_edge(read, floor, findings)
    return ends._replace(left=await left)


# --- the stored tree of what left -------------------------------------------------------------------


ReadTiles = Callable[[int, int, int], Awaitable[Mapping[int, bytes] | None]]
"""``ChainReader.tiles``."""


class LeftTree(NamedTuple):
    """What the tiles below a floor prove."""

    edge: Mapping[TileCoordinates, bytes]
    """The partial tiles of the tree that ends at the floor."""
    roots: Mapping[int, bytes]
    """Roots by size, up to the floor."""


async def left_tree(read: ReadTiles, floor: Floor, sizes: Sequence[int], findings: Findings) -> LeftTree | None:
    """The tree of the entries that left, with its roots at ``sizes`` up to the floor. None if the place has no tiles,
    or if they are not those of the PRUNED entry, which is a break."""
    wanted = {*tiles.right_edge(floor.to_seq)}.union(*(tiles.root_tiles(size) for size in (*sizes, floor.to_seq)))
    kept: dict[TileCoordinates, bytes] = {}
    computed: list[bytes] = []
    for level in count():
        width = floor.to_seq >> (level * TILE_HEIGHT)
        if not width:
            break
        below, computed = computed, []
        for first in range(0, -(-width // TILE_WIDTH), TILES_AT_ONCE):
            last = min(first + TILES_AT_ONCE, -(-width // TILE_WIDTH)) - 1
            if (stored := await read(level, first, last)) is None:
                return None
            for index in range(first, last + 1):
                tile = _cut(stored.get(index, b""), width - index * TILE_WIDTH)
                expected = b"".join(below[index * TILE_WIDTH : (index + 1) * TILE_WIDTH]) if level else tile
                if not tile or tile != expected:
                    found = tile_break(level, index, expected or bytes(HASH_BYTES), tile)
                    assert found is not None
                    findings.add(found.kind, found.seq, *found[2:])
                    return None
                if (level, index) in wanted:
                    kept[level, index] = tile
                if len(tile) == TILE_BYTES:
                    computed.append(merkle.root(_hashes(tile)))
    return _proved(floor, sizes, kept, findings)


async def left_edge(read: ReadTiles, floor: Floor, findings: Findings) -> LeftTree | None:
    """As ``left_tree``, of the partial tiles at the end of that tree, whose root they prove."""
    kept: dict[TileCoordinates, bytes] = {}
    for level, index in {*tiles.right_edge(floor.to_seq), *tiles.root_tiles(floor.to_seq)}:
        if (stored := await read(level, index, index)) is None:
            return None
        width = (floor.to_seq >> (level * TILE_HEIGHT)) - index * TILE_WIDTH
        kept[level, index] = _cut(stored.get(index, b""), width)
    return _proved(floor, (), kept, findings)


def _cut(tile: object, width: int) -> bytes:
    """The part of a stored tile that belongs to the tree that ends at the floor; empty if it has not all of it."""
    size = min(width, TILE_WIDTH) * HASH_BYTES
    return tile[:size] if isinstance(tile, bytes) and len(tile) >= size else b""


def _hashes(tile: bytes) -> Iterator[bytes]:
    return (tile[at : at + HASH_BYTES] for at in range(0, len(tile), HASH_BYTES))


def _proved(
    floor: Floor, sizes: Sequence[int], kept: Mapping[TileCoordinates, bytes], findings: Findings
) -> LeftTree | None:
    get_tile = tiles.getter(kept)
    try:
        root = tiles.root_at(floor.to_seq, get_tile)
        edge = {at: kept[at] for at in tiles.right_edge(floor.to_seq)}
        roots = {size: tiles.root_at(size, get_tile) for size in sizes if 0 < size <= floor.to_seq}
    except (LedgerError, KeyError) as error:
        findings.add("tree", floor.to_seq, f"the stored tree of the entries that left is incomplete: {error}")
        return None
    if root.hex() != floor.tree_root:
        detail = "the stored tree of the entries that left is not that of their PRUNED entry"
        findings.add("tree", floor.to_seq, detail, expected=floor.tree_root, actual=root.hex())
        return None
    return LeftTree(edge, roots)

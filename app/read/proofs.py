"""Merkle proofs out of the stored tiles: each reads O(log size) tiles in one snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from app.store import chain_reads
from app.store.notary import read_tiles
from app.store.reading import reading
from ledger import tiles
from ledger.errors import SeqOutOfRangeError, TenantNotFoundError
from ledger.merkle import HASH_BYTES
from ledger.positions import Seq, leaf_index_of
from signing import checkpoint as checkpoints
from signing import note

if TYPE_CHECKING:
    import asyncpg

    from app.store import Connection


class InclusionProof(NamedTuple):
    """That leaf ``leaf_index`` stands in the tree of ``tree_size`` leaves (RFC 9162 2.1.3)."""

    leaf_index: int
    tree_size: int
    leaf_hash: bytes
    root_hash: bytes
    hashes: list[bytes]


class ConsistencyProof(NamedTuple):
    """That the tree of ``second`` leaves begins with the tree of ``first`` (RFC 9162 2.1.4)."""

    first: int
    second: int
    first_root: bytes
    second_root: bytes
    hashes: list[bytes]


async def inclusion(
    pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, seq: int, tree_size: int | None
) -> InclusionProof:
    """Proof for entry ``seq``, in the newest checkpoint's tree when ``tree_size`` is None.

    Raises:
        TenantNotFoundError: no such tenant.
        SeqOutOfRangeError: not ``seq <= tree_size <= size of the newest checkpoint``.
    """
    async with reading(pool, snapshot=True) as connection:
        size = await _size(connection, tenant_id, tree_size, "tree_size")
        if seq > size:
            raise SeqOutOfRangeError(f"seq {seq} is not in the tree of {size} leaves", ("seq",))
        index = leaf_index_of(Seq(seq))
        leaf_tile = (0, index // tiles.TILE_WIDTH)
        wanted = tiles.inclusion_tiles(index, size) | tiles.root_tiles(size) | {leaf_tile}
        stored = await read_tiles(connection, tenant_id, wanted)
    get_tile = _getter(stored)
    at = index % tiles.TILE_WIDTH * HASH_BYTES
    return InclusionProof(
        index,
        size,
        get_tile(*leaf_tile)[at : at + HASH_BYTES],
        tiles.root_at(size, get_tile),
        tiles.inclusion_proof(index, size, get_tile),
    )


async def consistency(
    pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, first: int, second: int | None
) -> ConsistencyProof:
    """Proof from size ``first`` to ``second``, which is the newest checkpoint's when None.

    Raises:
        TenantNotFoundError: no such tenant.
        SeqOutOfRangeError: not ``1 <= first <= second <= size of the newest checkpoint``.
    """
    async with reading(pool, snapshot=True) as connection:
        size = await _size(connection, tenant_id, second, "second")
        if first > size:
            raise SeqOutOfRangeError(f"first {first} lies beyond second {size}", ("first",))
        wanted = tiles.consistency_tiles(first, size) | tiles.root_tiles(first) | tiles.root_tiles(size)
        stored = await read_tiles(connection, tenant_id, wanted)
    get_tile = _getter(stored)
    return ConsistencyProof(
        first,
        size,
        tiles.root_at(first, get_tile),
        tiles.root_at(size, get_tile),
        tiles.consistency_proof(first, size, get_tile),
    )


def checkpoint_size(checkpoint: str | None) -> int | None:
    """Tree size that a signed note states; None when there is no note."""
    return None if checkpoint is None else checkpoints.parse(note.parse(checkpoint).text).size


async def _size(connection: Connection, tenant_id: str, asked: int | None, name: str) -> int:
    """The tree size asked for, else the newest checkpoint's, once it is known to be there."""
    head = await chain_reads.head(connection, tenant_id)
    if head is None:
        raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    covered = checkpoint_size(head.checkpoint)
    size = covered if asked is None else asked
    if covered is None or size is None:
        raise SeqOutOfRangeError(f"there is no checkpoint of {tenant_id} yet; try again soon", (name,))
    if not 1 <= size <= covered:
        raise SeqOutOfRangeError(f"{name} {size} lies beyond the checkpoint, which covers {covered} leaves", (name,))
    return size


def _getter(stored: dict[tuple[int, int], bytes]) -> tiles.GetTile:
    def get_tile(level: int, index: int) -> bytes:
        return stored.get((level, index), b"")

    return get_tile

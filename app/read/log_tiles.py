"""What a tiled transparency log serves (C2SP tlog-tiles): hash tiles and entry bundles, cut at the newest checkpoint.

In a log whose newest checkpoint covers ``size`` leaves::

    hashes of a level   size >> (8 * level)
    served              a full tile, and every partial one, that holds only hashes below that number

so whoever holds the checkpoint can have every tile it needs, and nobody sees what no checkpoint covers. An entry is
the raw 32-byte chain link; a bundle is the links that hash to the level 0 tile of the same index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.read.proofs import checkpoint_size
from app.store import chain_reads
from app.store.notary import read_links, read_tiles
from app.store.reading import reading
from ledger.errors import NotFoundError
from ledger.merkle import HASH_BYTES, leaf_hash
from ledger.merkle.tiles import TILE_HEIGHT, TILE_WIDTH
from ledger.positions import LeafIndex, seq_of
from ledger.verification.verdict import damaged

if TYPE_CHECKING:
    import asyncpg

    from app.store import Connection

_ENTRY_LENGTH = HASH_BYTES.to_bytes(2, "big")
"""Stands before every entry of a bundle."""


async def hash_tile(pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, level: int, index: int, width: int) -> bytes:
    """``width`` hashes of 32 bytes, from the beginning of tile ``index`` of ``level`` on.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: the newest checkpoint's tree does not have that many.
        ChainDamagedError: it has, and they are not stored.
    """
    async with reading(pool, snapshot=True) as connection:
        await _require_covered(connection, tenant_id, level, index, width)
        return await _stored(connection, tenant_id, level, index, width)


async def entry_bundle(pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, index: int, width: int) -> bytes:
    """``width`` entries from leaf ``256 * index`` on, each behind its length as u16 big-endian.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: the newest checkpoint does not cover that many.
        ChainDamagedError: rows are missing, or do not hash to the tile that was signed.
    """
    async with reading(pool, snapshot=True) as connection:
        await _require_covered(connection, tenant_id, 0, index, width)
        first_seq = seq_of(LeafIndex(index * TILE_WIDTH))
        rows = await read_links(connection, tenant_id, first_seq, width)
        signed = await _stored(connection, tenant_id, 0, index, width)
    links = [_raw(row.chain_link) for row in rows]
    if b"".join(map(leaf_hash, links)) != signed:
        raise damaged(
            tenant_id,
            "tree",
            first_seq,
            f"entries {first_seq} to {first_seq + width - 1} are not those that were signed",
        )
    return b"".join(_ENTRY_LENGTH + link for link in links)


async def _require_covered(connection: Connection, tenant_id: str, level: int, index: int, width: int) -> None:
    head = await chain_reads.head(connection, tenant_id)
    size = checkpoint_size(tenant_id, head.checkpoint) or 0
    if index * TILE_WIDTH + width > size >> (level * TILE_HEIGHT):
        raise NotFoundError(f"the newest checkpoint of {tenant_id}, of size {size}, does not reach that far")


async def _stored(connection: Connection, tenant_id: str, level: int, index: int, width: int) -> bytes:
    found = await read_tiles(connection, tenant_id, [(level, index)])
    hashes = (found.get((level, index)) or b"")[: width * HASH_BYTES]
    if len(hashes) < width * HASH_BYTES:
        raise damaged(tenant_id, "tree", 0, f"tile {index} of level {level} is damaged")
    return hashes


def _raw(chain_link: str | None) -> bytes:
    """The bytes of a stored link; of text that somebody put in its place nothing, which hashes to no signed leaf."""
    try:
        return bytes.fromhex(chain_link or "")
    except ValueError:
        return b""

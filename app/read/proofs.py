"""Merkle proofs and tiles out of the stored tree.

A proof reads O(log size) tiles in one snapshot. Tiles are those of a tiled transparency log (C2SP tlog-tiles), cut at
the newest checkpoint. In a log whose newest checkpoint covers ``size`` leaves::

    hashes of a level   size >> (8 * level)
    served              a full tile, and every partial one, that holds only hashes below that number

A client that holds the checkpoint gets every tile it needs, and no client sees what no checkpoint covers. An entry is
the raw 32-byte chain link; a bundle is the links that hash to the level 0 tile of the same index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from app.runtime.answers.chain import ConsistencyProofAnswer, InclusionAnswer
from app.store import chain_reads
from app.store.notary import read_links, read_tiles
from app.store.reading import reading
from ledger import merkle
from ledger.errors import NotFoundError, ProofError, SeqOutOfRangeError, SignatureError
from ledger.merkle import HASH_BYTES, leaf_hash, tiles
from ledger.merkle.tiles import TILE_HEIGHT, TILE_WIDTH
from ledger.positions import LeafIndex, Seq, leaf_index_of, seq_of
from ledger.verification.verdict import damaged
from signing import checkpoint as checkpoints

if TYPE_CHECKING:
    import asyncpg

    from app.store import Connection


async def inclusion(
    pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, seq: int, tree_size: int | None
) -> InclusionAnswer:
    """Proof (RFC 9162 2.1.3) for entry ``seq``, in the newest checkpoint's tree when ``tree_size`` is None.

    Raises:
        TenantNotFoundError: no such tenant.
        SeqOutOfRangeError: not ``seq <= tree_size <= size of the newest checkpoint``.
    """
    async with reading(pool, snapshot=True) as connection:
        size, signed = await _size(connection, tenant_id, tree_size, "tree_size")
        if seq > size:
            raise SeqOutOfRangeError(f"seq {seq} is not in the tree of {size} leaves", ("seq",))
        index = leaf_index_of(Seq(seq))
        leaf_tile = (0, index // tiles.TILE_WIDTH)
        wanted = tiles.inclusion_tiles(index, size) | _anchoring_tiles(size, signed) | {leaf_tile}
        stored = await read_tiles(connection, tenant_id, wanted)
    get_tile = _getter(stored)
    at = index % tiles.TILE_WIDTH * HASH_BYTES
    with _damage_named(tenant_id):
        root = _anchored_root(size, signed, get_tile)
        leaf_hash = get_tile(*leaf_tile)[at : at + HASH_BYTES]
        hashes = tiles.inclusion_proof(index, size, get_tile)
        merkle.verify_inclusion(index, size, leaf_hash, hashes, root)
    return InclusionAnswer(
        leaf_index=index,
        tree_size=size,
        leaf_hash=leaf_hash.hex(),
        root_hash=root.hex(),
        hashes=[each.hex() for each in hashes],
    )


async def consistency(
    pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, first: int, second: int | None
) -> ConsistencyProofAnswer:
    """Proof (RFC 9162 2.1.4) from size ``first`` to ``second``, which is the newest checkpoint's when None.

    Raises:
        TenantNotFoundError: no such tenant.
        SeqOutOfRangeError: not ``1 <= first <= second <= size of the newest checkpoint``.
    """
    async with reading(pool, snapshot=True) as connection:
        size, signed = await _size(connection, tenant_id, second, "second")
        if first > size:
            raise SeqOutOfRangeError(f"first {first} lies beyond second {size}", ("first",))
        wanted = tiles.consistency_tiles(first, size) | tiles.root_tiles(first) | _anchoring_tiles(size, signed)
        stored = await read_tiles(connection, tenant_id, wanted)
    get_tile = _getter(stored)
    with _damage_named(tenant_id):
        root = _anchored_root(size, signed, get_tile)
        first_root = tiles.root_at(first, get_tile)
        hashes = tiles.consistency_proof(first, size, get_tile)
        merkle.verify_consistency(first, size, first_root, root, hashes)
    return ConsistencyProofAnswer(
        first=first,
        second=size,
        first_root=first_root.hex(),
        second_root=root.hex(),
        hashes=[each.hex() for each in hashes],
    )


def newest_checkpoint(tenant_id: str, note_text: str | None) -> checkpoints.Checkpoint | None:
    """What the stored note says, None when there is no note; no signature is checked.

    Raises:
        ChainDamagedError: it is no checkpoint.
    """
    if note_text is None:
        return None
    try:
        return checkpoints.read(note_text)
    except SignatureError as error:
        raise damaged(tenant_id, "tree", 0, f"the stored checkpoint is none: {error}") from error


def checkpoint_size(tenant_id: str, note_text: str | None) -> int | None:
    """Tree size that the stored note states, None when there is no note; raises as ``newest_checkpoint``."""
    signed = newest_checkpoint(tenant_id, note_text)
    return None if signed is None else signed.size


async def _size(
    connection: Connection, tenant_id: str, asked: int | None, name: str
) -> tuple[int, checkpoints.Checkpoint]:
    """The tree size asked for, else the newest checkpoint's, once it is known to be there, and that checkpoint."""
    head = await chain_reads.head(connection, tenant_id)
    signed = newest_checkpoint(tenant_id, head.checkpoint)
    if signed is None:
        raise SeqOutOfRangeError(f"there is no checkpoint of {tenant_id} yet; try again soon", (name,))
    size = signed.size if asked is None else asked
    if not 1 <= size <= signed.size:
        raise SeqOutOfRangeError(
            f"{name} {size} lies beyond the checkpoint, which covers {signed.size} leaves", (name,)
        )
    return size, signed


def _anchoring_tiles(size: int, signed: checkpoints.Checkpoint) -> set[tuple[int, int]]:
    return tiles.root_tiles(size) | tiles.consistency_tiles(size, signed.size) | tiles.root_tiles(signed.size)


def _anchored_root(size: int, signed: checkpoints.Checkpoint, get_tile: tiles.GetTile) -> bytes:
    """Root of the first ``size`` leaves as stored, once it is proved to be that of a beginning of what was signed.

    Raises:
        ProofError: it is not.
    """
    root = tiles.root_at(size, get_tile)
    proof = tiles.consistency_proof(size, signed.size, get_tile)
    merkle.verify_consistency(size, signed.size, root, signed.root, proof)
    return root


@contextmanager
def _damage_named(tenant_id: str) -> Iterator[None]:
    """Stored tiles that do not make the tree that was signed are damage, not an answer."""
    try:
        yield
    except (ProofError, TypeError, ValueError) as error:
        raise damaged(tenant_id, "tree", 0, f"the stored tree is not the one that was signed: {error}") from error


def _getter(stored: dict[tuple[int, int], bytes]) -> tiles.GetTile:
    def get_tile(level: int, index: int) -> bytes:
        return stored.get((level, index), b"")

    return get_tile


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

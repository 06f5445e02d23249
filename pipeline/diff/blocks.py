"""The Merkle tree of a chain out of its rows, where no tiles are stored: hashes of blocks of 256 leaves, made by tasks.

A block is a tile of level 0 (``ledger.merkle.tiles``), its hash one of level 1; so 32 bytes reach the driver of 256
entries, and the tiles that a comparison asks for besides are read when it asks for them. A row that is missing stands
in its block as 32 zeros, and of rows with one seq the first counts: damage differs from what it damaged, and nothing
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from ledger import merkle
from ledger.chain import Linker, link_v1
from ledger.errors import LedgerError, ProofError
from ledger.merkle import HASH_BYTES
from ledger.merkle.tiles import TILE_BYTES, TILE_WIDTH
from pipeline.arrow import batch_of, ddl_of, rows_of
from pipeline.places import OpenPlace, Piece, PieceReader
from pipeline.source import open_pieces, over_pieces

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STORED_LINK: Final = ("seq", "chain_link")
"""Columns of which leaves are made when links are taken as they are stored."""
WHOLE_ROW: Final = (
    *("seq", "t_hlc", "job_id", "action", "link_version", "prev_chain_link", "payload", "origin"),
    *("hlc_physical", "hlc_logical", "hlc_node"),
)
"""Columns of which leaves are made when each link is computed from its row."""
NO_LEAF: Final = bytes(HASH_BYTES)

_BLOCKS: Final = pa.schema([("block", pa.int64()), ("is_whole", pa.bool_()), ("hashes", pa.binary())])
"""A block's hash, or the leaves of a piece of one, 32 zeros where the piece has none."""
Leaf = tuple[int, bytes]
"""(seq, leaf hash)."""


class RowTiles:
    """Tiles of the tree over the first ``size`` rows of a chain."""

    def __init__(self, size: int, blocks: bytes, read_leaves: Callable[[int, int], Iterable[Leaf]]) -> None:
        """``blocks`` are the hashes of all whole blocks; ``read_leaves`` gives leaves by lowest and highest seq."""
        self._size, self._read_leaves = size, read_leaves
        self._levels = [b"", blocks]

    def tile(self, level: int, index: int) -> bytes:
        """As ``ledger.merkle.tiles.GetTile``."""
        if level == 0:
            first = index * TILE_WIDTH
            return _leaves(self._read_leaves(first + 1, min(first + TILE_WIDTH, self._size)), first, self._size)
        while len(self._levels) <= level:
            below = self._levels[-1]
            self._levels.append(
                b"".join(
                    merkle.root(_hashes(below[at : at + TILE_BYTES]))
                    for at in range(0, len(below) - TILE_BYTES + 1, TILE_BYTES)
                )
            )
        return self._levels[level][index * TILE_BYTES : (index + 1) * TILE_BYTES]


def row_tiles(spark: SparkSession, place: OpenPlace, tenant_id: str, size: int, columns: Sequence[str]) -> RowTiles:
    """Tiles of the tree over the first ``size`` rows of a chain, whole blocks hashed in tasks.

    Args:
        spark: the session.
        place: where the chain is, open for as long as the tiles are used.
        tenant_id: the chain's tenant.
        size: how many leaves, from seq 1 on.
        columns: ``STORED_LINK`` or ``WHOLE_ROW``.
    """
    names = tuple(columns)

    def read(piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
        return blocks_of(leaves_of(piece.tenant_id, reader, names))

    def read_leaves(first_seq: int, last_seq: int) -> Iterator[Leaf]:
        for piece, reader in open_pieces(place.pieces([tenant_id], from_seq=first_seq, to_seq=last_seq)):
            yield from leaves_of(piece.tenant_id, reader, names)

    whole = size - size % TILE_WIDTH
    if not whole:
        return RowTiles(size, b"", read_leaves)
    pieces = place.pieces([tenant_id], from_seq=1, to_seq=whole)
    found = over_pieces(spark, pieces, read, ddl_of(_BLOCKS))
    # Collected at once: an iterator over partitions would run one task after the other.
    return RowTiles(size, joined(whole // TILE_WIDTH, map(tuple, found.collect())), read_leaves)


def leaves_of(tenant_id: str, reader: PieceReader, columns: Sequence[str]) -> Iterator[Leaf]:
    """The leaf of each row of a piece; a row of which none can be made has ``NO_LEAF``."""
    linker, is_stored = Linker(tenant_id), columns == STORED_LINK
    for batch in reader.entries(columns):
        for row in rows_of(batch):
            yield row[0], _leaf(row[1]) if is_stored else _computed(linker, row)


def _leaf(link: Any) -> bytes:
    try:
        return merkle.leaf_hash(bytes.fromhex(link))
    except (TypeError, ValueError):
        return NO_LEAF


def _computed(linker: Linker, row: Sequence[Any]) -> bytes:
    """The leaf of a row of ``WHOLE_ROW``: that of its link when all its columns are what they were."""
    seq, t_hlc, job_id, action, version, prev, payload, origin, physical, logical, node = row
    try:
        if t_hlc != f"{physical}:{logical}:{node}":
            return NO_LEAF
        digest = sha256(payload.encode())
        if version == 1:
            return merkle.leaf_hash(link_v1(t_hlc, job_id, action, prev, digest.hexdigest()))
        before, source = b"" if prev is None else bytes.fromhex(prev), b"" if origin is None else origin.encode()
        return merkle.leaf_hash(linker.link(seq, t_hlc, job_id, action, before, digest.digest(), source))
    except (AttributeError, TypeError, ValueError, LedgerError):
        return NO_LEAF


def blocks_of(leaves: Iterable[Leaf]) -> Iterator[pa.RecordBatch]:
    """The blocks of one piece, its leaves by seq."""
    rows: list[tuple[int, bool, bytes]] = []
    block, held = -1, bytearray()
    for seq, leaf in leaves:
        if (seq - 1) // TILE_WIDTH != block:
            rows += _row(block, held)
            block, held = (seq - 1) // TILE_WIDTH, bytearray(TILE_BYTES)
        _put(held, (seq - 1) % TILE_WIDTH, leaf)
    rows += _row(block, held)
    if rows:
        yield batch_of(rows, _BLOCKS)


def _row(block: int, held: bytearray) -> list[tuple[int, bool, bytes]]:
    if not held:
        return []
    leaves = _hashes(bytes(held))
    is_whole = NO_LEAF not in leaves
    return [(block, is_whole, merkle.root(leaves) if is_whole else bytes(held))]


def joined(count: int, rows: Iterable[tuple[Any, ...]]) -> bytes:
    """The hashes of ``count`` blocks; pieces of one block are put together, what no piece has is ``NO_LEAF``."""
    hashes = [b""] * count
    parts: dict[int, bytearray] = {}
    for block, is_whole, found in rows:
        if is_whole:
            hashes[block] = bytes(found)
            continue
        held = parts.setdefault(block, bytearray(TILE_BYTES))
        for at, leaf in enumerate(_hashes(bytes(found))):
            if leaf != NO_LEAF:
                _put(held, at, leaf)
    for block in range(count):
        hashes[block] = hashes[block] or merkle.root(_hashes(bytes(parts.get(block, bytes(TILE_BYTES)))))
    return b"".join(hashes)


def _put(held: bytearray, at: int, leaf: bytes) -> None:
    begin, end = at * HASH_BYTES, (at + 1) * HASH_BYTES
    if held[begin:end] == NO_LEAF:
        held[begin:end] = leaf


def _leaves(found: Iterable[Leaf], first: int, size: int) -> bytes:
    """The tile of level 0 that begins with leaf ``first``, of a tree of ``size`` leaves."""
    held = bytearray(min(TILE_WIDTH, size - first) * HASH_BYTES)
    if not held:
        raise ProofError(f"leaf {first} is not in a tree of {size} leaves")
    for seq, leaf in found:
        _put(held, seq - 1 - first, leaf)
    return bytes(held)


def _hashes(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]

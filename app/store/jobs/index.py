"""SQL of the index of jobs (docs/formats/job-index.md): the stored runs, and the entries that a run is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from app.store.notary import read_tiles, snapshot_ending_at
from app.store.reading import fetch_as, fetch_one_as, fetch_tuples
from ledger import merkle
from ledger.errors import InvalidInputError, ProofError, SignatureError, reported_as
from ledger.job_index import (
    LEAF_BYTES,
    PIECE_LEAVES,
    RunPlace,
    key_of,
    keys_of,
    root_of,
    run_entries,
    run_leaves,
)
from ledger.job_index.builder import OpenBlock
from ledger.job_index.proof import ENTRIES_MAX, Directory, RunProof, pieces_of, prove
from ledger.merkle import HASH_BYTES, leaf_hash, leaf_hashes
from ledger.merkle.tiles import TILE_WIDTH
from ledger.verification.entry_check import is_link
from ledger.verification.left_index import KeptIndex, builder_at
from ledger.verification.snapshot_check import SnapshotClaim, claim_in
from signing.snapshot import open_snapshot, payload_of

if TYPE_CHECKING:
    from app.store import Connection

SNAPSHOTS_SEARCHED: Final = 100
"""Newest snapshots that are searched for one with an index."""
REBUILT_ENTRIES_MAX: Final = 65_536
"""Entries of a run that was merged, or never stored, which a proof makes again."""

StoredRun = tuple[int, int]
"""Level, and leaf index of the first entry."""


async def store_runs(
    connection: Connection, tenant_id: str, runs: Mapping[StoredRun, bytes], merged: Collection[StoredRun]
) -> None:
    """Write these runs, given their leaves, in place of any that are there, and remove those that were merged."""
    await connection.executemany(
        "DELETE FROM scheduler.job_index_piece WHERE tenant_id = $1 AND level = $2 AND first_leaf = $3",
        [(tenant_id, *run) for run in (*runs, *merged)],
    )
    rows = []
    for run, leaves in runs.items():
        directory, pieces = Directory.of(leaves), pieces_of(leaves)
        rows += [
            (tenant_id, *run, piece, directory.keys[piece], directory.roots[piece], pieces[piece]) for piece in pieces
        ]
    await connection.executemany(
        """
        INSERT INTO scheduler.job_index_piece (tenant_id, level, first_leaf, piece, first_key, root, leaves)
        VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING
        """,
        rows,
    )


async def stored_leaves(connection: Connection, tenant_id: str, run: StoredRun) -> bytes:
    """The stored leaves of a run, empty if it is not stored."""
    pieces = await connection.fetch(
        """
        SELECT leaves FROM scheduler.job_index_piece WHERE tenant_id = $1 AND level = $2 AND first_leaf = $3
         ORDER BY piece
        """,
        tenant_id,
        *run,
    )
    return b"".join(piece["leaves"] for piece in pieces)


async def directories(connection: Connection, tenant_id: str) -> dict[StoredRun, Directory]:
    """Of each stored run what a proof needs besides its pieces."""
    found: dict[StoredRun, tuple[list[bytes], list[bytes], list[int]]] = {}
    for level, first_leaf, key, root, size in await fetch_tuples(
        connection,
        """
        SELECT level, first_leaf, first_key, root, octet_length(leaves) FROM scheduler.job_index_piece
         WHERE tenant_id = $1 ORDER BY level, first_leaf, piece
        """,
        tenant_id,
    ):
        keys, roots, sizes = found.setdefault((level, first_leaf), ([], [], []))
        keys.append(key)
        roots.append(root)
        sizes.append(size)
    return {
        run: Directory(sum(sizes) // LEAF_BYTES, keys, roots)
        for run, (keys, roots, sizes) in found.items()
        if all(size == PIECE_LEAVES * LEAF_BYTES for size in sizes[:-1])
    }


async def read_pieces(
    connection: Connection, tenant_id: str, wanted: Iterable[tuple[StoredRun, int]]
) -> dict[StoredRun, dict[int, bytes]]:
    """The wanted pieces of stored runs."""
    asked = [(*run, piece) for run, piece in wanted]
    found: dict[StoredRun, dict[int, bytes]] = {}
    for level, first_leaf, piece, leaves in await fetch_tuples(
        connection,
        """
        SELECT p.level, p.first_leaf, p.piece, p.leaves
          FROM unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS w(level, first_leaf, piece)
          JOIN scheduler.job_index_piece p
            ON p.tenant_id = $1 AND p.level = w.level AND p.first_leaf = w.first_leaf AND p.piece = w.piece
        """,
        tenant_id,
        *([row[at] for row in asked] for at in range(3)),
    ):
        found.setdefault((level, first_leaf), {})[piece] = leaves
    return found


# --- proofs ---------------------------------------------------------------------------------------


class IndexedSnapshot(NamedTuple):
    """A signed snapshot with an index of jobs; whether its signature holds is for the caller to check."""

    id: int
    envelope: str
    claim: SnapshotClaim

    @property
    def size(self) -> int:
        """The last entry that the index covers."""
        return self.claim.to_seq

    @property
    def begin(self) -> int:
        """Leaf index of the first entry that it covers."""
        return self.claim.index_begin

    @property
    def roots(self) -> list[bytes]:
        """Roots of its runs."""
        return [*self.claim.index_roots.values()]


async def indexed_snapshot(
    connection: Connection, tenant_id: str, size_max: int, snapshot_id: int | None = None
) -> IndexedSnapshot | None:
    """The newest snapshot of at most ``size_max`` entries that has an index, or the one of this id; None if there is
    none."""
    rows = await fetch_tuples(
        connection,
        """
        SELECT id, dsse_envelope::text FROM scheduler.batch_snapshot
         WHERE tenant_id = $1 AND to_seq <= $2 AND dsse_envelope IS NOT NULL AND ($3::bigint IS NULL OR id = $3)
         ORDER BY from_seq DESC LIMIT $4
        """,
        tenant_id,
        size_max,
        snapshot_id,
        SNAPSHOTS_SEARCHED,
    )
    for number, envelope in rows:
        with suppress(SignatureError, InvalidInputError):
            claim = open_snapshot(envelope, None).claim
            if claim.job_index and (claim.tenant_id, claim.to_seq <= size_max) == (tenant_id, True):
                return IndexedSnapshot(number, envelope, claim)
    return None


async def prove_runs(connection: Connection, tenant_id: str, job_id: str, snapshot: IndexedSnapshot) -> list[RunProof]:
    """The proof of a job in each run of the index of a snapshot.

    Raises:
        ProofError: a run is not stored, and cannot be made from the entries that are there.
    """
    key, stored = key_of(job_id), await directories(connection, tenant_id)
    places = snapshot.claim.index_places
    known = {
        place: directory
        for place, root in zip(places, snapshot.roots, strict=True)
        if (directory := stored.get(place[:2])) is not None
        and place.end - place.begin == run_entries(place.level)
        and merkle.root(directory.roots) == root
    }
    wanted = [(place[:2], piece) for place, directory in known.items() for piece in directory.wanted(key)]
    pieces = await read_pieces(connection, tenant_id, wanted)
    found = []
    for place, root in zip(places, snapshot.roots, strict=True):
        if place in known:
            found.append(prove(key, known[place], pieces.get(place[:2], {})))
            continue
        entries = None
        if place.end - place.begin <= REBUILT_ENTRIES_MAX:
            entries = await entries_under(connection, tenant_id, place)
        leaves = b"" if entries is None else run_leaves(place, entries.keys, entries.hashes)
        if root_of(leaves) != root:
            raise ProofError(f"the run over entries {place.begin + 1} to {place.end} is not stored any more")
        found.append(prove(key, Directory.of(leaves), pieces_of(leaves)))
    return found


async def indexed_entries(
    connection: Connection, tenant_id: str, job_id: str, snapshot: IndexedSnapshot
) -> list[tuple[int, bytes]]:
    """Leaf index and leaf hash of each entry of a job that the index of a snapshot covers, as stored.

    Raises:
        ProofError: there are more than a proof may have, or one has no link.
    """
    rows = await fetch_tuples(
        connection,
        """
        SELECT seq - 1, chain_link FROM scheduler.scheduler_log
         WHERE tenant_id = $1 AND job_id = $2 AND seq > $3 AND seq <= $4
         ORDER BY seq LIMIT $5
        """,
        tenant_id,
        job_id,
        snapshot.begin,
        snapshot.size,
        ENTRIES_MAX + 1,
    )
    if len(rows) > ENTRIES_MAX:
        raise ProofError(f"job {job_id} has more than {ENTRIES_MAX} entries")
    with reported_as(ProofError, f"an entry of job {job_id} has no link", ValueError, TypeError):
        return [(index, leaf_hash(bytes.fromhex(link))) for index, link in rows]


# --- what runs are made of ------------------------------------------------------------------------


class _Entry(NamedTuple):
    job_id: str
    chain_link: str


# --- what left ------------------------------------------------------------------------------------


class PostgresIndex:
    """What a database has of the index of a tenant, as ``ledger.verification.left_index`` reads it."""

    def __init__(self, connection: Connection, tenant_id: str) -> None:
        self._connection, self._tenant_id = connection, tenant_id

    async def kept(self) -> KeptIndex | None:
        """What is kept of the newest entries that left."""
        return await fetch_one_as(
            self._connection,
            KeptIndex,
            "SELECT first_leaf, keys, runs FROM scheduler.job_index_left WHERE tenant_id = $1"
            " ORDER BY first_leaf DESC LIMIT 1",
            self._tenant_id,
        )

    async def payload_at(self, to_seq: int) -> bytes:
        """The payload of the snapshot that ends there."""
        return payload_of(await snapshot_ending_at(self._connection, self._tenant_id, to_seq))

    async def left_hashes(self, begin: int, end: int) -> bytes:
        """Leaf hashes of entries that left, by the stored tree."""
        if begin >= end:
            return b""
        indexes = range(begin // TILE_WIDTH, -(-end // TILE_WIDTH))
        tiles = await read_tiles(self._connection, self._tenant_id, [(0, index) for index in indexes])
        hashes = b"".join(tiles.get((0, index), b"") for index in indexes)
        skipped = (begin - indexes.start * TILE_WIDTH) * HASH_BYTES
        return hashes[skipped : skipped + (end - begin) * HASH_BYTES]

    async def entries(self, begin: int, end: int) -> tuple[bytes, bytes]:
        """Keys and leaf hashes of entries that are there and whose link has its form."""
        query = (
            "SELECT job_id, chain_link FROM scheduler.scheduler_log"
            " WHERE tenant_id = $1 AND seq > $2 AND seq <= $3 ORDER BY seq"
        )
        rows = await fetch_as(self._connection, _Entry, query, self._tenant_id, begin, end)
        whole = [row for row in rows if is_link(row.chain_link)]
        hashes = leaf_hashes([bytes.fromhex(row.chain_link) for row in whole])
        return keys_of([row.job_id for row in whole]), b"".join(hashes)


async def entries_under(connection: Connection, tenant_id: str, place: RunPlace) -> OpenBlock | None:
    """The keys and leaf hashes of the entries of a place, as they are stored; None if one is missing or malformed.

    The caller MUST compare what follows from them with what was signed.
    """
    source = PostgresIndex(connection, tenant_id)
    kept = await source.kept()
    left = b"" if kept is None or kept.first_leaf != place.begin else kept.keys
    first = place.begin + len(left) // HASH_BYTES
    keys, hashes = await source.entries(first, place.end)
    block = OpenBlock(place.begin, left + keys, await source.left_hashes(place.begin, first) + hashes)
    is_whole = len(block.keys) == len(block.hashes) == (place.end - place.begin) * HASH_BYTES
    return block if is_whole else None


async def keep_left(connection: Connection, tenant_id: str, to_seq: int) -> None:
    """Before entries up to ``to_seq`` leave, keep what the index needs of them, unless it is kept already."""
    source = PostgresIndex(connection, tenant_id)
    kept = await source.kept()
    if kept is not None and kept.to_seq == to_seq:
        return
    claim = claim_in(await source.payload_at(to_seq))
    builder = await builder_at(source, to_seq, 0 if claim is None else claim.index_begin)
    if builder.open is None:
        return
    left = builder.left()
    await connection.execute("DELETE FROM scheduler.job_index_left WHERE tenant_id = $1", tenant_id)
    await connection.execute(
        "INSERT INTO scheduler.job_index_left (tenant_id, first_leaf, keys, runs) VALUES ($1, $2, $3, $4)",
        tenant_id,
        builder.open.begin,
        builder.open.keys,
        [] if left is None else left.runs,
    )

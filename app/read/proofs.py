"""Merkle proofs and tiles from the stored tree.

A proof reads O(log size) tiles in one snapshot. Tiles are those of a tiled transparency log (C2SP tlog-tiles), cut at
the newest checkpoint. In a log whose newest checkpoint covers ``size`` leaves::

    hashes of a level   size >> (8 * level)
    served              a full tile, and every partial one, that holds only hashes below that number

A client that holds the checkpoint gets every tile it needs, and no client sees what no checkpoint covers. An entry is
the raw 32-byte chain link; a bundle is the links that hash to the level 0 tile of the same index. Tiles of hashes stay
when entries leave with a prune; a bundle is served from the first index on below which nothing in it has left, the
minimum index of tlog-tiles.

Statements of external witnesses and time-stamping authorities about checkpoints are judged for verification, and served
with the log's own note. The database is not trusted: a cosignature that is invalid, or whose witness is not (or no
longer) registered, is not served, since one bad line of a known key makes its reader reject the whole note.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import asyncpg
import msgspec
import orjson
from cryptography import x509

from app.runtime.tasks import attempts_within
from app.store import Connection, chain_reads
from app.store import anchors as store
from app.store.jobs import index as job_index
from app.store.notary import read_links, read_tiles
from app.store.reading import Pool, reading, run_in
from app.trust.retention import RetentionReader
from ledger import merkle
from ledger.errors import NotFoundError, ProofError, SeqOutOfRangeError, SignatureError, reported_as
from ledger.job_index.proof import verify_job
from ledger.merkle import HASH_BYTES, leaf_hash, tiles
from ledger.merkle.tiles import TILE_HEIGHT, TILE_WIDTH
from ledger.positions import LeafIndex, Seq, leaf_index_of, seq_of
from ledger.verification.entry_check import is_link
from ledger.verification.range_check import SEQ_MAX
from ledger.verification.verdict import Anchor, damaged
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.anchors import RFC_3161, WITNESS, ExternalWitnesses, OpenNote, StoredAnchor, judge, opener, quorum_of
from signing.keys import Keyring
from signing.note import SIGNATURES_MAX, Cosignature, Note, NoteSignature, WitnessKey, cosignatures_of
from signing.policy import Quorum


async def inclusion(
    pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, seq: int, tree_size: int | None
) -> dict[str, Any]:
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
        stored = await read_tiles(
            connection, tenant_id, tiles.inclusion_tiles(index, size) | _anchoring_tiles(size, signed) | {leaf_tile}
        )
    get_tile = tiles.getter(stored)
    at = index % tiles.TILE_WIDTH * HASH_BYTES
    with _damage_named(tenant_id):
        root = _anchored_root(size, signed, get_tile)
        leaf_hash = get_tile(*leaf_tile)[at : at + HASH_BYTES]
        hashes = tiles.inclusion_proof(index, size, get_tile)
        merkle.verify_inclusion(index, size, leaf_hash, hashes, root)
    return {
        "leaf_index": index,
        "tree_size": size,
        "leaf_hash": leaf_hash.hex(),
        "root_hash": root.hex(),
        "hashes": [each.hex() for each in hashes],
    }


async def consistency(
    pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, first: int, second: int | None
) -> dict[str, Any]:
    """Proof (RFC 9162 2.1.4) from size ``first`` to ``second``, which is the newest checkpoint's when None.

    Raises:
        TenantNotFoundError: no such tenant.
        SeqOutOfRangeError: not ``1 <= first <= second <= size of the newest checkpoint``.
    """
    return await run_in(reading(pool, snapshot=True), consistency_in, tenant_id, first, second)


async def consistency_in(connection: Connection, tenant_id: str, first: int, second: int | None) -> dict[str, Any]:
    """The same in the snapshot that ``connection`` shows."""
    size, signed = await _size(connection, tenant_id, second, "second")
    if first > size:
        raise SeqOutOfRangeError(f"first {first} lies beyond second {size}", ("first",))
    wanted = tiles.consistency_tiles(first, size) | tiles.root_tiles(first) | _anchoring_tiles(size, signed)
    stored = await read_tiles(connection, tenant_id, wanted)
    get_tile = tiles.getter(stored)
    with _damage_named(tenant_id):
        root = _anchored_root(size, signed, get_tile)
        first_root = tiles.root_at(first, get_tile)
        hashes = tiles.consistency_proof(first, size, get_tile)
        merkle.verify_consistency(first, size, first_root, root, hashes)
    return {
        "first": first,
        "second": size,
        "first_root": first_root.hex(),
        "second_root": root.hex(),
        "hashes": [each.hex() for each in hashes],
    }


async def job(
    pool: asyncpg.Pool[asyncpg.Record],
    retention: RetentionReader,
    tenant_id: str,
    job_id: str,
    snapshot_id: int | None,
) -> dict[str, Any]:
    """All entries of a job that are in the index of jobs of a snapshot, or none, proved by that index: by default the
    newest.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: there is no such snapshot, or none with an index, or its runs were merged since.
        ArchivedError: an entry of the job that the index covers has left with a prune.
        ChainDamagedError: entries or runs are not those that were signed.
    """
    async with reading(pool, snapshot=True) as connection:
        await chain_reads.require_tenant(connection, tenant_id)
        snapshot = await job_index.indexed_snapshot(connection, tenant_id, SEQ_MAX, snapshot_id)
        if snapshot is None:
            which = "no snapshot" if snapshot_id is None else f"no snapshot {snapshot_id}"
            raise NotFoundError(f"there is {which} of {tenant_id} with an index of jobs")
        try:
            runs = await job_index.prove_runs(connection, tenant_id, job_id, snapshot)
        except ProofError as error:
            newest = await job_index.indexed_snapshot(connection, tenant_id, SEQ_MAX)
            if newest is not None and newest.id != snapshot.id:
                raise NotFoundError(f"of snapshot {snapshot.id}, {error}; snapshot {newest.id} is newer") from error
            raise damaged(tenant_id, "tree", 0, f"the stored index of jobs is damaged: {error}") from error
        with _damage_named(tenant_id):
            entries = await job_index.indexed_entries(connection, tenant_id, job_id, snapshot)
            try:
                verify_job(job_id, snapshot.size, snapshot.roots, entries, runs, snapshot.begin)
            except ProofError:
                await retention.refuse_departed(connection, [(tenant_id, job_id)])
                raise
    return {
        "tenant_id": tenant_id,
        "job_id": job_id,
        "from_seq": snapshot.begin + 1,
        "tree_size": snapshot.size,
        "entries": [{"leaf_index": index, "leaf_hash": each.hex()} for index, each in entries],
        "runs": [msgspec.to_builtins(run) for run in runs],
        "snapshot_id": snapshot.id,
        "dsse_envelope": orjson.Fragment(snapshot.envelope),
    }


async def _size(
    connection: Connection, tenant_id: str, asked: int | None, name: str
) -> tuple[int, checkpoints.Checkpoint]:
    """The requested tree size, else the newest checkpoint's, after checking that it exists; and that checkpoint."""
    signed = chain_reads.checkpoint_in(tenant_id, (await chain_reads.head(connection, tenant_id)).checkpoint)
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
    """Root of the first ``size`` stored leaves, after proving that they are a prefix of the signed tree.

    Raises:
        ProofError: it is not.
    """
    root = tiles.root_at(size, get_tile)
    merkle.verify_consistency(
        size, signed.size, root, signed.root, tiles.consistency_proof(size, signed.size, get_tile)
    )
    return root


def _damage_named(tenant_id: str) -> AbstractContextManager[None]:
    """Reports stored tiles that do not form the signed tree as damage."""
    what = "the stored tree is not the one that was signed"
    return reported_as(partial(damaged, tenant_id, "tree", 0), what, ProofError, TypeError, ValueError)


_ENTRY_LENGTH = HASH_BYTES.to_bytes(2, "big")
"""Prefix of every entry of a bundle."""


async def hash_tile(pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, level: int, index: int, width: int) -> bytes:
    """The first ``width`` hashes, of 32 bytes each, of tile ``index`` of ``level``.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: the newest checkpoint's tree does not have that many.
        ChainDamagedError: the tree has that many, but they are not stored.
    """
    async with reading(pool, snapshot=True) as connection:
        await _require_covered(connection, tenant_id, level, index, width)
        return await _stored(connection, tenant_id, level, index, width)


async def entry_bundle(
    pool: asyncpg.Pool[asyncpg.Record], retention: RetentionReader, tenant_id: str, index: int, width: int
) -> bytes:
    """``width`` entries from leaf ``256 * index`` on, each after its length as u16 big-endian.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: the newest checkpoint does not cover that many.
        ArchivedError: the first of them has left with a prune.
        ChainDamagedError: rows are missing, or do not hash to the signed tile.
    """
    async with reading(pool, snapshot=True) as connection:
        await _require_covered(connection, tenant_id, 0, index, width)
        first_seq = seq_of(LeafIndex(index * TILE_WIDTH))
        rows = await read_links(connection, tenant_id, first_seq, width)
        if not rows or rows[-1].seq - first_seq != width - 1:
            await retention.refuse_left(connection, tenant_id, first_seq)
        signed = await _stored(connection, tenant_id, 0, index, width)
    links = [bytes.fromhex(row.chain_link) if is_link(row.chain_link) else b"" for row in rows]
    if b"".join(map(leaf_hash, links)) != signed:
        raise damaged(
            tenant_id,
            "tree",
            first_seq,
            f"entries {first_seq} to {first_seq + width - 1} are not those that were signed",
        )
    return b"".join(_ENTRY_LENGTH + link for link in links)


async def _require_covered(connection: Connection, tenant_id: str, level: int, index: int, width: int) -> None:
    signed = chain_reads.checkpoint_in(tenant_id, (await chain_reads.head(connection, tenant_id)).checkpoint)
    size = 0 if signed is None else signed.size
    if index * TILE_WIDTH + width > size >> (level * TILE_HEIGHT):
        raise NotFoundError(f"the newest checkpoint of {tenant_id}, of size {size}, does not reach that far")


async def _stored(connection: Connection, tenant_id: str, level: int, index: int, width: int) -> bytes:
    found = await read_tiles(connection, tenant_id, [(level, index)])
    hashes = (found.get((level, index)) or b"")[: width * HASH_BYTES]
    if len(hashes) < width * HASH_BYTES:
        raise damaged(tenant_id, "tree", 0, f"tile {index} of level {level} is damaged")
    return hashes


# --- statements of witnesses ----------------------------------------------------------------------

AUTHORITIES_MAX = 64
"""Most authorities whose newest stamp is judged, former ones included."""


RootsOf: TypeAlias = Callable[[str], Sequence[x509.Certificate]]
"""Gives the root certificates for an authority's stamps, none if none are configured."""


async def judged_anchors(
    pool: Pool, tenant_id: str, keyring: Keyring, origin: str, witnesses: Sequence[WitnessKey], roots: RootsOf
) -> list[Anchor]:
    """The newest statement of each registered witness and of each authority, judged.

    Raises:
        DatabaseUnavailableError: Postgres cannot be reached.
    """
    judge_all = await run_in(reading(pool), newest_anchors, tenant_id, opener(keyring, origin), witnesses, roots)
    return await asyncio.to_thread(judge_all)


async def newest_anchors(
    connection: Connection,
    tenant_id: str,
    open_note: OpenNote,
    witnesses: Sequence[WitnessKey],
    roots: RootsOf,
) -> Callable[[], list[Anchor]]:
    """Read the newest statements; returns a function that judges them and does no I/O."""
    said = await store.newest(connection, WITNESS, tenant_id, None, _names(witnesses))
    said += await store.newest(connection, RFC_3161, tenant_id, AUTHORITIES_MAX)
    return lambda: [judge(each, witnesses, roots(each.by), open_note) for each in said]


class Cosigned(NamedTuple):
    """How far witnesses vouch for a log."""

    size: int
    """Of the newest checkpoint, 0 if there is none."""
    said: list[StoredAnchor]
    """The newest cosignature of each witness on a checkpoint up to that; not verified."""
    quorum: Quorum | None
    """How far the quorum of the policy covers it; None without a policy."""


@dataclass(kw_only=True, eq=False)
class CosignedLogs:
    """Reads how far the witnesses of this node vouch for the logs of one ledger."""

    pool: Pool
    external: ExternalWitnesses
    keyring: Callable[[], Awaitable[Keyring]]
    origin: Callable[[str], str]

    async def read(self, tenant_id: str) -> Cosigned:
        """How far they vouch for a tenant's log.

        Raises:
            TenantNotFoundError: no such tenant.
            ChainDamagedError: the stored note is no checkpoint.
        """
        async with reading(self.pool, snapshot=True) as connection:
            signed = chain_reads.checkpoint_in(tenant_id, (await chain_reads.head(connection, tenant_id)).checkpoint)
            said = await store.newest(connection, WITNESS, tenant_id, SIGNATURES_MAX)
        size, policy = 0 if signed is None else signed.size, self.external.policy
        if policy is None:
            return Cosigned(size, said, None)
        open_note = self.external.pinned(opener(await self.keyring(), self.origin(tenant_id)))
        witnesses = self.external.witnesses
        judged = await asyncio.to_thread(lambda: [judge(each, witnesses, (), open_note) for each in said])
        return Cosigned(size, said, quorum_of(policy, judged, size))

    async def quorum_to(self, tenant_id: str, seq: int, wait_s: float) -> int | None:
        """How far the quorum of the policy covers a tenant's log, once that is ``seq`` or ``wait_s`` seconds have
        passed; None if the policy is not about this log. Errors as ``read``."""
        policy = self.external.policy
        if policy is None or not policy.covers(self.origin(tenant_id)):
            return None
        size = 0
        async for _ in attempts_within(wait_s):
            quorum = (await self.read(tenant_id)).quorum
            assert quorum is not None
            size = quorum.size
            if size >= seq:
                break
        return size


ROWS_A_SIZE_MAX = SIGNATURES_MAX - 10
"""Most cosignatures of one checkpoint that are checked, newest first; with the log's own they fit into one note."""
SIZES_MAX = 16
"""Most cosigned sizes that are searched, newest first, for one with a valid cosignature."""


async def served_checkpoint(pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, witnesses: Sequence[WitnessKey]) -> str:
    """The newest checkpoint, with its cosignatures.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: there is no signed checkpoint yet.
        ChainDamagedError: the stored note is no checkpoint, or not one of the stored tree.
    """
    async with reading(pool) as connection:
        head = await chain_reads.head(connection, tenant_id)
        if head.checkpoint is None:
            raise NotFoundError(f"no checkpoint of {tenant_id} has been signed yet; try again soon")
        signed = chain_reads.checkpoint_in(tenant_id, head.checkpoint)
        assert signed is not None
        if (signed.size, signed.root.hex()) != (head.tree_size, head.root_hash):
            raise damaged(tenant_id, "tree", 0, "the stored checkpoint is not that of the stored tree")
        note, size = notes.parse(head.checkpoint), signed.size
        rows = await store.cosignatures_of_size(connection, tenant_id, size, _names(witnesses), ROWS_A_SIZE_MAX)
    return _cosigned(note, rows, witnesses).encode()


async def cosigned_checkpoint(
    pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, witnesses: Sequence[WitnessKey]
) -> str:
    """The newest checkpoint that a registered witness has cosigned.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: no checkpoint has been cosigned.
    """
    async with reading(pool) as connection:
        await chain_reads.require_tenant(connection, tenant_id)
        names = _names(witnesses)
        for size in await store.newest_cosigned_sizes(connection, tenant_id, names, SIZES_MAX):
            rows = await store.cosignatures_of_size(connection, tenant_id, size, names, ROWS_A_SIZE_MAX)
            for row in rows:
                if held(row, witnesses) is not None:
                    return _cosigned(_by_log_alone(row), rows, witnesses).encode()
    raise NotFoundError(f"no checkpoint of {tenant_id} has been cosigned by a registered witness")


def held(row: StoredAnchor, witnesses: Iterable[WitnessKey]) -> Cosignature | None:
    """The cosignature in ``row`` if it is valid and matches the row's witness, size and time; else None."""
    try:
        note = notes.parse(row.note)
        (found,) = cosignatures_of(note, [each for each in witnesses if each.text() == row.by])
        size = checkpoints.parse(note.text).size
    except (SignatureError, ValueError):
        return None
    return found if (size, found.time) == (row.size, row.time) else None


def status_of(row: StoredAnchor, witnesses: Iterable[WitnessKey]) -> str:
    """``ok``, ``broken`` if the cosignature is invalid, or ``unknown_key`` if its witness is not registered."""
    if row.by not in _names(witnesses):
        return "unknown_key"
    return "broken" if held(row, witnesses) is None else "ok"


def witnesses_of(
    said: Sequence[StoredAnchor], external: ExternalWitnesses, faults: Mapping[str, str]
) -> list[dict[str, Any]]:
    """As plain values each registered witness, then former ones, with the newest cosignature that it ``said``.
    ``faults`` has, by verifier key, why a witness last gave none."""
    places = {} if external.policy is None else {each.key.text(): each for each in external.policy.witnesses.values()}
    newest = {row.by: row for row in said}
    items = []
    for key in dict.fromkeys([*_names(external.witnesses), *newest]):
        place, row = places.get(key), newest.get(key)
        items.append(
            {
                "witness": key,
                "name": key.partition("+")[0] if place is None else place.name,
                "url": None if place is None else place.url,
                "tree_size": 0 if row is None else row.size,
                "time": None if row is None else row.time,
                "status": "none" if row is None else status_of(row, external.witnesses),
                "note": None if row is None else row.note,
                "fault": faults.get(key),
            }
        )
    return items


def _names(witnesses: Iterable[WitnessKey]) -> list[str]:
    return [witness.text() for witness in witnesses]


def _by_log_alone(row: StoredAnchor) -> Note:
    note = notes.parse(row.note)
    origin = checkpoints.parse(note.text).origin
    return note._replace(signatures=tuple(line for line in note.signatures if line.name == origin))


def _cosigned(note: Note, rows: Iterable[StoredAnchor], witnesses: Sequence[WitnessKey]) -> Note:
    """``note`` with the newest cosignature of each witness in ``rows`` that is valid for its text."""
    lines: dict[str, NoteSignature] = {}
    for row in rows:
        if (found := held(row, witnesses)) is not None and notes.parse(row.note).text == note.text:
            lines.setdefault(found.witness.text(), found.line)
    return note._replace(signatures=(*note.signatures, *(lines[name] for name in sorted(lines))))

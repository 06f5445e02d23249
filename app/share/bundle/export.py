"""Exporting a bundle from a running ledger: signed first, read from one state, streamed in constant memory.

In order::

    1. all chained entries are signed, so that the export is whole; not for a peer, if the checkpoint covers them
    2. one REPEATABLE READ, read-only transaction shows one state of rows, snapshots, tree and checkpoint
       with statements of external witnesses about the log
    3. snapshots, which follow the entries in the file, go to a temporary file if they are many; one that does not
       follow the one before it, or is not what was signed, ends the export
    4. entries pass through the same checks as in verification: a row that fails ends the export, and its manifest is
       never signed
    5. the manifest, last

If no end is given, the range ends with the last snapshot; entries chained since are for the next bundle. If no
beginning is given, it begins with the first entry that has not left with a prune.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any, NamedTuple

import asyncpg

from app.runtime.state.found_breaks import break_of
from app.runtime.state.node import Node
from app.runtime.tasks import Slots
from app.store import Connection, chain_reads
from app.store import anchors as anchors_store
from app.store.chain_reader import PostgresChainReader
from app.store.jobs.index import PostgresIndex
from app.store.notary import read_link, read_tiles
from app.store.reading import reading
from app.trust.retention import RetentionReader
from ledger.bundle.rows import PAYLOAD, encode_as_stored, encode_entry
from ledger.errors import (
    ChainDamagedError,
    LedgerError,
    NotFoundError,
    NotReadyError,
    ProofError,
    SeqOutOfRangeError,
    SigningUnavailableError,
    reported_as,
)
from ledger.machines.retention import NOTHING, Retention, archived
from ledger.merkle import tiles
from ledger.verification.entry_check import EntryChecker
from ledger.verification.left_index import index_at
from ledger.verification.snapshot_check import SnapshotJudge, open_row
from ledger.verification.verdict import Break, Findings, damaged
from signing import checkpoint as checkpoints
from signing.bundle.writer import BundleEnd, BundleWriter
from signing.keys import Keyring, Signer
from signing.snapshot import encode_as_stored as snapshot_as_stored
from signing.snapshot import open_snapshot

EXPORTS_AT_ONCE_MAX = 2
"""Each holds a connection and an old state of the database until its reader is done; further exports wait."""
PIECE_BYTES_MIN = 64 << 10
"""Bytes that are sent together: the parts of a small bundle are one piece."""
EXPORT_TIMEOUT_S = 3600.0
"""Longest time of one export, including the reader's pace."""
_OPEN = partial(open_snapshot, keyring=None)
"""Opens an envelope without judging its signature."""


class _Range(NamedTuple):
    from_seq: int
    to_seq: int
    checkpoint: str
    checkpoint_size: int


class BundleExporter:
    """Exports bundles of one ledger for one node."""

    def __init__(
        self,
        *,
        pool: asyncpg.Pool[asyncpg.Record],
        node: Node,
        log_origin: str,
        signer: Callable[[], Signer],
        keyring: Callable[[str], Awaitable[Keyring]],
        retention: RetentionReader,
        sign_now: Callable[[str], Awaitable[object]],
        known_breaks: Callable[[str], Sequence[Break]] = lambda tenant_id: (),
        report: Callable[[ChainDamagedError], object] = lambda error: None,
    ) -> None:
        """``signer`` returns the current key for manifests, ``keyring`` the published keys of a tenant's log,
        ``known_breaks`` the breaks found in a tenant's chain. ``report`` is called with a break that an export finds
        after its first piece."""
        self._pool = pool
        self._node = node
        self._log_origin = log_origin
        self._signer = signer
        self._keyring = keyring
        self._retention = retention
        self._sign_now = sign_now
        self._known_breaks = known_breaks
        self._report = report
        self._slots = Slots(EXPORTS_AT_ONCE_MAX, "exports")

    async def export(
        self,
        tenant_id: str,
        from_seq: int | None = None,
        to_seq: int | None = None,
        *,
        without_signing: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of a bundle. The first, which is empty, comes after every check that can reject the export.
        ``without_signing`` signs nothing if the stored checkpoint covers ``to_seq``, and leaves out what is kept of the
        index of jobs of entries that left, which nobody imports.

        The task that started the generator MUST close it. A file without its last pieces is no bundle. If rows after
        the first piece fail, the pieces end as evidence of that (docs/formats/bundle.md), which is no bundle either.

        Raises:
            TenantNotFoundError: there is no such tenant.
            NotFoundError: it has no entries.
            SeqOutOfRangeError: the chain, as far as it is signed, does not have that range.
            ArchivedError: a part of the range has left with a prune.
            SigningUnavailableError: nothing can be signed now.
            ChainDamagedError: snapshots, or rows of the first entry part, are inconsistent.
            NotReadyError: the service stops, too many exports are under way, or snapshots cannot be kept in a temporary
                file.
            DatabaseUnavailableError: Postgres does not answer, or the reader was too slow.
        """
        async with reading(self._pool) as connection:
            await chain_reads.require_tenant(connection, tenant_id)
            is_covered = without_signing and _is_covered(await chain_reads.head(connection, tenant_id), to_seq)
        if not is_covered:
            await self._sign_now(tenant_id)
        pieces_of = self._export(tenant_id, from_seq, to_seq, with_index=not without_signing)
        async with self._slots.taken(), aclosing(pieces_of) as pieces:
            yield await anext(pieces)
            held = bytearray()
            async for piece in pieces:
                held += piece
                if len(held) >= PIECE_BYTES_MIN:
                    yield bytes(held)
                    held.clear()
            yield bytes(held)

    async def small(
        self, connection: Connection, tenant_id: str, from_seq: int, to_seq: int, bytes_max: int
    ) -> bytes | None:
        """A whole bundle of a range that the stored checkpoint covers, in the snapshot that ``connection`` shows; None
        if it, or its payloads, are longer than ``bytes_max``.

        Raises:
            As ``export``.
        """
        writer = BundleWriter(tenant_id=tenant_id, node_id=self._node.node_id, log_origin=self._log_origin)
        with closing(writer):
            chosen, end, before = await self._chosen(connection, tenant_id, from_seq, to_seq)
            reader, rows, left_bytes = PostgresChainReader(connection, tenant_id), list[Sequence[Any]](), bytes_max
            async with aclosing(reader.entries(from_seq, to_seq)) as batches:
                async for batch in batches:
                    rows += batch
                    left_bytes -= sum(len(row[PAYLOAD]) for row in batch)
                    if left_bytes < 0:
                        return None
            await _add_snapshots(reader, chosen, writer)

            def pack() -> bytes:
                findings = Findings()
                checker = EntryChecker(tenant_id, findings, first_seq=from_seq, prev_link=before)
                checker.check(rows)
                _refuse_short(tenant_id, checker, findings, to_seq)
                return writer.add_entries(rows) + b"".join(writer.finish(end, self._signer()))

            whole = await asyncio.to_thread(pack)
        return whole if len(whole) <= bytes_max else None

    async def _chosen(
        self,
        connection: Connection,
        tenant_id: str,
        from_seq: int | None,
        to_seq: int | None,
        *,
        with_index: bool = False,
    ) -> tuple[_Range, BundleEnd, str | None]:
        """The range, what its bundle has besides the rows, and the link of the entry before. ``with_index``: with what
        is kept of the index of jobs, where the bundle begins at the floor."""
        known = await self._retention.read(connection, tenant_id)
        chosen = _choose(await chain_reads.head(connection, tenant_id), tenant_id, from_seq, to_seq, known)
        # Read after this state was fixed, so the keys include every key that signed in it.
        end = await _end(connection, tenant_id, chosen, await self._keyring(tenant_id))
        floor = known.floor
        if with_index and floor is not None and chosen.from_seq == floor.to_seq + 1 and floor.seq <= chosen.to_seq:
            end = end._replace(job_index=await index_at(PostgresIndex(connection, tenant_id), floor.to_seq))
        return chosen, end, await _link_before(connection, tenant_id, chosen.from_seq, known)

    async def _export(
        self, tenant_id: str, from_seq: int | None, to_seq: int | None, *, with_index: bool
    ) -> AsyncGenerator[bytes, None]:
        """The pieces, without signing what no checkpoint covers."""
        writer = BundleWriter(tenant_id=tenant_id, node_id=self._node.node_id, log_origin=self._log_origin)
        with closing(writer):
            async with reading(self._pool, timeout_s=EXPORT_TIMEOUT_S, snapshot=True) as connection:
                chosen, end, before = await self._chosen(connection, tenant_id, from_seq, to_seq, with_index=with_index)
                reader = PostgresChainReader(connection, tenant_id)
                async with aclosing(self._pieces(reader, writer, chosen[:2], Findings(), before)) as pieces:
                    # A broken row of the first part, or snapshots that cannot be spooled, give an error response, not a
                    # truncated bundle.
                    first = await anext(pieces, b"")
                    await _add_snapshots(reader, chosen, writer)
                    yield b""
                    yield first
                    broken: Break | None = None
                    try:
                        async for piece in pieces:
                            yield piece
                    except ChainDamagedError as error:
                        self._report(error)
                        broken = break_of(error)
            signer = self._signer()
            rest = writer.finish(end, signer) if broken is None else writer.finish_as_evidence(end, [broken], signer)
            async for last in _last_pieces(rest):
                yield last

    async def evidence(
        self, tenant_id: str, from_seq: int | None = None, to_seq: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of an evidence file: the stored rows of a tenant whose chain is broken, unchanged, with the breaks
        that this node knows and those of the rows. The first piece, which is empty, comes after every check that can
        reject the export. The task that started the generator MUST close it.

        Raises:
            NotFoundError: this node knows no break of the tenant.
            NotReadyError, DatabaseUnavailableError: as ``export``.
        """
        if not (known := self._known_breaks(tenant_id)):
            raise NotFoundError(
                f"this node knows of no break of tenant {tenant_id} that evidence could be about: verify it, or export "
                "a bundle"
            )
        keys = await self._keyring(tenant_id)
        findings = Findings()
        writer = BundleWriter(tenant_id=tenant_id, node_id=self._node.node_id, log_origin=self._log_origin)
        with closing(writer):
            async with (
                self._slots.taken(),
                reading(self._pool, timeout_s=EXPORT_TIMEOUT_S, snapshot=True) as connection,
            ):
                yield b""
                checkpoint = await chain_reads.stored_checkpoint(connection, tenant_id)
                reader = PostgresChainReader(connection, tenant_id)
                first_seq, before = await self._begin_of_evidence(connection, tenant_id, from_seq)
                entries = self._pieces(reader, writer, (first_seq, to_seq), findings, before, is_evidence=True)
                async with aclosing(entries) as pieces:
                    async for piece in pieces:
                        yield piece
                async with aclosing(reader.snapshots(from_seq or 1, to_seq)) as batches:
                    async for rows in batches:
                        writer.add_snapshots(rows, snapshot_as_stored)
            breaks = list({(each.kind, each.seq): each for each in (*known, *findings.found.first.values())}.values())
            end = BundleEnd("", checkpoint, (), keys)
            async for last in _last_pieces(writer.finish_as_evidence(end, breaks, self._signer())):
                yield last

    async def _begin_of_evidence(
        self, connection: Connection, tenant_id: str, from_seq: int | None
    ) -> tuple[int | None, str | None]:
        """The first entry of evidence, None for the first that is stored, and the link before it."""
        try:
            known = await self._retention.read(connection, tenant_id)
        except ChainDamagedError:
            known = NOTHING  # Damage is what the evidence is about.
        begin = max(from_seq or 1, known.floor_seq + 1)
        return None if begin == 1 else begin, await _link_before(connection, tenant_id, begin, known)

    async def _pieces(
        self,
        reader: PostgresChainReader,
        writer: BundleWriter,
        seqs: tuple[int | None, int | None],
        findings: Findings,
        before: str | None = None,
        *,
        is_evidence: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """The checked entries of a range, after the link ``before``, as pieces of the file. In evidence a break is a
        finding, else it ends the export."""
        checker = EntryChecker(reader.tenant_id, findings, first_seq=seqs[0] or 1, prev_link=before)

        def take(rows: Sequence[Sequence[Any]]) -> bytes:
            checker.check(rows)
            is_whole = not is_evidence and findings.first_break() is None
            return writer.add_entries(rows, encode_entry if is_whole else encode_as_stored)

        async with aclosing(reader.entries(*seqs)) as batches:
            async for rows in batches:
                if self._node.shutting_down:
                    raise NotReadyError("the service stops; ask for the export again")
                if piece := await asyncio.to_thread(take, rows):
                    yield piece
                if not is_evidence:
                    _refuse_broken(reader.tenant_id, findings)
        if not is_evidence:
            _refuse_short(reader.tenant_id, checker, findings, seqs[1])


async def _add_snapshots(reader: PostgresChainReader, chosen: _Range, writer: BundleWriter) -> None:
    """Add the snapshots wholly in the range; a snapshot without a range is left out.

    They are checked against each other, and each row against its claim; a verifier checks the signatures and compares
    them with the entries.

    Raises:
        ChainDamagedError: a snapshot cannot be read, is not what was signed, or does not follow the one before it.
    """
    findings = Findings()
    judge = SnapshotJudge(reader.tenant_id, findings, first_seq=chosen.from_seq)
    async with aclosing(reader.snapshots(chosen.from_seq, chosen.to_seq)) as batches:
        async for rows in batches:
            for row in rows:
                from_seq, to_seq, *_ = row
                if from_seq is None or to_seq is None:
                    continue
                try:
                    writer.add_snapshots((row,))
                except OSError as error:
                    raise _unkept(error) from error
                except (LedgerError, TypeError, ValueError) as error:
                    raise ChainDamagedError(
                        reader.tenant_id,
                        f"it is exported no further, its snapshot from seq {from_seq} to {to_seq} cannot be read: "
                        f"{error}",
                    ) from error
                judge.judge(open_row(row, _OPEN, findings), lambda from_seq, to_seq: None)
                _refuse_broken(reader.tenant_id, findings)


async def _last_pieces(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    while (piece := await asyncio.to_thread(_next, pieces)) is not None:
        yield piece


def _next(pieces: Iterator[bytes]) -> bytes | None:
    try:
        return next(pieces, None)
    except OSError as error:
        raise _unkept(error) from error


def _unkept(error: OSError) -> NotReadyError:
    return NotReadyError(
        f"snapshots of the bundle cannot be kept in a file of the temporary folder ({tempfile.tempdir or 'none'}): "
        f"{error.strerror}; make room there, or name another in TMPDIR and start the service again"
    )


def _is_covered(head: chain_reads.HeadRow, to_seq: int | None) -> bool:
    """Whether the stored checkpoint covers the range, whose end is given."""
    return to_seq is not None and head.checkpoint is not None and to_seq <= checkpoints.read(head.checkpoint).size


def _choose(
    head: chain_reads.HeadRow, tenant_id: str, from_seq: int | None, to_seq: int | None, known: Retention
) -> _Range:
    if head.head_seq == 0:
        raise NotFoundError(f"tenant {tenant_id} has no entry that could be exported")
    if head.checkpoint is None:
        raise SigningUnavailableError(f"no checkpoint of {tenant_id} has been signed yet; try again")
    size = checkpoints.read(head.checkpoint).size
    if min(seq for seq in (from_seq, to_seq, known.floor_seq + 1) if seq is not None) <= known.floor_seq:
        raise archived(f"a part of the range of tenant {tenant_id}", known.floor)
    first, last = from_seq or known.floor_seq + 1, to_seq if to_seq is not None else head.covered_seq
    if not 1 <= last <= size:
        raise SeqOutOfRangeError(f"to_seq {last} lies beyond the checkpoint, which covers {size} entries", ("to_seq",))
    if first > last:
        raise SeqOutOfRangeError(f"from_seq {first} lies behind the end of the range, {last}", ("from_seq",))
    return _Range(first, last, head.checkpoint, size)


async def _link_before(connection: Connection, tenant_id: str, seq: int, known: Retention) -> str | None:
    """Link of the entry before ``seq``, which may have left."""
    if known.floor is not None and seq == known.floor_seq + 1:
        return known.floor.chain_link
    return await read_link(connection, tenant_id, seq - 1)


async def _end(connection: Connection, tenant_id: str, chosen: _Range, keys: Keyring) -> BundleEnd:
    """Root and proof at the end of the range, from the stored tiles."""
    first, second = chosen.to_seq, chosen.checkpoint_size
    said = await anchors_store.newest_unproven(connection, tenant_id, second)
    sizes = (first, *(each.size for each in said))
    wanted = tiles.root_tiles(first).union(*(tiles.consistency_tiles(size, second) for size in sizes))
    get_tile = tiles.getter(await read_tiles(connection, tenant_id, wanted))
    with reported_as(partial(damaged, tenant_id, "tree", second), "the stored tree is incomplete", ProofError):
        root = tiles.root_at(first, get_tile)
        proof = tiles.consistency_proof(first, second, get_tile)
        anchors = [each.bundled(tiles.consistency_proof(each.size, second, get_tile)) for each in said]
    return BundleEnd(root.hex(), chosen.checkpoint, proof, keys, anchors)


def _refuse_short(tenant_id: str, checker: EntryChecker, findings: Findings, to_seq: int | None) -> None:
    """Reject rows that are broken, or that end before ``to_seq``."""
    if checker.last_seq != to_seq:
        findings.add("gap", checker.last_seq + 1, f"entries from seq {checker.last_seq + 1} on are missing")
    _refuse_broken(tenant_id, findings)


def _refuse_broken(tenant_id: str, findings: Findings) -> None:
    if (found := findings.first_break()) is not None:
        raise ChainDamagedError(
            tenant_id, f"it is exported no further, {found.kind} at seq {found.seq}, {found.detail}", found
        )

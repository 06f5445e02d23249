"""Recovery by bundles: rows restored into the same ledger, and records that a node did not chain before it stopped.

**From a bundle into the ledger** (``restore_bundle``): the same rows, in the same places, with the same links. Unlike
an import it relinks nothing, so a bundle is restored only to its own place: it is of this log's origin, begins no later
than right after the chain's head, and agrees with the chain where both have entries.

One bundle, in one transaction::

    1. the head is locked; the bundle begins no later than right after it
    2. where bundle and chain meet they have the same link, so they have the same history
    3. entries after the head are copied unchanged; followers catch up at the next start
    4. snapshots that follow the last stored one are restored too; the keys that signed them are valid from their HLCs

The caller MUST have verified the bundle, its signatures included.

**From a WAL folder into a bundle** (``export_from_wal``), offline; the folder is not changed. Unchained records have
neither seq nor link. They are exported as a chain of their own, in LSN order from seq 1, signed by the node's key. Its
log is ``{node_id}.wal/{wal_id}``, so it cannot be mistaken for the tenant's. Of a keyed line that occurs twice the
first is exported, as it would have been chained.

Records that are chained by the control file are left out. That file may lag, so records chained just before the node
stopped may be exported too; an import recognizes them as duplicates by their HLC and digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from app.store import Connection, chaining
from app.store import keys as key_store
from app.store import notary as notary_store
from app.store.appended import AppendedEntries, ChainAppender, ChainPosition, head_of
from app.store.chaining import ChainHead
from ledger.bundle.rows import CHAIN_LINK, PREV_CHAIN_LINK
from ledger.chain import record
from ledger.chain.record import IdempotencyKey
from ledger.errors import InvalidInputError, NotFoundError, StartRefusedError, WalCorruptError
from ledger.facts.events import ACTIONS
from ledger.hlc import Hlc
from ledger.positions import Lsn
from ledger.verification.entry_check import EntryRow
from signing.bundle.reader import BundleReader
from signing.bundle.writer import OwnChainBundle, OwnEntry
from signing.key_history import time_of
from signing.keys import Signer
from signing.snapshot import ENVELOPE, FROM_SEQ, SNAPSHOT_HLC, TO_SEQ
from wal import control as wal_control
from wal import inspect as wal_inspect
from wal import reader as wal_reader
from wal.inspect import WalReport
from wal.reader import Record


class RestoredRange(NamedTuple):
    """The numbers of ``entries`` and ``snapshots`` restored from one bundle; ``to_seq`` is the chain's new head."""

    tenant_id: str
    entries: int
    to_seq: int
    snapshots: int


async def restore_bundle(connection: Connection, reader: BundleReader, log_origin: str) -> RestoredRange:
    """Restore the rows of the verified bundle that the chain lacks.

    Raises:
        StartRefusedError: it is of another log, does not continue the chain, or differs from it; nothing was stored.
    """
    manifest = reader.manifest
    tenant_id = manifest.tenant_id
    if manifest.origin != f"{log_origin}/{tenant_id}":
        raise StartRefusedError(
            f"the bundle is of the log {manifest.origin}, and this ledger's is {log_origin}/{tenant_id}: what another "
            "ledger recorded is brought in with tally bundle import"
        )
    async with connection.transaction():
        # 1. the head
        if (head := (await chaining.lock_heads(connection, [tenant_id])).get(tenant_id)) is None:
            await chaining.create_heads(connection, [tenant_id])
            head = ChainHead(0, None, None)
        if manifest.from_seq > head.seq + 1:
            raise StartRefusedError(
                f"the bundle begins with seq {manifest.from_seq}, but the chain of tenant {tenant_id} ends at "
                f"{head.seq}: bring back what is between first; entries that left with a prune are in the archive "
                "(tally restore --from archive)"
            )
        # 2. where both meet
        await _check_joint(connection, reader, head)
        # 3. the entries
        before_seq = head.seq
        for rows in reader.entry_batches(head.seq + 1):
            head = await _append(connection, tenant_id, head, rows)
        # 4. the snapshots
        snapshots = await _restore_snapshots(connection, reader)
    return RestoredRange(tenant_id, head.seq - before_seq, head.seq, snapshots)


async def _check_joint(connection: Connection, reader: BundleReader, head: ChainHead) -> None:
    """Reject a bundle whose last entry in common with the chain, or the entry before its first, differs there."""
    manifest = reader.manifest
    seq = min(head.seq, manifest.to_seq)
    at, column = (seq, CHAIN_LINK) if seq >= manifest.from_seq else (manifest.from_seq, PREV_CHAIN_LINK)
    link = next(iter(reader.entry_batches(at, at)))[0][column]
    stored = await notary_store.read_link(connection, manifest.tenant_id, seq) if seq else None
    if link != stored:
        raise StartRefusedError(
            f"the bundle has the link {link} at seq {seq} and the chain of tenant {manifest.tenant_id} has {stored}: "
            "their histories differ, so it cannot be brought back onto this chain"
        )


async def _append(connection: Connection, tenant_id: str, head: ChainHead, rows: Sequence[EntryRow]) -> ChainHead:
    """Append these rows, which follow ``head``, unchanged; returns the new head."""
    appended = AppendedEntries()
    appender = ChainAppender(appended, {tenant_id: head}, {})
    for seq, t_hlc, _, _, _, job_id, action, version, prev, link, _, payload, origin in rows:
        entry = (Hlc.parse(t_hlc), job_id, action, version, ChainPosition(seq, link, prev), payload.encode(), origin)
        appender.keep(tenant_id, *entry)
    appender.finish()
    await chaining.copy_entries(connection, appended.log_rows)
    await chaining.move_heads(connection, appended.heads())
    return head_of(appended.links[tenant_id])


async def _restore_snapshots(connection: Connection, reader: BundleReader) -> int:
    """Restore the snapshots that continue the last stored one without a gap; returns their number."""
    tenant_id = reader.manifest.tenant_id
    last = await notary_store.last_snapshot(connection, tenant_id)
    signed_seq = last.row[TO_SEQ] if last is not None else 0
    restored = 0
    signed_ms: dict[str, int] = {}
    """By key, the time of the earliest snapshot that it signed."""
    for row in reader.snapshot_rows():
        if row[FROM_SEQ] == signed_seq + 1 and await notary_store.insert_snapshots(connection, {tenant_id: row}):
            for signature in orjson.loads(row[ENVELOPE])["signatures"] if row[ENVELOPE] is not None else ():
                key_id, at_ms = signature.get("keyid", ""), Hlc.parse(row[SNAPSHOT_HLC]).physical_ms
                signed_ms[key_id] = min(at_ms, signed_ms.get(key_id, at_ms))
            signed_seq = row[TO_SEQ]
            restored += 1
    # As when the snapshots were made: imported entries may be older than the key.
    for key_id, at_ms in signed_ms.items():
        await key_store.widen(connection, key_id, time_of(at_ms))
    return restored


ENTRIES_AT_ONCE: Final = 1000


def survey(path: Path) -> WalReport:
    """The only log in ``path``, which is its folder or a ``wal.dir`` with no other. A torn tail is left out.

    Raises:
        NotFoundError: there is none.
        InvalidInputError: there are several.
        WalCorruptError: it is damaged.
    """
    folders = wal_inspect.wal_folders(path)
    if len(folders) > 1:
        raise InvalidInputError(
            f"{path} holds the logs of several nodes ({', '.join(folder.name for folder in folders)}); name the folder "
            "of one"
        )
    (report,) = wal_inspect.verify(folders[0])
    if report.verdict == "corrupt":
        raise WalCorruptError(report.segment or folders[0].name, report.offset or 0, report.reason or "damaged")
    return report


def export_from_wal(
    report: WalReport, tenant_id: str, signer: Signer, log_signer: Signer, write: Callable[[bytes], object]
) -> None:
    """Write the bundle of a tenant's unchained records in the log of ``report``.

    Raises:
        NotFoundError: there are none.
        WalCorruptError: the log changed since and is damaged.
        SigningUnavailableError: a signer cannot be reached.
    """
    bundle = OwnChainBundle(
        tenant_id=tenant_id,
        node_id=report.node_id,
        log_origin=f"{report.node_id}.wal/{report.wal_id}",
        signer=signer,
        log_signer=log_signer,
    )
    with closing(bundle):
        entries = _entries(_unchained(report), tenant_id)
        while batch := list(islice(entries, ENTRIES_AT_ONCE)):
            write(bundle.append(batch))
        if bundle.end[0] == 0:
            raise NotFoundError(f"{report.folder} holds no unchained record of tenant {tenant_id}")
        for piece in bundle.finish():
            write(piece)


def _unchained(report: WalReport) -> Iterator[Record]:
    """Records after the last one known to be chained, up to the last sound one."""
    folder = Path(report.folder)
    control = wal_control.load(folder)
    from_lsn = max(report.first_lsn, Lsn(1 + (control.chained_lsn if control is not None else 0)))
    if from_lsn <= report.last_lsn:
        yield from wal_reader.read(folder, from_lsn, report.node_id, report.last_lsn)


def _entries(records: Iterator[Record], tenant_id: str) -> Iterator[OwnEntry]:
    """The entries of the tenant, without lines that a keyed request repeats."""
    seen: dict[tuple[int, str], tuple[bytes, set[int]]] = {}
    for item in records:
        event = record.decode(item.payload)
        if event.tenant_id != tenant_id or _is_repeated(event.idempotency, seen):
            continue
        if item.type not in ACTIONS:
            raise InvalidInputError(f"LSN {item.lsn} has type {item.type}, which this version does not know")
        yield OwnEntry(item.hlc, event.job_id, ACTIONS[item.type], event.payload)


def _is_repeated(key: IdempotencyKey | None, seen: dict[tuple[int, str], tuple[bytes, set[int]]]) -> bool:
    """Whether the line, or its key with another body, occurred before; records it in ``seen``."""
    if key is None:
        return False
    digest, lines = seen.setdefault((key.route, key.key), (key.body_digest, set()))
    if digest != key.body_digest or key.line in lines:
        return True
    lines.add(key.line)
    return False

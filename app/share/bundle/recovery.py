"""Recovery by bundles: rows that are brought back into this very ledger, and records that a node never got to chain.

**From a bundle into the ledger** (``restore_bundle``): the same rows, in the same places, with the same links. Unlike
an import nothing is linked anew, so a bundle comes back only where it was: it is of this log's origin, begins at or
below the end of the chain as it stands, and agrees with the chain where both have entries.

One bundle, in one transaction::

    1. the head is locked; the bundle begins no later than right behind it
    2. where bundle and chain meet they have the same link, so they have the same history
    3. entries behind the head are copied as they are; followers come behind at the next start
    4. snapshots that follow the last one stored come back too, and the keys that signed them count from their HLCs on

Verifying the bundle, its signatures too, comes before all of that and is the caller's part.

**From a WAL folder into a bundle** (``export_from_wal``), offline; nothing is changed there. Unchained records have
neither seq nor link. They are exported as a chain of their own, in LSN order from seq 1 on, signed by the node's key;
its log is ``{node_id}.wal/{wal_id}``, so nobody takes it for the tenant's. Of a keyed line that stands there twice the
first counts, as it would have in the chain.

What the control file calls chained is left out. That file may lag behind, so records that were chained just before the
node stopped may be here as well; an import finds them by their HLC and digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from app.store import chaining
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

if TYPE_CHECKING:
    from app.store import Connection


class RestoredRange(NamedTuple):
    """What one bundle brought back: ``entries`` up to ``to_seq``, which is the chain's new end, and ``snapshots``."""

    tenant_id: str
    entries: int
    to_seq: int
    snapshots: int


async def restore_bundle(connection: Connection, reader: BundleReader, log_origin: str) -> RestoredRange:
    """Bring back what the verified bundle holds and the chain lacks.

    Raises:
        StartRefusedError: it is of another log, does not follow on the chain, or differs from it; nothing was stored.
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
        head = (await chaining.lock_heads(connection, [tenant_id])).get(tenant_id)
        if head is None:
            await chaining.create_heads(connection, [tenant_id])
            head = ChainHead(0, None, None)
        if manifest.from_seq > head.seq + 1:
            raise StartRefusedError(
                f"the bundle begins with seq {manifest.from_seq}, but the chain of tenant {tenant_id} ends at "
                f"{head.seq}: bring back what is between first"
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
    """Refuse a bundle whose last entry in common with the chain, or the one before its first, is another there."""
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
    """Add these rows, which follow on ``head``, as they are; the new head."""
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
    """Bring back the snapshots that follow, one behind the other, on the last one stored; how many."""
    tenant_id = reader.manifest.tenant_id
    last = await notary_store.last_snapshot(connection, tenant_id)
    signed_seq = last.to_seq if last is not None else 0
    restored = 0
    signed_ms: dict[str, int] = {}
    """By key, the time of the earliest that it signed."""
    for row in reader.snapshot_rows():
        if row[FROM_SEQ] == signed_seq + 1 and await notary_store.insert_snapshots(connection, {tenant_id: row}):
            for signature in orjson.loads(row[ENVELOPE])["signatures"]:
                key_id, at_ms = signature.get("keyid", ""), Hlc.parse(row[SNAPSHOT_HLC]).physical_ms
                signed_ms[key_id] = min(at_ms, signed_ms.get(key_id, at_ms))
            signed_seq = row[TO_SEQ]
            restored += 1
    # As when they were made: entries that were imported may be older than the key.
    for key_id, at_ms in signed_ms.items():
        await key_store.widen(connection, key_id, time_of(at_ms))
    return restored


ENTRIES_AT_ONCE: Final = 1000


def survey(path: Path) -> WalReport:
    """The one log in ``path``, which is its folder or a ``wal.dir`` that holds no other. A torn tail is left out.

    Raises:
        NotFoundError: there is none.
        InvalidInputError: there are several.
        WalCorruptError: it is damaged.
    """
    folders = wal_inspect.wal_folders(path)
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise InvalidInputError(f"{path} holds the logs of several nodes ({names}); name the folder of one")
    (report,) = wal_inspect.verify(folders[0])
    if report.verdict == "corrupt":
        raise WalCorruptError(report.segment or folders[0].name, report.offset or 0, report.reason or "damaged")
    return report


def export_from_wal(
    report: WalReport, tenant_id: str, signer: Signer, log_signer: Signer, write: Callable[[bytes], object]
) -> None:
    """Write the bundle of a tenant's unchained records in the log that ``report`` is about.

    Raises:
        NotFoundError: there are none.
        WalCorruptError: the log changed since and is damaged.
        SigningUnavailableError: a signer cannot be reached.
    """
    origin = f"{report.node_id}.wal/{report.wal_id}"
    bundle = OwnChainBundle(
        tenant_id=tenant_id, node_id=report.node_id, log_origin=origin, signer=signer, log_signer=log_signer
    )
    with closing(bundle):
        entries = _entries(_unchained(report), tenant_id)
        while batch := list(islice(entries, ENTRIES_AT_ONCE)):
            write(bundle.append(batch))
        if bundle.entry_count == 0:
            raise NotFoundError(f"{report.folder} holds no unchained record of tenant {tenant_id}")
        for piece in bundle.finish():
            write(piece)


def _unchained(report: WalReport) -> Iterator[Record]:
    """Records beyond what is known to be chained, up to the last sound one."""
    folder = Path(report.folder)
    control = wal_control.load(folder)
    from_lsn = max(report.first_lsn, Lsn(1 + (control.chained_lsn if control is not None else 0)))
    if from_lsn <= report.last_lsn:
        yield from wal_reader.read(folder, from_lsn, report.node_id, report.last_lsn)


def _entries(records: Iterator[Record], tenant_id: str) -> Iterator[OwnEntry]:
    """The records of the tenant, without lines that a keyed request repeats."""
    seen: dict[tuple[int, str], tuple[bytes, set[int]]] = {}
    for item in records:
        event = record.decode(item.payload)
        if event.tenant_id != tenant_id or _is_repeated(event.idempotency, seen):
            continue
        if item.type not in ACTIONS:
            raise InvalidInputError(f"LSN {item.lsn} has type {item.type}, which this version does not know")
        yield OwnEntry(item.hlc, event.job_id, ACTIONS[item.type], event.payload)


def _is_repeated(key: IdempotencyKey | None, seen: dict[tuple[int, str], tuple[bytes, set[int]]]) -> bool:
    """Whether the line, or its key with another body, was there before; it is noted."""
    if key is None:
        return False
    digest, lines = seen.setdefault((key.route, key.key), (key.body_digest, set()))
    if digest != key.body_digest or key.line in lines:
        return True
    lines.add(key.line)
    return False

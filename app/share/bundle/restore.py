"""Bringing rows back from bundles of this very ledger: the same rows, in the same places, with the same links.

Unlike an import nothing is linked anew, so a bundle comes back only where it was: it is of this log's origin, begins at
or below the end of the chain as it stands, and agrees with the chain where both have entries.

One bundle, in one transaction::

    1. the head is locked; the bundle begins no later than right behind it
    2. where bundle and chain meet they have the same link, so they have the same history
    3. entries behind the head are copied as they are; followers come behind at the next start
    4. snapshots that follow the last one stored come back too, and the keys that signed them count from their HLCs on

Verifying the bundle, its signatures too, comes before all of that and is the caller's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import orjson

from app.store import chaining
from app.store import keys as key_store
from app.store import notary as notary_store
from app.store.appended import AppendedEntries, ChainAppender, ChainPosition, head_of
from app.store.chaining import ChainHead
from ledger.bundle.rows import CHAIN_LINK, PREV_CHAIN_LINK
from ledger.errors import StartRefusedError
from ledger.hlc import Hlc
from ledger.verification.entry_check import EntryRow
from signing.bundle.reader import BundleReader
from signing.key_history import time_of
from signing.snapshot import ENVELOPE, FROM_SEQ, SNAPSHOT_HLC, TO_SEQ

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
    if seq >= manifest.from_seq:
        link = next(iter(reader.entry_batches(seq, seq)))[0][CHAIN_LINK]
    else:
        link = next(iter(reader.entry_batches(manifest.from_seq, manifest.from_seq)))[0][PREV_CHAIN_LINK]
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
        appender.keep(
            tenant_id,
            Hlc.parse(t_hlc),
            job_id,
            action,
            version,
            ChainPosition(seq, link, prev),
            payload.encode(),
            origin,
        )
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
        if row[FROM_SEQ] != signed_seq + 1:
            continue
        if await notary_store.insert_snapshots(connection, {tenant_id: row}):
            for signature in orjson.loads(row[ENVELOPE])["signatures"]:
                key_id, at_ms = signature.get("keyid", ""), Hlc.parse(row[SNAPSHOT_HLC]).physical_ms
                signed_ms[key_id] = min(at_ms, signed_ms.get(key_id, at_ms))
            signed_seq = row[TO_SEQ]
            restored += 1
    # As when they were made: entries that were imported may be older than the key.
    for key_id, at_ms in signed_ms.items():
        await key_store.widen(connection, key_id, time_of(at_ms))
    return restored

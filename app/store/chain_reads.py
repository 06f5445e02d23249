"""SQL of reads about chains: heads, entries, trees and tiles, snapshots."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from app.store.reads import PAGE_BYTES_MAX
from app.store.times import columns, told
from app.store.whole import whole
from ledger.errors import ChainDamagedError, TenantNotFoundError

if TYPE_CHECKING:
    from asyncpg import Record

    from app.store import Connection


class HeadRow(NamedTuple):
    """End of a tenant's chain, and its tree: size and root 0 and None before anything was hashed."""

    head_seq: int
    head_chain_link: str | None
    head_hlc: str | None
    updated_at: datetime | None
    """None where somebody put in a time that cannot be told."""
    tree_size: int
    root_hash: str | None
    checkpoint: str | None
    signed_seq: int


class ListedEntry(NamedTuple):
    """One row of the log, every column; ``payload`` and ``origin`` are the stored text."""

    id: int
    tenant_id: str
    seq: int
    t_hlc: str
    hlc_physical: int
    hlc_logical: int
    hlc_node: str
    job_id: str
    action: str
    link_version: int
    prev_chain_link: str | None
    chain_link: str
    payload_digest: str
    payload: str
    origin: str | None
    created_at: datetime


class SnapshotRow(NamedTuple):
    """One batch snapshot without its envelope."""

    id: int
    tenant_id: str
    from_seq: int
    to_seq: int
    snapshot_hlc: str
    from_chain_link: str
    to_chain_link: str
    entry_count: int
    merkle_root: str
    created_at: datetime


_HEAD = f"""
SELECT h.head_seq, h.head_chain_link, h.head_hlc, {told("h.updated_at")},
       coalesce(m.tree_size, 0) AS tree_size, m.root_hash, m.checkpoint,
       coalesce((SELECT max(s.to_seq) FROM scheduler.batch_snapshot s
                  WHERE s.tenant_id = h.tenant_id), 0) AS signed_seq
  FROM scheduler.chain_heads h
  LEFT JOIN scheduler.merkle_head m USING (tenant_id)
 WHERE h.tenant_id = $1
"""

_ENTRY_COLUMNS = ", ".join(ListedEntry._fields)
_SNAPSHOT_COLUMNS = columns(SnapshotRow._fields, ("created_at",))

_ENTRIES = f"""
WITH page AS (
    SELECT {_ENTRY_COLUMNS}, row_number() OVER ordered AS number, count(*) OVER () AS found,
           sum(coalesce(octet_length(payload::text), 0)) OVER ordered - coalesce(octet_length(payload::text), 0)
               AS bytes_before
      FROM (SELECT {columns(ListedEntry._fields, ("created_at",))} FROM scheduler.scheduler_log
             WHERE tenant_id = $1 AND seq >= $2 ORDER BY seq LIMIT $3 + 1) AS listed
    WINDOW ordered AS (ORDER BY seq)
)
SELECT {_ENTRY_COLUMNS}, found FROM page WHERE number <= $3 AND bytes_before < $4 ORDER BY number
"""


async def head(connection: Connection, tenant_id: str) -> HeadRow:
    """End of the tenant's chain.

    Raises:
        TenantNotFoundError: there is no such tenant.
    """
    row = await connection.fetchrow(_HEAD, tenant_id)
    if row is None:
        raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    return HeadRow(*row)


async def require_tenant(connection: Connection, tenant_id: str) -> None:
    """Return if anything was ever written for the tenant.

    Raises:
        TenantNotFoundError: nothing was.
    """
    if not await connection.fetchval("SELECT true FROM scheduler.chain_heads WHERE tenant_id = $1", tenant_id):
        raise TenantNotFoundError(f"there is no tenant {tenant_id}")


async def list_tenants(connection: Connection, after: str, limit: int) -> list[str]:
    """Up to ``limit`` tenants by name, those behind ``after``, ``_system`` among them."""
    rows = await connection.fetch(
        "SELECT tenant_id FROM scheduler.chain_heads WHERE tenant_id > $1 ORDER BY tenant_id LIMIT $2", after, limit
    )
    return [row["tenant_id"] for row in rows]


async def list_entries(
    connection: Connection, tenant_id: str, from_seq: int, limit: int
) -> tuple[list[ListedEntry], bool]:
    """Entries from ``from_seq`` on in seq order, and whether more follow."""
    rows = await connection.fetch(_ENTRIES, tenant_id, from_seq, limit, PAGE_BYTES_MAX)
    entries = [whole(tenant_id, ListedEntry(*list(row)[:-1]), ("prev_chain_link", "origin")) for row in rows]
    return entries, bool(rows) and rows[-1]["found"] > len(rows)


async def list_snapshots(connection: Connection, tenant_id: str, below_from_seq: int, limit: int) -> list[SnapshotRow]:
    """Up to ``limit`` snapshots of the tenant, newest first, from below ``below_from_seq``."""
    rows = await connection.fetch(
        f"SELECT {_SNAPSHOT_COLUMNS} FROM scheduler.batch_snapshot"
        " WHERE tenant_id = $1 AND from_seq < $2"
        " ORDER BY from_seq DESC LIMIT $3",
        tenant_id,
        below_from_seq,
        limit,
    )
    return [whole(tenant_id, SnapshotRow(*row)) for row in rows]


async def snapshot(connection: Connection, snapshot_id: int) -> tuple[SnapshotRow, str] | None:
    """One snapshot and its DSSE envelope as stored."""
    row = await connection.fetchrow(
        f"SELECT {_SNAPSHOT_COLUMNS}, dsse_envelope FROM scheduler.batch_snapshot WHERE id = $1", snapshot_id
    )
    return _with_envelope(row) if row else None


async def newest_snapshot(connection: Connection, tenant_id: str) -> tuple[SnapshotRow, str] | None:
    """The tenant's last snapshot and its DSSE envelope as stored."""
    row = await connection.fetchrow(
        f"SELECT {_SNAPSHOT_COLUMNS}, dsse_envelope FROM scheduler.batch_snapshot"
        " WHERE tenant_id = $1 ORDER BY from_seq DESC LIMIT 1",
        tenant_id,
    )
    return _with_envelope(row) if row else None


def _with_envelope(row: Record) -> tuple[SnapshotRow, str]:
    found = SnapshotRow(*list(row)[:-1])
    whole(found.tenant_id, found)
    envelope = row["dsse_envelope"]
    if envelope is None or not envelope.lstrip().startswith("{"):
        raise ChainDamagedError(found.tenant_id, f"the snapshot from seq {found.from_seq} on has no envelope")
    return found, envelope


async def ping(connection: Connection) -> None:
    """Make sure that Postgres answers."""
    await connection.fetchval("SELECT 1")

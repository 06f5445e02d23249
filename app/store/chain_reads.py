"""SQL of reads about chains: heads, entries, trees, snapshots, and the ends of chains and of this node's WAL.

*Existing entries.* An event may already be in the chain: as an imported entry, or because a node's log was imported
before the node came back. Before such events are chained, the chain is searched under the head's lock. It may hold the
event itself, or a CONFLICT entry with it because another event has its HLC. A row beyond the head is not in the chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from asyncpg import Record

from app.store import Connection
from app.store.reading import (
    ENTRIES,
    PAYLOAD_BYTES,
    columns,
    fetch_as,
    fetch_column,
    fetch_dict,
    fetch_one_as,
    fetch_page,
    fetch_tuples,
    fetch_value,
    like,
    page_of,
    told,
    whole,
)
from ledger import rfc3339
from ledger.chain.conflict import Event, conflict_hlc
from ledger.errors import ChainDamagedError, SignatureError, TenantNotFoundError, reported_as
from ledger.hlc import Hlc
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.verdict import damaged
from signing import checkpoint
from signing.checkpoint import Checkpoint

JOB_BYTES_MAX = 64 << 20
"""Most payload bytes of one job that are read at once."""


class HeadRow(NamedTuple):
    """Head of a tenant's chain, and its tree: size 0 and root None before the first hash."""

    head_seq: int
    head_chain_link: str | None
    head_hlc: str | None
    updated_at: datetime | None
    """None if the stored time was edited to one that Python cannot represent."""
    tree_size: int
    root_hash: str | None
    checkpoint: str | None
    signed_seq: int
    """The last entry that a signed snapshot covers."""
    covered_seq: int
    """The same by any snapshot."""


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

    @property
    def columns(self) -> tuple[Any, ...]:
        """The values of ``ENTRY_COLUMNS``."""
        return self[2:-1]

    def as_listed(self) -> dict[str, Any]:
        """The entry as it is listed, for JSON."""
        return {**self._asdict(), "at": rfc3339.time_of(self.t_hlc)}


assert ListedEntry._fields[2:-1] == ENTRY_COLUMNS


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


_LISTED_ENTRIES = f"""
SELECT {columns(ListedEntry, ("created_at",))}, {PAYLOAD_BYTES}
  FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq >= $2 ORDER BY seq LIMIT $3 + 1
"""
_ENTRIES = f"""
SELECT {columns(ListedEntry)}, found FROM {page_of(_LISTED_ENTRIES, "seq", limit="$3")} AS page ORDER BY number
"""
_JOB_ENTRIES = f"""
SELECT {", ".join(ENTRY_COLUMNS)}, {PAYLOAD_BYTES}
  FROM scheduler.scheduler_log WHERE tenant_id = $1 AND job_id = $2 AND seq <= $3 ORDER BY seq LIMIT $4 + 1
"""
_SNAPSHOT = f"SELECT {columns(SnapshotRow, ('created_at',))}, dsse_envelope FROM scheduler.batch_snapshot"


async def head(connection: Connection, tenant_id: str) -> HeadRow:
    """Head of the tenant's chain.

    Raises:
        TenantNotFoundError: there is no such tenant.
    """
    row = await fetch_one_as(
        connection,
        HeadRow,
        f"""
        SELECT h.head_seq, h.head_chain_link, h.head_hlc, {told("h.updated_at")},
               coalesce(m.tree_size, 0) AS tree_size, m.root_hash, m.checkpoint,
               coalesce((SELECT max(s.to_seq) FROM scheduler.batch_snapshot s
                          WHERE s.tenant_id = h.tenant_id AND s.dsse_envelope IS NOT NULL), 0) AS signed_seq,
               coalesce((SELECT max(s.to_seq) FROM scheduler.batch_snapshot s
                          WHERE s.tenant_id = h.tenant_id), 0) AS covered_seq
          FROM scheduler.chain_heads h
          LEFT JOIN scheduler.merkle_head m USING (tenant_id)
         WHERE h.tenant_id = $1
        """,
        tenant_id,
    )
    if row is None:
        raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    return row


async def stored_checkpoint(connection: Connection, tenant_id: str) -> str:
    """The stored note of the tenant, unverified; empty if there is none."""
    return (
        await fetch_value(
            connection, str, "SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = $1", tenant_id
        )
        or ""
    )


def checkpoint_in(tenant_id: str, note: str | None) -> Checkpoint | None:
    """The checkpoint in the stored note, None if there is no note; no signature is checked.

    Raises:
        ChainDamagedError: the note is no checkpoint.
    """
    with reported_as(partial(damaged, tenant_id, "tree", 0), "the stored checkpoint is none", SignatureError):
        return None if note is None else checkpoint.read(note)


async def require_tenant(connection: Connection, tenant_id: str) -> None:
    """Return if anything was ever written for the tenant.

    Raises:
        TenantNotFoundError: nothing was.
    """
    if not await connection.fetchval("SELECT true FROM scheduler.chain_heads WHERE tenant_id = $1", tenant_id):
        raise TenantNotFoundError(f"there is no tenant {tenant_id}")


async def list_tenants(
    connection: Connection, after: str = "", limit: int | None = None, patterns: Sequence[str] = ("*",)
) -> list[str]:
    """Up to ``limit`` tenants of these patterns after ``after``, in byte order, with ``_system``."""
    return await fetch_column(
        connection,
        """
        SELECT tenant_id FROM scheduler.chain_heads
         WHERE tenant_id > $1 AND tenant_id LIKE ANY($3::text[]) ORDER BY tenant_id LIMIT $2
        """,
        after,
        limit,
        like(patterns),
    )


async def list_entries(
    connection: Connection, tenant_id: str, from_seq: int, limit: int
) -> tuple[list[ListedEntry], bool]:
    """Entries from ``from_seq`` on in seq order, and whether more follow."""
    return await fetch_page(
        connection, ListedEntry, _ENTRIES, tenant_id, from_seq, limit, nullable=("prev_chain_link", "origin")
    )


async def last_seq_of_job(connection: Connection, tenant_id: str, job_id: str) -> int | None:
    """Seq of the newest entry of the job, None when there is none."""
    return await fetch_value(
        connection,
        int,
        "SELECT max(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1 AND job_id = $2",
        tenant_id,
        job_id,
    )


async def entries_of_action(
    connection: Connection, tenant_id: str, job_id: str, action: str, limit: int
) -> list[tuple[int, str | None]]:
    """Seq of the oldest entries with this job id and action, those born in this log first; and of an imported one the
    payload."""
    return await fetch_tuples(
        connection,
        """
        SELECT seq, CASE WHEN origin IS NOT NULL THEN payload END FROM scheduler.scheduler_log
         WHERE tenant_id = $1 AND job_id = $2 AND action = $3 ORDER BY origin IS NOT NULL, seq LIMIT $4
        """,
        tenant_id,
        job_id,
        action,
        limit,
    )


async def job_entries(
    connection: Connection, tenant_id: str, job_id: str, to_seq: int, limit: int
) -> list[tuple[Any, ...]] | None:
    """``ENTRY_COLUMNS`` of the job's entries up to ``to_seq``, by seq, unverified; None if there are more than
    ``limit``, or their payloads exceed ``JOB_BYTES_MAX``."""
    rows = await fetch_tuples(
        connection,
        f"""
        SELECT {", ".join(ENTRY_COLUMNS)}, found
          FROM {page_of(_JOB_ENTRIES, "seq", limit="$4", bytes_max=JOB_BYTES_MAX)} AS page ORDER BY number
        """,
        tenant_id,
        job_id,
        to_seq,
        limit,
    )
    return [row[:-1] for row in rows] if not rows or rows[-1][-1] == len(rows) else None


async def entries_at(connection: Connection, tenant_id: str, seq: int) -> list[tuple[Any, ...]]:
    """``ENTRY_COLUMNS`` of the rows at ``seq``: one entry, unless an attacker removed it or added another."""
    return await fetch_tuples(connection, f"{ENTRIES} WHERE tenant_id = $1 AND seq = $2", tenant_id, seq)


async def list_snapshots(connection: Connection, tenant_id: str, below_from_seq: int, limit: int) -> list[SnapshotRow]:
    """Up to ``limit`` snapshots of the tenant, newest first, from below ``below_from_seq``."""
    return [
        whole(tenant_id, row)
        for row in await fetch_as(
            connection,
            SnapshotRow,
            f"""
            SELECT {columns(SnapshotRow, ("created_at",))} FROM scheduler.batch_snapshot
             WHERE tenant_id = $1 AND from_seq < $2 ORDER BY from_seq DESC LIMIT $3
            """,
            tenant_id,
            below_from_seq,
            limit,
        )
    ]


async def snapshot(connection: Connection, snapshot_id: int) -> tuple[SnapshotRow, str | None] | None:
    """One snapshot and its DSSE envelope as stored, None if it is unsigned."""
    row = await connection.fetchrow(f"{_SNAPSHOT} WHERE id = $1", snapshot_id)
    return _with_envelope(row) if row else None


async def newest_snapshot(connection: Connection, tenant_id: str) -> tuple[SnapshotRow, str | None] | None:
    """The tenant's last snapshot and its DSSE envelope as stored, None if it is unsigned."""
    row = await connection.fetchrow(f"{_SNAPSHOT} WHERE tenant_id = $1 ORDER BY from_seq DESC LIMIT 1", tenant_id)
    return _with_envelope(row) if row else None


def _with_envelope(row: Record) -> tuple[SnapshotRow, str | None]:
    found = SnapshotRow(*list(row)[:-1])
    whole(found.tenant_id, found)
    if (envelope := row["dsse_envelope"]) is not None and not envelope.lstrip().startswith("{"):
        raise ChainDamagedError(found.tenant_id, f"the snapshot from seq {found.from_seq} on has no envelope")
    return found, envelope


async def ping(connection: Connection) -> None:
    """Check that Postgres answers, and that no other session keeps a table locked that is read before a write."""
    await connection.fetch("SELECT 1 FROM scheduler.scheduler_log, scheduler.jobs, scheduler.idempotency LIMIT 0")


class Stamp(NamedTuple):
    """The columns of an entry that PostgreSQL assigned."""

    seq: int
    id: int
    created_at: datetime


async def head_seqs(connection: Connection, tenant_ids: Sequence[str]) -> dict[str, int]:
    """Head seq by tenant; tenants without a chain are left out."""
    return {
        tenant_id: seq or 0
        for tenant_id, seq in await connection.fetch(
            "SELECT tenant_id, head_seq FROM scheduler.chain_heads WHERE tenant_id = ANY($1::text[])", tenant_ids
        )
    }


async def stamps(connection: Connection, tenant_id: str, from_seq: int, to_seq: int) -> list[Stamp]:
    """The columns that PostgreSQL assigned to the existing entries from ``from_seq`` to ``to_seq``, in seq order.

    Raises:
        ChainDamagedError: such a column of one entry was edited.
    """
    return [
        whole(tenant_id, stamp) if None in stamp else stamp
        for stamp in await fetch_as(
            connection,
            Stamp,
            f"""
            SELECT seq, id, {told("created_at")} FROM scheduler.scheduler_log
             WHERE tenant_id = $1 AND seq BETWEEN $2 AND $3 ORDER BY seq
            """,
            tenant_id,
            from_seq,
            to_seq,
        )
    ]


class SeenChain(NamedTuple):
    """The head of one chain in the database; edited columns may hold any value."""

    tenant_id: str
    head_seq: int | None
    head_chain_link: str | None
    last_link: str | None
    """Link of the entry at the head, None when there is none."""
    tree_size: int | None
    root_hash: str | None
    checkpoint: str | None
    """The newest signed note, None before the first."""


async def seen_chains(connection: Connection, after: str, limit: int) -> list[SeenChain]:
    """The next chains after tenant ``after``, in tenant order."""
    return await fetch_as(
        connection,
        SeenChain,
        """
        SELECT h.tenant_id, h.head_seq, h.head_chain_link, l.chain_link, m.tree_size, m.root_hash, m.checkpoint
          FROM scheduler.chain_heads h
          LEFT JOIN scheduler.scheduler_log l ON l.tenant_id = h.tenant_id AND l.seq = h.head_seq
          LEFT JOIN scheduler.merkle_head m ON m.tenant_id = h.tenant_id
         WHERE h.tenant_id > $1 ORDER BY h.tenant_id LIMIT $2
        """,
        after,
        limit,
    )


async def links_at(connection: Connection, seqs: Mapping[str, int]) -> dict[str, str]:
    """By tenant, the link of its entry at that seq, if there is one."""
    return await fetch_dict(
        connection,
        """
        SELECT w.tenant_id, l.chain_link
          FROM unnest($1::text[], $2::bigint[]) AS w(tenant_id, seq)
          JOIN scheduler.scheduler_log l ON l.tenant_id = w.tenant_id AND l.seq = w.seq
        """,
        list(seqs),
        list(seqs.values()),
    )


async def last_seq(connection: Connection, tenant_id: str) -> int:
    """Seq of the tenant's last entry, regardless of its head; 0 when there is none."""
    return int(
        await connection.fetchval(
            "SELECT coalesce(max(seq), 0) FROM scheduler.scheduler_log WHERE tenant_id = $1", tenant_id
        )
    )


async def next_seq(connection: Connection, tenant_id: str, seq: int) -> int:
    """Seq of the tenant's first entry after ``seq``; ``seq + 1`` when there is none."""
    return (
        await fetch_value(
            connection,
            int,
            "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq > $2",
            tenant_id,
            seq,
        )
        or seq + 1
    )


class ChainedEntry(NamedTuple):
    """Position of one chained row, and the columns that identify its event."""

    seq: int
    chain_link: str
    prev_chain_link: str | None
    event: Event


Chained = Mapping[str, ChainedEntry]
"""Chained rows of one chain, by HLC."""


async def find_existing(connection: Connection, tenant_id: str, events: Sequence[Event]) -> dict[str, ChainedEntry]:
    """The entries with the HLC of one of ``events``, and the CONFLICT entries that hold one of them."""
    existing = await _by_hlc(connection, tenant_id, [event.t_hlc for event in events])
    if clashing := [event for event in events if event.t_hlc in existing and existing[event.t_hlc].event != event]:
        existing |= await _by_hlc(connection, tenant_id, [conflict_hlc(event).text() for event in clashing])
    return existing


async def find_by_seq(connection: Connection, tenant_id: str, seqs: Sequence[int]) -> dict[int, ChainedEntry]:
    """The entries of the tenant's chain at ``seqs``, by seq."""
    return {
        entry.seq: entry
        for entry in map(
            _chained,
            await connection.fetch(
                """
                SELECT seq, chain_link, prev_chain_link, t_hlc, job_id, action, payload_digest
                  FROM scheduler.scheduler_log
                 WHERE tenant_id = $1 AND seq = ANY($2::bigint[])
                   AND seq <= (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1)
                """,
                tenant_id,
                seqs,
            ),
        )
    }


async def highest_hlc(connection: Connection, tenant_id: str) -> tuple[int, int, str] | None:
    """The highest HLC in the chain, None if it has no entries."""
    row = await connection.fetchrow(
        """
        SELECT hlc_physical, hlc_logical, hlc_node FROM scheduler.scheduler_log WHERE tenant_id = $1
         ORDER BY hlc_physical DESC, hlc_logical DESC, hlc_node DESC LIMIT 1
        """,
        tenant_id,
    )
    return None if row is None else (row["hlc_physical"], row["hlc_logical"], row["hlc_node"])


async def _by_hlc(connection: Connection, tenant_id: str, t_hlcs: Sequence[str]) -> dict[str, ChainedEntry]:
    return {
        entry.event.t_hlc: entry
        for entry in map(
            _chained,
            await connection.fetch(
                """
                SELECT seq, chain_link, prev_chain_link, t_hlc, job_id, action, payload_digest
                  FROM unnest($2::bigint[], $3::bigint[], $4::text[]) AS hlc(physical, logical, node)
                  JOIN scheduler.scheduler_log l ON l.tenant_id = $1
                       AND l.hlc_physical = hlc.physical AND l.hlc_logical = hlc.logical AND l.hlc_node = hlc.node
                 WHERE seq <= (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1)
                """,
                tenant_id,
                *map(list, zip(*map(Hlc.parse, t_hlcs), strict=True) if t_hlcs else ((), (), ())),
            ),
        )
    }


def _chained(row: Record) -> ChainedEntry:
    seq, chain_link, prev_chain_link, *event = row
    return ChainedEntry(seq, chain_link, prev_chain_link, Event(*event))

"""SQL of reads about jobs: states, lists, events, and the chain's progress for a session."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import NamedTuple

import asyncpg
import orjson

from app.store import Connection
from app.store.chain_reads import ListedEntry
from app.store.departed import departed_key
from app.store.entry_check import EntryCheck
from app.store.exclusions import newest_statement
from app.store.following import Place
from app.store.jobs.order import OLDEST, CreatedHlc, ListRange, Order, Position, by
from app.store.jobs.table import (
    ENTRIES_MAX,
    ENTRY,
    FOLLOWER,
    PLACES,
    EntryRow,
    ListedRow,
    entries_of_job,
    place_of,
    stored,
)
from app.store.reading import ENTRIES, PAYLOAD_BYTES, columns, fetch_as, fetch_tuples, like, page_of, turned
from ledger.facts.statuses import STATUSES
from ledger.hlc import Hlc
from ledger.machines.jobs import ABOUT_JOBS, Refusal, refusal_of, refused_job_id
from ledger.positions import Epoch, Lsn
from ledger.verification import ENTRY_COLUMNS, JOB_COLUMNS
from ledger.verification.projection_check import StoredJob

_SEQ, _T_HLC, _PAYLOAD = map(ENTRY_COLUMNS.index, ("seq", "t_hlc", "payload"))


class TokenPosition(NamedTuple):
    """The position of one token's node in Postgres; None if unknown.

    ``end_lsn`` is the last LSN of the token's epoch, known once that epoch is over.
    """

    epoch: Epoch | None
    chained_lsn: Lsn | None
    end_lsn: Lsn | None


class Seen(NamedTuple):
    """The state of one snapshot, in any copy of the database.

    ``epoch`` is the present one of the node that asks, ``beat_at`` the newest heartbeat; None when there is none.
    """

    positions: list[TokenPosition]
    epoch: Epoch | None
    beat_at: datetime | None


class JobRows(NamedTuple):
    """A job in one snapshot."""

    entries: list[EntryRow]
    """In seq order, ``ENTRIES_MAX`` + 1 at most."""
    stored: StoredJob | None
    """Its row in the job table, None without a usable one."""
    followed_seq: int | None
    """The seq up to which the job table has followed the chain; None before its start."""
    has_refusals: bool
    """Whether PostgreSQL rejected events of it."""
    has_statements: bool
    """Whether its tenant made statements about excluded logs."""
    has_left: bool
    """Whether an entry of it has left with a prune."""

    @property
    def is_large(self) -> bool:
        """Whether there may be more entries than were read."""
        return len(self.entries) > ENTRIES_MAX


class EventRow(NamedTuple):
    """One event of a job, and its level. ``state`` is GLOBAL: chained; APPLIED: the job table has followed the chain
    that far; COMPACTED: a snapshot covers it."""

    entry: ListedEntry
    state: str


# The arrays are in subqueries, so that no plan depends on them and one plan serves all calls.
_POSITIONS = """
SELECT p.epoch, p.chained_lsn, e.end_lsn
  FROM unnest((SELECT $1::text[]), (SELECT $2::bigint[])) WITH ORDINALITY AS token(node_id, epoch, number)
  LEFT JOIN scheduler.wal_positions p ON p.node_id = token.node_id
  LEFT JOIN scheduler.wal_epochs e ON e.node_id = token.node_id AND e.epoch = token.epoch
 ORDER BY token.number
"""

_SEEN = f"""
(SELECT json_agg(json_build_array(epoch, chained_lsn, end_lsn)) FROM ({_POSITIONS}) AS p) AS positions,
       (SELECT epoch FROM scheduler.wal_positions WHERE node_id = $3) AS epoch,
       (SELECT beat_at FROM scheduler.heartbeat) AS beat_at
"""
_PLACE_AND_SEEN = f"""
SELECT {_SEEN}, place.tenant_id, place.seq, place.head_seq
  FROM (SELECT) AS asked LEFT JOIN ({PLACES}) AS place ON place.tenant_id = $4
"""
REFUSALS_MAX = 20
"""Most entries that are read of rejected events of one job, the first ones."""
_JOB_AND_SEEN = f"""
SELECT {_SEEN}, EXISTS (SELECT FROM scheduler.scheduler_log WHERE tenant_id = $4 AND job_id = $6) AS has_refusals,
       {newest_statement("$4")} > 0 AS has_statements,
       EXISTS (SELECT FROM scheduler.departed_jobs
                WHERE tenant_id = $4 AND bucket = $8 AND position($9 IN hashes) > 0) AS has_left,
       place.seq AS followed_seq,
       j.job_id IS NOT NULL AS is_stored, {stored("j")}, {ENTRY}
  FROM (SELECT) AS asked
  LEFT JOIN ({PLACES}) AS place ON place.tenant_id = $4
  LEFT JOIN scheduler.jobs j ON place.seq IS NOT NULL AND j.tenant_id = $4 AND j.job_id = $5
  LEFT JOIN LATERAL ({entries_of_job("$4", "$5", "$7::bigint", "place.head_seq")}) AS l ON true
"""
_ROW_AT, _ENTRY_AT = 8, 7 + len(JOB_COLUMNS)
"""Index of the first column of the job table's row, and of the entry."""


def size_of_job(row: str) -> str:
    """The query for the payload bytes of ``row``, one of the job table."""
    return f"""
SELECT coalesce(sum(octet_length(payload::text)), 0) AS bytes
  FROM (SELECT l.payload FROM scheduler.scheduler_log l
         WHERE l.tenant_id = {row}.tenant_id AND l.job_id = {row}.job_id ORDER BY l.seq LIMIT {ENTRIES_MAX}) AS entries
"""


@cache
def jobs_query(order: Order, *, is_of_actor: bool) -> str:
    """The query for a page of jobs in this order, of one creator if ``is_of_actor``.

    An index has the jobs of each status in order; a list of several statuses merges the first of each. The page ends
    by the payload bytes of its jobs, before these are read.
    """
    condition = f" AND created_by = ${4 + 2 * len(order.columns)}" if is_of_actor else ""
    in_order = by(order.columns, order.direction)
    listed = f"""
SELECT j.*, size.bytes
  FROM (SELECT first.*
          FROM unnest($3::text[]) AS listed(status)
         CROSS JOIN LATERAL (
               SELECT * FROM scheduler.jobs
                WHERE tenant_id = $1{condition} AND status = listed.status AND {order.within(4)}
                ORDER BY {in_order} LIMIT $2 + 1) AS first
         ORDER BY {in_order} LIMIT $2 + 1) AS j
 CROSS JOIN LATERAL ({size_of_job("j")}) AS size
"""
    return f"""
SELECT page.job_id, {stored("page")}, found FROM {page_of(listed, in_order, limit="$2")} AS page ORDER BY number
"""


_STATE = f"""
(CASE WHEN seq <= (SELECT max(to_seq) FROM scheduler.batch_snapshot WHERE tenant_id = $1) THEN 'COMPACTED'
      WHEN seq <= (SELECT max(seq) FROM scheduler.follower_positions
                    WHERE follower = '{FOLLOWER}' AND tenant_id = $1) THEN 'APPLIED'
      ELSE 'GLOBAL' END) AS state
"""
_EVENT = f"{columns(ListedEntry, ('created_at',))}, {_STATE}"


def _listed_events(which: str = "") -> str:
    events = f"""
SELECT {_EVENT}, {PAYLOAD_BYTES} FROM scheduler.scheduler_log
 WHERE tenant_id = $1 AND job_id = $2 AND (hlc_physical, hlc_logical, hlc_node) > ($3, $4, $5) {which}
 ORDER BY hlc_physical, hlc_logical, hlc_node LIMIT $6 + 1
"""
    return f"""
SELECT {columns(ListedEntry)}, state, found
  FROM {page_of(events, "hlc_physical, hlc_logical, hlc_node", limit="$6")} AS page ORDER BY number
"""


_EVENTS = _listed_events()
_REFUSED_EVENTS = _listed_events("AND action = 'REFUSED'")


async def chained(connection: Connection, hlcs: Sequence[Hlc]) -> set[Hlc]:
    """The HLCs among these that an entry of any chain has; one index lookup for each tenant."""
    return {
        Hlc(*row)
        for row in await fetch_tuples(
            connection,
            """
            SELECT DISTINCT w.physical, w.logical, w.node
              FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS w(physical, logical, node)
             CROSS JOIN scheduler.chain_heads h
             CROSS JOIN LATERAL (
                   SELECT FROM scheduler.scheduler_log AS e
                    WHERE e.tenant_id = h.tenant_id
                      AND (e.hlc_physical, e.hlc_logical, e.hlc_node) = (w.physical, w.logical, w.node) LIMIT 1
                   ) AS l
            """,
            *turned(hlcs, len(Hlc._fields)),
        )
    }


async def seen(connection: Connection, tokens: Sequence[tuple[str, Epoch]], node_id: str) -> Seen:
    """The state of the snapshot: the position of each (node, epoch) of ``tokens``, and the epoch of ``node_id``."""
    return (await place_and_seen(connection, "", tokens, node_id))[1]


async def place_and_seen(
    connection: Connection, tenant_id: str, tokens: Sequence[tuple[str, Epoch]], node_id: str
) -> tuple[Place | None, Seen]:
    """``job_table.place`` and ``seen`` of the same snapshot: one statement.

    Raises:
        ChainDamagedError: as ``job_table.place``.
    """
    (row,) = await connection.fetch(_PLACE_AND_SEEN, *_columns(tokens), node_id, tenant_id)
    return (None if row["tenant_id"] is None else place_of(tenant_id, row["seq"], row["head_seq"])), _seen_in(row)


async def job_and_seen(
    connection: Connection,
    tenant_id: str,
    job_id: str,
    after_seq: int,
    tokens: Sequence[tuple[str, Epoch]],
    node_id: str,
) -> tuple[JobRows, Seen]:
    """The job with its entries after ``after_seq``, and ``seen`` of the same snapshot, in one statement."""
    rows = await connection.fetch(
        _JOB_AND_SEEN,
        *_columns(tokens),
        node_id,
        tenant_id,
        job_id,
        refused_job_id(job_id),
        after_seq,
        *departed_key(job_id),
    )
    first = rows[0]
    row = StoredJob(job_id, *first[_ROW_AT:_ENTRY_AT]) if first["is_stored"] else None
    entries = [each[_ENTRY_AT:] for each in rows if each["seq"] is not None]
    flags = first["has_refusals"], first["has_statements"], first["has_left"]
    return JobRows(entries, row, first["followed_seq"], *flags), _seen_in(first)


async def find_refusal(connection: Connection, check: EntryCheck, tenant_id: str, job_id: str) -> Refusal | None:
    """The outcome of the job's events that PostgreSQL rejected; None when there are none.

    Raises:
        ChainDamagedError: an entry about one is not as it was chained.
    """
    rows = await fetch_tuples(
        connection,
        f"""
        {ENTRIES} WHERE tenant_id = $1 AND job_id = $2 AND action = 'REFUSED' ORDER BY seq LIMIT $3
        """,
        tenant_id,
        refused_job_id(job_id),
        REFUSALS_MAX,
    )
    await check.require(connection, tenant_id, rows)
    return refusal_of(job_id, [(row[_SEQ], row[_T_HLC], row[_PAYLOAD]) for row in rows])


def _columns(tokens: Sequence[tuple[str, Epoch]]) -> tuple[list[str], list[int]]:
    return [node_id for node_id, _ in tokens], [epoch for _, epoch in tokens]


def _seen_in(row: asyncpg.Record) -> Seen:
    return Seen(
        [TokenPosition(*position) for position in orjson.loads(row["positions"] or "[]")], row["epoch"], row["beat_at"]
    )


async def list_jobs(
    connection: Connection,
    tenant_id: str,
    statuses: Sequence[str],
    actor: str | None,
    listed: ListRange,
    limit: int,
) -> tuple[list[ListedRow], Position | None]:
    """Jobs of a tenant with one of these statuses; only those created by the principal ``actor``, if given. Besides,
    the last row's position if more jobs follow. A list that does not go by creation MUST NOT be of an actor, or of
    those created at some time.

    A job whose creation is not in the chain has no position and is not listed.
    """
    query = jobs_query(listed.order, is_of_actor=actor is not None)
    creator = () if actor is None else (actor,)
    rows = await connection.fetch(query, tenant_id, limit, statuses or STATUSES, *listed.bounds, *creator)
    found = [ListedRow(row[0], StoredJob(*row[:-1])) for row in rows]
    return found, position_of(listed.order, found[-1]) if rows and rows[-1]["found"] > len(rows) else None


def position_of(order: Order, row: ListedRow) -> Position:
    """The position of a listed row, which is in the table."""
    assert row.stored is not None
    return order.position(row.stored)


async def list_job_events(
    connection: Connection,
    check: EntryCheck,
    tenant_id: str,
    job_id: str,
    after: CreatedHlc | None,
    limit: int,
    *,
    are_refused: bool = False,
) -> tuple[list[EventRow], bool]:
    """Events of a job after ``after``, in HLC order, or the entries about its events that PostgreSQL rejected; and
    whether more follow.

    Raises:
        ChainDamagedError: an entry is not what was chained.
    """
    query, subject = (_REFUSED_EVENTS, refused_job_id(job_id)) if are_refused else (_EVENTS, job_id)
    rows = await connection.fetch(query, tenant_id, subject, *(after or OLDEST), limit)
    events = [EventRow(ListedEntry._make(row[:-2]), row[-2]) for row in rows]
    await check.require(connection, tenant_id, [event.entry.columns for event in events])
    return events, bool(rows) and rows[-1]["found"] > len(rows)


async def creations(
    connection: Connection, check: EntryCheck, tenant_id: str, job_id: str, seqs: Sequence[int]
) -> list[ListedEntry]:
    """Creations of a job at these seqs, in order; CONFLICT entries may hold some.

    Raises:
        ChainDamagedError: one of them is not what was chained.
    """
    if not seqs:
        return []
    entries = await fetch_as(
        connection,
        ListedEntry,
        f"""
        SELECT {columns(ListedEntry, ("created_at",))} FROM scheduler.scheduler_log
         WHERE tenant_id = $1 AND seq = ANY($3::bigint[]) AND job_id = $2 AND action IN ('ENQUEUE', 'CONFLICT')
         ORDER BY seq
        """,
        tenant_id,
        job_id,
        seqs,
    )
    await check.require(connection, tenant_id, [entry.columns for entry in entries])
    return entries


async def tenants_of_job(connection: Connection, job_id: str, patterns: Sequence[str]) -> list[str]:
    """Tenants of these patterns that have a job of this id, or that it has left; at most two, which means several.

    The index of the log begins with the tenant, so each tenant costs one lookup.
    """
    return [
        row["tenant_id"]
        for row in await connection.fetch(
            """
            SELECT h.tenant_id
              FROM scheduler.chain_heads h
             WHERE h.tenant_id LIKE ANY($4::text[])
               AND (EXISTS (SELECT FROM scheduler.scheduler_log
                             WHERE tenant_id = h.tenant_id AND (job_id = $1 AND action = ANY($3::text[])
                                                                OR job_id = $2 AND action = 'REFUSED'))
                    OR EXISTS (SELECT FROM scheduler.departed_jobs
                                WHERE tenant_id = h.tenant_id AND bucket = $5 AND position($6 IN hashes) > 0))
             LIMIT 2
            """,
            job_id,
            refused_job_id(job_id),
            list(ABOUT_JOBS),
            like(patterns),
            *departed_key(job_id),
        )
    ]


async def age_ms(connection: Connection, tenant_id: str, seq: int) -> int:
    """Time since the entry at ``seq`` was chained, by PostgreSQL's clock; 0 without one."""
    return max(
        0,
        int(
            await connection.fetchval(
                """
                SELECT extract(epoch FROM clock_timestamp() - created_at) * 1000 FROM scheduler.scheduler_log
                 WHERE tenant_id = $1 AND seq = $2
                """,
                tenant_id,
                seq,
            )
            or 0
        ),
    )


async def job_exists(connection: Connection, tenant_id: str, job_id: str) -> bool:
    """Whether the job has an entry in the chain."""
    return bool(
        await connection.fetchval(
            """
            SELECT EXISTS (SELECT FROM scheduler.scheduler_log
                            WHERE tenant_id = $1 AND job_id = $2 AND action = ANY($3::text[]))
            """,
            tenant_id,
            job_id,
            list(ABOUT_JOBS),
        )
    )

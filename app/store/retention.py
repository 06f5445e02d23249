"""SQL of retention: the entries about it, what may leave of a chain, and the removal of what a prune covers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from app.store import Connection
from app.store.departed import remember
from app.store.entry_check import EntryCheck
from app.store.following import lock_places
from app.store.jobs import search as job_search
from app.store.jobs import table as job_table
from app.store.jobs.index import keep_left
from app.store.jobs.table import FOLLOWER, JobFolds, JobSpan
from app.store.reading import ENTRIES, fetch_column, fetch_dict, fetch_one_as, fetch_tuples, fetch_value
from ledger.facts.statuses import ENDED, STATUSES
from ledger.hlc import Hlc
from ledger.machines import jobs
from ledger.machines.exclusions import Exclusions
from ledger.machines.job_search import terms_of
from ledger.machines.jobs import JobState, refused_job_id
from ledger.machines.retention import SUBJECT, OpenJob
from ledger.verification.projection_check import job_row

ENTRIES_SCANNED: Final = 20_000
"""Entries of a chain that one statement reads to find the first one that is too young."""
ENTRIES_CHECKED: Final = 500
"""Entries that are recomputed at once."""
OPEN: Final = [status for status in STATUSES if status not in ENDED]
"""Statuses of jobs that have not ended."""


async def retention_rows(connection: Connection, tenant_id: str) -> list[tuple[Any, ...]]:
    """``ENTRY_COLUMNS`` of the entries about retention of a tenant, in seq order, as stored."""
    return await fetch_tuples(
        connection, f"{ENTRIES} WHERE tenant_id = $1 AND job_id = $2 ORDER BY seq, ctid", tenant_id, SUBJECT
    )


async def covered_to(connection: Connection, tenant_id: str) -> int:
    """Up to which seq entries of a chain may have left, by its PRUNED entries, counting or not."""
    return await fetch_value(connection, int, "SELECT scheduler.covered_to($1)", tenant_id) or 0


async def retention_versions(connection: Connection, tenant_id: str) -> list[tuple[Any, ...]]:
    """Seq, place and writing transaction of each of these rows: they differ once a row was added, removed or edited."""
    return await fetch_tuples(
        connection,
        "SELECT seq, ctid::text, xmin::text FROM scheduler.scheduler_log WHERE tenant_id = $1 AND job_id = $2"
        " ORDER BY seq, ctid",
        tenant_id,
        SUBJECT,
    )


async def tenants_with_prunes(connection: Connection) -> list[str]:
    """The tenants whose chains have a PRUNED entry, counting or not."""
    return await fetch_column(
        connection,
        """
        SELECT tenant_id FROM scheduler.chain_heads h
         WHERE EXISTS (SELECT FROM scheduler.scheduler_log
                        WHERE tenant_id = h.tenant_id AND job_id = $1 AND action = 'PRUNED')
        """,
        SUBJECT,
    )


async def pruned_tenants(connection: Connection) -> dict[str, int]:
    """By tenant whose chain begins at or below what a PRUNED entry may cover, the first seq that is there."""
    return await fetch_dict(
        connection,
        """
        SELECT h.tenant_id, first.seq
          FROM scheduler.chain_heads h
         CROSS JOIN LATERAL (SELECT min(seq) AS seq FROM scheduler.scheduler_log WHERE tenant_id = h.tenant_id) AS first
         WHERE first.seq <= (SELECT scheduler.covered_to(h.tenant_id))
        """,
    )


# --- what stops a prefix --------------------------------------------------------------------------


async def signed_ends(connection: Connection, tenant_id: str, after_seq: int) -> list[int]:
    """Where signed snapshots end, after a seq."""
    return await fetch_column(
        connection,
        """
        SELECT to_seq FROM scheduler.batch_snapshot
         WHERE tenant_id = $1 AND to_seq > $2 AND dsse_envelope IS NOT NULL ORDER BY to_seq
        """,
        tenant_id,
        after_seq,
    )


async def begun_at(connection: Connection, node_id: str, since_ms: int) -> set[str]:
    """The tenants whose first entry is of this node, of ``since_ms`` or later."""
    return set(
        await fetch_column(
            connection,
            """
            SELECT h.tenant_id FROM scheduler.chain_heads h
              JOIN scheduler.scheduler_log l ON l.tenant_id = h.tenant_id AND l.seq = 1
             WHERE l.hlc_node = $1 AND l.hlc_physical >= $2
            """,
            node_id,
            since_ms,
        )
    )


async def first_young(connection: Connection, tenant_id: str, after_seq: int, since_ms: int) -> tuple[int | None, int]:
    """The first entry after a seq whose time is ``since_ms`` or later, None if all are older, and the last one read."""
    while True:
        row = await connection.fetchrow(
            """
            SELECT min(seq) FILTER (WHERE hlc_physical >= $3), max(seq)
              FROM (SELECT seq, hlc_physical FROM scheduler.scheduler_log
                     WHERE tenant_id = $1 AND seq > $2 ORDER BY seq LIMIT $4) AS next
            """,
            tenant_id,
            after_seq,
            since_ms,
            ENTRIES_SCANNED,
        )
        assert row is not None
        young, last = row
        if young is not None or last is None:
            return young, after_seq
        after_seq = last


async def first_seqs(
    connection: Connection, tenant_id: str, job_ids: Collection[str], after_seq: int
) -> dict[str, int]:
    """The first entry of each of these jobs after a seq, those about events that PostgreSQL refused included."""
    named = {each: each for each in job_ids} | {refused_job_id(each): each for each in job_ids}
    found: dict[str, int] = {}
    for name, seq in await connection.fetch(
        """
        SELECT job_id, min(seq) FROM scheduler.scheduler_log
         WHERE tenant_id = $1 AND job_id = ANY($2::text[]) AND seq > $3 GROUP BY job_id
        """,
        tenant_id,
        [*named],
        after_seq,
    ):
        found[named[name]] = min(seq, found.get(named[name], seq))
    return found


async def open_jobs(connection: Connection, tenant_id: str, after_seq: int, to_seq: int) -> list[OpenJob]:
    """The jobs that have not ended, by the job table, and have an entry after ``after_seq`` up to ``to_seq``."""
    return [
        OpenJob(*row)
        for row in await connection.fetch(
            """
            SELECT j.job_id, first.seq, newest.hlc_physical
              FROM scheduler.jobs j
             CROSS JOIN LATERAL (SELECT min(l.seq) AS seq FROM scheduler.scheduler_log l
                                  WHERE l.tenant_id = j.tenant_id AND l.job_id = j.job_id AND l.seq > $3) AS first
             CROSS JOIN LATERAL (SELECT max(l.hlc_physical) AS hlc_physical FROM scheduler.scheduler_log l
                                  WHERE l.tenant_id = j.tenant_id AND l.job_id = j.job_id) AS newest
             WHERE j.tenant_id = $1 AND j.status = ANY($2::text[]) AND first.seq <= $4
            """,
            tenant_id,
            OPEN,
            after_seq,
            to_seq,
        )
    ]


class FirstNeeded(NamedTuple):
    """The first entries of a chain that other tables need; None where there are none."""

    keyed: int | None
    """Of a request whose Idempotency-Key is kept."""
    webhook: int | None
    """That a webhook has not delivered, or is to deliver again."""


async def first_needed(connection: Connection, tenant_id: str, after_seq: int) -> FirstNeeded:
    """The first such entries after a seq."""
    found = await fetch_one_as(
        connection,
        FirstNeeded,
        """
        SELECT (SELECT min(seq) FROM scheduler.idempotency WHERE tenant_id = $1 AND seq > $2),
               (SELECT min(least(w.delivered_seq + 1, w.replay_seq, letters.seq)) FROM scheduler.webhooks w
                  LEFT JOIN scheduler.webhook_dead_letters letters USING (webhook_id)
                 WHERE w.tenant_id = $1 AND w.stopped_at IS NULL)
        """,
        tenant_id,
        after_seq,
    )
    assert found is not None
    return found


async def highest_hlc(connection: Connection, tenant_id: str, from_seq: int, to_seq: int) -> Hlc | None:
    """The highest HLC of these entries."""
    row = await connection.fetchrow(
        """
        SELECT hlc_physical, hlc_logical, hlc_node FROM scheduler.scheduler_log
         WHERE tenant_id = $1 AND seq BETWEEN $2 AND $3
         ORDER BY hlc_physical DESC, hlc_logical DESC, hlc_node DESC LIMIT 1
        """,
        tenant_id,
        from_seq,
        to_seq,
    )
    return None if row is None else Hlc(*row)


async def check_later_entries(connection: Connection, check: EntryCheck, tenant_id: str, to_seq: int) -> None:
    """Recompute the entries after ``to_seq`` of the jobs that have one up to there. In a transaction.

    Raises:
        ChainDamagedError: one is not as it was chained.
    """
    cursor = await connection.cursor(
        f"""
        {ENTRIES} WHERE tenant_id = $1 AND seq > $2 AND job_id IN (
            SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq <= $2)
        """,
        tenant_id,
        to_seq,
    )
    while rows := [tuple(row) for row in await cursor.fetch(ENTRIES_CHECKED)]:
        await check.require(connection, tenant_id, rows)


# --- removing -------------------------------------------------------------------------------------


class Removed(NamedTuple):
    """The outcome of one removal."""

    entries: int
    next_seq: int
    """Where the next removal begins: of the entries before it none is left."""


async def lock_jobs(connection: Connection, tenant_id: str) -> None:
    """Wait until the follower of the job table has ended its turn with a tenant, and keep it from the next one until
    the transaction ends. It skips a position that is locked, so one that waits comes next."""
    await connection.execute(
        "SELECT seq FROM scheduler.follower_positions WHERE follower = $1 AND tenant_id = $2 FOR UPDATE",
        FOLLOWER,
        tenant_id,
    )


async def remove(
    connection: Connection, tenant_id: str, from_seq: int, to_seq: int, entries_max: int, folds: JobFolds
) -> Removed | None:
    """Remove entries of a chain up to ``to_seq`` that a PRUNED entry covers: those of the jobs that have an entry among
    the next ``entries_max / 2`` seqs from ``from_seq`` on, ``entries_max`` at most. Write the rows of these jobs again
    from what is left. None if another session follows or removes entries of this chain.

    All in the caller's transaction, whose commit does not wait for the disk: after a crash that undoes it these rows
    are removed again.
    """
    await connection.execute("SET LOCAL synchronous_commit = off")
    place = (await lock_places(connection, FOLLOWER, [tenant_id])).get(tenant_id)
    if place is None:
        return None
    await keep_left(connection, tenant_id, to_seq)
    rows = await connection.fetch(
        "SELECT * FROM scheduler.remove_covered($1, $2, $3, $4)", tenant_id, from_seq, to_seq, entries_max
    )
    removed_to = {job_id: seq for job_id, _, seq in rows}
    if removed_to:
        await remember(connection, tenant_id, max(removed_to.values()), removed_to)
        await _write_again(connection, tenant_id, removed_to, 0 if place.is_begun else place.seq, folds)
    entries = sum(count for _, count, _ in rows)
    return Removed(entries, from_seq if entries == entries_max else from_seq + (entries_max + 1) // 2)


async def _write_again(
    connection: Connection, tenant_id: str, removed_to: Mapping[str, int], followed_seq: int, folds: JobFolds
) -> None:
    """Write the rows of these jobs again, from their entries after those that were removed, up to the position of the
    table."""
    left = await fetch_column(
        connection,
        """
        SELECT job_id FROM unnest($2::text[], $3::bigint[]) AS removed(job_id, to_seq)
         WHERE (SELECT true FROM scheduler.scheduler_log l
                 WHERE l.tenant_id = $1 AND l.job_id = removed.job_id AND l.seq > removed.to_seq AND l.seq <= $4
                 LIMIT 1)
         ORDER BY job_id
        """,
        tenant_id,
        [*removed_to],
        [*removed_to.values()],
        followed_seq,
    )
    spans = [JobSpan(tenant_id, job_id, removed_to[job_id], followed_seq) for job_id in left]
    states = await _folded(connection, spans, await folds.exclusions(connection, tenant_id)) if spans else []
    await job_table.remove(connection, tenant_id, sorted({*removed_to}.difference(state.job_id for state in states)))
    declared = (await job_search.declared(connection, [tenant_id])).get(tenant_id)
    fields = () if declared is None else declared.fields
    await job_table.store(
        connection,
        [(tenant_id, *job_row(state, () if declared is None else declared.counted(state))) for state in states],
    )
    terms = [
        (tenant_id, state.job_id, term, *state.created.order[:3])
        for state in states
        if state.created is not None
        for term in sorted(terms_of(state, fields))
    ]
    await job_search.store_terms(connection, [(tenant_id, each) for each in removed_to], terms)


async def _folded(connection: Connection, spans: Sequence[JobSpan], exclusions: Exclusions) -> list[JobState]:
    """The states of these jobs, those without one left out."""
    states = []
    for span, entries in zip(spans, await job_table.entries_of(connection, spans), strict=True):
        state = jobs.folded(span.job_id, None, map(job_table.FOLDED, entries), exclusions)
        while len(entries) > job_table.ENTRIES_MAX:
            (entries,) = await job_table.entries_of(connection, [span._replace(after_seq=entries[-1][0])])
            state = jobs.folded(span.job_id, state, map(job_table.FOLDED, entries), exclusions)
        if state is not None:
            states.append(state)
    return states


# --- the space of what left -----------------------------------------------------------------------

VACUUMED_FROM: Final = 0.2
"""Part of a table's rows that must have left for a VACUUM: that from which autovacuum comes by, by default."""
VACUUM_TIMEOUT_S: Final = 6 * 3600.0
"""Longest that one VACUUM may take."""
VACUUM_SETTINGS: Final = {"vacuum_cost_delay": "2ms"}
"""Settings of a session for VACUUM: it rests as autovacuum does."""
_CAN_GRANT_VACUUM: Final = 17
"""Version of PostgreSQL from which on a node may VACUUM tables of another owner."""


async def vacuum(connection: Connection, tenant_id: str, removed_entries: int) -> bool:
    """Let new rows take the pages that so many entries of a tenant left, if these are many; returns whether it was
    done. Writes do not wait for it. The second pass is for the indexes: a page that the first one empties can be used
    from the next one on."""
    if connection.get_server_version().major < _CAN_GRANT_VACUUM:
        return False
    table = await connection.fetchrow(
        "SELECT oid::regclass::text, reltuples FROM pg_class"
        " WHERE oid = (SELECT tableoid FROM scheduler.scheduler_log WHERE tenant_id = $1 LIMIT 1)",
        tenant_id,
    )
    if table is None or removed_entries < VACUUMED_FROM * table["reltuples"]:
        return False
    for _ in range(2):
        # No page is used again before every transaction from before it was emptied has ended.
        await connection.execute("SELECT pg_current_xact_id()")
        for name in (table["oid"], "scheduler.jobs", "scheduler.job_terms", "scheduler.job_figures"):
            await connection.execute(f"VACUUM (TRUNCATE false) {name}", timeout=VACUUM_TIMEOUT_S)
    return True

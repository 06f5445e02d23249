"""SQL of commitments: the entries that hold the promises in force, now and at any earlier seq.

The appender folds the entries themselves. Lists use the table, an index that a follower keeps. The promises are the
entries that its rows name, up to the position of the follower, and the entries after it. Both are read in one
statement, so the answer is that of the chain in that snapshot. ``first_false`` compares the table with the entries.
Imported entries, which have an origin, are history and promise nothing here. Of entries up to the floor of a pruned
chain none is read: what is in force of them is carried by its PRUNED entry (``AtFloor``).

A list is answered only after the table was compared with the log. A comparison costs some microseconds for each entry
of the tenant's history of commitments. Its result is used for ``COST_FACTOR`` times as long as it took, so comparing
takes a fiftieth of the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

from app.runtime.tasks import keep_newest
from app.store import Connection
from app.store.entry_check import EntryCheck, not_as_chained
from app.store.following import EMPTY_TIMEOUT_S, FollowedEntry
from app.store.jobs.table import COMMITMENT_PLACES, ENTRY
from app.store.reading import ENTRIES, turned
from ledger.facts.events import CommitmentAction
from ledger.machines.carried import CarriedCommitments
from ledger.machines.commitments import Commitments
from ledger.machines.promises import INDEX_PREFIX, NODE_PREFIX, RulesVersion
from ledger.verification import ENTRY_COLUMNS
from ledger.verification.verdict import Break

ENTRIES_AT_ONCE = 500
COMPARED_AT_ONCE = 20_000
"""Entries whose rows one statement compares."""
_SEQ, _ACTION, _PAYLOAD = map(ENTRY_COLUMNS.index, ("seq", "action", "payload"))
_PROMISES = frozenset({CommitmentAction.PROPOSE_ACCEPTED, CommitmentAction.CAPACITY_SET})

_SAYS = "action IN ('PROPOSE_ACCEPTED', 'CAPACITY_SET') AND origin IS NULL"
_OF_REVOCATION = (
    f"CASE WHEN job_id ~ '^{INDEX_PREFIX}[0-9]{{1,18}}$' THEN substr(job_id, {len(INDEX_PREFIX) + 1})::bigint END"
)


def _of_a_node(row: str) -> str:
    """SQL condition that ``row`` is a capacity, as in the index of capacities."""
    return f"{row}.subject >= '{NODE_PREFIX}' AND {row}.subject < '{NODE_PREFIX[:-1]};'"


_FOLLOWED = f"SELECT coalesce(seq, 0) AS seq FROM ({COMMITMENT_PLACES}) AS place WHERE tenant_id = $1"


class PromiseEntry(NamedTuple):
    """One entry that holds a promise."""

    seq: int
    action: str
    payload: str


class AtFloor(NamedTuple):
    """What is promised at the floor of a chain."""

    seq: int = 0
    """The floor, 0 if nothing left."""
    carried: CarriedCommitments | None = None
    """None if no entry about commitments left."""

    @property
    def rules(self) -> int | None:
        """The version of the rules in force; None if nothing left that tells."""
        return None if self.carried is None else self.carried.rules

    def machine(self) -> Commitments:
        """The machine in that state."""
        return Commitments() if self.carried is None else self.carried.machine()

    def entries(self) -> dict[int, PromiseEntry]:
        """By seq, entries that say what those say that left and are in force."""
        said = {} if self.carried is None else self.carried.payloads()
        return {seq: PromiseEntry(seq, *facts) for seq, facts in said.items()}

    def columns(self) -> tuple[list[int], list[str], list[str]]:
        """Seqs, subjects and actions of these."""
        subjects = {} if self.carried is None else self.carried.subjects()
        return [*subjects], [*subjects.values()], [self._action(subject) for subject in subjects.values()]

    @staticmethod
    def _action(subject: str) -> str:
        is_capacity = subject.startswith(NODE_PREFIX)
        return CommitmentAction.CAPACITY_SET if is_capacity else CommitmentAction.PROPOSE_ACCEPTED


FloorOf = Callable[["Connection", str], Awaitable[AtFloor]]
"""Returns what is promised at the floor of a tenant's chain. Raises ChainDamagedError if the entry that says so is
damaged."""


async def nothing_left(connection: Connection, tenant_id: str) -> AtFloor:
    """The floor of a chain that nothing left."""
    return AtFloor()


async def seed(connection: Connection, tenant_id: str, floor: AtFloor) -> None:
    """Store the rows of what is in force at the floor, up to which the table has not followed all entries, and end the
    others up to there."""
    seqs, subjects, _ = floor.columns()
    await connection.execute(
        """
        INSERT INTO scheduler.commitments (tenant_id, seq, subject)
        SELECT $1, seq, subject FROM unnest($2::bigint[], $3::text[]) AS n(seq, subject) ON CONFLICT DO NOTHING
        """,
        tenant_id,
        seqs,
        subjects,
    )
    await connection.execute(
        """
        UPDATE scheduler.commitments SET ended_seq = $2
         WHERE tenant_id = $1 AND seq < $2 AND ended_seq IS NULL AND seq <> ALL($3::bigint[])
        """,
        tenant_id,
        floor.seq,
        seqs,
    )


async def take(
    connection: Connection, followed: Mapping[str, Sequence[FollowedEntry]], seeded_to: Mapping[str, int]
) -> None:
    """Apply these entries of each tenant, the next ones in its chain; those up to ``seeded_to`` were seeded."""
    said = [
        (tenant_id, entry.seq, entry.job_id, entry.action)
        for tenant_id, entries in followed.items()
        for entry in entries
        if entry.action in _PROMISES and entry.origin is None and entry.seq > seeded_to.get(tenant_id, 0)
    ]
    if not said:
        return
    columns = turned(said, 4)
    await connection.execute(
        f"""
        INSERT INTO scheduler.commitments (tenant_id, seq, subject)
        SELECT tenant_id, seq, job_id FROM unnest($1::text[], $2::bigint[], $3::text[]) AS n(tenant_id, seq, job_id)
         WHERE {_OF_REVOCATION} IS NULL
        """,
        *columns[:3],
    )
    if any(subject.startswith(INDEX_PREFIX) for _, _, subject, _ in said):
        await connection.execute(
            f"""
            UPDATE scheduler.commitments AS c SET ended_seq = r.ended_seq
              FROM (SELECT tenant_id, {_OF_REVOCATION} AS seq, min(seq) AS ended_seq
                      FROM unnest($1::text[], $2::bigint[], $3::text[]) AS n(tenant_id, seq, job_id)
                     GROUP BY 1, 2) AS r
             WHERE c.tenant_id = r.tenant_id AND c.seq = r.seq AND c.ended_seq IS NULL AND c.seq < r.ended_seq
            """,
            *columns[:3],
        )
    if any(action == CommitmentAction.CAPACITY_SET for *_, action in said):
        await connection.execute(
            f"""
            UPDATE scheduler.commitments AS c SET ended_seq = r.seq
              FROM (SELECT tenant_id, subject, seq,
                           lag(seq, 1, 0::bigint) OVER (PARTITION BY tenant_id, subject ORDER BY seq) AS before_seq
                      FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[])
                           AS n(tenant_id, seq, subject, action)
                     WHERE action = 'CAPACITY_SET') AS r
             WHERE c.tenant_id = r.tenant_id AND c.subject = r.subject AND {_of_a_node("c")}
               AND c.ended_seq IS NULL AND c.seq >= r.before_seq AND c.seq < r.seq
            """,
            *columns,
        )


async def empty(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the rows of these tenants."""
    await connection.execute(
        "DELETE FROM scheduler.commitments WHERE tenant_id = ANY($1::text[])", tenant_ids, timeout=EMPTY_TIMEOUT_S
    )


async def entries(
    connection: Connection, check: EntryCheck, tenant_id: str, after_seq: int, upto_seq: int
) -> AsyncIterator[PromiseEntry]:
    """The entries of a range of seqs that change what is promised, in order, each recomputed. In a transaction.

    Raises:
        ChainDamagedError: one is not as it was chained.
    """
    cursor = await connection.cursor(
        f"""
        {ENTRIES} WHERE tenant_id = $1 AND seq > $2 AND seq <= $3 AND {_SAYS} ORDER BY seq
        """,
        tenant_id,
        after_seq,
        upto_seq,
    )
    while rows := [tuple(row) for row in await cursor.fetch(ENTRIES_AT_ONCE)]:
        await check.require(connection, tenant_id, rows)
        for row in rows:
            yield _promise_of(row)


_IN_FORCE = f"""
WITH followed AS (SELECT CASE WHEN seq >= $6 THEN seq ELSE 0 END AS seq FROM ({_FOLLOWED}) AS place
), unfollowed AS (
    SELECT l.seq, l.action::text, l.job_id FROM followed
      JOIN scheduler.scheduler_log l
        ON l.tenant_id = $1 AND l.seq > greatest(followed.seq, $6) AND l.seq <= $2 WHERE {_SAYS}
     UNION ALL
    SELECT n.* FROM followed, unnest($7::bigint[], $9::text[], $8::text[]) AS n WHERE followed.seq < $6
), ended AS (
    SELECT {_OF_REVOCATION} AS seq FROM unfollowed WHERE starts_with(job_id, '{INDEX_PREFIX}')
     UNION ALL
    SELECT n.seq FROM unfollowed u JOIN scheduler.commitments n
        ON n.tenant_id = $1 AND n.subject = u.job_id AND n.ended_seq IS NULL AND u.action = 'CAPACITY_SET'
       AND {_of_a_node("n")}
     UNION ALL
    SELECT u.seq FROM unfollowed u
     WHERE u.action = 'CAPACITY_SET'
       AND EXISTS (SELECT FROM unfollowed v WHERE v.job_id = u.job_id AND v.seq > u.seq)
), wanted AS (
    SELECT c.seq FROM followed JOIN scheduler.commitments c
        ON c.tenant_id = $1 AND c.seq > $3 AND c.seq <= least($2, followed.seq)
     WHERE (c.ended_seq IS NULL OR c.ended_seq > $2) AND starts_with(c.subject, '{NODE_PREFIX}') = $4
     UNION ALL
    SELECT seq FROM unfollowed
     WHERE seq > $3 AND NOT starts_with(job_id, '{INDEX_PREFIX}') AND starts_with(job_id, '{NODE_PREFIX}') = $4
)
SELECT w.seq, {ENTRY} FROM wanted w
  LEFT JOIN scheduler.scheduler_log l ON l.tenant_id = $1 AND l.seq = w.seq AND l.seq > $6 AND {_SAYS}
 WHERE w.seq NOT IN (SELECT seq FROM ended WHERE seq IS NOT NULL)
 ORDER BY w.seq LIMIT $5
"""
"""$1 tenant, $2 as of seq, $3 after seq, $4 capacities or not, $5 limit, $6 floor, $7 to $9 what is promised there."""


async def page(
    connection: Connection,
    check: EntryCheck,
    tenant_id: str,
    as_of_seq: int,
    after_seq: int,
    limit: int,
    *,
    capacities: bool,
    floor: AtFloor,
) -> list[PromiseEntry]:
    """The promises, or the capacities of nodes, in force at ``as_of_seq``, by seq after ``after_seq``; ``as_of_seq`` is
    not below the floor.

    Raises:
        ChainDamagedError: an entry is not as it was chained, or the table names one that promises nothing.
    """
    rows = await connection.fetch(
        _IN_FORCE,
        tenant_id,
        as_of_seq,
        after_seq,
        capacities,
        limit,
        floor.seq,
        *floor.columns(),
    )
    left = floor.entries()
    for row in rows:
        if row[1] is None and row[0] not in left:
            raise not_as_chained(tenant_id, _false(row[0], "names an entry that promises nothing"))
    await check.require(connection, tenant_id, [tuple(row)[1:] for row in rows if row[1] is not None])
    return [left[row[0]] if row[1] is None else _promise_of(tuple(row)[1:]) for row in rows]


async def promises_at(
    connection: Connection, check: EntryCheck, tenant_id: str, seqs: Sequence[int], floor: AtFloor
) -> dict[int, PromiseEntry]:
    """The entries of these seqs that promise something, each recomputed or carried.

    Raises:
        ChainDamagedError: one is not as it was chained.
    """
    rows = await connection.fetch(
        f"{ENTRIES} WHERE tenant_id = $1 AND seq = ANY($2::bigint[]) AND seq > $3 AND {_SAYS}",
        tenant_id,
        seqs,
        floor.seq,
    )
    entries = [tuple(row) for row in rows]
    await check.require(connection, tenant_id, entries)
    left = {seq: entry for seq, entry in floor.entries().items() if seq in seqs}
    return left | {row[_SEQ]: _promise_of(row) for row in entries}


async def rules_entry(
    connection: Connection, check: EntryCheck, tenant_id: str, as_of_seq: int, floor: AtFloor
) -> PromiseEntry | None:
    """The entry above the floor that tells the version of the rules in force at ``as_of_seq``: the newest change of the
    rules, else, where the floor does not tell, the first entry that promises something; None if there is none.

    Raises:
        ChainDamagedError: it is not as it was chained.
    """
    rows = await connection.fetch(
        f"""
        (SELECT seq FROM scheduler.scheduler_log
          WHERE tenant_id = $1 AND seq <= $2 AND seq > $3 AND job_id = '{RulesVersion.subject_form}' AND {_SAYS}
          ORDER BY seq DESC LIMIT 1)
         UNION ALL
        (SELECT seq FROM scheduler.scheduler_log
          WHERE tenant_id = $1 AND seq <= $2 AND seq > $3 AND $4 AND {_SAYS} ORDER BY seq LIMIT 1)
        """,
        tenant_id,
        as_of_seq,
        floor.seq,
        floor.rules is None,
    )
    found = await promises_at(connection, check, tenant_id, [row["seq"] for row in rows], floor)
    return found[max(found)] if found else None


async def tenants_with_capacities(connection: Connection) -> list[str]:
    """The tenants that have a node of known capacity, as far as the table follows."""
    rows = await connection.fetch(
        f"""
        SELECT DISTINCT c.tenant_id FROM scheduler.commitments c
         WHERE c.ended_seq IS NULL AND {_of_a_node("c")} ORDER BY 1
        """
    )
    return [row["tenant_id"] for row in rows]


async def followed_seq(connection: Connection, tenant_id: str) -> int:
    """The seq up to which the table has followed the chain."""
    return await connection.fetchval(_FOLLOWED, tenant_id) or 0


_FALSE_ROW = f"""
WITH said AS (
    SELECT seq, job_id,
           CASE action WHEN 'CAPACITY_SET' THEN job_id ELSE '{INDEX_PREFIX}' || seq END AS ended_by,
           action::text
      FROM scheduler.scheduler_log
     WHERE tenant_id = $1 AND seq > $2 AND seq <= $3 AND seq > $5 AND {_SAYS}
       AND NOT starts_with(job_id, '{INDEX_PREFIX}')
     UNION ALL
    SELECT seq, job_id, CASE action WHEN 'CAPACITY_SET' THEN job_id ELSE '{INDEX_PREFIX}' || seq END, action
      FROM unnest($6::bigint[], $7::text[], $8::text[]) AS n(seq, job_id, action)
     WHERE seq > $2 AND seq <= $3
), due AS (
    SELECT s.seq, s.job_id, ended.seq AS ended_seq FROM said s LEFT JOIN LATERAL (
        SELECT e.seq FROM scheduler.scheduler_log e
         WHERE e.tenant_id = $1 AND e.job_id = s.ended_by AND e.seq > greatest(s.seq, $5) AND e.seq <= $4
           AND e.action = s.action AND e.origin IS NULL
         ORDER BY e.seq LIMIT 1) AS ended ON true
)
SELECT coalesce(d.seq, c.seq) AS seq, d.seq IS NOT NULL, c.seq IS NOT NULL
  FROM due d FULL JOIN
       (SELECT * FROM scheduler.commitments WHERE tenant_id = $1 AND seq > $2 AND seq <= $3
           AND (seq > $5 OR ended_seq IS NULL OR ended_seq > $5)) AS c
       ON c.seq = d.seq
 WHERE (d.job_id, d.ended_seq) IS DISTINCT FROM (c.subject, c.ended_seq) OR d.seq IS NULL
 ORDER BY 1 LIMIT 1
"""
"""$1 tenant, $2 after seq, $3 to seq, $4 followed seq, $5 floor, $6 to $8 what is promised there."""


async def first_false(connection: Connection, tenant_id: str, to_seq: int, floor: AtFloor) -> Break | None:
    """The first row of the table that is missing, or differs from the entries up to ``to_seq``, which the table has
    followed, and from what is carried of those that left. In a transaction that shows one state. Entries are taken as
    they are stored."""
    after_seq = 0
    while after_seq < to_seq and floor.seq <= to_seq:
        upto_seq = (
            await connection.fetchval(
                f"""
                SELECT seq FROM scheduler.scheduler_log
                 WHERE tenant_id = $1 AND seq > greatest($2::bigint, $5::bigint) AND seq <= $3 AND {_SAYS}
                 ORDER BY seq OFFSET $4 LIMIT 1
                """,
                tenant_id,
                after_seq,
                to_seq,
                COMPARED_AT_ONCE - 1,
                floor.seq,
            )
            or to_seq
        )
        found = await connection.fetchrow(
            _FALSE_ROW,
            tenant_id,
            after_seq,
            upto_seq,
            to_seq,
            floor.seq,
            *floor.columns(),
        )
        if found is not None:
            seq, is_said, is_named = found
            if not is_named:
                return _false(seq, "lacks what this entry promises")
            return _false(seq, "says something else of this entry" if is_said else "names what promises nothing")
        after_seq = upto_seq
    return None


def _false(seq: int, what: str) -> Break:
    return Break(seq, "projection", f"scheduler.commitments {what}", None, what)


def _promise_of(row: Sequence[Any]) -> PromiseEntry:
    return PromiseEntry(row[_SEQ], row[_ACTION], row[_PAYLOAD])


COST_FACTOR: Final = 50
TENANTS_MAX: Final = 10_000
"""Tenants whose last comparison is remembered; the oldest is evicted first."""


class PromiseCheck:
    """Compares the tables of commitments of tenants. ``begin_again`` rebuilds a false one from the first entry."""

    def __init__(self, begin_again: Callable[[str], object], floor_of: FloorOf = nothing_left) -> None:
        self._begin_again = begin_again
        self._floor_of = floor_of
        self._counts_until_s: OrderedDict[str, float] = OrderedDict()

    async def require(self, connection: Connection, tenant_id: str) -> AtFloor:
        """Return what is promised at the floor if the table matches the entries that it has followed. In a transaction
        that shows one state.

        Raises:
            ChainDamagedError: names the first row that does not match.
        """
        floor = await self._floor_of(connection, tenant_id)
        began_s = monotonic()
        if began_s < self._counts_until_s.get(tenant_id, 0.0):
            return floor
        found = await first_false(connection, tenant_id, await followed_seq(connection, tenant_id), floor)
        if found is not None:
            self._begin_again(tenant_id)
            raise not_as_chained(tenant_id, found)
        ended_s = monotonic()
        keep_newest(self._counts_until_s, tenant_id, ended_s + COST_FACTOR * (ended_s - began_s), TENANTS_MAX)
        return floor

"""SQL of the job table, which a follower keeps: its rows, and what a job is.

The state of a job is the fold of all entries that the log's index by job (scheduler_log_job) finds, each verified
(``app.store.entry_check``). A row of the table is an index: it names the entries that make the state
(``ledger.machines.job_fold.seqs_of``), and the values by which lists are ordered and filtered. An attacker who can
write to the database can edit it, so no answer relies on it: once the table has followed all entries of a job, its row
MUST equal their fold. A position of the table beyond the end of the chain is ignored, and without a position all rows
are ignored.

*Folds.* Most jobs have few entries, which are read, verified and folded each time. A job of more than ``ENTRIES_MAX``
entries is folded once, in parts, and cached, so that only newer entries are read. Each part is cached once it is
folded: a fold that is interrupted, as by a timeout, resumes there the next time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import asyncpg

from app.runtime.tasks import keep_newest
from app.store.chaining import copied, dropped
from app.store.departed import departed
from app.store.exclusions import FOLDED_AT, newest_statement, own_log, read_statements, statement_rows
from app.store.following import EMPTY_TIMEOUT_S, Place
from app.store.jobs import figures as job_figures
from app.store.reading import fetch_column, fetch_dict, turned
from ledger.errors import ChainDamagedError
from ledger.facts.events import EVENTS_BY_ACTION
from ledger.machines import jobs
from ledger.machines.exclusions import COUNT_ALL, NO_STATEMENTS, Exclusions, Statements, log_of
from ledger.machines.jobs import JobState, refused_job_id
from ledger.verification import ENTRY_COLUMNS, JOB_COLUMNS
from ledger.verification.projection_check import StoredJob, seqs_text

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.entry_check import EntryCheck
    from ledger.hlc import Hlc

FOLLOWER = "jobs"
"""Name of the follower that keeps the table."""
ENTRIES_MAX = 500
"""Most entries of one job that are read with those of others; those of a job that has more are read in parts."""

JobKey = tuple[str, str]
"""(tenant, job id)."""
EntryRow = tuple[Any, ...]
"""One row of ``ENTRY_COLUMNS``."""
SEQ_MAX: Final = 2**63 - 1


def _places(condition: str = "") -> str:
    return f"""
SELECT h.tenant_id, h.head_seq, CASE WHEN p.seq <= h.head_seq{condition} THEN p.seq END AS seq
  FROM scheduler.chain_heads h
  LEFT JOIN scheduler.follower_positions p ON p.follower = '{FOLLOWER}' AND p.tenant_id = h.tenant_id
"""


PLACES = _places(f" AND p.seq >= {newest_statement('h.tenant_id')}")
"""The query for the table's position in each chain. NULL before the newest statement about excluded logs: until then
rows may have been written with other exclusions."""
COMMITMENT_PLACES = _places()
"""The same for the table of commitments, which no statement changes."""


def stored(row: str) -> str:
    """SQL that selects ``JOB_COLUMNS`` except the id from ``row``, one of the job table."""
    return ", ".join(f"{row}.{name}" for name in JOB_COLUMNS[1:-1]) + f", {row}.seqs::text"


def entries_of_job(tenant_id: str, job_id: str, after_seq: str, to_seq: str) -> str:
    """The query for the entries of a job in a range of seqs, ``ENTRIES_MAX`` + 1 at most, in seq order."""
    return f"""
SELECT {", ".join(f"e.{name}" for name in ENTRY_COLUMNS)} FROM scheduler.scheduler_log e
 WHERE e.tenant_id = {tenant_id} AND e.job_id = {job_id} AND e.seq > {after_seq} AND e.seq <= {to_seq}
 ORDER BY e.seq LIMIT {ENTRIES_MAX + 1}
"""


ENTRY = ", ".join(f"l.{name}" for name in ENTRY_COLUMNS)
_ENTRIES = f"""
SELECT w.number, {ENTRY}
  FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::bigint[]), (SELECT $4::bigint[]))
       WITH ORDINALITY AS w(tenant_id, job_id, after_seq, to_seq, number)
  JOIN scheduler.chain_heads h USING (tenant_id)
 CROSS JOIN LATERAL ({entries_of_job("w.tenant_id", "w.job_id", "w.after_seq", "least(w.to_seq, h.head_seq)")}) AS l
"""
# Jobs are sent as two texts, the tenants and the jobs of each, because the driver would encode each value separately.
# The log is asked only for jobs without a row, each by a subquery of one row: whatever a plan was made for, it uses the
# index.
_MENTIONED = """
SELECT w.tenant_id, found.job_id
  FROM unnest(string_to_array($1, E'\\n'), string_to_array($2, E'\\n\\n')) AS w(tenant_id, jobs)
 CROSS JOIN LATERAL (
       SELECT string_to_array(w.jobs, E'\\n') AS ids,
              array(SELECT j.job_id FROM scheduler.jobs j
                     WHERE j.tenant_id = w.tenant_id AND j.job_id = ANY (string_to_array(w.jobs, E'\\n'))) AS stored
       OFFSET 0) AS asked
 CROSS JOIN LATERAL (
       SELECT unnest(asked.stored)
        UNION ALL
       SELECT job_id FROM (SELECT unnest(asked.ids) EXCEPT SELECT unnest(asked.stored)) AS other(job_id)
        WHERE (SELECT true FROM scheduler.scheduler_log l
                WHERE l.tenant_id = w.tenant_id AND l.job_id = other.job_id LIMIT 1)
        UNION ALL
       SELECT NULL WHERE (SELECT true FROM scheduler.scheduler_log l
                           WHERE l.tenant_id = w.tenant_id AND l.job_id >= 'refused:' AND l.job_id < 'refused;' LIMIT 1)
       ) AS found(job_id)
"""
BEYOND_ENTRIES = 100
"""Entries after the position of the table that are compared with it: if the position is too low, rows cover them."""


_COUNTED: Final = itemgetter(0, *(1 + JOB_COLUMNS.index(name) for name in ("status", "figure", "run_ms")))
# The statement sees the rows as they were before it.
_STORE: Final = """
WITH n AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::text[], $7::text[],
                         $8::bigint[], $9::bigint[], $10::bigint[], $11::text[], $12::text[])
           AS n(tenant_id, job_id, status, created_physical, created_logical, created_node, created_by, last_seq,
                ended_ms, run_ms, figure, seqs)
), stored AS (
    INSERT INTO scheduler.jobs AS j
           (tenant_id, job_id, status, created_physical, created_logical, created_node, created_by, last_seq,
            ended_ms, run_ms, figure, seqs)
    SELECT tenant_id, job_id, status, created_physical, created_logical, created_node, created_by, last_seq,
           ended_ms, run_ms, figure, seqs::bigint[] FROM n
        ON CONFLICT (tenant_id, job_id) DO UPDATE
           SET status = excluded.status, created_physical = excluded.created_physical,
               created_logical = excluded.created_logical, created_node = excluded.created_node,
               created_by = excluded.created_by, last_seq = excluded.last_seq, ended_ms = excluded.ended_ms,
               run_ms = excluded.run_ms, figure = excluded.figure, seqs = excluded.seqs, updated_at = now()
        RETURNING j.tenant_id
)
SELECT tenant_id, NULL, NULL, NULL, false, count(*) FROM stored GROUP BY tenant_id
 UNION ALL
SELECT j.tenant_id, j.status, j.figure, j.run_ms, true, count(*)
  FROM n JOIN scheduler.jobs j ON j.tenant_id = n.tenant_id AND j.job_id = n.job_id
 GROUP BY j.tenant_id, j.status, j.figure, j.run_ms
"""


class JobSpan(NamedTuple):
    """Entries of one job after ``after_seq`` up to ``to_seq``."""

    tenant_id: str
    job_id: str
    after_seq: int = 0
    to_seq: int = SEQ_MAX


class ListedRow(NamedTuple):
    """A job and its row in the table, None if it has none."""

    job_id: str
    stored: StoredJob | None


async def mentioned(connection: Connection, wanted: Sequence[JobKey]) -> tuple[list[JobKey], list[JobKey]]:
    """The jobs of ``wanted`` that have entries, and the jobs with events that PostgreSQL rejected. New jobs rarely have
    any, and this query costs a tenth of the one that reads entries."""
    found, refusing = await _mentioned(connection, wanted)
    kept = {(job[0], refused_job_id(job[1])): job for job in wanted if job[0] in refusing}
    refused = (await _mentioned(connection, [*kept]))[0] if kept else []
    return found, [kept[entry] for entry in refused]


async def _mentioned(connection: Connection, wanted: Iterable[JobKey]) -> tuple[list[JobKey], set[str]]:
    """The jobs of ``wanted`` that have entries, and the tenants that have any refusals."""
    jobs_of: defaultdict[str, list[str]] = defaultdict(list)
    for tenant_id, job_id in wanted:
        jobs_of[tenant_id].append(job_id)
    # No name has several lines.
    texts = ("\n".join(jobs_of), "\n\n".join(map("\n".join, jobs_of.values())))
    rows = [tuple(row) for row in await connection.fetch(_MENTIONED, *texts)]
    return [row for row in rows if row[1] is not None], {tenant_id for tenant_id, job_id in rows if job_id is None}


async def entries_of(connection: Connection, wanted: Sequence[JobSpan]) -> list[list[EntryRow]]:
    """The entries of each span in seq order, up to the head of its chain; at most ``ENTRIES_MAX`` + 1 of each."""
    found: list[list[EntryRow]] = [[] for _ in wanted]
    for row in await connection.fetch(_ENTRIES, *turned(wanted, len(JobSpan._fields))):
        found[row[0] - 1].append(row[1:])
    return found


async def place(connection: Connection, tenant_id: str) -> Place | None:
    """The table's position in the tenant's chain; None when there is no such tenant."""
    row = await connection.fetchrow(f"SELECT seq, head_seq FROM ({PLACES}) AS place WHERE tenant_id = $1", tenant_id)
    return None if row is None else place_of(tenant_id, row["seq"], row["head_seq"])


def place_of(tenant_id: str, seq: int | None, head_seq: int | None) -> Place:
    """The place in a row of ``PLACES``.

    Raises:
        ChainDamagedError: the chain has no head.
    """
    if head_seq is None:
        raise ChainDamagedError(tenant_id, "its head stands nowhere")
    return Place(seq or 0, head_seq, seq is None)


async def first_unfollowed(
    connection: Connection, tenant_id: str, after_seq: int, to_seq: int
) -> tuple[int, str] | None:
    """Seq and job of the first entry in this range that belongs to a job whose row ends before it."""
    row = await connection.fetchrow(
        """
        SELECT l.seq, l.job_id FROM scheduler.scheduler_log l
         WHERE l.tenant_id = $1 AND l.seq > $2 AND l.seq <= $3 AND l.action = ANY($4::text[])
           AND NOT EXISTS (SELECT FROM scheduler.jobs j
                            WHERE j.tenant_id = l.tenant_id AND j.job_id = l.job_id AND j.last_seq >= l.seq)
         ORDER BY l.seq LIMIT 1
        """,
        tenant_id,
        after_seq,
        to_seq,
        list(EVENTS_BY_ACTION),
    )
    return None if row is None else (row["seq"], row["job_id"])


async def is_beyond(connection: Connection, tenant_id: str, seq: int) -> bool:
    """Whether rows cover the next entries after ``seq``."""
    return bool(
        await connection.fetchval(
            """
            SELECT EXISTS (SELECT FROM scheduler.scheduler_log l JOIN scheduler.jobs j USING (tenant_id, job_id)
                            WHERE l.tenant_id = $1 AND l.seq > $2 AND l.seq <= $2 + $3::bigint AND j.last_seq >= l.seq)
            """,
            tenant_id,
            seq,
            BEYOND_ENTRIES,
        )
    )


async def jobs_ending(
    connection: Connection, tenant_id: str, after_seq: int, to_seq: int, followed_seq: int
) -> list[str]:
    """The jobs that have an entry after ``after_seq``, and none after ``to_seq`` up to ``followed_seq``."""
    return await fetch_column(
        connection,
        """
        SELECT DISTINCT l.job_id FROM scheduler.scheduler_log l
         WHERE l.tenant_id = $1 AND l.seq > $2 AND l.seq <= $3 AND l.action = ANY($5::text[])
           AND NOT EXISTS (SELECT FROM scheduler.scheduler_log later
                            WHERE later.tenant_id = l.tenant_id AND later.job_id = l.job_id
                              AND later.seq > $3 AND later.seq <= $4)
        """,
        tenant_id,
        after_seq,
        to_seq,
        followed_seq,
        list(EVENTS_BY_ACTION),
    )


async def first_seqs(connection: Connection, tenant_ids: Collection[str]) -> dict[str, int]:
    """By tenant, the first entry of its chain; tenants without entries are left out."""
    return await fetch_dict(
        connection,
        """
        SELECT tenant_id, first.seq FROM unnest($1::text[]) AS w(tenant_id)
         CROSS JOIN LATERAL (SELECT min(seq) AS seq FROM scheduler.scheduler_log l
                              WHERE l.tenant_id = w.tenant_id) AS first
         WHERE first.seq IS NOT NULL
        """,
        list(tenant_ids),
    )


async def rows_of(connection: Connection, tenant_id: str, job_ids: Sequence[str]) -> list[ListedRow]:
    """The rows of these jobs."""
    return [
        ListedRow(row[0], StoredJob(row[0], *row[2:]) if row[1] else None)
        for row in await connection.fetch(
            f"""
            SELECT w.job_id, j.job_id IS NOT NULL, {stored("j")}
              FROM unnest((SELECT $2::text[])) AS w(job_id)
              LEFT JOIN scheduler.jobs j ON j.tenant_id = $1 AND j.job_id = w.job_id
            """,
            tenant_id,
            job_ids,
        )
    ]


async def add(connection: Connection, pieces: AsyncIterator[Sequence[tuple[Any, ...]]]) -> bool:
    """Add rows of (tenant, ``*JOB_COLUMNS``) of new jobs, and count them; returns whether all were. If one of the jobs
    has a row, none is added. PostgreSQL stores a piece while the next is made."""
    counted = Counter[job_figures.Counted]()

    async def lines() -> AsyncIterator[bytes]:
        async for rows in pieces:
            counted.update(map(_COUNTED, rows))
            yield _lines(rows)

    try:
        async with connection.transaction():
            added = await connection.copy_to_table(
                "jobs", schema_name="scheduler", columns=("tenant_id", *JOB_COLUMNS), source=lines()
            )
    except asyncpg.UniqueViolationError:
        return False
    if copied(added) != counted.total():
        return False
    await job_figures.move(connection, counted)
    return True


_NULL: Final = r"\N"
_ESCAPED: Final = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})


def _lines(rows: Sequence[tuple[Any, ...]]) -> bytes:
    """Rows in COPY's text form."""
    text = _joined(rows)
    # Counted once for all rows: nearly none has a character that COPY reads otherwise.
    nulls, columns = sum(row.count(None) for row in rows), 1 + len(JOB_COLUMNS)
    if text.count("\\") != nulls or text.count("\t") + text.count("\n") != columns * len(rows) or "\r" in text:
        text = _joined([[v.translate(_ESCAPED) if isinstance(v, str) else v for v in row] for row in rows])
    return text.encode()


def _joined(rows: Iterable[Sequence[Any]]) -> str:
    return "".join(
        [
            f"{tenant_id}\t{job_id}\t{status}\t{physical}\t{logical}\t{node}\t{_NULL if creator is None else creator}"
            f"\t{seq}\t{_NULL if end is None else end}\t{_NULL if run is None else run}\t{figure}\t{seqs_text(seqs)}\n"
            for tenant_id, job_id, status, physical, logical, node, creator, seq, end, run, figure, seqs in rows
        ]
    )


async def store(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Store rows of (tenant, ``*JOB_COLUMNS``), in the order of their jobs, and count them instead of what they were.

    Raises:
        ChainDamagedError: not all were stored; names a tenant. The transaction MUST be rolled back.
    """
    columns = turned([(*row[:-1], seqs_text(row[-1])) for row in rows], 1 + len(JOB_COLUMNS))
    counted, stored = Counter(map(_COUNTED, rows)), Counter[str]()
    for tenant_id, status, figure, run_ms, had, count in await connection.fetch(_STORE, *columns):
        if had:
            counted[tenant_id, status, figure, run_ms] -= count
        else:
            stored[tenant_id] = count
    for tenant_id, count in Counter(str(row[0]) for row in rows).items():
        if stored[tenant_id] != count:
            raise dropped(tenant_id, "job rows", count, stored[tenant_id])
    await job_figures.move(connection, counted)


async def remove(connection: Connection, tenant_id: str, job_ids: Sequence[str]) -> None:
    """Remove the rows of these jobs, which are not counted any more."""
    rows = await connection.fetch(
        "DELETE FROM scheduler.jobs WHERE tenant_id = $1 AND job_id = ANY($2::text[])"
        " RETURNING tenant_id, status, figure, run_ms",
        tenant_id,
        job_ids,
    )
    await job_figures.move(connection, {counted: -jobs for counted, jobs in Counter(map(tuple, rows)).items()})


async def empty(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the rows of these tenants, which are followed from their first entry on, and what they count as."""
    await connection.execute(
        "DELETE FROM scheduler.jobs WHERE tenant_id = ANY($1::text[])", tenant_ids, timeout=EMPTY_TIMEOUT_S
    )
    await job_figures.empty(connection, tenant_ids)


TENANTS_EXCLUDING_MAX: Final = 1000
"""Tenants whose statements about excluded logs are remembered."""
LARGE_JOBS_MAX: Final = 1000
"""Jobs of more than ``ENTRIES_MAX`` entries whose states are remembered; the least recently folded is evicted first."""

_HLC: Final = itemgetter(*map(ENTRY_COLUMNS.index, ("hlc_physical", "hlc_logical", "hlc_node")))
FOLDED: Final = itemgetter(*FOLDED_AT)
"""The columns of an entry that are folded."""


class Folded(NamedTuple):
    """The entries of a job up to ``seq``, folded.

    Later entries MUST be folded onto the value that was taken before they were read: the cached fold may be evicted or
    replaced meanwhile.
    """

    state: JobState | None
    seq: int
    exclusions: Exclusions = COUNT_ALL
    """What was excluded from the fold."""

    def onto(self, span: JobSpan, entries: Sequence[EntryRow], as_of: Hlc | None = None) -> Folded:
        """This fold with verified ``entries`` of the job added; only those up to the HLC ``as_of`` if given."""
        folded = entries if as_of is None else [row for row in entries if _HLC(row) <= as_of]
        state = jobs.folded(span.job_id, self.state, map(FOLDED, folded), self.exclusions)
        return self._replace(state=state, seq=entries[-1][0] if entries else self.seq)

    @property
    def covers_seq(self) -> int:
        """The position from which on the row of the job in the table must equal this fold."""
        return max(self.seq, self.exclusions.seq)


_NOTHING: Final = Folded(None, 0)


class ReadJob(NamedTuple):
    """Entries of ``span``, not all of them for a large job, the fold that they are added to, and what is excluded."""

    span: JobSpan
    known: Folded
    entries: Sequence[EntryRow]
    exclusions: Exclusions = COUNT_ALL

    @property
    def is_large(self) -> bool:
        """Whether there may be more entries than were read."""
        return len(self.entries) > ENTRIES_MAX


class JobFolds:
    """Folds jobs for one node, and caches the large ones. Belongs to one event loop."""

    def __init__(self, check: EntryCheck, log_origin: str | None = None) -> None:
        """``log_origin`` is that of this ledger's logs."""
        self.check = check
        self._log_origin = log_origin
        self._folds: OrderedDict[JobKey, Folded] = OrderedDict()
        self._statements: OrderedDict[str, Statements] = OrderedDict()
        """By tenant, the statements about excluded logs that were read and verified."""

    def log_of(self, tenant_id: str, origin: str | None) -> str | None:
        """The log that first chained an entry of this origin."""
        return own_log(self._log_origin, tenant_id) if origin is None else log_of(origin)

    def remembered(self, tenant_id: str, job_id: str) -> Folded:
        """The cached fold of the job, empty for most."""
        return self._folds.get((tenant_id, job_id), _NOTHING)

    async def statements(
        self,
        connection: Connection,
        tenant_ids: Collection[str],
        as_of: Hlc | None = None,
        report: Callable[[ChainDamagedError], object] | None = None,
    ) -> dict[str, Statements]:
        """The statements about excluded logs in these chains, or those up to the HLC ``as_of``, by tenant; tenants
        without any are left out. Damaged ones are passed to ``report`` if given, and are ignored then.

        Raises:
            ChainDamagedError: one of them is not what was chained.
        """
        known = {each: self._statements[each] for each in tenant_ids if each in self._statements and as_of is None}
        new = await statement_rows(connection, {each: known[each].seq if each in known else 0 for each in tenant_ids})
        for tenant_id, rows in new.items():
            try:
                await self.check.require(connection, tenant_id, rows)
            except ChainDamagedError as error:
                if report is None:
                    raise
                report(error)
                continue
            before = known.get(tenant_id, NO_STATEMENTS)
            known[tenant_id] = read_statements(tenant_id, rows, self._log_origin, before, as_of)
            if as_of is None:
                keep_newest(self._statements, tenant_id, known[tenant_id], TENANTS_EXCLUDING_MAX)
        return known

    async def exclusions(self, connection: Connection, tenant_id: str, as_of: Hlc | None = None) -> Exclusions:
        """What is excluded in this chain, or was at ``as_of``; raises as ``statements``."""
        found = (await self.statements(connection, [tenant_id], as_of)).get(tenant_id, NO_STATEMENTS)
        return found.exclusions(own_log(self._log_origin, tenant_id))

    async def read(
        self,
        connection: Connection,
        wanted: Sequence[JobKey],
        to_seq: int = SEQ_MAX,
        report: Callable[[ChainDamagedError], object] | None = None,
    ) -> list[ReadJob]:
        """Entries of these jobs to fold, up to ``to_seq``, at most ``ENTRIES_MAX`` + 1 of each, and what is excluded;
        ``report`` and errors as in ``statements``."""
        if not wanted:
            return []
        known = await self._remembered(connection, wanted)
        spans = [JobSpan(*job, each.seq, to_seq) for job, each in zip(wanted, known, strict=True)]
        entries = await entries_of(connection, spans)
        stated = await self.statements(connection, {tenant_id for tenant_id, _ in wanted}, report=report)
        excluded = {each: found.exclusions(own_log(self._log_origin, each)) for each, found in stated.items()}
        return [
            ReadJob(span, fold, rows, excluded.get(span.tenant_id, COUNT_ALL))
            for span, fold, rows in zip(spans, known, entries, strict=True)
        ]

    async def _remembered(self, connection: Connection, wanted: Sequence[JobKey]) -> list[Folded]:
        """The cached folds of these jobs, empty for those of which an entry has left: they are folded of the rest."""
        cached = [job for job in wanted if job in self._folds]
        left = {*await departed(connection, cached)} if cached else ()
        return [_NOTHING if job in left else self.remembered(*job) for job in wanted]

    async def fold(
        self,
        connection: Connection,
        job: ReadJob,
        *,
        are_checked: bool = False,
        as_of: Hlc | None = None,
    ) -> Folded:
        """Fold all entries of the job's span that are not excluded, or those up to the HLC ``as_of`` if given. With
        ``are_checked`` the caller has verified the entries that were read.

        Raises:
            ChainDamagedError: one of them is not what was chained.
        """
        span, folded, entries, exclusions = job
        if folded.state is not None and folded.exclusions.logs != exclusions.logs:
            # The cached fold has facts that do not count any more, or lacks some.
            span, folded = span._replace(after_seq=0), _NOTHING
            (entries,) = await entries_of(connection, [span])
            job, are_checked = ReadJob(span, folded, entries, exclusions), False
        folded = folded._replace(exclusions=exclusions)
        while True:
            if not are_checked:
                await self.check.require(connection, span.tenant_id, entries)
            folded = folded.onto(span, entries, as_of)
            if job.is_large and as_of is None and folded.state is not None:
                # No answer shows workflows.
                known = folded._replace(state=folded.state._replace(workflow={}))
                keep_newest(self._folds, (span.tenant_id, span.job_id), known, LARGE_JOBS_MAX)
            if len(entries) <= ENTRIES_MAX:
                return folded
            (entries,) = await entries_of(connection, [span._replace(after_seq=folded.seq)])
            are_checked = False

    async def state_at(self, connection: Connection, tenant_id: str, job_id: str, as_of: Hlc) -> JobState | None:
        """The state of the job at the HLC ``as_of``.

        Raises:
            ChainDamagedError: an entry is not what was chained.
        """
        span = JobSpan(tenant_id, job_id)
        (entries,) = await entries_of(connection, [span])
        job = ReadJob(span, _NOTHING, entries, await self.exclusions(connection, tenant_id, as_of))
        return (await self.fold(connection, job, as_of=as_of)).state

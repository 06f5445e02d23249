"""The PostgreSQL reader of a tenant's ledger for verification.

One REPEATABLE READ transaction shows one state of all tables. Rows come through server-side cursors in batches, smaller
ones if rows are long. The next batch is fetched while one is checked. A batch of long rows is handed on in parts,
because the event loop does not run while a part is checked. Rows with the same key, possible once a constraint was
dropped, come in order of storage, so that every verifier sees one order. Entries by job are an exception: two of one
seq break the chain, and then no job that does not match is reported.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from sys import getsizeof
from typing import Any, NamedTuple, TypeVar, cast

from asyncpg.cursor import Cursor

from app.runtime.sharing import turns
from app.store import Connection, node
from app.store.exclusions import newest_statement, own_log, statements
from app.store.jobs.index import PostgresIndex
from app.store.jobs.table import FOLLOWER
from app.store.reading import ENTRIES
from app.store.retention import retention_rows
from ledger import native
from ledger.errors import InvalidInputError
from ledger.machines.exclusions import NO_STATEMENTS, Exclusions
from ledger.verification import (
    COMMITMENT_ACTIONS,
    COMMITMENT_COLUMNS,
    ENTRY_COLUMNS,
    FOLD_COLUMNS,
    JOB_COLUMNS,
    PROMISED_COLUMNS,
    SNAPSHOT_COLUMNS,
    Head,
    StoredTree,
)
from ledger.verification.entry_check import Passed
from ledger.verification.left_index import IndexAtFloor, index_at

ENTRIES_A_BATCH = 250
"""Most entries read at once. They and the next batch fit into a megabyte, so they stay in the processor's cache for
each check. With 1000 every row takes a quarter longer."""
FOLDED_A_BATCH = 250
"""The same, if each entry is folded into the state of its job."""
SNAPSHOTS_A_BATCH = 50
FIRST_ROWS = 16
"""Rows of the first fetch, before their length is known."""
FETCH_BYTES = 16 << 20
"""Memory for the rows of one fetch, estimated from the rows before, as PostgreSQL limits rows and not bytes. If long
rows follow short ones, one fetch is larger."""
FETCH_TIMEOUT_S = 600.0
"""Longest wait for one batch; sorting a long chain by job comes before the first."""
FOLD_TIMEOUT_S = 6 * 3600.0
"""Longest that reading and processing all entries of a range of jobs may take; their number is not known."""

_PAYLOAD, _FOLDED_PAYLOAD = ENTRY_COLUMNS.index("payload"), FOLD_COLUMNS.index("payload")
_COMMITTED_PAYLOAD, _SUBJECT = COMMITMENT_COLUMNS.index("payload"), PROMISED_COLUMNS.index("subject")
_SEQS, _ENVELOPE = JOB_COLUMNS.index("seqs"), SNAPSHOT_COLUMNS.index("dsse_envelope")
_SEQ_MIN, _SEQ_MAX = -(2**63), 2**63 - 1
_SNAPSHOT_NAME = re.compile(r"[0-9A-Fa-f-]+")

_ENTRIES = f"{ENTRIES} WHERE tenant_id = $1 AND seq >= $2 AND seq <= $3 ORDER BY seq, ctid"
# If seqs repeat, the order is not that of storage: a caller that finds this reads again. Sorting by it costs a fifth.
_COPIED_ENTRIES = f"{ENTRIES} WHERE tenant_id = {{tenant}} AND seq >= {{first}} AND seq <= {{last}} ORDER BY seq"
_COPIED_TYPES = ("int8", "text", "int8", "int8", *("text",) * 3, "int2", *("text",) * 3, "json", "json")
_FOLDED_TYPES = ("text", "int8", "int8", "int8", "text", "text", "text", "json", "json")
_FOLDED_FORMS = bytes(ord("i" if name == "int8" else "t") for name in _FOLDED_TYPES)
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
# The job table is compared with the entries that it has followed.
_FOLLOWED = (
    f"(SELECT seq FROM scheduler.follower_positions WHERE follower = '{FOLLOWER}' AND tenant_id = $1"
    " ORDER BY ctid LIMIT 1)"
)
# Rows written before a statement about excluded logs was met say nothing.
_FOLLOWED_JOBS = f"(SELECT seq FROM {_FOLLOWED} AS place(seq) WHERE seq >= {newest_statement('$1')})"
_JOBS = (
    f"SELECT {', '.join(JOB_COLUMNS[:-1])}, seqs::text, indexed.fields, CASE WHEN indexed.fields IS NOT NULL THEN"
    " (SELECT coalesce(string_agg(concat_ws(':', term, t.created_physical, t.created_logical, t.created_node), ' '"
    " ORDER BY term), '') FROM scheduler.job_terms t WHERE t.tenant_id = $1 AND t.job_id = j.job_id) END"
    " FROM scheduler.jobs j LEFT JOIN"
    " (SELECT fields FROM scheduler.search_fields WHERE tenant_id = $1 AND built_to IS NULL) AS indexed ON true"
    f" WHERE tenant_id = $1 AND {_FOLLOWED_JOBS} IS NOT NULL{{part}}"
    " ORDER BY job_id, j.ctid"
)
_ENTRIES_BY_JOB = (
    f"SELECT {', '.join(FOLD_COLUMNS)} FROM scheduler.scheduler_log WHERE tenant_id = $1"
    f" AND seq <= {_FOLLOWED_JOBS}{{part}}"
    " ORDER BY job_id, seq"
)
_ACTIONS = ", ".join(f"'{action}'" for action in sorted(COMMITMENT_ACTIONS))


class JobRange(NamedTuple):
    """A half-open range of job ids; None is no bound. NULL ids come last."""

    from_id: str | None
    below_id: str | None

    @property
    def bounds(self) -> tuple[str, ...]:
        """Parameters of ``condition``, from $2 on."""
        return tuple(bound for bound in self if bound is not None)

    @property
    def condition(self) -> str:
        """The condition on ``job_id`` in a query."""
        if self.from_id is None:
            return "" if self.below_id is None else " AND job_id < $2"
        return " AND job_id >= $2 AND job_id < $3" if self.below_id is not None else _LAST_RANGE


Value = TypeVar("Value")
Batches = AsyncGenerator[Sequence[Sequence[Any]]]
"""Batches of rows. The connection is in use until the end: a caller that stops earlier MUST close the generator."""
_LAST_RANGE = " AND (job_id >= $2 OR job_id IS NULL)"
ALL_JOBS = JobRange(None, None)


class CopiedEntries(NamedTuple):
    """Whole rows of entries in COPY's binary form, without its header."""

    data: bytes

    def passed(self, *known: Any) -> Passed | None:
        """The result of these entries if all of them pass, else None."""
        found = native.entries_in_copy(*known, self.data)
        return None if found is None else Passed(*found)


class PostgresChainReader:
    """A ``ledger.verification.ChainReader`` over a connection that is inside a transaction."""

    def __init__(self, connection: Connection, tenant_id: str, leaving_to: int | None = None) -> None:
        """``leaving_to``: a prune is to take the entries up to there. Shown are these, what was judged of them, and the
        jobs that have one."""
        self._connection = connection
        self.tenant_id = tenant_id
        self.leaving_to = leaving_to
        self._to_seq = _SEQ_MAX if leaving_to is None else leaving_to
        self._lock = asyncio.Lock()
        """One operation at a time on the connection, as batches are fetched ahead beside other reads."""
        self._copied: str | None = None
        self._has_folded_types: bool | None = None

    async def head(self) -> Head | None:
        """The row of ``chain_heads``."""
        return await self._first(
            Head,
            "SELECT head_seq, head_chain_link, head_hlc FROM scheduler.chain_heads WHERE tenant_id = $1 ORDER BY ctid",
        )

    async def last_entry(self) -> Head | None:
        """The entry of highest seq."""
        return await self._first(
            Head,
            "SELECT seq, chain_link, t_hlc FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq IS NOT NULL"
            " ORDER BY seq DESC, ctid DESC LIMIT 1",
        )

    async def tree(self) -> StoredTree | None:
        """The stored tree's size and root."""
        return await self._first(
            StoredTree, "SELECT tree_size, root_hash FROM scheduler.merkle_head WHERE tenant_id = $1 ORDER BY ctid"
        )

    async def checkpoint(self) -> str | None:
        """The newest checkpoint of the tenant's log, as stored."""
        return await self._first(
            lambda note: note, "SELECT checkpoint::text FROM scheduler.merkle_head WHERE tenant_id = $1 ORDER BY ctid"
        )

    async def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes]:
        """Stored tiles ``first..last`` of a level."""
        async with self._lock:
            rows = await self._connection.fetch(
                "SELECT tile_index, hashes FROM scheduler.merkle_tile"
                " WHERE tenant_id = $1 AND level = $2 AND tile_index BETWEEN $3 AND $4 ORDER BY ctid",
                self.tenant_id,
                level,
                first,
                last,
                timeout=FETCH_TIMEOUT_S,
            )
        return {row[0]: row[1] for row in rows}

    def entries(self, from_seq: int | None, to_seq: int | None) -> Batches:
        """Batches of entries by seq."""
        return self._in_turns(_PAYLOAD, ENTRIES_A_BATCH, _ENTRIES, *self._bounds(from_seq, to_seq))

    async def copied(self, from_seq: int | None, to_seq: int | None, take: Callable[[CopiedEntries], None]) -> bool:
        """Pass the entries of a range to ``take`` by seq, in batches. Returns False, and passes none, if the type of a
        column was altered."""
        first, last = self._bounds(from_seq, to_seq)
        async with self._lock:
            if self._copied is None:
                self._copied = await self._statement_of_copies()
            if not self._copied:
                return False

            async def told(data: bytes) -> None:  # A bytearray, in truth.
                take(CopiedEntries(_rows_in(data)))

            await self._connection.copy_from_query(
                self._copied.format(first=first, last=last), output=told, format="binary", timeout=FETCH_TIMEOUT_S
            )
        return True

    async def _statement_of_copies(self) -> str:
        """The query to copy, without its bounds; empty if a column has another type, as COPY does not report types."""
        tenant = await self._connection.fetchval("SELECT quote_literal($1)", self.tenant_id)
        query = _COPIED_ENTRIES.replace("{tenant}", tenant.replace("{", "{{").replace("}", "}}"))
        return query if await self._types_of(query.format(first=0, last=0)) == _COPIED_TYPES else ""

    async def _types_of(self, query: str) -> tuple[str, ...]:
        """The type names of the query's columns, which cannot change until the transaction ends."""
        return tuple(attribute.type.name for attribute in (await self._connection.prepare(query)).get_attributes())

    def snapshots(self, from_seq: int, to_seq: int | None) -> Batches:
        """Batches of snapshots by ``from_seq``."""
        return self._batches(
            _ENVELOPE,
            SNAPSHOTS_A_BATCH,
            f"SELECT {', '.join(SNAPSHOT_COLUMNS)} FROM scheduler.batch_snapshot"
            " WHERE tenant_id = $1 AND (from_seq >= $2 AND to_seq <= $3 OR from_seq IS NULL OR to_seq IS NULL)"
            " ORDER BY from_seq, to_seq, id",
            *self._bounds(from_seq, to_seq),
        )

    def jobs(self, part: JobRange = ALL_JOBS) -> Batches:
        """Batches of stored jobs by job id, none if the job table has not followed the chain."""
        return self._in_turns(_SEQS, FOLDED_A_BATCH, _JOBS.format(part=self._of(part)), *part.bounds)

    def entries_by_job(self, part: JobRange = ALL_JOBS) -> Batches:
        """Batches of the entries that the job table has followed, by job id and seq."""
        return self._in_turns(
            _FOLDED_PAYLOAD, FOLDED_A_BATCH, _ENTRIES_BY_JOB.format(part=self._of(part)), *part.bounds
        )

    async def copied_by_job(self, part: JobRange, take: Callable[[list[tuple[Any, ...]]], Awaitable[None]]) -> bool:
        """Pass the rows of ``entries_by_job`` to ``take`` in batches, at a lower CPU cost. Returns False if that is not
        possible; the caller MUST then discard the rows passed. ``take`` MUST NOT read."""
        query = _ENTRIES_BY_JOB.format(part=self._of(part))
        is_whole = native.NAME != "python"

        async def told(data: bytes) -> None:  # A bytearray, in truth.
            nonlocal is_whole
            rows = native.rows_in_copy(_FOLDED_FORMS, _rows_in(data))
            is_whole = is_whole and rows is not None
            if rows and is_whole:
                await take(rows)

        async with self._lock:
            if self._has_folded_types is None:
                self._has_folded_types = await self._types_of(query) == _FOLDED_TYPES
            if not (is_whole and self._has_folded_types):
                return False
            await self._connection.copy_from_query(
                query, self.tenant_id, *part.bounds, output=told, format="binary", timeout=FOLD_TIMEOUT_S
            )
        return is_whole

    async def retention_entries(self) -> list[tuple[Any, ...]]:
        """The entries about retention, in seq order."""
        async with self._lock:
            return await retention_rows(self._connection, self.tenant_id)

    async def index_at(self, to_seq: int) -> IndexAtFloor | None:
        """What is stored of the index of jobs of entries that left."""
        async with self._lock:
            return await index_at(PostgresIndex(self._connection, self.tenant_id), to_seq)

    def commitments(self) -> Batches:
        """Batches of the entries whose verdicts are checked, by seq."""
        return self._in_turns(
            _COMMITTED_PAYLOAD,
            FOLDED_A_BATCH,
            f"SELECT {', '.join(COMMITMENT_COLUMNS)} FROM scheduler.scheduler_log"
            f" WHERE tenant_id = $1 AND seq <= {self._to_seq} AND action::text IN ({_ACTIONS}) AND origin IS NULL"
            " ORDER BY seq, ctid",
        )

    def promised(self) -> Batches:
        """Batches of the table of commitments by seq, none if it has not followed the chain."""
        return self._batches(
            _SUBJECT,
            FOLDED_A_BATCH,
            f"SELECT {', '.join(PROMISED_COLUMNS)} FROM scheduler.commitments"
            f" WHERE tenant_id = $1 AND {_FOLLOWED} IS NOT NULL AND {self.leaving_to is None} ORDER BY seq, ctid",
        )

    async def followed_seq(self) -> int:
        """The seq up to which these tables have followed the chain."""
        if self.leaving_to is not None:
            return 0
        return await self._first(lambda seq: seq if isinstance(seq, int) else 0, f"SELECT {_FOLLOWED}") or 0

    async def exclusions(self) -> Exclusions:
        """What is excluded from the fold of ``entries_by_job``."""
        async with self._lock:
            log_origin = await node.log_origin(self._connection)
            stated = await statements(self._connection, [self.tenant_id], log_origin)
        return stated.get(self.tenant_id, NO_STATEMENTS).exclusions(own_log(log_origin, self.tenant_id))

    async def job_ranges(self, jobs_a_range: int) -> list[JobRange]:
        """Ranges that cover all possible job ids, each with ``jobs_a_range`` stored jobs."""
        async with self._lock:
            rows = await self._connection.fetch(
                "SELECT job_id FROM (SELECT job_id, row_number() OVER (ORDER BY job_id) AS number FROM scheduler.jobs"
                f" WHERE tenant_id = $1 AND job_id IS NOT NULL{self._of(ALL_JOBS)}) AS numbered"
                " WHERE number % $2 = 0 ORDER BY number",
                self.tenant_id,
                jobs_a_range,
                timeout=FETCH_TIMEOUT_S,
            )
        return [JobRange(*bounds) for bounds in pairwise((None, *(row[0] for row in rows), None))]

    def _bounds(self, from_seq: int | None, to_seq: int | None) -> tuple[int, int]:
        return (_SEQ_MIN if from_seq is None else from_seq, min(_SEQ_MAX if to_seq is None else to_seq, self._to_seq))

    def _of(self, part: JobRange) -> str:
        """The condition on ``job_id`` for the jobs of ``part`` that are shown."""
        if self.leaving_to is None:
            return part.condition
        leaving = f"SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq <= {self._to_seq}"
        return f"{part.condition} AND job_id IN ({leaving})"

    async def exported(self) -> str:
        """The name of the snapshot, which other connections can import while this transaction is open."""
        async with self._lock:
            return str(await self._connection.fetchval("SELECT pg_export_snapshot()"))

    async def _first(self, form: Callable[..., Value], query: str) -> Value | None:
        """The first row of ``query``, in this form."""
        async with self._lock:
            row = await self._connection.fetchrow(query, self.tenant_id, timeout=FETCH_TIMEOUT_S)
        return form(*row) if row is not None else None

    async def _in_turns(self, text_column: int, rows_max: int, query: str, *bounds: int | str) -> Batches:
        """The rows of ``query``, in small batches if the text in ``text_column`` is long."""
        async with aclosing(self._batches(text_column, rows_max, query, *bounds)) as batches:
            async for rows in batches:
                for turn in turns([len(row[text_column] or "") for row in rows]):
                    yield rows[turn.start : turn.stop]

    async def _batches(self, text_column: int, rows_max: int, query: str, *bounds: int | str) -> Batches:
        async with self._lock:
            cursor = await self._connection.cursor(query, self.tenant_id, *bounds)
        ahead = asyncio.ensure_future(self._fetch(cursor, FIRST_ROWS))
        try:
            while rows := await ahead:
                ahead = asyncio.ensure_future(self._fetch(cursor, _rows_after(rows, text_column, rows_max)))
                # Sends the request now, so that Postgres works while the caller does.
                await asyncio.sleep(0)
                yield rows
        finally:
            await asyncio.gather(ahead, return_exceptions=True)

    async def _fetch(self, cursor: Cursor[Any], count: int) -> Sequence[Sequence[Any]]:
        async with self._lock:
            return cast("Sequence[Sequence[Any]]", await cursor.fetch(count, timeout=FETCH_TIMEOUT_S))


@asynccontextmanager
async def consistent_reader(
    connection: Connection, tenant_id: str, exported: str | None = None, leaving_to: int | None = None
) -> AsyncIterator[PostgresChainReader]:
    """A reader of one state of the tenant's ledger, for as long as the context is open; ``leaving_to`` as for it.

    ``exported`` names the state that another reader shows, whose transaction MUST be open.
    """
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        if exported is not None:
            if not _SNAPSHOT_NAME.fullmatch(exported):
                raise InvalidInputError(f"{exported!r} is not the name of a state of the database")
            await connection.execute(f"SET TRANSACTION SNAPSHOT '{exported}'")
        yield PostgresChainReader(connection, tenant_id, leaving_to)


def _rows_in(data: bytes) -> bytes:
    """The data of COPY without its header; no row begins like the header."""
    return bytes(data).removeprefix(_COPY_HEADER)


def _rows_after(rows: Sequence[Sequence[Any]], text_column: int, rows_max: int) -> int:
    """How many rows to fetch after ``rows``, the last batch; all columns but ``text_column`` are short."""
    return max(1, min(rows_max, FETCH_BYTES * len(rows) // sum(getsizeof(row[text_column]) for row in rows)))

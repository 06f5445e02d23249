"""SQL of searches for jobs: candidates for a filter that the job table cannot answer, and the terms of declared
fields.

*Candidates* come in list order, a bounded number at a time. A candidate is a job whose entries contain the text that
every match contains; the fold of its entries decides whether it matches (``ledger.machines.job_search``).

*A term* is a hash of one field and one value. The follower of the job table keeps the terms of the jobs whose rows it
writes, in the same transaction. The terms of jobs that existed before their tenant declared fields are added in steps,
in the order of their ids. ``built_to`` is the position of that work; no search uses terms before its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from app.store.following import EMPTY_TIMEOUT_S
from app.store.jobs.order import ListRange, Order, Position, by
from app.store.jobs.table import ListedRow, stored
from app.store.reading import columns, fetch_as, fetch_column, fetch_value, page_of
from app.store.reads import size_of_job
from ledger.errors import ChainDamagedError, InvalidInputError, refuse
from ledger.facts.statuses import STATUSES
from ledger.machines.jobs import JobState
from ledger.verification.projection_check import StoredJob

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.jobs.table import JobKey


class Candidates(NamedTuple):
    """Some of the jobs that were read, and the position of the read."""

    jobs: list[ListedRow]
    looked_at: int
    last: Position | None
    """Position of the last job that was scanned, or of the last of ``jobs`` if more follow; None if no job is left."""


class _Kind(NamedTuple):
    """What decides about the query for candidates."""

    order: Order
    is_of_actor: bool
    is_within_creations: bool
    has_term: bool
    in_conflict: bool

    @property
    def first(self) -> int:
        """The first of the parameters that not all queries have: creations, actor, term."""
        return 6 + 2 * len(self.order.columns)

    def wanted(self, row: str) -> str:
        """The condition on rows that are scanned though no index has them in order."""
        created = f" AND {Order().within(self.first, row)}" if self.is_within_creations else ""
        return f"{created} AND {row}created_by = {self.actor}" if self.is_of_actor else created

    @property
    def actor(self) -> str:
        return f"${self.first + 2 * len(Order().columns) * self.is_within_creations}"

    @property
    def term(self) -> str:
        return f"${self.first + 2 * len(Order().columns) * self.is_within_creations + self.is_of_actor}"


def _in_order(kind: _Kind) -> str:
    """Jobs of some statuses in list order: an index has the jobs of one status in order."""
    order, keys = kind.order, _keys(kind.order)
    # Of an order by creation, an index has the jobs of an actor as well.
    of_actor = f" AND created_by = {kind.actor}" if order.is_by_creation and kind.is_of_actor else ""
    wanted = "" if order.is_by_creation else kind.wanted("first.")
    return f"""
SELECT first.*, {_named(order, "first.")}, true{wanted} AS is_wanted
  FROM unnest($3::text[]) AS listed(status)
 CROSS JOIN LATERAL (
       SELECT * FROM scheduler.jobs
        WHERE tenant_id = $1 AND status = listed.status{of_actor} AND {order.within(6)}
        ORDER BY {by(order.columns, order.direction)} LIMIT $5) AS first
 ORDER BY {by(keys, order.direction)} LIMIT $5
"""


def _of_term(kind: _Kind) -> str:
    """Jobs with one term, of any status: unwanted ones count as scanned. An index has them by creation."""
    order = kind.order
    if order.is_by_creation:
        source = f"""
  FROM (SELECT * FROM scheduler.job_terms
         WHERE tenant_id = $1 AND term = {kind.term} AND {order.within(6)}
         ORDER BY {by(order.columns, order.direction)} LIMIT $5) AS t
  LEFT JOIN scheduler.jobs j ON j.tenant_id = t.tenant_id AND j.job_id = t.job_id
"""
    else:
        source = f"""
  FROM scheduler.job_terms t JOIN scheduler.jobs j ON j.tenant_id = t.tenant_id AND j.job_id = t.job_id
 WHERE t.tenant_id = $1 AND t.term = {kind.term} AND {order.within(6, "j.")}
 ORDER BY {by(_keys(order), order.direction)} LIMIT $5
"""
    return f"""
SELECT {stored("j")}, j.tenant_id, t.job_id, {_named(order, "t." if order.is_by_creation else "j.")},
       coalesce(j.status = ANY($3::text[]){kind.wanted("j.")}, false) AS is_wanted{source}"""


def _keys(order: Order) -> tuple[str, ...]:
    """The names that the values of a position have among candidates."""
    return tuple(f"key_{number}" for number in range(len(order.columns)))


def _named(order: Order, row: str) -> str:
    return ", ".join(f"{row}{column} AS {key}" for column, key in zip(order.columns, _keys(order), strict=True))


# A CONFLICT entry may hold a creation.
_CREATED_TWICE: Final = """
   AND (SELECT count(*) FROM (SELECT FROM scheduler.scheduler_log c
                               WHERE c.tenant_id = $1 AND c.job_id = j.job_id AND c.action IN ('ENQUEUE', 'CONFLICT')
                               LIMIT 2) AS creations) = 2
"""


@cache
def _query(kind: _Kind) -> str:
    """The query for a part of the jobs.

    An entry contains a text if its payload does, in lower case; the id of a job counts as an entry. A CONFLICT entry
    holds another event in another form, so it may contain any text.
    """
    keys, direction = _keys(kind.order), kind.order.direction
    listed = f"""
SELECT j.*, size.bytes
  FROM candidates AS j
 CROSS JOIN LATERAL ({size_of_job("j")}) AS size
 WHERE j.is_wanted AND NOT EXISTS (
       SELECT FROM unnest($4::text[]) AS wanted(fragment)
        WHERE strpos(lower(j.job_id COLLATE "C"), wanted.fragment) = 0 AND NOT EXISTS (
              SELECT FROM scheduler.scheduler_log l
               WHERE l.tenant_id = $1 AND l.job_id = j.job_id
                 AND (strpos(lower(l.payload::text COLLATE "C"), wanted.fragment) > 0 OR l.action = 'CONFLICT')))
{_CREATED_TWICE if kind.in_conflict else ""}
"""
    return f"""
WITH candidates AS MATERIALIZED ({_of_term(kind) if kind.has_term else _in_order(kind)}), edge AS (
     SELECT count(*) OVER () AS looked_at, {", ".join(keys)}
       FROM candidates ORDER BY {by(keys, direction, is_reversed=True)} LIMIT 1
)
SELECT edge.*, {", ".join(f"page.{key}" for key in keys)}, page.job_id, {stored("page")}, found
  FROM edge
  LEFT JOIN {page_of(listed, by(keys, direction), limit="$2")} AS page ON true
 ORDER BY number
"""


async def candidates(
    connection: Connection,
    tenant_id: str,
    statuses: Sequence[str],
    actor: str | None,
    fragments: Sequence[str],
    term: int | None,
    listed: ListRange,
    limit: int,
    looked_at_max: int,
    *,
    in_conflict: bool = False,
) -> Candidates:
    """Candidates among the jobs of a tenant, in the order of the list: the first ``limit`` of at most
    ``looked_at_max`` scanned jobs. With a ``term``, only jobs that have it; ``in_conflict``, only jobs that may be."""
    is_within = listed.is_within_creations
    kind = _Kind(listed.order, actor is not None, is_within, term is not None, in_conflict)
    rows = await connection.fetch(
        _query(kind),
        tenant_id,
        limit,
        statuses or STATUSES,
        fragments,
        looked_at_max,
        *listed.bounds,
        *(listed.created if is_within else ()),
        *(each for each in (actor, term) if each is not None),
    )
    if not rows:
        return Candidates([], 0, None)
    keys = len(listed.order.columns)
    looked_at, edge, job_at = rows[0][0], tuple(rows[0][1 : 1 + keys]), 1 + 2 * keys
    found = [ListedRow(row[job_at], StoredJob(*row[job_at:-1])) for row in rows if row[job_at] is not None]
    if found and rows[-1]["found"] > len(found):
        return Candidates(found, looked_at, tuple(rows[-1][1 + keys : job_at]))
    return Candidates(found, looked_at, edge if looked_at == looked_at_max else None)


NARROW_MAX = 1000
"""Most jobs of one term that are counted to find the rarest term."""


class SearchFields(NamedTuple):
    """The declaration of one tenant; jobs are indexed up to that of the creation at seq ``built_to``, None once all
    are."""

    tenant_id: str
    fields: list[str]
    built_to: int | None
    declared_at: datetime

    def counted(self, state: JobState) -> Sequence[str]:
        """The fields by whose values a job counts: none before its creation is reached, as values are admitted to
        figures in the order of the log."""
        is_reached = self.built_to is None or (state.created is not None and state.created.order[-1] <= self.built_to)
        return self.fields if is_reached else ()


JobTerm = tuple[str, str, int, int, int, str]
"""(tenant, job, term, physical, logical, node): one term of one job, and the job's place in lists."""


async def declared(connection: Connection, tenant_ids: Collection[str]) -> dict[str, SearchFields]:
    """The declarations of these tenants, as far as they made one.

    Raises:
        ChainDamagedError: a row cannot come from a declaration.
    """
    rows = await fetch_as(
        connection,
        SearchFields,
        f"SELECT {columns(SearchFields)} FROM scheduler.search_fields WHERE tenant_id = ANY($1::text[])",
        list(tenant_ids),
    )
    for row in rows:
        if not isinstance(row.fields, list) or not all(isinstance(field, str) for field in row.fields):
            raise ChainDamagedError(row.tenant_id, f"its row in search_fields names {row.fields}, which are no fields")
    return {row.tenant_id: row for row in rows}


async def require_built(connection: Connection, tenant_id: str, field: str) -> None:
    """Return if all jobs of the tenant are indexed by this field.

    Raises:
        InvalidInputError: they are not.
    """
    fields = (await declared(connection, [tenant_id])).get(tenant_id)
    path = f"/v1/tenants/{tenant_id}/search"
    refuse(
        partial(InvalidInputError, path=("by",)),
        (
            fields is None or field not in fields.fields,
            f"by: jobs are counted by declared fields alone, and {field[:100]!r} is none: PUT {path} declares fields",
        ),
        (
            fields is not None and fields.built_to is not None,
            f"by: jobs older than the declaration of {field[:100]!r} are still being counted: ask again once "
            f"GET {path} answers is_built true",
        ),
    )


async def unbuilt(connection: Connection) -> list[str]:
    """Tenants whose terms are not complete."""
    return await fetch_column(connection, "SELECT tenant_id FROM scheduler.search_fields WHERE built_to IS NOT NULL")


async def declare(connection: Connection, tenant_id: str, fields: Sequence[str]) -> SearchFields:
    """Replace the tenant's search fields; the same fields again change nothing."""
    await connection.execute(
        """
        INSERT INTO scheduler.search_fields AS f (tenant_id, fields, built_to) VALUES ($1, $2, 0)
            ON CONFLICT (tenant_id) DO UPDATE SET fields = excluded.fields, built_to = 0, declared_at = now()
             WHERE f.fields <> excluded.fields
        """,
        tenant_id,
        fields,
    )
    return (await declared(connection, [tenant_id]))[tenant_id]


async def advance_terms(connection: Connection, of: SearchFields, built_to: int | None) -> None:
    """Record that the terms of more jobs are stored; has no effect if other fields were declared meanwhile."""
    await connection.execute(
        """
        UPDATE scheduler.search_fields SET built_to = $4 WHERE tenant_id = $1 AND fields = $2 AND built_to = $3
        """,
        of.tenant_id,
        of.fields,
        of.built_to,
        built_to,
    )


async def store_terms(connection: Connection, jobs: Sequence[JobKey], terms: Iterable[JobTerm]) -> None:
    """Replace the terms of these jobs."""
    await connection.execute(
        """
        DELETE FROM scheduler.job_terms t USING unnest($1::text[], $2::text[]) AS job(tenant_id, job_id)
         WHERE t.tenant_id = job.tenant_id AND t.job_id = job.job_id
        """,
        *map(list, zip(*jobs, strict=True)),
    )
    if rows := list(terms):
        await connection.execute(
            """
            INSERT INTO scheduler.job_terms
                   (tenant_id, job_id, term, created_physical, created_logical, created_node)
            SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[])
            """,
            *map(list, zip(*rows, strict=True)),
        )


async def empty_terms(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Remove the terms of these tenants' jobs, which are followed from their first entry on."""
    await connection.execute(
        "DELETE FROM scheduler.job_terms WHERE tenant_id = ANY($1::text[])", tenant_ids, timeout=EMPTY_TIMEOUT_S
    )


async def narrowest(connection: Connection, tenant_id: str, terms: Sequence[int], order: Order) -> int | None:
    """The rarest of these terms, as far as their jobs are counted; None without terms. Of a list that does not go by
    creation, in which order no index has the jobs of a term, only one of fewer than ``NARROW_MAX`` jobs."""
    return (
        await fetch_value(
            connection,
            int,
            """
            SELECT term FROM unnest($2::bigint[]) AS wanted(term)
             CROSS JOIN LATERAL (
                   SELECT count(*) AS jobs
                     FROM (SELECT FROM scheduler.job_terms t
                            WHERE t.tenant_id = $1 AND t.term = wanted.term LIMIT $3) AS few) AS counted
             WHERE $4 OR jobs < $3 ORDER BY jobs LIMIT 1
            """,
            tenant_id,
            terms,
            NARROW_MAX,
            order.is_by_creation,
        )
        if terms
        else None
    )

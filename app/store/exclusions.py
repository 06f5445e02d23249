"""SQL of statements about excluded logs, and with which of them the job table is written.

A statement changes the states of jobs that were chained long before it. So the job table is rewritten from the first
entry once its follower meets a statement that decides, and its position counts only once it is past every statement::

    position of EXCLUDING     seq of the newest deciding statement with which the rows of the table are written
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from app.store.reading import fetch_dict
from ledger.machines.exclusions import NO_STATEMENTS, SUBJECT, Statements, statements_of
from ledger.verification import ENTRY_COLUMNS, FOLD_COLUMNS

if TYPE_CHECKING:
    from typing import Any

    from app.store import Connection

EXCLUDING: Final = "jobs-exclusions"
"""Name, in ``follower_positions``, of the statements with which the job table is written."""
FOLDED_AT: Final = tuple(map(ENTRY_COLUMNS.index, FOLD_COLUMNS))


def newest_statement(tenant_id: str) -> str:
    """SQL for the seq of the newest statement in the chain of a tenant, 0 without one."""
    return (
        f"coalesce((SELECT max(stated.seq) FROM scheduler.scheduler_log stated WHERE stated.tenant_id = {tenant_id}"
        f" AND stated.job_id::text = '{SUBJECT}'), 0)"
    )


_STATEMENTS = f"""
SELECT w.tenant_id, {", ".join(f"l.{name}" for name in ENTRY_COLUMNS)}
  FROM unnest((SELECT $1::text[]), (SELECT $2::bigint[])) AS w(tenant_id, after_seq)
  JOIN scheduler.chain_heads h USING (tenant_id)
  JOIN scheduler.scheduler_log l
    ON l.tenant_id = w.tenant_id AND l.job_id::text = '{SUBJECT}' AND l.seq > w.after_seq AND l.seq <= h.head_seq
 ORDER BY w.tenant_id, l.seq
"""


async def statement_rows(connection: Connection, after_seqs: Mapping[str, int]) -> dict[str, list[tuple[Any, ...]]]:
    """By tenant, the rows of ``ENTRY_COLUMNS`` of statements after a seq, in seq order; tenants without any are left
    out."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for tenant_id, *row in await connection.fetch(_STATEMENTS, list(after_seqs), list(after_seqs.values())):
        found.setdefault(tenant_id, []).append((*row,))
    return found


async def statements(
    connection: Connection, tenant_ids: Collection[str], log_origin: str | None
) -> dict[str, Statements]:
    """The statements in each of these chains, as stored; tenants without any are left out."""
    rows = await statement_rows(connection, dict.fromkeys(tenant_ids, 0))
    return {tenant_id: read_statements(tenant_id, found, log_origin) for tenant_id, found in rows.items()}


def read_statements(
    tenant_id: str,
    rows: Collection[tuple[Any, ...]],
    log_origin: str | None,
    known: Statements = NO_STATEMENTS,
    as_of: tuple[int, int, str] | None = None,
) -> Statements:
    """``known`` and the statements in rows of ``ENTRY_COLUMNS`` of a chain of this ledger."""
    folded = ([row[at] for at in FOLDED_AT] for row in rows)
    return statements_of(known, folded, own_log(log_origin, tenant_id), as_of)


def own_log(log_origin: str | None, tenant_id: str) -> str | None:
    """The log of a tenant in the ledger of ``log_origin``, None if that is not known."""
    return None if log_origin is None else f"{log_origin}/{tenant_id}"


async def written_with(connection: Connection, tenant_ids: Collection[str]) -> dict[str, int]:
    """By tenant, the newest statement with which the rows of its jobs are written; 0 is left out."""
    return await fetch_dict(
        connection,
        "SELECT tenant_id, seq FROM scheduler.follower_positions WHERE follower = $1 AND tenant_id = ANY($2::text[])",
        EXCLUDING,
        list(tenant_ids),
    )


async def write_with(connection: Connection, seqs: Mapping[str, int]) -> None:
    """Record with which newest statement the rows of these tenants are written from now on."""
    await connection.execute(
        """
        INSERT INTO scheduler.follower_positions AS p (follower, tenant_id, seq)
        SELECT $1, tenant_id, seq FROM unnest($2::text[], $3::bigint[]) AS n(tenant_id, seq) ORDER BY tenant_id
            ON CONFLICT (follower, tenant_id) DO UPDATE SET seq = excluded.seq
        """,
        EXCLUDING,
        list(seqs),
        list(seqs.values()),
    )

"""SQL of the edge: what a request must ask before its event may enter the WAL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import asyncpg

from app.store import idempotency
from app.store.idempotency import ChainedLine
from app.store.reading import reading
from app.store.reads import find_refusal
from app.store.whole import whole
from ledger.errors import ChainDamagedError, InvalidInputError
from ledger.machines import jobs
from ledger.private_fields import PRIVATE_MARK

_ENTRY_COLUMN = ChainedLine._fields.index("t_hlc")
"""Where the columns of the entry begin in a line."""
LOOKUP_TIMEOUT_S = 5.0
"""Longest that one lookup may take, the wait for a connection included."""


class ChainedJob(NamedTuple):
    """What the chain says of one job.

    ``ended`` is why it takes no more events, None while it does; ``creation`` is the ``creation_digest`` of its first
    creation; None where there is none yet, or it holds sealed values, which can be compared with nothing.
    ``is_made`` is False of a job whose creation PostgreSQL refused: it may be created still.
    """

    fence_token: int
    ended: str | None
    creation: str | None
    is_made: bool = True


# A stored state is canonical JSON, so the text of a part is the canonical form of that part.
_JOBS = f"""
SELECT j.tenant_id, j.job_id, j.status, j.state->>'fence' AS fence,
       CASE WHEN j.state->'created' IS NOT NULL AND strpos((j.state->'spec')::text, '"{PRIVATE_MARK}"') = 0
            THEN encode(sha256(convert_to('{{"assigned_dcs":' || (j.state->'assigned_dcs')::text
                                          || ',"spec":' || (j.state->'spec')::text || '}}', 'UTF8')), 'hex')
       END AS creation,
       j.state->'created' IS NULL AS is_uncreated,
       CASE WHEN j.status = '{jobs.REFUSED}' THEN j.state::text END AS refused
  FROM unnest($1::text[], $2::text[]) AS wanted(tenant_id, job_id)
  JOIN scheduler.jobs j USING (tenant_id, job_id)
"""


class EdgeLookups:
    """Which jobs exist, and which keyed lines are chained. All raise DatabaseUnavailableError."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool

    async def find_jobs(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ChainedJob]:
        """What is chained of each (tenant, job id)."""
        async with reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S) as connection:
            tenants, ids = [tenant for tenant, _ in wanted], [job for _, job in wanted]
            rows = await connection.fetch(_JOBS, tenants, ids)
            found = {
                (row["tenant_id"], row["job_id"]): ChainedJob(
                    _fence(row["fence"]), _ended(row["tenant_id"], row["status"], row["refused"]), row["creation"]
                )
                for row in rows
            }
            made = {(row["tenant_id"], row["job_id"]) for row in rows if not row["is_uncreated"]}
            for tenant_id, job_id in set(wanted) - made:
                refusal = await find_refusal(connection, tenant_id, job_id)
                if refusal is not None and refusal.is_creation:
                    found[tenant_id, job_id] = ChainedJob(0, refusal.text(), None, is_made=False)
        return found

    async def find_lines(self, tenants: Sequence[str], route: int, key: str) -> list[ChainedLine]:
        """Chained lines of a keyed request, in line order.

        Raises:
            ChainDamagedError: a row names no entry, or one with a column that is NULL.
        """
        async with reading(self._pool, timeout_s=LOOKUP_TIMEOUT_S) as connection:
            lines = await idempotency.find_lines(connection, tenants, route, key)
        for line in lines:
            if line[_ENTRY_COLUMN:] == (None,) * (len(line) - _ENTRY_COLUMN):
                reason = (
                    f"the row of Idempotency-Key {key!r} in scheduler.idempotency names seq {line.seq}, and no entry"
                )
                raise ChainDamagedError(line.tenant_id, f"{reason} stands there")
        return [whole(line.tenant_id, line, ("prev_chain_link",)) for line in lines]


def _ended(tenant_id: str, status: str, refused: str | None) -> str | None:
    try:
        return jobs.ended_text(status, jobs.from_json(refused).refused if refused else None)
    except InvalidInputError as error:
        raise ChainDamagedError(tenant_id, f"a stored job state is none: {error}") from error


def _fence(stored: str | None) -> int:
    """The fence of a stored state; 0 where someone has damaged it, which verification tells."""
    return int(stored) if stored is not None and stored.isdecimal() else 0

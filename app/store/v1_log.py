"""Reading the log of a v1 scheduler: the tables ``scheduler_log`` and ``chain_heads`` of its schema ``scheduler``.

All reads of one ``V1Log`` see one state of the database, and write nothing. Memory holds ``ROWS_A_BATCH`` rows with
payloads of up to ``PAYLOAD_BYTES_INLINE``, whatever the columns hold; a longer payload is read by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

from app.store import Connection, sessions
from ledger.bundle.format import PAYLOAD_BYTES_MAX
from ledger.bundle.v1 import V1Head, V1Row
from ledger.errors import InvalidInputError, NotFoundError

CONNECT_TIMEOUT_S: Final = 10.0
FETCH_TIMEOUT_S: Final = 600.0
"""Longest that one statement may take: the search for repeated HLCs sorts the tenant's rows."""
ROWS_A_BATCH: Final = 500
PAYLOAD_BYTES_INLINE: Final = 64 << 10
TEXT_CHARACTERS_MAX: Final = 300
"""Text that is read of any other column; none that is valid is as long."""

_COLUMNS: Final = frozenset(
    ("id", "t_hlc", "job_id", "action", "prev_chain_link", "chain_link", "payload", "tenant_id", "created_at")
)
_TEXTS: Final = ", ".join(
    f"left({name}::text, {TEXT_CHARACTERS_MAX})"
    for name in ("t_hlc", "job_id", "action", "prev_chain_link", "chain_link")
)
_BYTES: Final = "octet_length(payload::text)"
_ROWS: Final = f"""
SELECT id, {_TEXTS}, CASE WHEN {_BYTES} <= {PAYLOAD_BYTES_INLINE} THEN payload::text END, {_BYTES}
  FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY id"""
_REPEATED: Final = """
SELECT min(id) FROM (SELECT id, row_number() OVER (PARTITION BY t_hlc ORDER BY id) AS number
                       FROM scheduler.scheduler_log WHERE tenant_id = $1) AS numbered WHERE number = 2"""


class V1Log:
    """The rows of one tenant, in one state of the database."""

    def __init__(self, connection: Connection, tenant_id: str) -> None:
        self._connection = connection
        self.tenant_id = tenant_id

    @classmethod
    @asynccontextmanager
    async def opened(cls, dsn: str, tenant_id: str) -> AsyncIterator[Self]:
        """The log of ``tenant_id`` in the database at ``dsn``.

        Raises:
            NotFoundError: the database has no such log, or the log no such tenant.
            InvalidInputError: it is the database of a Tallystick ledger.
            DATABASE_FAULTS: the database cannot be reached or read.
        """
        connection = await sessions.connect_alone(dsn, timeout_s=CONNECT_TIMEOUT_S)
        try:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                log = cls(connection, tenant_id)
                await log._check()
                yield log
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)

    async def _check(self) -> None:
        found = await self._connection.fetch(
            "SELECT column_name FROM information_schema.columns"
            " WHERE table_schema = 'scheduler' AND table_name = 'scheduler_log'"
        )
        columns = {row[0] for row in found}
        if "link_version" in columns:
            raise InvalidInputError("it is the database of a Tallystick ledger: take tally bundle export")
        if missing := _COLUMNS - columns:
            raise NotFoundError(
                "it is no database of a v1 scheduler: scheduler.scheduler_log "
                + (f"lacks {', '.join(sorted(missing))}" if columns else "is not there, or this login may not read it")
            )
        is_there = "SELECT EXISTS (SELECT FROM scheduler.scheduler_log WHERE tenant_id = $1)"
        if not await self._connection.fetchval(is_there, self.tenant_id):
            raise NotFoundError(f"scheduler.scheduler_log has no row of tenant {self.tenant_id!r}")

    async def head(self) -> V1Head | None:
        """The end of the chain by ``chain_heads``, None if the tenant has no row there."""
        row = await self._connection.fetchrow(
            f"SELECT left(head_chain_link, {TEXT_CHARACTERS_MAX}), left(head_hlc, {TEXT_CHARACTERS_MAX})"
            "  FROM scheduler.chain_heads WHERE tenant_id = $1",
            self.tenant_id,
        )
        return None if row is None else V1Head(*row)

    async def repeated_hlc_id(self) -> int | None:
        """Id of the first row whose HLC an earlier row has, None if there is none."""
        found: int | None = await self._connection.fetchval(_REPEATED, self.tenant_id, timeout=FETCH_TIMEOUT_S)
        return found

    async def batches(self) -> AsyncIterator[Sequence[V1Row]]:
        """The rows, in the order of ``id``."""
        cursor = await self._connection.cursor(_ROWS, self.tenant_id)
        while rows := await cursor.fetch(ROWS_A_BATCH, timeout=FETCH_TIMEOUT_S):
            yield [V1Row(*row) for row in rows]

    async def payload(self, row: V1Row) -> str | None:
        """The payload of a row that came without it; None if it is NULL or too long for an entry."""
        if row.payload_bytes is None or row.payload_bytes > PAYLOAD_BYTES_MAX:
            return None
        found: str | None = await self._connection.fetchval(
            "SELECT payload::text FROM scheduler.scheduler_log WHERE id = $1", row.id, timeout=FETCH_TIMEOUT_S
        )
        return found

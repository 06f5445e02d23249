"""SQL of the export of bundles: rows of a range, in order, a few at a time. All inside the caller's transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from app.store.fetches import FIRST_ROWS, rows_after
from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS

if TYPE_CHECKING:
    from asyncpg.cursor import Cursor

    from app.store import Connection

ENTRIES_A_FETCH = 250
"""Most entries fetched at once."""
SNAPSHOTS_A_FETCH = 100
FETCH_TIMEOUT_S = 60.0

_PAYLOAD, _ENVELOPE = ENTRY_COLUMNS.index("payload"), SNAPSHOT_COLUMNS.index("dsse_envelope")

_ENTRIES = (
    f"SELECT {', '.join(ENTRY_COLUMNS)} FROM scheduler.scheduler_log"
    " WHERE tenant_id = $1 AND seq BETWEEN $2 AND $3 ORDER BY seq"
)
_SNAPSHOTS = (
    f"SELECT {', '.join(SNAPSHOT_COLUMNS)} FROM scheduler.batch_snapshot"
    " WHERE tenant_id = $1 AND from_seq >= $2 AND to_seq <= $3 ORDER BY from_seq"
)


def entries(
    connection: Connection, tenant_id: str, from_seq: int, to_seq: int
) -> AsyncIterator[Sequence[Sequence[Any]]]:
    """Batches of ``ENTRY_COLUMNS`` by seq; through a server-side cursor, so the transaction must stay open."""
    return _batches(connection, _ENTRIES, _PAYLOAD, ENTRIES_A_FETCH, tenant_id, from_seq, to_seq)


def snapshots(
    connection: Connection, tenant_id: str, from_seq: int, to_seq: int
) -> AsyncIterator[Sequence[Sequence[Any]]]:
    """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``, of snapshots wholly in the range."""
    return _batches(connection, _SNAPSHOTS, _ENVELOPE, SNAPSHOTS_A_FETCH, tenant_id, from_seq, to_seq)


async def _batches(
    connection: Connection, query: str, text_column: int, rows_max: int, *arguments: object
) -> AsyncIterator[Sequence[Sequence[Any]]]:
    cursor: Cursor[Any] = await connection.cursor(query, *arguments)
    count = FIRST_ROWS
    while True:
        rows: Sequence[Sequence[Any]] = await cursor.fetch(count, timeout=FETCH_TIMEOUT_S)
        if not rows:
            return
        count = rows_after(rows, text_column, rows_max)
        yield rows

"""Edits that the ledger is there to find, made as a superuser past the append-only triggers.

For demonstration on a scratch copy only: nothing of the service imports this.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from app.store import sessions
from app.store.reading import columns, fetch_one_as

if TYPE_CHECKING:
    from app.store import Connection


class LogRow(NamedTuple):
    """What a forger looks at before an edit."""

    seq: int
    job_id: str
    action: str
    payload: str
    payload_digest: str


_ROW = f"SELECT {columns(LogRow)} FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = $2"
_WRITE_PAYLOAD = """
UPDATE scheduler.scheduler_log SET payload = $3::text::json, payload_digest = $4 WHERE tenant_id = $1 AND seq = $2
"""


@asynccontextmanager
async def superuser(url: str) -> AsyncIterator[Connection]:
    """A connection on which the triggers that refuse changes do not fire; only a superuser may do this."""
    connection = await sessions.connect(url)
    try:
        await connection.execute("SET session_replication_role = replica")
        yield connection
    finally:
        await connection.close()


async def read_row(connection: Connection, tenant_id: str, seq: int) -> LogRow:
    """The entry at ``seq``, which must exist."""
    row = await fetch_one_as(connection, LogRow, _ROW, tenant_id, seq)
    assert row is not None
    return row


async def find_seq(connection: Connection, tenant_id: str, action: str) -> int:
    """``seq`` of the tenant's first entry with ``action``, which must exist."""
    seq: int = await connection.fetchval(
        "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1 AND action = $2", tenant_id, action
    )
    return seq


async def write_payload(connection: Connection, tenant_id: str, row: LogRow) -> None:
    """Put payload and digest of ``row`` where its ``seq`` is."""
    await connection.execute(_WRITE_PAYLOAD, tenant_id, row.seq, row.payload, row.payload_digest)


async def cut_tail(connection: Connection, tenant_id: str, last_seq: int) -> None:
    """Remove every entry after ``last_seq``, and make head, snapshots, tree and jobs fit, so that nothing in the
    database tells of it. ``last_seq`` must be the last entry of its job, and no job may go on after it.
    """
    async with connection.transaction():
        for statement in _CUT_TAIL:
            await connection.execute(statement, tenant_id, last_seq)


_CUT_TAIL = (
    "DELETE FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq > $2",
    "DELETE FROM scheduler.batch_snapshot WHERE tenant_id = $1 AND to_seq > $2",
    "DELETE FROM scheduler.merkle_tile WHERE tenant_id = $1 AND $2::bigint > 0",
    "DELETE FROM scheduler.merkle_head WHERE tenant_id = $1 AND $2::bigint > 0",
    "DELETE FROM scheduler.checkpoint_cosignature WHERE tenant_id = $1 AND tree_size > $2",
    "DELETE FROM scheduler.checkpoint_timestamp WHERE tenant_id = $1 AND tree_size > $2",
    "DELETE FROM scheduler.jobs WHERE tenant_id = $1 AND last_seq > $2",
    "UPDATE scheduler.follower_positions SET seq = $2 WHERE tenant_id = $1 AND seq > $2",
    "UPDATE scheduler.chain_heads h SET head_seq = l.seq, head_chain_link = l.chain_link, head_hlc = l.t_hlc"
    " FROM scheduler.scheduler_log l WHERE h.tenant_id = $1 AND l.tenant_id = $1 AND l.seq = $2",
)

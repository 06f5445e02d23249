"""SQL of the watch: where chains end, and what PostgreSQL gave the entries that this node chained itself."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from app.store.rows import fetch_as, told, whole

if TYPE_CHECKING:
    from app.store import Connection


class Stamp(NamedTuple):
    """What PostgreSQL gave one entry."""

    seq: int
    id: int
    created_at: datetime


_HEADS = "SELECT tenant_id, head_seq FROM scheduler.chain_heads WHERE tenant_id = ANY($1::text[])"
_STAMPS = f"""
SELECT seq, id, {told("created_at")} FROM scheduler.scheduler_log
 WHERE tenant_id = $1 AND seq BETWEEN $2 AND $3 ORDER BY seq
"""


async def head_seqs(connection: Connection, tenant_ids: Sequence[str]) -> dict[str, int]:
    """By tenant, where its chain ends; those that have none are left out."""
    return {tenant_id: seq or 0 for tenant_id, seq in await connection.fetch(_HEADS, tenant_ids)}


async def stamps(connection: Connection, tenant_id: str, from_seq: int, to_seq: int) -> list[Stamp]:
    """What PostgreSQL gave the entries from ``from_seq`` to ``to_seq``, as far as they are there, in seq order.

    Raises:
        ChainDamagedError: somebody edited what it gave one of them.
    """
    found = await fetch_as(connection, Stamp, _STAMPS, tenant_id, from_seq, to_seq)
    return [whole(tenant_id, stamp) if None in stamp else stamp for stamp in found]

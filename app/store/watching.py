"""SQL of the watch over all chains: what their heads and trees say, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from app.store.chaining import WalPosition
from app.store.rows import fetch_as, fetch_one_as

if TYPE_CHECKING:
    from app.store import Connection


class SeenChain(NamedTuple):
    """The end of one chain as the database has it; anything may stand in its columns once somebody changed them."""

    tenant_id: str
    head_seq: int | None
    head_chain_link: str | None
    last_link: str | None
    """Link of the entry at the head, None when there is none."""
    tree_size: int | None
    root_hash: str | None
    checkpoint: str | None
    """The newest signed note, None before the first."""


_PAGE = """
SELECT h.tenant_id, h.head_seq, h.head_chain_link, l.chain_link, m.tree_size, m.root_hash, m.checkpoint
  FROM scheduler.chain_heads h
  LEFT JOIN scheduler.scheduler_log l ON l.tenant_id = h.tenant_id AND l.seq = h.head_seq
  LEFT JOIN scheduler.merkle_head m ON m.tenant_id = h.tenant_id
 WHERE h.tenant_id > $1 ORDER BY h.tenant_id LIMIT $2
"""
_POSITION = """
SELECT wal_id, epoch, chained_lsn, seen_durable_lsn FROM scheduler.wal_positions WHERE node_id = $1
"""
_LINKS = """
SELECT w.tenant_id, l.chain_link
  FROM unnest($1::text[], $2::bigint[]) AS w(tenant_id, seq)
  JOIN scheduler.scheduler_log l ON l.tenant_id = w.tenant_id AND l.seq = w.seq
"""


async def read_position(connection: Connection, node_id: str) -> WalPosition | None:
    """What Postgres knows of the node's WAL, without a lock."""
    return await fetch_one_as(connection, WalPosition, _POSITION, node_id)


async def read_page(connection: Connection, after: str, limit: int) -> list[SeenChain]:
    """The next chains behind tenant ``after``, in tenant order."""
    return await fetch_as(connection, SeenChain, _PAGE, after, limit)


async def read_links(connection: Connection, seqs: Mapping[str, int]) -> dict[str, str]:
    """By tenant, the link of its entry at that seq, where there is one."""
    return dict(map(tuple, await connection.fetch(_LINKS, list(seqs), list(seqs.values()))))


async def read_end(connection: Connection, tenant_id: str) -> int:
    """Seq of the tenant's last entry, whatever its head says; 0 when there is none."""
    end_seq: int = await connection.fetchval(
        "SELECT coalesce(max(seq), 0) FROM scheduler.scheduler_log WHERE tenant_id = $1", tenant_id
    )
    return end_seq


async def read_next(connection: Connection, tenant_id: str, seq: int) -> int:
    """Seq of the tenant's first entry behind ``seq``; ``seq + 1`` when there is none."""
    next_seq: int | None = await connection.fetchval(
        "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq > $2", tenant_id, seq
    )
    return seq + 1 if next_seq is None else next_seq

"""SQL of the watch over all chains: what their heads and trees say, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.notary import TileCoordinates


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


_COLUMNS = """
SELECT h.tenant_id, h.head_seq, h.head_chain_link, l.chain_link, m.tree_size, m.root_hash, m.checkpoint
  FROM scheduler.chain_heads h
  LEFT JOIN scheduler.scheduler_log l ON l.tenant_id = h.tenant_id AND l.seq = h.head_seq
  LEFT JOIN scheduler.merkle_head m ON m.tenant_id = h.tenant_id
"""


async def read_page(connection: Connection, after: str, limit: int) -> list[SeenChain]:
    """The next chains behind tenant ``after``, in tenant order."""
    rows = await connection.fetch(
        f"{_COLUMNS} WHERE h.tenant_id > $1 ORDER BY h.tenant_id LIMIT $2",
        after,
        limit,
    )
    return [SeenChain(*row) for row in rows]


async def read_links(connection: Connection, seqs: Mapping[str, int]) -> dict[str, str]:
    """By tenant, the link of its entry at that seq, where there is one."""
    rows = await connection.fetch(
        """
        SELECT w.tenant_id, l.chain_link
          FROM unnest($1::text[], $2::bigint[]) AS w(tenant_id, seq)
          JOIN scheduler.scheduler_log l ON l.tenant_id = w.tenant_id AND l.seq = w.seq
        """,
        list(seqs),
        list(seqs.values()),
    )
    return {row["tenant_id"]: row["chain_link"] for row in rows}


async def read_tiles(
    connection: Connection, wanted: Sequence[tuple[str, TileCoordinates]]
) -> dict[str, dict[TileCoordinates, bytes]]:
    """By tenant, the hashes of its stored tiles among ``wanted``."""
    rows = await connection.fetch(
        """
        SELECT t.tenant_id, t.level, t.tile_index, t.hashes
          FROM unnest($1::text[], $2::smallint[], $3::bigint[]) AS wanted(tenant_id, level, tile_index)
          JOIN scheduler.merkle_tile t USING (tenant_id, level, tile_index)
        """,
        [tenant_id for tenant_id, _ in wanted],
        [level for _, (level, _index) in wanted],
        [index for _, (_level, index) in wanted],
    )
    found: dict[str, dict[TileCoordinates, bytes]] = {}
    for row in rows:
        found.setdefault(row["tenant_id"], {})[row["level"], row["tile_index"]] = row["hashes"]
    return found


async def read_end(connection: Connection, tenant_id: str) -> int:
    """Seq of the tenant's last entry, whatever its head says; 0 when there is none."""
    end_seq: int = await connection.fetchval(
        "SELECT coalesce(max(seq), 0) FROM scheduler.scheduler_log WHERE tenant_id = $1", tenant_id
    )
    return end_seq


async def read_entry(connection: Connection, tenant_id: str, seq: int) -> EntryRow | None:
    """The entry at ``seq``, all ``ENTRY_COLUMNS``, None when there is none."""
    row = await connection.fetchrow(
        f"SELECT {', '.join(ENTRY_COLUMNS)} FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = $2",
        tenant_id,
        seq,
    )
    return tuple(row) if row is not None else None

"""SQL of the notary: the stored Merkle tree, checkpoints and batch snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import NamedTuple

from app.store import Connection
from app.store.reading import (
    ENTRIES,
    fetch_as,
    fetch_column,
    fetch_dict,
    fetch_tuples,
    fetch_value,
    turned,
)
from ledger.merkle import EMPTY_ROOT, HASH_BYTES
from ledger.merkle.tiles import TILE_WIDTH, TileTree
from ledger.verification.entry_check import EntryRow
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS, SnapshotRow

TileCoordinates = tuple[int, int]
"""(level, index) of one tile."""


class LockedTree(NamedTuple):
    """The stored tree of one tenant; ``checkpoint`` is the newest signed note, None before the first. Edited columns
    may hold any value."""

    tenant_id: str
    tree_size: int
    root_hash: str
    checkpoint: str | None


class GrownTree(NamedTuple):
    """A tree to store, with the checkpoint of its new size; None when there is nothing to store."""

    tenant_id: str
    tree: TileTree
    checkpoint: str | None


class LinkRow(NamedTuple):
    """The columns of an entry for the tree and the snapshots."""

    seq: int
    t_hlc: str
    chain_link: str
    job_id: str


class LastSnapshot(NamedTuple):
    """The newest snapshot of one tenant."""

    row: SnapshotRow
    head_seq: int
    """Head seq of the chain."""


_LOCK_TREES = """
SELECT tenant_id, tree_size, root_hash, checkpoint FROM scheduler.merkle_head
 WHERE tenant_id = ANY($1::text[]) ORDER BY tenant_id FOR UPDATE
"""
_LOCK_FREE_TREES = f"{_LOCK_TREES.rstrip()} SKIP LOCKED"
_SIGNED_TREES = """
  FROM scheduler.merkle_head
 WHERE tenant_id IS NOT NULL AND checkpoint IS NOT NULL AND tree_size >= 0
"""
CHECKPOINTS_AT_ONCE = 1000


async def begin_trees(connection: Connection, tenant_ids: Sequence[str]) -> None:
    """Create an empty tree for each tenant without one."""
    # Only for tenants without a tree: an insert waits for an uncommitted row of another session.
    await connection.execute(
        """
        INSERT INTO scheduler.merkle_head (tenant_id, tree_size, root_hash)
        SELECT tenant_id, 0, $2 FROM unnest($1::text[]) AS t(tenant_id)
         WHERE NOT EXISTS (SELECT FROM scheduler.merkle_head AS m WHERE m.tenant_id = t.tenant_id)
         ORDER BY tenant_id COLLATE "C" ON CONFLICT DO NOTHING
        """,
        tenant_ids,
        EMPTY_ROOT.hex(),
    )


async def lock_trees(connection: Connection, tenant_ids: Sequence[str], *, waits: bool) -> list[LockedTree]:
    """The trees of these tenants in tenant order, locked until the transaction ends. A tree that another session has
    locked is waited for if ``waits``, else skipped."""
    return await fetch_as(connection, LockedTree, _LOCK_TREES if waits else _LOCK_FREE_TREES, tenant_ids)


async def trees_there(connection: Connection, tenant_ids: Sequence[str]) -> set[str]:
    """The tenants that have a stored tree, locked or not."""
    return set(
        await fetch_column(
            connection, "SELECT tenant_id FROM scheduler.merkle_head WHERE tenant_id = ANY($1::text[])", tenant_ids
        )
    )


async def read_links(connection: Connection, tenant_id: str, from_seq: int, limit: int) -> list[LinkRow]:
    """Chained entries from ``from_seq`` on, in seq order."""
    return await fetch_as(
        connection,
        LinkRow,
        """
        SELECT seq, t_hlc, chain_link, job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq >= $2
         ORDER BY seq LIMIT $3
        """,
        tenant_id,
        from_seq,
        limit,
    )


async def read_link(connection: Connection, tenant_id: str, seq: int) -> str | None:
    """Chain link of the entry at ``seq``, None when there is none."""
    return await fetch_value(
        connection,
        str,
        "SELECT chain_link FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = $2",
        tenant_id,
        seq,
    )


async def read_left_link(connection: Connection, tenant_id: str) -> tuple[int, str] | None:
    """Seq and link of the last entry that a PRUNED entry may cover, as the next one names it; None if none left. Of the
    entries before, some may be there while they are removed."""
    row = await connection.fetchrow(
        """
        SELECT covered.seq, next.prev_chain_link
          FROM (SELECT scheduler.covered_to($1) AS seq) AS covered
          JOIN scheduler.scheduler_log AS next ON next.tenant_id = $1 AND next.seq = covered.seq + 1
         WHERE (SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1) BETWEEN 2 AND next.seq
        """,
        tenant_id,
    )
    return None if row is None else (row[0], row[1])


async def read_entries(connection: Connection, tenant_id: str, from_seq: int, limit: int) -> Sequence[EntryRow]:
    """Entries from ``from_seq`` up to the head, all ``ENTRY_COLUMNS``, in seq order. A row beyond the head is not in
    the chain."""
    return await fetch_tuples(
        connection,
        f"""
        {ENTRIES}
         WHERE tenant_id = $1 AND seq >= $2 AND seq <= (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1)
         ORDER BY seq LIMIT $3
        """,
        tenant_id,
        from_seq,
        limit,
    )


async def read_entries_of(
    connection: Connection, tenant_id: str, node_id: str, from_seq: int, to_seq: int, limit: int
) -> Sequence[EntryRow]:
    """Entries of this range by ``node_id`` that were not imported, as in ``read_entries``."""
    return await fetch_tuples(
        connection,
        f"""
        {ENTRIES}
         WHERE tenant_id = $1 AND hlc_node = $2 AND origin IS NULL AND seq BETWEEN $3 AND $4 ORDER BY seq LIMIT $5
        """,
        tenant_id,
        node_id,
        from_seq,
        to_seq,
        limit,
    )


async def read_tiles(
    connection: Connection, tenant_id: str, coordinates: Iterable[TileCoordinates]
) -> dict[TileCoordinates, bytes]:
    """Hashes of the tenant's stored tiles at ``coordinates``."""
    return (await read_tiles_of(connection, [(tenant_id, at) for at in coordinates])).get(tenant_id, {})


async def read_tiles_of(
    connection: Connection, wanted: Iterable[tuple[str, TileCoordinates]]
) -> dict[str, dict[TileCoordinates, bytes]]:
    """By tenant, the hashes of its stored tiles among ``wanted``."""
    asked = [(tenant_id, level, index) for tenant_id, (level, index) in wanted]
    found: dict[str, dict[TileCoordinates, bytes]] = {}
    for tenant_id, level, index, hashes in await connection.fetch(
        """
        SELECT w.tenant_id, w.level, w.tile_index, t.hashes
          FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS w(tenant_id, level, tile_index)
         CROSS JOIN LATERAL (SELECT hashes FROM scheduler.merkle_tile
                              WHERE tenant_id = w.tenant_id AND level = w.level AND tile_index = w.tile_index
                              LIMIT 1) AS t
        """,
        *turned(asked, 3),
    ):
        found.setdefault(tenant_id, {})[level, index] = hashes
    return found


async def read_leaf_hashes(connection: Connection, tenant_id: str, seqs: Iterable[int]) -> dict[int, bytes]:
    """By seq, the leaf hashes in the tenant's stored tree; leaves that it does not have are left out."""
    wanted = sorted(seqs)
    tiles = await read_tiles(connection, tenant_id, {(0, (seq - 1) // TILE_WIDTH) for seq in wanted})
    found = {}
    for seq in wanted:
        tile, at = divmod(seq - 1, TILE_WIDTH)
        if leaf := tiles.get((0, tile), b"")[at * HASH_BYTES : (at + 1) * HASH_BYTES]:
            found[seq] = leaf
    return found


async def store_trees(connection: Connection, grown: Sequence[GrownTree]) -> set[str]:
    """Write the changes of each tree: tiles, size, root and checkpoint.

    Returns:
        Tenants of which Postgres did not store all rows, without an error.
    """
    tiles = [(tree.tenant_id, *at, hashes.hex()) for tree in grown for at, hashes in tree.tree.changed.items()]
    heads = [(tree.tenant_id, tree.tree.size, tree.tree.root().hex(), tree.checkpoint) for tree in grown]
    unstored = Counter(tile[0] for tile in tiles)
    if tiles:
        # Only arrays of texts and bigints: for other types the driver queries the server, which takes longer than this.
        unstored -= Counter(
            await fetch_dict(
                connection,
                """
                WITH stored AS (
                    INSERT INTO scheduler.merkle_tile (tenant_id, level, tile_index, hashes)
                    SELECT tenant_id, level, tile_index, decode(hashes, 'hex')
                      FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[])
                           AS n(tenant_id, level, tile_index, hashes)
                        ON CONFLICT (tenant_id, level, tile_index) DO UPDATE SET hashes = excluded.hashes
                    RETURNING tenant_id
                )
                SELECT tenant_id, count(*) FROM stored GROUP BY tenant_id
                """,
                *turned(tiles, 4),
            )
        )
    missing = {tree.tenant_id for tree in grown}
    if heads:
        missing -= set(
            await fetch_column(
                connection,
                """
                UPDATE scheduler.merkle_head AS m
                   SET tree_size = n.tree_size, root_hash = n.root_hash, checkpoint = n.checkpoint, signed_at = now()
                  FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[])
                       AS n(tenant_id, tree_size, root_hash, checkpoint)
                 WHERE m.tenant_id = n.tenant_id
                RETURNING m.tenant_id
                """,
                *turned(heads, 4),
            )
        )
    return missing.union(unstored)


async def snapshot_ending_at(connection: Connection, tenant_id: str, to_seq: int) -> str | None:
    """The envelope of the snapshot that ends there."""
    return await fetch_value(
        connection,
        str,
        "SELECT dsse_envelope::text FROM scheduler.batch_snapshot WHERE tenant_id = $1 AND to_seq = $2",
        tenant_id,
        to_seq,
    )


async def last_snapshot(connection: Connection, tenant_id: str) -> LastSnapshot | None:
    """The newest snapshot, None before the first."""
    found = await connection.fetchrow(
        f"""
        SELECT {", ".join(SNAPSHOT_COLUMNS)},
               coalesce((SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1), 0)
          FROM scheduler.batch_snapshot WHERE tenant_id = $1 ORDER BY from_seq DESC LIMIT 1
        """,
        tenant_id,
    )
    return None if found is None else LastSnapshot(tuple(found)[:-1], found[-1])


async def insert_snapshots(connection: Connection, rows: Mapping[str, SnapshotRow]) -> dict[str, dict[str, object]]:
    """Add a snapshot of each tenant, ``SNAPSHOT_COLUMNS``, under the locks of their heads.

    Returns:
        By tenant the stored row with its id; none if its first entry is already covered.
    """
    # A session that holds the lock of one head must not block the notary for all others.
    await connection.execute("SET LOCAL lock_timeout = '1s'")
    inserted = await connection.fetch(
        f"""
        INSERT INTO scheduler.batch_snapshot (tenant_id, {", ".join(SNAPSHOT_COLUMNS)})
        SELECT tenant_id, {", ".join(SNAPSHOT_COLUMNS[:-1])}, {SNAPSHOT_COLUMNS[-1]}::json
          FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::bigint[],
                      $8::text[], $9::text[]) AS n(tenant_id, {", ".join(SNAPSHOT_COLUMNS)})
         ORDER BY tenant_id COLLATE "C"
            ON CONFLICT (tenant_id, from_seq) DO NOTHING
        RETURNING *
        """,
        *zip(*((tenant_id, *row) for tenant_id, row in rows.items()), strict=True),
    )
    # Last, because the appender waits for these locks: no longer than for the commit.
    await connection.execute(
        "SELECT 1 FROM scheduler.chain_heads WHERE tenant_id = ANY($1::text[]) ORDER BY tenant_id FOR UPDATE",
        list(rows),
    )
    return {row["tenant_id"]: dict(row) for row in inserted}


async def tree_size(connection: Connection, tenant_id: str) -> int:
    """Size in the tenant's stored tree, 0 when there is none."""
    size = await connection.fetchval("SELECT tree_size FROM scheduler.merkle_head WHERE tenant_id = $1", tenant_id)
    return size if isinstance(size, int) else 0


async def tree_sizes(connection: Connection) -> dict[str, int]:
    """Size of the tree of each tenant that has one with a checkpoint."""
    return await fetch_dict(connection, f"SELECT tenant_id, tree_size {_SIGNED_TREES}")


async def checkpoints(connection: Connection) -> AsyncIterator[tuple[str, int, str]]:
    """Tenant, size of its tree and newest checkpoint; the transaction is the caller's."""
    async for row in connection.cursor(
        f"SELECT tenant_id, tree_size, checkpoint {_SIGNED_TREES}", prefetch=CHECKPOINTS_AT_ONCE
    ):
        yield row["tenant_id"], row["tree_size"], row["checkpoint"]


async def tenants_behind(connection: Connection) -> dict[str, int]:
    """Head seq of each tenant whose tree, checkpoint or snapshots do not reach it."""
    return await fetch_dict(
        connection,
        """
        SELECT h.tenant_id, h.head_seq
          FROM scheduler.chain_heads h
          LEFT JOIN scheduler.merkle_head m USING (tenant_id)
          LEFT JOIN LATERAL (SELECT to_seq FROM scheduler.batch_snapshot s
                              WHERE s.tenant_id = h.tenant_id ORDER BY from_seq DESC LIMIT 1) s ON true
         WHERE h.tenant_id IS NOT NULL
           AND h.head_seq > least(CASE WHEN m.checkpoint IS NULL THEN 0 ELSE m.tree_size END, coalesce(s.to_seq, 0))
        """,
    )

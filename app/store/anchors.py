"""SQL of statements about checkpoints: cosignatures of external witnesses and RFC 3161 time stamps. Append only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from app.store import Connection
from app.store.reading import clamped_columns, fetch_as, fetch_column, fetch_one_as, fetch_tuples
from ledger.errors import SignatureError
from signing import checkpoint as checkpoints
from signing.anchors import ANCHORS_MAX, RFC_3161, WITNESS, StoredAnchor

ANCHORS_A_KIND_MAX = ANCHORS_MAX // 2
"""Witnesses, and authorities, whose statements one file carries."""


class NumberedAnchor(NamedTuple):
    """A statement, and its number in its table."""

    number: int
    said: StoredAnchor


_COLUMNS = clamped_columns(StoredAnchor, ("time",))
_COSIGNATURES = """(
SELECT id, tenant_id, 'witness' AS kind, witness AS by, note, tree_size AS size, cosigned_at AS time,
       ''::bytea AS response
  FROM scheduler.checkpoint_cosignature) AS said"""
_STATEMENTS = {
    WITNESS: _COSIGNATURES,
    RFC_3161: """(
SELECT id, tenant_id, 'rfc3161' AS kind, authority AS by, note, tree_size AS size, generated_at AS time, response
  FROM scheduler.checkpoint_timestamp) AS said""",
}
"""By kind, the relation of its statements with the columns of ``StoredAnchor``."""
_COSIGNED_SIZE = """coalesce((SELECT max(tree_size) FROM scheduler.checkpoint_cosignature
                  WHERE tenant_id = {tenant} AND witness = {witness}), 0)"""


async def insert_cosignature(
    connection: Connection, tenant_id: str, witness: str, tree_size: int, cosigned_at: datetime, note: str
) -> bool:
    """Add a cosignature; False if this witness has cosigned a larger tree before, or this tree at this time or
    later."""
    return bool(
        await connection.fetchval(
            """
            INSERT INTO scheduler.checkpoint_cosignature (tenant_id, witness, tree_size, cosigned_at, note)
            SELECT $1, $2, $3, $4, $5
             WHERE NOT EXISTS (SELECT FROM scheduler.checkpoint_cosignature
                                WHERE tenant_id = $1 AND witness = $2 AND (tree_size, cosigned_at) >= ($3, $4))
                ON CONFLICT DO NOTHING
            RETURNING true
            """,
            tenant_id,
            witness,
            tree_size,
            cosigned_at,
            note,
        )
    )


async def insert_timestamp(
    connection: Connection,
    *,
    tenant_id: str,
    authority: str,
    tree_size: int,
    generated_at: datetime,
    note: str,
    response: bytes,
) -> None:
    """Add a time stamp, unless another node of this ledger has one of that tree by that authority."""
    await connection.execute(
        """
        INSERT INTO scheduler.checkpoint_timestamp (tenant_id, authority, tree_size, generated_at, note, response)
        VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING
        """,
        tenant_id,
        authority,
        tree_size,
        generated_at,
        note,
        response,
    )


async def listed(
    kind: str, connection: Connection, tenant_id: str, below_number: int, limit: int
) -> list[NumberedAnchor]:
    """Up to ``limit`` statements of this kind, the newest first, from below ``below_number``."""
    return [
        NumberedAnchor(number, StoredAnchor(*said))
        for number, *said in await connection.fetch(
            f"""
            SELECT id, {_COLUMNS} FROM {_STATEMENTS[kind]}
             WHERE tenant_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3
            """,
            tenant_id,
            below_number,
            limit,
        )
    ]


async def cosignatures_of_size(
    connection: Connection, tenant_id: str, tree_size: int, witnesses: Sequence[str], limit: int
) -> list[StoredAnchor]:
    """Cosignatures of these witnesses on the checkpoint of that size, the newest first."""
    return await fetch_as(
        connection,
        StoredAnchor,
        f"""
        SELECT {_COLUMNS} FROM {_COSIGNATURES}
         WHERE tenant_id = $1 AND size = $2 AND by = ANY($3::text[]) ORDER BY id DESC LIMIT $4
        """,
        tenant_id,
        tree_size,
        witnesses,
        limit,
    )


async def newest_cosigned_sizes(
    connection: Connection, tenant_id: str, witnesses: Sequence[str], limit: int
) -> list[int]:
    """The largest sizes that any of these witnesses has cosigned, the largest first."""
    return await fetch_column(
        connection,
        """
        SELECT DISTINCT tree_size FROM scheduler.checkpoint_cosignature
         WHERE tenant_id = $1 AND witness = ANY($2::text[]) ORDER BY tree_size DESC LIMIT $3
        """,
        tenant_id,
        witnesses,
        limit,
    )


async def newest(
    connection: Connection, kind: str, tenant_id: str, limit: int | None, by: Sequence[str] | None = None
) -> list[StoredAnchor]:
    """The newest statement of each witness or authority, or of each in ``by``, up to ``limit``."""
    rows = _STATEMENTS[kind]
    return await fetch_as(
        connection,
        StoredAnchor,
        f"""
        {_each_of(rows)}
        SELECT one.* FROM each CROSS JOIN LATERAL (
               SELECT {_COLUMNS} FROM {rows} WHERE tenant_id = $1 AND said.by = each.name
                ORDER BY size DESC, time DESC LIMIT 1) AS one
         WHERE $2::text[] IS NULL OR each.name = ANY($2) ORDER BY by LIMIT $3
        """,
        tenant_id,
        by,
        limit,
    )


async def newest_unproven(connection: Connection, tenant_id: str, size_max: int) -> list[StoredAnchor]:
    """The newest statement of each witness and authority, of trees up to ``size_max``."""
    said = [row for kind in _STATEMENTS for row in await newest(connection, kind, tenant_id, ANCHORS_A_KIND_MAX)]
    return _unproven(said, size_max)


async def covering(connection: Connection, tenant_id: str, seqs: tuple[int, int], size_max: int) -> list[StoredAnchor]:
    """For each witness and authority, the oldest statement that covers the last of ``seqs``, else the newest that
    covers the first; none of a larger tree than ``size_max``."""
    said = [
        await fetch_as(connection, StoredAnchor, _covering(rows), tenant_id, *seqs, size_max, ANCHORS_A_KIND_MAX)
        for rows in _STATEMENTS.values()
    ]
    return _unproven([row for of_kind in said for row in of_kind], size_max)


def _each_of(rows: str) -> str:
    """A common table ``each`` of the names of witnesses or authorities with a statement about tenant $1. It reads a row
    of the index for each, however many statements there are."""
    return f"""
WITH RECURSIVE each(name) AS (
     SELECT min(by) FROM {rows} WHERE tenant_id = $1
      UNION ALL
     SELECT (SELECT min(by) FROM {rows} WHERE tenant_id = $1 AND said.by > each.name) FROM each WHERE name IS NOT NULL)
"""


def _covering(rows: str) -> str:
    """The query for one statement of each witness or authority: the oldest that covers entry $3, else the newest that
    covers at least $2, of trees up to $4."""
    of_one = f"SELECT {_COLUMNS} FROM {rows} WHERE tenant_id = $1 AND said.by = each.name"
    return f"""
{_each_of(rows)}
SELECT one.* FROM each CROSS JOIN LATERAL (
       SELECT *
         FROM (({of_one} AND size BETWEEN $3 AND $4 ORDER BY size, time LIMIT 1)
               UNION ALL
               ({of_one} AND size BETWEEN $2 AND $3 - 1 ORDER BY size DESC, time DESC LIMIT 1)) AS two
        ORDER BY size DESC LIMIT 1) AS one
 ORDER BY by LIMIT $5
"""


async def due_for_timestamp(
    connection: Connection, authority: str, interval: timedelta, limit: int
) -> list[tuple[str, str]]:
    """Tenant and newest checkpoint of tenants that grew since this authority's last stamp, which is at least
    ``interval`` old."""
    return await fetch_tuples(
        connection,
        """
        SELECT m.tenant_id, m.checkpoint
          FROM scheduler.merkle_head m
          LEFT JOIN LATERAL (SELECT tree_size, created_at FROM scheduler.checkpoint_timestamp t
                              WHERE t.tenant_id = m.tenant_id AND t.authority = $1
                              ORDER BY tree_size DESC LIMIT 1) t ON true
         WHERE m.checkpoint IS NOT NULL AND m.tree_size > coalesce(t.tree_size, 0)
           AND (t.created_at IS NULL OR t.created_at <= now() - $2::interval)
         ORDER BY t.created_at NULLS FIRST, m.tenant_id
         LIMIT $3
        """,
        authority,
        interval,
        limit,
    )


def _unproven(rows: Iterable[StoredAnchor], size_max: int) -> list[StoredAnchor]:
    """The statements in these rows. A statement without a checkpoint, or of one larger than ``size_max``, is skipped:
    an attacker who can write to the table may have put it there."""
    said = [each._replace(size=_size_of(each.note)) for each in rows]
    return [each for each in said if 1 <= each.size <= size_max]


def _size_of(text: str) -> int:
    """Size of the tree in a note; 0 if it is no note."""
    try:
        return checkpoints.read(text).size
    except SignatureError:
        return 0


class CosignedTree(NamedTuple):
    """A tenant with a checkpoint: its tree, and the largest that one witness has cosigned; 0 if none."""

    tenant_id: str
    tree_size: int
    cosigned_size: int


async def cosigned_trees(connection: Connection, witness: str, after_tenant: str, limit: int) -> list[CosignedTree]:
    """Up to ``limit`` tenants behind ``after_tenant``, in their order."""
    return await fetch_as(
        connection,
        CosignedTree,
        f"""
        SELECT m.tenant_id, m.tree_size, {_COSIGNED_SIZE.format(tenant="m.tenant_id", witness="$1")} AS cosigned_size
          FROM scheduler.merkle_head m
         WHERE m.checkpoint IS NOT NULL AND m.tenant_id > $2 ORDER BY m.tenant_id LIMIT $3
        """,
        witness,
        after_tenant,
        limit,
    )


class ToCosign(NamedTuple):
    """A tenant's newest checkpoint, None if there is none, and the largest size that one witness has cosigned."""

    checkpoint: str | None
    cosigned_size: int


async def to_cosign(connection: Connection, tenant_id: str, witness: str) -> ToCosign | None:
    """What a witness is to cosign next of this tenant; None if there is no such tenant."""
    return await fetch_one_as(
        connection,
        ToCosign,
        f"""
        SELECT checkpoint, {_COSIGNED_SIZE.format(tenant="$1", witness="$2")} AS cosigned_size
          FROM scheduler.merkle_head WHERE tenant_id = $1
        """,
        tenant_id,
        witness,
    )

"""SQL of statements about checkpoints: cosignatures of external witnesses and RFC 3161 time stamps. Append only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from app.store.reading import clamped_columns, fetch_as, fetch_column
from ledger.errors import SignatureError
from signing import checkpoint as checkpoints
from signing.anchors import ANCHORS_MAX, RFC_3161, WITNESS, StoredAnchor

if TYPE_CHECKING:
    from app.store import Connection


class CosignatureRow(NamedTuple):
    """One cosignature. ``witness`` is a verifier key; ``note`` is signed by the log and cosigned by this witness
    alone."""

    id: int
    tenant_id: str
    witness: str
    tree_size: int
    cosigned_at: datetime
    note: str
    created_at: datetime


class TimestampRow(NamedTuple):
    """One time stamp: the authority's whole ``response`` (TimeStampResp) on the bytes of ``note``."""

    id: int
    tenant_id: str
    authority: str
    tree_size: int
    generated_at: datetime
    note: str
    response: bytes
    created_at: datetime


class DueNote(NamedTuple):
    """A checkpoint that an authority is to stamp."""

    tenant_id: str
    checkpoint: str


_COSIGNATURE_COLUMNS = clamped_columns(CosignatureRow, ("cosigned_at", "created_at"))
_TIMESTAMP_COLUMNS = clamped_columns(TimestampRow, ("generated_at", "created_at"))


def _covering(table: str, who: str, columns: str, time: str) -> str:
    """The query for one statement of each ``who``: the oldest that covers entry $3, else the newest that covers at
    least $2, of trees up to $4. It reads few rows of the index, however many statements there are."""
    of_one = f"SELECT {columns} FROM scheduler.{table} AS said WHERE tenant_id = $1 AND said.{who} = by.name"
    return f"""
WITH RECURSIVE by(name) AS (
     SELECT min({who}) FROM scheduler.{table} WHERE tenant_id = $1
      UNION ALL
     SELECT (SELECT min({who}) FROM scheduler.{table} AS said WHERE tenant_id = $1 AND said.{who} > by.name)
       FROM by WHERE name IS NOT NULL)
SELECT one.* FROM by CROSS JOIN LATERAL (
       SELECT *
         FROM (({of_one} AND tree_size BETWEEN $3 AND $4 ORDER BY tree_size, {time} LIMIT 1)
               UNION ALL
               ({of_one} AND tree_size BETWEEN $2 AND $3 - 1 ORDER BY tree_size DESC, {time} DESC LIMIT 1)) AS two
        ORDER BY tree_size DESC LIMIT 1) AS one
 ORDER BY {who} LIMIT $5
"""


_COVERING_COSIGNATURES = _covering("checkpoint_cosignature", "witness", _COSIGNATURE_COLUMNS, "cosigned_at")
_COVERING_TIMESTAMPS = _covering("checkpoint_timestamp", "authority", _TIMESTAMP_COLUMNS, "generated_at")


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


async def list_cosignatures(connection: Connection, tenant_id: str, below_id: int, limit: int) -> list[CosignatureRow]:
    """Up to ``limit`` cosignatures, the newest first, from below ``below_id``."""
    return await fetch_as(
        connection,
        CosignatureRow,
        f"""
        SELECT {_COSIGNATURE_COLUMNS} FROM scheduler.checkpoint_cosignature
         WHERE tenant_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3
        """,
        tenant_id,
        below_id,
        limit,
    )


async def cosignatures_of_size(
    connection: Connection, tenant_id: str, tree_size: int, witnesses: Sequence[str], limit: int
) -> list[CosignatureRow]:
    """Cosignatures of these witnesses on the checkpoint of that size, the newest first."""
    return await fetch_as(
        connection,
        CosignatureRow,
        f"""
        SELECT {_COSIGNATURE_COLUMNS} FROM scheduler.checkpoint_cosignature
         WHERE tenant_id = $1 AND tree_size = $2 AND witness = ANY($3::text[]) ORDER BY id DESC LIMIT $4
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


async def newest_cosignatures(
    connection: Connection, tenant_id: str, witnesses: Sequence[str] | None = None, limit: int | None = None
) -> list[CosignatureRow]:
    """The newest cosignature of each of these witnesses, by default of all, up to ``limit``."""
    return await fetch_as(
        connection,
        CosignatureRow,
        f"""
        SELECT DISTINCT ON (witness) {_COSIGNATURE_COLUMNS} FROM scheduler.checkpoint_cosignature
         WHERE tenant_id = $1 AND ($2::text[] IS NULL OR witness = ANY($2))
         ORDER BY witness, tree_size DESC, cosigned_at DESC LIMIT $3
        """,
        tenant_id,
        witnesses,
        limit,
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


async def list_timestamps(connection: Connection, tenant_id: str, below_id: int, limit: int) -> list[TimestampRow]:
    """Up to ``limit`` time stamps, the newest first, from below ``below_id``."""
    return await fetch_as(
        connection,
        TimestampRow,
        f"""
        SELECT {_TIMESTAMP_COLUMNS} FROM scheduler.checkpoint_timestamp
         WHERE tenant_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3
        """,
        tenant_id,
        below_id,
        limit,
    )


async def newest_timestamps(connection: Connection, tenant_id: str, limit: int) -> list[TimestampRow]:
    """The newest time stamp by each authority, of up to ``limit``."""
    return await fetch_as(
        connection,
        TimestampRow,
        f"""
        SELECT DISTINCT ON (authority) {_TIMESTAMP_COLUMNS} FROM scheduler.checkpoint_timestamp
         WHERE tenant_id = $1 ORDER BY authority, tree_size DESC LIMIT $2
        """,
        tenant_id,
        limit,
    )


async def covering_cosignatures(
    connection: Connection, tenant_id: str, seqs: tuple[int, int], tree_size: int, limit: int
) -> list[CosignatureRow]:
    """For each of up to ``limit`` witnesses, the oldest cosignature that covers the last of ``seqs``, else the newest
    that covers the first; none of a larger tree than ``tree_size``."""
    return await fetch_as(connection, CosignatureRow, _COVERING_COSIGNATURES, tenant_id, *seqs, tree_size, limit)


async def covering_timestamps(
    connection: Connection, tenant_id: str, seqs: tuple[int, int], tree_size: int, limit: int
) -> list[TimestampRow]:
    """The same for time stamps and authorities."""
    return await fetch_as(connection, TimestampRow, _COVERING_TIMESTAMPS, tenant_id, *seqs, tree_size, limit)


async def due_for_timestamp(connection: Connection, authority: str, interval: timedelta, limit: int) -> list[DueNote]:
    """Newest checkpoints of tenants that grew since this authority's last stamp, which is at least ``interval`` old."""
    return await fetch_as(
        connection,
        DueNote,
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


ANCHORS_A_KIND_MAX = ANCHORS_MAX // 2
"""Witnesses, and authorities, whose statements one file carries."""


def anchors_in(cosigned: Iterable[CosignatureRow], stamped: Iterable[TimestampRow]) -> list[StoredAnchor]:
    """The statements in these rows."""
    witnessed = [StoredAnchor(WITNESS, row.witness, row.note, row.tree_size, row.cosigned_at) for row in cosigned]
    return witnessed + [
        StoredAnchor(RFC_3161, row.authority, row.note, row.tree_size, row.generated_at, row.response)
        for row in stamped
    ]


def unproven(cosigned: Iterable[CosignatureRow], stamped: Iterable[TimestampRow], size_max: int) -> list[StoredAnchor]:
    """The statements in these rows. A statement without a checkpoint, or of one larger than ``size_max``, is skipped:
    an attacker who can write to the table may have put it there."""
    said = [each._replace(size=_size_of(each.note)) for each in anchors_in(cosigned, stamped)]
    return [each for each in said if 1 <= each.size <= size_max]


def _size_of(text: str) -> int:
    """Size of the tree in a note; 0 if it is no note."""
    try:
        return checkpoints.read(text).size
    except SignatureError:
        return 0

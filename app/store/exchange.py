"""SQL about ledgers that exchange: how far each chain of a peer was imported, and the newest checkpoint seen of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.store.rows import like

if TYPE_CHECKING:
    from app.store import Connection

_POSITIONS = """
SELECT log_origin, note, tree_size, imported_seq FROM scheduler.exchange_positions WHERE tenant_id = $1
"""
_SEEN = """
INSERT INTO scheduler.exchange_positions AS p (log_origin, tenant_id, note, tree_size) VALUES ($2, $1, $3, $4)
    ON CONFLICT (tenant_id, log_origin) DO UPDATE
       SET note = excluded.note, tree_size = excluded.tree_size, updated_at = now()
     WHERE p.tree_size < excluded.tree_size
"""
_IMPORTED = """
UPDATE scheduler.exchange_positions SET imported_seq = $3, updated_at = now()
 WHERE tenant_id = $1 AND log_origin = $2 AND imported_seq < $3
"""
_HELD_OF = """
SELECT tenant_id, imported_seq FROM scheduler.exchange_positions
 WHERE log_origin = $1 || '/' || tenant_id AND tenant_id > $2 AND tenant_id LIKE ANY($4::text[])
 ORDER BY tenant_id LIMIT $3
"""
_TAKE_TURN = "SELECT pg_try_advisory_lock(hashtextextended('tallystick.exchange ' || $1, 0))"
_END_TURN = "SELECT pg_advisory_unlock(hashtextextended('tallystick.exchange ' || $1, 0))"


class Seen(NamedTuple):
    """The newest checkpoint seen of a peer's chain, and up to which seq that was imported."""

    note: str
    tree_size: int
    imported_seq: int


async def positions(connection: Connection, tenant_id: str) -> dict[str, Seen]:
    """What is known of the tenant's chains in other ledgers, by the origin that their checkpoints bear."""
    return {origin: Seen(*seen) for origin, *seen in await connection.fetch(_POSITIONS, tenant_id)}


async def saw(connection: Connection, tenant_id: str, log_origin: str, note: str, tree_size: int) -> None:
    """A newer checkpoint was seen, and proved to go on from the one before."""
    await connection.execute(_SEEN, tenant_id, log_origin, note, tree_size)


async def imported(connection: Connection, tenant_id: str, log_origin: str, seq: int) -> None:
    """All up to ``seq`` was imported."""
    await connection.execute(_IMPORTED, tenant_id, log_origin, seq)


async def held_of(
    connection: Connection, origin: str, after: str, limit: int, patterns: Sequence[str]
) -> list[tuple[str, int]]:
    """By tenant of these patterns above ``after``, up to which seq the chains of the ledger ``origin`` were imported
    here. Fewer than ``limit`` are the last."""
    return [tuple(row) for row in await connection.fetch(_HELD_OF, origin, after, limit, like(patterns))]


async def take_turn(connection: Connection, peer: str) -> bool:
    """Whether this session is the one of the ledger that asks ``peer`` now, until ``end_turn`` or its end."""
    return bool(await connection.fetchval(_TAKE_TURN, peer))


async def end_turn(connection: Connection, peer: str) -> None:
    """Leave ``peer`` to another session."""
    await connection.execute(_END_TURN, peer)

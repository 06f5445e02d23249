"""SQL of the heartbeat, the one row that tells how far behind a copy of the database is, and of whose copy it is."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.store import Connection

_BEAT = """
INSERT INTO scheduler.heartbeat (beat_at) VALUES (clock_timestamp())
    ON CONFLICT ("only") DO UPDATE SET beat_at = clock_timestamp()
RETURNING beat_at
"""


async def beat(connection: Connection) -> datetime:
    """Set the heartbeat to the primary's present time; returns that time."""
    beat_at: datetime = await connection.fetchval(_BEAT)
    return beat_at

"""How old a snapshot of the database is, by the primary's clock alone.

Every node that has replicas writes the primary's time into one row again and again, in a transaction like any
other. A snapshot, of whichever copy, that shows the beat of time b holds all that was committed before b. This node
knows when it sent its own newest beat, and what time the primary put on it, so it knows the primary's time at most::

    sent <= put on it           primary's time now <= own beat + (now - sent)
    age of a snapshot <= own beat + (now - sent) - b

Both beats are times of the primary and the rest is this node's monotonic clock, so no two clocks are compared. The
bound holds while the primary is away, and while other nodes write the newer beats.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import structlog

from app.runtime.database_faults import DATABASE_FAULTS
from app.store.node import beat
from app.store.reading import reading
from ledger.errors import DatabaseUnavailableError

if TYPE_CHECKING:
    from app.store.reading import Pool

INTERVAL_S = 0.25
"""Pause between two beats: an age is never known finer than this."""
BEAT_TIMEOUT_S = 2.0

log = structlog.get_logger()


class Heartbeat:
    """Writes the heartbeat and judges ages by it."""

    def __init__(self, primary: Pool) -> None:
        self._primary = primary
        self._own_beat_at: datetime | None = None
        self._sent_s = 0.0

    async def run(self) -> None:
        """Beat until cancelled, whatever becomes of the primary."""
        missed = False
        while True:
            try:
                await self.beat()
                missed = False
            except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
                if not missed:
                    log.warning("heartbeat_missed", error=str(error))
                missed = True
            await asyncio.sleep(INTERVAL_S)

    async def beat(self) -> None:
        """Write one beat.

        Raises:
            DatabaseUnavailableError, or one of ``DATABASE_FAULTS``: the primary does not take it.
        """
        sent_s = time.monotonic()
        async with reading(self._primary, timeout_s=BEAT_TIMEOUT_S) as connection:
            beat_at = await beat(connection)
        self._own_beat_at, self._sent_s = beat_at, sent_s

    def age_ms(self, beat_at: datetime | None) -> int | None:
        """How old a snapshot that shows ``beat_at`` is at most; None when that cannot be told.

        That is so before this node's first beat, and for a beat of the future: the primary's clock was set back.
        """
        if beat_at is None or self._own_beat_at is None:
            return None
        now = self._own_beat_at + timedelta(seconds=time.monotonic() - self._sent_s)
        age_s = (now - beat_at).total_seconds()
        return None if age_s < -INTERVAL_S else max(0, round(age_s * 1000))

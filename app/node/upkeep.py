"""What keeps the WAL folder of a node at work in order: its control file written now and then, segments and idempotency
keys that nobody needs any more removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

import asyncpg
import structlog

from app.node.start.procedure import StartedNode
from app.node.start.wal import to_its_end
from app.runtime.postgres import DATABASE_FAULTS
from app.store import idempotency
from app.write.pending.quarantine import Quarantine
from ledger.positions import Lsn, before
from wal import control as wal_control
from wal.group_commit import GroupCommit
from wal.truncation import remove_segments

HOURLY_S = 3600.0

log = structlog.get_logger()


class Upkeep:
    """The folder that ``started`` names; ``signed_lsn()`` is up to where all is signed."""

    def __init__(
        self,
        started: StartedNode,
        pool: asyncpg.Pool[asyncpg.Record],
        writer: GroupCommit,
        quarantine: Quarantine,
        signed_lsn: Callable[[], Lsn],
    ) -> None:
        self._started = started
        self._pool = pool
        self._writer = writer
        self._quarantine = quarantine
        self._signed_lsn = signed_lsn
        self.control_fault: str | None = None
        """Why the control file could not be written last, None while it can."""

    async def persist_control(self, interval: timedelta) -> None:
        """Write the control file every ``interval``. Where the disk does not take it, it lags until the next."""
        while True:
            await asyncio.sleep(interval.total_seconds())
            try:
                await to_its_end(self.store_control)
            except OSError as error:
                if self.control_fault is None:
                    log.warning("control_file_not_written", error=str(error))
                self.control_fault = f"the control file cannot be written beside the WAL: {error}"
            else:
                self.control_fault = None

    def store_control(self) -> None:
        """Write the control file; blocks, on any thread."""
        node = self._started.node
        # On a thread of its own while the positions rise: what is lower is read first. Safekeepers may have a batch,
        # and PostgreSQL its entries, before this disk does; the file tells of this disk.
        chained_lsn, committed_lsn, durable_lsn = node.chained.lsn, node.committed.lsn, node.durable.lsn
        committed_lsn = min(committed_lsn, durable_lsn)
        chained_lsn = min(chained_lsn, committed_lsn)
        reached = self._started.control._replace(
            highest_hlc=node.clock.last,
            durable_lsn=Lsn(durable_lsn),
            committed_lsn=Lsn(committed_lsn),
            chained_lsn=Lsn(chained_lsn),
            signed_lsn=Lsn(min(self.settled_lsn(), chained_lsn)),
        )
        wal_control.store(self._started.folder, reached)

    async def clean_up(self, retain: timedelta) -> None:
        """Remove WAL segments that nobody needs any more, and idempotency keys that are too old, for ever."""
        retain_s = retain.total_seconds()
        while True:
            await asyncio.sleep(min(HOURLY_S, max(retain_s, 1.0)))
            removed = await asyncio.to_thread(
                remove_segments,
                self._started.folder,
                self.settled_lsn(),
                retain_s,
                time.time(),
                self._writer.retire,
            )
            if removed:
                log.info("wal_segments_removed", segments=removed)
            try:
                async with self._pool.acquire() as connection:
                    await idempotency.forget_old(connection)
            except DATABASE_FAULTS as error:
                log.warning("clean_up_delayed", error=str(error))

    def settled_lsn(self) -> Lsn:
        """Up to here every record of the WAL is chained and signed: nobody needs it any more."""
        settled_lsn = min(self._signed_lsn(), self._started.node.chained.lsn)
        held_lsn = self._quarantine.keeps_from()
        return settled_lsn if held_lsn is None else min(settled_lsn, before(held_lsn))

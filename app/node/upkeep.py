"""Periodic work of a running node: it writes its control file, removes segments and idempotency keys that are no longer
needed, scrubs its log so that damage at rest is found while other copies are whole, and compares the wall clock with
that of PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from app.node.start.procedure import StartedNode
from app.node.start.wal import to_its_end
from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.state.wall_clock import WallClock, read_clocks
from app.store import idempotency
from app.store import node as node_store
from app.store.reading import Pool, reading, run_in
from app.write.pending.quarantine import Quarantine
from ledger.errors import DatabaseUnavailableError, WalCorruptError
from ledger.positions import Lsn, before
from wal import control as wal_control
from wal.group_commit import GroupCommit
from wal.scrub import LogCopy, Scrubber
from wal.segment import Segment
from wal.truncation import remove_segments

HOURLY_S = 3600.0


@dataclass(eq=False)
class Upkeep:
    """Upkeep of the folder of ``started``; every record up to ``signed_lsn()`` is signed."""

    started: StartedNode
    pool: Pool
    writer: GroupCommit
    quarantine: Quarantine
    signed_lsn: Callable[[], Lsn]
    control_fault: str | None = None
    """The error of the last write of the control file; None if it succeeded."""

    async def persist_control(self, interval: timedelta) -> None:
        """Write the control file every ``interval``. If a write fails, the file lags until the next."""
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
        node = self.started.node
        # The positions rise while this thread reads: the lower one is read first. Safekeepers may have a batch,
        # and PostgreSQL its entries, before this disk does; the file describes this disk.
        chained_lsn, committed_lsn, durable_lsn = node.chained.lsn, node.committed.lsn, node.durable.lsn
        committed_lsn = min(committed_lsn, durable_lsn)
        chained_lsn = min(chained_lsn, committed_lsn)
        reached = self.started.control._replace(
            highest_hlc=node.clock.last,
            durable_lsn=Lsn(durable_lsn),
            committed_lsn=Lsn(committed_lsn),
            chained_lsn=Lsn(chained_lsn),
            signed_lsn=Lsn(min(self.settled_lsn(), chained_lsn)),
        )
        wal_control.store(self.started.wal.folder, reached)

    async def clean_up(self, retain: timedelta) -> None:
        """Remove WAL segments that are no longer needed, and idempotency keys that are too old, for ever."""
        retain_s = retain.total_seconds()
        while True:
            await asyncio.sleep(min(HOURLY_S, max(retain_s, 1.0)))
            removed = await asyncio.to_thread(
                remove_segments,
                self.started.wal.folder,
                self.settled_lsn(),
                retain_s,
                time.time(),
                self.writer.retire,
            )
            if removed:
                log.info("wal_segments_removed", segments=removed)
            try:
                await run_in(self.pool.acquire(), idempotency.forget_old)
            except DATABASE_FAULTS as error:
                log.warning("clean_up_delayed", error=str(error))

    def settled_lsn(self) -> Lsn:
        """Every record of the WAL up to here is chained and signed, so no longer needed."""
        settled_lsn = min(self.signed_lsn(), self.started.node.chained.lsn)
        held_lsn = self.quarantine.keeps_from()
        return settled_lsn if held_lsn is None else min(settled_lsn, before(held_lsn))


# --- reading the log again ------------------------------------------------------------------------

CLOSE_TIMEOUT_S = 0.5
"""A stop waits no longer for a disk that does not answer."""
NAMED_MAX = 3
"""Damaged segments that ``/readyz`` names."""


class LogScrub:
    """Scrubs the log in ``folder``, the first of ``copies`` copies, in rounds of ``interval_s``.

    ``fault`` and ``ended_s`` may be asked from any thread.
    """

    def __init__(
        self, node_id: str, folder: Path, durable_lsn: Callable[[], Lsn], copies: int, interval_s: float
    ) -> None:
        self._node_id = node_id
        self._folder = folder
        self._damaged: dict[str, str] = {}
        """What is wrong, by the name of the segment."""
        self._scrubber = Scrubber(
            lambda: [LogCopy(node_id, folder, durable_lsn(), 0, copies)],
            interval_s,
            self._read,
            lambda event, facts: log.info(event, **facts),
        )
        self._thread = threading.Thread(target=self._scrubber.run, name="wal-scrub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Read no further."""
        self._scrubber.close()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def ended_s(self) -> float:
        """When the last full scrub ended, in seconds since 1970; 0 before the first."""
        return self._scrubber.ended_s.get(self._node_id, 0.0)

    def fault(self) -> str | None:
        """What is damaged, None where nothing is."""
        found = self.damaged()
        more = f" and {len(found) - NAMED_MAX} segments more" if len(found) > NAMED_MAX else ""
        return f"damaged at rest in {self._folder}: {'; '.join(found[:NAMED_MAX])}{more}" if found else None

    def damaged(self) -> list[str]:
        """The damaged segments that still exist, and what is wrong with each."""
        return [
            f"{name} {detail}"
            for name, detail in sorted(self._damaged.copy().items())
            if (self._folder / name).exists()
        ]

    def _read(self, copy: LogCopy, segment: Segment, error: WalCorruptError | None) -> None:
        if error is None:
            self._damaged.pop(segment.name, None)
        elif segment.path.exists():
            self._damaged[segment.name] = f"at byte {error.offset}: {error.reason}"
            log.error("wal_scrub_damage", segment=segment.name, offset=error.offset, reason=error.reason)


# --- the wall clock ---------------------------------------------------------------------------------

COMPARE_INTERVAL_S = 5.0


async def compare_clocks(wall: WallClock, pool: Pool) -> None:
    """Compare the wall clock with that of PostgreSQL, for ever. During an outage of PostgreSQL no leap is adopted."""
    while True:
        with suppress(DatabaseUnavailableError):
            async with reading(pool) as connection:
                wall.compare(read_clocks(), await node_store.database_ms(connection))
        wall.now_ms()
        await asyncio.sleep(COMPARE_INTERVAL_S)

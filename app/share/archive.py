"""The archive that a node fills: a step each interval, in a thread of its own, so that a place that hangs holds up
nothing else. ``pipeline.archiving.continuous`` does the work; its packages are in the extra ``archive``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from app.runtime.logs import log
from app.runtime.metrics import Metrics, Values
from app.runtime.settings.config import ArchiveSettings
from app.runtime.tasks import in_own_thread
from ledger.errors import ConfigurationError, LedgerError
from ledger.text import first_of
from objects.locked import ObjectLock
from objects.store import ArchiveStore
from signing.keys import Keyring, Signer

if TYPE_CHECKING:
    from pipeline.archiving.continuous import Archiver, Progress

PACKAGES: Final = ("adbc_driver_postgresql", "pyarrow", "pyiceberg")
STEP_SHARE: Final = 0.75
"""A step begins after this part of the interval, so that what is signed is archived within all of it."""
TURN_INTERVAL_S: Final = 5.0
"""How often a process without the turn asks for it, at the least: after the one that had it has ended, nothing is
archived for no longer than this."""
PAUSE_S_MIN: Final = 0.5
STUCK_S: Final = 60.0
"""A step that is overdue for longer, and for longer than the interval, is reported as one that does not end."""
TENANTS_NAMED_MAX: Final = 10
"""Tenants that ``/readyz`` names."""
LOOK_TIMEOUT_S: Final = 10.0
"""How long a request waits for the place to be read, if this node does not archive."""


def store_of(settings: ArchiveSettings) -> ArchiveStore | None:
    """The place that ``archive.url`` names, None if it is not set.

    Raises:
        ConfigurationError: the packages that an archive needs are not installed, or the settings name no place.
    """
    if settings.url is None:
        return None
    require_packages("archive.url")
    return ArchiveStore(settings.url, ObjectLock.parse(settings.lock))


def require_packages(what: str) -> None:
    """Raises ConfigurationError if the packages of archives, which ``what`` needs, are not installed."""
    if missing := [each for each in PACKAGES if importlib.util.find_spec(each) is None]:
        raise ConfigurationError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): pip install 'tallystick[archive]', "
            "or in a checkout make pipeline"
        )


def pause_s(progress: Progress, interval_s: float, took_s: float) -> float:
    """How long to wait after a step."""
    period_s = interval_s * STEP_SHARE
    return max(PAUSE_S_MIN, (period_s if progress.has_turn else min(period_s, TURN_INTERVAL_S)) - took_s)


class Archiving:
    """Fills the archive of one node's ledger. Belongs to one event loop."""

    def __init__(
        self,
        *,
        settings: ArchiveSettings,
        store: ArchiveStore,
        database_url: str,
        signer: Callable[[], Signer],
        keyring: Callable[[], Awaitable[Keyring]],
        metrics: Metrics,
    ) -> None:
        from pipeline.archiving.continuous import Archiver

        self.url, self.lock = store.url, settings.lock
        self._interval_s = settings.interval.total_seconds()
        self._signer, self._keyring, self._metrics = signer, keyring, metrics
        self._new_archiver: Callable[[], Archiver] = partial(Archiver, database_url, store)
        self._archiver = self._new_archiver()
        self._began_s = time.monotonic()
        self._last: Progress | None = None
        self._stepping: asyncio.Future[Progress] | None = None
        self._looking: asyncio.Future[Progress] | None = None

    async def run(self) -> None:
        """Archive what was signed, each interval, until this is cancelled; then the turn is given back, after the step
        that is under way."""
        try:
            while True:
                began_s = time.monotonic()
                progress = await self._step()
                self._take(progress)
                await asyncio.sleep(pause_s(progress, self._interval_s, time.monotonic() - began_s))
        finally:
            if self._stepping is None or self._stepping.done():
                self._archiver.close()
            else:
                self._stepping.add_done_callback(lambda _: self._archiver.close())

    async def _step(self) -> Progress:
        from pipeline.archiving.continuous import Progress

        try:
            keyring = await self._keyring()
        except LedgerError as error:
            return Progress(has_turn=False, error=str(error), at_s=time.monotonic())
        # The step continues when the node stops waiting for it.
        self._stepping = in_own_thread(partial(self._archiver.step, self._signer(), keyring), "archive")
        return await asyncio.shield(self._stepping)

    def _take(self, progress: Progress) -> None:
        before, self._last = self._last, progress
        if progress.failures:
            self._metrics.count("archive_failures", progress.failures)
        found = {each.tenant_id: each.error for each in progress.tenants if each.error is not None}
        known = {} if before is None else {each.tenant_id: each.error for each in before.tenants}
        for tenant_id, error in found.items():
            if known.get(tenant_id) != error:
                log.error("archive_tenant_failed", tenant_id=tenant_id, error=error)
        if progress.error is not None and (before is None or before.error != progress.error):
            log.error("archive_failed", url=self.url, error=progress.error)
        if progress.has_turn and (before is None or not before.has_turn):
            log.info("archive_turn_taken", url=self.url)

    async def progress(self) -> Progress:
        """How far the archive is: as of this node's last step; if another node archives, read from the place now."""
        from pipeline.archiving.continuous import Progress

        if self._last is not None and self._last.has_turn:
            return self._last
        if self._looking is None or self._looking.done():
            self._looking = in_own_thread(self._look, "archive-look")
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                return await asyncio.shield(self._looking)
        except TimeoutError:
            return Progress(has_turn=False, error=f"{self.url} does not answer", at_s=time.monotonic())

    def _look(self) -> Progress:
        from pipeline.archiving.continuous import Progress

        archiver = self._new_archiver()
        try:
            return archiver.look()
        except LedgerError as error:
            return Progress(has_turn=False, error=str(error), at_s=time.monotonic())
        finally:
            archiver.close()

    def table_metadata(self, version: int) -> str | None:
        """Where the metadata file of a version of the Iceberg table is; None of version 0."""
        return f"{self.url.rstrip('/')}/metadata/v{version}.metadata.json" if version else None

    def fault(self) -> str | None:
        """Why the archive is not filled, of all tenants or of some, as far as this node knows."""
        if self._overdue_s(time.monotonic()) > max(STUCK_S, self._interval_s):
            return f"the step of the archive {self.url} that is under way does not end: its place may not answer"
        if (last := self._last) is None or last.error is not None:
            return None if last is None else last.error
        failing = [each.tenant_id for each in last.tenants if each.error is not None]
        return f"tenants are not archived further: {first_of(failing, TENANTS_NAMED_MAX)}" if failing else None

    def _overdue_s(self, now_s: float) -> float:
        return now_s - (self._began_s if self._last is None else self._last.at_s) - self._interval_s

    def values(self) -> Values:
        """The metrics of the archive. The node that archives knows the lag; a step that is overdue counts as lag, as
        nothing that was signed since is archived."""
        now_s, last = time.monotonic(), self._last
        overdue_s = self._overdue_s(now_s)
        return {
            "archive_has_turn": last is not None and last.has_turn,
            "archive_lag_entries": 0 if last is None else last.lag_entries,
            "archive_lag_seconds": max(0.0, overdue_s, 0.0 if last is None else last.lag_s(now_s)),
        }

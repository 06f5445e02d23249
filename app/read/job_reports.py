"""Reports on the jobs of a tenant, made in the background from the figures of jobs and kept in memory.

    reports being made <= 1        reports kept <= KEPT_MAX, each for ``kept_s`` at most

A stop of the node cancels the one that is being made, and loses all.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.pages.job_report import ReportFigures, Source, spark_command, to_html
from app.read.consistency import Promise
from app.read.job_summary import bounds_of
from app.read.jobs import JobReader
from app.runtime.tasks import keep_newest
from app.store.jobs.figures import Wanted
from ledger.errors import NotFoundError, NotReadyError, ProblemError
from ledger.facts.problems import REPORT_TOO_LARGE
from ledger.machines.job_search import SEARCHED

ENTRIES_MAX: Final = 1_000_000
"""Jobs that follow from more entries are left to Spark."""
KEPT_MAX: Final = 16
KEPT_S: Final = 3600.0
MAKING_S: Final = 60.0
"""Longest that a report may take."""


class ReportPage(NamedTuple):
    """A report as one HTML file, on so many jobs."""

    html: str
    jobs: int


@dataclass(slots=True, eq=False)
class JobReport:
    """A report that was started; ``making`` has its page, or the error that it ended in."""

    report_id: str
    tenant_id: str
    started_ms: int
    making: asyncio.Task[ReportPage]


@dataclass(kw_only=True, eq=False)
class JobReports:
    """The reports of a node. Belongs to one event loop."""

    jobs: JobReader
    source: Callable[[], Source]
    kept_s: float = KEPT_S
    _kept: OrderedDict[str, JobReport] = field(default_factory=OrderedDict)

    def start(self, promise: Promise, limits: Mapping[Wanted, int], held: ExitStack) -> JobReport:
        """Start a report on the jobs of one tenant, in one table for each of ``limits``, of at most so many rows. What
        is ``held`` is released when it ends.

        Raises:
            NotReadyError: this node makes another one.
        """
        if any(not report.making.done() for report in self._kept.values()):
            raise NotReadyError("this node makes another report; try again when it is done, in seconds")
        report_id, tenant_id = secrets.token_hex(16), next(iter(limits)).tenant_id
        making = asyncio.create_task(self._make(promise, limits), name=f"report {report_id}")
        released = held.pop_all()
        making.add_done_callback(lambda _: released.close())
        # The exception is retrieved in any case: perhaps nobody asks for the report.
        making.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        report = JobReport(report_id, tenant_id, round(time.time() * 1000), making)
        keep_newest(self._kept, report_id, report, KEPT_MAX)
        asyncio.get_running_loop().call_later(self.kept_s, self._kept.pop, report_id, None)
        return report

    def find(self, report_id: str) -> JobReport:
        """The report of this id.

        Raises:
            NotFoundError: it is not kept here.
        """
        if (report := self._kept.get(report_id)) is None:
            raise NotFoundError(
                f"there is no report {report_id} on this node: it keeps its newest {KEPT_MAX} for an hour, and none "
                "over a restart; start the report again with POST /v1/reports"
            )
        return report

    async def close(self) -> None:
        """Cancel the report that is being made."""
        making = [report.making for report in self._kept.values() if not report.making.done()]
        for each in making:
            each.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    async def _make(self, promise: Promise, limits: Mapping[Wanted, int]) -> ReportPage:
        try:
            async with asyncio.timeout(MAKING_S):
                summaries, entries = await self.jobs.report(promise, limits, ENTRIES_MAX)
        except TimeoutError:
            raise NotReadyError(f"the report was not made within {MAKING_S:.0f} s; start it again") from None
        if not summaries:
            raise _too_large(limits)
        page = await asyncio.to_thread(to_html, ReportFigures(summaries, entries), self.source())
        return ReportPage(page, summaries[0]["all"]["jobs"])


def _too_large(limits: Mapping[Wanted, int]) -> ProblemError:
    first = next(iter(limits))
    fields = [wanted.by for wanted in limits if wanted.by.startswith(SEARCHED)]
    command = spark_command(first.tenant_id, *bounds_of(first), fields)
    return ProblemError(
        REPORT_TOO_LARGE,
        f"the jobs of this period follow from more than {ENTRIES_MAX:,} entries: shorten the period, or run {command}",
    )

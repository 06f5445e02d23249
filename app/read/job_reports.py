"""Reports on the jobs of a tenant, made in the background and kept in memory: of the figures of jobs, or by Spark where
the jobs follow from too many entries.

    reports being made <= 1, and one by Spark        reports kept <= KEPT_MAX, each for ``kept_s`` at most

The node that makes a report keeps it; its id names the node. A stop of the node cancels those that are being made, and
loses all.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from app.pages.job_report import ReportFigures, Source, spark_command, spark_options, to_html
from app.read.consistency import Promise
from app.read.job_summary import bounds_of
from app.read.jobs import JobReader
from app.read.spark_reports import ReportPage, SparkFailedError, SparkReports
from app.store.jobs.figures import Wanted
from ledger import names
from ledger.errors import NotFoundError, NotReadyError, ProblemError
from ledger.facts.problems import REPORT_ELSEWHERE, REPORT_TOO_LARGE
from ledger.machines.job_search import SEARCHED
from pipeline import is_installed

ENTRIES_MAX: Final = 1_000_000
"""Jobs that follow from more entries are left to Spark."""
KEPT_MAX: Final = 16
KEPT_S: Final = 3600.0
MAKING_S: Final = 60.0
"""Longest that a report of the figures may take."""


@dataclass(slots=True, eq=False)
class JobReport:
    """A report that was started; ``making`` has its page, or the error that it ended in."""

    report_id: str
    tenant_id: str
    started_ms: int
    making: asyncio.Task[ReportPage]
    progress: str | None = None
    """How far Spark is; None if Spark does not make it."""


@dataclass(kw_only=True, eq=False)
class JobReports:
    """The reports of a node. Belongs to one event loop."""

    jobs: JobReader
    source: Callable[[], Source]
    spark: SparkReports
    node_id: str
    kept_s: float = KEPT_S
    _kept: OrderedDict[str, JobReport] = field(default_factory=OrderedDict)

    def start(self, promise: Promise, limits: Mapping[Wanted, int], held: ExitStack, *, may_audit: bool) -> JobReport:
        """Start a report on the jobs of one tenant, in one table for each of ``limits``, of at most so many rows. What
        is ``held`` is released when it ends, or when Spark takes over, which makes one at a time for all callers. A
        report of Spark has what only a caller who ``may_audit`` may see.

        Raises:
            NotReadyError: this node makes another one.
        """
        if any(not report.making.done() and report.progress is None for report in self._kept.values()):
            raise NotReadyError("this node makes another report; try again when it is done, in seconds")
        report_id, tenant_id = f"{self.node_id}-{secrets.token_hex(16)}", next(iter(limits)).tenant_id
        released = held.pop_all()
        making = asyncio.create_task(self._make(report_id, promise, limits, released, may_audit=may_audit))
        making.add_done_callback(lambda _: released.close())
        # The exception is retrieved in any case: perhaps nobody asks for the report.
        making.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if len(self._kept) == KEPT_MAX:
            # No tenant's reports drop those of others: the oldest goes of the tenant that has most.
            made = [each for each in self._kept.values() if each.making.done()]
            have = Counter(each.tenant_id for each in made)
            del self._kept[max(made, key=lambda each: have[each.tenant_id]).report_id]
        self._kept[report_id] = JobReport(report_id, tenant_id, round(time.time() * 1000), making)
        drop = partial(asyncio.get_running_loop().call_later, self.kept_s, self._kept.pop, report_id, None)
        making.add_done_callback(lambda _: drop())
        return self._kept[report_id]

    def find(self, report_id: str) -> JobReport:
        """The report of this id.

        Raises:
            ProblemError: another node keeps it.
            NotFoundError: this node does not keep it.
        """
        if (report := self._kept.get(report_id)) is not None:
            return report
        if (named := re.fullmatch(names.REPORT_ID, report_id)) is not None and named[1] != self.node_id:
            raise ProblemError(
                REPORT_ELSEWHERE,
                f"node {named[1]} keeps the report, and node {self.node_id} was asked: ask again where a balancer "
                f"chooses the node, else ask {named[1]}",
            )
        raise NotFoundError(
            f"there is no report {report_id} on node {self.node_id}: it keeps its newest {KEPT_MAX} for an hour, and "
            "none over a restart; start the report again with POST /v1/reports"
        )

    async def close(self) -> None:
        """Cancel the reports that are being made."""
        making = [report.making for report in self._kept.values() if not report.making.done()]
        for each in making:
            each.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    async def _make(
        self,
        report_id: str,
        promise: Promise,
        limits: Mapping[Wanted, int],
        released: ExitStack,
        *,
        may_audit: bool,
    ) -> ReportPage:
        try:
            async with asyncio.timeout(MAKING_S):
                summaries, entries = await self.jobs.report(promise, limits, ENTRIES_MAX)
        except TimeoutError:
            raise NotReadyError(f"the report was not made within {MAKING_S:.0f} s; start it again") from None
        if not summaries:
            released.close()
            return await self._make_by_spark(report_id, limits, may_audit)
        page = await asyncio.to_thread(to_html, ReportFigures(summaries, entries), self.source())
        return ReportPage(page, summaries[0]["all"]["jobs"])

    async def _make_by_spark(self, report_id: str, limits: Mapping[Wanted, int], may_audit: bool) -> ReportPage:
        first = next(iter(limits))
        fields = [wanted.by for wanted in limits if wanted.by.startswith(SEARCHED)]
        options = spark_options(first.tenant_id, *bounds_of(first), fields)
        if not is_installed():
            raise _too_large(options, "Spark is not installed here (pip install 'tallystick[pipeline]')")
        if not may_audit:
            raise _too_large(options, "a report of Spark also says who read and did what, which needs the right audit")

        def advance(words: str) -> None:
            self._kept[report_id].progress = words

        advance("Spark starts")
        try:
            return await self.spark.make(options, advance)
        except SparkFailedError as error:
            raise _too_large(options, str(error)) from error


def _too_large(options: Sequence[str], why: str) -> ProblemError:
    return ProblemError(
        REPORT_TOO_LARGE,
        f"the jobs of this period follow from more than {ENTRIES_MAX:,} entries. {why}. Shorten the period, or run "
        f"{spark_command(options)}",
    )

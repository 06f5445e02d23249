"""Jobs of procrastinate 3 on record: call ``record("tenant")`` in programs that defer jobs and in workers.

A job is ``procrastinate.{id}``: created when it is deferred, accepted when a worker starts it, then completed, or
failed with the exception, also when it is aborted or its task is unknown. Tries stay one job, also after a worker was
killed. All this is read from procrastinate's structured log, whose level becomes INFO. A job that is cancelled before
it starts is logged nowhere: a periodic task passes such jobs to ``ended``. An error in here fails no job.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

from tallystick_client import Client, Job, JobEndedError

_ledger = cache(lambda pid: Client(patience_s=0.0, timeout_s=1.0, keep_forbidden=True))


class Recorder(logging.Handler):
    """Records the jobs of a database, which ``name`` tells from others of the tenant."""

    def __init__(self, tenant_id: str, name: str) -> None:
        super().__init__(logging.INFO)
        self.tenant_id, self.place = tenant_id, name

    def emit(self, record: logging.LogRecord) -> None:
        action, error = getattr(record, "action", ""), record.exc_info and record.exc_info[1]
        try:
            for each in getattr(record, "jobs", None) or [getattr(record, "job", None)]:
                if action in ("jobs_deferred", "start_job", "job_success", "job_error", "job_aborted"):
                    self._step(action, self._job(each["id"], each["task_name"]), error or action)
        except Exception:  # whatever it is, the work goes on
            self.handleError(record)

    def ended(self, jobs: Iterable[Any]) -> None:
        """Record the end of jobs of procrastinate that ended outside a worker, unless it is on record."""
        for each in jobs:
            self._step("cancelled", self._job(each.id, each.task_name), f"it is {each.status}")

    def _step(self, action: str, job: Job, error: BaseException | str) -> None:
        with suppress(JobEndedError):  # from before it was tried again by hand
            job.begin() if action in ("start_job", "job_success") else job.create()  # repeated, these add nothing
            if action == "job_success":
                job.complete()
            elif action not in ("jobs_deferred", "start_job"):
                job.fail(error)

    def _job(self, number: int, task: str) -> Job:
        ledger = _ledger(os.getpid())
        return ledger.job(self.tenant_id, {"task": task}, job_id=f"{self.place}.{number}", dc_id=self.place)


def record(tenant_id: str, name: str = "procrastinate") -> Recorder:
    """Put jobs on record from now on, in the ledger of ``TALLY_URL``, by way of the spool of ``TALLY_SPOOL``."""
    recorder, logger = Recorder(tenant_id, name), logging.getLogger("procrastinate")
    logger.addHandler(recorder)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    return recorder

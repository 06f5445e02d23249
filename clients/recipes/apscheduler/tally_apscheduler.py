"""Runs of APScheduler on record: ``record(scheduler, Client(spool="/var/spool/tally"), "nightly")``.

Each run is a job of its own, named by its job and its time, so that several schedulers that share a job store, or one
that was killed, put it on record once.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_MISSED,
    EVENT_JOB_SUBMITTED,
)

from tallystick_client import Client, Job, JobEndedError
from tallystick_client.jobs import job_id_of, unended


def record(scheduler: Any, ledger: Client, tenant_id: str) -> None:
    """Put every run of ``scheduler`` on record from now on. APScheduler logs errors of ours, which stop no run."""

    def run(event: Any, at: Any) -> Job:
        return ledger.job(
            tenant_id,
            {"job": event.job_id, "scheduled_at": at.isoformat()},
            job_id=job_id_of(f"{event.job_id}.{at:%Y-%m-%dT%H:%M:%S.%f}"),
        )

    def begun(event: Any) -> None:
        for at in event.scheduled_run_times:
            with suppress(JobEndedError):
                run(event, at).begin()

    def ended(event: Any) -> None:
        with suppress(JobEndedError):
            job = run(event, event.scheduled_run_time)
            job.begin()  # APScheduler may tell of a short run's end first; said twice is said once
            if event.code == EVENT_JOB_EXECUTED and (kind := unended(event.retval)):
                # Of a coroutine function only AsyncIOExecutor runs more than the call.
                job.fail(f"it returned {kind}, whose work has not ended")
            elif event.code == EVENT_JOB_EXECUTED:
                job.complete()
            else:
                job.fail(event.exception or "missed its time")

    def skipped(event: Any) -> None:
        for at in event.scheduled_run_times:
            with suppress(JobEndedError):
                job = run(event, at)
                job.create()
                job.fail("as many of it as may were running")

    scheduler.add_listener(begun, EVENT_JOB_SUBMITTED)
    scheduler.add_listener(ended, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_JOB_MISSED)
    scheduler.add_listener(skipped, EVENT_JOB_MAX_INSTANCES)

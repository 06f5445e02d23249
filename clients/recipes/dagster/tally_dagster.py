"""Runs of Dagster on record: put ``tally`` among the sensors of a code location.

A run is a job under its own id: created when it is queued, accepted when it starts, then completed, or failed with the
error of its first failed step, also when it is cancelled. Step retries are of one run; a re-execution is a run, and a
job, of its own. The sensor runs in the daemon and no run depends on it; of a run whose worker was killed it reads the
failure that run monitoring finds. A tick that cannot reach the ledger fails, and the next begins where that one did.
"""

import json
import os
from contextlib import suppress
from typing import Any

import dagster  # type: ignore[import-not-found]
from dagster import DagsterEventType

from tallystick_client import Client, JobEndedError

AT_ONCE = 50  # a tick of the daemon may take a minute
TYPES = (
    DagsterEventType.RUN_ENQUEUED,
    DagsterEventType.RUN_START,
    DagsterEventType.RUN_SUCCESS,
    DagsterEventType.RUN_FAILURE,
    DagsterEventType.RUN_CANCELED,
)


@dagster.sensor(minimum_interval_seconds=10, default_status=dagster.DefaultSensorStatus.RUNNING)  # type: ignore[untyped-decorator]
def tally(context: dagster.SensorEvaluationContext) -> None:
    """Record what happened to runs since the last tick; the first begins with the oldest run that Dagster knows."""
    cursors = json.loads(context.cursor or "{}")
    with Client(patience_s=0.0, timeout_s=5.0, keep_forbidden=True) as ledger:
        for kind in TYPES:
            found = context.instance.fetch_run_status_changes(
                kind, limit=AT_ONCE, cursor=cursors.get(kind.value), ascending=True
            )
            for each in found.records:
                with suppress(JobEndedError):
                    _record(ledger, kind, each.event_log_entry)
            cursors[kind.value] = found.cursor
            context.update_cursor(json.dumps(cursors))


def _record(ledger: Client, kind: DagsterEventType, entry: Any) -> None:
    job = ledger.job(os.environ["TALLY_TENANT"], {"job": entry.job_name}, job_id=entry.run_id, dc_id="dagster")
    waits = kind in (DagsterEventType.RUN_ENQUEUED, DagsterEventType.RUN_CANCELED, DagsterEventType.RUN_FAILURE)
    job.create() if waits else job.begin()  # a run may fail or be cancelled before it starts
    if kind == DagsterEventType.RUN_SUCCESS:
        job.complete()
    elif kind == DagsterEventType.RUN_FAILURE:
        step = getattr(entry.dagster_event.event_specific_data, "first_step_failure_event", None)
        error = step and step.event_specific_data.error
        job.fail((error and (error.cause or error).message.strip()) or entry.dagster_event.message or "failed")
    elif kind == DagsterEventType.RUN_CANCELED:
        job.fail("it was cancelled")

"""Workflows of Temporal on record: ``tally_temporal_export.py FILE...``, of files of its workflow history export.

A run of a workflow is a job under its run id: created, accepted when a worker took it, then completed with its times,
or failed with its error, also when it is cancelled, terminated or timed out. A run that is tried again or continued as
new is another job, whose spec names the run before it; one that is reset is the same job. Repeating adds nothing.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import EventType  # type: ignore[import-not-found]
from temporalio.api.export.v1 import WorkflowExecutions  # type: ignore[import-not-found]

from tallystick_client import Client, JobEndedError
from tallystick_client.jobs import job_id_of

PREFIX = "EVENT_TYPE_WORKFLOW_EXECUTION_"


def record(ledger: Client, tenant_id: str, events: Any) -> None:
    """Record a run of a workflow by its history."""
    first, last = events[0], events[-1]
    started = first.workflow_execution_started_event_attributes
    spec = {"workflow": started.workflow_type.name, "id": started.workflow_id, "queue": started.task_queue.name}
    if started.continued_execution_run_id:
        spec["continues"] = started.continued_execution_run_id
    job = ledger.job(tenant_id, spec, job_id=job_id_of(started.original_execution_run_id), dc_id="temporal")
    is_accepted = any(each.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED for each in events)
    with suppress(JobEndedError):  # the file was sent before
        job.begin() if is_accepted else job.create()
        end = EventType.Name(last.event_type).removeprefix(PREFIX)
        if end in ("COMPLETED", "CONTINUED_AS_NEW"):
            began, ended = (each.event_time.ToDatetime().isoformat() for each in (first, last))
            job.complete(end.lower(), {"began_at": began, "ended_at": ended})
        elif end == "FAILED":
            job.fail(_error(last.workflow_execution_failed_event_attributes.failure))
        elif end == "TERMINATED":
            job.fail(f"terminated: {last.workflow_execution_terminated_event_attributes.reason}")
        elif end in ("CANCELED", "TIMED_OUT"):
            job.fail(end.lower())


def _error(failure: Any) -> str:
    """The innermost cause of a failure."""
    while failure.HasField("cause"):
        failure = failure.cause
    kind = failure.application_failure_info.type
    return f"{kind}: {failure.message}" if kind else str(failure.message)


if __name__ == "__main__":
    with Client() as client:
        for name in sys.argv[1:]:
            for item in WorkflowExecutions.FromString(Path(name).read_bytes()).items:
                record(client, os.environ["TALLY_TENANT"], item.history.events)

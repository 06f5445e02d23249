"""Flow runs of Prefect 3 on record: ``@flow(**tally_prefect.hooks("tenant"))``.

A flow run is a job under its own id: created and accepted when it first runs, then completed, or failed with its error,
also when it crashes or is cancelled. Tries stay one job. A scheduled run that never ran is on no record. A run whose
process was killed fails if a worker or ``serve`` had started it; any other stays ACCEPTED. Prefect logs what fails in
here, and runs the flow all the same.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from tallystick_client import Client, Job, JobEndedError

ANSWER_S = 1.0
"""Longest that a step of a flow waits for the ledger."""
PREFIX = "Flow run encountered an exception: "


def hooks(tenant_id: str) -> dict[str, list[Callable[..., None]]]:
    """The hooks of a flow that put its runs on record, by the spool of ``TALLY_SPOOL`` if there is one."""

    def job(flow: Any, flow_run: Any) -> Job:
        return _ledger(os.getpid()).job(tenant_id, {"flow": flow.name}, job_id=str(flow_run.id), dc_id="prefect")

    def record_begin(flow: Any, flow_run: Any, state: Any) -> None:
        with suppress(JobEndedError):  # it was started again after its end
            job(flow, flow_run).begin()  # of a second try, this adds nothing

    def record_completion(flow: Any, flow_run: Any, state: Any) -> None:
        with suppress(JobEndedError):
            ended = job(flow, flow_run)
            ended.begin()
            ended.complete()

    def record_failure(flow: Any, flow_run: Any, state: Any) -> None:
        with suppress(JobEndedError):
            ended = job(flow, flow_run)
            ended.create()  # it may have failed before it ran
            ended.fail((state.message or f"it is {state.name}").removeprefix(PREFIX))

    return {
        "on_running": [record_begin],
        "on_completion": [record_completion],
        "on_failure": [record_failure],
        "on_crashed": [record_failure],
        "on_cancellation": [record_failure],
    }


@cache
def _ledger(pid: int) -> Client:
    return Client(patience_s=0.0, timeout_s=ANSWER_S, keep_forbidden=True)

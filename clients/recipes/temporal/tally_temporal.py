"""Activities of Temporal on record: ``Worker(..., interceptors=[tally_temporal.Recorded("tenant")])``.

An activity is a job, ``{run id}.{activity id}``: created and accepted when its first attempt begins, completed, or
failed with the error of its last attempt, or as cancelled. Attempts are one job. After a timeout or a killed worker the
next attempt goes on with it. Workflows: ``tally_temporal_export.py``. No error in here fails one or costs it over 6 s.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from temporalio import activity, exceptions, worker  # type: ignore[import-not-found]

from tallystick_client import Client, Job
from tallystick_client.jobs import job_id_of

_ledger = cache(lambda pid: Client(patience_s=0.0, timeout_s=1.0, keep_forbidden=True))


@dataclass
class Recorded(worker.Interceptor):  # type: ignore[misc]
    tenant_id: str

    def intercept_activity(self, next: Any) -> Any:
        inbound = _Activity(next)
        inbound.tenant_id = self.tenant_id
        return inbound


class _Activity(worker.ActivityInboundInterceptor):  # type: ignore[misc]
    async def execute_activity(self, input: Any) -> Any:
        info = activity.info()
        spec = {"activity": info.activity_type, "workflow": info.workflow_id, "queue": info.task_queue}
        job_id = job_id_of(f"{info.workflow_run_id or info.activity_run_id}.{info.activity_id}")
        named = {"tenant_id": self.tenant_id, "spec": spec, "job_id": job_id, "dc_id": "temporal"}
        await _record(named, Job.begin)  # repeated by a later attempt, it adds nothing
        try:
            result = await self.next.execute_activity(input)
        except (Exception, asyncio.CancelledError) as error:
            policy, is_final = info.retry_policy, getattr(error, "non_retryable", False)
            is_cancelled = exceptions.is_cancelled_exception(error)
            if policy is not None and not is_cancelled:
                kind = getattr(error, "type", None) or type(error).__name__
                is_final |= kind in (policy.non_retryable_error_types or ()) or info.attempt == policy.maximum_attempts
            if is_final or (is_cancelled and not activity.is_worker_shutdown()):
                await _record(named, Job.fail, "it was cancelled" if is_cancelled else error)
            raise
        await _record(named, Job.complete)
        return result


async def _record(named: dict[str, Any], step: Callable[..., object], *given: Any) -> None:
    try:
        await asyncio.wait_for(asyncio.to_thread(step, _ledger(os.getpid()).job(**named), *given), 3.0)
    except Exception as error:  # whatever it is, the activity goes on
        logging.getLogger(__name__).warning("an activity is not on record: %s", error)

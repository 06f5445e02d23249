"""Tasks of Celery on record: import this module in publishers and workers, and call ``record("tenant")``.

A task is a job under its own id: created when it is published, accepted when a worker begins it, then completed, or
failed, also when it is revoked, or unknown to the worker. A task that is tried again stays one job. Celery logs what
fails in here, and runs the task all the same. A ledger that is away costs a publisher a second a task, and with a spool
about two in all.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from celery import signals

from tallystick_client import Client, Job
from tallystick_client.jobs import job_id_of, unended

ANSWER_S = 1.0
"""Longest that publishing a task, or a step of a worker, waits for the ledger."""
_tenant = ""


def record(tenant_id: str) -> None:
    """Put tasks on record from now on, in the ledger of ``TALLY_URL``, by way of the spool of ``TALLY_SPOOL``."""
    global _tenant
    _tenant = tenant_id
    signals.before_task_publish.connect(_published, weak=False)
    signals.task_prerun.connect(_began, weak=False)
    signals.task_success.connect(_succeeded, weak=False)
    signals.task_failure.connect(_failed, weak=False)
    signals.task_revoked.connect(_revoked, weak=False)
    signals.task_unknown.connect(_unknown, weak=False)
    signals.task_internal_error.connect(_failed, weak=False)


@cache
def _ledger(pid: int) -> Client:
    """A client of this process: workers fork."""
    return Client(patience_s=0.0, timeout_s=ANSWER_S, keep_forbidden=True)


def _job(task_id: str, name: str) -> Job:
    job_id = job_id_of(task_id)
    spec = {"task": name} if job_id == task_id else {"task": name, "id": task_id}
    return _ledger(os.getpid()).job(_tenant, spec, job_id=job_id, dc_id="celery")


def _published(headers: dict[str, Any], **_: Any) -> None:
    _job(headers["id"], headers["task"]).create()


def _began(task_id: str, task: Any, **_: Any) -> None:
    if task.request.is_eager:
        _job(task_id, task.name).create()
    if not task.request.retries:
        _job(task_id, task.name).accept()


def _succeeded(sender: Any, result: Any = None, **_: Any) -> None:
    job = _job(sender.request.id, sender.name)
    if kind := unended(result):
        # Celery calls a coroutine function, and runs nothing of it.
        job.fail(f"it returned {kind}, whose work has not ended")
    else:
        job.complete()


def _failed(task_id: str, exception: BaseException, sender: Any, **_: Any) -> None:
    _job(task_id, sender.name).fail(exception)


def _revoked(request: Any, expired: bool, sender: Any, **_: Any) -> None:
    _job(request.id, sender.name).fail("it expired before it began" if expired else "it was revoked")


def _unknown(id: str, name: str, **_: Any) -> None:
    _job(id, name).fail("the worker does not know this task")

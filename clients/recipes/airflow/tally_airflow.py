"""Task instances of Airflow on record: put this file and ``tally_plugin.py`` into the plugins folder.

The environment of schedulers and workers names the ledger (``TALLY_URL``, ``TALLY_TOKEN``, ``TALLY_SPOOL``) and the
tenant (``TALLY_TENANT``). Each try of a task is a job. Nothing here stops a task: what goes wrong is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from pluggy import HookimplMarker
from sqlalchemy.orm import object_session

from tallystick_client import Client, Job, JobNotFoundError, TallystickError
from tallystick_client.facts import ENDED
from tallystick_client.jobs import job_id_of

hookimpl = HookimplMarker("airflow")
log = logging.getLogger(__name__)


@hookimpl
def on_task_instance_running(task_instance: Any) -> None:
    """A worker begins a try."""
    _record(task_instance, lambda job: job.begin())


@hookimpl
def on_task_instance_success(task_instance: Any) -> None:
    """It succeeded."""
    _record(task_instance, lambda job: job.complete())


@hookimpl
def on_task_instance_skipped(task_instance: Any) -> None:
    """It began, and skipped itself."""
    _record(task_instance, lambda job: job.complete("skipped"))


@hookimpl
def on_task_instance_failed(task_instance: Any, error: Any) -> None:
    """It failed, before it began as well; Airflow gives the exception, its text, or nothing."""

    def fail(job: Job) -> None:
        job.create()  # said twice is said once
        job.fail(error if error is not None else "failed")

    _record(task_instance, fail)


@hookimpl
def on_dag_run_success(dag_run: Any) -> None:
    """The run is over, here in the scheduler."""
    _end_what_did_not(dag_run)


@hookimpl
def on_dag_run_failed(dag_run: Any) -> None:
    """As ``on_dag_run_success``."""
    _end_what_did_not(dag_run)


def _end_what_did_not(dag_run: Any) -> None:
    """Record the end of each try whose worker could not, as it was killed."""
    # In the session of the scheduler: in one of its own, the query would commit what the scheduler has locked.
    for task in dag_run.get_task_instances(session=object_session(dag_run)):
        for number in range(1, task.try_number + 1):
            if number == task.try_number and task.state == "success":
                continue  # its worker has said so, or its spool will
            if not _record(task, _fail_unended, number):
                return  # the scheduler waits for one answer at most


def _fail_unended(job: Job) -> None:
    with suppress(JobNotFoundError):  # it never began
        if _ledger(os.getpid()).get_job(job.tenant_id, job.job_id)["status"] not in ENDED:
            job.fail("its worker ended without a word")


@cache
def _ledger(pid: int) -> Client:
    """A client of this process: Airflow forks for each task."""
    return Client(patience_s=0.0, timeout_s=5.0, keep_forbidden=True)


def _job(task: Any, number: int) -> Job:
    spec = {"dag": task.dag_id, "task": task.task_id, "run": task.run_id, "try": number, "map": task.map_index}
    job_id = job_id_of(".".join(str(part) for part in spec.values()))
    return _ledger(os.getpid()).job(os.environ["TALLY_TENANT"], spec, job_id=job_id, dc_id="airflow")


def _record(task: Any, say: Callable[[Job], object], number: int | None = None) -> bool:
    """Have ``say`` record something of a try, by default the present one; whether it could."""
    try:
        say(_job(task, task.try_number if number is None else number))
    except (TallystickError, OSError, ValueError, KeyError) as error:
        log.warning("task %s.%s is not on record: %s", task.dag_id, task.task_id, error)
        return False
    return True

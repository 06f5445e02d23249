"""Task instances of Airflow on record: put this file and ``tally_plugin.py`` into the plugins folder.

The environment of schedulers and workers names the ledger (``TALLY_URL``, ``TALLY_TOKEN``, ``TALLY_SPOOL``) and the
tenant (``TALLY_TENANT``). Each try of a task is a job. Nothing here stops a task: what goes wrong is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from pluggy import HookimplMarker

from tallystick_client import Client, Job, TallystickError
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
def on_task_instance_failed(task_instance: Any, error: Any) -> None:
    """It failed; Airflow gives the exception, its text, or nothing."""
    _record(task_instance, lambda job: job.fail(error if error is not None else "failed"))


@cache
def _ledger(pid: int) -> Client:
    """A client of this process: Airflow forks for each task."""
    return Client()


def _job(task: Any) -> Job:
    spec = {"dag": task.dag_id, "task": task.task_id, "run": task.run_id, "try": task.try_number, "map": task.map_index}
    job_id = job_id_of(".".join(str(part) for part in spec.values()))
    return _ledger(os.getpid()).job(os.environ["TALLY_TENANT"], spec, job_id=job_id, dc_id="airflow")


def _record(task: Any, say: Callable[[Job], object]) -> None:
    try:
        say(_job(task))
    except (TallystickError, OSError, ValueError, KeyError) as error:
        log.warning("task %s.%s is not on record: %s", task.dag_id, task.task_id, error)

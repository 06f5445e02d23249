"""The recipe of Airflow below a real scheduler: what it records of tasks that succeed, fail, skip and are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tallystick_client import Client, ProblemError
from tests.go_programs import free_port
from tests.waiting import until

pytestmark = [pytest.mark.torture, pytest.mark.foreign, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
VERSION = "3.3.2"
wait_for = partial(until, timeout_s=300, pause_s=2)
"""Waits for another process, of which each question takes some of the processor."""
DAG = """
import os, signal
from datetime import datetime
from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowSkipException

@dag(schedule=None, start_date=datetime(2026, 1, 1), catchup=False)
def recorded():
    @task
    def good(): ...
    @task
    def skips(): raise AirflowSkipException("nothing to do")
    @task
    def bad(): raise ValueError("no rows")
    @task
    def killed(): os.kill(os.getpid(), signal.SIGKILL)
    good(), skips(), bad(), killed()

recorded()
"""


@pytest.fixture(scope="module")
def airflow(installed: Callable[..., Path]) -> Path:
    """The programs of a virtual environment with Airflow and the client."""
    return installed(f"apache-airflow=={VERSION}")


@pytest.fixture
def scheduler(airflow: Path, ledger: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a scheduler that runs, with our plugin."""
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "recorded.py").write_text(DAG)
    shutil.copytree(ROOT / "clients" / "recipes" / "airflow", tmp_path / "plugins")
    port = free_port()
    environment = os.environ | {
        "PATH": f"{airflow}:{os.environ['PATH']}",
        "AIRFLOW_HOME": str(tmp_path / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(tmp_path / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": f"http://localhost:{port}",
        "AIRFLOW__API__WORKERS": "1",
        "TALLY_URL": ledger,
        "TALLY_TENANT": "airflow-real",
    }
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["airflow", "standalone"], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:

        def is_healthy() -> bool:
            try:
                health = httpx.get(f"http://localhost:{port}/api/v2/monitor/health").json()
            except (httpx.HTTPError, ValueError):
                return False
            return all(health[name]["status"] == "healthy" for name in ("scheduler", "dag_processor"))

        wait_for(is_healthy, f"the scheduler is healthy; its log is {tmp_path / 'log'}")
        yield environment
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_every_task_of_a_run_ends_on_record_whatever_became_of_its_worker(
    ledger: str, scheduler: dict[str, str]
) -> None:
    trigger = ["airflow", "dags", "trigger", "recorded", "-r", "r1"]
    wait_for(
        lambda: subprocess.run(trigger, env=scheduler, capture_output=True, check=False).returncode == 0, "triggered"
    )
    found: dict[str, tuple[str, str | None, Any]] = {}

    def are_ended() -> bool:
        with Client(ledger) as client:
            try:
                jobs = [*client.list_jobs("airflow-real")]
            except ProblemError:
                return False
        found.update((job["spec"]["task"], (job["status"], job["error"], job["result"])) for job in jobs)
        return len(found) == 4 and {status for status, *_ in found.values()} == {"COMPLETED", "FAILED"}

    wait_for(are_ended, "all four tasks have ended")
    assert found["good"][0] == "COMPLETED"
    assert (found["skips"][0], found["skips"][2]["final_status"]) == ("COMPLETED", "skipped")
    assert found["bad"][:2] == ("FAILED", "ValueError: no rows")
    assert found["killed"][:2] == ("FAILED", "its worker ended without a word")

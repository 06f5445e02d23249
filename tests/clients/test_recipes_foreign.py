"""Recipes below the real scheduler, each in a virtual environment of its own: with a ledger, and with none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from app.dev.embedded import EmbeddedPostgres
from tallystick_client import Client
from tests.clients.test_recipes import AWAY, FAILED, RECIPES, WHOLE, actions
from tests.conftest import fresh_database

pytestmark = [pytest.mark.torture, pytest.mark.foreign, pytest.mark.timeout(900)]

Install = Callable[..., Path]


def run_program(programs: Path, recipe: str, program: str, url: str, **environment: str) -> list[str]:
    """The lines that a Python program prints beside a recipe, with the ledger of ``url``."""
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(RECIPES / recipe), "TALLY_URL": url}
    done = subprocess.run(
        [programs / "python", "-c", program],
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def states(ledger: str, tenant: str) -> dict[str, tuple[str, str | None]]:
    """Status and error of each job."""
    with Client(ledger) as client:
        return {job["job_id"]: (job["status"], job["error"]) for job in client.list_jobs(tenant)}


PROCRASTINATE = """
import asyncio, os, sys
import procrastinate, tallystick_client, tally_procrastinate

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["DATABASE"]))
ran = []

@app.task(name="good")
def good(): ran.append("good")

@app.task(name="bad", retry=1)
def bad():
    ran.append("bad")
    raise ValueError("no rows")

@app.task(name="stopped")
async def stopped():
    ran.append("stopped")
    await app.job_manager.cancel_job_by_id_async(4, abort=True)
    await asyncio.Event().wait()

async def main():
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        recorder = tally_procrastinate.record("procrastinate")
        await good.defer_async()
        await bad.defer_async()
        await app.configure_task("unknown", allow_unknown=True).defer_async()
        await stopped.defer_async()
        await good.configure(queue="later").batch_defer_async({}, {})
        await app.job_manager.cancel_job_by_id_async(6)
        await app.run_worker_async(queues=["default"], wait=False, abort_job_polling_interval=0.1)
        try:
            recorder.ended(await app.job_manager.list_jobs_async(status="cancelled"))
        except tallystick_client.TallystickError:
            print("away")
        print(*ran)
asyncio.run(main())
"""


def test_jobs_of_procrastinate_are_on_record_from_deferring_to_their_end(
    ledger: str, postgres: EmbeddedPostgres, installed: Install
) -> None:
    programs = installed("procrastinate==3.10.0", "psycopg[binary]")
    for url in (ledger, AWAY):
        with fresh_database(postgres, "template0") as database:
            lines = run_program(programs, "procrastinate", PROCRASTINATE, url, DATABASE=database.superuser_url)
        assert sorted(lines[-1].split()) == ["bad", "bad", "good", "stopped"]
    assert states(ledger, "procrastinate") == {
        "procrastinate.1": ("COMPLETED", None),
        "procrastinate.2": ("FAILED", "ValueError: no rows"),
        "procrastinate.3": ("FAILED", "TaskNotFound: \n    Task cannot be imported.\n    "),
        "procrastinate.4": ("FAILED", "CancelledError: "),
        "procrastinate.5": ("SUBMITTED", None),
        "procrastinate.6": ("FAILED", "it is cancelled"),
    }
    found = actions(ledger, "procrastinate")
    assert found["procrastinate.1"] == WHOLE
    assert found["procrastinate.2"] == FAILED
    assert found["procrastinate.5"] == ["ENQUEUE"]


DBOS = """
import os
from dbos import DBOS, DBOSClient, SetWorkflowID
import tallystick_client, tally_dbos

database = os.environ["DATABASE"]
DBOS(config={"name": "recorded", "system_database_url": database, "run_admin_server": False})
ran = []

@DBOS.workflow()
def good(): ran.append("good")

@DBOS.workflow()
def bad():
    ran.append("bad")
    raise ValueError("no rows")

@DBOS.workflow()
def waits(): DBOS.recv("never", timeout_seconds=600)

DBOS.listen_queues(["open"])
DBOS.launch()
queue, closed = (DBOS.register_queue(name, polling_interval_sec=0.1) for name in ("open", "closed"))
watcher = tally_dbos.Watcher(DBOSClient(system_database_url=database), tallystick_client.Client(patience_s=0.0), "dbos")

def read():
    try:
        watcher.read()
    except tallystick_client.TallystickError:
        print("away")

def start(where, name, workflow):
    with SetWorkflowID(name):
        return where(workflow)

good_one = start(queue.enqueue, "good one/1", good)
bad_one = start(queue.enqueue, "bad", bad)
start(DBOS.start_workflow, "running", waits)
start(closed.enqueue, "later", good)
start(closed.enqueue, "dropped", good)
read()
good_one.get_result()
try:
    bad_one.get_result()
except ValueError:
    pass
DBOS.cancel_workflow("running")
DBOS.cancel_workflow("dropped")
read()
read()
watcher = tally_dbos.Watcher(watcher.workflows, watcher.ledger, "dbos")  # as after a restart
read()
print(*sorted(ran))
os._exit(0)
"""


def test_workflows_of_dbos_are_on_record_once_also_after_the_watcher_was_restarted(
    ledger: str, postgres: EmbeddedPostgres, installed: Install
) -> None:
    programs = installed("dbos==3.4.0")
    for url in (ledger, AWAY):
        with fresh_database(postgres, "template0") as database:
            lines = run_program(programs, "dbos", DBOS, url, DATABASE=database.superuser_url)
        assert lines[-1] == "bad good"
    named = {job.partition(".")[0]: state for job, state in states(ledger, "dbos").items()}
    assert named == {
        "good_one_1": ("COMPLETED", None),
        "bad": ("FAILED", "ValueError: no rows"),
        "running": ("FAILED", "it is CANCELLED"),
        "dropped": ("FAILED", "it is CANCELLED"),
        "later": ("SUBMITTED", None),
    }
    found = {job.partition(".")[0]: events for job, events in actions(ledger, "dbos").items()}
    assert (found["good_one_1"], found["bad"], found["running"]) == (WHOLE, FAILED, FAILED)
    assert (found["dropped"], found["later"]) == (["ENQUEUE", "FAIL"], ["ENQUEUE"])


DAGSTER = """
import os
import dagster, tally_dagster

@dagster.op
def works(): return 1

@dagster.op(retry_policy=dagster.RetryPolicy(max_retries=1))
def fails(): raise ValueError("no rows")

@dagster.job
def good(): works()

@dagster.job
def bad(): fails()

cursor = None

def tick():
    global cursor
    context = dagster.build_sensor_context(instance, cursor=cursor, repository_def=repository)
    try:
        cursor = tally_dagster.tally.evaluate_tick(context).cursor
    except Exception as error:
        print("away", type(error).__name__)

repository = dagster.Definitions(jobs=[good, bad], sensors=[tally_dagster.tally]).get_repository_def()
with dagster.DagsterInstance.ephemeral() as instance:
    queued = instance.create_run_for_job(good, run_id="00000000-0000-4000-8000-00000000000c")
    runs = [good.execute_in_process(instance=instance)]
    url = os.environ["TALLY_URL"]
    os.environ["TALLY_URL"] = "http://127.0.0.1:9"
    tick()
    os.environ["TALLY_URL"] = url
    tick()
    runs.append(bad.execute_in_process(instance=instance, raise_on_error=False))
    instance.report_run_canceling(queued)
    instance.report_run_canceled(queued)
    tick()
    tick()
    print(*(run.success for run in runs))
    print(queued.run_id, *(run.run_id for run in runs))
"""


def test_runs_of_dagster_are_on_record_and_a_tick_without_the_ledger_is_repeated(
    ledger: str, installed: Install
) -> None:
    programs = installed("dagster==1.13.29")
    for url in (AWAY, ledger):
        lines = run_program(programs, "dagster", DAGSTER, url, TALLY_TENANT="dagster")
        assert lines[-2] == "True False"
        assert sum("away" in line for line in lines) == (4 if url == AWAY else 1)
    cancelled, good, bad = lines[-1].split()
    assert states(ledger, "dagster") == {
        good: ("COMPLETED", None),
        bad: ("FAILED", "ValueError: no rows"),
        cancelled: ("FAILED", "it was cancelled"),
    }
    assert actions(ledger, "dagster") == {good: WHOLE, bad: FAILED, cancelled: ["ENQUEUE", "FAIL"]}

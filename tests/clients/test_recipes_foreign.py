"""Recipes below the real scheduler, each in a virtual environment of its own: with a ledger, and with none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.dev.embedded import EmbeddedPostgres
from tallystick_client import Client
from tests.clients.test_recipes import AWAY, FAILED, RECIPES, WHOLE, actions
from tests.conftest import fresh_database
from tests.go_programs import built, process

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
import shutil
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
import shutil
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


PREFECT = """
import asyncio, uuid
import prefect, tally_prefect
from prefect.client.schemas.objects import FlowRun
from prefect.runner._hook_runner import HookRunner
from prefect.states import Cancelling, Crashed

hooks = tally_prefect.hooks("prefect")
ran = []

@prefect.flow(name="good", **hooks)
def good(): ran.append("good")

@prefect.flow(name="bad", retries=1, **hooks)
def bad():
    ran.append("bad")
    raise ValueError("no rows")

@prefect.flow(name="interrupted", **hooks)
async def interrupted():
    ran.append("interrupted")
    raise KeyboardInterrupt

good()
for call in (bad, lambda: asyncio.run(interrupted())):
    try:
        call()
    except BaseException as error:
        print(type(error).__name__)

async def resolve(_): return prefect.flow(name="stopped", **hooks)(lambda: None)

async def stop():  # as the runner does for processes that it killed or lost
    runner = HookRunner(resolve_flow=resolve)
    await runner.run_cancellation_hooks(FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4()), Cancelling())
    lost = Crashed(message="Flow run process exited with non-zero status code -9.")
    await runner.run_crashed_hooks(FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4()), lost)
asyncio.run(stop())
print(*ran)
"""


def test_flow_runs_of_prefect_are_on_record(ledger: str, installed: Install, tmp_path: Path) -> None:
    programs = installed("prefect==3.9.1")
    home = {"PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    for url in (ledger, AWAY):
        lines = run_program(programs, "prefect", PREFECT, url, **home)
        assert lines[-3:] == ["ValueError", "KeyboardInterrupt", "good bad bad interrupted"]
    with Client(ledger) as client:
        jobs = [(job["spec"]["flow"], job["job_id"], job["error"]) for job in client.list_jobs("prefect")]
    found = actions(ledger, "prefect")
    assert sorted((flow, found[job], error) for flow, job, error in jobs) == [
        ("bad", FAILED, "ValueError: no rows"),
        ("good", WHOLE, None),
        ("interrupted", FAILED, "Execution was aborted by an interrupt signal."),
        ("stopped", ["ENQUEUE", "FAIL"], "Flow run process exited with non-zero status code -9."),
        ("stopped", ["ENQUEUE", "FAIL"], "it is Cancelling"),
    ]


TEMPORAL = """
import asyncio, dataclasses, sys
from datetime import timedelta
import tally_temporal
from temporalio import activity
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput

class Last(ActivityInboundInterceptor):  # as the worker's own
    def __init__(self): ...
    async def execute_activity(self, input): return await input.fn(*input.args)

inbound = tally_temporal.Recorded("temporal").intercept_activity(Last())
ran = []

async def good():
    ran.append("good")
    return 7

async def bad():
    ran.append("bad")
    raise ValueError("no rows")

async def refused():
    raise ApplicationError("no such thing", type="Missing", non_retryable=True)

begun = asyncio.Event()

async def waits():
    begun.set()
    await asyncio.Event().wait()

async def elsewhere(): activity.raise_complete_async()

def run(name, function, attempt=1, after=None):
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(
        environment.info, activity_id=name, activity_type=function.__name__, attempt=attempt,
        workflow_run_id="r1", retry_policy=RetryPolicy(maximum_attempts=2),
    )
    call = ExecuteActivityInput(function, (), None, {})

    async def main():
        running = asyncio.ensure_future(environment.run(inbound.execute_activity, call))
        if after:
            await begun.wait()
            begun.clear()
            after(environment)
        return await running
    try:
        return asyncio.run(main())
    except BaseException as error:
        return type(error).__name__

print(run("1", good), run("2", bad), run("2", bad, attempt=2), run("3", refused), run("4", bad))
print(run("5", waits, after=ActivityEnvironment.cancel), run("6", elsewhere))
print(*ran)
"""


def test_activities_of_temporal_are_on_record_as_one_job_for_all_attempts(ledger: str, installed: Install) -> None:
    programs = installed("temporalio==1.35.0")
    for url in (ledger, AWAY, "no address"):
        lines = run_program(programs, "temporal", TEMPORAL, url)
        assert lines == [
            "7 ValueError ValueError ApplicationError ValueError",
            "CancelledError _CompleteAsyncError",
            "good bad bad bad",
        ]
    assert states(ledger, "temporal") == {
        "r1.1": ("COMPLETED", None),
        "r1.2": ("FAILED", "ValueError: no rows"),
        "r1.3": ("FAILED", "ApplicationError: Missing: no such thing"),
        "r1.4": ("ACCEPTED", None),
        "r1.5": ("FAILED", "it was cancelled"),
        "r1.6": ("ACCEPTED", None),
    }
    found = actions(ledger, "temporal")
    assert (found["r1.1"], found["r1.2"]) == (WHOLE, FAILED)


EXPORT = """
import sys
from temporalio.api.enums.v1 import EventType
from temporalio.api.export.v1 import WorkflowExecutions

exported = WorkflowExecutions()

def history(run, ends):
    events = exported.items.add().history.events
    first = events.add(event_type=EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED)
    first.event_time.FromSeconds(1_000)
    started = first.workflow_execution_started_event_attributes
    started.workflow_type.name, started.workflow_id, started.original_execution_run_id = "Order", "order/1", run
    if ends == "NONE":
        return None
    events.add(event_type=EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED)
    last = events.add(event_type=EventType.Value(f"EVENT_TYPE_WORKFLOW_EXECUTION_{ends}"))
    last.event_time.FromSeconds(1_007)
    return last

history("done", "COMPLETED")
failure = history("failed", "FAILED").workflow_execution_failed_event_attributes.failure
failure.message, failure.cause.message = "Activity task failed", "no rows"
failure.cause.application_failure_info.type = "ValueError"
history("ended", "TERMINATED").workflow_execution_terminated_event_attributes.reason = "wrong order"
history("cancelled", "CANCELED")
history("late", "TIMED_OUT")
history("continued", "CONTINUED_AS_NEW")
history("open", "NONE")
open(sys.argv[-1], "wb").write(exported.SerializeToString())
"""


def test_an_export_of_temporals_histories_is_on_record_once(ledger: str, installed: Install, tmp_path: Path) -> None:
    programs = installed("temporalio==1.35.0")
    export = tmp_path / "export.proto"
    subprocess.run([programs / "python", "-c", EXPORT, export], check=True)
    script = RECIPES / "temporal" / "tally_temporal_export.py"
    for _ in range(2):
        environment = os.environ | {"TALLY_URL": ledger, "TALLY_TENANT": "temporal-export"}
        subprocess.run([programs / "python", script, export], env=environment, check=True)
    assert states(ledger, "temporal-export") == {
        "done": ("COMPLETED", None),
        "failed": ("FAILED", "ValueError: no rows"),
        "ended": ("FAILED", "terminated: wrong order"),
        "cancelled": ("FAILED", "canceled"),
        "late": ("FAILED", "timed_out"),
        "continued": ("COMPLETED", None),
        "open": ("SUBMITTED", None),
    }
    found = actions(ledger, "temporal-export")
    assert (found["done"], found["failed"], found["open"]) == (WHOLE, FAILED, ["ENQUEUE"])


TEMPORAL_SERVER = """
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.temporal.io/server/temporaltest"
)

func main() {
	server := temporaltest.NewServer()
	fmt.Println("ready:", server.GetFrontendHostPort(), server.GetDefaultNamespace())
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM)
	<-ended
}
"""
TEMPORAL_FILES = {
    "main.go": TEMPORAL_SERVER,
    "go.mod": "module temporal\n\ngo 1.26\n\nrequire go.temporal.io/server v1.32.0\n",
}
ORDERS = """
import asyncio, json, os, subprocess, sys
from datetime import timedelta
from temporalio import activity, workflow
from temporalio.api.export.v1 import WorkflowExecutions
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.worker import Worker
import tally_temporal

@activity.defn
async def act(do: str) -> str:
    if do == "bad":
        raise ValueError("no rows")
    while do in ("cancelled", "terminated") or (do == "killed" and activity.info().attempt == 1):
        activity.heartbeat()
        await asyncio.sleep(0.1)
    return do

@workflow.defn(name="Order", sandboxed=False)
class Order:
    @workflow.run
    async def run(self, do: str) -> str:
        return await workflow.execute_activity(
            act, do, start_to_close_timeout=timedelta(minutes=5), heartbeat_timeout=timedelta(seconds=2),
            retry_policy=RetryPolicy(maximum_attempts=2, initial_interval=timedelta(milliseconds=100)),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )

async def work(client):
    recorded = tally_temporal.Recorded("temporal-real")
    await Worker(client, task_queue="q", workflows=[Order], activities=[act], interceptors=[recorded]).run()

async def drive(client):
    worker = subprocess.Popen([*sys.orig_argv, "work"])
    orders = {
        do: await client.start_workflow("Order", do, id=f"order/{do}", task_queue="q")
        for do in ("good", "bad", "cancelled", "terminated", "killed")
    }

    async def outcome(do):
        try:
            return await orders[do].result()
        except WorkflowFailureError as error:
            return type(error.cause).__name__

    async def begun(do):
        while True:
            pending = (await orders[do].describe()).raw_description.pending_activities
            if pending and pending[0].last_heartbeat_time.seconds:
                return
            await asyncio.sleep(0.1)

    ended = [await outcome("good"), await outcome("bad")]
    await begun("cancelled")
    await orders["cancelled"].cancel()
    ended.append(await outcome("cancelled"))
    await begun("terminated")
    await begun("killed")
    worker.kill()
    await orders["terminated"].terminate(reason="wrong order")
    worker = subprocess.Popen([*sys.orig_argv, "work"])
    ended += [await outcome("terminated"), await outcome("killed")]
    worker.kill()
    export = WorkflowExecutions()
    for order in orders.values():
        export.items.add().history.events.extend((await order.fetch_history()).events)
    with open(os.environ["EXPORT"], "wb") as file:
        file.write(export.SerializeToString())
    print(*ended)
    print(json.dumps({do: order.first_execution_run_id for do, order in orders.items()}))

async def main():
    client = await Client.connect(os.environ["TEMPORAL"], namespace=os.environ["NAMESPACE"])
    await (work if sys.argv[-1] == "work" else drive)(client)
asyncio.run(main())
"""


@pytest.fixture
def temporal(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server of Temporal with a database in memory: how a client finds it."""
    program = built("temporal", ("go", "mod", "tidy"), ("go", "build", "-o", "temporal", "."), files=TEMPORAL_FILES)
    log = tmp_path / "log"
    with process(program, is_ready=lambda: "ready: " in log.read_text(), log=log):
        address, namespace = log.read_text().partition("ready: ")[2].split()[:2]
        yield {"TEMPORAL": address, "NAMESPACE": namespace, "EXPORT": str(tmp_path / "export.proto")}


def test_orders_of_a_server_of_temporal_are_on_record_whatever_became_of_their_worker(
    ledger: str, installed: Install, temporal: dict[str, str]
) -> None:
    programs = installed("temporalio==1.35.0")
    for url in (AWAY, ledger):
        *_, ended, runs = run_program(programs, "temporal", ORDERS, url, **temporal)
        assert ended == "good ActivityError CancelledError TerminatedError killed"
    run = json.loads(runs)
    of_activities = {
        "good": ("COMPLETED", None),
        "bad": ("FAILED", "ValueError: no rows"),
        "cancelled": ("FAILED", "it was cancelled"),
        "terminated": ("ACCEPTED", None),
        "killed": ("COMPLETED", None),
    }
    assert states(ledger, "temporal-real") == {f"{run[do]}.1": state for do, state in of_activities.items()}
    found = actions(ledger, "temporal-real")
    assert (found[f"{run['killed']}.1"], found[f"{run['bad']}.1"]) == (WHOLE, FAILED)
    script = RECIPES / "temporal" / "tally_temporal_export.py"
    environment = os.environ | {"TALLY_URL": ledger, "TALLY_TENANT": "temporal-orders"}
    for _ in range(2):
        subprocess.run([programs / "python", script, temporal["EXPORT"]], env=environment, check=True)
    of_orders = of_activities | {
        "cancelled": ("FAILED", "canceled"),
        "terminated": ("FAILED", "terminated: wrong order"),
    }
    assert states(ledger, "temporal-orders") == {run[do]: state for do, state in of_orders.items()}
    assert set(map(tuple, actions(ledger, "temporal-orders").values())) == {tuple(WHOLE), tuple(FAILED)}


RIVER = """
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"

	"recorded/tally"
)

type Args struct{ Do string }

func (Args) Kind() string { return "recorded" }

type Worker struct{ river.WorkerDefaults[Args] }

func (*Worker) NextRetry(*river.Job[Args]) time.Time { return time.Now() }

func (*Worker) Work(ctx context.Context, job *river.Job[Args]) error {
	switch job.Args.Do {
	case "fail":
		return errors.New("no rows")
	case "cancel":
		return river.JobCancel(errors.New("not wanted"))
	case "panic":
		panic("lost")
	case "wait":
		river.ClientFromContext[pgx.Tx](ctx).JobCancel(ctx, job.ID)
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	ctx := context.Background()
	pool := must(pgxpool.New(ctx, os.Getenv("DATABASE")))
	migrator := must(rivermigrate.New(riverpgxv5.New(pool), nil))
	must(migrator.Migrate(ctx, rivermigrate.DirectionUp, nil))
	workers := river.NewWorkers()
	river.AddWorker(workers, &Worker{})
	client := must(river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{&tally.Recorder{}},
		Queues:  map[string]river.QueueConfig{"default": {MaxWorkers: 4}},
		Workers: workers,
	}))
	ended, stop := client.Subscribe(river.EventKindJobCompleted, river.EventKindJobFailed, river.EventKindJobCancelled)
	defer stop()
	must(client.Insert(ctx, Args{"later"}, &river.InsertOpts{Queue: "later"}))
	for _, do := range []string{"good", "fail", "cancel", "panic", "wait"} {
		attempts := map[string]int{"fail": 2, "cancel": 2, "wait": 2}[do]
		must(client.Insert(ctx, Args{do}, &river.InsertOpts{MaxAttempts: max(attempts, 1)}))
	}
	if err := client.Start(ctx); err != nil {
		panic(err)
	}
	for range 6 {
		<-ended
	}
	fmt.Println("ended")
	client.Stop(ctx)
}
"""


def test_jobs_of_river_are_on_record_as_one_job_for_all_attempts(
    ledger: str, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    shutil.copytree(RECIPES / "river", tmp_path / "tally")
    (tmp_path / "main.go").write_text(RIVER)

    def go(*arguments: str, **environment: str) -> str:
        command = ["go", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    go("mod", "init", "recorded")
    for module in ("", "/riverdriver/riverpgxv5"):
        go("get", f"github.com/riverqueue/river{module}@v0.51.2")
    go("mod", "tidy")
    go("vet", "./...")
    for url in (ledger, AWAY):
        with fresh_database(postgres, "template0") as database:
            environment = {"DATABASE": database.superuser_url, "TALLY_URL": url, "TALLY_TENANT": "river"}
            assert go("run", ".", **environment).endswith("ended\n")
    assert states(ledger, "river") == {
        "river.1": ("SUBMITTED", None),
        "river.2": ("COMPLETED", None),
        "river.3": ("FAILED", "no rows"),
        "river.4": ("FAILED", "JobCancelError: not wanted"),
        "river.5": ("FAILED", "it panicked"),
        "river.6": ("FAILED", "context canceled"),
    }
    found = actions(ledger, "river")
    assert (found["river.2"], found["river.3"], found["river.6"]) == (WHOLE, FAILED, FAILED)

"""The recipes, each as it is, with the real library, shell or protocol that it is for."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import kubernetes_validate
import pluggy
import pytest
import sqlalchemy
import yaml  # type: ignore[import-untyped]
from apscheduler.schedulers.background import BackgroundScheduler
from celery import Celery, signals
from celery.contrib.testing.worker import start_worker
from celery.utils.dispatch import Signal

from cli.run import flush_spool as flush
from tallystick_client import Client, InvalidError, TallystickError
from tests.clients.way import problem, way_to
from tests.tally import bare_environment

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "clients" / "recipes"
AWAY = "http://127.0.0.1:9"
DONE_WITHIN_S = 60.0
WHOLE = ["ENQUEUE", "DEQUEUE", "COMPLETE"]
FAILED = ["ENQUEUE", "DEQUEUE", "FAIL"]


def recipe(name: str) -> ModuleType:
    """The module of a recipe."""
    path = RECIPES / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def actions(ledger: str, tenant: str) -> dict[str, list[str]]:
    """What is on record of each job of a tenant."""
    with Client(ledger) as client:
        jobs = [job["job_id"] for job in client.list_jobs(tenant)]
        return {job: [event["action"] for event in client.list_events(tenant, job)] for job in jobs}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, ledger: str) -> None:
    """The environment names the ledger."""
    monkeypatch.setenv("TALLY_URL", ledger)


# --- cron and shell -----------------------------------------------------------------------------------


def test_the_crontab_runs_jobs_whatever_the_ledger_does_and_sends_them_later(ledger: str, tmp_path: Path) -> None:
    lines = (RECIPES / "cron" / "crontab").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z_]+=", line))
    commands = [re.sub(r"^(\S+\s+){5}", "", line) for line in lines if re.match(r"[0-9*]", line)]
    assert set(settings) == {"TALLY_URL", "TALLY_SPOOL", "PATH"}
    backup, reports, send = commands
    (tmp_path / "backup.sh").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "backup.sh").chmod(0o700)
    (tmp_path / "Makefile").write_text("hourly:\n\ttrue\n")
    spool = tmp_path / settings["TALLY_SPOOL"]

    def run(command: str, url: str) -> subprocess.CompletedProcess[str]:
        here = command.replace("/usr/local/bin/", f"{tmp_path}/").replace("/srv/reports", str(tmp_path))
        environment = bare_environment() | settings | {"TALLY_URL": url}
        environment["PATH"] = settings["PATH"].replace("/opt/tallystick/bin", str(Path(sys.executable).parent))
        arguments = ["/bin/sh", "-c", here]
        return subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (run(send, AWAY).returncode, run(send, AWAY).stdout) == (0, "")
    with way_to(ledger) as way:
        way.instead = [problem(401, "unauthenticated")] * 2
        assert run(backup, way.url).returncode == 3
    assert run(backup, AWAY).returncode == 3
    assert len(list(spool.glob("*.json"))) == 4
    assert run(send, ledger).returncode == 0
    quiet = run(send, ledger)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert run(reports, ledger).returncode == 0
    assert sorted(actions(ledger, "nightly").values()) == [WHOLE, FAILED, FAILED]


def test_the_crontab_finds_its_command_where_the_service_is_installed_to() -> None:
    folder = re.search(r"-m venv (\S+)", (ROOT / "docs" / "install.md").read_text())
    assert folder is not None
    path = re.search(r"^PATH=(\S+)", (RECIPES / "cron" / "crontab").read_text(), re.MULTILINE)
    assert path is not None
    assert f"{folder[1]}/bin" in path[1].split(":")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    of_client = tomllib.loads((ROOT / "clients" / "python" / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.items() >= of_client.items()


def shell(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a scheduler does: with its environment and nothing else."""
    done = subprocess.run(["/bin/sh", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


SLURM = {
    "SLURM_CLUSTER_NAME": "alps",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": 'a "name" with \\ and é',
    "SLURM_JOB_USER": "ada",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_NODELIST": "n[1-4]",
}


def test_a_slurm_job_is_on_record_from_prolog_to_epilog(ledger: str) -> None:
    environment = SLURM | {"TALLY_URL": ledger, "TALLY_TENANT": "slurm"}
    shell(RECIPES / "slurm" / "prolog.sh", **environment)
    shell(RECIPES / "slurm" / "prolog.sh", **environment)  # slurmctld was restarted
    shell(RECIPES / "slurm" / "epilog.sh", **environment, SLURM_JOB_EXIT_CODE2="0:9")
    with Client(ledger) as client:
        state = client.get_job("slurm", "slurm.alps.4711.0")
    assert (state["status"], state["error"]) == ("FAILED", "killed by signal 9")
    assert state["spec"] == {"name": SLURM["SLURM_JOB_NAME"], "user": "ada", "partition": "gpu", "nodes": "n[1-4]"}
    assert actions(ledger, "slurm") == {"slurm.alps.4711.0": FAILED}


def test_slurm_scripts_never_fail_and_what_they_could_not_send_goes_in_later(ledger: str, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    environment = SLURM | {"TALLY_TENANT": "slurm-away", "TALLY_SPOOL": str(spool)}
    shell(RECIPES / "slurm" / "prolog.sh", **environment, TALLY_URL=AWAY)
    # The ledger is back before the end, which waits behind the beginning all the same.
    shell(RECIPES / "slurm" / "epilog.sh", **environment, TALLY_URL=ledger, SLURM_JOB_EXIT_CODE2="0:0")
    assert len(list(spool.glob("run-*.json"))) == 3
    assert {path.stat().st_mode & 0o777 for path in spool.glob("run-*.json")} == {0o600}
    assert flush(ledger, spool, as_json=True)
    assert actions(ledger, "slurm-away") == {"slurm.alps.4711.0": WHOLE}

    alone = shell(RECIPES / "slurm" / "prolog.sh", **SLURM, TALLY_TENANT="slurm-away", TALLY_URL=AWAY)
    assert "TALLY_SPOOL names no folder" in alone.stderr
    refused = shell(RECIPES / "slurm" / "prolog.sh", **SLURM, TALLY_TENANT="No Tenant", TALLY_URL=ledger)
    assert "was refused" in refused.stderr


@pytest.mark.parametrize("status", [401, 403, 404, 421])
def test_what_an_operator_can_mend_is_kept_by_shell_scripts(ledger: str, tmp_path: Path, status: int) -> None:
    spool = tmp_path / "spool"
    with way_to(ledger) as way:
        way.instead = [problem(status, "unauthenticated")]
        environment = {"TALLY_TENANT": f"mended-{status}", "TALLY_URL": way.url}
        shell(RECIPES / "slurm" / "prolog.sh", **SLURM, **environment, TALLY_SPOOL=str(spool))
        way.instead = [problem(status, "unauthenticated")] * 2
        alone = shell(RECIPES / "slurm" / "prolog.sh", **SLURM, **environment)
        assert "/problems/unauthenticated" in alone.stderr
    assert flush(ledger, spool, as_json=True)
    assert actions(ledger, f"mended-{status}") == {"slurm.alps.4711.0": WHOLE[:2]}


def test_no_token_is_among_the_arguments_of_a_process(ledger: str, tmp_path: Path) -> None:
    log = tmp_path / "arguments"
    curl = shutil.which("curl")
    (tmp_path / "curl").write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {curl} "$@"\n')
    (tmp_path / "curl").chmod(0o700)
    script = f'PATH={tmp_path}:$PATH; . {RECIPES}/shell/record.sh; tally_begin j1 "{{}}" here; tally_end j1 here ""'
    environment = {
        "TALLY_URL": ledger,
        "TALLY_TENANT": "hidden",
        "TALLY_TOKEN": "very-secret",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(["/bin/sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert log.read_text().count("--config -") == 3
    assert "very-secret" not in log.read_text()
    assert actions(ledger, "hidden") == {"j1": WHOLE}


def test_a_token_out_of_a_file_counts_and_another_control_character_in_it_is_told_by_shell_scripts(
    ledger: str, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    with way_to(ledger) as way:
        environment = {"TALLY_TENANT": "of-a-file", "TALLY_URL": way.url, "TALLY_SPOOL": str(spool)}
        shell(RECIPES / "slurm" / "prolog.sh", **SLURM, **environment, TALLY_TOKEN="kept-from-all\r\n")
        assert {each.headers["Authorization"] for each in way.seen} == {"Bearer kept-from-all"}
        way.seen.clear()
        split = 'kept\noutput = "from-all'
        done = shell(RECIPES / "slurm" / "epilog.sh", **SLURM, **environment, TALLY_TOKEN=split)
        assert way.seen == []
    assert "TALLY_TOKEN has a control character inside" in done.stderr
    assert "kept" not in done.stderr
    assert flush(ledger, spool, as_json=True)


def test_a_token_of_a_service_account_ends_before_its_line_does_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = recipe("kubernetes/tally_kubernetes.py")
    monkeypatch.setattr(module, "ACCOUNT", tmp_path)
    assert module._authorization() == {}
    (tmp_path / "token").write_text("kept-from-all\n")
    assert module._authorization() == {"Authorization": "Bearer kept-from-all"}
    (tmp_path / "token").write_text("kept\nfrom-all")
    with pytest.raises(SystemExit, match="control character") as raised:
        module._authorization()
    assert "kept" not in str(raised.value)


# --- GitHub Actions -----------------------------------------------------------------------------------


def test_a_job_of_a_workflow_is_on_record(ledger: str) -> None:
    action = yaml.safe_load((RECIPES / "github-actions" / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    job = {"job.status": "failure", "strategy.job-index": "1"}
    runner = {
        "GITHUB_ACTION_PATH": str(RECIPES / "github-actions"),
        "GITHUB_RUN_ID": "77",
        "GITHUB_RUN_ATTEMPT": "1",
        "GITHUB_JOB": "build",
        "GITHUB_REPOSITORY": "me/mine",
        "GITHUB_WORKFLOW": "CI",
        "GITHUB_REF": "refs/heads/main",
        "GITHUB_SHA": "a" * 40,
        "GITHUB_ACTOR": "me",
        "RUNNER_NAME": "GitHub Actions 7",
        "PATH": os.environ["PATH"],
    }

    def valued(text: str, values: dict[str, str]) -> str:
        return re.sub(r"\$\{\{ *(\S+) *\}\}", lambda found: values[found[1]], text)

    def run(**given: str) -> None:
        defaults = {name: valued(str(each.get("default", "")), job) for name, each in action["inputs"].items()}
        inputs = {f"inputs.{name}": value for name, value in (defaults | given).items()}
        environment = {name: valued(value, inputs) for name, value in step["env"].items()}
        command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
        done = subprocess.run(command, env=runner | environment, capture_output=True, text=True, check=True)
        assert done.stderr == ""

    workflow = yaml.safe_load((RECIPES / "github-actions" / "workflow.yml").read_text())
    uses = [each["with"] for each in workflow["jobs"]["build"]["steps"] if "github-actions@" in each.get("uses", "")]
    assert [each["event"] for each in uses] == ["begin", "end"]
    for each in uses:
        run(**{**each, "url": ledger, "token": ""})

    with Client(ledger) as client:
        (state,) = client.list_jobs("ci")
    assert (state["job_id"], state["status"]) == ("github.77.1.build.1", "FAILED")
    assert state["error"] == "the job ended as failure"
    assert state["spec"]["repository"] == "me/mine"
    assert actions(ledger, "ci") == {"github.77.1.build.1": FAILED}


# --- APScheduler --------------------------------------------------------------------------------------


def test_runs_of_apscheduler_are_on_record(ledger: str) -> None:
    ended: list[Any] = []
    all_ended = Event()

    def count(event: Any) -> None:
        ended.append(event)
        if len(ended) == 4:
            all_ended.set()

    def broken() -> None:
        raise RuntimeError("no paper")

    with Client(ledger) as client:
        scheduler = BackgroundScheduler(timezone=UTC)
        recipe("apscheduler/tally_apscheduler.py").record(scheduler, client, "apscheduler")
        scheduler.add_listener(count, mask=2**12 | 2**13 | 2**14)  # executed, error, missed; told after ours
        now = datetime.now(UTC)
        scheduler.add_job(lambda: None, "date", run_date=now, id="good job", misfire_grace_time=600)
        scheduler.add_job(broken, "date", run_date=now, id="broken", misfire_grace_time=600)
        scheduler.add_job(lambda: None, "date", run_date=now - timedelta(hours=1), id="late", misfire_grace_time=1)
        scheduler.add_job(lambda: (yield), "date", run_date=now, id="deferred", misfire_grace_time=600)
        scheduler.start()
        assert all_ended.wait(DONE_WITHIN_S)
        scheduler.shutdown()
        states = {job["spec"]["job"]: (job["status"], job["error"]) for job in client.list_jobs("apscheduler")}
    assert states == {
        "good job": ("COMPLETED", None),
        "broken": ("FAILED", "RuntimeError: no paper"),
        "late": ("FAILED", "missed its time"),
        "deferred": ("FAILED", "it returned a generator, whose work has not ended"),
    }
    assert sorted(actions(ledger, "apscheduler").values()) == [WHOLE, FAILED, FAILED, FAILED]


# --- Celery -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_receivers_left() -> Iterator[None]:
    """The signals of Celery are the process's: what a test connected is disconnected."""
    all_signals = [each for each in vars(signals).values() if isinstance(each, Signal)]
    before = [list(each.receivers or ()) for each in all_signals]
    yield
    for each, receivers in zip(all_signals, before, strict=True):
        each.receivers = receivers
        each.sender_receivers_cache.clear()


@pytest.mark.usefixtures("told")
def test_tasks_of_celery_are_on_record_from_publisher_to_worker(ledger: str) -> None:
    app = Celery("recipe", broker="memory://", backend="cache+memory://")
    app.conf.worker_hijack_root_logger = False

    @app.task(name="add")  # type: ignore[untyped-decorator]
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(name="divide", bind=True, max_retries=1)  # type: ignore[untyped-decorator]
    def divide(self: Any, x: int) -> float:
        try:
            return 1 / x
        except ZeroDivisionError as error:
            raise self.retry(countdown=0, exc=error) from None

    @app.task(name="deferred")  # type: ignore[untyped-decorator]
    def deferred() -> Iterator[int]:
        yield 1

    recipe("celery/tally_celery.py").record("celery")
    with start_worker(app, perform_ping_check=False, shutdown_timeout=DONE_WITHIN_S):
        good, bad = add.delay(1, 2), divide.delay(0)
        assert good.get(timeout=DONE_WITHIN_S) == 3
        with pytest.raises(ZeroDivisionError):
            bad.get(timeout=DONE_WITHIN_S)
    eager = add.apply((3, 4))
    assert eager.get() == 7
    lazy = deferred.apply()

    with Client(ledger) as client:
        states = {job["job_id"]: (job["spec"]["task"], job["error"]) for job in client.list_jobs("celery")}
    assert states == {
        good.id: ("add", None),
        bad.id: ("divide", "ZeroDivisionError: division by zero"),
        eager.id: ("add", None),
        lazy.id: ("deferred", "it returned a generator, whose work has not ended"),
    }
    assert actions(ledger, "celery") == {good.id: WHOLE, bad.id: FAILED, eager.id: WHOLE, lazy.id: FAILED}


@pytest.mark.usefixtures("told")
def test_a_task_that_no_worker_knows_has_failed_and_any_id_is_on_record(ledger: str) -> None:
    app = Celery("strange", broker="memory://", backend="cache+memory://")
    app.conf.worker_hijack_root_logger = False

    @app.task(name="known")  # type: ignore[untyped-decorator]
    def known() -> None: ...

    module = recipe("celery/tally_celery.py")
    module.record("celery-strange")
    failed = Event()
    signals.task_unknown.connect(lambda **_: failed.set(), weak=False)  # told after ours
    with start_worker(app, perform_ping_check=False, shutdown_timeout=DONE_WITHIN_S):
        unknown = app.send_task("no.such.task")
        known.apply_async(task_id="2026/11/30 nightly").get(timeout=DONE_WITHIN_S)
        assert failed.wait(DONE_WITHIN_S)

    with Client(ledger) as client:
        jobs = {job["job_id"]: job for job in client.list_jobs("celery-strange")}
    assert (jobs[unknown.id]["status"], jobs[unknown.id]["error"]) == ("FAILED", "the worker does not know this task")
    (named,) = (job for job in jobs.values() if job["spec"].get("id") == "2026/11/30 nightly")
    assert (named["status"], named["job_id"][:19]) == ("COMPLETED", "2026_11_30_nightly.")


def test_a_publisher_waits_a_second_for_a_ledger_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("hanging", broker="memory://", backend="cache+memory://")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("TALLY_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        recipe("celery/tally_celery.py").record("hanging")
        began = time.monotonic()
        app.send_task("any")
        assert time.monotonic() - began < 15


# --- Airflow ------------------------------------------------------------------------------------------

hookspec = pluggy.HookspecMarker("airflow")


class AirflowHooks:
    """Hooks as Airflow 3 calls them."""

    @hookspec
    def on_task_instance_running(self, previous_state: Any, task_instance: Any) -> None: ...
    @hookspec
    def on_task_instance_success(self, previous_state: Any, task_instance: Any) -> None: ...
    @hookspec
    def on_task_instance_skipped(self, previous_state: Any, task_instance: Any) -> None: ...
    @hookspec
    def on_task_instance_failed(self, previous_state: Any, task_instance: Any, error: Any) -> None: ...
    @hookspec
    def on_dag_run_success(self, dag_run: Any, msg: str) -> None: ...
    @hookspec
    def on_dag_run_failed(self, dag_run: Any, msg: str) -> None: ...


@pytest.mark.usefixtures("told")
def test_task_instances_of_airflow_are_on_record(ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_TENANT", "airflow")
    airflow = pluggy.PluginManager("airflow")
    airflow.add_hookspecs(AirflowHooks)
    module = recipe("airflow/tally_airflow.py")
    airflow.register(module)
    logged = io.StringIO()
    monkeypatch.setattr(module.log, "handlers", [logging.StreamHandler(logged)])
    module.log.setLevel(logging.WARNING)  # Celery, in another test, sets the root logger's
    airflow.check_pending()

    def task(number: int, **more: Any) -> SimpleNamespace:
        run_id = "scheduled__2026-11-23T00:00:00+00:00"
        named = {"dag_id": "etl", "task_id": "load", "run_id": run_id, "try_number": number, "map_index": -1}
        return SimpleNamespace(**named | more)

    hook = airflow.hook
    hook.on_task_instance_running(previous_state="queued", task_instance=task(1))
    hook.on_task_instance_failed(previous_state="running", task_instance=task(1), error=ValueError("no rows"))
    hook.on_task_instance_failed(previous_state="queued", task_instance=task(1, task_id="lost"), error=None)
    hook.on_task_instance_running(previous_state="queued", task_instance=task(2))
    hook.on_task_instance_success(previous_state="running", task_instance=task(2))
    monkeypatch.delenv("TALLY_TENANT")
    hook.on_task_instance_running(previous_state="queued", task_instance=task(3))

    with Client(ledger) as client:
        states = [(job["spec"]["try"], job["status"], job["error"]) for job in client.list_jobs("airflow")]
    assert states == [(2, "COMPLETED", None), (1, "FAILED", "failed"), (1, "FAILED", "ValueError: no rows")]
    assert "etl.load is not on record" in logged.getvalue()


@contextmanager
def audit_log() -> Iterator[sqlalchemy.Connection]:
    """A database with Airflow's table of its audit log."""
    columns = "dttm TEXT, event TEXT, owner TEXT, dag_id TEXT, task_id TEXT, run_id TEXT, map_index INT, try_number INT"
    with sqlalchemy.create_engine("sqlite://").connect() as connection:
        connection.execute(sqlalchemy.text(f"CREATE TABLE log (id INTEGER PRIMARY KEY, {columns}, extra TEXT)"))
        yield connection


def test_rows_of_airflows_audit_log_are_on_record_once(ledger: str, tmp_path: Path) -> None:
    module = recipe("airflow/tally_airflow_log.py")
    insert = sqlalchemy.text("INSERT INTO log (dttm, event, owner, dag_id) VALUES ('2026-11-30', :e, 'ada', 'etl')")
    position = tmp_path / "position"
    with audit_log() as connection, Client(ledger) as client:
        for event in ("trigger", "clear"):
            connection.execute(insert, {"e": event})
        assert module.send(client, connection, "audit", position) == 2
        assert module.send(client, connection, "audit", position) == 0
        position.unlink()  # as after a restore of the machine
        connection.execute(insert, {"e": "paused"})
        assert module.send(client, connection, "audit", position) == 3
        connection.execute(insert, {"e": "unpaused"})
        with Client(AWAY, patience_s=0.0) as away, pytest.raises(TallystickError):
            module.send(away, connection, "audit", position)
        assert position.read_text() == "3"
        found = [(job["job_id"], job["spec"]["name"], job["status"]) for job in client.list_jobs("audit")]
    assert found == [
        ("airflow-log.3", "paused by ada", "COMPLETED"),
        ("airflow-log.2", "clear by ada", "COMPLETED"),
        ("airflow-log.1", "trigger by ada", "COMPLETED"),
    ]
    assert list(actions(ledger, "audit").values()) == [WHOLE] * 3


def test_a_row_of_airflows_audit_log_that_is_refused_holds_up_no_other(ledger: str, tmp_path: Path) -> None:
    module = recipe("airflow/tally_airflow_log.py")
    insert = sqlalchemy.text("INSERT INTO log (event, owner, extra) VALUES ('trigger', 'ada', :extra)")
    position = tmp_path / "position"
    with audit_log() as connection, Client(ledger) as client:
        for extra in ("{}", "x" * 2**20, "{}"):
            connection.execute(insert, {"extra": extra})
        with pytest.raises(InvalidError):
            module.send(client, connection, "No Tenant", position)
        assert not position.exists()
        assert module.send(client, connection, "large", position) == 3
        third, second, first = [job["spec"] for job in client.list_jobs("large")]
    assert third["extra"] == first["extra"] == "{}"
    assert (second["name"], second["id"]) == ("trigger by ada", 2)
    assert second["refused"].startswith("payload-too-large")


# --- Kubernetes ---------------------------------------------------------------------------------------


class Kubernetes(ThreadingHTTPServer):
    """The list and watch of the batch API, as far as the watcher asks: what each request is answered with, in order."""

    daemon_threads = True

    def __init__(self, answers: list[Any]) -> None:
        super().__init__(("127.0.0.1", 0), _KubernetesAnswer)
        self.answers = answers
        self.asked: list[str] = []


class _KubernetesAnswer(BaseHTTPRequestHandler):
    server: Kubernetes

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answer = self.server.answers.pop(0)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        lines = body if isinstance(body, list) else [body]
        self.send_response(status)
        self.send_header("Connection", "close")
        self.end_headers()
        for line in lines:
            self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kubernetes() -> Iterator[Kubernetes]:
    with Kubernetes([]) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def k8s_job(name: str, version: int, **status: Any) -> dict[str, Any]:
    """A Job as the API has it."""
    meta = {"uid": f"uid-{name}", "namespace": "batch", "name": name, "resourceVersion": str(version)}
    spec = {"parallelism": 2, "template": {"spec": {"containers": [{"name": "main", "image": "a/b:1"}]}}}
    return {"metadata": meta, "spec": spec, "status": status}


def condition(type: str, **more: str) -> list[dict[str, str]]:
    return [{"type": "Suspended", "status": "False"}, {"type": type, "status": "True", **more}]


def test_jobs_of_kubernetes_are_on_record(ledger: str, kubernetes: Kubernetes) -> None:
    module = recipe("kubernetes/tally_kubernetes.py")
    started = {"startTime": "2026-11-23T00:00:00Z"}
    failed = condition("Failed", reason="BackoffLimitExceeded", message="too many retries")
    bookmark = {"type": "BOOKMARK", "object": {"kind": "Job", "metadata": {"resourceVersion": "19"}}}
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old", "reason": "Expired"}}
    everything = [
        k8s_job("good", 20, **started, conditions=condition("Complete"), succeeded=2),
        k8s_job("bad", 21, **started, conditions=failed),
    ]
    kubernetes.answers = [
        {"metadata": {"resourceVersion": "10"}, "items": [k8s_job("good", 9)]},
        [
            {"type": "MODIFIED", "object": k8s_job("good", 11, **started)},
            {"type": "ADDED", "object": k8s_job("bad", 12, **started)},
            {"type": "ADDED", "object": k8s_job("dropped", 13, **started)},
        ],
        [
            {"type": "MODIFIED", "object": everything[0]},
            {"type": "MODIFIED", "object": k8s_job("bad", 18, **started, conditions=failed)},
            {"type": "DELETED", "object": k8s_job("dropped", 18, **started)},
            bookmark,
            gone,
        ],
        # A watcher that was started again sees all of it once more.
        {"metadata": {"resourceVersion": "30"}, "items": everything},
        (410, {"kind": "Status", "code": 410}),
    ]
    for _ in range(2):
        with Client(ledger) as client, httpx.Client(base_url=f"http://127.0.0.1:{kubernetes.server_port}") as api:
            recorder = module.Recorder(client, "k8s", "production")
            with pytest.raises(module.Gone):
                module.watch(api, recorder, "app=batch")

    assert kubernetes.answers == []
    versions = [re.search(r"resourceVersion=(\d+)", path) for path in kubernetes.asked]
    assert [found and found[1] for found in versions] == [None, "10", "13", None, "30"]
    assert all("labelSelector=app%3Dbatch" in path for path in kubernetes.asked)
    assert actions(ledger, "k8s") == {"k8s.uid-good": WHOLE, "k8s.uid-bad": FAILED, "k8s.uid-dropped": FAILED}
    with Client(ledger) as client:
        errors = {job["spec"]["name"]: job["error"] for job in client.list_jobs("k8s")}
    assert errors == {
        "good": None,
        "bad": "BackoffLimitExceeded: too many retries",
        "dropped": "Deleted: before it had ended",
    }


def test_the_watchers_manifest_is_one_that_kubernetes_takes() -> None:
    for document in yaml.safe_load_all((RECIPES / "kubernetes" / "watcher.yaml").read_text()):
        kubernetes_validate.validate(document, "1.33", strict=True)


# --- all of them --------------------------------------------------------------------------------------


FILES = [path for path in RECIPES.rglob("*") if path.is_file() and path.suffix != ".pyc"]
LINES_MAX = {"tally_airflow.py": 110, "tally_celery.py": 80, "tally_kubernetes.py": 140, "shell/record.sh": 90}
"""Of recipes that are longer than the others may be."""


def test_a_recipe_has_at_most_sixty_lines() -> None:
    long = {path: len(path.read_text().splitlines()) for path in FILES}
    bounds = {path: next((most for name, most in LINES_MAX.items() if str(path).endswith(name)), 60) for path in FILES}
    assert [(str(path), lines) for path, lines in long.items() if lines > bounds[path]] == []


def test_every_recipe_is_on_the_page() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert [str(path.relative_to(ROOT)) for path in FILES if path.name not in page] == []


@pytest.mark.parametrize("script", sorted(RECIPES.rglob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_are_plain_posix(script: Path) -> None:
    shells = [shlex.split(each) for each in ("dash -n", "bash --posix -n")]
    for each in shells:
        subprocess.run([*each, str(script)], check=True)

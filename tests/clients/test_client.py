"""The Python client against a real service: what it sends, repeats, follows and raises."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import platform
import pydoc
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from threading import Event as ThreadEvent
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.runtime.state.session import SECRET_BYTES, SessionTokens, Token
from tallystick_client import (
    AsyncClient,
    Client,
    ConflictError,
    CopiesRemovedError,
    InvalidError,
    JobEndedError,
    JobExistsError,
    JobNotFoundError,
    KeyReusedError,
    LaggedError,
    NotAllowedError,
    NotTheLedgerError,
    OtherRegionError,
    ProblemError,
    TransientError,
    UnreachableError,
    WriteLostError,
)
from tallystick_client.core import Core, Events
from tallystick_client.errors import FinalError
from tallystick_client.errors import problem as problem_error
from tallystick_client.transport import Reply
from tests.clients.way import LOST, Answer, Way, problem, way_to

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "clients" / "python"
PROBLEMS = ROOT / "docs" / "problems.md"
AWAY = "http://127.0.0.1:9"


def as_done(future: Future[int]) -> Future[int]:
    future.result()
    return future


def iter_of(count: int) -> Iterator[int]:
    yield from range(count)


def actions(ledger: str, tenant: str, job_id: str) -> list[str]:
    with Client(ledger) as client:
        return [event["action"] for event in client.list_events(tenant, job_id)]


def test_the_client_needs_httpx_and_nothing_of_the_service() -> None:
    code = "import sys, tallystick_client.command; print(*{name.partition('.')[0] for name in sys.modules})"
    environment = {"PYTHONPATH": str(PACKAGE), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    ours = {
        "app",
        "cli",
        "ledger",
        "objects",
        "pipeline",
        "signing",
        "terminal",
        "wal",
        "orjson",
        "msgspec",
        "pydantic",
    }
    assert ours & set(done.stdout.split()) == set()
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["httpx>=0.28"]


# --- writing and reading ------------------------------------------------------------------------------


def test_a_job_is_created_reported_on_ended_and_listed(ledger: str) -> None:
    with Client(ledger) as client:
        created = client.create_job("plain", {"image": "a/b:1"}, assigned_dcs=["use1"])
        client.send_event("plain", created["job_id"], "JobAccepted", dc_id="use1", worker_count=2)
        client.send_event("plain", created["job_id"], "JobProgressReported", dc_id="use1", completed=3, failed=1)
        state = client.get_job("plain", created["job_id"])
        assert (state["status"], state["completed"], state["failed"]) == ("RUNNING", 3, 1)
        client.cancel_job("plain", created["job_id"], reason="deleted", requestor="me")
        assert [job["job_id"] for job in client.list_cancellations("plain", "use1")] == [created["job_id"]]
        assert [job["status"] for job in client.list_jobs("plain", status="CANCELLING")] == ["CANCELLING"]
        summary = client.jobs_summary("plain", by="dc", dc="use1")
        assert [(group["value"], group["statuses"]) for group in summary["groups"]] == [("use1", {"CANCELLING": 1})]


def test_a_report_is_waited_for_and_is_a_page(ledger: str) -> None:
    told: list[str] = []
    with Client(ledger) as client:
        client.create_job("reported", {"image": "a/b:1"})
        page = client.make_report("reported", until="2100-01-01T00:00:00Z", advance=told.append)
        assert b"1 job was created in this period" in page
        with pytest.raises(InvalidError, match="by"):
            client.make_report("reported", by=["image"])
    assert {*told} == {"the node makes it"}


def test_a_report_that_another_node_keeps_is_asked_for_again(way: Way) -> None:
    elsewhere = [problem(421, "report-elsewhere") for _ in range(2)]

    def advance(_: str) -> None:
        way.instead, elsewhere[:] = [*elsewhere], []

    with Client(way.url) as client:
        client.create_job("kept", {})
        page = client.make_report("kept", advance=advance)
    assert page.startswith(b"<!doctype html>")
    assert [each.method for each in way.seen] == ["POST", "POST", "GET", "GET", "GET"]


def test_the_same_code_is_awaited(ledger: str) -> None:
    async def all_of_it() -> list[str]:
        async with AsyncClient(ledger) as client:
            created = await client.create_job("awaited", {"n": 1})
            await client.send_event("awaited", created["job_id"], "JobFailed", error="it broke")
            assert (await client.get_job("awaited", created["job_id"]))["error"] == "it broke"
            return [event["action"] async for event in client.list_events("awaited", created["job_id"])]

    assert asyncio.run(all_of_it()) == ["ENQUEUE", "FAIL"]


def test_a_method_shows_its_parameters_on_the_class_and_on_the_object() -> None:
    for shown in (Client.get_job, AsyncClient.get_job, AsyncClient("http://127.0.0.1:9").get_job, Client.list_jobs):
        assert "tenant_id" in inspect.signature(shown).parameters
    assert inspect.signature(Client.create_job).return_annotation == "Recorded"
    assert "create_job(self, tenant_id: " in pydoc.plain(pydoc.render_doc(Client))


def test_an_await_that_was_forgotten_is_an_error_of_types_and_a_warning() -> None:
    client = AsyncClient("http://127.0.0.1:9")
    with pytest.warns(RuntimeWarning, match="never awaited"):
        client.cancel_job("acme", "j", reason="none")  # type: ignore[unused-coroutine]


def test_a_client_shows_its_last_write_with_every_read(way: Way) -> None:
    with Client(way.url) as client:
        written = client.create_job("session", {}, durability="LOCAL")
        assert client.get_job("session", written["job_id"])["job_id"] == written["job_id"]
    first, second = way.seen
    assert "Tally-Session" not in first.headers
    assert second.headers["Tally-Session"] == written["session"]


def test_a_session_is_the_last_write_on_each_node_in_whatever_order_answers_come() -> None:
    tokens = SessionTokens(bytes(SECRET_BYTES))
    a1, a2, b1 = (
        tokens.encode(Token(node, 1, lsn, f"{lsn}:0:{node}")) for node, lsn in (("a", 9), ("a", 10), ("b", 1))
    )
    core = Core(["http://ledger"], None, 0.0, 1.0, transport=None)
    for token in (a2, b1, a1):
        core._learn(Reply(201, httpx.Headers({"Tally-Session": token}), b""))
    session = core.session_with(None)
    assert session is not None
    assert set(session.split(",")) == {a2, b1}
    early, c1 = (tokens.encode(Token(node, 1, 1, f"1:0:{node}")) for node in ("a", "c"))
    shown = core._headers(None, None, f"{early},{c1}")["Tally-Session"]
    assert set(shown.split(",")) == {a2, b1, c1}, "what a request brings is shown too, unless a later one is known"


def test_a_lost_write_is_told_and_the_session_forgotten(way: Way) -> None:
    with Client(way.url) as client:
        client.create_job("lost", {})
        way.instead = [problem(409, "write-lost")]
        with pytest.raises(WriteLostError):
            client.get_job("lost", "any")
        with pytest.raises(JobNotFoundError):
            client.get_job("lost", "any")
    assert "Tally-Session" not in way.seen[-1].headers


def test_a_list_has_all_pages(ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tallystick_client.core.PAGE", 2)
    with Client(ledger) as client:
        made = [client.create_job("pages", {"n": n})["job_id"] for n in range(5)]
        assert [job["job_id"] for job in client.list_jobs("pages")] == made[::-1]


def test_a_batch_goes_in_requests_of_which_each_is_taken_once(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tallystick_client.client.BATCH_LINES_MAX", 10)
    jobs = [{"tenant_id": "batch", "type": "JobCreated", "job_id": f"j-{n}", "spec": {"n": n}} for n in range(25)]
    with Client(way.url, patience_s=0.0, timeout_s=30.0) as client:
        way.instead = [LOST]
        with pytest.raises(UnreachableError):
            client.send_batch(jobs, key="nightly")
        recorded = client.send_batch(jobs, key="nightly")
        assert (recorded.accepted, len(recorded.job_ids)) == (25, 25)
        assert len([*client.list_jobs("batch")]) == 25
    assert [actions(way.url, "batch", f"j-{n}") for n in (0, 24)] == [["ENQUEUE"]] * 2


def test_a_bad_line_of_a_batch_is_named(ledger: str) -> None:
    with Client(ledger) as client, pytest.raises(InvalidError) as refused:
        client.send_batch([{"tenant_id": "bad", "type": "JobCreated"}, {"tenant_id": "bad", "type": "JobVanished"}])
    assert refused.value.members["line"] == 2


def test_a_proposal_is_accepted_or_in_conflict(ledger: str) -> None:
    grant = {"kind": "IdentityBind", "capsule": "c1", "identity": "me"}
    with Client(ledger) as client:
        accepted = client.propose("promises", grant)
        assert (accepted["verdict"], accepted["index"] > 0) == ("accepted", True)
        with pytest.raises(ConflictError) as rejected:
            client.propose("promises", {**grant, "identity": "you"}, {"kind": "None"})
        assert rejected.value.members["reason"] == "identity-bound"


def test_whatever_else_there_is_can_be_asked_for(ledger: str) -> None:
    with Client(ledger) as client:
        assert client.request("GET", "/v1/node")["wal_id"]


# --- repeating ----------------------------------------------------------------------------------------


def test_a_write_whose_answer_was_lost_is_sent_again_with_its_key_and_recorded_once(way: Way) -> None:
    way.instead = [LOST]
    with Client(way.url) as client:
        created = client.create_job("again", {"n": 1})
    first, second = way.seen
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]
    assert first.body == second.body
    assert actions(way.url, "again", created["job_id"]) == ["ENQUEUE"]


def test_two_writes_have_two_keys(way: Way) -> None:
    with Client(way.url) as client:
        client.create_job("keys", {})
        client.create_job("keys", {})
    assert len({seen.headers["Idempotency-Key"] for seen in way.seen}) == 2


def test_retry_after_is_honoured_and_waits_grow_with_jitter(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    # In the client alone: other threads of this process sleep too.
    monkeypatch.setattr(
        "tallystick_client.transport.time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)
    )
    away = problem(503, "not-ready")
    way.instead = [problem(503, "backlog-full", **{"Retry-After": "7"}), away, away, away, away]
    with Client(way.url) as client:
        client.create_job("waits", {})
        at = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
        way.instead = [problem(503, "not-ready", **{"Retry-After": at})]
        client.create_job("waits", {})
    assert 15 < waits.pop() <= 20
    assert waits[0] == 7.0
    for wait, most in zip(waits[1:], (0.5, 1.0, 2.0, 4.0), strict=True):
        assert most / 2 <= wait <= most
    assert len(way.seen) == 8


def test_patience_ends(way: Way) -> None:
    way.instead = [problem(503, "not-ready", **{"Retry-After": "1"})] * 2
    with Client(way.url, patience_s=0.5) as client, pytest.raises(TransientError, match="not-ready"):
        client.create_job("impatient", {})
    assert len(way.seen) == 1


def test_what_nobody_can_repeat_safely_is_sent_once(way: Way) -> None:
    way.instead = [problem(503, "signing-unavailable")]
    with Client(way.url) as client, pytest.raises(TransientError):
        client.request("POST", "/v1/snapshots", body={"tenant_id": "acme"})
    assert len(way.seen) == 1


def kinds() -> list[tuple[str, int]]:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([0-9]{3}) \|", PROBLEMS.read_text(), re.MULTILINE)
    return [(kind, int(status)) for kind, status in rows]


@pytest.mark.parametrize(("kind", "status"), kinds())
def test_problems_that_may_pass_are_repeated_and_no_others(kind: str, status: int) -> None:
    error = problem_error(status, {"type": f"https://tallystick.dev/problems/{kind}", "title": "so"}, None)
    may_pass = status in (408, 429, 503) or kind in ("internal-error", "report-elsewhere")
    assert isinstance(error, TransientError) is may_pass
    assert (error.kind, error.status) == (kind, status)


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (problem(409, "job-exists"), JobExistsError),
        (problem(409, "job-ended"), JobEndedError),
        (problem(422, "idempotency-key-reused"), KeyReusedError),
        (problem(401, "unauthenticated"), NotAllowedError),
        (problem(418, "unheard-of"), ProblemError),
        (problem(503, "durability-timeout", "copies-removed"), CopiesRemovedError),
        (problem(421, "other-region", Location="http://elsewhere/v1/jobs/eu1-1-gate-1"), OtherRegionError),
        (Answer(200, {"Content-Type": "text/html"}, b"<p>hello"), NotTheLedgerError),
        (Answer(404, {"Content-Type": "text/html"}, b"<p>gone"), NotTheLedgerError),
        (Answer(302, {"Location": "http://elsewhere/"}, b""), NotTheLedgerError),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_pass_is_raised_at_once(way: Way, answer: Answer, raised: type[Exception]) -> None:
    way.instead = [answer]
    with Client(way.url) as client, pytest.raises(raised):
        client.create_job("raised", {})
    assert len(way.seen) == 1


def test_an_answer_that_leads_to_no_address_is_as_none(way: Way) -> None:
    way.instead = [Answer(302, {"Location": "http://xn--ls8h-.la/"}, b"")]
    with Client(way.url, patience_s=0.0) as client, pytest.raises(UnreachableError):
        client.create_job("unreached", {})


# --- nodes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, problem(503, "fenced"), problem(503, "not-ready"), Answer(502, {}, b"proxy")])
def test_a_node_that_cannot_is_left_for_one_that_can(way: Way, answer: Answer | None) -> None:
    with way_to(None) as other:
        other.closed, other.instead = answer is None, [] if answer is None else [answer]
        with Client(f"{other.url},{way.url}", patience_s=0.0) as client:
            client.create_job("moved", {})
            client.create_job("moved", {})
    assert len(other.seen) == (0 if answer is None else 1)
    assert len(way.seen) == 2


def test_a_redirect_is_followed_to_a_node_and_to_nobody_else(way: Way) -> None:
    with way_to(None) as leading, way_to(None) as stranger:
        leading.instead = [Answer(307, {"Location": f"{way.url}/v1/jobs"}, b"")]
        with Client([leading.url, AWAY, way.url], token="secret") as client:
            client.create_job("led", {})
        leading.instead = [Answer(307, {"Location": f"{stranger.url}/v1/jobs"}, b"")]
        with Client([leading.url], token="secret") as client, pytest.raises(NotTheLedgerError, match="redirect"):
            client.create_job("led", {})
        assert stranger.seen == []
    assert [seen.headers["Authorization"] for seen in way.seen] == ["Bearer secret"]


def test_a_ledger_that_sends_a_job_to_that_of_another_region_is_followed_without_its_session(way: Way) -> None:
    with way_to(way.service) as leading, Client([leading.url, way.url]) as client:
        job = client.create_job("elsewhere", {}, durability="LOCAL")
        leading.instead = [problem(421, "other-region", Location=f"{way.url}/v1/jobs/{job['job_id']}")]
        client.cancel_job("elsewhere", job["job_id"], reason="no longer needed", requestor="test")
    assert "Tally-Session" in leading.seen[-1].headers
    assert "Tally-Session" not in way.seen[0].headers


def test_all_nodes_away_is_said(way: Way) -> None:
    with Client([AWAY, AWAY], patience_s=0.0) as client, pytest.raises(UnreachableError):
        client.get_job("acme", "any")


def test_the_environment_names_nodes_and_token(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_URL", f"{AWAY},{way.url}")
    monkeypatch.setenv("TALLY_TOKEN", "of-the-environment")
    with Client() as client:
        client.create_job("environment", {})
    assert way.seen[0].headers["Authorization"] == "Bearer of-the-environment"


def test_a_token_with_the_end_of_a_line_is_sent_without_it_and_empties_a_spool(
    way: Way, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(f" {way.url}\n", token="kept-from-all\n", spool=tmp_path / "spool") as client:
        with client.job("of-a-file"):
            pass
        assert client.flush() == 0
    assert {each.headers["Authorization"] for each in way.seen} == {"Bearer kept-from-all"}
    assert "kept" not in "".join(capsys.readouterr())


def test_what_cannot_be_in_a_header_is_refused_before_anything_is_sent(way: Way) -> None:
    for token, place in (("kept\nfrom-all", "token"), ("kept from-all", "token"), ("kept-fröm-all", "token")):
        with pytest.raises(ValueError, match=f"^{place} is no token") as raised:
            Client(way.url, token=token)
        assert "kept" not in str(raised.value)
    with Client(way.url) as client, pytest.raises(ValueError, match=r"Idempotency-Key has a line feed \(U\+000A\)"):
        client.create_job("acme", {}, key="mine\n")
    assert way.seen == []


def test_the_login_of_an_address_is_in_no_message(way: Way) -> None:
    way.instead = [Answer(204, {}, b""), Answer(404, {}, b"not here")]
    address = way.url.replace("://", "://me:kept-from-all@")
    with Client(address, patience_s=0.0) as client:
        for _ in range(2):
            with pytest.raises(NotTheLedgerError) as raised:
                client.get_job("acme", "any")
            assert "kept" not in str(raised.value)


@pytest.mark.parametrize("nodes", [["127.0.0.1:8080"], ["ftp://there"], ["http://"]])
def test_what_is_no_address_is_refused(nodes: list[str]) -> None:
    with pytest.raises(ValueError, match="not an address"):
        Client(nodes)


def test_a_blocking_client_works_where_an_event_loop_runs(ledger: str) -> None:
    async def listed() -> list[str]:
        with Client(ledger) as client:
            client.create_job("in-a-loop", {})
            jobs = client.list_jobs("in-a-loop")
            first = next(jobs)["status"]
            jobs.close()
            return [first, *(job["status"] for job in client.list_jobs("in-a-loop"))]

    assert asyncio.run(listed()) == ["SUBMITTED", "SUBMITTED"]


# --- jobs ---------------------------------------------------------------------------------------------


def test_with_a_job_its_end_is_recorded(ledger: str) -> None:
    with Client(ledger) as client:
        with client.job("with", {"report": "daily"}, dc_id="use1") as job:
            job.progress(1, 0)
            job.event("WorkflowDispatched", workflow_id="w1", dc_id="use1")
            assert client.get_job("with", job.job_id)["status"] == "RUNNING"
        state = client.get_job("with", job.job_id)
    assert (state["status"], state["spec"], state["completed"]) == ("COMPLETED", {"report": "daily"}, 1)
    assert state["result"] is not None
    assert actions(ledger, "with", job.job_id) == ["ENQUEUE", "DEQUEUE", "EXECUTE", "DISPATCH", "COMPLETE"]


def test_a_failure_is_on_record_whatever_characters_its_error_has(ledger: str) -> None:
    with Client(ledger) as client:
        for number, error in enumerate(("a\0b", "a\udc80b", ValueError("a\0b"))):
            job = client.job("odd-errors", job_id=f"odd-{number}", dc_id="here")
            job.begin()
            job.fail(error)
        errors = [job["error"] for job in client.list_jobs("odd-errors")]
    assert errors == ["ValueError: a\ufffdb", "a?b", "a\ufffdb"]


def test_with_a_job_an_exception_is_its_failure_and_goes_on(ledger: str) -> None:
    with Client(ledger) as client:
        with pytest.raises(ZeroDivisionError), client.job("failing") as job:
            _ = 1 / 0
        state = client.get_job("failing", job.job_id)
    assert (state["status"], state["error"]) == ("FAILED", "ZeroDivisionError: division by zero")


def test_how_long_a_job_took_is_said_by_whoever_saw_it_begin(ledger: str) -> None:
    with Client(ledger) as client:
        with client.job("lasting", job_id="seen"):
            pass
        client.job("lasting", job_id="unseen").begin()
        client.job("lasting", job_id="unseen").complete("done", {"rows": 1})
        results = {job["job_id"]: job["result"] for job in client.list_jobs("lasting")}
    assert results["seen"] is not None
    assert {"began_at", "duration_s"} == results["seen"]["aggregate_metrics"].keys()
    assert results["unseen"] == {"final_status": "done", "aggregate_metrics": {"rows": 1}}


@pytest.mark.parametrize(("code", "end"), [(0, "COMPLETE"), (3, "FAIL")])
def test_a_program_that_exits_within_a_job_ends_it_by_its_code(ledger: str, code: int, end: str) -> None:
    with Client(ledger) as client, pytest.raises(SystemExit), client.job("exiting") as job:
        sys.exit(code)
    assert actions(ledger, "exiting", job.job_id)[-1] == end


def test_an_end_that_was_given_is_the_end(ledger: str) -> None:
    with Client(ledger) as client, client.job("given") as job:
        job.complete("Succeeded", {"rows": 3})
    assert actions(ledger, "given", job.job_id) == ["ENQUEUE", "DEQUEUE", "COMPLETE"]


def test_a_decorated_function_is_a_job_each_time(ledger: str) -> None:
    with Client(ledger) as client:

        @client.job("decorated", lambda day: {"day": day}, job_id=lambda day: f"report-{day}")
        def report(day: str) -> str:
            """Makes a report."""
            return f"of {day}"

        assert (report("monday"), report("tuesday"), report.__doc__) == ("of monday", "of tuesday", "Makes a report.")
        with pytest.raises(JobEndedError):
            report("monday")
        found = {job["job_id"]: (job["spec"], job["status"]) for job in client.list_jobs("decorated")}
    assert found == {
        "report-monday": ({"day": "monday"}, "COMPLETED"),
        "report-tuesday": ({"day": "tuesday"}, "COMPLETED"),
    }


async def raising() -> None:
    raise ValueError("it ran")


async def pieces() -> AsyncIterator[int]:
    yield 1


def named(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


class Work:
    """What may be called, and what a call makes."""

    async def __call__(self) -> None:
        raise ValueError("it ran")


REFUSED = r"AsyncClient|generator|context manager|is no function"
DEFERRED: list[Any] = [
    pieces,
    lambda: (yield),
    contextmanager(lambda: (yield)),
    asynccontextmanager(pieces),
    Work,
    staticmethod(raising),
]
"""What a call of ends before its work does, whoever calls."""


@pytest.mark.parametrize("function", [*DEFERRED, raising, partial(raising), Work()], ids=named)
def test_what_ends_a_call_before_its_work_is_refused_where_it_is_decorated(function: Any) -> None:
    with (
        Client(AWAY) as client,
        pytest.raises(TypeError, match=REFUSED),
    ):
        client.job("acme")(function)


@pytest.mark.parametrize("function", [*DEFERRED, lambda: None], ids=named)
async def test_an_async_client_decorates_coroutine_functions_alone(function: Any) -> None:
    async with AsyncClient(AWAY) as client:
        with pytest.raises(TypeError, match=r"no coroutine function|generator|context manager|is no function"):
            client.job("acme")(function)
        assert callable(client.job("acme")(raising))
        assert callable(client.job("acme")(partial(raising)))
        assert callable(client.job("acme")(Work()))


def test_a_job_whose_function_returns_work_that_has_not_ended_has_failed(ledger: str) -> None:
    pool = ThreadPoolExecutor(1)
    proceed = ThreadEvent()
    with Client(ledger) as client, pool:
        for made, kind in (
            (raising, "a coroutine"),
            (pieces, "a generator"),
            (lambda: iter_of(2), "a generator"),
            (lambda: pool.submit(proceed.wait), "a future"),
        ):
            with pytest.raises(TypeError, match=f"returned {kind}, whose work has not ended"):
                client.job("unended")(lambda made=made: made())()
        proceed.set()
        done = client.job("unended")(lambda: as_done(pool.submit(int, "7")))()
        assert done.result() == 7
        found = [(job["status"], job["error"]) for job in client.list_jobs("unended")]
    assert [status for status, _ in found] == ["COMPLETED", *["FAILED"] * 4]
    assert found[-1][1].startswith("TypeError: the function returned a coroutine, whose work has not ended")


def test_a_coroutine_function_that_leaves_a_task_behind_has_failed(ledger: str) -> None:
    async def all_of_it() -> list[str]:
        async with AsyncClient(ledger) as client:

            @client.job("left-behind")
            async def leaving() -> object:
                return asyncio.create_task(asyncio.Event().wait())

            with pytest.raises(TypeError, match="returned a future, whose work has not ended"):
                await leaving()
            return [job["status"] async for job in client.list_jobs("left-behind")]

    assert asyncio.run(all_of_it()) == ["FAILED"]


def test_coroutines_are_jobs_too_and_a_cancelled_one_has_failed(ledger: str) -> None:
    async def all_of_it() -> list[tuple[str, object]]:
        async with AsyncClient(ledger) as client:

            @client.job("coroutines", {"n": 1})
            async def good() -> int:
                return 1

            async def endless() -> None:
                async with client.job("coroutines", {"n": 2}):
                    began.set()
                    await asyncio.Event().wait()

            began = asyncio.Event()
            assert await good() == 1
            task = asyncio.create_task(endless())
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return [(job["status"], job["error"]) async for job in client.list_jobs("coroutines")]

    assert asyncio.run(all_of_it()) == [("FAILED", "CancelledError: "), ("COMPLETED", None)]


def test_a_job_begun_again_under_its_id_adds_nothing_and_an_ended_one_is_not_run_again(ledger: str) -> None:
    with Client(ledger) as client:
        client.job("named", {"n": 1}, job_id="nightly-1").begin()  # and its scheduler dies
    with Client(ledger) as client:
        with client.job("named", {"n": 1}, job_id="nightly-1"):
            pass
        with pytest.raises(JobEndedError), client.job("named", {"n": 1}, job_id="nightly-1"):
            pytest.fail("it is run again")
        with pytest.raises(JobExistsError, match="take another job_id"):
            client.job("named", {"n": 2}, job_id="nightly-1").begin()
    assert actions(ledger, "named", "nightly-1") == ["ENQUEUE", "DEQUEUE", "COMPLETE"]


def test_a_job_is_begun_again_on_another_host(ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("pod-1", "pod-2"):
        monkeypatch.setattr(platform, "node", lambda host=host: host)
        with Client(ledger) as client:
            client.job("moved", {"n": 1}, job_id="nightly-1").begin()
    assert actions(ledger, "moved", "nightly-1") == ["ENQUEUE", "DEQUEUE", "DEQUEUE"]
    with Client(ledger) as client:
        assert client.get_job("moved", "nightly-1")["assigned_dcs"] == []


def test_a_failure_that_cannot_be_recorded_does_not_hide_the_exception(way: Way) -> None:
    with Client(way.url, patience_s=0.0) as client:

        @client.job("hidden")
        def cut_off() -> float:
            way.closed = True
            return 1 / 0

        with pytest.raises(ZeroDivisionError) as raised:
            cut_off()
    assert "is not on record" in raised.value.__notes__[0]


@pytest.mark.parametrize("job_id", ["", "a/b", "..", "a/../../tokens", "a b", "a?b", "x" * 129])
def test_a_job_id_that_leads_elsewhere_is_refused(way: Way, job_id: str) -> None:
    with Client(way.url) as client:
        for asked in (
            lambda: client.job("acme", job_id=job_id),
            lambda: client.send_event("acme", job_id, "JobCompleted"),
            lambda: client.cancel_job("acme", job_id, reason="none"),
            lambda: client.get_job("acme", job_id),
            lambda: list(client.list_events("acme", job_id)),
        ):
            with pytest.raises(ValueError, match="no job id"):
                asked()
    assert way.seen == []


@pytest.mark.parametrize("dc_id", ["EU West", "zürich", "x" * 256])
def test_a_place_of_any_name_accepts_a_job(ledger: str, dc_id: str) -> None:
    with Client(ledger) as client:
        for _ in range(2):
            client.job("places", job_id=f"in-{len(dc_id)}-{dc_id[0]}", dc_id=dc_id).begin()
        assert actions(ledger, "places", f"in-{len(dc_id)}-{dc_id[0]}") == ["ENQUEUE", "DEQUEUE"]


def test_what_stays_refused_is_known_so_that_it_holds_up_nothing_behind_it_in_a_spool() -> None:
    problems = [
        problem_error(status, {"type": f"https://tallystick.dev/problems/{kind}"}, None) for kind, status in kinds()
    ]
    assert {error.kind for error in problems if isinstance(error, FinalError)} == {
        "archived",
        "event-refused",
        "idempotency-key-reused",
        "idempotency-key-unproven",
        "invalid-event",
        "invalid-request",
        "job-ended",
        "job-exists",
        "job-not-found",
        "other-region",
        "payload-too-large",
        "signature-invalid",
        "signature-required",
        "statement-rejected",
        "write-lost",
    }


# --- watching -----------------------------------------------------------------------------------------


def stream(*events: str) -> Answer:
    return Answer(200, {"Content-Type": "text/event-stream"}, "".join(f"{event}\n\n" for event in events).encode())


def told(seq: int) -> str:
    return f'id: {seq}\nevent: ENQUEUE\ndata: {{"seq":{seq}}}'


def test_a_watch_tells_what_is_chained_as_it_comes(ledger: str) -> None:
    with Client(ledger) as client:
        job_id = client.create_job("watched", {})["job_id"]
        watch = client.watch("watched", from_seq=1, actions=["ENQUEUE", "FAIL"])
        assert next(watch)["job_id"] == job_id
        client.send_event("watched", job_id, "JobProgressReported", dc_id="use1")
        client.send_event("watched", job_id, "JobFailed", error="so")
        assert next(watch)["action"] == "FAIL"
        watch.close()


@pytest.mark.parametrize("kind", ["blocking", "awaiting"])
def test_a_watch_that_is_cut_goes_on_where_it_was_and_one_that_lagged_from_where_it_is_told(
    way: Way, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallystick_client.core.BACKOFF_MIN_S", 0.001)
    way.instead = [
        stream("retry: 1000", "id: 4", told(5), ": still here"),
        problem(503, "not-ready"),
        stream(told(6), 'event: lagged\ndata: {"from_seq":9,"head_seq":20}'),
        stream(told(9)),
    ]

    async def awaited() -> list[int]:
        async with AsyncClient(way.url) as client:
            seqs = []
            async for entry in client.watch("any"):
                seqs.append(entry["seq"])
                if entry["seq"] == 9:
                    return seqs
        return []

    if kind == "awaiting":
        assert asyncio.run(awaited()) == [5, 6, 9]
    else:
        with Client(way.url) as client:
            assert [entry["seq"] for entry in itertools.islice(client.watch("any"), 3)] == [5, 6, 9]
    assert [seen.headers.get("Last-Event-ID") for seen in way.seen] == [None, "5", "5", "8"]


@pytest.mark.parametrize("event", ['event: lagged\ndata: {"seq":5}', 'data: {"from_seq":5}', "id: " + "1" * 5000])
def test_a_watch_that_tells_what_no_ledger_tells_is_none(way: Way, event: str) -> None:
    way.instead = [stream(event, "data: {nonsense")]
    with Client(way.url) as client, pytest.raises(NotTheLedgerError):
        next(iter(client.watch("nothing")))


def test_who_keeps_a_state_is_told_that_the_watch_lagged(way: Way) -> None:
    way.instead = [stream('event: lagged\ndata: {"from_seq":9,"head_seq":20}')]
    with Client(way.url) as client, pytest.raises(LaggedError) as lagged:
        next(client.watch("any", raise_lagged=True))
    assert (lagged.value.from_seq, lagged.value.head_seq) == (9, 20)


def test_a_watch_that_can_never_begin_says_why(ledger: str) -> None:
    with Client(ledger) as client, pytest.raises(ProblemError, match="tenant-not-found"):
        next(client.watch("never-was"))


def test_an_event_may_come_in_any_pieces() -> None:
    whole = b'id: 1\nevent: A\ndata: {"a":1}\n\n: here\n\nid: 2\n\n'
    for size in range(1, len(whole)):
        events = Events()
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        found = [event for piece in pieces for event in events.feed(piece)]
        assert found == [(1, "A", b'{"a":1}'), (None, "", None), (2, "", None)], size

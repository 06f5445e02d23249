"""The client's spool: what is filed is durable, goes in later, in order, once, by whoever sends it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cli.run import flush_spool as flush_by_command
from tallystick_client import (
    AsyncClient,
    Client,
    JobEndedError,
    JobExistsError,
    NotAllowedError,
    SpoolError,
    UnreachableError,
)
from tallystick_client import spool as spool_module
from tallystick_client.spool import Spool
from tests.clients.way import LOST, Way, problem
from tests.tally import bare_environment

CLIENT = str(Path(__file__).parents[2] / "clients" / "python")
AWAY = "http://127.0.0.1:9"
NOBODY = 65534
WHOLE = ["ENQUEUE", "DEQUEUE", "COMPLETE"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is there is waited for, however slow the machine."""
    monkeypatch.setattr("tallystick_client.outbox.SPOOLED_WAIT_S", 60.0)


def waiting(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json"))


def actions(ledger: str, tenant: str, job_id: str) -> list[str]:
    with Client(ledger) as client:
        return [event["action"] for event in client.list_events(tenant, job_id)]


def send(sender: str, url: str, folder: Path) -> bool:
    """Whether the client, or the command, sent what waits."""
    if sender == "command":
        return flush_by_command(url, folder, as_json=True)
    with Client(url, spool=folder) as client:
        return client.flush() == 0


def ran(nodes: str, folder: Path, tenant: str, **job: Any) -> str:
    """A job that ran and came to a good end; its id."""
    with Client(nodes, spool=folder) as client, client.job(tenant, {"n": 1}, **job) as made:
        pass
    return made.job_id


# --- filing and sending -------------------------------------------------------------------------------


def test_a_job_runs_while_the_ledger_is_away_and_is_sent_later_once(ledger: str, folder: Path) -> None:
    with Client(AWAY, spool=folder) as client, client.job("away", {"n": 1}) as job:
        job.progress(5)
        job.event("WorkflowDispatched", workflow_id="w", dc_id=job.dc_id)
        job.progress(9, 1)
    assert len(waiting(folder)) == 5
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}

    with Client(ledger, spool=folder) as client:
        assert (client.flush(), client.flush()) == (0, 0)
        state = client.get_job("away", job.job_id)

    assert waiting(folder) == []
    assert actions(ledger, "away", job.job_id) == ["ENQUEUE", "DEQUEUE", "EXECUTE", "DISPATCH", "EXECUTE", "COMPLETE"]
    assert (state["completed"], state["failed"]) == (9, 1)


def test_it_is_awaited_likewise(ledger: str, folder: Path) -> None:
    async def all_of_it() -> str:
        async with AsyncClient(AWAY, spool=folder) as client:
            with pytest.raises(ZeroDivisionError):
                async with client.job("later") as job:
                    _ = 1 / 0
        async with AsyncClient(ledger, spool=folder) as client:
            assert await client.flush() == 0
        return job.job_id

    assert actions(ledger, "later", asyncio.run(all_of_it())) == ["ENQUEUE", "DEQUEUE", "FAIL"]


def test_a_job_is_on_disk_before_anything_is_sent(folder: Path, tmp_path: Path, strace: str) -> None:
    code = f"from tallystick_client import Client; Client({AWAY!r}, spool={str(folder)!r}).job('synced').begin()"
    calls = tmp_path / "calls"
    traced = [strace, "-f", "-y", "-o", str(calls), "-e", "trace=fsync,rename,connect", sys.executable, "-c", code]
    subprocess.run(traced, env=bare_environment() | {"PYTHONPATH": CLIENT}, check=True, stderr=subprocess.DEVNULL)
    (waiting_file,) = waiting(folder)
    seen = [line for line in calls.read_text().splitlines() if str(folder) in line or "sin_port=htons(9)" in line]
    named = [line.partition(" ")[2].strip() for line in seen]
    assert [line.partition("(")[0] for line in named] == ["fsync", "rename", "fsync", "connect"]
    assert f"{waiting_file}.new>" in named[0]
    assert named[2].endswith("= 0")
    assert f"{folder}>" in named[2]


def test_a_ledger_that_is_there_leaves_nothing_in_the_spool(ledger: str, folder: Path) -> None:
    assert actions(ledger, "there", ran(ledger, folder, "there")) == WHOLE
    assert waiting(folder) == []


def test_what_waits_goes_before_what_is_new(way: Way, folder: Path) -> None:
    first = ran(AWAY, folder, "order")
    second = ran(way.url, folder, "order")
    sent = [json.loads(seen.body) for seen in way.seen]
    assert [each.get("job_id") for each in sent if "spec" in each] == [first, second]
    assert waiting(folder) == []


def test_files_go_in_the_order_in_which_they_were_filed_though_the_clock_goes_back(
    ledger: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours_ago = time.time_ns() - 3 * 3600 * 10**9
    with Client(AWAY, spool=folder) as client:
        job = client.job("clock")
        job.begin()
        monkeypatch.setattr(spool_module.time, "time_ns", lambda: hours_ago)
        job.progress(1)
        job.complete()
    monkeypatch.undo()
    with Client(ledger, spool=folder) as client:
        assert client.flush() == 0
    assert actions(ledger, "clock", job.job_id) == ["ENQUEUE", "DEQUEUE", "EXECUTE", "COMPLETE"]


def test_a_request_whose_answer_was_lost_is_recorded_once(way: Way, folder: Path) -> None:
    way.instead = [LOST]
    job_id = ran(way.url, folder, "unanswered")
    with Client(way.url, spool=folder) as client:
        assert client.flush() == 0
    assert actions(way.url, "unanswered", job_id) == WHOLE


def test_a_ledger_that_is_away_is_not_asked_at_every_call(way: Way, folder: Path) -> None:
    way.instead = [problem(503, "not-ready")] * 100
    with Client(way.url, spool=folder) as client:
        for _ in range(20):
            client.job("quiet").begin()
    assert 1 <= len(way.seen) < 10
    assert len(waiting(folder)) == 20


def test_what_is_recorded_and_never_shown_to_be_safe_leaves_the_spool(way: Way, folder: Path) -> None:
    ran(AWAY, folder, "unshown")
    way.instead = [problem(503, "durability-timeout", "copies-removed")] * 10
    with Client(way.url, spool=folder) as client:
        report = client.flush_spool()
        assert (report.jobs, report.events, report.waiting) == (set(), len(WHOLE), 0)
        assert len(way.seen) == len(WHOLE)
        client.job("unshown").begin()
    assert not waiting(folder)


def test_flushing_waits_for_a_ledger_as_long_as_there_is_patience(way: Way, folder: Path) -> None:
    job_id = ran(AWAY, folder, "patience")
    way.instead = [problem(503, "not-ready")] * 2
    with Client(way.url, spool=folder) as client:
        assert client.flush() == 0
    assert actions(way.url, "patience", job_id) == WHOLE
    ran(AWAY, folder, "patience")
    with Client(AWAY, spool=folder, patience_s=0.1) as client:
        assert client.flush() == 2


def test_many_that_send_at_once_send_each_job_once(ledger: str, folder: Path) -> None:
    made = [ran(AWAY, folder, "together") for _ in range(6)]
    left: list[int] = []

    def send() -> None:
        with Client(ledger, spool=folder) as client:
            left.append(client.flush())

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [0] * 4
    assert [actions(ledger, "together", job_id) for job_id in made] == [WHOLE] * 6


def test_without_a_ledger_and_a_spool_nothing_is_begun() -> None:
    with Client(AWAY, patience_s=0.0) as client, pytest.raises(UnreachableError), client.job("acme"):
        pytest.fail("it runs")


async def test_a_sender_that_is_cancelled_holds_up_no_other(
    ledger: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await asyncio.to_thread(ran, AWAY, folder, "cancelled")
    taken, go_on, locked = asyncio.Event(), threading.Event(), Spool.lock
    loop = asyncio.get_running_loop()

    def slowly(spool: Spool) -> Any:
        lock = locked(spool)
        loop.call_soon_threadsafe(taken.set)
        go_on.wait()
        return lock

    monkeypatch.setattr(Spool, "lock", slowly)
    async with AsyncClient(ledger, spool=folder) as client:
        flushing = asyncio.ensure_future(client.flush())
        await taken.wait()
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        monkeypatch.setattr(Spool, "lock", locked)
        go_on.set()
        assert await client.flush() == 0
    assert await asyncio.to_thread(actions, ledger, "cancelled", job_id) == WHOLE


# --- one format ---------------------------------------------------------------------------------------


def test_what_a_client_filed_the_command_sends(ledger: str, folder: Path) -> None:
    with Client(AWAY, spool=folder) as client, client.job("by-command", job_id="of-my-own") as job:
        job.progress(1)
    with Client(AWAY, spool=folder) as client, pytest.raises(ZeroDivisionError), client.job("by-command") as other:
        _ = 1 / 0

    assert flush_by_command(ledger, folder, as_json=True)

    assert waiting(folder) == []
    assert actions(ledger, "by-command", "of-my-own") == ["ENQUEUE", "DEQUEUE", "EXECUTE", "COMPLETE"]
    assert actions(ledger, "by-command", other.job_id) == ["ENQUEUE", "DEQUEUE", "FAIL"]


@pytest.mark.parametrize("sender", ["client", "command"])
def test_what_an_earlier_release_of_the_command_filed_is_sent(ledger: str, folder: Path, sender: str) -> None:
    job_id, tenant = "run-1795315725390-5106b585516e3eb7", f"earlier-{sender}"
    folder.mkdir(mode=0o700)
    ended = {"type": "JobCompleted", "final_status": "exit code 0", "aggregate_metrics": {"exit_code": 0}}
    accepted = {"type": "JobAccepted", "dc_id": "here", "worker_count": 1}
    created = {"spec": {"command": ["größe"]}, "assigned_dcs": ["here"], "job_id": job_id}
    parts: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
        ("begin", [("/v1/jobs", created), (f"/v1/jobs/{job_id}/events", accepted)]),
        ("end", [(f"/v1/jobs/{job_id}/events", ended)]),
    ]
    for number, (part, requests) in enumerate(parts, 1):
        file = {
            "format": "tallystick.spool.v1",
            "made_ms": time.time_ns() // 1_000_000,
            "tenant_id": tenant,
            "job_id": job_id,
            "part": part,
            "session": None,
            "requests": [
                {"path": path, "key": f"{part}-{sender}-{at}", "body": {"tenant_id": tenant, **body}}
                for at, (path, body) in enumerate(requests)
            ],
        }
        (folder / f"{job_id}-{number}.json").write_text(json.dumps(file, ensure_ascii=False))

    assert send(sender, ledger, folder)

    assert waiting(folder) == []
    assert actions(ledger, tenant, job_id) == WHOLE


@pytest.mark.parametrize("sender", ["client", "command"])
def test_what_the_ledger_forgot_the_keys_of_is_not_added_again(ledger: str, folder: Path, sender: str) -> None:
    tenant = f"old-{sender}"
    with Client(AWAY, spool=folder) as client, client.job(tenant) as job:
        job.progress(1)
        job.progress(2)
    kept = {path: json.loads(path.read_text()) for path in folder.glob("*.json")}
    with Client(ledger, spool=folder) as client:
        assert client.flush() == 0
    for path, file in kept.items():
        file["made_ms"] -= 8 * 24 * 3600 * 1000
        for request in file["requests"]:
            request["key"] += "-forgotten"
        path.write_text(json.dumps(file))

    if sender == "client":
        with Client(ledger, spool=folder) as client:
            assert client.flush() == 0
    else:
        assert flush_by_command(ledger, folder, as_json=True)

    assert waiting(folder) == []
    assert not (folder / "refused").exists()
    assert actions(ledger, tenant, job.job_id) == ["ENQUEUE", "DEQUEUE", "EXECUTE", "EXECUTE", "COMPLETE"]


@pytest.mark.parametrize("sender", ["client", "command"])
def test_an_old_file_that_was_never_sent_is_sent_whole(ledger: str, folder: Path, sender: str) -> None:
    tenant = f"late-{sender}"
    with Client(AWAY, spool=folder) as client, client.job(tenant) as job:
        job.progress(1)
    for path in folder.glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "made_ms": 1}))
    if sender == "client":
        with Client(ledger, spool=folder) as client:
            assert client.flush() == 0
    else:
        assert flush_by_command(ledger, folder, as_json=True)
    assert actions(ledger, tenant, job.job_id) == ["ENQUEUE", "DEQUEUE", "EXECUTE", "COMPLETE"]


# --- the same job again -------------------------------------------------------------------------------


def test_a_job_whose_end_waits_is_not_run_again(folder: Path) -> None:
    ran(AWAY, folder, "again", job_id="nightly-1")
    with Client(AWAY, spool=folder) as client:
        with pytest.raises(JobEndedError), client.job("again", {"n": 1}, job_id="nightly-1"):
            pytest.fail("it is run again")
        with client.job("another", {"n": 1}, job_id="nightly-1"):  # of the same id, of another tenant
            pass


def test_a_job_begun_twice_while_the_ledger_is_away_begins_once(ledger: str, folder: Path) -> None:
    with Client(AWAY, spool=folder) as client:
        client.job("twice", {"n": 1}, job_id="nightly-2").begin()
    ran(AWAY, folder, "twice", job_id="nightly-2")
    with Client(ledger, spool=folder) as client:
        assert client.flush() == 0
    assert actions(ledger, "twice", "nightly-2") == WHOLE


@pytest.mark.parametrize("sender", ["client", "command"])
def test_whoever_sends_a_request_again_sends_the_same_bytes(way: Way, folder: Path, sender: str) -> None:
    spec = {"rate": 1e-5, "large": 1e16, "name": "größe ☃ \x7f", "whole": 2**53 - 1, "tiny": 5e-324}
    way.instead = [LOST]
    with Client(way.url, spool=folder) as client:
        client.job(f"bytes-{sender}", spec, job_id="bytes").begin()
    assert len(waiting(folder)) == 1
    if sender == "client":
        with Client(way.url, spool=folder) as client:
            assert client.flush() == 0
    else:
        assert flush_by_command(way.url, folder, as_json=True)
    first, again = (seen.body for seen in way.seen if seen.path == "/v1/jobs")
    assert first == again
    assert actions(way.url, f"bytes-{sender}", "bytes") == ["ENQUEUE", "DEQUEUE"]


def test_a_job_that_another_sender_sent_first_is_not_run_again_when_it_has_ended(
    ledger: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(ledger, folder, "first", job_id="nightly-3")
    locked = Spool.lock

    def sent_meanwhile(spool: Spool) -> Any:
        monkeypatch.setattr(Spool, "lock", locked)
        assert flush_by_command(ledger, folder, as_json=True)
        return locked(spool)

    monkeypatch.setattr(Spool, "lock", sent_meanwhile)
    with Client(ledger, spool=folder) as client, pytest.raises(JobEndedError):
        client.job("first", {"n": 1}, job_id="nightly-3").begin()


# --- what is refused ----------------------------------------------------------------------------------


def test_a_job_that_the_ledger_refuses_is_raised_where_it_is_begun_and_leaves_nothing(way: Way, folder: Path) -> None:
    with Client(way.url, spool=folder) as client:
        client.job("refused", {"n": 1}, job_id="mine").begin()
        with pytest.raises(JobExistsError, match="job_id"), client.job("refused", {"n": 2}, job_id="mine"):
            pytest.fail("it runs")
        way.instead = [problem(409, "job-exists"), problem(401, "unauthenticated")]
        for error in (JobExistsError, NotAllowedError):
            with pytest.raises(error), client.job("refused"):
                pytest.fail("it runs")
    assert waiting(folder) == []


def test_an_end_that_the_ledger_refuses_is_raised_and_set_aside(ledger: str, folder: Path) -> None:
    with Client(ledger, spool=folder) as client:
        job = client.job("over")
        job.begin()
        client.send_event("over", job.job_id, "JobCompleted")
        with pytest.raises(JobEndedError):
            job.fail("no")
    (aside,) = (folder / "refused").glob("*.json")
    assert json.loads(aside.read_text())["file"]["requests"][0]["body"].count('"error":"no"')
    assert waiting(folder) == []


def test_what_the_ledger_refuses_another_sender_is_raised_by_who_recorded_it(
    ledger: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = Spool.lock

    def sent_meanwhile(spool: Spool) -> Any:
        monkeypatch.setattr(Spool, "lock", locked)
        assert not flush_by_command(ledger, folder, as_json=True)
        return locked(spool)

    with Client(ledger, spool=folder) as client:
        job = client.job("over-there")
        job.begin()
        client.send_event("over-there", job.job_id, "JobCompleted")
        monkeypatch.setattr(Spool, "lock", sent_meanwhile)
        with pytest.raises(SpoolError, match="has ended"):
            job.fail("no")
    assert waiting(folder) == []


@pytest.mark.parametrize("sender", ["client", "command"])
def test_what_is_of_a_tenant_that_is_not_the_callers_waits_and_holds_up_no_other(
    way: Way, folder: Path, sender: str
) -> None:
    mistyped, fine = f"mistyped-{sender}", f"fine-{sender}"
    ran(AWAY, folder, mistyped, job_id="one")
    ran(AWAY, folder, fine, job_id="other")
    way.instead = [problem(403, "forbidden")]
    if sender == "client":
        with Client(way.url, spool=folder, patience_s=0.0) as client:
            assert client.flush() == 2
            assert len([seen for seen in way.seen if mistyped.encode() in seen.body]) == 1, "one file asks for all"
            way.instead = [problem(403, "forbidden")]
            client.job(fine, job_id="third").begin()
    else:
        assert not flush_by_command(way.url, folder, as_json=True)
    assert [json.loads((folder / name).read_text())["tenant_id"] for name in waiting(folder)] == [mistyped] * 2
    assert actions(way.url, fine, "other") == WHOLE
    assert flush_by_command(way.url, folder, as_json=True)
    assert actions(way.url, mistyped, "one") == WHOLE


def test_what_is_refused_later_is_set_aside_with_what_follows_of_that_job_alone(ledger: str, folder: Path) -> None:
    refused = ran(AWAY, folder, "No Tenant", job_id="shared-id")
    taken = ran(AWAY, folder, "behind", job_id="shared-id")
    with Client(ledger, spool=folder) as client:
        assert client.flush() == 0
    assert refused == taken
    assert actions(ledger, "behind", taken) == WHOLE
    begin, end = (json.loads(path.read_text()) for path in sorted((folder / "refused").glob("*.json")))
    assert "tenant_id" in begin["refused"]
    assert "what came before it of this job was refused" in end["refused"]


def test_a_token_that_does_not_count_any_more_loses_nothing(way: Way, folder: Path) -> None:
    job_id = ran(AWAY, folder, "token")
    way.instead = [problem(401, "unauthenticated")] * 9
    with Client(way.url, spool=folder, patience_s=0.3) as client:
        assert client.flush() == 2
    way.instead = []
    with Client(way.url, spool=folder) as client:
        assert client.flush() == 0
    assert actions(way.url, "token", job_id) == WHOLE


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"{}", b"[1]", b"x" * ((4 << 20) + 2)])
def test_a_file_that_is_none_of_a_spool_is_set_aside(ledger: str, folder: Path, content: bytes) -> None:
    job_id = ran(AWAY, folder, "strange")
    (folder / "run-0000000000000-0123456789abcdef-1.json").write_bytes(content)
    (folder / "run-0000000000001-0123456789abcdef-1.json").symlink_to("/dev/zero")
    with Client(ledger, spool=folder) as client:
        assert client.flush() == 0
    assert actions(ledger, "strange", job_id) == WHOLE
    assert len(list((folder / "refused").glob("*.reason.txt"))) == 2


def test_a_file_that_another_user_filed_waits_for_him(ledger: str, folder: Path) -> None:
    job_id = ran(AWAY, folder, "others")
    before = waiting(folder)
    for path in folder.glob("*.json"):
        path.chmod(0)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.chown(folder / ".lock", NOBODY, NOBODY)
    code = f"""if True:
        import os
        from tallystick_client import Client
        os.chdir({str(folder)!r})
        client = Client({ledger!r}, spool=".", patience_s=0.0)
        if os.geteuid() == 0:
            os.setuid({NOBODY})
        print(client.flush())
        """
    sent = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": CLIENT}, capture_output=True, text=True)
    assert (sent.stdout, waiting(folder)) == ("2\n", before), sent.stderr

    os.chown(folder, os.geteuid(), -1)
    for path in folder.glob("*.json"):
        path.chmod(0o600)
    with Client(ledger, spool=folder) as client:
        assert client.flush() == 0
    assert actions(ledger, "others", job_id) == WHOLE


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        pytest.param('"/v1/jobs', '"/v1/keys', id="another-route"),
        pytest.param('"/v1/jobs(/[^"]*)?"', '"/v1/jobs/../events"', id="another-route-by-way-of-jobs"),
        pytest.param('"key": "[^"]+"', '"key": 5', id="a-number"),
        pytest.param('"key": "[^"]+"', r'"key": "a\\r\\nX-Forwarded-For: b"', id="a-header"),
    ],
)
def test_a_spooled_request_is_nothing_but_one_of_a_job(ledger: str, folder: Path, pattern: str, instead: str) -> None:
    ran(AWAY, folder, "requests")
    for path in folder.glob("*.json"):
        path.write_text(re.sub(pattern, instead, path.read_text()))
    with Client(ledger, spool=folder) as client:
        assert client.flush() == 0
    assert len(list((folder / "refused").glob("*.reason.txt"))) == 2


# --- room ---------------------------------------------------------------------------------------------


def test_a_spool_has_a_bound_and_ends_have_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "FILES_MAX", 1)
    with Client(AWAY, spool=folder, patience_s=0.0) as client:
        first, second = client.job("full"), client.job("full")
        first.begin()
        with pytest.raises(UnreachableError) as full:
            second.begin()
        assert "is full" in full.value.__notes__[0]
        first.complete()
    assert len(waiting(folder)) == 2


def test_a_disk_that_is_full_is_left_as_it_was(folder: Path) -> None:
    """A limit on the size of files fails a write in its middle, as a full disk does."""
    with Client(AWAY, spool=folder, patience_s=0.0) as client:
        client.job("before").begin()
        before = sorted(folder.rglob("*"))
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limit[1]))
        try:
            with pytest.raises(UnreachableError) as full:
                client.job("full").begin()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, ignored)
    assert "File too large" in full.value.__notes__[0]
    assert sorted(folder.rglob("*")) == before


def test_a_spool_that_takes_nothing_is_passed_over_while_the_ledger_is_there(ledger: str, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert actions(ledger, "over-it", ran(ledger, folder, "over-it")) == WHOLE
    with pytest.raises(SpoolError, match="others may write"):
        Spool(folder).keep({})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("sender", ["client", "command"])
def test_a_folder_that_others_may_write_to_is_not_sent(way: Way, folder: Path, sender: str) -> None:
    ran(AWAY, folder, "writable")
    folder.chmod(0o777)
    with pytest.raises(SpoolError, match="others may write"):
        send(sender, way.url, folder)
    folder.chmod(0o700)
    assert len(waiting(folder)) == 2
    assert way.seen == []


@pytest.mark.parametrize("sender", ["client", "command"])
def test_a_folder_of_another_user_is_not_sent(
    way: Way, folder: Path, sender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(AWAY, folder, "foreign")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(SpoolError, match="belongs to another user"):
        send(sender, way.url, folder)
    assert way.seen == []


def test_a_file_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(AWAY, folder, "foreign")
    spool = Spool(folder)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(SpoolError, match="of another user"):
        spool.load(spool.waiting()[0])


@pytest.mark.parametrize("sender", ["client", "command"])
def test_a_job_of_another_region_holds_up_nothing_behind_it(way: Way, folder: Path, sender: str) -> None:
    ran(AWAY, folder, "elsewhere")
    taken = ran(AWAY, folder, "behind-region")
    way.instead = [problem(421, "other-region", Location="http://elsewhere/v1/jobs/eu1-1-gate-1")]
    send(sender, way.url, folder)
    assert waiting(folder) == []
    assert len(list((folder / "refused").glob("*.json"))) == 2
    assert actions(way.url, "behind-region", taken) == WHOLE


@pytest.mark.parametrize("dc_id", ["EU West", "zürich", "x" * 256])
def test_a_place_of_any_name_is_filed_and_sent(ledger: str, folder: Path, dc_id: str) -> None:
    job_id = ran(AWAY, folder, "places", dc_id=dc_id)
    assert ran(ledger, folder, "places", dc_id=dc_id)
    assert waiting(folder) == []
    assert actions(ledger, "places", job_id) == WHOLE

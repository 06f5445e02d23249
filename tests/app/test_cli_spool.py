"""``tally run --spool``: an absent ledger stops no command, and what was spooled goes in later, exactly once."""

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from cli.client import LedgerClient
from cli.run import flush_spool as flush
from tallystick_client import JobEndedError, UnreachableError, command, spool
from tallystick_client.command import Ended, RecordedJob, how_to_begin
from tests.app.service_thread import serving
from tests.app.test_cli_hostile import PAGE, PATIENCE_S, answering, sized
from tests.forked import ROOT
from tests.tally import COLD, Tally, bare_environment

AWAY = "http://127.0.0.1:9"
TALLY_RUN = (sys.executable, "-c", "from tallystick_client.command import main; main()")
CREATED_ACCEPTED_COMPLETED = ["ENQUEUE", "DEQUEUE", "COMPLETE"]


class LossyWay(ThreadingHTTPServer):
    """A way to the ledger on which requests arrive and answers may be lost, or which is closed."""

    def __init__(self, ledger: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.ledger = ledger
        self.passes = -1
        """How many requests more may pass; -1 for all."""
        self.answers = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Forward(BaseHTTPRequestHandler):
    server: LossyWay

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.passes == 0:
            return
        self.server.passes -= 1
        wanted = {name: value for name, value in self.headers.items() if name not in ("Host", "Connection")}
        answer = httpx.post(self.server.ledger + self.path, content=body, headers=wanted, timeout=PATIENCE_S)
        if not self.server.answers:
            return
        self.send_response(answer.status_code)
        for name in ("Content-Type", "Content-Length"):
            self.send_header(name, answer.headers[name])
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(postgres, tmp_path_factory.mktemp("spooling"), "spooling") as url:
        yield url


@pytest.fixture
def way(ledger: str, _patient: None) -> Iterator[LossyWay]:
    with LossyWay(ledger) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is there is waited for, however slow the machine."""
    monkeypatch.setattr("tallystick_client.outbox.SPOOLED_WAIT_S", PATIENCE_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def job(url: str, folder: Path, tenant: str) -> RecordedJob:
    return RecordedJob(LedgerClient(url, **how_to_begin(folder)), ["true"], tenant, has_spool=True, dc="here")


def ran(url: str, folder: Path, tenant: str) -> RecordedJob:
    """A command that ran and came to a good end."""
    made = job(url, folder, tenant)
    made.begin()
    made.end(Ended(0, None, 1.5))
    return made


def actions(ledger: str, tenant: str, job_id: str) -> list[str]:
    params = {"tenant_id": tenant}
    listed = httpx.get(f"{ledger}/v1/jobs/{job_id}/events", params=params, timeout=PATIENCE_S)
    return [event["action"] for event in listed.json()["items"]]


def state(ledger: str, tenant: str, job_id: str) -> Any:
    return httpx.get(f"{ledger}/v1/jobs/{job_id}", params={"tenant_id": tenant}, timeout=PATIENCE_S).json()


def waiting(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json"))


def start(*arguments: str, url: str) -> subprocess.Popen[str]:
    return Tally(
        "run",
        *arguments,
        env=bare_environment() | {"TALLY_URL": url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, url=url)
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


# --- the command ----------------------------------------------------------------------------------------


def test_a_command_runs_while_the_ledger_is_away_and_is_sent_later_once(ledger: str, folder: Path) -> None:
    done = run("-t", "away", "--spool", str(folder), "--json", "--", "sh", "-c", "echo working; exit 3", url=AWAY)

    assert done.returncode == 3, done.stderr
    working, report = done.stdout.splitlines()
    assert working == "working"
    told = json.loads(report)
    assert (told["spooled"], told["recorded"]) == (True, False)
    job_id = told["job_id"]
    assert len(waiting(folder)) == 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}

    sent, again = (run("--flush", "--spool", str(folder), "--json", url=ledger) for _ in range(2))

    assert (sent.returncode, again.returncode) == (0, 0), sent.stderr
    assert json.loads(sent.stdout) == {"jobs": 1, "events": 3, "refused": [], "waiting": 0, "problem": None}
    assert json.loads(again.stdout)["events"] == 0
    assert actions(ledger, "away", job_id) == ["ENQUEUE", "DEQUEUE", "FAIL"]
    now = state(ledger, "away", job_id)
    assert (now["status"], now["spec"]["command"][0]) == ("FAILED", "sh")
    assert "began_at" in now["spec"]
    assert waiting(folder) == []


def on_full_disk() -> BinaryIO:
    return open("/dev/full", "wb")


def to_nobody() -> BinaryIO:
    """A pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    return open(write, "wb")


@pytest.mark.parametrize(
    "lost",
    [
        {"stderr": on_full_disk},
        {"stdout": on_full_disk},
        {"stdout": on_full_disk, "stderr": on_full_disk},
        {"stderr": to_nobody},
    ],
    ids=["errors", "output", "both", "errors to nobody"],
)
def test_a_command_runs_and_ends_with_its_code_where_nothing_can_be_said_about_it(
    lost: dict[str, Callable[[], BinaryIO]], folder: Path, tmp_path: Path
) -> None:
    command = ("sh", "-c", "touch touched; echo said; exit 3")
    with ExitStack() as stack:
        files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        files |= {name: stack.enter_context(opened()) for name, opened in lost.items()}
        arguments = ("run", "-t", "deaf", "--spool", folder, "--json", "--", *command)
        process = Tally(*arguments, env=bare_environment() | {"TALLY_URL": AWAY}, cwd=tmp_path, **files)

    assert process.wait(PATIENCE_S) == 3
    assert (tmp_path / "touched").exists()
    assert len(waiting(folder)) == 2


def test_a_command_runs_where_its_folder_was_removed(folder: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    line = f'mkdir "$1"; cd "$1"; rmdir "$1"; exec {shlex.join(COLD)} run -t gone --spool "$0" -- sh -c "exit 3"'
    environment = bare_environment() | {"TALLY_URL": AWAY, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line, folder, gone], env=environment, timeout=PATIENCE_S, check=False)

    assert done.returncode == 3
    begun = json.loads((folder / waiting(folder)[0]).read_text())
    assert json.loads(begun["requests"][0]["body"])["spec"]["directory"] == str(gone)


def test_a_command_has_the_umask_that_we_were_started_with(folder: Path) -> None:
    line = f'umask 0; exec {shlex.join(COLD)} run -t gone --spool "$0" -- sh -c umask'
    environment = bare_environment() | {"TALLY_URL": AWAY, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line, folder], env=environment, capture_output=True, check=True)
    assert done.stdout == b"0000\n"


@pytest.mark.parametrize("answers", [{"pieces": (PAGE,)}, {"drip": b"x", "times": 20}], ids=["a page", "a drip"])
def test_whatever_answers_in_place_of_the_ledger_delays_the_command_by_seconds_only(
    answers: dict[str, Any], folder: Path
) -> None:
    with answering(*answers.get("pieces", ()), drip=answers.get("drip", b""), times=answers.get("times", 0)) as url:
        began = time.monotonic()
        done = run("-t", "acme", "--spool", str(folder), "--", "true", url=url)

    assert done.returncode == 0, done.stderr
    # One answer is waited for, and none after the command: its beginning is in the spool.
    assert time.monotonic() - began < command.END_PATIENCE_S / 2
    assert len(waiting(folder)) == 2


@pytest.mark.parametrize("more", [b"", b"Tally-Session: \xc3\xa9\r\n"], ids=["too little", "a session of others"])
def test_an_answer_that_no_ledger_gives_changes_no_exit_code(more: bytes, folder: Path) -> None:
    body = b'{"job_id": "x"}' if not more else b'{"job_id": "x", "type": "JobCreated", "chain": null}'
    with answering(sized(b"application/json", body, b"201 Created", more)) as url:
        done = run("-t", "acme", "--spool", str(folder), "--", "sh", "-c", "exit 7", url=url)

    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("program", [(*COLD, "run"), TALLY_RUN], ids=["tally run", "tally-run"])
@pytest.mark.parametrize(
    ("option", "set_to"),
    [
        ((), {"TALLY_URL": "localhost"}),
        ((), {"TALLY_TOKEN": "two words"}),
        ((), {"ALL_PROXY": "socks5://127.0.0.1:9"}),
        (("--sign", "/nonexistent.pem"), {}),
        (("--dc", b"\xff"), {}),
        (("--tenant", "No Tenant"), {}),
    ],
    ids=["address", "token", "proxy", "key", "place", "tenant"],
)
def test_a_command_that_is_to_run_anyway_runs_whatever_keeps_it_from_being_a_job(
    program: Sequence[str], option: Sequence[str | bytes], set_to: dict[str, str], ledger: str, folder: Path
) -> None:
    environment = bare_environment() | {"TALLY_URL": ledger, "TALLY_SPOOL": str(folder), "PYTHONPATH": str(ROOT)}
    arguments = [*program, "--tenant", "anyway", *option, "--run-anyway", "--", "sh", "-c", "echo working; exit 7"]
    done = subprocess.run(arguments, env=environment | set_to, capture_output=True, timeout=PATIENCE_S, check=False)

    assert (done.returncode, done.stdout) == (7, b"working\n"), done.stderr
    assert b"Traceback" not in done.stderr


def test_without_a_spool_an_absent_ledger_is_125_and_nothing_runs(tmp_path: Path) -> None:
    with answering(PAGE) as url:
        done = run("-t", "acme", "--", "touch", str(tmp_path / "touched"), url=url)

    assert done.returncode == 125
    assert not (tmp_path / "touched").exists()


def test_a_job_that_the_ledger_refuses_is_125_with_a_spool_too(ledger: str, folder: Path, tmp_path: Path) -> None:
    done = run("-t", "No Tenant", "--spool", str(folder), "--", "touch", str(tmp_path / "touched"), url=ledger)

    assert done.returncode == 125
    assert not (tmp_path / "touched").exists()
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_spool_that_takes_nothing_is_told_and_stops_nothing(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)

    done = run("-t", "acme", "--spool", str(folder), "--json", "--", "sh", "-c", "exit 4", url=AWAY)

    assert done.returncode == 4
    assert "others may write to it" in done.stderr
    told = json.loads(done.stdout)
    assert (told["recorded"], told["spooled"]) == (False, False)
    assert "others may write to it" in told["problem"]
    assert list(folder.iterdir()) == []


def test_the_level_asked_for_is_that_of_every_event(ledger: str) -> None:
    done = run("-t", "levels", "--durability", "LOCAL", "--json", "--", "true", url=ledger)

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["recorded"], told["chain"]) == (True, None)


def test_a_run_that_is_killed_leaves_what_it_spooled_and_the_job_open(
    ledger: str, folder: Path, tmp_path: Path
) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"
    os.mkfifo(ready)
    os.mkfifo(go)
    command = ("sh", "-c", f"echo $$ > {ready}; read line < {go}")
    tally = start("-t", "killed", "--spool", str(folder), "--", *command, url=AWAY)
    pid = int(ready.read_text())

    tally.send_signal(signal.SIGKILL)
    tally.wait(timeout=PATIENCE_S)
    flush(ledger, folder, as_json=True)

    listed = httpx.get(f"{ledger}/v1/jobs", params={"tenant_id": "killed"}, timeout=PATIENCE_S).json()["items"]
    assert [each["status"] for each in listed] == ["ACCEPTED"]
    os.kill(pid, 0)  # the command itself goes on
    go.write_text("go\n")
    tally.communicate(timeout=PATIENCE_S)  # its end closes the pipes


# --- what is taken, and what not ------------------------------------------------------------------------


def test_a_request_whose_answer_was_lost_is_recorded_once(ledger: str, way: LossyWay, folder: Path) -> None:
    way.answers = False
    made = ran(way.url, folder, "lost")
    assert actions(ledger, "lost", made.job_id) == ["ENQUEUE"]  # it had arrived

    assert flush(ledger, folder, as_json=True)

    assert actions(ledger, "lost", made.job_id) == CREATED_ACCEPTED_COMPLETED


def test_a_ledger_that_vanishes_during_the_command_gets_the_end_later(ledger: str, way: LossyWay, folder: Path) -> None:
    made = job(way.url, folder, "vanished")
    made.begin()
    assert made.how_begun == "accepted"
    way.passes = 0

    assert made.end(Ended(0, None, 1.5)) is None

    assert [name[-7:] for name in waiting(folder)] == ["-2.json"]
    assert flush(ledger, folder, as_json=True)
    assert actions(ledger, "vanished", made.job_id) == CREATED_ACCEPTED_COMPLETED


def test_what_neither_took_at_first_is_sent_whole_at_the_end(ledger: str, way: LossyWay, folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    way.passes = 0
    made = job(way.url, folder, "late")
    made.begin()
    assert made.problem is not None
    way.passes = -1

    made.end(Ended(0, None, 1.5))

    assert actions(ledger, "late", made.job_id) == CREATED_ACCEPTED_COMPLETED


# --- sending what waits ---------------------------------------------------------------------------------


def test_a_flush_that_was_cut_short_is_finished_by_the_next(ledger: str, way: LossyWay, folder: Path) -> None:
    made = [ran(AWAY, folder, "resumed") for _ in range(2)]
    way.passes = 2  # the first beginning, and no answer to come for its end
    assert not flush(way.url, folder, as_json=True, patience_s=0.0)
    assert len(waiting(folder)) == 3

    assert flush(ledger, folder, as_json=True)
    assert waiting(folder) == []
    assert [actions(ledger, "resumed", each.job_id) for each in made] == [CREATED_ACCEPTED_COMPLETED] * 2


def test_a_flush_of_the_client_reports_each_wait_for_a_ledger_that_is_away(folder: Path) -> None:
    ran(AWAY, folder, "reported")
    arguments = [*TALLY_RUN, "--flush", "--spool", str(folder), "--url", AWAY]

    with subprocess.Popen(arguments, stderr=subprocess.PIPE, env=bare_environment(), text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.kill()

    assert re.match(rf"trying again in [0-9.]+ s: no answer from {AWAY}: ", line)
    assert len(waiting(folder)) == 2


def test_two_that_flush_at_once_send_each_job_once(ledger: str, folder: Path) -> None:
    made = [ran(AWAY, folder, "together") for _ in range(4)]

    both = [start("--flush", "--spool", str(folder), "--json", url=ledger) for _ in range(2)]
    told = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in both]

    assert [process.returncode for process in both] == [0, 0]
    assert sum(each["events"] for each in told) == 12
    assert [actions(ledger, "together", each.job_id) for each in made] == [CREATED_ACCEPTED_COMPLETED] * 4


def test_what_the_ledger_forgot_the_keys_of_is_not_added_again(ledger: str, folder: Path) -> None:
    made = ran(AWAY, folder, "old")
    kept = {path: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert flush(ledger, folder, as_json=True)
    for path, file in kept.items():
        file["made_ms"] -= 8 * 24 * 3600 * 1000
        for request in file["requests"]:
            request["key"] += "-forgotten"
        path.write_text(json.dumps(file))

    assert flush(ledger, folder, as_json=True)

    assert waiting(folder) == []
    assert actions(ledger, "old", made.job_id) == CREATED_ACCEPTED_COMPLETED


def test_a_job_that_the_ledger_refuses_later_is_set_aside_with_the_reason(ledger: str, folder: Path) -> None:
    refused = ran(AWAY, folder, "No Tenant")
    taken = ran(AWAY, folder, "behind")

    assert not flush(ledger, folder, as_json=True)

    assert waiting(folder) == []
    assert actions(ledger, "behind", taken.job_id) == CREATED_ACCEPTED_COMPLETED
    begin, end = (json.loads(path.read_text()) for path in sorted((folder / "refused").glob("*.json")))
    assert (begin["file"]["job_id"], end["file"]["job_id"]) == (refused.job_id, refused.job_id)
    assert "tenant_id" in begin["refused"]
    assert json.loads(begin["file"]["requests"][0]["body"])["spec"]["command"] == ["true"]
    assert "what came before it of this job was refused" in end["refused"]
    assert flush(ledger, folder, as_json=True)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"{}", b"x" * (spool.FILE_BYTES_MAX + 2)])
def test_a_file_that_is_none_of_a_spool_is_set_aside(ledger: str, folder: Path, content: bytes) -> None:
    taken = ran(AWAY, folder, "strange")
    (folder / "run-0000000000000-0123456789abcdef-1.json").write_bytes(content)
    (folder / "run-0000000000001-0123456789abcdef-1.json").symlink_to("/dev/zero")

    assert not flush(ledger, folder, as_json=True)

    assert actions(ledger, "strange", taken.job_id) == CREATED_ACCEPTED_COMPLETED
    reasons = [path.read_text() for path in sorted((folder / "refused").glob("*.txt"))]
    assert reasons[0].startswith("not a file of a spool")
    assert reasons[1] == "not a regular file"


@pytest.mark.parametrize("route", ["/v1/keys/rotate", "/v1/jobs/../events"])
def test_a_spooled_path_leads_to_no_other_route(ledger: str, folder: Path, route: str) -> None:
    ran(AWAY, folder, "paths")
    for path in folder.glob("*.json"):
        file = json.loads(path.read_text())
        file["requests"][0]["path"] = route
        path.write_text(json.dumps(file))

    assert not flush(ledger, folder, as_json=True)

    assert len(list((folder / "refused").glob("*.txt"))) == 2


def test_a_spool_has_a_bound_and_the_end_of_what_is_in_it_still_has_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "FILES_MAX", 1)
    first, second = job(AWAY, folder, "full"), job(AWAY, folder, "full")
    first.begin()
    second.begin()

    assert first.problem is None
    assert "is full" in str(second.problem)
    assert first.end(Ended(0, None, 1.0)) is None
    with pytest.raises(UnreachableError) as full:
        second.end(Ended(0, None, 1.0))
    assert "is full" in full.value.__notes__[0]


@pytest.mark.usefixtures("_patient")
def test_a_refusal_at_the_end_is_told_and_not_spooled(ledger: str, folder: Path) -> None:
    made = job(ledger, folder, "ended")
    made.begin()
    completed = {"tenant_id": "ended", "type": "JobCompleted"}
    path = f"{ledger}/v1/jobs/{made.job_id}/events"
    assert httpx.post(path, json=completed, timeout=PATIENCE_S).status_code == 201

    with pytest.raises(JobEndedError, match="job-ended"):
        made.end(Ended(0, None, 1.0))

    assert waiting(folder) == []

"""``tally`` against a running service: what a user does in the first five minutes, and what an auditor does."""

import asyncio
import csv
import hashlib
import json
import re
import shlex
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest

from app.dev.cluster import find_data
from app.dev.embedded import EmbeddedPostgres
from cli.serve import embedded_postgres
from lab import openb, scratch, tamper, tampering
from lab.replay import request_key
from lab.scratch import scratch_folder
from terminal.outcome import CommandExit
from tests.app.chains import places, until
from tests.app.service_thread import serving
from tests.conftest import connected_to
from tests.processes import runs
from tests.server_copies import server_with_schema
from tests.tally import Tally, bare_environment, run_tally, run_tally_limited

README = Path(__file__).parents[2] / "README.md"
DATABASE = "cli_service"

ANSWER_S = 60.0
"""How long an answer is waited for: a machine that runs other things too is not what a test is about."""

Done = subprocess.CompletedProcess[str]


class Service(NamedTuple):
    """A running service, its folder, its database, and ``tally`` commands that talk to it."""

    url: str
    folder: Path
    superuser_url: str

    def tally(self, *arguments: str) -> Done:
        return run_tally(*arguments, TALLY_URL=self.url, TALLY_DATA_DIR=str(self.folder))

    def report(self, *arguments: str, code: int = 0) -> Any:
        done = self.tally(*arguments, "--json")
        assert done.returncode == code, done.stderr + done.stdout
        return json.loads(done.stdout)

    def get(self, path: str, **params: str | int) -> Any:
        answer = httpx.get(f"{self.url}{path}", params=params, timeout=ANSWER_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def keys(self) -> Path:
        """What an auditor saved of ``/v1/keys``."""
        path = self.folder / "saved-keys.json"
        path.write_text(httpx.get(f"{self.url}/v1/keys", timeout=ANSWER_S).text)
        return path


@pytest.fixture(scope="module")
def service(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with serving(postgres, folder, DATABASE) as url:
        yield Service(url, folder, postgres.superuser_url(DATABASE))


def trace(path: Path, jobs: int) -> Path:
    """A trace of ``jobs`` pods in the form of openb, of every phase in turn."""
    phases = ("Running", "Succeeded", "Failed", "Pending")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(openb.COLUMNS)
        for n in range(jobs):
            phase = phases[n % 4]
            scheduled = "" if phase == "Pending" else n + 3
            writer.writerow([f"pod-{n}", 1000, 2048, 1, 500, "", "LS", phase, n, n + 9, scheduled])
    return path


def submit(service: Service, tenant: str, jobs: int) -> None:
    """Jobs that were created, accepted and completed: three entries each."""
    with tempfile.NamedTemporaryFile("w", suffix=".ndjson") as file:
        for n in range(jobs):
            job = {"job_id": f"j-{n}"}
            for event in (
                {"type": "JobCreated", "spec": {"n": n}},
                {"type": "JobAccepted", "dc_id": "use1", "worker_count": 1},
                {"type": "JobCompleted", "final_status": "ok"},
            ):
                file.write(json.dumps(job | event) + "\n")
        file.flush()
        service.report("replay", file.name, "-t", tenant, "--durability", "GLOBAL")


# --- replay -------------------------------------------------------------------------------------------


def test_a_replayed_trace_has_the_states_of_the_trace_and_verifies(service: Service, tmp_path: Path) -> None:
    file = trace(tmp_path / "trace.csv", jobs=600)

    report = service.report("replay", str(file), "--map", "openb", "-t", "trace")

    ended = {"JobCompleted": 150, "JobFailed": 150, "JobCancellationRequested": 300, "JobCancellationAcked": 300}
    assert report["types"] == {"JobCreated": 600, "JobAccepted": 450, **ended}
    assert (report["events"], report["added"], report["already_there"]) == (1950, 1950, 0)
    states = [service.get(f"/v1/jobs/pod-{n}", tenant_id="trace")["status"] for n in range(4)]
    assert states == ["CANCELLED", "COMPLETED", "FAILED", "CANCELLED"]
    service.report("snapshot", "-t", "trace")
    verdict = service.report("verify", "-t", "trace")
    assert (verdict["valid"], verdict["entries_checked"] >= 1950) == (True, True)


def test_a_replay_of_what_another_version_read_otherwise_says_what_to_do(service: Service, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.csv", jobs=2)
    key = request_key(hashlib.sha256(file.read_bytes()).hexdigest(), "openb", "otherwise", 0)
    line = '{"tenant_id":"otherwise","type":"JobCreated","job_id":"read-otherwise"}'
    headers = {"Idempotency-Key": key, "Content-Type": "application/x-ndjson"}
    httpx.post(f"{service.url}/v1/events", content=line, headers=headers, timeout=ANSWER_S).raise_for_status()
    done = service.tally("replay", str(file), "--map", "openb", "-t", "otherwise")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("replay the file into another tenant.")
    assert "Traceback" not in done.stderr
    assert [job["job_id"] for job in service.get("/v1/jobs", tenant_id="otherwise")["items"]] == ["read-otherwise"]


def test_a_second_replay_adds_nothing(service: Service, tmp_path: Path) -> None:
    file = trace(tmp_path / "trace.csv", jobs=8)
    first = service.report("replay", str(file), "--map", "openb", "-t", "twice")
    head = service.get("/v1/chain/head", tenant_id="twice")

    second = service.report("replay", str(file), "--map", "openb", "-t", "twice")

    assert first["added"] == second["already_there"] == first["events"]
    assert second["added"] == 0
    assert service.get("/v1/chain/head", tenant_id="twice")["seq"] == head["seq"]


def test_the_time_of_the_trace_stands_in_the_payload(service: Service, tmp_path: Path) -> None:
    service.report("replay", str(trace(tmp_path / "t.csv", jobs=2)), "--map", "openb", "-t", "times")

    events = service.get("/v1/jobs/pod-1/events", tenant_id="times")["items"]

    assert [event["payload"]["trace_time"] for event in events] == [1, 4, 10]


def test_a_malformed_line_is_named_and_nothing_is_sent(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "events.ndjson"
    file.write_text('{"type": "JobCreated", "job_id": "a"}\n{"type": "JobVanished", "job_id": "a"}\n')

    done = service.tally("replay", str(file), "-t", "malformed")

    assert done.returncode == 1
    assert "line 2" in done.stderr
    params = {"tenant_id": "malformed"}
    assert httpx.get(f"{service.url}/v1/chain/verify", params=params, timeout=ANSWER_S).status_code == 404


def test_the_summary_for_people_names_the_rate_and_the_types(service: Service, tmp_path: Path) -> None:
    done = service.tally("replay", str(trace(tmp_path / "t.csv", jobs=4)), "--map", "openb", "-t", "people")

    assert done.returncode == 0
    assert "13 events of t.csv for tenant people" in done.stdout
    assert "events/s): 13 added, 0 already there" in done.stdout
    assert "JobAccepted" in done.stdout


# --- run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "status"), [(0, "COMPLETED"), (3, "FAILED")])
def test_a_command_is_recorded_with_its_end_and_its_code_becomes_ours(service: Service, code: int, status: str) -> None:
    done = service.tally("run", "-t", "demo", "--json", "--", "sh", "-c", f"echo working; exit {code}")

    assert done.returncode == code
    working, report_line = done.stdout.splitlines()
    assert working == "working"
    report = json.loads(report_line)
    assert (report["exit_code"], report["recorded"]) == (code, True)
    job = service.get(f"/v1/jobs/{report['job_id']}", tenant_id="demo")
    assert job["status"] == status
    assert job["spec"]["command"] == ["sh", "-c", f"echo working; exit {code}"]
    said = json.dumps([job["result"], job["error"]])
    assert f"exit code {code}" in said


def test_the_events_of_a_run_are_created_accepted_ended(service: Service) -> None:
    report = json.loads(service.tally("run", "-t", "demo", "--json", "--", "true").stdout)

    events = service.get(f"/v1/jobs/{report['job_id']}/events", tenant_id="demo")["items"]

    assert [event["action"] for event in events] == ["ENQUEUE", "DEQUEUE", "COMPLETE"]


def test_a_command_that_does_not_exist_is_a_failed_job_and_127(service: Service) -> None:
    done = service.tally("run", "-t", "demo", "--json", "--", "/nowhere/at/all")

    assert done.returncode == 127
    report = json.loads(done.stdout)
    assert service.get(f"/v1/jobs/{report['job_id']}", tenant_id="demo")["status"] == "FAILED"


def test_a_job_that_the_ledger_refuses_is_125_and_the_command_is_not_run(service: Service, tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    done = service.tally("run", "-t", "Not A Tenant", "--", "touch", str(touched))

    assert done.returncode == 125
    assert not touched.exists()


# --- verify -------------------------------------------------------------------------------------------


def test_a_chain_is_incomplete_until_a_snapshot_signs_its_end(service: Service) -> None:
    submit(service, "unsigned", jobs=2)

    before = service.report("verify", "-t", "unsigned", code=3)
    told = service.tally("verify", "-t", "unsigned")
    assert told.stdout.startswith("tenant unsigned: incomplete, nothing wrong found, ")
    assert "not everything is checked: " in told.stderr
    assert "entries of 1 ledger that no snapshot signs yet" in told.stderr
    service.report("snapshot", "-t", "unsigned")
    after = service.report("verify", "-t", "unsigned", code=0)

    assert before["unsigned_entries"] > 0
    assert (after["unsigned_entries"], after["valid"]) == (0, True)


def test_the_status_of_a_log_without_witnesses_names_what_sets_them_and_has_no_table(service: Service) -> None:
    assert service.tally("run", "--tenant", "unwatched", "--", "true").returncode == 0
    done = service.tally("witness", "status", "-t", "unwatched")
    assert done.returncode == 3, done.stderr
    said = "the node has no policy: its setting log.policy names no tlog-policy file (docs/formats/policy.md)"
    assert " ".join(done.stdout.split()) == said


def test_a_tenant_that_does_not_exist_could_not_be_verified(service: Service) -> None:
    assert service.tally("verify", "-t", "nobody").returncode == 1
    assert service.tally("verify", "-t", "nobody", "--dsn", service.superuser_url).returncode == 1


def test_the_database_alone_verifies_with_keys_is_incomplete_without_and_unknown_with_other_keys(
    service: Service, tmp_path: Path
) -> None:
    submit(service, "direct", jobs=2)
    service.report("snapshot", "-t", "direct")
    service.report("keys", "new", str(tmp_path / "other.pem"))
    arguments = ("verify", "-t", "direct", "--dsn", service.superuser_url)

    with_keys = service.report(*arguments, "--keys", str(service.keys))
    without = service.report(*arguments, code=3)
    with_others = service.report(*arguments, "--keys", str(tmp_path / "other.pem"), code=4)

    judged = [verdict["verdicts"]["signatures"] for verdict in (with_keys, without, with_others)]
    assert judged == ["ok", "not_checked", "unknown_key"]


async def edit_payload(superuser_url: str, tenant: str, seq: int) -> None:
    async with tampering.superuser(superuser_url) as connection:
        row = await tampering.read_row(connection, tenant, seq)
        await tampering.write_payload(connection, tenant, row._replace(payload=row.payload.replace("ok", "no")))


def test_an_edited_row_is_named_by_the_service_and_straight_from_the_database(service: Service) -> None:
    submit(service, "edited", jobs=3)
    asyncio.run(edit_payload(service.superuser_url, "edited", seq=6))

    by_service = service.report("verify", "-t", "edited", code=2)
    by_rows = service.report("verify", "-t", "edited", "--dsn", service.superuser_url, code=2)

    for verdict in (by_service, by_rows):
        assert (verdict["first_break"]["seq"], verdict["first_break"]["kind"]) == (6, "payload-digest")
    assert "first break: seq 6, payload-digest" in service.tally("verify", "-t", "edited").stdout


def test_a_break_is_acknowledged_with_a_reason_once_somebody_has_seen_it(service: Service) -> None:
    submit(service, "seen", jobs=3)
    asyncio.run(edit_payload(service.superuser_url, "seen", seq=6))
    acknowledge = ("verify", "-t", "seen", "--acknowledge", "row 6 edited by mistake")
    done = service.tally(*acknowledge)
    assert done.returncode == 2, "acknowledged is not mended"
    assert "acknowledged: payload-digest at seq 6" in done.stderr
    assert "row 6 edited by mistake" in str(service.get("/v1/chain/entries", tenant_id="_system", limit=1000))
    assert "not acknowledged yet" in service.tally(*acknowledge).stderr
    assert service.tally(*acknowledge, "--dsn", service.superuser_url).returncode == 1


def test_a_row_of_keys_that_is_gone_is_named_until_it_is_back_though_the_chain_is_valid(service: Service) -> None:
    body = {"tenant_id": "gone", "job_id": "gone-1", "spec": {}}

    def create() -> int:
        return httpx.post(f"{service.url}/v1/jobs", json=body, headers={"Idempotency-Key": "k"}).status_code

    async def run(statement: str, *values: str) -> str | None:
        async with tampering.superuser(service.superuser_url) as connection:

            async def is_followed() -> bool:
                at_seq, head_seq = (await places(connection))["gone"]
                return at_seq == head_seq

            await until(is_followed, "the node knows of the key")
            found: str | None = await connection.fetchval(statement, *values)
            return found

    assert create() == 201
    row = asyncio.run(run("SELECT to_json(i)::text FROM scheduler.idempotency AS i WHERE tenant_id = 'gone'"))
    asyncio.run(run("DELETE FROM scheduler.idempotency WHERE tenant_id = 'gone'"))
    assert create() == 409
    found = service.tally("verify", "-t", "gone")
    assert found.returncode == 2
    assert "the chain is valid, rows beside it are damaged" in found.stdout
    assert "not mended: idempotency at seq 1" in found.stdout
    put_back = "INSERT INTO scheduler.idempotency SELECT * FROM json_populate_record(NULL::scheduler.idempotency, $1)"
    asyncio.run(run(put_back, row or ""))
    found = service.tally("verify", "-t", "gone")
    assert found.returncode in (0, 3)
    assert "not mended" not in found.stdout


async def cut(superuser_url: str, tenant: str, last_seq: int) -> None:
    async with tampering.superuser(superuser_url) as connection:
        await tampering.cut_tail(connection, tenant, last_seq)


def saved_checkpoint(service: Service, tenant: str, size: int, path: Path) -> Path:
    """The tenant's checkpoint once it covers ``size`` entries, in a file outside the ledger."""
    client = httpx.Client(transport=httpx.HTTPTransport(retries=3), timeout=ANSWER_S)
    while True:
        note = client.get(f"{service.url}/v1/log/{tenant}/checkpoint")
        if note.status_code == 200 and int(note.text.splitlines()[1]) >= size:
            path.write_text(note.text)
            return path


def test_a_kept_checkpoint_is_extended_by_a_chain_that_grew(service: Service, tmp_path: Path) -> None:
    submit(service, "grown", jobs=2)
    kept = saved_checkpoint(service, "grown", 6, tmp_path / "checkpoint")
    service.tally("run", "-t", "grown", "--", "true")
    saved_checkpoint(service, "grown", 9, tmp_path / "later")
    service.report("snapshot", "-t", "grown")

    by_service = service.report("verify", "-t", "grown", "--checkpoint", str(kept))
    by_rows = service.report(
        "verify", "-t", "grown", "--dsn", service.superuser_url, "--keys", str(service.keys), "--checkpoint", str(kept)
    )
    unvouched = service.report(
        "verify", "-t", "grown", "--dsn", service.superuser_url, "--checkpoint", str(kept), code=3
    )

    assert (by_service["compared_with"], by_service["memory"]["first_look"]) == ("node, file", True)
    assert (by_rows["compared_with"], by_rows["memory"]["first_look"]) == ("file, memory", False)
    assert [item["verdicts"]["checkpoint"] for item in (by_service, by_rows, unvouched)] == ["ok", "ok", "not_checked"]


def test_what_could_not_be_stored_is_not_said_to_be_remembered(service: Service, tmp_path: Path) -> None:
    httpx.post(f"{service.url}/v1/jobs", json={"tenant_id": "lone"}, timeout=ANSWER_S).raise_for_status()
    service.report("snapshot", "-t", "lone")
    saved_checkpoint(service, "lone", 1, tmp_path / "checkpoint")
    verify = ("verify", "-t", "lone", "--state", str(tmp_path / "state"), "--url", service.url)

    full = run_tally_limited(0, *verify)
    stored = service.tally(*verify)

    assert full.returncode == 1
    assert "tenant lone: valid" in full.stdout
    assert "cannot be written to" in full.stderr
    assert "remembered now" not in full.stdout
    assert "nothing new is remembered: it could not be stored" in full.stdout.replace("\n", " ")
    assert stored.returncode == 0, stored.stderr
    assert "first look at this log" in stored.stdout, "the full disk left nothing"
    assert "1 entry is remembered now" in stored.stdout.replace("\n", " ")


def test_a_state_file_that_is_damaged_ends_the_command_and_is_not_forgotten(service: Service, tmp_path: Path) -> None:
    (tmp_path / "checkpoints.json").write_text("{}")
    (tmp_path / "checkpoints.json").chmod(0o600)
    done = service.tally("verify", "-t", "_system", "--state", str(tmp_path))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "is damaged" in done.stderr
    assert (tmp_path / "checkpoints.json").read_text() == "{}"


def test_a_checkpoint_of_another_tenant_is_no_comparison(service: Service, tmp_path: Path) -> None:
    submit(service, "one", jobs=1)
    submit(service, "other", jobs=1)
    kept = saved_checkpoint(service, "other", 3, tmp_path / "checkpoint")

    done = service.tally("verify", "-t", "one", "--checkpoint", str(kept))

    assert done.returncode == 2
    assert "the checkpoint is of log" in done.stderr


# --- operator tools -----------------------------------------------------------------------------------


def test_a_new_key_is_readable_by_its_owner_alone_and_never_overwritten(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"

    made = service.report("keys", "new", str(path), "--algorithm", "ecdsa-p256")
    again = service.tally("keys", "new", str(path))

    assert made["algorithm"] == "ecdsa-p256"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert again.returncode == 1


def test_the_keys_of_the_service_are_listed(service: Service) -> None:
    listed = service.report("keys", "list")

    assert listed == service.get("/v1/keys")
    assert listed["keys"][0]["key_id"] in service.tally("keys", "list").stdout


def test_the_log_of_a_running_service_is_sound_and_holds_every_event(service: Service) -> None:
    submit(service, "walled", jobs=2)

    report = service.report("wal", "verify", str(service.folder / "wal"))
    dump = service.tally("wal", "dump", str(service.folder / "wal"), "--json")

    assert [log["verdict"] for log in report["logs"]] == ["ok"]
    records = [json.loads(line) for line in dump.stdout.splitlines()]
    assert dump.returncode == 0
    actions = [record["action"] for record in records if record.get("tenant_id") == "walled"]
    assert actions[-6:] == ["ENQUEUE", "DEQUEUE", "COMPLETE"] * 2


def test_the_demonstration_names_every_falsification_though_its_node_ends_at_the_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[Path] = []
    cut_tail = tampering.cut_tail

    @contextmanager
    def told_service(folder: Path) -> Iterator[str]:
        with forked_service(folder) as (url, _):
            folders.append(folder)
            yield url

    def has_ended() -> bool:
        (lock,) = folders[0].glob("wal/*/LOCK")
        return Path(f"/proc/{lock.read_text().strip()}/stat").read_text().rpartition(") ")[2].startswith("Z")

    async def cut_and_wait(connection: asyncpg.Connection, tenant: str, last_seq: int) -> None:
        await cut_tail(connection, tenant, last_seq)
        await until(has_ended, "the node has seen it, and its process ended", timeout_s=120)

    monkeypatch.setattr(tamper, "scratch_service", told_service)
    monkeypatch.setattr(tampering, "cut_tail", cut_and_wait)
    with pytest.raises(CommandExit) as ended:
        tamper.tamper(as_json=True)
    report = json.loads(capsys.readouterr().out)

    assert ended.value.code == 0
    assert report["before"]["valid"] is True
    found = [(edit["found"], edit["verdict"]["first_break"]["kind"]) for edit in report["edits"]]
    assert found == [(True, "payload-digest"), (True, "link"), (True, "rollback")]


# --- the service itself -------------------------------------------------------------------------------


def test_tally_dev_logs_json_stops_cleanly_and_its_database_with_it_and_leaves_nothing_in_a_scratch_folder() -> None:
    with scratch_folder() as folder:
        with forked_service(folder) as (url, dev):
            postmaster, data = postmaster_of(folder), find_data(folder / "postgres")
            assert asyncio.run(is_superuser(run_tally("db-url", TALLY_DATA_DIR=str(folder)).stdout.strip()))
            lines = [json.loads(line) for line in (folder / "service.log").read_text().splitlines()]
            (ready,) = (line for line in lines if line["event"] == "service_ready")
            assert ready["url"] == url
            assert ready["detail"].startswith(f"Tallystick answers at {url}, ")

            dev.send_signal(signal.SIGTERM)
            assert dev.wait(timeout=120) == 0
            assert not runs(postmaster)

        with forked_service(folder) as (_, again):
            postmaster = postmaster_of(folder)
            again.send_signal(signal.SIGINT)
            assert again.wait(timeout=120) == 0
            assert not runs(postmaster)
        assert data is not None
        assert data.exists()

    assert not data.exists()
    assert not folder.exists()


@contextmanager
def forked_service(folder: Path) -> Iterator[tuple[str, Tally]]:
    """As ``scratch_service``, of a ``tally dev`` that need neither import nor make a cluster; its process too."""
    if not (folder / "postgres").exists():
        server_with_schema(folder / "postgres")
    log_file, environment = folder / "service.log", {"TALLY_DATA_DIR": str(folder), "TALLY_PORT": "0"}
    with log_file.open("wb") as log:
        given = {"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = Tally("dev", env=bare_environment() | environment, **given)
    try:
        yield scratch._wait_ready(process, log_file), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)


def postmaster_of(folder: Path) -> int:
    pid = embedded_postgres(folder).postmaster_pid()
    assert pid is not None
    return pid


async def is_superuser(url: str) -> bool:
    async with connected_to(url) as connection:
        return bool(await connection.fetchval("SELECT current_setting('is_superuser') = 'on'"))


# --- what README shows ----------------------------------------------------------------------------------


def consoles() -> list[tuple[str, list[str]]]:
    """Each command in README's console blocks, with the lines that README says it prints."""
    shown: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                shown.append((line.removeprefix("$ "), []))
            else:
                shown[-1][1].append(line)
    return shown


def shape(line: str) -> str:
    """A line without what differs from one run to the next: numbers, digests, names that were made, widths."""
    line = re.sub(r"local-\d+-gate\w+-\d+|run-\d{13}-[0-9a-f]{16}|\b[0-9a-f]{64}\b|node-[0-9a-f]{8}", "*", line)
    return re.sub(r"([━─])+", r"\1", re.sub(r"\d[\d.,]*", "0", " ".join(line.split())))


def test_the_commands_of_readme_print_what_readme_shows(service: Service, tmp_path: Path) -> None:
    file = trace(tmp_path / "openb_pod_list_default.csv", jobs=8)
    seen = set()
    for command, shown in consoles():
        if not re.match(r"\.venv/bin/tally (run|snapshot|verify|replay) ", command):
            continue
        _, *arguments = shlex.split(command)
        seen.add(arguments[0])
        arguments = [
            "readme" if each in ("demo", "openb") and previous == "--tenant" else each
            for previous, each in pairwise(["", *arguments])
        ]
        done = service.tally(*(str(file) if each == file.name else each for each in arguments))
        assert done.returncode == 0, done.stderr
        printed = {shape(line) for line in (done.stdout + done.stderr).splitlines()}
        expected = {
            shape(line.replace("tenant demo", "tenant readme").replace("tenant openb", "tenant readme"))
            for line in shown
            if line != "…"
        }
        assert expected <= printed, command
    assert seen == {"run", "snapshot", "verify", "replay"}


def test_keys_are_listed_with_the_entries_that_they_count_for_and_made_for_whoever_signs(
    service: Service, tmp_path: Path
) -> None:
    listed = service.tally("keys", "list")
    assert (listed.returncode, "counts from" in listed.stdout) == (0, False)
    assert re.search(r"introduced at seq \d+ of _system, counts for entries from \S+ on", listed.stdout)
    made = service.tally("keys", "new", str(tmp_path / "auditor.pem")).stdout
    for role in ("a node signs with it once it has TALLY_SIGNING__KEY_URI=", "an auditor signs a report with it: "):
        assert role in " ".join(made.split())

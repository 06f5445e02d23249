"""``tally pipeline report`` from its command line: what it prints, what it refuses, and the same from every place."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from ledger import canonical
from ledger.exit_code import ExitCode
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Hlc
from signing.bundle.writer import OwnEntry
from tests.conftest import Database
from tests.ledger.ledger_in_memory import Ledger
from tests.pipeline.archived_ledgers import archive_here, days, ledger_of, store
from tests.pipeline.conftest import RunCommand
from tests.pipeline.sites import bundle_of_site

pytestmark = pytest.mark.usefixtures("spark")

TOLD: tuple[tuple[str, dict[str, object]], ...] = (
    ("JobCreated", {"assigned_dcs": ["use1"]}),
    ("JobAccepted", {"dc_id": "use1"}),
    ("JobCompleted", {"final_status": "ok"}),
    ("JobCreated", {"assigned_dcs": ["euw1"]}),
    ("JobAccepted", {"dc_id": "euw1"}),
    ("JobFailed", {"error": "out of memory", "failed_dc": "euw1"}),
    ("JobCreated", {"assigned_dcs": ["use1"]}),
    ("JobCancellationRequested", {"requestor": "ann", "reason": "not needed"}),
    ("JobCancellationAcked", {"dc_id": "use1"}),
    ("JobCreated", {"assigned_dcs": ["use1"]}),
)
"""Four jobs: one completed, one failed, one cancelled, one that waits."""


def ledger_of_jobs(tenant_id: str) -> Ledger:
    """A signed ledger of the jobs of ``TOLD``, an event a day, from 2024-01-11."""
    ledger = ledger_of(tenant_id, days(len(TOLD)), snapshot_rows=100)
    for row, (name, fields) in zip(ledger.entries, TOLD, strict=True):
        row["job_id"] = f"job-{(row['seq'] - 1) // 3}"
        row["action"] = JOB_EVENTS[name].action
        row["payload"] = canonical.encode({"type": name, "fence_token": 1, **fields}).decode()
    ledger.relink()
    return ledger_of(tenant_id, [], snapshot_rows=len(TOLD), start=ledger)


def ledger_of_acts() -> Ledger:
    """The signed chain of ``_system``: two acts for acme, the second after all jobs."""
    ledger = ledger_of("_system", [*days(1, first=3), *days(1, first=30)], snapshot_rows=100)
    for row in ledger.entries:
        row["job_id"], row["action"] = "act:root", "ACT_ALLOWED"
        facts = {"actor": "root", "right": "admin", "route": "POST /erasures", "path": "/", "tenant_id": "acme"}
        row["payload"] = canonical.encode({"type": "ACT_ALLOWED", **facts}).decode()
    ledger.relink()
    return ledger_of("_system", [], snapshot_rows=2, start=ledger)


def own_entries(ledger: Ledger) -> list[OwnEntry]:
    return [
        OwnEntry(Hlc.parse(row["t_hlc"]), row["job_id"], row["action"], row["payload"].encode())
        for row in ledger.entries
    ]


def csv_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "csv").iterdir()}


def test_a_database_and_its_bundles_are_reported_the_same(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    ledger = ledger_of_jobs("acme")
    ledger.store_jobs()
    acts = ledger_of_acts()
    asyncio.run(store(database, ledger, acts))
    whole = bundle_of_site(tmp_path / "whole.tar", "site-a", own_entries(ledger))
    part = bundle_of_site(tmp_path / "part.tar", "site-a", own_entries(ledger)[:6])
    system = bundle_of_site(tmp_path / "system.tar", "site-a", own_entries(acts), "_system")
    of_database = run_command("report", "--dest", "of database", "--dsn", database.service_url, "--json")
    of_bundles = run_command("report", "--dest", "of%20/bundles#1", "--bundle", whole, part, system)
    for ran in (of_database, of_bundles):
        assert ran.returncode == ExitCode.FINE, ran.stderr
    told = json.loads(of_database.stdout)
    assert told == json.loads((tmp_path / "of database" / "report.json").read_text())
    assert told["in_period"] == {
        "created": 4,
        "accepted": 2,
        "ended": 3,
        "completed": 1,
        "failed": 1,
        "timed_out": 0,
        "cancelled": 1,
    }
    assert (told["who"]["acts"], told["who"]["events_without_actor"]) == (2, 10)
    assert csv_of(tmp_path / "of%20" / "bundles#1") == csv_of(tmp_path / "of database")
    for line in (
        "2024-01-11 00:00:00 UTC to 2024-01-20 00:00:00 UTC, windows of 6 hours",
        "4 jobs created, 3 ended: 1 completed, 1 failed, 0 timed out, 1 cancelled",
        "1 open at the end, 0 of them stuck: silent for over 1 d",
        "from 10 entries of 1 tenant, not verified",
    ):
        assert line in of_bundles.stdout.splitlines()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "of"))) == [
        "of database",
        "of%20",
    ]


def test_in_a_period_without_events_open_jobs_are_judged_as_of_now_when_its_end_lies_ahead(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    asyncio.run(store(database, ledger_of_jobs("acme"), ledger_of_acts()))
    archive_here(database, tmp_path / "archive")
    place = ("--archive", tmp_path / "archive", "-t", "acme")
    period = ("--from", "2025-01-01", "--to", "9999-01-01", "--window", "2000w", "--stuck-after", "10000w")
    ran = run_command("report", "--dest", "new/folder", *place, *period, "--time", "hlc", "--json")
    assert ran.returncode == ExitCode.FINE, ran.stderr
    told = json.loads(ran.stdout)
    assert told["period"]["to"] == "9999-01-01 00:00:00 UTC"
    assert (told["read"]["entries"], set(told["in_period"].values())) == (10, {0})
    assert told["at_end"]["jobs"] == 4, "what came before the period is known"
    assert told["at_end"]["known_to"][:17] <= told["made"]["at"].replace("T", " ")
    assert (told["at_end"]["open"], told["at_end"]["stuck"]) == (1, 0)
    assert told["at_end"]["known_to"] in (tmp_path / "new" / "folder" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "yesterday"], "--from 'yesterday' is no time: write 2026-01-31T00:00:00Z, an HLC, or seconds"),
        (["--to", "12:30"], "--to '12:30' is no time"),
        (["--to", "9223372036854775807:0:n"], "lies millions of years away"),
        (["--from", "2026-02-01", "--to", "2026-01-01"], "--from must lie before --to"),
        (["--from", "2026-02-01", "--to", "5"], "must be of one clock"),
        (["--from", "5", "--time", "hlc"], "must be of one clock"),
        (["--window", "5"], "--window '5' is no duration"),
        (["--window", "0s"], "--window 0s is no time at all"),
        (["--window", "999999999999w"], "--window 999999999999w reaches further than any report"),
        (["--dest", "rep\udcff"], "arguments must be UTF-8"),
        (["--from", "0", "--to", "1000000", "--window", "1s"], "--window makes 1,000,000 windows of this period"),
        (["--stuck-after", "never"], "--stuck-after 'never' is no duration"),
        (["--stats", "nowhere"], "--stats nowhere holds no windows"),
        (["--stats", "."], "--stats . holds no windows"),
        (["--stats", ".", "--time", "trace"], "--stats is on the ledger's clock"),
        (["--bundle", "gone.tar"], "'gone.tar' is none"),
        (["--archive", "."], "bundles are read alone"),
        (["-t", "acme"], "a bundle is of one tenant"),
        (["--dest", "."], "holds something that is no report"),
        (["--dest", "a.tar"], "holds something that is no report"),
        (["--dest", "a.tar/report"], "a.tar is no folder that can be written to"),
        (["--dest", "/"], "is where a file system begins"),
        (["--dest", "s3://reports/november"], "a report goes to a folder of this machine"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_before_spark_starts(
    run_command: RunCommand, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "a.tar").write_bytes(b"a bundle")
    before = sorted(os.listdir(tmp_path))
    ran = run_command("report", "--dest", "out", "--bundle", "a.tar", *arguments)
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.COULD_NOT_RUN, "", 1)
    assert said in ran.stderr
    assert sorted(os.listdir(tmp_path)) == before, "not even a log was begun"


def test_a_period_or_a_tenant_without_anything_is_told_in_one_line(run_command: RunCommand, tmp_path: Path) -> None:
    bundle = bundle_of_site(tmp_path / "a.tar", "site-a", own_entries(ledger_of_jobs("acme")))
    for arguments, said in (
        (["--from", "2030-01-01"], "--from lies after the last job event there is"),
        (["--to", "2020-01-01"], "there is no job event before --to"),
        (["--to", "600"], "there is no job event with a trace_time before --to"),
        (["--time", "trace"], "there is no job event with a trace_time to report on: use --time hlc"),
        (["--window", "1s"], "--window makes 777,601 windows of this period, at most 400 can be shown"),
    ):
        ran = run_command("report", "--dest", "out", "--bundle", bundle, *arguments)
        assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.COULD_NOT_RUN, "", 1)
        assert said in ran.stderr
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_ledger_without_entries_and_a_tenant_that_is_not_there_are_told(
    run_command: RunCommand, database: Database
) -> None:
    place = ("--dest", "out", "--dsn", database.service_url)
    assert "no job event" in run_command("report", *place).stderr
    ran = run_command("report", *place, "--tenant", "nobody")
    assert (ran.returncode, "there is no tenant 'nobody'" in ran.stderr) == (ExitCode.COULD_NOT_RUN, True), ran.stderr

"""A report on random histories, on plain ones that SQL can count, and on text that is meant to do harm."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import sqlite3
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession

from ledger import canonical
from ledger.errors import ConfigurationError
from ledger.machines.events import JOB_EVENTS
from ledger.machines.jobs import JobFold, status
from ledger.private_fields import PRIVATE_MARK
from pipeline.report import running, summaries
from pipeline.report.folder import rows_of
from pipeline.report.jobs import fold
from pipeline.report.make import Made, make
from pipeline.report.period import Asked, Clock, Period, choose_period
from pipeline.report.said import COLUMNS, said
from pipeline.source.frames import ddl
from pipeline.stats.output import WINDOW_SCHEMA

MADE_AT = datetime(2026, 11, 21, tzinfo=UTC)
MADE = Made("memory", [], ["log.example/1"], "1.0", MADE_AT, "report", "tally pipeline verify")
HOSTILE = ("=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", "\t=1", "<script>alert(1)</script>", "a\u202eb\x1b[31m")
BEGIN_MS = 1_795_000_000_000


class Event(NamedTuple):
    """One event of a job."""

    tenant: str
    job: str
    name: str
    at_ms: int
    fields: dict[str, Any]


def entries(spark: SparkSession, events: list[Event]) -> DataFrame:
    """``events`` as entries, in their order."""
    rows = []
    for seq, event in enumerate(events, 1):
        payload = canonical.encode({"type": event.name, **event.fields}).decode()
        digest = hashlib.sha256(payload.encode()).hexdigest()
        action = JOB_EVENTS[event.name].action
        rows.append((event.tenant, seq, event.job, event.at_ms, seq % 3, "n1", action, payload, digest))
    return spark.createDataFrame(rows, ddl(COLUMNS))


def drawn(seed: int, jobs: int) -> list[Event]:
    """Random events of few fences, times and data centres, so that facts compete."""
    dice = random.Random(seed)
    dcs = ("a", "b", "c")

    def fields(name: str) -> dict[str, Any]:
        given: dict[str, Any] = {"fence_token": dice.choice((0, 1, 2, None, "2", -1))}
        if name == "JobCreated":
            given["assigned_dcs"] = dice.choice((["a"], ["a", "b"], [], ["a", 7], "a"))
        if name in ("JobAccepted", "JobCancellationAcked"):
            given["dc_id"] = dice.choice((*dcs, None, 3))
        return given

    names = sorted(JOB_EVENTS)
    return [
        Event("acme", f"job-{number}", name, BEGIN_MS + dice.randrange(4), fields(name))
        for number in range(jobs)
        for name in dice.choices(names, k=dice.randrange(1, 7))
    ]


def test_the_status_of_every_job_is_that_of_the_ledger(spark: SparkSession) -> None:
    frame = entries(spark, drawn(1, 400)).persist()
    folds: dict[str, JobFold] = {}
    for row in frame.collect():
        state = folds.setdefault(row.job_id, JobFold(row.job_id))
        hlc = (row.hlc_physical, row.hlc_logical, row.hlc_node)
        state.add(row.action, json.loads(row.payload), hlc, row.payload_digest, row.seq)
    found = {row.job_id: row.status for row in fold(said(frame)).select("job_id", "status").collect()}
    assert found == {job: status(state.state()) for job, state in folds.items()}
    assert len(set(found.values())) == 8, "every status is met"


def plain(jobs: int) -> list[Event]:
    """Jobs of two tenants that were created, mostly accepted, and ended in one way or another, over two days."""
    dice, events = random.Random(2), []
    ends = ("JobCompleted", "JobCompleted", "JobFailed", "JobTimedOut", "JobCancellationRequested", "")
    for number in range(jobs):
        tenant, job, dc = dice.choice(("acme", "globex")), f"job-{number}", dice.choice(("use1", "euw1"))
        at_ms = BEGIN_MS + dice.randrange(2 * 86_400_000)
        events.append(Event(tenant, job, "JobCreated", at_ms, {"assigned_dcs": [dc]}))
        events.append(Event(tenant, job, "JobAccepted", at_ms := at_ms + dice.randrange(90_000), {"dc_id": dc}))
        end = dice.choice(ends)
        told: dict[str, Any] = {"error": HOSTILE[number % len(HOSTILE)], "failed_dc": dc} if end == "JobFailed" else {}
        if end == "JobCancellationRequested":
            sealed = {PRIVATE_MARK: {"key": "k1", "sealed": "c2VjcmV0"}}
            told = {"requestor": HOSTILE[number % len(HOSTILE)], "reason": sealed}
        if end:
            events.append(Event(tenant, job, end, at_ms := at_ms + dice.randrange(9_000_000), told))
        if end == "JobCancellationRequested":
            events.append(Event(tenant, job, "JobCancellationAcked", at_ms + 5, {"dc_id": dc}))
    return events


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Event]]:
    """A report on plain jobs."""
    events, folder = plain(300), tmp_path_factory.mktemp("report") / "out"
    return folder, make(entries(spark, events), Asked(window_ms=6 * 3_600_000), None, MADE, folder), events


def test_the_numbers_are_those_of_plain_sql(made: tuple[Path, dict[str, Any], list[Event]]) -> None:
    folder, report, events = made
    with sqlite3.connect(":memory:") as sql:
        sql.execute("CREATE TABLE event (tenant, job, name, at)")
        sql.executemany("INSERT INTO event VALUES (?, ?, ?, ?)", [event[:4] for event in events])
        ends = {"completed": "JobCompleted", "failed": "JobFailed", "timed_out": "JobTimedOut"}
        for name, event in {"created": "JobCreated", **ends, "cancelled": "JobCancellationAcked"}.items():
            (count,) = sql.execute("SELECT count(*) FROM event WHERE name = ?", [event]).fetchone()
            assert report["in_period"][name] == count
            windows = sql.execute(
                "SELECT tenant, at / 21600000 * 21600000, count(*) FROM event WHERE name = ? GROUP BY 1, 2", [event]
            )
            expected = {(tenant, at): count for tenant, at, count in windows}
            found = {
                (row["tenant_id"], round(row["window"].timestamp() * 1000)): row[name]
                for row in rows_of(folder, "tenant_windows")
                if row[name]
            }
            assert found == expected
        queue = sql.execute(
            "SELECT b.at - a.at FROM event a JOIN event b USING (job) WHERE a.name = 'JobCreated' "
            "AND b.name = 'JobAccepted' ORDER BY 1"
        ).fetchall()
        for share in (50, 90, 99):
            assert report["times_s"]["queue"][f"p{share}"] == queue[-(-share * len(queue) // 100) - 1][0] / 1000
        (open_jobs,) = sql.execute(
            "SELECT count(DISTINCT job) FROM event WHERE job NOT IN "
            "(SELECT job FROM event WHERE name NOT IN ('JobCreated', 'JobAccepted'))"
        ).fetchone()
        assert report["at_end"]["open"] == open_jobs


def test_percentiles_of_up_to_ten_thousand_jobs_are_those_at_their_rank(spark: SparkSession) -> None:
    count, period = summaries.EXACT_JOBS_MAX, choose_period(Asked(), Clock.HLC, 0, 0, 0)
    nothing = ("at_ms", "run_ms", "total_ms", "window_ms", "hour")
    rows = spark.range(0, count, 1, 3).selectExpr(
        *("'accepted' AS kind", "id * 7919 % 10007 AS queue_ms", "'acme' AS tenant_id", "'use1' AS dc"),
        *("string(null) AS status", *(f"bigint(null) AS {name}" for name in nothing)),
    )
    found = summaries.of(summaries.summarise(rows), "all", period).first()
    ordered = sorted(at * 7919 % 10007 for at in range(count))
    assert found is not None
    for share in summaries.PERCENTILES:
        assert found[f"queue_p{share}_s"] == ordered[-(-share * count // 100) - 1] / 1000


def test_hostile_text_is_harmless_wherever_it_is_shown(made: tuple[Path, dict[str, Any], list[Event]]) -> None:
    folder, _, _ = made
    page = (folder / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page
    for path in (folder / "csv").iterdir():
        with path.open(newline="") as file:
            next(rows := csv.reader(file))
            cells = [cell for row in rows for cell in row]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t"))]
        assert not [cell for cell in cells if cell.startswith("-") and not cell[1:].replace(".", "").isdigit()]
    assert "'=cmd" in (folder / "csv" / "cancellers.csv").read_text()
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_private_values_are_counted_and_not_shown(made: tuple[Path, dict[str, Any], list[Event]]) -> None:
    folder, report, events = made
    requests = sum(event.name == "JobCancellationRequested" for event in events)
    assert report["left_out"]["private_values"] == requests
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in written if b"c2VjcmV0" in path.read_bytes()]
    jobs = rows_of(folder, "cancelled")
    assert len(jobs) == requests
    assert {(row["cancel_reason"], row["private_fields"]) for row in jobs} == {(None, "cancel_reason")}


def test_the_page_says_what_it_was_made_from(made: tuple[Path, dict[str, Any], list[Event]]) -> None:
    folder, report, events = made
    page = (folder / "report.html").read_text()
    assert report["read"]["entries"] == len(events)
    for told in ("log.example/1", f"{len(events):,}", "A report is not a verification", "tally pipeline verify"):
        assert told in page
    assert json.loads((folder / "report.json").read_text()) == report


def test_a_trace_is_told_in_its_own_time_and_a_report_that_fails_leaves_the_old_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    times = {"JobCreated": 0.0, "JobAccepted": 60.0, "JobCompleted": 660.0}
    fields: dict[str, dict[str, Any]] = defaultdict(dict, JobAccepted={"dc_id": "a"})
    events = [Event("t", "j", name, BEGIN_MS, {**fields[name], "trace_time": at}) for name, at in times.items()]
    report = make(entries(spark, events), Asked(), None, MADE, tmp_path / "out")
    assert report["period"]["clock"] == "trace"
    assert (report["times_s"]["queue"]["p50"], report["times_s"]["run"]["p50"]) == (60, 600)
    before = (tmp_path / "out" / "report.html").read_bytes()
    with pytest.raises(Exception, match="no column"):
        make(spark.range(1).select("no column"), Asked(), None, MADE, tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    with pytest.raises(ConfigurationError, match="something that is no report"):
        make(entries(spark, events), Asked(), None, MADE, tmp_path / "mine")


def test_counts_of_running_jobs_are_summed_by_window(spark: SparkSession) -> None:
    period: Period = choose_period(Asked(window_ms=60_000), Clock.HLC, 0, 119_999, 0)
    rows = [
        (f"timestamp_millis({at_ms})", tenant, name, amount)
        for at_ms, tenant, name, amount in (
            *((0, "acme", "requests", 10), (30_000, "acme", "requests", 20), (60_000, "acme", "requests", 5)),
            *((60_000, "globex", "requests", 1), (120_000, "acme", "requests", 1000)),
        )
    ]
    values = ", ".join(f"({at}, '{tenant}', 'use1', 'count', '{name}', {sum_})" for at, tenant, name, sum_ in rows)
    given = spark.sql(f"SELECT * FROM VALUES {values} AS v(window_start, tenant_id, dc_id, what, name, sum)")
    assert set(given.columns) <= set(WINDOW_SCHEMA.replace(",", " ").split())
    (found,) = running.measures(running.by_window(given, [], period), period).collect()
    assert found.asDict() == {
        "what": "count",
        "name": "requests",
        "amount": 36,
        "per_second": 0.3,
        "most_per_second": 0.5,
        "tenants": 2,
        "dcs": 1,
    }

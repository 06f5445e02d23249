"""A report on random histories, on plain ones that SQL can count, and on text that is meant to do harm."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from ledger import canonical
from ledger.errors import ConfigurationError
from ledger.facts.events import JOB_EVENTS
from ledger.machines.exclusions import NO_STATEMENTS, SUBJECT, statements_of
from ledger.machines.jobs import JobFold, folded, said_of_job, status
from ledger.private_fields import PRIVATE_MARK
from pipeline.report import Asked, Clock, Period, choose_period, tables
from pipeline.report.folder import rows_of
from pipeline.report.jobs import COLUMNS, OWN_LOG, counted, facts, fold
from pipeline.report.make import Made, make
from pipeline.source import ddl
from pipeline.stats.destination import WINDOW_SCHEMA
from tests.ledger.regions import Region, lived

MADE_AT = datetime(2026, 11, 21, tzinfo=UTC)
MADE = Made("memory", [], ["log.example/1"], "1.0", MADE_AT, "report", "tally pipeline verify")
HOSTILE = ("=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", "\t=1", "<script>alert(1)</script>", "a\u202eb\x1b[31m")
SEALED = {PRIVATE_MARK: {"key": "k1", "sealed": "c2VjcmV0"}}
TEAMS = ("red", "=1+1", SEALED, 7)
BY = ("spec.labels.team", "spec.labels.team.inner")
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


def of_regions(spark: SparkSession, regions: Iterable[Region]) -> DataFrame:
    """The chains of ledgers that exchanged, a tenant each."""
    rows = [
        (region.name, seq, entry.job_id, *entry.hlc, entry.action, entry.payload, entry.digest)
        for region in regions
        for seq, entry in enumerate(region.chain, 1)
    ]
    return spark.createDataFrame(rows, ddl(COLUMNS))


def test_a_report_folds_without_excluded_logs_as_the_service_does(spark: SparkSession) -> None:
    """Two places: the ledger that states the exclusion, and the excluded one, whose own entries have no origin."""
    good, bad = "good.example/acme", "bad.example/acme"
    facts_of: list[tuple[str, str, str, dict[str, Any]]] = [
        (good, "job-1", "JobCreated", {"spec": {}, "assigned_dcs": ["a"]}),
        (bad, "job-1", "JobCancellationRequested", {"reason": "mischief"}),
        (bad, "job-2", "JobCreated", {"spec": {}, "assigned_dcs": ["a"]}),
        (good, "job-3", "JobCreated", {"spec": {}, "assigned_dcs": ["a"]}),
        (bad, "job-3", "JobFailed", {"error": "not so"}),
        (good, SUBJECT, "LOG_EXCLUDED", {"log": bad, "reason": "it lies"}),
    ]
    rows = []
    for own_log in (good, bad):
        for seq, (log, job_id, name, given) in enumerate(facts_of, 1):
            action = JOB_EVENTS[name].action if name in JOB_EVENTS else name
            payload = canonical.encode({"type": name, **given}).decode()
            origin = None if log == own_log else json.dumps({"log": log})
            digest = hashlib.sha256(payload.encode()).hexdigest()
            hlc = (BEGIN_MS + seq, 0, log[:3])
            rows.append((own_log, job_id, seq, *hlc, action, digest, payload, origin))
    frame = spark.createDataFrame(
        [
            (own_log, seq, job_id, *hlc, action, payload, digest, origin, own_log)
            for own_log, job_id, seq, *hlc, action, digest, payload, origin in rows
        ],
        f"{ddl(COLUMNS)}, origin string, {OWN_LOG} string",
    )
    expected = {}
    for own_log in (good, bad):
        chain = [row[1:] for row in rows if row[0] == own_log]
        excluded = statements_of(NO_STATEMENTS, chain, own_log).exclusions(own_log)
        for job_id in ("job-1", "job-3"):
            state = folded(job_id, None, [row for row in chain if row[0] == job_id], excluded)
            assert state is not None
            expected[own_log, job_id] = status(state)
    found = fold(counted(facts(frame)), Clock.HLC).select("tenant_id", "job_id", "status").collect()
    assert {(row.tenant_id, row.job_id): row.status for row in found} == expected
    assert {*expected.values()} == {"SUBMITTED"}


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
    (world := lived(3, 150)).heal()
    frame = entries(spark, drawn(1, 400)).union(of_regions(spark, world.regions.values())).persist()
    folds: dict[tuple[str, str], JobFold] = {}
    for row in frame.collect():
        state = folds.setdefault((row.tenant_id, row.job_id), JobFold(row.job_id))
        hlc = (row.hlc_physical, row.hlc_logical, row.hlc_node)
        if (said := said_of_job(row.action, json.loads(row.payload), hlc, row.payload_digest, row.job_id)) is not None:
            state.add(*said, row.seq)
    statuses = fold(facts(frame), Clock.HLC).select("tenant_id", "job_id", "status").collect()
    found = {(row.tenant_id, row.job_id): row.status for row in statuses}
    assert found == {job: status(state.state()) for job, state in folds.items()}
    assert len(set(found.values())) == 8, "every status is met"
    for job_id in world.regions["use1"].folds:
        assert len({found[name, job_id] for name in world.regions}) == 1, "ledgers that exchanged agree"


def plain(jobs: int) -> list[Event]:
    """Jobs of two tenants that were created, mostly accepted, and ended in one way or another, over two days."""
    dice, events = random.Random(2), []
    ends = ("JobCompleted", "JobCompleted", "JobFailed", "JobTimedOut", "JobCancellationRequested", "")
    for number in range(jobs):
        tenant, job, dc = dice.choice(("acme", "globex")), f"job-{number}", dice.choice(("use1", "euw1"))
        at_ms = BEGIN_MS + dice.randrange(2 * 86_400_000)
        spec = {"labels": {"team": TEAMS[number % len(TEAMS)]}} if number % 7 else {"labels": "none"}
        events.append(Event(tenant, job, "JobCreated", at_ms, {"assigned_dcs": [dc], "spec": spec}))
        events.append(Event(tenant, job, "JobAccepted", at_ms := at_ms + dice.randrange(90_000), {"dc_id": dc}))
        end = dice.choice(ends)
        told: dict[str, Any] = {"error": HOSTILE[number % len(HOSTILE)], "failed_dc": dc} if end == "JobFailed" else {}
        if end == "JobCancellationRequested":
            told = {"requestor": HOSTILE[number % len(HOSTILE)], "reason": SEALED}
        if end:
            events.append(Event(tenant, job, end, at_ms := at_ms + dice.randrange(9_000_000), told))
        if end == "JobCancellationRequested":
            events.append(Event(tenant, job, "JobCancellationAcked", at_ms + 5, {"dc_id": dc}))
    return events


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Event]]:
    """A report on plain jobs."""
    events, folder = plain(300), tmp_path_factory.mktemp("report") / "out"
    made = MADE._replace(by=BY)
    return folder, make(entries(spark, events), Asked(window_ms=6 * 3_600_000), None, made, folder), events


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


def test_why_jobs_did_not_complete_is_counted_by_reason_with_the_newest_job_of_each(
    made: tuple[Path, dict[str, Any], list[Event]],
) -> None:
    folder, _, events = made
    expected: dict[tuple[str, str | None, bool], list[Event]] = defaultdict(list)
    statuses = {"JobFailed": "FAILED", "JobTimedOut": "TIMED_OUT", "JobCancellationAcked": "CANCELLED"}
    for event in events:
        if event.name in statuses:
            is_private = event.name == "JobCancellationAcked"
            expected[statuses[event.name], event.fields.get("error"), is_private].append(event)
    rows = rows_of(folder, "reasons")
    found = {(row["status"], row["reason"], bool(row["is_private"])): row for row in rows}
    assert {key: row["jobs"] for key, row in found.items()} == {key: len(told) for key, told in expected.items()}
    assert [row["jobs"] for row in rows] == sorted((len(told) for told in expected.values()), reverse=True)
    for key, told in expected.items():
        newest = max(told, key=lambda event: (event.at_ms, event.tenant, event.job))
        assert (found[key]["tenant_id"], found[key]["job_id"]) == (newest.tenant, newest.job)
        assert found[key]["tenants"] == len({event.tenant for event in told})


def test_jobs_are_counted_by_the_values_of_fields_of_their_spec(made: tuple[Path, dict[str, Any], list[Event]]) -> None:
    folder, _, events = made
    teams: dict[tuple[str, str | None, bool], int] = defaultdict(int)
    for event in events:
        if event.name == "JobCreated":
            labels = event.fields["spec"]["labels"]
            team = labels["team"] if isinstance(labels, dict) else None
            is_private = team == SEALED
            teams[BY[0], None if is_private or team is None else str(team), is_private] += 1
            teams[BY[1], None, is_private] += 1
    rows = rows_of(folder, "labels")
    assert {(row["field"], row["value"], row["is_private"]): row["created"] for row in rows} == teams
    whole = rows_of(folder, "all")[0]
    for name in BY:
        assert sum(row["failed"] for row in rows if row["field"] == name) == whole["failed"]
    page = (folder / "report.html").read_text()
    assert "<caption>By spec.labels.team</caption>" in page
    assert "c2VjcmV0" not in page + (folder / "csv/labels.csv").read_text()


def test_jobs_are_open_from_their_creation_to_their_end(made: tuple[Path, dict[str, Any], list[Event]]) -> None:
    folder, report, events = made
    ends = {"JobCompleted", "JobFailed", "JobTimedOut", "JobCancellationAcked"}
    created = [event.at_ms for event in events if event.name == "JobCreated"]
    ended = [event.at_ms for event in events if event.name in ends]
    rows = rows_of(folder, "open")
    for row in rows:
        end_ms = round(row["window"].timestamp() * 1000) + 6 * 3_600_000
        assert row["open"] == sum(at < end_ms for at in created) - sum(at < end_ms for at in ended)
    assert rows[-1]["open"] == report["at_end"]["open"]


def test_the_period_before_is_as_long_and_ends_where_this_one_begins(spark: SparkSession) -> None:
    timed = fold(facts(entries(spark, plain(120))), Clock.HLC).persist()
    middle, day = BEGIN_MS + 86_400_000, 86_400_000
    period, last = (
        choose_period(Asked(Clock.HLC, start, start + day, day), Clock.HLC, BEGIN_MS, BEGIN_MS + 2 * day, 0)
        for start in (middle, BEGIN_MS)
    )
    then = tables.of(tables.summarise(tables.happenings(timed, last)), "all", last).first()
    assert tables.before(timed, period).first() == then
    assert then is not None
    assert then["created"] > 0
    # Jobs of before that are still open count.
    (*_, at_end) = tables.openings(timed, period).collect()
    ((count,),) = (
        timed.where(F.col("created_ms") < middle + day)
        .selectExpr(f"count_if(ended_ms IS NULL OR ended_ms >= {middle + day})")
        .collect()
    )
    assert at_end["open"] == count


def test_percentiles_of_up_to_ten_thousand_jobs_are_those_at_their_rank(spark: SparkSession) -> None:
    count, period = tables.EXACT_JOBS_MAX, choose_period(Asked(), Clock.HLC, 0, 0, 0)
    nothing = ("at_ms", "run_ms", "total_ms", "window_ms", "hour")
    rows = spark.range(0, count, 1, 3).selectExpr(
        *("'accepted' AS kind", "id * 7919 % 10007 AS queue_ms", "'acme' AS tenant_id", "'use1' AS dc"),
        *("string(null) AS status", *(f"bigint(null) AS {name}" for name in nothing)),
    )
    found = tables.of(tables.summarise(rows), "all", period).first()
    ordered = sorted(at * 7919 % 10007 for at in range(count))
    assert found is not None
    for share in tables.PERCENTILES:
        assert found[f"queue_p{share}_s"] == ordered[-(-share * count // 100) - 1] / 1000


def test_hostile_text_is_harmless_wherever_it_is_shown(made: tuple[Path, dict[str, Any], list[Event]]) -> None:
    folder, _, _ = made
    page = (folder / "report.html").read_text()
    assert page.count("<script") == 1, "its own"
    assert "<script>alert" not in page
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
    teams = sum(event.fields.get("spec") == {"labels": {"team": SEALED}} for event in events)
    assert report["left_out"]["private_values"] == requests + teams
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


@pytest.fixture(scope="module")
def of_a_trace(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A report on one job of acme, whose events have times of a trace, with acts and refusals of two tenants."""
    times = {"JobCreated": 0.0, "JobAccepted": 60.0, "JobCompleted": 660.0}
    fields: dict[str, dict[str, Any]] = defaultdict(dict, JobAccepted={"dc_id": "a"})
    events = [Event("acme", "j", name, BEGIN_MS, {**fields[name], "trace_time": at}) for name, at in times.items()]
    acts = [
        ("ACT_ALLOWED", 1, {"actor": "root", "right": "admin", "route": "r", "tenant_id": tenant_id})
        for tenant_id in ("acme", "globex")
    ]
    refused = {"refusals": [{"problem": "forbidden", "tenant_id": "globex", "count": 2}], "others": 3}
    system = recorded(spark, "_system", [*acts, ("ACCESS_REFUSED", 1, refused)])
    folder = tmp_path_factory.mktemp("trace") / "out"
    made = MADE._replace(tenants=["acme"])
    return folder, make(entries(spark, events), Asked(), None, made, folder, system=system)


def test_a_trace_is_told_in_its_own_time(of_a_trace: tuple[Path, dict[str, Any]]) -> None:
    _, report = of_a_trace
    assert report["period"]["clock"] == "trace"
    assert (report["times_s"]["queue"]["p50"], report["times_s"]["run"]["p50"]) == (60, 600)


def test_a_report_that_fails_leaves_the_old_one(spark: SparkSession, of_a_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = of_a_trace
    before = (folder / "report.html").read_bytes()
    with pytest.raises(Exception, match="payload"):
        make(entries(spark, plain(1)).drop("payload"), Asked(), None, MADE, folder)
    assert (folder / "report.html").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_a_report_never_takes_the_place_of_something_else(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    with pytest.raises(ConfigurationError, match="something that is no report"):
        make(entries(spark, plain(1)), Asked(), None, MADE, tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "letter.txt"]


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
    (found,) = tables.measures(tables.by_window(given, [], period), period).collect()
    assert found.asDict() == {
        "what": "count",
        "name": "requests",
        "amount": 36,
        "per_second": 0.3,
        "most_per_second": 0.5,
        "tenants": 2,
        "dcs": 1,
    }


SEALED = {PRIVATE_MARK: {"key": "k1", "sealed": "c2VjcmV0"}}


def recorded(spark: SparkSession, tenant_id: str, entries: list[tuple[str, int, dict[str, Any]]]) -> DataFrame:
    """What the ledger wrote about itself into a chain: action, time and facts each."""
    rows = [
        (tenant_id, 1000 + seq, "about", at_ms, seq, "n2", action, canonical.encode(facts).decode(), "")
        for seq, (action, at_ms, facts) in enumerate(entries)
    ]
    return spark.createDataFrame(rows, ddl(COLUMNS))


@pytest.fixture(scope="module")
def who(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A report on what principals did, whose period begins at ``BEGIN_MS``."""

    def sent(tenant: str, job: str, name: str, at_ms: int, actor: Any) -> Event:
        return Event(tenant, job, name, BEGIN_MS + at_ms, {} if actor is None else {"actor": actor})

    events = [
        sent("acme", "a", "JobCreated", 5, "ci"),
        sent("acme", "a", "JobCreated", 9, "late"),
        sent("acme", "a", "JobCompleted", 10, "ci"),
        sent("acme", "b", "JobCreated", 6, "ci"),
        sent("acme", "b", "JobCancellationRequested", 8, HOSTILE[5]),
        sent("acme", "c", "JobCreated", -5, "ci"),
        sent("acme", "d", "JobCreated", 7, None),
        sent("globex", "e", "JobCreated", 7, SEALED),
        sent("globex", "f", "JobCreated", 8, SEALED | {}),
    ]
    one, many = {"actor": "eve", "route": "GET /v1/jobs/{job_id}"}, {"actor": "eve", "route": "GET /v1/jobs"}
    reads = [
        ("PAYLOADS_READ", BEGIN_MS + 5, one | {"job_id": "a"}),
        ("PAYLOADS_READ", BEGIN_MS + 6, one | {"job_id": "b"}),
        ("PAYLOADS_READ", BEGIN_MS + 6, many | {"jobs": 40}),
        ("PAYLOADS_READ", BEGIN_MS + 7, {"route": "GET /v1/chain/entries", "from_seq": 1, "entries": 7}),
        ("PAYLOADS_READ", BEGIN_MS - 1, one | {"job_id": "a"}),
        ("PAYLOADS_READ", BEGIN_MS + 8, many | {"jobs": "all", "events": 2**53 - 1}),
    ]
    rotate = {"actor": "root", "right": "admin", "route": "POST /v1/keys/rotate", "path": "/v1/keys/rotate"}
    erase = {"actor": "root", "right": "admin", "route": "POST /erase", "path": "/", "tenant_id": "acme"}
    refusal = {"actor": "eve", "route": "GET /v1/jobs", "problem": "forbidden", "tenant_id": "acme", "count": 3}
    system = [
        ("ACT_ALLOWED", BEGIN_MS + 1, rotate),
        ("ACT_ALLOWED", BEGIN_MS + 2, erase),
        ("ACT_ALLOWED", BEGIN_MS + 3, erase),
        ("ACT_ALLOWED", BEGIN_MS - 3, erase),
        ("ACCESS_REFUSED", BEGIN_MS + 4, {"refusals": [refusal, {"route": "GET", "problem": "unauthenticated"}, 7]}),
        ("ACCESS_REFUSED", BEGIN_MS + 5, {"refusals": [refusal | {"count": 4}], "others": 11}),
        ("ACCESS_REFUSED", BEGIN_MS + 5, {"refusals": "none", "others": -1}),
        ("KEY_ADDED", BEGIN_MS + 5, rotate),
        ("ACT_ALLOWED", BEGIN_MS + 1000, erase),
    ]
    folder = tmp_path_factory.mktemp("who") / "out"
    asked = Asked(Clock.HLC, BEGIN_MS, BEGIN_MS + 1000)
    all_entries = entries(spark, events).union(recorded(spark, "acme", reads))
    report = make(all_entries, asked, None, MADE, folder, system=recorded(spark, "_system", system))
    return folder, report


def told(folder: Path, name: str, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in rows_of(folder, name)]


def test_events_and_jobs_are_counted_by_who_sent_and_created_them(who: tuple[Path, dict[str, Any]]) -> None:
    folder, report = who
    found = told(folder, "actors", "tenant_id", "actor", "is_private", "events", "jobs_created", "enqueue", "complete")
    assert found == [
        ("acme", "ci", False, 3, 2, 2, 1),
        ("globex", None, True, 2, 2, 2, 0),
        ("acme", None, False, 1, 1, 1, 0),
        ("acme", HOSTILE[5], False, 1, 0, 0, 0),
        ("acme", "late", False, 1, 0, 1, 0),
    ]
    assert {row["job_id"]: row["created_by"] for row in rows_of(folder, "jobs")} == {
        "a": "ci",
        "b": "ci",
        "c": "ci",
        "d": None,
        "e": None,
        "f": None,
    }
    assert (report["who"]["events_without_actor"], report["who"]["events_of_private_actors"]) == (1, 2)


def test_who_read_was_allowed_and_refused_what_is_told_within_the_period(who: tuple[Path, dict[str, Any]]) -> None:
    folder, report = who
    assert told(folder, "readers", "tenant_id", "actor", "route", "reads", "jobs", "events", "entries") == [
        ("acme", "eve", "GET /v1/jobs", 2, 40, 0, 0),
        ("acme", "eve", "GET /v1/jobs/{job_id}", 2, 2, 0, 0),
        ("acme", None, "GET /v1/chain/entries", 1, 0, 0, 7),
    ]
    assert told(folder, "acts", "actor", "right", "route", "tenant_id", "acts") == [
        ("root", "admin", "POST /erase", "acme", 2),
        ("root", "admin", "POST /v1/keys/rotate", None, 1),
    ]
    assert told(folder, "refusals", "actor", "route", "problem", "tenant_id", "refusals") == [
        ("eve", "GET /v1/jobs", "forbidden", "acme", 7),
        (None, "GET", "unauthenticated", None, 0),
    ]
    (last,) = {row["last"] for row in rows_of(folder, "acts") if row["tenant_id"]}
    assert round(last.replace(tzinfo=UTC).timestamp() * 1000) == BEGIN_MS + 3
    assert report["who"] | {"events_without_actor": 0, "events_of_private_actors": 0} == {
        "events_without_actor": 0,
        "events_of_private_actors": 0,
        "reads": 5,
        "tenants_with_reads": 1,
        "acts": 3,
        "refusals": 7,
        "refusals_not_listed": 11,
    }


def test_the_page_says_who_did_it_and_what_of_that_is_not_known(who: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = who
    page = (folder / "report.html").read_text()
    section = page[page.index('<section id="who">') : page.index('<section id="windows">')]
    for text in (
        ">ci</bdi>",
        "<i>private</i>",
        "<i>not known</i>",
        "POST /v1/keys/rotate",
        "1 events do not say who sent them",
        "2 were sent by principals whose name is private",
        "Of 1 of 2 tenants no chain tells of a read",
        "11 more refusals were counted",
    ):
        assert text in section, text
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in written if b"c2VjcmV0" in path.read_bytes()]
    assert "<script" not in section


def test_of_a_tenant_asked_for_only_acts_and_refusals_that_name_it_are_told(
    of_a_trace: tuple[Path, dict[str, Any]],
) -> None:
    folder, report = of_a_trace
    assert report["period"]["clock"] == "trace", "beside a trace all of it counts"
    assert told(folder, "acts", "tenant_id", "acts") == [("acme", 1)]
    assert told(folder, "refusals", "tenant_id") == []
    assert (report["who"]["refusals"], report["who"]["refusals_not_listed"]) == (0, 3)
    assert "they have no time of the trace" in (folder / "report.html").read_text()


def test_without_the_chain_of_system_acts_and_refusals_are_not_known(
    made: tuple[Path, dict[str, Any], list[Event]],
) -> None:
    folder, report, _ = made
    assert (report["who"]["acts"], report["who"]["refusals"]) == (None, None)
    assert rows_of(folder, "acts") == []
    assert "which was not read with this" in (folder / "report.html").read_text()

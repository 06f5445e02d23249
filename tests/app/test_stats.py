"""``POST /v1/stats`` on a whole node: what is taken, what is refused, where it ends up, and what it leaves alone."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.edge.routes.stats import LINES_PER_TURN, take
from app.runtime.metrics import Metrics
from app.write import stats as stats_module
from app.write.stats import LoopShare, StatsIntake
from tests.app.conftest import MakeSettings, RunServer


def allowed(_tenant_id: str) -> None:
    """Whoever reports may do so for any tenant."""


NDJSON = {"content-type": "application/x-ndjson"}
REPORT: dict[str, Any] = {"tenant_id": "acme", "job_id": "job-1", "dc_id": "use1"}
FULL: dict[str, Any] = {
    **REPORT,
    "workflow_id": "load-3",
    "time": "2024-01-11T13:40:00.250Z",
    "completed": 120,
    "failed": 2,
    "interval_ms": 1000,
    "counts": {"requests": 812},
    "values": {"latency_p99_ms": 41.5},
}
SKEW_MS = 5000
SETTINGS = {"stats": {"file_age": "100ms"}}


def lines_of(*reports: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(report).encode() + b"\n" for report in reports)


def written(data_dir: Path) -> list[dict[str, Any]]:
    """Every report in a closed file, in the order of the names."""
    closed = sorted(data_dir.glob("stats/*/[0-9]*.ndjson"))
    return [json.loads(line) for path in closed for line in path.read_bytes().splitlines()]


async def kept(data_dir: Path, count: int) -> list[dict[str, Any]]:
    """The reports in closed files, once there are so many."""
    async with asyncio.timeout(60):
        while len(found := written(data_dir)) < count:
            await asyncio.sleep(0.02)
    return found


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture
async def client(
    run_server: RunServer, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """Of a node that checks whatever comes, however long the machine was at other things meanwhile."""
    monkeypatch.setattr("app.write.stats.CHECKING_BURST_S", 60.0)
    async with run_server(make_settings(**SETTINGS)) as client:
        yield client


async def test_reports_are_answered_at_once_and_written_as_lines(client: httpx.AsyncClient, tmp_path: Path) -> None:
    one = await client.post("/v1/stats", json=FULL)
    assert (one.status_code, one.json()) == (202, {"accepted": 1, "dropped": 0, "sample_rate": 1.0})
    many = await client.post("/v1/stats", content=lines_of(REPORT, {**REPORT, "time_ms": 1}), headers=NDJSON)
    assert (many.status_code, many.json()) == (202, {"accepted": 2, "dropped": 0, "sample_rate": 1.0})
    full, bare, old = await kept(tmp_path / "node", 3)
    received = full.pop("received")
    assert full == {**FULL, "weight": 1}
    assert bare == {**REPORT, "time": bare["received"], "received": bare["received"], "weight": 1}
    assert bare["received"] >= received
    assert old["time"] == "1970-01-01T00:00:00.001Z"
    assert await metric(client, "stats_reports_total") == 3
    assert await metric(client, "stats_written_bytes_total") > 300
    assert "acme" not in (await client.get("/metrics")).text


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tenant_id": "No"}, "tenant_id"),
    ({"job_id": ""}, "job_id"),
    ({"dc_id": "a\0"}, "dc_id"),
    ({"other": 1}, "other"),
    ({"completed": -1}, "completed"),
    ({"completed": "1"}, "completed"),
    ({"counts": {"requests": 1.5}}, "counts.requests"),
    ({"counts": {f"n{n}": 1 for n in range(33)}}, "counts"),
    ({"values": {"Cpu": 1.0}}, "values"),
    ({"values": {"cpu": None}}, "values.cpu"),
    ({"time": "2026-11-21 13:40:00Z"}, "time"),
    ({"time": "2026-11-21T13:40:00"}, "time"),
    ({"time": "2026-02-30T13:40:00Z"}, "time"),
    ({"time": "1969-12-31T23:59:59Z"}, "time"),
    ({"time": "2026-11-21T13:40:00Z", "time_ms": 1}, "time_ms"),
    ({"workflow_id": None}, "workflow_id"),
]


async def test_one_wrong_line_refuses_the_request_with_its_number_and_keeps_nothing(client: httpx.AsyncClient) -> None:
    for changed, path in WRONG:
        answer = await client.post("/v1/stats", content=lines_of(REPORT, {**REPORT, **changed}), headers=NDJSON)
        problem = answer.json()
        assert (answer.status_code, problem["type"].rpartition("/")[2], problem["line"]) == (422, "invalid-event", 2)
        assert problem["path"].startswith(path), changed
        alone = await client.post("/v1/stats", json={**REPORT, **changed})
        assert (alone.status_code, alone.json()["type"].rpartition("/")[2]) == (422, "invalid-request")
        assert alone.json()["path"].startswith(path), changed
    assert await metric(client, "stats_reports_total") == 0


async def test_a_body_of_any_other_shape_is_refused(client: httpx.AsyncClient) -> None:
    shapes = [
        (b"", NDJSON, 422),
        (b"\n\n", NDJSON, 422),
        (lines_of(REPORT) + b"\n" + lines_of(REPORT), NDJSON, 422),
        (b"[]", {"content-type": "application/json"}, 422),
        (b'{"tenant_id":"a","tenant_id":"b","job_id":"j","dc_id":"d"}', NDJSON, 422),
        (lines_of({**REPORT, "dc_id": "x" * 200, "values": {f"{'v' * 60}{n}": n for n in range(130)}}), NDJSON, 422),
        (lines_of(REPORT) * 10_001, NDJSON, 413),
        (b" " * ((1 << 20) + 1), NDJSON, 413),
        (lines_of(REPORT), {"content-type": "text/plain"}, 415),
    ]
    for content, headers, status in shapes:
        answer = await client.post("/v1/stats", content=content, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), content[
            :50
        ]
    assert await metric(client, "stats_reports_total") == 0


async def test_a_time_too_far_ahead_is_refused_since_it_would_end_everybodys_windows(client: httpx.AsyncClient) -> None:
    for time in ({"time": "9999-12-31T23:59:59Z"}, {"time_ms": 2**53 - 1}):
        answer = await client.post("/v1/stats", content=lines_of(REPORT, {**REPORT, **time}), headers=NDJSON)
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (400, "clock-skew")
        assert "line 2" in answer.json()["detail"]
    assert await metric(client, "stats_reports_total") == 0


async def test_stats_never_reach_wal_chain_or_tables(
    client: httpx.AsyncClient, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    words = ("only-in-stats", "only-in-jobs")
    job = {"tenant_id": "acme", "job_id": "job-1", "durability": "GLOBAL", "assigned_dcs": ["only-in-jobs"]}
    assert (await client.post("/v1/jobs", json=job)).status_code == 201
    answer = await client.post("/v1/stats", content=lines_of({**REPORT, "dc_id": "only-in-stats"}) * 50, headers=NDJSON)
    assert answer.json()["accepted"] == 50
    assert len(await kept(tmp_path / "node", 50)) == 50
    wal = b"".join(path.read_bytes() for path in (tmp_path / "node" / "wal").rglob("*.wal"))
    assert [word.encode() in wal for word in words] == [False, True]
    tables = await superuser.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'scheduler'")
    rows = [row for (table,) in tables for row in await superuser.fetch(f'SELECT t::text FROM scheduler."{table}" t')]
    assert [any(word in row[0] for row in rows) for word in words] == [False, True]


async def test_under_pressure_lines_are_sampled_weighted_and_counted() -> None:
    metrics, draw = Metrics(), random.Random(1).randbytes
    intake = StatsIntake(50_000, draw=draw)
    lines = [lines_of(FULL).rstrip()] * 100
    receipts = [await take(lines, False, SKEW_MS, allowed, intake, metrics) for _ in range(5)]
    assert [receipt["sample_rate"] for receipt in receipts] == [1.0, 0.5, 0.25, 0.125, 0.125]
    assert all(receipt["accepted"] + receipt["dropped"] == 100 for receipt in receipts)
    kept = b"".join(chunk.data for chunk in intake.take(None)).splitlines()
    weights = [json.loads(line)["weight"] for line in kept]
    assert [weights.count(weight) for weight in (1, 2, 4)] == [receipt["accepted"] for receipt in receipts[:3]]
    # What was kept stands for all that came, as near as chance allows.
    assert 300 < sum(weights) < 700
    said = dict(line.rsplit(" ", 1) for line in metrics.render()[0].decode().splitlines())
    assert said["stats_reports_total"] == "500.0"
    dropped = [float(said[f'stats_dropped_total{{reason="{reason}"}}']) for reason in ("sampled", "full")]
    assert sum(dropped) == 500 - len(kept)
    assert dropped[0] > 100


async def test_what_finds_no_room_is_counted() -> None:
    metrics, intake = Metrics(), StatsIntake(1000)
    receipt = await take([lines_of(FULL)] * 10, False, SKEW_MS, allowed, intake, metrics)
    assert receipt == {"accepted": 0, "dropped": 10, "sample_rate": 1.0}
    assert 'stats_dropped_total{reason="full"} 10.0' in metrics.render()[0].decode()


async def test_while_too_much_waits_to_be_checked_the_next_is_dropped_unread_and_counted(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_module, "CHECKED_BYTES_MAX", 100)
    for content, headers, count in (
        (b"not looked at\n" * 20, NDJSON, 20),
        (b"x" * 200, NDJSON, 1),
        (b"\n" * 200, {"content-type": "application/json"}, 1),
    ):
        answer = await client.post("/v1/stats", content=content, headers=headers)
        assert (answer.status_code, answer.json()) == (202, {"accepted": 0, "dropped": count, "sample_rate": 0.0})
    assert await metric(client, 'stats_dropped_total{reason="busy"}') == 22


async def test_when_the_time_for_stats_is_used_up_they_are_sampled_unread_then_dropped_and_every_line_is_counted(
    run_server: RunServer, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stats_module, "CHECKING_BURST_S", 0.05)
    # Nothing comes back meanwhile, so that only what is used up counts.
    monkeypatch.setattr(LoopShare, "_refill", lambda share: share._left_s)
    rates: list[float] = []
    accepted = dropped = 0
    async with run_server(make_settings(**SETTINGS)) as client:
        async with asyncio.timeout(120):
            while 0.0 not in rates:
                answer = (await client.post("/v1/stats", content=lines_of(FULL) * 100, headers=NDJSON)).json()
                rates.append(answer["sample_rate"])
                accepted, dropped = accepted + answer["accepted"], dropped + answer["dropped"]
        assert rates == sorted(rates, reverse=True)
        assert set(rates) <= {1.0, 0.5, 0.25, 0.125, 0.0}
        unread = await client.post("/v1/stats", content=b"no report\n" * 7, headers=NDJSON)
        assert unread.json() == {"accepted": 0, "dropped": 7, "sample_rate": 0.0}
        assert accepted + dropped == 100 * len(rates)
        assert await metric(client, "stats_reports_total") == 100 * (len(rates) - 1)
        assert await metric(client, "stats_dropped_total") == dropped + 7
        found = await kept(tmp_path / "node", accepted)
    weights = [report["weight"] for report in found]
    assert len(weights) == accepted
    assert set(weights) == {round(1 / rate) for rate in rates if rate}


async def test_others_get_their_turn_while_reports_are_checked_and_queued() -> None:
    lines = [lines_of(FULL).rstrip()] * (LINES_PER_TURN * 4)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count_turns())
    await take(lines, False, SKEW_MS, allowed, StatsIntake(1 << 20), Metrics())
    counting.cancel()
    # A pause between each two turns.
    assert turns >= 3


async def test_a_folder_that_cannot_be_written_is_counted_and_harms_no_job(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "stats"
    in_the_way.write_text("a file where the folder should be")
    async with run_server(make_settings(stats={"dir": in_the_way, "file_age": "100ms"})) as client:
        answer = await client.post("/v1/stats", json=REPORT)
        assert answer.status_code == 202
        async with asyncio.timeout(60):
            while await metric(client, 'stats_dropped_total{reason="disk"}') < 1:
                await asyncio.sleep(0.02)
        assert (await client.get("/readyz")).status_code == 200
        created = await client.post("/v1/jobs", json={"tenant_id": "acme", "durability": "GLOBAL"})
        assert created.json()["durability"]["achieved"] == "GLOBAL"
        in_the_way.unlink()
        async with asyncio.timeout(60):
            while await metric(client, "stats_written_bytes_total") == 0:
                await client.post("/v1/stats", json=REPORT)
                await asyncio.sleep(0.02)
    shutil.rmtree(in_the_way)


async def test_a_stop_writes_what_waits_and_closes_the_file(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    async with run_server(make_settings()) as client:
        await client.post("/v1/stats", content=lines_of(FULL) * 300, headers=NDJSON)
    assert len(written(tmp_path / "node")) == 300
    assert list((tmp_path / "node" / "stats").glob("*/.*")) == []

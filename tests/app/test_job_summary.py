"""``GET /v1/jobs/summary``: figures that are counted as jobs are followed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import asyncpg
import pytest

from app.read.folded_jobs import JobTableWalk
from app.store.jobs import figures as job_figures
from app.store.jobs.figures import TIMED_GROUPS_MAX
from ledger.machines.job_figures import DCS_MAX, VALUES_MAX
from tests.app.chains import until
from tests.app.client import Client
from tests.app.shared import Shared

HOUR_S = 3600


async def send(client: Client, *events: Mapping[str, Any]) -> None:
    lines = "\n".join(json.dumps({"tenant_id": client.tenant, **event}) for event in events)
    answer = await client.post("/v1/events", content=lines, headers={"Content-Type": "application/x-ndjson"})
    assert answer.status_code == 200, answer.text


async def summary(client: Client, **params: str | int) -> dict[str, Any]:
    answer = await client.get("/v1/jobs/summary", params={"tenant_id": client.tenant, **params})
    assert answer.status_code == 200, answer.text
    return answer.json()


def counts(found: Mapping[str, Any]) -> dict[str, int]:
    return {group["value"]: group["jobs"] for group in found["groups"]}


async def fill(client: Client) -> None:
    """Three jobs of a trace: two fail in the first hour, one of them for good, and one runs in the third."""
    await send(
        client,
        {"type": "JobCreated", "job_id": "a", "assigned_dcs": ["use1"], "trace_time": 10, "spec": {"image": "i"}},
        {"type": "JobAccepted", "job_id": "a", "dc_id": "use1", "trace_time": 20},
        {"type": "JobFailed", "job_id": "a", "error": "OOMKilled", "trace_time": 30},
        {"type": "JobCreated", "job_id": "b", "assigned_dcs": ["use1", "euw1"], "trace_time": 3599},
        {"type": "JobAccepted", "job_id": "b", "dc_id": "euw1", "fence_token": 1, "trace_time": 4000},
        {"type": "JobAccepted", "job_id": "b", "dc_id": "use1", "fence_token": 2, "trace_time": 5000},
        {"type": "JobCompleted", "job_id": "b", "fence_token": 2, "trace_time": 6000},
        {"type": "JobCreated", "job_id": "c", "spec": {"image": "i"}, "trace_time": 2 * HOUR_S},
        {"type": "JobAccepted", "job_id": "c", "dc_id": "use1"},
        {"type": "JobProgressReported", "job_id": "c", "dc_id": "use1"},
    )


async def test_more_groups_than_have_run_times_are_counted_without_them(shared_client: Client) -> None:
    for number in range(TIMED_GROUPS_MAX + 1):
        job, at_s = {"job_id": f"job-{number}"}, number * HOUR_S
        await send(
            shared_client,
            {**job, "type": "JobCreated", "trace_time": at_s},
            {**job, "type": "JobAccepted", "dc_id": "use1", "trace_time": at_s},
            {**job, "type": "JobCompleted", "trace_time": at_s + 1},
        )
    few, many = [await summary(shared_client, by="hour", limit=TIMED_GROUPS_MAX + more) for more in (0, 1)]
    assert few["groups"] == [{**group, "run_times": few["groups"][0]["run_times"]} for group in many["groups"][:-1]]
    assert few["groups"][0]["run_times"]["p50_ms"] == 1000
    assert {group["run_times"] for group in many["groups"]} == {None}
    assert many["all"] == few["all"]
    assert many["all"]["run_times"]["jobs"] == TIMED_GROUPS_MAX + 1


async def test_jobs_are_counted_by_status_hour_data_centre_and_error(shared_client: Client) -> None:
    await fill(shared_client)
    found = await summary(shared_client)
    run_times = found["all"].pop("run_times")
    assert found["all"] == {"jobs": 3, "by_trace_time": 3, "statuses": {"COMPLETED": 1, "FAILED": 1, "RUNNING": 1}}
    assert run_times["jobs"] == 2
    assert (run_times["min_ms"], run_times["max_ms"]) == (10_000, 1_000_000)
    for name, exact_ms in (("p50_ms", 10_000), ("p95_ms", 1_000_000)):
        assert abs(run_times[name] - exact_ms) <= exact_ms * 0.01
    assert counts(found) == {"COMPLETED": 1, "FAILED": 1, "RUNNING": 1}
    assert found["groups_left_out"] == 0
    assert (found["since"], found["until"], found["dc"]) == (None, None, None)
    hours = await summary(shared_client, by="hour")
    assert list(counts(hours).items()) == [("1970-01-01T02:00:00.000Z", 1), ("1970-01-01T00:00:00.000Z", 2)]
    assert counts(await summary(shared_client, by="dc")) == {"use1": 3, "euw1": 1}
    (error,) = (await summary(shared_client, by="error"))["groups"]
    assert (error["value"], error["statuses"]) == ("OOMKilled", {"FAILED": 1})


async def test_a_part_of_the_hours_and_of_the_data_centres_is_counted(shared_client: Client) -> None:
    await fill(shared_client)
    first = await summary(shared_client, until="1970-01-01T00:30:00Z")
    assert (first["all"]["statuses"], first["until"]) == ({"COMPLETED": 1, "FAILED": 1}, "1970-01-01T01:00:00.000Z")
    later = await summary(shared_client, since="1970-01-01T01:59:59Z", by="hour")
    assert (counts(later), later["since"]) == ({"1970-01-01T02:00:00.000Z": 1}, "1970-01-01T01:00:00.000Z")
    assert (await summary(shared_client, dc="euw1"))["all"]["statuses"] == {"COMPLETED": 1}
    assert counts(await summary(shared_client, dc="use1", by="dc")) == {"use1": 3}
    assert counts(await summary(shared_client, dc="euw1", by="error")) == {}
    few = await summary(shared_client, by="dc", limit=1)
    assert (counts(few), few["groups_left_out"]) == ({"use1": 3}, 1)


@pytest.mark.parametrize(
    ("asked", "jobs", "since", "until_"),
    [
        ({"since": "1960-01-01T00:00:00Z"}, 3, None, None),
        ({"until": "1960-01-01T00:00:00Z"}, 0, None, "1970-01-01T00:00:00.000Z"),
        ({"since": "9999-12-31T23:00:00Z"}, 0, "9999-12-31T00:00:00.000Z", None),
        ({"until": "9999-12-31T23:00:00Z"}, 3, None, None),
        ({"since": f"{2**62}:0:n"}, 0, "9999-12-31T00:00:00.000Z", None),
    ],
)
async def test_a_summary_names_the_hours_that_it_counts(
    shared_client: Client, asked: dict[str, str], jobs: int, since: str | None, until_: str | None
) -> None:
    await fill(shared_client)
    found = await summary(shared_client, **asked)
    assert (found["all"]["jobs"], found["since"], found["until"]) == (jobs, since, until_)


async def test_declared_fields_are_counted_once_all_jobs_are_indexed(shared_client: Client) -> None:
    await fill(shared_client)
    params = {"tenant_id": shared_client.tenant, "by": "spec.image"}
    answer = await shared_client.get("/v1/jobs/summary", params=params)
    assert (answer.status_code, answer.json()["path"]) == (422, "by")
    answer = await shared_client.put(
        f"/v1/tenants/{shared_client.tenant}/search", json={"fields": ["spec.image", "dc"]}
    )
    assert answer.status_code == 200

    async def is_counted() -> bool:
        return (await shared_client.get("/v1/jobs/summary", params=params)).status_code == 200

    await until(is_counted, "all jobs are indexed")
    assert counts(await summary(shared_client, by="spec.image")) == {"i": 2}
    await send(shared_client, {"type": "JobCreated", "job_id": "d", "spec": {"image": ["i", "j"]}})
    assert counts(await summary(shared_client, by="spec.image")) == {"i": 3, "j": 1}
    for wrong in ("image", "spec", "since", "trace"):
        answer = await shared_client.get("/v1/jobs/summary", params={**params, "by": wrong})
        assert (answer.status_code, answer.json()["path"]) == (422, "by")
        assert "by is none of status, hour, day, dc, error, and no search field" in answer.json()["detail"]


async def test_groups_are_named_by_the_values_that_jobs_have(shared_client: Client) -> None:
    path, deep = f"/v1/tenants/{shared_client.tenant}/search", "spec." + "k" * 200
    fields = ["spec.x", f"{deep}.a", f"{deep}.b"]
    (await shared_client.put(path, json={"fields": fields})).raise_for_status()
    await send(
        shared_client,
        {"type": "JobCreated", "job_id": "a", "spec": {"x": ["", "\\u0000"], "k" * 200: {"a": "A", "b": "B"}}},
    )

    async def is_built() -> bool:
        return bool((await shared_client.get(path)).json()["is_built"])

    await until(is_built, "all jobs are indexed")
    found = [counts(await summary(shared_client, by=field)) for field in fields]
    assert found == [{"": 1, "\\u0000": 1}, {"A": 1}, {"B": 1}]


async def test_values_beyond_the_first_are_counted_together(
    shared_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_figures, "_ADMIT", job_figures._ADMIT.replace(str(VALUES_MAX), "2"))
    path = f"/v1/tenants/{shared_client.tenant}/search"
    (await shared_client.put(path, json={"fields": ["spec.id"]})).raise_for_status()
    await send(
        shared_client,
        *({"type": "JobCreated", "job_id": f"{n}", "spec": {"id": f"id-{n % 5}"}, "trace_time": 0} for n in range(10)),
        {"type": "JobAccepted", "job_id": "9", "dc_id": "use1", "trace_time": 0},
        {"type": "JobCompleted", "job_id": "9", "trace_time": 7},
    )

    async def is_built() -> bool:
        return bool((await shared_client.get(path)).json()["is_built"])

    await until(is_built, "all jobs are indexed")
    found = await summary(shared_client, by="spec.id")
    assert counts(found) == {"id-0": 2, "id-1": 2}
    assert (found["groups_left_out"], found["other"]["jobs"]) == (0, 6)
    assert found["other"]["statuses"] == {"COMPLETED": 1, "SUBMITTED": 5}
    assert found["other"]["run_times"]["max_ms"] == 7000
    assert (await summary(shared_client, by="status"))["other"] is None


async def test_a_job_of_very_many_data_centres_counts_in_none_of_them(shared_client: Client) -> None:
    dcs = [f"dc{number}" for number in range(DCS_MAX + 1)]
    await send(shared_client, {"type": "JobCreated", "job_id": "many", "assigned_dcs": dcs})
    await send(shared_client, {"type": "JobCreated", "job_id": "few", "assigned_dcs": dcs[1:]})
    assert (await summary(shared_client))["all"]["jobs"] == 2
    assert counts(await summary(shared_client, by="dc")) == dict.fromkeys(dcs[1:], 1)


async def test_no_job_is_in_a_data_centre_that_no_event_can_name(shared_client: Client) -> None:
    await fill(shared_client)
    assert (await summary(shared_client, dc="use1\0"))["all"]["jobs"] == 0


async def test_a_summary_says_up_to_which_entry_it_counts_and_keeps_sessions(shared_client: Client) -> None:
    await send(shared_client, {"type": "JobCreated", "job_id": "a"})
    answer = await shared_client.post(
        "/v1/jobs", json={"tenant_id": shared_client.tenant, "job_id": "b", "durability": "LOCAL"}
    )
    session = {"Tally-Session": answer.headers["Tally-Session"]}
    params = {"tenant_id": shared_client.tenant}
    found = (await shared_client.get("/v1/jobs/summary", params=params, headers=session)).json()
    assert (found["all"]["jobs"], found["all"]["by_trace_time"]) == (2, 0)
    assert (found["consistency"]["level"], found["consistency"]["as_of_seq"]) == ("SESSION", 2)
    answer = await shared_client.get("/v1/jobs/summary", params={"tenant_id": "nobody"})
    assert answer.status_code == 404


async def test_figures_that_somebody_edited_are_reported_and_counted_again(
    shared: Shared, shared_client: Client, shared_superuser: asyncpg.Connection
) -> None:
    await fill(shared_client)
    await summary(shared_client)
    walk = shared.services[JobTableWalk]
    await walk._recount(shared_client.tenant)
    for edit in (
        "UPDATE scheduler.job_figures SET jobs = jobs + 1 WHERE tenant_id = $1 AND hours = 24 AND dc = 'use1'",
        "UPDATE scheduler.job_figures SET run_jobs[1] = 2 WHERE tenant_id = $1 AND field = 'error'",
        "UPDATE scheduler.job_figures SET run_max_ms = run_max_ms + 1 WHERE tenant_id = $1 AND hours = 768",
        "UPDATE scheduler.job_figures SET run_min_ms = NULL WHERE tenant_id = $1 AND hours = 1",
        "DELETE FROM scheduler.job_figures WHERE tenant_id = $1",
        "UPDATE scheduler.jobs SET run_ms = 7 WHERE tenant_id = $1 AND job_id = 'b'",
        "UPDATE scheduler.jobs SET figure = 'none' WHERE tenant_id = $1 AND job_id = 'a'",
    ):
        await shared_superuser.execute(edit, shared_client.tenant)
        await walk._recount(shared_client.tenant)

        async def is_whole() -> bool:
            return (await summary(shared_client))["all"]["statuses"] == {"COMPLETED": 1, "FAILED": 1, "RUNNING": 1}

        await until(is_whole, "the figures are counted again")
        assert {each.kind for each in shared.service.breaks.open(shared_client.tenant)} == {"projection"}


@pytest.mark.parametrize(
    "figure",
    [
        *(
            "none",
            "7",
            "{}",
            "[]",
            "[1]",
            "[-1,0,[]]",
            "[1,2,[]]",
            "[1,0,5]",
            "[1,0,[5]]",
            '[1,0,[],"",7]',
            "[1,0,[],-1]",
        ),
        *(
            '[1,0,["a\\u0000"]]',
            '[1,0,[],null,{"\\u0000":["a"]}]',
            json.dumps([1, 0, [random.Random(1).randbytes(3000).hex()]]),
        ),
    ],
    ids=lambda figure: figure[:40].replace("\\", ""),
)
async def test_an_edited_row_keeps_nothing_from_being_followed(
    shared_client: Client, shared_superuser: asyncpg.Connection, figure: str
) -> None:
    await send(shared_client, {"type": "JobCreated", "job_id": "a"})
    await summary(shared_client)
    await shared_superuser.execute(
        "UPDATE scheduler.jobs SET figure = $2 WHERE tenant_id = $1", shared_client.tenant, figure
    )
    await send(shared_client, {"type": "JobCompleted", "job_id": "a"})
    assert (await summary(shared_client))["all"]["statuses"]["COMPLETED"] == 1


async def test_a_follower_that_knows_no_figures_stops_before_it_would_leave_jobs_out(
    shared_client: Client, shared_superuser: asyncpg.Connection
) -> None:
    move = "UPDATE scheduler.follower_positions SET seq = seq {} WHERE tenant_id = $1"
    await send(shared_client, {"type": "JobCreated", "job_id": "a"})
    await summary(shared_client)
    async with shared_superuser.transaction():
        await shared_superuser.execute(move.format("- 1"), shared_client.tenant)
        with pytest.raises(asyncpg.RaiseError, match="job_figures does not follow"):
            async with shared_superuser.transaction():
                await shared_superuser.execute(move.format("+ 1"), shared_client.tenant)
        await shared_superuser.execute("SET LOCAL tallystick.follows_run_times = 'yes'")
        await shared_superuser.execute(move.format("+ 1"), shared_client.tenant)

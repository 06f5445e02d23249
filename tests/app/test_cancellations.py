"""``GET /v1/cancellations``: what a data centre has not acknowledged, until it has, or the job is over."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.app.conftest import MakeSettings, RunServer

GLOBAL = {"tenant_id": "acme", "durability": "GLOBAL"}


async def created(client: httpx.AsyncClient, job_id: str, *dcs: str) -> None:
    (await client.post("/v1/jobs", json={**GLOBAL, "job_id": job_id, "assigned_dcs": dcs})).raise_for_status()


async def reported(client: httpx.AsyncClient, job_id: str, type_: str, **fields: object) -> None:
    body = {**GLOBAL, "type": type_, **fields}
    (await client.post(f"/v1/jobs/{job_id}/events", json=body)).raise_for_status()


async def cancelled(client: httpx.AsyncClient, job_id: str) -> None:
    body = {**GLOBAL, "reason": "no need"}
    (await client.post(f"/v1/jobs/{job_id}/cancel", json=body)).raise_for_status()


async def page(client: httpx.AsyncClient, dc: str, **params: Any) -> dict[str, Any]:
    answer = await client.get("/v1/cancellations", params={"tenant_id": "acme", "dc": dc, **params})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def listed(client: httpx.AsyncClient, dc: str, **params: Any) -> list[str]:
    return [job["job_id"] for job in (await page(client, dc, **params))["items"]]


async def test_a_cancellation_is_listed_for_each_data_centre_until_that_has_acknowledged_it(
    client: httpx.AsyncClient,
) -> None:
    await created(client, "one", "a", "b")
    await created(client, "two", "b")
    await created(client, "kept", "a", "b")
    await reported(client, "two", "JobAccepted", dc_id="c", worker_count=1)
    await reported(client, "two", "JobAccepted", dc_id="b", worker_count=1)
    assert await listed(client, "a") == []
    await cancelled(client, "one")
    await cancelled(client, "two")
    assert [await listed(client, dc) for dc in "abcd"] == [["one"], ["two", "one"], ["two"], []]
    (job,) = (await page(client, "a"))["items"]
    assert (job["status"], job["assigned_dcs"], job["tenant_id"]) == ("CANCELLING", ["a", "b"], "acme")

    await reported(client, "one", "JobCancellationAcked", dc_id="a", workflows_cancelled=1)
    assert [await listed(client, dc) for dc in "abc"] == [[], ["two", "one"], ["two"]]
    await reported(client, "one", "JobCancellationAcked", dc_id="b", workflows_cancelled=0)
    assert await listed(client, "b") == ["two"]
    await reported(client, "two", "JobCompleted", final_status="ok")
    assert [await listed(client, dc) for dc in "abc"] == [[], [], []]


async def test_a_list_of_many_comes_in_pages_whatever_is_between(
    run_server: RunServer, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.read.jobs.CANCELLATIONS_A_PAGE", 3)
    monkeypatch.setattr("app.read.jobs.CANCELLATION_PAGES_MAX", 2)
    async with run_server(make_settings()) as client:
        for n in range(30):
            await created(client, f"job-{n}", "a" if n % 10 == 0 or n < 4 else "b")
            await cancelled(client, f"job-{n}")
        found: list[str] = []
        cursor, pages = None, 0
        while pages == 0 or cursor is not None:
            answer = await page(client, "a", limit=2, **({} if cursor is None else {"cursor": cursor}))
            assert len(answer["items"]) <= 2
            found += [job["job_id"] for job in answer["items"]]
            cursor, pages = answer["next_cursor"], pages + 1
        assert found == ["job-20", "job-10", "job-3", "job-2", "job-1", "job-0"]
        assert pages > 3
        first = await page(client, "a", limit=2)
        query = {"tenant_id": "acme", "dc": "b", "cursor": first["next_cursor"]}
        assert (await client.get("/v1/cancellations", params=query)).status_code == 422


async def test_a_tenant_that_never_began_is_not_found(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/cancellations", params={"tenant_id": "nobody", "dc": "a"})
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (404, "tenant-not-found")

"""``POST /v1/reports`` and ``GET /v1/reports/{report_id}``: a page on the jobs of a tenant, made in the background."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.edge.accepted import AccessControl
from app.read.consistency import Promise, ReadLevel
from app.read.job_reports import KEPT_MAX, JobReports
from app.store.jobs import figures as job_figures
from app.store.jobs.figures import BY_DAY, Wanted
from ledger.errors import NotFoundError, NotReadyError
from ledger.machines.job_figures import VALUES_MAX
from tests.app.chains import until
from tests.app.client import Client
from tests.app.served import Serve
from tests.app.shared import Shared
from tests.app.test_job_summary import send

HOSTILE = '<script src="https://evil.example/x.js"></script>' + "x" * 200


async def fill(client: Client) -> None:
    """Three jobs: one failed, one is done, one runs."""
    events: list[dict[str, Any]] = [
        {"type": "JobCreated", "job_id": "a", "assigned_dcs": ["use1"], "trace_time": 10},
        {"type": "JobAccepted", "job_id": "a", "dc_id": "use1", "trace_time": 20},
        {"type": "JobFailed", "job_id": "a", "error": HOSTILE, "trace_time": 30},
        {"type": "JobCreated", "job_id": "b", "assigned_dcs": ["use1", "euw1"], "trace_time": 3599},
        {"type": "JobAccepted", "job_id": "b", "dc_id": "euw1", "trace_time": 4000},
        {"type": "JobCompleted", "job_id": "b", "trace_time": 6000},
        {"type": "JobCreated", "job_id": "c", "trace_time": 200_000},
        {"type": "JobAccepted", "job_id": "c", "dc_id": "use1"},
    ]
    lines = "\n".join(json.dumps({"tenant_id": client.tenant, **event}) for event in events)
    answer = await client.post(
        "/v1/events?durability=GLOBAL", content=lines, headers={"Content-Type": "application/x-ndjson"}
    )
    assert answer.status_code == 200, answer.text


async def start(client: httpx.AsyncClient, tenant: str, **wanted: Any) -> str:
    answer = await client.post("/v1/reports", json={"tenant_id": tenant, **wanted})
    assert answer.status_code == 202, answer.text
    assert answer.headers["Location"] == f"/v1/reports/{answer.json()['report_id']}"
    assert (answer.json()["tenant_id"], answer.headers["Retry-After"]) == (tenant, "1")
    return answer.headers["Location"]


async def done(client: httpx.AsyncClient, place: str) -> httpx.Response:
    """The answer once the report is no longer being made."""

    async def is_done() -> bool:
        return (await client.get(place)).status_code != 202

    await until(is_done, "the report is made")
    return await client.get(place)


async def made(client: Client, **wanted: Any) -> str:
    answer = await done(client, await start(client, client.tenant, **wanted))
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{client.tenant}.report.html"'
    return answer.text


async def test_a_report_is_made_of_the_figures_of_the_jobs(shared_client: Client) -> None:
    await fill(shared_client)
    page = await made(shared_client)
    assert "3 jobs were created in this period, of which 2 ended: 50.0 % completed, 50.0 % failed." in page
    assert "<script src" not in page
    assert "follow from 8 entries" in page
    command = f"tally pipeline report --dest reports/{shared_client.tenant} -t {shared_client.tenant}"
    assert f"<code>{command}</code>" in page
    early = await made(shared_client, since="1970-01-01T00:00:00Z", until="1970-01-01T01:00:00Z")
    assert "<h1>Up to 1970-01-01 01:00</h1>" in early
    assert f"{command} --to 1970-01-01T01:00:00.000Z</code>" in early
    assert "By hour" in early
    assert "2 jobs were created" in early


async def test_a_report_counts_declared_fields_and_refuses_others(
    shared_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_figures, "_ADMIT", job_figures._ADMIT.replace(str(VALUES_MAX), "1"))
    await fill(shared_client)
    await send(shared_client, {"type": "JobCreated", "job_id": "d", "spec": {"image": ["i", "j"]}})
    for wrong in ("image", "spec.image"):
        body = {"tenant_id": shared_client.tenant, "by": [wrong]}
        answer = await shared_client.post("/v1/reports", json=body)
        if answer.status_code == 202:
            answer = await done(shared_client, answer.headers["Location"])
        assert (answer.status_code, answer.json()["path"]) == (422, "by")
    answer = await shared_client.put(f"/v1/tenants/{shared_client.tenant}/search", json={"fields": ["spec.image"]})
    assert answer.status_code == 200

    async def is_counted() -> bool:
        params = {"tenant_id": shared_client.tenant, "by": "spec.image"}
        return (await shared_client.get("/v1/jobs/summary", params=params)).status_code == 200

    await until(is_counted, "all jobs are indexed")
    page = await made(shared_client, by=["spec.image"])
    assert "By spec.image" in page
    assert "1 job has a value that is not counted by itself." in page


async def test_beyond_a_million_entries_a_node_without_spark_names_its_command(
    shared: Shared, shared_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.NEEDED", ("package_that_is_not_there",))
    await fill(shared_client)
    await made(shared_client)
    await shared.superuser.execute(
        "UPDATE scheduler.jobs SET seqs = array_fill(1, ARRAY[1000001]) WHERE tenant_id = $1 AND job_id = 'c'",
        shared_client.tenant,
    )
    answer = await done(shared_client, await start(shared_client, shared_client.tenant))
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (422, "report-too-large")
    assert answer.json()["detail"].endswith(
        "Spark is not installed here (pip install 'tallystick[pipeline]'). Shorten the period, or run "
        f"tally pipeline report --dest reports/{shared_client.tenant} -t {shared_client.tenant}"
    )
    assert "2 jobs were created" in await made(shared_client, until="1970-01-01T01:00:00Z")


async def test_one_report_is_made_at_a_time_and_a_stop_cancels_it(shared: Shared, shared_client: Client) -> None:
    await fill(shared_client)
    reports = replace(shared.services[JobReports], _kept=OrderedDict())
    promise, limits = Promise(ReadLevel.SESSION, (), 0), {Wanted(shared_client.tenant, BY_DAY): 10}
    released: list[str] = []
    with ExitStack() as held:
        held.callback(released.append, "first")
        first = reports.start(promise, limits, held, may_audit=False)
    assert released == []
    with ExitStack() as held, pytest.raises(NotReadyError, match="makes another report"):
        reports.start(promise, limits, held, may_audit=False)
    await reports.close()
    assert first.making.cancelled()
    assert released == ["first"]
    with ExitStack() as held:
        assert "3 jobs" in (await reports.start(promise, limits, held, may_audit=False).making).html


async def test_a_report_that_is_no_longer_kept_says_what_to_do(shared: Shared, shared_client: Client) -> None:
    await fill(shared_client)
    reports = replace(shared.services[JobReports], _kept=OrderedDict(), kept_s=0.0)
    with ExitStack() as held:
        limits = {Wanted(shared_client.tenant, BY_DAY): 10}
        report = reports.start(Promise(ReadLevel.SESSION, (), 0), limits, held, may_audit=False)
    await report.making

    async def is_gone() -> bool:
        try:
            reports.find(report.report_id)
        except NotFoundError:
            return True
        return False

    await until(is_gone, "the report is dropped")
    answer = await shared_client.get(f"/v1/reports/{report.report_id}")
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (404, "not-found")
    assert "over a restart; start the report again with POST /v1/reports" in answer.json()["detail"]


async def test_a_node_names_the_one_that_keeps_a_report(shared: Shared, shared_client: Client) -> None:
    await fill(shared_client)
    place = await start(shared_client, shared_client.tenant)
    here = shared.services[JobReports].node_id
    assert (await shared_client.get(place)).json().get("node_id", here) == here
    random = place.rpartition("-")[2]
    answer = await shared_client.get(f"/v1/reports/node-elsewhere-{random}")
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (421, "report-elsewhere")
    assert answer.json()["detail"].startswith(f"node node-elsewhere keeps the report, and node {here} was asked")
    assert (await shared_client.get(f"/v1/reports/{here}-{'0' * 32}")).status_code == 404


async def test_the_newest_reports_are_kept_and_none_is_dropped_while_it_is_made(
    shared: Shared, shared_client: Client
) -> None:
    await fill(shared_client)
    reports = replace(shared.services[JobReports], _kept=OrderedDict())
    made: list[str] = []
    promise, limits = Promise(ReadLevel.SESSION, (), 0), {Wanted(shared_client.tenant, BY_DAY): 10}
    for number in range(KEPT_MAX + 2):
        with ExitStack() as held:
            report = reports.start(promise, limits, held, may_audit=False)
        if number == 0:
            report.progress = "as Spark that takes long"
            report.making.cancel()
            report.making = asyncio.get_running_loop().create_future()
            continue
        await report.making
        made.append(report.report_id)
    assert list(reports._kept)[1:] == made[2:]
    assert reports.find(next(iter(reports._kept))).progress is not None


async def test_however_many_reports_a_tenant_has_made_those_of_others_are_kept(
    shared: Shared, shared_client: Client
) -> None:
    await fill(shared_client)
    reports = replace(shared.services[JobReports], _kept=OrderedDict())
    made: list[str] = []
    for tenant_id in ("_system", *[shared_client.tenant] * (KEPT_MAX + 1)):
        with ExitStack() as held:
            limits = {Wanted(tenant_id, BY_DAY): 10}
            report = reports.start(Promise(ReadLevel.SESSION, (), 0), limits, held, may_audit=False)
        await report.making
        made.append(report.report_id)
    assert [*reports._kept] == [made[0], *made[3:]]


async def test_a_report_needs_the_right_to_read_is_an_export_and_its_download_is_recorded(
    serve: Serve,
) -> None:
    async with serve(quota={"exports": 1}) as served:
        readers = [await served.issue("read", tenants=tenant, name=tenant) for tenant in ("acme", "other")]
        async with (
            served.client(served.root) as root,
            served.client(readers[0]["token"]) as reader,
            served.client(readers[1]["token"]) as other,
        ):
            await root.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"})
            assert (await other.post("/v1/reports", json={"tenant_id": "acme"})).status_code == 403
            with served.services[AccessControl].quotas.exports.one("acme"):
                answer = await reader.post("/v1/reports", json={"tenant_id": "acme"})
                assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (429, "quota-exceeded")
            place = await start(reader, "acme")
            assert (await done(reader, place)).status_code == 200
            assert (await other.get(place)).status_code == 403
            lines = (await root.get("/v1/access-log?tenant_id=acme")).json()["items"]
            reads = [(line["actor"], line["route"], line["what"]) for line in lines if line["kind"] == "read"]
            assert reads[0] == ("acme", "GET /v1/reports/{report_id}", {"jobs": 1})

"""Lists of jobs go by creation, end or run time, in both directions, and their pages neither skip nor repeat a job."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import itertools
import json
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.store.jobs import search as job_search
from app.store.jobs import table as job_table
from app.store.jobs.order import Direction, ListRange, Order, Sort
from app.store.reads import jobs_query, list_jobs
from ledger.facts.statuses import STATUSES
from tests.app.chains import until
from tests.app.client import Client
from tests.app.shared import Shared
from tests.app.test_job_summary import send
from tests.conftest import Database, connected_to

ORDERS = [Order(sort, direction) for sort in Sort for direction in Direction]
_numbers = itertools.count(1)

_times = st.none() | st.integers(0, 3)
_row = st.tuples(st.sampled_from(["RUNNING", "COMPLETED", "FAILED"]), st.integers(0, 3), _times, _times)
_hlc = st.tuples(st.integers(0, 4), st.integers(0, 40), st.sampled_from(["node-a", "node-b"]))


# --- pages ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(_row, max_size=30), st.sampled_from(ORDERS), st.integers(1, 7), st.none() | _hlc, st.none() | _hlc)
def test_pages_have_each_job_once_in_order(
    shared_database: Database,
    rows: list[tuple[str, int, int | None, int | None]],
    order: Order,
    limit: int,
    since: tuple[int, int, str] | None,
    before: tuple[int, int, str] | None,
) -> None:
    asyncio.run(_check_pages(shared_database, rows, ListRange(order, since, before), limit))


async def _check_pages(
    database: Database, rows: list[tuple[str, int, int | None, int | None]], part: ListRange, limit: int
) -> None:
    order, since, before, _ = part
    tenant = f"orders-{next(_numbers)}"
    stored = [
        (tenant, f"job-{n:02}", status, at_ms, n, "node-a", None, n + 1, ended_ms, run_ms, None, [n + 1])
        for n, (status, at_ms, ended_ms, run_ms) in enumerate(rows)
    ]
    at = {Sort.CREATED_AT: 3, Sort.ENDED_AT: 8, Sort.RUN_MS: 9}[order.sort]
    listed = sorted(
        (row for row in stored if row[at] is not None),
        key=lambda row: (row[at], *row[3:6]),
        reverse=order.direction is Direction.DESC,
    )
    created = [row for row in listed if (since is None or row[3:6] >= since) and (before is None or row[3:6] < before)]
    async with connected_to(database.superuser_url) as connection:
        async with connection.transaction():
            await job_table.store(connection, stored)
        for statuses in ((), ("FAILED", "COMPLETED")):
            wanted = [row[1] for row in created if not statuses or row[2] in statuses]
            assert await _candidates(connection, tenant, statuses, part, limit) == wanted
            if not part.is_within_creations:
                assert await _pages(connection, tenant, statuses, part, limit) == wanted


async def _pages(
    connection: asyncpg.Connection, tenant: str, statuses: Sequence[str], part: ListRange, limit: int
) -> list[str]:
    found: list[str] = []
    while True:
        rows, last = await list_jobs(connection, tenant, statuses, None, part, limit)
        found += [row.job_id for row in rows]
        assert len(found) == len({*found})
        if last is None:
            return found
        assert len(rows) == limit
        part = part._replace(after=last)


async def _candidates(
    connection: asyncpg.Connection, tenant: str, statuses: Sequence[str], part: ListRange, limit: int
) -> list[str]:
    found: list[str] = []
    while True:
        some = await job_search.candidates(connection, tenant, statuses, None, ["job"], None, part, limit, limit + 2)
        found += [row.job_id for row in some.jobs]
        assert len(found) == len({*found})
        if some.last is None:
            return found
        part = part._replace(after=some.last)


@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("order", [order for order in ORDERS if not order.is_by_creation], ids=str)
async def test_a_list_by_end_or_run_time_reads_a_page_of_each_status_at_most_from_one_end_of_its_index(
    database: Database, plans: str, order: Order
) -> None:
    index = {Sort.ENDED_AT: "jobs_by_end", Sort.RUN_MS: "jobs_by_run_time"}[order.sort]
    async with connected_to(database.service_url) as connection:
        await connection.execute(f"SET plan_cache_mode = {plans}")
        await connection.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
        await connection.execute(f"PREPARE asked AS {jobs_query(order, is_of_actor=False)}")
        asked = f"'acme', 50, '{{{','.join(STATUSES)}}}', 9, 9, 9, 'n', -1, -1, -1, ''"
        plan = [row[0].strip() for row in await connection.fetch(f"EXPLAIN EXECUTE asked({asked})")]
    (scan,) = (at for at, line in enumerate(plan) if " on jobs" in line)
    backward = " Backward" if order.direction is Direction.DESC else ""
    assert plan[scan].startswith(f"->  Index Scan{backward} using {index}"), plan
    assert all(part in plan[scan + 1] for part in ("Index Cond", "status = ", f"ROW({order.columns[0]}")), plan
    assert any(line.startswith(f"Presorted Key: jobs.{order.columns[0]}, jobs.created_physical") for line in plan), plan
    assert sum(line.startswith("->  Limit") for line in plan[:scan]) == 2, plan


# --- the service ----------------------------------------------------------------------------------


async def pages(client: Client, **params: Any) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    cursor: dict[str, str] = {}
    while True:
        answer = await client.get("/v1/jobs", params={"tenant_id": client.tenant, **params, **cursor})
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["items"])
        assert len(found) < 20
        if answer.json()["next_cursor"] is None:
            return found
        cursor = {"cursor": answer.json()["next_cursor"]}


def ids(found: list[list[dict[str, Any]]]) -> str:
    return " ".join(job["job_id"] for page in found for job in page)


async def fill(client: Client) -> None:
    """Jobs that ran for so many seconds, ended in this order: b2 a5 c3 d5; e is open, and f ended but never ran."""
    for name in "abcdef":
        spec = {"image": "i" if name in "ad" else "j", "name": f"nightly {name}"}
        await send(client, {"type": "JobCreated", "job_id": name, "spec": spec, "trace_time": 0})
    for name, ran_s in (("b", 2), ("a", 5), ("c", 3), ("d", 5)):
        end = {"type": "JobFailed", "error": "OOMKilled"} if name in "cd" else {"type": "JobCompleted"}
        await send(
            client,
            {"type": "JobAccepted", "job_id": name, "dc_id": "use1", "trace_time": 0},
            {**end, "job_id": name, "trace_time": ran_s},
        )
    await send(client, {"type": "JobCompleted", "job_id": "f"})


async def test_jobs_are_listed_by_end_and_by_run_time_in_pages_of_any_search(shared_client: Client) -> None:
    await fill(shared_client)
    for asked, wanted in (
        ({"sort": "run_ms"}, "d a c b"),
        ({"sort": "run_ms", "order": "asc"}, "b c a d"),
        ({"sort": "ended_at"}, "f d c a b"),
        ({"sort": "ended_at", "order": "asc"}, "b a c d f"),
        ({"order": "asc"}, "a b c d e f"),
        ({"sort": "created_at", "order": "desc"}, "f e d c b a"),
        ({"sort": "run_ms", "status": ["FAILED"]}, "d c"),
        ({"sort": "ended_at", "status": ["failed", "completed"], "where": "spec.image:i"}, "d a"),
        ({"sort": "run_ms", "id_part": "nightly"}, "d a c b"),
        ({"sort": "run_ms", "order": "asc", "error": "oom"}, "c d"),
        ({"sort": "run_ms", "name": "nightly a"}, "a"),
        ({"name": "nightly"}, ""),
        ({"name": "Nightly a"}, ""),
        ({"sort": "run_ms", "dc": "use1", "until": "1970-01-01T00:00:00Z"}, ""),
        ({"sort": "run_ms", "since": "2020-01-01T00:00:00Z"}, "d a c b"),
        ({"sort": "run_ms", "actor": "nobody"}, ""),
    ):
        for limit in (1, 2, 100):
            assert ids(await pages(shared_client, limit=limit, **asked)) == wanted, asked
    (found,) = await pages(shared_client, sort="run_ms")
    assert [job["run_ms"] for job in found] == [5000, 5000, 3000, 2000]
    answer = await shared_client.get(
        "/v1/jobs",
        params={"tenant_id": shared_client.tenant, "sort": "run_ms", "order": "asc"},
        headers={"Accept": "text/csv"},
    )
    assert [row["job_id"] for row in csv.DictReader(io.StringIO(answer.text))] == ["b", "c", "a", "d"]


async def test_a_declared_field_is_searched_in_any_order(shared_client: Client) -> None:
    await fill(shared_client)
    await shared_client.put(f"/v1/tenants/{shared_client.tenant}/search", json={"fields": ["spec.image"]})

    async def is_built() -> bool:
        return bool((await shared_client.get(f"/v1/tenants/{shared_client.tenant}/search")).json()["is_built"])

    await until(is_built, "all jobs are indexed")
    for asked, wanted in (
        ({"sort": "run_ms"}, "d a"),
        ({"sort": "ended_at", "order": "asc"}, "a d"),
        ({"sort": "run_ms", "status": "COMPLETED", "since": "2020-01-01T00:00:00Z"}, "a"),
    ):
        assert ids(await pages(shared_client, where="spec.image:i", limit=1, **asked)) == wanted


async def test_jobs_that_end_between_two_pages_move_no_other_job(shared_client: Client) -> None:
    await fill(shared_client)
    params: dict[str, Any] = {"tenant_id": shared_client.tenant, "sort": "run_ms", "limit": 2}
    first = (await shared_client.get("/v1/jobs", params=params)).json()
    await send(
        shared_client,
        {"type": "JobAccepted", "job_id": "e", "dc_id": "use1", "trace_time": 0},
        {"type": "JobCompleted", "job_id": "e", "trace_time": 100},
    )
    second = (await shared_client.get("/v1/jobs", params={**params, "cursor": first["next_cursor"]})).json()
    assert (ids([first["items"]]), ids([second["items"]])) == ("d a", "c b")


async def test_a_cursor_of_another_order_is_refused(shared_client: Client) -> None:
    await fill(shared_client)
    params: dict[str, Any] = {"tenant_id": shared_client.tenant, "sort": "run_ms", "limit": 1}
    cursor = (await shared_client.get("/v1/jobs", params=params)).json()["next_cursor"]
    name, scope, *position = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    forged = [[name, scope, *odd] for odd in (position[1:], ["5000", *position[1:]], [-1, *position[1:]], [2**63 - 1])]
    texts = [base64.urlsafe_b64encode(json.dumps(each, separators=(",", ":")).encode()).rstrip(b"=") for each in forged]
    for asked in (
        *({**params, **other, "cursor": cursor} for other in ({"sort": "ended_at"}, {"order": "asc"})),
        *({**params, "cursor": text.decode()} for text in texts),
    ):
        answer = await shared_client.get("/v1/jobs", params=asked)
        assert (answer.status_code, answer.json()["path"]) == (422, "cursor")
    for wrong in ({"sort": "duration"}, {"order": "up"}):
        assert (await shared_client.get("/v1/jobs", params={**params, **wrong})).status_code == 422


async def test_an_edited_end_moves_a_job_to_the_damaged_ones(
    shared: Shared, shared_client: Client, shared_superuser: asyncpg.Connection
) -> None:
    await fill(shared_client)
    params = {"tenant_id": shared_client.tenant, "sort": "ended_at"}
    assert ids([(await shared_client.get("/v1/jobs", params=params)).json()["items"]]) == "f d c a b"
    await shared_superuser.execute(
        "UPDATE scheduler.jobs SET ended_ms = 1 WHERE tenant_id = $1 AND job_id = 'f'", shared_client.tenant
    )
    found = (await shared_client.get("/v1/jobs", params=params)).json()
    assert ids([found["items"]]) == "d c a b"
    assert [each["job_id"] for each in found["damaged"]] == ["f"]
    assert "column ended_ms of job f" in found["damaged"][0]["detail"]
    assert {each.kind for each in shared.service.breaks.open(shared_client.tenant)} == {"projection"}

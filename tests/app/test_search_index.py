"""Fields by which a tenant's jobs are indexed: what is found stays the same, whatever came before what."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import asyncpg
import orjson
import pytest

from app.read import jobs as read_jobs
from app.store.jobs import search as job_search
from app.store.jobs.order import ListRange
from app.write.followers import job_table
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import RunServer

FIELDS = {"fields": ["spec.image", "spec.tags", "dc"]}
SEARCHES: tuple[dict[str, Any], ...] = (
    {"where": "spec.image:a"},
    {"where": ["spec.image:a", "spec.tags:x"]},
    {"where": ["spec.image:a", "spec.note:n1"]},
    {"dc": "d1", "where": "spec.tags:y"},
    {"dc": "d2", "status": "ACCEPTED"},
    {"where": "spec.image:b", "status": ["SUBMITTED", "COMPLETED"]},
    {"where": "spec.image:none"},
)


async def send(client: Client, *lines: dict[str, Any]) -> None:
    body = b"".join(orjson.dumps({"tenant_id": client.tenant, **line}) + b"\n" for line in lines)
    headers = {"Content-Type": "application/x-ndjson"}
    answer = await client.post("/v1/events?durability=GLOBAL", content=body, headers=headers)
    assert answer.status_code == 200, answer.text


def made(numbers: range) -> Iterator[dict[str, Any]]:
    """Jobs of a few images, tags and data centres; some accepted elsewhere, some at their end."""
    draw = random.Random(numbers.start)
    for number in numbers:
        job = {"job_id": f"j-{draw.randrange(10**6)}-{number}"}
        spec = {"image": draw.choice("abc"), "tags": draw.sample("xyz", 2), "note": f"n{number % 3}"}
        yield {**job, "type": "JobCreated", "spec": spec, "assigned_dcs": [f"d{number % 3}"]}
        if number % 2:
            yield {**job, "type": "JobAccepted", "dc_id": f"d{number % 5}"}
        if number % 4 == 3:
            yield {**job, "type": "JobCompleted"}


async def declare(client: Client, body: dict[str, Any]) -> None:
    (await client.put(f"/v1/tenants/{client.tenant}/search", json=body)).raise_for_status()

    async def is_built() -> bool:
        built: bool = (await client.get(f"/v1/tenants/{client.tenant}/search")).json()["is_built"]
        return built

    await until(is_built, "the terms are all there", timeout_s=30)


async def found(client: Client, **params: Any) -> list[str]:
    ids: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        answer = await client.get("/v1/jobs", params={"tenant_id": client.tenant, "limit": 7, **params, **cursor})
        assert answer.status_code == 200, answer.text
        ids += [job["job_id"] for job in answer.json()["items"]]
        if answer.json()["next_cursor"] is None:
            return ids
        cursor = {"cursor": answer.json()["next_cursor"]}


async def all_found(client: Client) -> list[list[str]]:
    return [await found(client, **asked) for asked in SEARCHES]


async def sound(client: Client) -> dict[str, Any]:
    verdict: dict[str, Any] = (await client.get("/v1/chain/verify", params={"tenant_id": client.tenant})).json()
    return verdict


@pytest.fixture
def looks_by_term(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each part of a search went by a term, in their order."""
    told: list[bool] = []
    candidates = job_search.candidates

    async def noted(*arguments: Any, **named: Any) -> Any:
        told.append(arguments[5] is not None)
        return await candidates(*arguments, **named)

    monkeypatch.setattr(read_jobs.job_search, "candidates", noted)
    return told


async def test_jobs_from_before_and_after_the_declaration_are_found_by_it_as_they_were_without(
    run_server: RunServer, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, looks_by_term: list[bool]
) -> None:
    monkeypatch.setattr(job_table, "BUILT_AT_ONCE", 7)
    monkeypatch.setattr(read_jobs, "LOOKED_AT_ONCE", 5)
    monkeypatch.setattr(read_jobs, "LOOKED_AT_MAX", 9)
    async with run_server() as client:
        await send(client, *made(range(24)))
        before = await all_found(client)
        assert not any(looks_by_term)
        assert [bool(ids) for ids in before] == [True] * 6 + [False]

        await asyncio.gather(declare(client, FIELDS), *(send(client, *made(range(n, n + 3))) for n in range(24, 42, 3)))
        looks_by_term.clear()
        by_terms = await all_found(client)
        assert all(looks_by_term)
        assert (await sound(client))["valid"]
        assert [set(old) <= set(new) for old, new in zip(before, by_terms, strict=True)] == [True] * len(SEARCHES)

        # The same answers when everything is made again from the log, and with no field declared.
        await superuser.execute("TRUNCATE scheduler.jobs")
        assert await all_found(client) == by_terms
        await superuser.execute("TRUNCATE scheduler.job_terms")
        assert await all_found(client) == by_terms
        assert (await sound(client))["valid"]
        await declare(client, {"fields": []})
        looks_by_term.clear()
        assert await all_found(client) == by_terms
        assert not any(looks_by_term)
        assert await superuser.fetchval("SELECT count(*) FROM scheduler.job_terms") == 0


async def test_what_was_answered_is_found_at_once_by_its_terms(shared_client: Client) -> None:
    await send(shared_client, {"type": "JobCreated", "job_id": "first"})
    await declare(shared_client, FIELDS)
    for number in range(8):
        job = {"job_id": f"j-{number}"}
        await send(
            shared_client, {**job, "type": "JobCreated", "spec": {"image": f"i-{number}"}, "assigned_dcs": ["x"]}
        )
        assert await found(shared_client, where=f"spec.image:i-{number}", dc="x") == [f"j-{number}"]
        await send(shared_client, {**job, "type": "JobAccepted", "dc_id": f"d-{number}"})
        assert await found(shared_client, dc=f"d-{number}") == [f"j-{number}"]


async def test_private_values_have_no_terms(shared_client: Client, shared_superuser: asyncpg.Connection) -> None:
    private = {"fields": ["spec.image"], "subject": "spec.image"}
    (await shared_client.put(f"/v1/tenants/{shared_client.tenant}/privacy", json=private)).raise_for_status()
    await declare(shared_client, FIELDS)
    await send(shared_client, {"type": "JobCreated", "spec": {"image": "alice", "tags": "x"}})
    assert await found(shared_client, where="spec.image:alice") == []
    assert len(await found(shared_client, where="spec.tags:x")) == 1
    terms = "SELECT count(*) FROM scheduler.job_terms WHERE tenant_id = $1"
    assert await shared_superuser.fetchval(terms, shared_client.tenant) == 1


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM scheduler.job_terms WHERE tenant_id = $1 AND job_id = 'one'",
        "UPDATE scheduler.job_terms SET term = term + 1 WHERE tenant_id = $1 AND job_id = 'one'",
        "UPDATE scheduler.job_terms SET created_physical = 1 WHERE tenant_id = $1 AND job_id = 'one'",
        "INSERT INTO scheduler.job_terms VALUES ($1, 'one', 7, 1, 1, 'n')",
    ],
)
async def test_a_job_that_somebody_hides_from_searches_is_named_by_verification(
    shared_client: Client, shared_superuser: asyncpg.Connection, damage: str
) -> None:
    await send(shared_client, {"type": "JobCreated", "job_id": "one", "spec": {"image": "a"}})
    await declare(shared_client, FIELDS)
    assert await found(shared_client, where="spec.image:a") == ["one"]
    assert (await sound(shared_client))["valid"]
    await shared_superuser.execute(damage, shared_client.tenant)
    verdict = await sound(shared_client)
    assert (verdict["verdicts"]["projection"], verdict["first_break"]["kind"]) == ("broken", "projection")
    assert "what job one is searched by" in verdict["first_break"]["detail"]


async def test_a_follower_that_knows_no_terms_stops_before_it_would_leave_some_out(
    shared_client: Client, shared_superuser: asyncpg.Connection, tenant: str
) -> None:
    move = "UPDATE scheduler.follower_positions SET seq = seq + 1 WHERE tenant_id = $1"
    await send(shared_client, {"type": "JobCreated", "job_id": "one"})
    await found(shared_client)
    await shared_superuser.execute("SET tallystick.follows_commitments = 'yes'")
    async with shared_superuser.transaction():
        await shared_superuser.execute(move, tenant)
        await shared_superuser.execute(move.replace("+", "-"), tenant)
    await declare(shared_client, FIELDS)
    with pytest.raises(asyncpg.RaiseError, match="job_terms does not follow"):
        await shared_superuser.execute(move, tenant)


async def test_what_no_job_is_searched_by_cannot_be_declared(shared_client: Client) -> None:
    for field in ("image", "spec", "error", "actor", "spec..a", "spec" + ".a" * 16):
        answer = await shared_client.put(f"/v1/tenants/{shared_client.tenant}/search", json={"fields": ["dc", field]})
        assert (answer.status_code, answer.json()["path"]) == (422, "fields.1"), field


@pytest.mark.parametrize(("action", "may_be_found"), [("ENQUEUE", []), ("CONFLICT", ["kept"])])
async def test_an_event_that_a_conflict_keeps_is_looked_into_whatever_its_bytes_are(
    superuser: asyncpg.Connection, action: str, may_be_found: list[str]
) -> None:
    link = "0" * 64
    await superuser.execute(
        "INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id,"
        " action, link_version, chain_link, payload_digest, payload)"
        " VALUES ('acme', 1, '1:1:n', 1, 1, 'n', 'kept', $1, 1, $2, $2, '{\"held\":\"eyJhIjoxfQ==\"}')",
        action,
        link,
    )
    await superuser.execute(
        "INSERT INTO scheduler.jobs (tenant_id, job_id, status, created_physical, created_logical, created_node,"
        " last_seq, seqs) VALUES ('acme', 'kept', 'SUBMITTED', 1, 1, 'n', 1, '{1}')"
    )
    found = await job_search.candidates(superuser, "acme", (), None, ["a/b:1"], None, ListRange(), 10, 10)
    assert [job.job_id for job in found.jobs] == may_be_found

"""SCITT over nodes, restarts and rights: who may register and resolve, what is on record, what is answered later."""

from __future__ import annotations

import hashlib
import json
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import cbor2
import httpx
import pytest

from app.runtime import tasks
from app.share.bundle.receipts import RECEIPTS_AT_ONCE_MAX, ReceiptMaker
from tests.app.admitting import admit_node
from tests.app.chains import until
from tests.app.served import Serve, Served
from tests.app.signed_statements import statement
from tests.app.test_scitt import COSE, problem
from tests.app.test_tokens import two_nodes
from tests.ledger.callers import ED25519

DATA = statement(ED25519)
ID = hashlib.sha256(DATA).hexdigest()
ENTRIES = "/v1/tenants/acme/scitt/entries"
PLACE = f"{ENTRIES}/{ID}"
SIGNS_LATE: dict[str, Any] = {
    "chain": {"checkpoint_interval": "1h"},
    "read": {"wait": "50ms"},
    "http": {"root_path": "/ledger"},
}


async def post(client: httpx.AsyncClient, data: bytes = DATA) -> httpx.Response:
    return await client.post(ENTRIES, content=data, headers={"Content-Type": COSE})


async def register_caller(root: httpx.AsyncClient) -> None:
    body = {"name": "ci", "tenants": ["acme"], "public_key_pem": ED25519.caller.key.public_key_pem}
    (await root.post("/v1/callers", json=body)).raise_for_status()


async def registered(superuser: asyncpg.Connection) -> list[dict[str, object]]:
    """The payloads of the entries of statements."""
    query = "SELECT payload FROM scheduler.scheduler_log WHERE action = 'STATEMENT_REGISTERED' ORDER BY seq"
    return [json.loads(row["payload"]) for row in await superuser.fetch(query)]


def entry_in(answer: httpx.Response) -> bytes:
    """The entry in a receipt."""
    found: bytes = cbor2.loads(answer.content).value[1][-65537]
    return found


async def client_with(served: Served, right: str) -> httpx.AsyncClient:
    return served.client((await served.issue(right, tenants="acme", name=right))["token"])


async def test_who_may_write_registers_and_who_may_read_resolves(serve: Serve, superuser: asyncpg.Connection) -> None:
    async with (
        serve() as served,
        served.client(served.root) as root,
        await client_with(served, "write") as writer,
        await client_with(served, "read") as reader,
        served.client(None) as nobody,
    ):
        await register_caller(root)
        assert problem(await post(nobody)) == (401, "unauthenticated")
        assert problem(await post(reader)) == (403, "forbidden")
        assert await registered(superuser) == []
        made = await post(writer)
        assert made.status_code == 201
        assert problem(await writer.get(PLACE)) == (403, "forbidden")
        found = await reader.get(PLACE)
        assert (found.status_code, entry_in(found)) == (200, entry_in(made))
        assert [each["actor"] for each in await registered(superuser)] == ["write"]
        assert (await nobody.get("/.well-known/scitt-keys")).status_code == 200

        async def reads() -> list[str]:
            lines = (await root.get("/v1/access-log", params={"tenant_id": "acme"})).json()["items"]
            return [line["actor"] for line in lines if "scitt" in line["path"] and line["kind"] == "read"]

        assert await until(reads, "the read is in the log") == ["read"]


async def test_a_statement_is_registered_once_by_two_nodes_and_after_a_restart(
    serve: Serve, superuser: asyncpg.Connection
) -> None:
    async with two_nodes(serve) as (one, two), one.client(one.root) as root, two.client(one.root) as other:
        await register_caller(root)

        async def is_known() -> bool:
            return (await other.get("/v1/whoami")).status_code == 200

        await until(is_known, "the other node knows the token")
        await admit_node(root, other)
        first = await post(root)
        second = await until(lambda: resolved(other), "the other node knows the caller and signs")
        assert entry_in(first) == entry_in(second)
    async with serve() as again, again.client(one.root) as root:
        third = await until(lambda: resolved(root), "the node signs")
        assert entry_in(first) == entry_in(third)
    assert len(await registered(superuser)) == 1


async def resolved(client: httpx.AsyncClient) -> httpx.Response | None:
    """The answer to the registration, once it is a receipt."""
    answer = await post(client)
    return answer if answer.status_code == 201 else None


async def test_a_receipt_that_no_checkpoint_covers_yet_is_to_be_asked_for_later(serve: Serve) -> None:
    async with serve(**SIGNS_LATE) as served, served.client(served.root) as root:
        await register_caller(root)
        answer, place = await post(root), f"{served.url}/ledger{PLACE}"
        for status, found in ((303, answer), (302, await root.get(PLACE))):
            assert (found.status_code, found.content) == (status, b"")
            assert (found.headers["Location"], found.headers["Retry-After"]) == (place, "1")
        (await root.post("/v1/snapshots", json={"tenant_id": "acme"})).raise_for_status()
        assert (await root.get(PLACE)).status_code == 200


async def test_statements_count_to_the_quota_of_the_tenant(serve: Serve, superuser: asyncpg.Connection) -> None:
    async with serve(quota={"tenant_bytes": "1 KiB", "burst": "2s"}) as served, served.client(served.root) as root:
        await register_caller(root)
        assert (await post(root)).status_code == 201
        assert problem(await post(root, statement(ED25519, b"p" * 4096))) == (413, "payload-too-large")

        async def is_refused() -> httpx.Response | None:
            answer = await post(root, statement(ED25519, b"p" * 1024))
            return answer if answer.status_code == 429 else None

        refused = await until(is_refused, "the tenant has had its share")
        assert problem(refused) == (429, "quota-exceeded")
        assert int(refused.headers["Retry-After"]) >= 1


async def test_a_statement_longer_than_a_record_is_refused_and_begins_no_tenant(serve: Serve) -> None:
    async with serve(wal={"record_bytes_max": "8 KiB"}) as served, served.client(served.root) as root:
        await register_caller(root)
        assert problem(await post(root, statement(ED25519, b"p" * 7000))) == (413, "payload-too-large")
        assert (await root.get("/v1/tenants")).json()["items"] == [{"tenant_id": "_system"}]
        assert (await post(root, statement(ED25519, b"p" * 1000))).is_success


async def test_a_statement_is_registered_though_others_have_all_slots_for_receipts(
    serve: Serve, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "WAIT_S", 0.1)
    async with serve() as served, served.client(served.root) as root:
        await register_caller(root)
        async with AsyncExitStack() as held:
            for _ in range(RECEIPTS_AT_ONCE_MAX):
                await held.enter_async_context(served.services[ReceiptMaker]._slots.taken())
            answer = await post(root)
            assert (answer.status_code, answer.headers["Retry-After"]) == (303, "1")
            assert len(await registered(superuser)) == 1
        assert (await root.get(PLACE)).status_code == 200

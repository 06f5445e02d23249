"""Webhooks: entries come to a receiver in order, signed, until it confirms them, whatever becomes of it meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import orjson
import pytest
import structlog
from cryptography import x509

from app.dev.cluster import free_port
from app.share.webhooks import WebhookRegistry, delivery, sending
from app.share.webhooks.sending import Names, Outcome, message_of, secret_text
from app.store.chain_reads import ListedEntry
from app.store.webhooks import Webhook
from ledger.facts.events import SystemAction
from tests.app.certificates import Authority
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.postgres_proxy import PostgresProxy
from tests.app.receiver import ENDLESS, STALLED, Received, Receiver, is_signed, receiving
from tests.app.served import Serve
from tests.app.shared import Shared, sharing
from tests.app.test_access_records import entries
from tests.conftest import Database

ROOT = Path(__file__).parents[2]
LOOPBACK = {"webhooks": {"networks": ["127.0.0.0/8"]}}

ENTRY = ListedEntry._make([7] * len(ListedEntry._fields))._replace(t_hlc="1704931200000:1:node", action="CANCEL")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are short."""
    monkeypatch.setattr(delivery, "PAUSE_FIRST_S", 0.01)
    monkeypatch.setattr(delivery, "PAUSE_MAX_S", 0.05)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Shared]:
    """A node that may deliver to this machine."""
    async with sharing(make_shared_settings(**LOOPBACK), shared_database) as shared:
        yield shared


@pytest.fixture
async def node(shared_client: Client) -> AsyncIterator[Client]:
    """The same for one test, whose webhooks go with it."""
    yield shared_client
    for webhook in (await shared_client.get(f"/v1/webhooks?tenant_id={shared_client.tenant}")).json()["items"]:
        (await shared_client.delete(f"/v1/webhooks/{webhook['webhook_id']}")).raise_for_status()


async def write(client: Client, count: int) -> None:
    """Chain so many jobs."""
    line = orjson.dumps(
        {"tenant_id": client.tenant, "type": "JobCreated", "spec": {"image": "a"}, "assigned_dcs": ["x"]}
    )
    headers = {"Content-Type": "application/x-ndjson"}
    answer = await client.post("/v1/events?durability=GLOBAL", content=(line + b"\n") * count, headers=headers)
    assert answer.status_code == 200, answer.text


async def add(client: Client, receiver: Receiver, **more: Any) -> dict[str, Any]:
    answer = await client.post("/v1/webhooks", json={"tenant_id": client.tenant, "url": receiver.url, **more})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def shown(client: Client) -> dict[str, Any]:
    """The one webhook that there is."""
    (found,) = (await client.get(f"/v1/webhooks?tenant_id={client.tenant}")).json()["items"]
    webhook: dict[str, Any] = found
    return webhook


async def until_taken(receiver: Receiver, upto: int) -> None:
    """Wait until all up to a seq came, each in its turn and none left out."""
    await until(lambda: receiver.taken and receiver.taken[-1] == upto, f"seq {upto} is delivered")
    assert receiver.taken == [*range(receiver.taken[0], upto + 1)]


def refusing(*seqs: int, status: int = 422) -> Callable[[Received], int]:
    """Refuses what holds an entry of these seqs."""
    return lambda request: status if {*seqs}.intersection(request.seqs) else 200


async def test_entries_come_in_order_as_they_are_chained_and_signed(node: Client, receiver: Receiver) -> None:
    await write(node, 3)
    webhook = await add(node, receiver, from_seq=1)
    for count in (1, 700, 2):
        await write(node, count)
    await until_taken(receiver, 706)
    listed = (await node.get(f"/v1/chain/entries?tenant_id={node.tenant}&limit=1000")).json()["items"]
    assert [entry for each in receiver.requests for entry in each.said["entries"]] == listed
    for request in receiver.requests:
        assert is_signed(request, webhook["secret"])
        assert request.said["type"] == "chain.entries"
        assert (request.said["webhook_id"], request.said["tenant_id"]) == (webhook["webhook_id"], node.tenant)
        assert request.message_id == f"{webhook['webhook_id']}_{request.seqs[0]}-{request.seqs[-1]}"
        assert len(request.seqs) <= delivery.BATCH_ENTRIES_MAX
        assert not is_signed(request._replace(body=request.body + b" "), webhook["secret"])
    now = await shown(node)
    assert (now["state"], now["delivered_seq"], now["backlog_entries"]) == ("delivering", 706, 0)
    assert "secret" not in now


async def test_without_a_seq_what_was_chained_before_is_not_delivered(node: Client, receiver: Receiver) -> None:
    await write(node, 3)
    await add(node, receiver)
    await write(node, 2)
    await until_taken(receiver, 5)
    assert receiver.taken == [4, 5]


async def test_a_seq_that_the_chain_has_not_reached_is_taken_however_high(node: Client, receiver: Receiver) -> None:
    for from_seq in (2**31, 2**53 - 1):
        webhook = await add(node, receiver, from_seq=from_seq)
        assert webhook["delivered_seq"] == from_seq - 1


async def test_only_the_actions_and_the_job_that_were_asked_for_come(node: Client, receiver: Receiver) -> None:
    await node.post("/v1/jobs", json={"tenant_id": node.tenant, "job_id": "mine", "durability": "GLOBAL"})
    await write(node, 50)
    for job in ("mine", "other"):
        for kind in ("JobAccepted", "JobCompleted"):
            body = {"tenant_id": node.tenant, "type": kind, "durability": "GLOBAL"}
            body |= {"dc_id": "x"} if kind == "JobAccepted" else {}
            await node.post(f"/v1/jobs/{job}/events", json=body)
        await node.post("/v1/jobs", json={"tenant_id": node.tenant, "job_id": "other", "durability": "GLOBAL"})
    await add(node, receiver, from_seq=1, actions=["COMPLETE", "ENQUEUE"], job="mine")

    async def passed() -> bool:
        return bool((await shown(node))["backlog_entries"] == 0)

    await until(passed, "all is looked at")
    told = [(entry["job_id"], entry["action"]) for each in receiver.requests for entry in each.said["entries"]]
    assert told == [("mine", "ENQUEUE"), ("mine", "COMPLETE")]


@pytest.mark.parametrize(
    ("status", "there"),
    [*((status, "http://localhost/elsewhere") for status in (502, 503, 429, 408, 302)), (302, "http://xn--ls8h-.la/")],
)
async def test_what_a_receiver_does_not_take_now_is_sent_again_as_it_was(
    node: Client, receiver: Receiver, status: int, there: str
) -> None:
    answers = iter([status] * 3)
    receiver.judge = lambda _: next(answers, 200)
    receiver.more = {"Location": there.replace("localhost", f"127.0.0.1:{receiver.port}")}
    with structlog.testing.capture_logs() as logs:
        await add(node, receiver, from_seq=1)
        await write(node, 2)
        await until_taken(receiver, 2)
    assert "task_failed" not in {entry["event"] for entry in logs}
    tries = receiver.requests[:4]
    assert [each.status for each in tries] == [status] * 3 + [200]
    assert len({(each.message_id, each.body) for each in tries}) == 1
    assert receiver.asked == {"POST /hook?from=tally HTTP/1.1"}


@pytest.mark.parametrize("value", ["1", "date"])
async def test_a_receiver_says_how_long_to_wait(node: Client, receiver: Receiver, value: str) -> None:
    loop = asyncio.get_running_loop()
    asked_s: list[float] = []

    def judge(_: Received) -> int:
        asked_s.append(loop.time())
        at = datetime.now(UTC) + timedelta(seconds=2)
        receiver.more = {"Retry-After": format_datetime(at, usegmt=True) if value == "date" else value}
        return 429 if len(asked_s) == 1 else 200

    receiver.judge = judge
    await add(node, receiver, from_seq=1)
    await write(node, 1)
    await until_taken(receiver, 1)
    assert asked_s[1] - asked_s[0] >= 1


async def test_entries_that_are_chained_while_the_node_loses_the_database_come_all_the_same(
    run_server: RunServer, make_settings: MakeSettings, receiver: Receiver, proxy: PostgresProxy
) -> None:
    async with run_server(make_settings(**LOOPBACK), url=proxy.url) as client:
        await add(client, receiver, from_seq=1)
        for count in (3, 300, 5):
            await write(client, count)
            proxy.cut()
        await until(lambda: receiver.taken[-1:] == [308], "all is delivered")
    assert list(dict.fromkeys(receiver.taken)) == [*range(1, 309)]


async def test_a_receiver_that_is_down_for_a_while_loses_nothing_over_a_restart_of_the_node(
    run_server: RunServer, make_settings: MakeSettings, receiver: Receiver
) -> None:
    async with run_server(make_settings(**LOOPBACK)) as client:
        webhook = await add(client, receiver)
        await write(client, 2)
        await until_taken(receiver, 2)
        await receiver.stop()
        await write(client, 300)

        async def fails() -> bool:
            now = await shown(client)
            return now["state"] == "failing" and "no answer" in now["last_error"] and now["backlog_entries"] == 300

        await until(fails, "the list says so")
        metrics = (await client.get("/metrics")).text
        (failing,) = [line for line in metrics.splitlines() if line.startswith("webhook_failing_seconds ")]
        assert float(failing.split()[1]) > 0
    async with run_server(make_settings(**LOOPBACK)) as client:
        await write(client, 1)
        await receiver.start()
        await until_taken(receiver, 303)
        assert all(is_signed(each, webhook["secret"]) for each in receiver.requests)
        now = await until(lambda: settled(client), "the position is stored")
        assert (now["delivered_seq"], now["state"], now["last_error"]) == (303, "delivering", None)


async def settled(client: Client) -> dict[str, Any] | None:
    now = await shown(client)
    return now if now["backlog_entries"] == 0 else None


async def test_a_batch_whose_answer_was_lost_comes_again_under_its_id_after_a_restart(
    run_server: RunServer, make_settings: MakeSettings, receiver: Receiver
) -> None:
    receiver.judge = lambda _: STALLED
    async with run_server(make_settings(**LOOPBACK)) as client:
        await write(client, 3)
        await add(client, receiver, from_seq=1)
        await until(lambda: receiver.stalled, "it is sent")
        await write(client, 4)
    receiver.judge = lambda _: 200
    async with run_server(make_settings(**LOOPBACK)):
        await until_taken(receiver, 7)
    first, again, *_ = receiver.requests
    assert (first.message_id, first.body) == (again.message_id, again.body)


async def test_a_refused_entry_is_a_dead_letter_once_others_are_taken_and_can_be_redelivered(
    serve: Serve, superuser: asyncpg.Connection, receiver: Receiver
) -> None:
    receiver.judge = refusing(5, 6)
    async with serve(**LOOPBACK) as served, served.client(served.root) as client:
        await write(client, 20)
        webhook = await add(client, receiver, from_seq=1)
        await until(lambda: settled(client), "all others are delivered")
        assert receiver.taken == [seq for seq in range(1, 21) if seq not in (5, 6)]
        now = await shown(client)
        assert now["dead_letter_count"] == 2
        told = [(each["seq"], each["reason"], each["redelivering"]) for each in now["dead_letters"]]
        assert told == [(seq, "the receiver answers 422", False) for seq in (5, 6)]
        recorded = await entries(superuser, SystemAction.WEBHOOK_DEAD_LETTERED)
        assert [(each["webhook_id"], each["tenant_id"], each["seq"]) for each in recorded] == [
            (webhook["webhook_id"], "acme", seq) for seq in (5, 6)
        ]
        path = f"/v1/webhooks/{webhook['webhook_id']}/redeliver"
        receiver.judge = refusing(6)
        assert (await client.post(path)).status_code == 200

        async def settled_again() -> bool:
            return [each["seq"] for each in (await shown(client))["dead_letters"] if not each["redelivering"]] == [6]

        await until(settled_again, "one is taken, one is refused again")
        await write(client, 1)
        await until(lambda: receiver.taken[-1] == 21, "delivery goes on")
        assert receiver.taken[-2:] == [5, 21]
        (again,) = [each for each in receiver.requests if each.said["redelivered"] and each.status == 200]
        assert (again.seqs, is_signed(again, webhook["secret"])) == ([5], True)
        assert len({(each.message_id, each.body) for each in receiver.requests}) == len(
            {each.message_id for each in receiver.requests}
        ), "one id stands for one body"
        await client.delete(f"/v1/webhooks/{webhook['webhook_id']}")
        assert await superuser.fetchval("SELECT count(*) FROM scheduler.webhook_dead_letters") == 0


@pytest.mark.parametrize("status", [404, 500])
async def test_a_receiver_that_refuses_everything_loses_nothing(node: Client, receiver: Receiver, status: int) -> None:
    receiver.judge = lambda _: status
    await write(node, 30)
    await add(node, receiver, from_seq=1)
    await until(lambda: len(receiver.requests) > 60, "it is asked often")
    assert (await shown(node))["dead_letter_count"] == 0
    tried_before_its_turn = asyncio.Event()

    def back_then(request: Received) -> int:
        if tried_before_its_turn.is_set():
            return 200
        if request.seqs == [4]:
            tried_before_its_turn.set()
        return status

    receiver.judge = back_then
    await until_taken(receiver, 30)


async def test_an_entry_that_is_taken_once_others_were_is_no_dead_letter(
    serve: Serve, superuser: asyncpg.Connection, receiver: Receiver
) -> None:
    receiver.judge = lambda request: (
        500 if request.seqs[0] <= 5 <= request.seqs[-1] and max([0, *receiver.taken]) < 6 else 200
    )
    async with serve(**LOOPBACK) as served, served.client(served.root) as client:
        await write(client, 9)
        await add(client, receiver, from_seq=1)
        await until(lambda: receiver.taken[-1:] == [9], "all others are delivered")
        assert [seq for seq in receiver.taken if seq != 5] == [1, 2, 3, 4, 6, 7, 8, 9]
        (again,) = [each for each in receiver.requests if each.said["redelivered"]]
        assert (again.seqs, again.status) == ([5], 200)
        assert (await shown(client))["dead_letter_count"] == 0
        assert await entries(superuser, SystemAction.WEBHOOK_DEAD_LETTERED) == []


async def test_a_last_entry_that_is_refused_waits_for_one_behind_it(node: Client, receiver: Receiver) -> None:
    receiver.judge = refusing(3)
    await write(node, 3)
    await add(node, receiver, from_seq=1)
    await until(lambda: len(receiver.requests) > 10, "it is asked often")
    assert (await shown(node))["dead_letter_count"] == 0
    await write(node, 1)
    await until(lambda: settled(node), "the one behind it is taken")
    assert (receiver.taken, (await shown(node))["dead_letter_count"]) == ([1, 2, 4], 1)


async def test_a_receiver_that_is_gone_gets_nothing_until_somebody_says_so(node: Client, receiver: Receiver) -> None:
    receiver.judge = lambda _: 410
    await write(node, 3)
    webhook = await add(node, receiver, from_seq=1)

    async def stopped() -> bool:
        return bool((await shown(node))["state"] == "stopped")

    await until(stopped, "it is stopped")
    assert len(receiver.requests) == 1
    receiver.judge = lambda _: 200
    await node.post(f"/v1/webhooks/{webhook['webhook_id']}/redeliver")
    await until_taken(receiver, 3)


async def test_a_receiver_that_stalls_or_never_ends_holds_up_neither_others_nor_itself(
    node: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.3)
    async with receiving() as endless, receiving() as stalled:
        endless.judge, stalled.judge = (lambda _: ENDLESS), (lambda _: STALLED)
        for each in (endless, stalled, receiver):
            await add(node, each, from_seq=1)
        await write(node, 1)
        await until_taken(endless, 1)
        await until_taken(receiver, 1)
        await until(lambda: stalled.stalled > 1, "it is asked again")
        await write(node, 1)
        await until_taken(endless, 2)
        await until_taken(receiver, 2)
        stalled.judge = lambda _: 200
        await until_taken(stalled, 2)


async def test_what_is_removed_gets_nothing_more(
    serve: Serve, superuser: asyncpg.Connection, receiver: Receiver
) -> None:
    receiver.judge = lambda _: 503
    async with serve(**LOOPBACK) as served, served.client(served.root) as client:
        await write(client, 3)
        webhook = await add(client, receiver, from_seq=1, actions=["ENQUEUE"])
        await until(lambda: receiver.requests, "it is sent")
        removed = await client.delete(f"/v1/webhooks/{webhook['webhook_id']}")
        assert (removed.status_code, removed.json()["webhook_id"]) == (200, webhook["webhook_id"])
        assert (await client.get("/v1/webhooks?tenant_id=acme")).json()["items"] == []
        deliveries = served.services[WebhookRegistry].deliveries
        await until(lambda: deliveries.values()["webhooks_held"] == 0, "nobody delivers to it")
        sent = len(receiver.requests)
        await write(client, 1)
        async with receiving() as other:
            await add(client, other, from_seq=1)
            await until_taken(other, 4)
        assert len(receiver.requests) == sent

        async def all_added() -> bool:
            return len(await entries(superuser, SystemAction.WEBHOOK_ADDED)) == 2

        await until(all_added, "both are chained")
        (added, _) = await entries(superuser, SystemAction.WEBHOOK_ADDED)
        (gone,) = await entries(superuser, SystemAction.WEBHOOK_REMOVED)
        assert added == {
            "type": "WEBHOOK_ADDED",
            "actor": "root",
            "webhook_id": webhook["webhook_id"],
            "tenant_id": "acme",
            "url": receiver.url,
            "actions": ["ENQUEUE"],
            "format": "standard",
            "from_seq": 1,
        }
        assert (gone["actor"], gone["webhook_id"]) == ("root", webhook["webhook_id"])
        assert (await client.delete(f"/v1/webhooks/{webhook['webhook_id']}")).status_code == 404


async def test_who_administers_another_tenant_neither_sees_nor_changes_a_webhook(
    serve: Serve, receiver: Receiver
) -> None:
    async with serve(**LOOPBACK) as served, served.client(served.root) as client:
        webhook = await add(client, receiver)
        stranger = await served.issue("admin", "audit", tenants="other", name="stranger")
        async with served.client(stranger["token"]) as other:
            path = f"/v1/webhooks/{webhook['webhook_id']}"
            assert (await other.delete(path)).status_code == 404
            for act in ("redeliver", "pause", "resume"):
                assert (await other.post(f"{path}/{act}")).status_code == 404
            assert (await other.post(f"{path}/replay", json={"from_seq": 1})).status_code == 404
            assert (await other.get("/v1/webhooks?tenant_id=acme")).status_code == 403
            wanted = {"tenant_id": "acme", "url": receiver.url}
            assert (await other.post("/v1/webhooks", json=wanted)).status_code == 403
            assert (await other.get("/v1/webhooks?tenant_id=other")).json() == {"items": [], "next_cursor": None}
        now = await shown(client)
        assert (now["webhook_id"], now["state"]) == (webhook["webhook_id"], "delivering")


async def test_the_connection_goes_to_the_address_that_was_looked_at() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b""))

    webhook = Webhook("5f0c9a1e2b3d4c5f", "acme", "https://localhost:8443/hook?a=b", None, None, "standard")
    message = message_of(webhook, [ENTRY], "log/acme")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        allowed = await sending.attempt(client, webhook.url, message, b"key", Names(), [ip_network("127.0.0.0/8")])
        refused = await sending.attempt(client, webhook.url, message, b"key", Names(), [])
    (request,) = asked
    assert (allowed.outcome, refused.outcome) == (Outcome.TAKEN, Outcome.AWAY)
    assert str(request.url) == "https://127.0.0.1:8443/hook?a=b"
    assert (request.headers["Host"], request.extensions["sni_hostname"]) == ("localhost:8443", "localhost")


async def test_a_name_of_other_letters_is_looked_up_as_dns_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "there is none")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    message = message_of(Webhook("5f0c9a1e2b3d4c5f", "acme", "", None, None, "standard"), [ENTRY], "log/acme")
    async with httpx.AsyncClient() as client:
        answer = await sending.attempt(client, "https://xn--strae-oqa.example/", message, b"key", Names(), [])
    assert asked == ["xn--strae-oqa.example"]
    assert answer.said.startswith("xn--strae-oqa.example is not found")


async def test_a_stop_waits_for_no_receiver(
    run_server: RunServer, make_settings: MakeSettings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_S", 240.0)
    receiver.judge = lambda _: STALLED
    loop = asyncio.get_running_loop()
    async with run_server(make_settings(**LOOPBACK)) as client:
        await write(client, 1)
        await add(client, receiver, from_seq=1)
        await until(lambda: receiver.stalled, "it is sent")
        before_s = loop.time()
    assert loop.time() - before_s < sending.TIMEOUT_S / 4


async def test_another_node_goes_on_at_once_where_one_stops(
    run_server: RunServer,
    make_settings: MakeSettings,
    superuser: asyncpg.Connection,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "HOLD_S", 10_000.0)
    monkeypatch.setattr(delivery, "RENEW_S", 0.02)
    shared = {"privacy": {"master_key_uri": f"file:{make_settings().data_dir}.master"}, **LOOPBACK}
    async with run_server(make_settings("one", node_id="node-a", **shared)) as one:
        await write(one, 3)
        webhook = await add(one, receiver, from_seq=1)
        await until_taken(receiver, 3)
        async with run_server(make_settings("two", node_id="node-b", gate="b", **shared)) as two:
            holders, ends = set(), set()

            async def renewed() -> bool:
                holder, end = await superuser.fetchrow("SELECT holder, held_until FROM scheduler.webhooks")
                holders.add(holder)
                ends.add(end)
                return len(ends) > 20

            await until(renewed, "the hold is made to last")
            assert len(holders) == 1
            held = "webhooks_held 1.0"
            assert held in (await one.get("/metrics")).text
            assert held not in (await two.get("/metrics")).text
            await write(two, 2)
            await until_taken(receiver, 5)
    async with run_server(make_settings("two", node_id="node-b", gate="b", **shared)) as two:
        await write(two, 1)
        await until_taken(receiver, 6)
    assert all(is_signed(each, webhook["secret"]) for each in receiver.requests)


async def test_a_row_that_somebody_changed_is_signed_with_another_secret(
    run_server: RunServer, make_settings: MakeSettings, receiver: Receiver, superuser: asyncpg.Connection
) -> None:
    async with run_server(make_settings(**LOOPBACK)) as node, receiving() as other:
        webhook = await add(node, other, actions=["COMPLETE"])
        await superuser.execute("UPDATE scheduler.webhooks SET url = $1, actions = NULL", receiver.url)

        async def is_sent() -> bool:
            await write(node, 1)
            return bool(receiver.requests)

        await until(is_sent, "the node, which holds the row, sends the other receiver something")
        assert not is_signed(receiver.requests[0], webhook["secret"])


async def test_nothing_is_sent_to_an_address_that_is_not_public(
    run_server: RunServer, make_settings: MakeSettings, receiver: Receiver
) -> None:
    async with run_server(make_settings()) as client:
        await write(client, 1)
        await add(client, receiver, from_seq=1)

        async def says_so() -> bool:
            return "has no address that is public" in ((await shown(client))["last_error"] or "")

        await until(says_so, "the list says so")
        assert receiver.requests == []
        no_urls = ("http://receiver.example.org/", "https://user:word@receiver.example.org/", "ftp://a/", "x")
        no_hosts = ("https://xn--a/", "https://xn--0/", "https://[1:2]/")
        for url in (*no_urls, *no_hosts):
            answer = await client.post("/v1/webhooks", json={"tenant_id": "acme", "url": url})
            assert (answer.status_code, answer.json()["path"]) == (422, "url"), url


async def test_a_webhook_names_actions_that_there_are(
    run_server: RunServer, make_settings: MakeSettings, receiver: Receiver
) -> None:
    async with run_server(make_settings()) as client:
        await write(client, 1)
        body = {"tenant_id": "acme", "url": receiver.url, "actions": ["FAIL", "FAILED"]}
        answer = await client.post("/v1/webhooks", json=body)
        assert (answer.status_code, answer.json()["path"]) == (422, "actions")
        assert "there is no action 'FAILED'; there are ACCESS_REFUSED" in answer.json()["detail"]


async def test_over_tls_the_receiver_must_have_the_name_that_the_url_has(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "certificates")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    pair = authority.issue("receiver", [x509.DNSName("localhost")])
    async with receiving() as receiver, run_server(make_settings(**LOOPBACK)) as client:
        await receiver.stop()
        receiver.certified = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        receiver.certified.load_cert_chain(pair.cert, pair.key)
        await receiver.start()
        await write(client, 1)
        await add(client, receiver, from_seq=1)

        async def refused() -> bool:
            return "CERTIFICATE_VERIFY_FAILED" in ((await shown(client))["last_error"] or "")

        await until(refused, "the name in the certificate is another")
        receiver.host = "localhost"
        await add(client, receiver, from_seq=1)
        await until(lambda: receiver.taken == [1], "it is delivered under that name")


def test_the_receiver_of_the_page_takes_what_is_signed_and_nothing_else(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/webhooks.md").read_text(), re.DOTALL)
    webhook = Webhook("5f0c9a1e2b3d4c5f", "acme", "https://receiver.example.org/", None, None, "standard")
    message = message_of(webhook, [ENTRY], "log/acme")
    port = free_port()
    environment = os.environ | {"SECRET": secret_text(b"k" * 32), "PORT": str(port)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as receiver:
        try:
            now_s = int(time.time())
            with httpx.Client(transport=httpx.HTTPTransport(retries=20), trust_env=False, timeout=60) as client:
                for key, at_s, body, status in (
                    (b"k", now_s, message.body, 204),
                    (b"o", now_s, message.body, 401),
                    (b"k", now_s - 3600, message.body, 401),
                    (b"k", now_s, message.body + b" ", 401),
                ):
                    headers = message.headers(key * 32, at_s)
                    answer = client.post(f"http://127.0.0.1:{port}/", content=body, headers=headers)
                    assert answer.status_code == status
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == message.body + b"\n"
        finally:
            receiver.kill()


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        *[(each, True) for each in ("8.8.8.8", "2606:4700::1111")],
        *[(each, False) for each in ("10.1.2.3", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1")],
        *[(each, False) for each in ("fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::")],
        *[(each, False) for each in ("64:ff9b:1::a00:1", "::ffff:0:a00:1", "::a00:1", "fec0::1", "192.0.0.192")],
    ],
)
def test_addresses_that_lead_to_private_networks_are_not_public(address: str, is_public: bool) -> None:
    assert sending.may_be_asked(address, []) is is_public


async def test_a_tenant_has_so_many_webhooks_and_no_more(node: Client, receiver: Receiver) -> None:
    for _ in range(16):
        await add(node, receiver)
    more = await node.post("/v1/webhooks", json={"tenant_id": node.tenant, "url": receiver.url})
    assert (more.status_code, "16 webhooks" in more.json()["detail"]) == (422, True)
    assert len((await node.get(f"/v1/webhooks?tenant_id={node.tenant}")).json()["items"]) == 16
    other = await add(node, receiver, tenant_id=f"{node.tenant}-other")
    await node.delete(f"/v1/webhooks/{other['webhook_id']}")

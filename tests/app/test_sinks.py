"""Webhooks in other formats and over syslog: each entry once more in the words of its receiver, paused and replayed."""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import ssl
import statistics
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import cache
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from ocsf_json_schema import OcsfJsonSchemaEmbedded, get_ocsf_schema

from app.dev.cluster import free_port
from app.share.webhooks import sending
from app.share.webhooks.formats import Format, cloud_event, cloud_event_type, ocsf_event, severity_of
from app.share.webhooks.sending import Names, Outcome, context_of_secret
from app.share.webhooks.syslog import attempt, framed
from app.store import retention
from app.store.chain_reads import ListedEntry
from app.store.webhooks import Webhook
from ledger.facts.events import ACTIONS, EVENTS_BY_ACTION, TYPE_OF_ACTION
from tests.app.certificates import Authority
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.receiver import STALLED, Received, Receiver, is_signed, receiving
from tests.app.shared import Shared, sharing
from tests.app.syslog_receiver import Does, SyslogReceiver, parsed, receiving_syslog
from tests.app.test_webhooks import LOOPBACK, add, node, receiver, shown, soon, write
from tests.conftest import Database

__all__ = ["node", "receiver", "soon"]

SOURCE = "tallystick.local/0123456789ab/acme"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def trusting(authority: Authority) -> dict[str, Any]:
    """Settings of a node that delivers to receivers of this machine which the authority knows."""
    return {"webhooks": {**LOOPBACK["webhooks"], "ca": str(authority.ca_file)}}


@pytest.fixture(scope="module")
async def shared(
    make_shared_settings: MakeSettings, shared_database: Database, trusting: dict[str, Any]
) -> AsyncIterator[Shared]:
    async with sharing(make_shared_settings(**trusting), shared_database) as shared:
        yield shared


@pytest.fixture
async def syslog(authority: Authority) -> AsyncIterator[SyslogReceiver]:
    async with receiving_syslog(authority) as receiver:
        yield receiver


def entry(action: str, payload: bytes | str, **more: Any) -> ListedEntry:
    """An entry of a chain as it is read from there."""
    text = payload if isinstance(payload, str) else payload.decode()
    found = ListedEntry(
        *(1, "acme", 17, "1704931200000:1:node-a", 1704931200000, 1, "node-a", "job-1", action, 2, "0" * 64, "1" * 64),
        *("2" * 64, text, None, datetime(2024, 1, 11, tzinfo=UTC)),
    )
    return found._replace(**more)


PAYLOADS = (
    orjson.dumps({"actor": "root", "dc_id": "eu1", "error": "out of memory", "traceparent": TRACE}),
    orjson.dumps({"failed_dc": "eu1", "error": {"private": "0011"}, "actor": "", "traceparent": "none", "reason": 3}),
    b"[]",
    b"{",
)
"""Of which the second has private members, and the last two are of a ledger that checks less."""


@cache
def ocsf_schema(class_name: str) -> jsonschema.Draft202012Validator:
    """The published schema of a class of OCSF 1.8.0, which has no member that it does not name."""
    found = OcsfJsonSchemaEmbedded(get_ocsf_schema(version="1.8.0")).get_class_schema(class_name, profiles=[])
    return jsonschema.Draft202012Validator(found)


def check_ocsf(event: dict[str, Any]) -> None:
    ocsf_schema({1006: "scheduled_job_activity", 0: "base_event"}[event["class_uid"]]).validate(event)
    assert event["type_uid"] == event["class_uid"] * 100 + event["activity_id"]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_an_entry_of_every_action_is_an_event_of_ocsf_and_of_cloudevents(payload: bytes) -> None:
    assert {*ACTIONS.values()} <= {*TYPE_OF_ACTION}
    for action in TYPE_OF_ACTION:
        listed = entry(action, payload)
        check_ocsf(orjson.loads(orjson.dumps(ocsf_event(listed, SOURCE))))
        event = from_http_event(
            HTTPMessage({"content-type": "application/cloudevents+json"}, orjson.dumps(cloud_event(listed, SOURCE)))
        )
        assert (event.get_id(), event.get_source(), event.get_subject()) == ("acme/17", SOURCE, "job-1")
        assert event.get_time() == datetime(2024, 1, 11, tzinfo=UTC)
        (message,) = parsed(framed(Format.OCSF, [listed], SOURCE))
        assert (message.facility, message.severity, message.message_id) == (13, severity_of(action).syslog, action)


def test_the_words_of_each_format_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/webhooks.md").read_text()
    for action in EVENTS_BY_ACTION:
        event = ocsf_event(entry(action, PAYLOADS[0]), SOURCE)
        severity = severity_of(action)
        activity, state, status = event["activity_id"], event["job"].get("run_state_id", ""), event["status_id"]
        words = f"{activity} | {state} | {status} | {severity.ocsf} | {severity.syslog} |"
        assert f"| `{action}` | `{cloud_event_type(action)}` | {words}".replace("|  |", "| |") in page


def test_what_a_job_is_traced_by_is_in_its_events() -> None:
    listed = entry("FAIL", PAYLOADS[0])
    assert cloud_event(listed, SOURCE)["traceparent"] == TRACE
    event = ocsf_event(listed, SOURCE)
    assert event["metadata"]["correlation_uid"] == TRACE.split("-")[1]
    assert (event["status_detail"], event["device"]["name"], event["actor"]) == (
        "out of memory",
        "eu1",
        {"user": {"uid": "root"}},
    )
    assert "traceparent" not in cloud_event(entry("FAIL", PAYLOADS[1]), SOURCE)


def test_values_of_a_message_end_where_they_end_whatever_is_in_them() -> None:
    odd = 'a"] b\\c]'
    (message, second) = parsed(framed(Format.STANDARD, [entry("FAIL", PAYLOADS[0], job_id=odd)] * 2, SOURCE))
    assert (message.data["job"], message.data["seq"], message.element) == (odd, "17", "tallystick@32473")
    assert second == message
    assert orjson.loads(message.text)["payload"] == PAYLOADS[0].decode()


def test_the_secret_of_a_webhook_from_before_there_were_formats_stays_as_it_was() -> None:
    webhook = Webhook("5f0c9a1e2b3d4c5f", "acme", "https://receiver.example.org/", ["FAIL"], None, Format.STANDARD)
    before = b'["tallystick.webhook-secret.v1","5f0c9a1e2b3d4c5f","acme","https://receiver.example.org/",["FAIL"],null]'
    assert context_of_secret(webhook) == before
    assert context_of_secret(webhook._replace(format=Format.OCSF)) != before


async def live(node: Client) -> None:
    """Chain the life of a job that fails, and an entry that is about no job of its own."""
    created = {"tenant_id": node.tenant, "job_id": "mine", "durability": "GLOBAL"}
    (await node.post("/v1/jobs", json=created, headers={"traceparent": TRACE})).raise_for_status()
    for event in (
        {"type": "JobAccepted", "dc_id": "eu1"},
        {"type": "JobProgressReported", "dc_id": "eu1", "completed": 3},
        {"type": "JobFailed", "error": "out of memory", "failed_dc": "eu1"},
    ):
        body = {"tenant_id": node.tenant, "durability": "GLOBAL", **event}
        (await node.post("/v1/jobs/mine/events", json=body)).raise_for_status()
    capacity = {"tenant_id": node.tenant, "capacity": {"cpu_millis": 8}}
    (await node.put("/v1/nodes/n1/capacity", json=capacity)).raise_for_status()


def events_of(request: Received) -> list[Any]:
    found = orjson.loads(request.body)
    return found if isinstance(found, list) else [found]


async def test_each_format_has_a_body_of_its_own_signed_alike(node: Client) -> None:
    await live(node)
    listed = (await node.get(f"/v1/chain/entries?tenant_id={node.tenant}")).json()["items"]
    async with AsyncExitStack() as stack:
        receivers = {form: await stack.enter_async_context(receiving()) for form in [*Format][1:]}
        secrets = {form: (await add(node, each, from_seq=1, format=form))["secret"] for form, each in receivers.items()}
        found = {
            form: await until(
                lambda each=each: (
                    len(got := [event for request in each.requests for event in events_of(request)]) == 5 and got
                ),
                f"all came as {form}",
            )
            for form, each in receivers.items()
        }
    media = {
        Format.CLOUDEVENTS: "cloudevents+json",
        Format.CLOUDEVENTS_BATCH: "cloudevents-batch+json",
        Format.OCSF: "json",
    }
    for form, each in receivers.items():
        assert {request.headers["content-type"] for request in each.requests} == {f"application/{media[form]}"}
        assert all(is_signed(request, secrets[form]) for request in each.requests)
    assert all(len(events_of(request)) == 1 for request in receivers[Format.CLOUDEVENTS].requests)
    assert found[Format.CLOUDEVENTS] == found[Format.CLOUDEVENTS_BATCH]
    assert [event["data"] for event in found[Format.CLOUDEVENTS]] == listed
    assert [event["type"] for event in found[Format.CLOUDEVENTS]] == [
        *(f"dev.tallystick.job.{past}" for past in ("created", "accepted", "progress_reported", "failed")),
        "dev.tallystick.commitment.capacity_set",
    ]
    assert [event.get("traceparent") for event in found[Format.CLOUDEVENTS]] == [TRACE, *[None] * 4]
    for event in found[Format.OCSF]:
        check_ocsf(event)
    assert [event["activity_id"] for event in found[Format.OCSF]] == [1, 6, 2, 99, 99]
    assert [event["raw_data"] for event in found[Format.OCSF]] == [each["payload"] for each in listed]
    assert [event["unmapped"]["chain_link"] for event in found[Format.OCSF]] == [each["chain_link"] for each in listed]


async def test_entries_come_to_a_syslog_server_in_order_as_they_are_chained(
    node: Client, syslog: SyslogReceiver
) -> None:
    await write(node, 3)
    await node.post("/v1/webhooks", json={"tenant_id": node.tenant, "url": syslog.url, "from_seq": 1, "format": "ocsf"})
    for count in (1, 700, 2):
        await write(node, count)
    await until(lambda: syslog.taken[-1:] == [706], "all is delivered")
    assert syslog.taken == [*range(1, 707)]
    for message in syslog.messages[::100]:
        check_ocsf(orjson.loads(message.text))
    listed = (await node.get(f"/v1/chain/entries?tenant_id={node.tenant}&limit=1000")).json()["items"]
    assert [message.data["link"] for message in syslog.messages] == [each["chain_link"] for each in listed]
    now = await until(lambda: settled(node), "the position is stored")
    assert (now["state"], now["delivered_seq"], now["format"]) == ("delivering", 706, "ocsf")


async def settled(client: Client) -> dict[str, Any] | None:
    now = await shown(client)
    return now if now["backlog_entries"] == 0 else None


@pytest.mark.parametrize("does", [Does.RESET, Does.STALL])
async def test_what_a_syslog_server_has_not_read_and_ended_is_sent_again(
    node: Client, syslog: SyslogReceiver, does: Does, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.5)
    answers = iter([does] * 2)
    syslog.judge = lambda: next(answers, Does.READ)
    await write(node, 200)
    await add_syslog(node, syslog)
    await until(lambda: syslog.taken[-1:] == [200], "all is delivered")
    assert syslog.taken == [*range(1, 201)]
    assert (syslog.reset, syslog.stalled) == ((2, 0) if does is Does.RESET else (0, 2))


async def test_a_syslog_server_that_stops_in_order_with_bytes_unread_has_not_taken_them(authority: Authority) -> None:
    context, pair, batch = (
        ssl.create_default_context(cafile=authority.ca_file),
        authority.issue("stopping"),
        bytes(40_000),
    )
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(pair.cert, pair.key)

    def stop_once_all_came(listener: socket.socket) -> None:
        with ours.wrap_socket(listener.accept()[0], server_side=True) as tls:
            while len(batch) > int.from_bytes(fcntl.ioctl(tls, termios.FIONREAD, bytes(4)), sys.byteorder):
                select.select([tls], [], [])
            with suppress(ssl.SSLError):
                tls.unwrap()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"syslog+tls://localhost:{listener.getsockname()[1]}"
        stopping = asyncio.to_thread(stop_once_all_came, listener)
        answer, _ = await asyncio.gather(attempt(context, url, batch, Names(), [ip_network("127.0.0.0/8")]), stopping)
    assert answer.outcome is Outcome.AWAY, answer


async def add_syslog(client: Client, receiver: SyslogReceiver, **more: Any) -> dict[str, Any]:
    given = {"tenant_id": client.tenant, "url": receiver.url, "from_seq": 1, **more}
    answer = await client.post("/v1/webhooks", json=given)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_syslog_server_is_known_by_its_certificate_and_only_where_it_may_be(
    run_server: RunServer, make_settings: MakeSettings, syslog: SyslogReceiver, trusting: dict[str, Any]
) -> None:
    for settings, error in (
        (LOOPBACK, "CERTIFICATE_VERIFY_FAILED"),
        ({"webhooks": {"ca": trusting["webhooks"]["ca"]}}, "has no address that is public"),
    ):
        async with run_server(make_settings(**settings)) as client:
            await write(client, 1)
            added = await add_syslog(client, syslog)

            async def says_so(client: Client = client, error: str = error) -> bool:
                return error in ((await shown(client))["last_error"] or "")

            await until(says_so, "the list says so")
            await client.delete(f"/v1/webhooks/{added['webhook_id']}")
    assert syslog.messages == []


async def test_addresses_that_are_no_syslog_server_are_refused(node: Client) -> None:
    for url in ("syslog://a:514", "syslog+tls://a/path", "syslog+tls://u@a", "syslog+tls://a:99999", "syslog+tls://"):
        answer = await node.post("/v1/webhooks", json={"tenant_id": node.tenant, "url": url})
        assert (answer.status_code, answer.json()["path"]) == (422, "url"), url
    for url, form in (("syslog+tls://a.example", "cloudevents-batch"), ("https://a.example/", "xml")):
        answer = await node.post("/v1/webhooks", json={"tenant_id": node.tenant, "url": url, "format": form})
        assert (answer.status_code, answer.json()["path"]) == (422, "format"), form


async def test_a_row_of_a_format_that_there_is_not_is_told(shared: Shared, node: Client, receiver: Receiver) -> None:
    await add(node, receiver, from_seq=1)
    await shared.superuser.execute("UPDATE scheduler.webhooks SET format = 'xml' WHERE tenant_id = $1", node.tenant)

    async def is_told() -> bool:
        await write(node, 1)
        return "no address for a webhook of format xml" in ((await shown(node))["last_error"] or "")

    await until(is_told, "the list says what is wrong")


async def test_dead_sinks_cost_a_live_one_nothing(
    node: Client, receiver: Receiver, syslog: SyslogReceiver, authority: Authority
) -> None:
    loop = asyncio.get_running_loop()
    await add(node, receiver, from_seq=1)
    await add_syslog(node, syslog)
    seq = 0

    async def delays_s() -> float:
        """The median time until the live ones have an entry."""
        nonlocal seq
        found = []
        for _ in range(15):
            seq += 1
            began_s = loop.time()
            await write(node, 1)
            await until(lambda seq=seq: receiver.taken[-1:] == syslog.taken[-1:] == [seq], "it is delivered to both")
            found.append(loop.time() - began_s)
        return statistics.median(found)

    alone_s = await delays_s()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with receiving_syslog(authority) as stalled, receiving() as slow:
            stalled.judge, slow.judge = (lambda: Does.STALL), (lambda _: STALLED)
            dead = (f"syslog+tls://localhost:{silent.getsockname()[1]}", f"syslog+tls://localhost:{free_port()}")
            for url in (*dead, stalled.url, slow.url):
                await node.post("/v1/webhooks", json={"tenant_id": node.tenant, "url": url, "from_seq": 1})
            await until(lambda: stalled.stalled and slow.stalled, "they are under way")
            beside_s = await delays_s()
    assert beside_s < alone_s + 1, "far below the 15 s that an attempt at a dead one takes"


async def test_a_paused_webhook_gets_nothing_and_goes_on_where_it_stood(node: Client, receiver: Receiver) -> None:
    webhook = await add(node, receiver, from_seq=1)
    path = f"/v1/webhooks/{webhook['webhook_id']}"
    await write(node, 3)
    await until(lambda: receiver.taken == [1, 2, 3], "the first are delivered")
    for _ in range(2):
        paused = (await node.post(f"{path}/pause")).json()
        assert (paused["state"], paused["delivered_seq"], paused["last_error"]) == ("paused", 3, None)
    await write(node, 2)
    async with receiving() as other:
        await add(node, other, from_seq=1)
        await until(lambda: other.taken[-1:] == [5], "another one has come to what is new")
    assert receiver.taken == [1, 2, 3]
    assert (await node.post(f"{path}/resume")).json()["state"] == "delivering"
    await until(lambda: receiver.taken == [1, 2, 3, 4, 5], "it goes on")


async def test_a_webhook_that_its_receiver_stopped_is_not_paused(node: Client, receiver: Receiver) -> None:
    receiver.judge = lambda _: 410
    webhook = await add(node, receiver, from_seq=1)
    await write(node, 1)

    async def stopped() -> bool:
        return bool((await shown(node))["state"] == "stopped")

    await until(stopped, "it is stopped")
    paused = await node.post(f"/v1/webhooks/{webhook['webhook_id']}/pause")
    assert (paused.json()["state"], paused.json()["last_error"]) == ("stopped", "the receiver answers 410")


async def test_a_replay_delivers_again_from_its_seq_whatever_is_answered_meanwhile(
    shared: Shared, node: Client, receiver: Receiver
) -> None:
    webhook = await add(node, receiver, from_seq=1)
    path = f"/v1/webhooks/{webhook['webhook_id']}/replay"
    receiver.judge = lambda request: 422 if request.seqs == [3] or (3 in request.seqs) else 200
    await write(node, 6)
    now = await until(lambda: settled(node), "all others are delivered")
    assert (now["dead_letter_count"], receiver.taken) == (1, [1, 2, 4, 5, 6])
    # The next message is sent, and answered once the replay is asked for.
    receiver.judge, receiver.held = (lambda _: 200), asyncio.Event()
    await write(node, 1)
    await until(lambda: receiver.taken[-1:] == [7], "it is sent")
    replayed = await node.post(path, json={"from_seq": 2})
    assert (replayed.status_code, replayed.json()["delivered_seq"]) == (200, 1)
    assert (await retention.first_needed(shared.superuser, node.tenant, 0)).webhook == 2
    receiver.held.set()
    await until(lambda: receiver.taken[5:] == [7, 2, 3, 4, 5, 6, 7], "all came again")
    now = await until(lambda: settled(node), "the position is stored")
    assert (now["delivered_seq"], now["dead_letter_count"]) == (7, 0)
    ahead = await node.post(path, json={"from_seq": 8})
    assert (ahead.status_code, ahead.json()["path"]) == (422, "from_seq")


@pytest.mark.debian_tools
async def test_rsyslog_takes_what_is_sent_as_it_was_sent(node: Client, authority: Authority, tmp_path: Path) -> None:
    pair, port, log = authority.issue("rsyslog"), free_port(), tmp_path / "log"
    configuration = tmp_path / "rsyslog.conf"
    configuration.write_text(
        f"""
        global(workDirectory="{tmp_path}" maxMessageSize="1m" defaultNetstreamDriverCAFile="{authority.ca_file}"
               defaultNetstreamDriverCertFile="{pair.cert}" defaultNetstreamDriverKeyFile="{pair.key}")
        module(load="imtcp" streamDriver.name="ossl" streamDriver.mode="1" streamDriver.authMode="anon")
        template(name="all" type="list") {{ property(name="jsonmesg") constant(value="\\n") }}
        ruleset(name="kept") {{ action(type="omfile" file="{log}" template="all") }}
        input(type="imtcp" address="127.0.0.1" port="{port}" ruleset="kept")
        """
    )
    await write(node, 3)
    long = {"tenant_id": node.tenant, "job_id": "long", "spec": {"text": 'é"]\\' * 9000}, "durability": "GLOBAL"}
    (await node.post("/v1/jobs", json=long)).raise_for_status()
    await node.post(
        "/v1/webhooks", json={"tenant_id": node.tenant, "url": f"syslog+tls://localhost:{port}", "from_seq": 1}
    )
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(
            ["/usr/sbin/rsyslogd", "-n", "-i", "NONE", "-f", str(configuration)], stdout=errors, stderr=errors
        )
        try:
            await until(lambda: settled(node), "all is delivered")
            await write(node, 2)
            kept = await until(lambda: len(got := log.read_bytes().splitlines()) >= 6 and got, "all is kept")
        finally:
            process.terminate()
            process.wait()
    messages = [orjson.loads(line) for line in kept]
    listed = (await node.get(f"/v1/chain/entries?tenant_id={node.tenant}")).json()["items"]
    assert [orjson.loads(message["msg"]) for message in messages] == listed
    for message, each in zip(messages, listed, strict=True):
        assert f'seq="{each["seq"]}"' in message["structured-data"]
        assert (message["msgid"], message["app-name"], message["hostname"], message["pri"]) == (
            *("ENQUEUE", "tallystick", each["hlc_node"], "110"),
        )

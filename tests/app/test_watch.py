"""``GET /v1/watch``: each entry once and in order, from wherever, across nodes and restarts; filters; bounds; ends."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from app.edge.accepted import AccessControl, Services
from app.runtime.metrics import Metrics
from app.share import watch as watchers_module
from app.share.watch import Watchers
from app.share.watch.blocks import Wanted
from app.share.watch.tail import ENTRIES_BEFORE, PAGE_ENTRIES
from ledger.errors import ChainDamagedError
from tests.app.chain_builder import edit
from tests.app.chains import UNTIL_S, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings
from tests.app.event_streams import Event, EventStream, watching
from tests.app.served import Serve
from tests.app.shared import Shared, sharing
from tests.conftest import Database

GLOBAL = {"durability": "GLOBAL"}
WIDE = "x" * 20_000


class Node:
    """A node that listens, a client of it, and the tenant that a test writes to and watches."""

    def __init__(self, url: str, services: Services, client: Client) -> None:
        self.url = url
        self.services = services
        self.client = client
        self.tenant_id = client.tenant

    async def write(self, *lines: dict[str, object]) -> None:
        await write(self.client, *lines, tenant_id=self.tenant_id)

    async def entries(self) -> list[Any]:
        return await entries(self.client, self.tenant_id)

    def watching(self, **params: Any) -> AbstractAsyncContextManager[EventStream]:
        return watching(self.client, self.tenant_id, **params)

    async def cancel(self, job_id: str) -> None:
        body = {"tenant_id": self.tenant_id, "reason": "no need", **GLOBAL}
        (await self.client.post(f"/v1/jobs/{job_id}/cancel", json=body)).raise_for_status()

    def counted(self, name: str) -> float:
        return self.services[Metrics].registry.get_sample_value(name) or 0.0

    async def open_streams(self, count: int) -> None:
        """Wait until so many clients watch."""
        await until(lambda: self.counted("watch_streams") == count, f"{count} streams")

    def stalled(self, **params: object) -> socket.socket:
        """A client that asks to watch and then takes nothing."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        query = "&".join(f"{name}={value}" for name, value in {"tenant_id": self.tenant_id, **params}.items())
        connection.sendall(f"GET /v1/watch?{query} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        return connection


RunWatched = Callable[..., Any]


@pytest.fixture
def run_watched(database: Database, make_settings: MakeSettings) -> RunWatched:
    """Runs a node that listens: ``async with run_watched(folder, **settings) as node``."""

    @asynccontextmanager
    async def run(folder: str = "node", **settings: Any) -> AsyncIterator[Node]:
        async with (
            sharing(make_settings(folder, **settings), database) as node,
            Client(base_url=node.url, timeout=60, trust_env=False, limits=httpx.Limits()) as client,
        ):
            yield Node(node.url, node.services, client)

    return run


@pytest.fixture
async def node(shared: Shared, shared_client: Client) -> Node:
    """The node that these tests share, once the streams of the one before have ended."""
    node = Node(shared.url, shared.services, shared_client)
    await node.open_streams(0)
    return node


async def write_wide(node: Node, numbers: range) -> None:
    """Jobs of 20 kB each, in one request."""
    await write_at_once(node, jobs(numbers, spec={"wide": WIDE}))


async def write_at_once(node: Node, created: list[dict[str, object]]) -> None:
    """Jobs, in one request."""
    lines = ({"tenant_id": node.tenant_id, "type": "JobCreated", **job} for job in created)
    headers = {"Content-Type": "application/x-ndjson"}
    content = "\n".join(map(json.dumps, lines))
    (await node.client.post("/v1/events", params=GLOBAL, content=content, headers=headers)).raise_for_status()


async def write(client: httpx.AsyncClient, *lines: dict[str, object], tenant_id: str = "acme") -> None:
    """Events, chained in this order."""
    for line in lines:
        body = {"tenant_id": tenant_id, **GLOBAL, **line}
        path = "/v1/jobs" if "type" not in body else f"/v1/jobs/{body.pop('job_id')}/events"
        (await client.post(path, json=body)).raise_for_status()


def jobs(numbers: Iterable[int], **more: object) -> list[dict[str, object]]:
    return [{"job_id": f"job-{n}", "spec": {"n": n}, **more} for n in numbers]


async def entries(client: httpx.AsyncClient, tenant_id: str = "acme") -> list[Any]:
    answer = await client.get("/v1/chain/entries", params={"tenant_id": tenant_id, "limit": 1000})
    return answer.json()["items"]


def told(events: list[Event]) -> list[Any]:
    """The entries that the events are of, each checked against its event."""
    for event in events:
        assert (event.id, event.name) == (str(event.data["seq"]), event.data["action"])
    return [event.data for event in events]


def seqs(events: list[Event]) -> list[int]:
    return [entry["seq"] for entry in told(events)]


# --- positions --------------------------------------------------------------------------------------


async def test_entries_come_as_the_list_has_them_first_old_ones_then_new_ones(node: Node) -> None:
    await node.write(*jobs(range(5)))
    async with node.watching(from_seq=2) as stream:
        assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert stream.response.headers["cache-control"] == "no-store"
        first = await stream.take(4)
        await node.write(*jobs(range(5, 25)))
        assert told(first + await stream.take(20)) == (await node.entries())[1:]
    assert stream.retry_ms == 1000


async def test_without_a_position_it_begins_now_and_a_client_that_comes_back_early_loses_nothing(node: Node) -> None:
    await node.write(*jobs(range(5)))
    async with node.watching() as stream:
        await node.open_streams(1)
        await node.write(*jobs([5]))
        assert seqs(await stream.take(1)) == [6]
    async with node.watching() as stream:
        reading = asyncio.create_task(stream.take(1))
        await until(lambda: stream.last_id, "the place is told")
        reading.cancel()
    await node.write(*jobs([6]))
    async with node.watching(last_id=stream.last_id) as stream:
        assert seqs(await stream.take(1)) == [7]


async def test_last_event_id_goes_on_behind_it_whatever_the_query_says(node: Node) -> None:
    await node.write(*jobs(range(5)))
    async with node.watching(last_id="3", from_seq=1) as stream:
        assert seqs(await stream.take(2)) == [4, 5]
    async with node.watching(last_id="0") as stream:
        assert seqs(await stream.take(5)) == [1, 2, 3, 4, 5]


async def test_a_position_beyond_the_end_is_waited_for(node: Node) -> None:
    await node.write(*jobs(range(2)))
    async with node.watching(from_seq=5) as stream:
        await node.open_streams(1)
        await node.write(*jobs(range(2, 6)))
        assert seqs(await stream.take(2)) == [5, 6]


@pytest.mark.parametrize("actions", [None, "cancel"])
async def test_a_stream_with_an_end_ends_there_and_leaves_the_connection_to_the_next_request(
    node: Node, actions: str | None
) -> None:
    await node.write(*jobs(range(3)))
    named = {} if actions is None else {"actions": actions}
    async with node.watching(from_seq=2, to_seq=5, **named) as stream:
        await node.open_streams(1)
        await node.write(*jobs(range(3, 7)))
        assert seqs(await stream.rest()) == ([2, 3, 4, 5] if actions is None else [])
        connection = stream.response.extensions["network_stream"]
    async with node.watching(last_id="5", to_seq=5) as stream:
        assert await stream.rest() == []
        assert stream.response.extensions["network_stream"].get_extra_info("socket") is connection.get_extra_info(
            "socket"
        )
    await node.open_streams(0)


CANNOT_BE: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({"from_seq": "0"}, {}, "from_seq"),
    ({"from_seq": "-1"}, {}, "from_seq"),
    ({"from_seq": "x"}, {}, "from_seq"),
    ({"from_seq": "9", "to_seq": "8"}, {}, "from_seq"),
    ({"from_seq": str(2**63)}, {}, "from_seq"),
    ({}, {"Last-Event-ID": "x"}, "Last-Event-ID"),
    ({}, {"Last-Event-ID": "-1"}, "Last-Event-ID"),
    ({}, {"Last-Event-ID": str(2**63)}, "Last-Event-ID"),
    ({"actions": "ENQUEUE,NOTHING"}, {}, "actions"),
    ({"actions": ""}, {}, "actions"),
    ({"job": ""}, {}, "job"),
    ({"dc": "a\nb"}, {}, "dc"),
    ({"since": "1"}, {}, "since"),
]


async def test_what_cannot_be_is_a_problem_before_the_stream_begins(node: Node) -> None:
    for params, headers, field in CANNOT_BE:
        answer = await node.client.get("/v1/watch", params={"tenant_id": "acme", **params}, headers=headers)
        assert (answer.status_code, answer.json()["path"]) == (422, field), params


async def test_a_tenant_that_never_began_is_not_found_and_head_has_no_body(node: Node) -> None:
    answer = await node.client.get("/v1/watch", params={"tenant_id": "nobody"})
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (404, "tenant-not-found")
    await node.write(*jobs([1]))
    answer = await node.client.head("/v1/watch", params={"tenant_id": node.tenant_id, "from_seq": 1})
    assert (answer.status_code, answer.content) == (200, b"")
    await node.open_streams(0)


# --- filters ----------------------------------------------------------------------------------------


async def test_only_what_is_wanted_comes(node: Node) -> None:
    """By action, by job, by data centre: of a job all that it is assigned to or accepted by; of a report its own."""
    await node.write(
        {"job_id": "one", "assigned_dcs": ["a", "b"]},
        {"job_id": "two", "assigned_dcs": ["c"]},
        {"job_id": "one", "type": "JobAccepted", "dc_id": "a", "worker_count": 1},
        {"job_id": "two", "type": "JobAccepted", "dc_id": "d", "worker_count": 1},
        {"job_id": "one", "type": "JobProgressReported", "dc_id": "b", "completed": 1, "failed": 0},
    )
    for job in ("one", "two"):
        await node.cancel(job)
    await node.write({"job_id": "two", "type": "JobFailed", "error": "lost", "failed_dc": "e"})
    wanted: dict[tuple[tuple[str, str], ...], list[int]] = {
        (("actions", "cancel,DEQUEUE"),): [3, 4, 6, 7],
        (("job", "one"),): [1, 3, 5, 6],
        (("job", "one"), ("actions", "CANCEL")): [6],
        (("dc", "a"),): [1, 3, 6],
        (("dc", "b"),): [1, 5, 6],
        (("dc", "c"),): [2, 7, 8],
        (("dc", "d"),): [2, 4, 7, 8],
        (("dc", "e"),): [8],
        (("dc", "b"), ("actions", "CANCEL")): [6],
        (("dc", "x"),): [],
    }
    for params, expected in wanted.items():
        async with node.watching(from_seq=1, to_seq=8, **dict(params)) as stream:
            assert seqs(await stream.rest()) == expected, params


async def test_live_watchers_are_told_what_they_want_and_nothing_else(node: Node) -> None:
    await node.write({"job_id": "first", "assigned_dcs": ["a"]})
    wanted = [{"actions": "CANCEL"}, {"job": "job-7"}, {"dc": "b"}, {"dc": "a", "actions": "CANCEL"}, {}]
    async with (
        node.watching(**wanted[0]) as cancels,
        node.watching(**wanted[1]) as one_job,
        node.watching(**wanted[2]) as one_dc,
        node.watching(**wanted[3]) as cancels_of_dc,
        node.watching(**wanted[4]) as all_of_it,
    ):
        await node.open_streams(5)
        await node.write(*jobs(range(10), assigned_dcs=["b"]))
        for job in ("first", "job-7"):
            await node.cancel(job)
        assert seqs(await cancels.take(2)) == [12, 13]
        assert seqs(await one_job.take(2)) == [9, 13]
        assert seqs(await one_dc.take(11)) == [*range(2, 12), 13]
        assert seqs(await cancels_of_dc.take(1)) == [12]
        assert seqs(await all_of_it.take(12)) == [*range(2, 14)]


async def test_a_watcher_by_data_centre_joins_a_tail_that_did_not_ask_for_them(node: Node) -> None:
    await node.write(*jobs(range(3), assigned_dcs=["a"]))
    async with node.watching(from_seq=1) as stream:
        await stream.take(3)
        async with node.watching(from_seq=1, dc="a") as of_dc:
            assert seqs(await of_dc.take(3)) == [1, 2, 3]
            await node.write(*jobs([3], assigned_dcs=["b"]), *jobs([4], assigned_dcs=["a"]))
            assert seqs(await of_dc.take(1)) == [5]


# --- nothing lost, nothing repeated -----------------------------------------------------------------


async def follow(clients: list[httpx.AsyncClient], upto_seq: int, pieces: list[int]) -> list[int]:
    """What a client sees that comes back again and again, each time to another node."""
    found: list[int] = []
    last_id = "0"
    while len(found) < upto_seq:
        count = min(pieces[0], upto_seq - len(found))
        pieces.append(pieces.pop(0))
        clients.append(clients.pop(0))
        async with watching(clients[-1], last_id=last_id) as stream:
            found += seqs(await stream.take(count))
            last_id = stream.last_id
    return found


async def test_resuming_at_one_node_and_the_other_loses_and_repeats_nothing(run_watched: RunWatched) -> None:
    async with run_watched("one") as one, run_watched("two") as two:
        await one.write(*jobs(range(1)))
        following = [
            asyncio.create_task(follow([one.client, two.client], 101, [1, 7, 3])),
            asyncio.create_task(follow([two.client], 101, [101])),
            asyncio.create_task(follow([one.client], 101, [50, 2])),
        ]
        for n in range(1, 101, 10):
            await asyncio.gather(one.write(*jobs(range(n, n + 5))), two.write(*jobs(range(n + 5, n + 10))))
        for each in following:
            assert await each == [*range(1, 102)]


async def test_a_restart_loses_and_repeats_nothing(run_watched: RunWatched) -> None:
    found: list[int] = []
    last_id = "0"
    for start in range(0, 40, 10):
        async with run_watched() as node:
            await node.write(*jobs(range(start, start + 10)))
            async with node.watching(last_id=last_id) as stream:
                found += seqs(await stream.take(start + 5 - len(found)))
                last_id = stream.last_id
    async with run_watched() as node, node.watching(last_id=last_id) as stream:
        found += seqs(await stream.take(40 - len(found)))
    assert found == [*range(1, 41)]


# --- slow clients -----------------------------------------------------------------------------------


def received(connection: socket.socket) -> bytes:
    """All that comes until the stream is over."""
    connection.settimeout(60)
    found = b""
    while not found.endswith(b"\r\n0\r\n\r\n"):
        piece = connection.recv(1 << 16)
        assert piece, "the connection ended before the stream"
        found += piece
    return found


def unchunked(answer: bytes) -> bytes:
    """The body of an answer that came in chunks."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


async def test_a_client_that_falls_behind_is_told_where_to_start_over_and_costs_a_bound(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it stands still others go on; no more than some buffers of the system hold what it does not take."""
    monkeypatch.setattr("app.share.watch.tail.TAIL_BYTES_MAX", 200_000)
    lagged_before = node.counted("watch_lagged_total")
    await node.write(*jobs([0]))
    with node.stalled() as stalled:
        async with node.watching() as reading:
            await node.open_streams(2)
            for start in range(0, 600, 50):
                await write_wide(node, range(start + 1, start + 51))
                assert seqs(await reading.take(50)) == [*range(start + 2, start + 52)]
        answer_bytes = await asyncio.to_thread(received, stalled)
    *events, last, rest = unchunked(answer_bytes).split(b"\n\n")
    assert rest == b""
    assert last.startswith(b"event: lagged\ndata: ")
    seen = [int(event.split(b"\n")[0].removeprefix(b"id: ")) for event in events if b"\nevent: " in event]
    assert seen == [*range(2, 2 + len(seen))]
    assert 0 < len(seen) < 500
    lagged = httpx.Response(200, content=last.removeprefix(b"event: lagged\ndata: ")).json()
    assert lagged == {"from_seq": seen[-1] + 1, "head_seq": 601}
    assert node.counted("watch_lagged_total") == lagged_before + 1
    async with node.watching(from_seq=lagged["from_seq"]) as stream:
        assert seqs(await stream.take(601 - seen[-1])) == [*range(seen[-1] + 1, 602)]


async def test_a_client_that_takes_nothing_for_long_is_cut_off(run_watched: RunWatched) -> None:
    async with run_watched(http={"body_timeout": "500ms"}) as node:
        await write_wide(node, range(300))
        with node.stalled(from_seq=1):
            await node.open_streams(1)
            await node.open_streams(0)


async def test_many_watchers_some_stalled_see_all_while_writes_go_on(run_watched: RunWatched) -> None:
    count, stalls = 300, 30
    async with run_watched(http={"connections_max": 1000}) as node:
        await node.write(*jobs([0], assigned_dcs=["dc-0"]))

        async def watch(n: int) -> list[int]:
            params = ({}, {"dc": f"dc-{n % 10}"}, {"job": f"job-{n}"})[n % 3]
            awaited = (100, 10, 1)[n % 3]
            limits = httpx.Limits(max_connections=1)
            async with (
                httpx.AsyncClient(base_url=node.url, trust_env=False, limits=limits) as client,
                watching(client, **params) as stream,
            ):
                return seqs(await stream.take(awaited))

        stalled = [node.stalled() for _ in range(stalls)]
        watchers = [asyncio.create_task(watch(n)) for n in range(1, count // 3 + 1)]
        await node.open_streams(len(watchers) + stalls)
        for n in range(1, 101):
            await node.write(*jobs([n], assigned_dcs=[f"dc-{n % 10}"]))
        for n, watcher in enumerate(watchers, 1):
            first = next(m for m in range(1, 11) if m % 10 == n % 10)
            expected = ([*range(2, 102)], [*range(first + 1, 102, 10)], [n + 1])[n % 3]
            assert await watcher == expected
        for connection in stalled:
            connection.close()
        await node.open_streams(0)
        assert node.counted("watch_entries_sent_total") >= 33 * 100


# --- silence, ends ----------------------------------------------------------------------------------


async def test_a_stream_on_which_nothing_happens_stays_open_and_says_that_it_lives(
    run_watched: RunWatched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers_module, "LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(watchers_module, "SILENCE_MAX_S", 0.4)
    monkeypatch.setattr(watchers_module, "PASSED_MIN", 3)
    short = {"header_timeout": "200ms", "body_timeout": "200ms"}
    async with run_watched(http=short) as node:
        await node.write(*jobs([0]))
        async with node.watching(from_seq=2, actions="CANCEL") as stream:
            for _ in range(3):
                await stream.until_comment()
            assert stream.last_id == ""
            await node.write(*jobs(range(1, 6)))
            await until(lambda: int(stream.last_id or 0) >= 4, "it says how far it has come")
            await node.cancel("job-1")
            assert seqs(await stream.take(1)) == [7]


async def test_a_client_that_wants_nothing_of_many_pages_is_told_how_far_it_has_come(
    run_watched: RunWatched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers_module, "SILENCE_MAX_S", 0.0)
    monkeypatch.setattr(watchers_module, "PASSED_MIN", 3)
    async with run_watched() as node:
        await write_at_once(node, jobs(range(ENTRIES_BEFORE + PAGE_ENTRIES)))
    async with run_watched() as node, node.watching(from_seq=1, to_seq=PAGE_ENTRIES, job="nothing") as stream:
        assert await stream.rest() == []
    assert (stream.comments, stream.last_id) == (1, str(PAGE_ENTRIES))


async def test_a_stop_ends_streams_at_once_also_those_that_nobody_reads(run_watched: RunWatched) -> None:
    async with run_watched(http={"body_timeout": "10m"}, shutdown_grace="10m") as node:
        await write_wide(node, range(300))
        stalled = node.stalled(from_seq=1)
        async with node.watching(from_seq=1) as caught_up, node.watching() as idle:
            await caught_up.take(300)
            await node.open_streams(3)
            node.services[Watchers].close()
            assert await caught_up.rest() == []
            assert await idle.rest() == []
        # Long before http.body_timeout would have ended the one that nobody reads.
        await node.open_streams(0)
        refused = await node.client.get("/v1/watch", params={"tenant_id": "acme"})
        assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (503, "not-ready")
        stalled.close()
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 60


async def test_leaving_with_open_streams_does_not_wait_for_their_clients(run_watched: RunWatched) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        async with run_watched(shutdown_grace="10m") as node:
            await node.write(*jobs([0]))
            client.base_url = httpx.URL(node.url)
            context = watching(client)
            stream = await context.__aenter__()
            reading = asyncio.create_task(stream.rest())
            await node.open_streams(1)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 60
        assert await reading == []
        await context.__aexit__(None, None, None)


async def test_clients_that_go_away_are_forgotten(node: Node) -> None:
    await node.write(*jobs([0]))
    for _ in range(3):
        async with node.watching(), node.watching(from_seq=1):
            await node.open_streams(2)
        await node.open_streams(0)
    await until(lambda: not node.services[Watchers]._tails._tails, "no tail is left")


async def test_a_chain_that_is_damaged_ends_its_streams_and_no_other(node: Node, shared: Shared) -> None:
    await node.write(*jobs(range(5)))
    await write(node.client, *jobs([0]), tenant_id=f"{node.tenant_id}-other")
    delete = "DELETE FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 3"
    await edit(shared.superuser, delete, node.tenant_id)
    async with watching(node.client, f"{node.tenant_id}-other", from_seq=1) as other:
        async with node.watching(from_seq=1) as stream:
            assert await stream.rest() == []
        assert len(await other.take(1)) == 1


async def test_a_chain_that_fails_while_a_client_is_told_something_ends_its_stream(node: Node) -> None:
    await node.write(*jobs(range(5)))
    watchers, everything = node.services[Watchers], Wanted()

    async def may_watch() -> bool:
        return True

    async with watchers.open(node.tenant_id, everything, 0, None, may_watch) as watcher:
        while watcher.seq < 5:
            assert await watcher.next()
            watcher.sent()
        watcher._tail.fail(ChainDamagedError(node.tenant_id, "a row is gone"))
        async with asyncio.timeout(UNTIL_S):
            assert await watcher.next() == b""


# --- who may ----------------------------------------------------------------------------------------


async def test_watching_needs_the_right_to_read_and_of_the_system_to_audit(serve: Serve) -> None:
    async with serve() as served:
        reader = (await served.issue("read", "write", tenants="acme"))["token"]
        auditor = (await served.issue("audit"))["token"]
        async with served.client(reader) as client, served.client(auditor) as audit:
            await write(client, *jobs([0]))
            async with watching(client, from_seq=1) as stream:
                assert told(await stream.take(1)) == (await entries(audit))[:1]
            for tenant_id in ("other", "_system"):
                answer = await client.get("/v1/watch", params={"tenant_id": tenant_id})
                assert answer.status_code == 403
            assert (await audit.get("/v1/watch", params={"tenant_id": "acme"})).status_code == 403
            async with watching(audit, "_system", from_seq=1) as stream:
                assert seqs(await stream.take(1)) == [1]
            assert (await audit.get("/v1/jobs", params={"tenant_id": "_system"})).json()["items"] == []
            assert (await audit.get("/v1/jobs")).status_code == 403


async def test_a_token_that_is_revoked_ends_its_streams_and_no_other(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers_module, "LOOK_INTERVAL_S", 0.1)
    async with serve() as served:
        revoked, kept = [await served.issue("read", "write", tenants="acme", name=name) for name in ("one", "two")]
        async with served.client(revoked["token"]) as one, served.client(kept["token"]) as two:
            await write(one, *jobs([0]))
            async with watching(one) as ending, watching(two) as staying:
                async with served.client(served.root) as root:
                    (await root.delete(f"/v1/tokens/{revoked['token_id']}")).raise_for_status()
                assert await ending.rest() == []
                await write(two, *jobs([1]))
                assert seqs(await staying.take(1)) == [2]


async def test_open_streams_have_a_quota_and_a_bound_of_the_node(serve: Serve, run_watched: RunWatched) -> None:
    async with serve(quota={"watches": 1}) as served:
        token = (await served.issue("read", "write"))["token"]
        async with served.client(token) as client:
            await write(client, *jobs([0]))
            async with watching(client):
                answer = await client.get("/v1/watch", params={"tenant_id": "acme"})
                assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
            refused = served.services[Metrics].registry.get_sample_value("quota_refusals_total", {"quota": "watches"})
            assert refused == 1
            watches = served.services[AccessControl].quotas.watches
            await until(lambda: not +watches._under_way, "the stream has ended")
            async with watching(client):
                pass
    async with run_watched(http={"connections_max": 8}) as node:
        await node.write(*jobs([0]))
        streams = [node.watching() for _ in range(6)]
        for stream in streams:
            await stream.__aenter__()
        answer = await node.client.get("/v1/watch", params={"tenant_id": "acme"})
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (503, "not-ready")
        assert (await node.client.get("/livez")).status_code == 200
        for stream in streams:
            await stream.__aexit__(None, None, None)


async def test_a_watch_is_on_record_before_it_begins(run_watched: RunWatched) -> None:
    async with run_watched(privacy={"log_reads": ["acme"]}) as node:
        await node.write(*jobs(range(2)))
        async with node.watching(from_seq=1, actions="enqueue,payloads_read") as stream:
            events = await stream.take(3)
    assert [event.name for event in events] == ["ENQUEUE", "ENQUEUE", "PAYLOADS_READ"]
    recorded = httpx.Response(200, content=events[2].data["payload"]).json()
    assert recorded["watched_from"] == 1
    assert recorded["actions"] == ["ENQUEUE", "PAYLOADS_READ"]
    assert recorded["route"] == "GET /v1/watch"

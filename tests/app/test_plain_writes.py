"""Writes in their common form are answered from the connection, all others by the framework: nobody can tell which."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from typing import Any, NamedTuple

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from uvicorn.server import ServerState

from app.dev.embedded import EmbeddedPostgres
from app.edge.accepted import AccessControl, Services
from app.edge.application import create_app
from app.edge.connection.protocol import ProblemProtocol
from app.edge.fast_path import FastPath
from app.edge.forms.body import FREE_BYTES
from app.node.wiring import running
from app.runtime.metrics import Metrics
from app.runtime.settings.config import Settings
from app.runtime.state.node import Node
from app.trust.quotas import Quotas
from app.write.intake.submit import Submitter
from tests.app.conftest import MakeSettings
from tests.app.postgres_proxy import PostgresProxy
from tests.app.service_thread import serving
from tests.app.shared import Shared
from tests.app.test_protocol import BOUNDS, NAMES, Pieces, until
from tests.ledger.test_commitments import COMMITMENTS, PRECONDITIONS

DEADLINE_S = 60
TENANT, JOB = b"tenant-@", b"job-######"
"""Stand in generated requests where each way has a tenant, and each example a job, of its own."""
WAYS = {b"tenant-a": b"", b"tenant-b": b"X-Way: the framework's\r\n"}
"""By the tenant of a way, what is added to its requests: a header that the connection does not know."""
_numbers = itertools.count(100_000)


# --- both ways -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with serving(postgres, tmp_path_factory.mktemp("plain"), "plain_writes", wal={"record_bytes_max": 4096}) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


class Sent(NamedTuple):
    """A request without what its way adds."""

    line: bytes
    headers: list[bytes]
    body: bytes

    def by(self, tenant: bytes, number: int) -> bytes:
        fields = b"".join(b"%b\r\n" % header for header in self.headers) + WAYS[tenant]
        sent = b"%b\r\n%b\r\n%b" % (self.line, fields, self.body)
        return sent.replace(TENANT, tenant).replace(JOB, b"job-%d" % number)


class Answered(NamedTuple):
    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


GOOD_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=6)
ODD_TEXTS = st.sampled_from(["", "x" * 256, "x" * 257, "\x00", "\u20ac", "\U0001f600", 1, None, ["a"]])
GOOD_COUNTS = st.integers(0, 2**53 - 1)
ODD_NUMBERS = st.sampled_from([-1, 2**53, 10**30, True, None, "1", 1.0, 1.5, 1e300, float("nan"), float("-inf")])
NUMBERS = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(-1e6, 1e6) | st.sampled_from([1e-9, 1e21, 1.0, -0.0])


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(GOOD_TEXTS, inner, max_size=3), max_leaves=6
    )


GOOD_VALUES = trees(st.none() | st.booleans() | NUMBERS | GOOD_TEXTS)
GOOD_SPECS = st.dictionaries(GOOD_TEXTS, GOOD_VALUES, max_size=3)
ODD_VALUES = trees(ODD_NUMBERS | ODD_TEXTS) | st.just({"long": "x" * 4000}) | st.just([[[]]] * 9)
JOBS = st.sampled_from([JOB.decode() + end for end in "abc"])
ODD_JOBS = st.sampled_from(["nobody", "%6aob", "a" * 129, "a b", "..", "", "a/b"])
Fields = dict[str, st.SearchStrategy[Any]]
GOOD_COMMON: Fields = {"fence_token": GOOD_COUNTS, "trace_time": NUMBERS}
ODD_COMMON: Fields = {
    "tenant_id": st.sampled_from(["", "Upper", "a" * 64, 7, None, "_system"]),
    "durability": st.sampled_from(["NONE", "local", None, 1]),
    "fence_token": ODD_NUMBERS,
    "trace_time": ODD_NUMBERS,
    "subject": ODD_TEXTS | GOOD_TEXTS,
    "surprise": GOOD_VALUES,
    "type": st.sampled_from(["JobCreated", "JobAte", 1]),
}
GOOD_CREATION: Fields = {"job_id": JOBS, "spec": GOOD_SPECS, "assigned_dcs": st.lists(GOOD_TEXTS, max_size=3)}
ODD_CREATION: Fields = {"job_id": ODD_JOBS, "spec": ODD_VALUES, "assigned_dcs": ODD_VALUES}
GOOD_CANCELLATION: Fields = {"reason": GOOD_TEXTS, "requestor": GOOD_TEXTS}
ODD_CANCELLATION: Fields = {"reason": ODD_TEXTS, "requestor": ODD_VALUES}
REPORTS: Fields = {"completed": GOOD_COUNTS, "failed": GOOD_COUNTS}
ODD_REPORTS: Fields = {"completed": ODD_NUMBERS, "dc_id": ODD_TEXTS, "error": GOOD_TEXTS}
ROUTES = {
    "": (GOOD_CREATION, ODD_CREATION, {}),
    "/cancel": (GOOD_CANCELLATION, ODD_CANCELLATION, {}),
    "/events": (REPORTS, ODD_REPORTS, {"type": "JobProgressReported", "dc_id": "use1"}),
    "/events again": ({}, ODD_REPORTS, {"type": "JobCompleted"}),
    "/events, too": ({}, ODD_REPORTS, {"type": "JobAccepted", "dc_id": "use1"}),
}
HEADERS = [b"Host: localhost", b"Content-Type: application/json"]
USUAL_HEADERS = [b"Accept: */*", b"User-Agent: test", b"Connection: keep-alive", b"Accept-Encoding: gzip"]
UNUSUAL_HEADERS = [
    b"Idempotency-Key: one",
    b"Idempotency-Key: ",
    b"Tally-Session: x",
    b"Content-Encoding: gzip",
    b"Connection: close",
    b"Connection: Keep-Alive",
    b"Origin: http://localhost",
    b"Origin: http://evil.example",
    b"Host: localhost",
    b"Host: evil.example",
    b"Authorization: Bearer x",
    b"Expect: 200-maybe",
    b"Content-Type: text/plain",
]
ODDITIES = ["values", "text", "path", "query", "method", "version", "type", "header"]


@st.composite
def bodies(draw: st.DrawFn, good: Fields, odd: Fields, fixed: dict[str, Any], oddities: set[str]) -> bytes:
    """JSON in some spelling, or something that is none."""
    level = draw(st.sampled_from(["LOCAL", "LOCAL", "GLOBAL"]))
    value = {"tenant_id": TENANT.decode(), "durability": level, **fixed}
    usual, unusual = good | GOOD_COMMON, odd | ODD_COMMON
    if fixed.get("type") == "JobCompleted":
        # One with a stale fence ends its job once it is chained: before the next request of one way, after that of the
        # other.
        del usual["fence_token"]
    value |= {name: draw(usual[name]) for name in draw(st.sets(st.sampled_from(sorted(usual)), max_size=2))}
    if "values" in oddities:
        name = draw(st.sampled_from(sorted(unusual)))
        value[name] = draw(unusual[name])
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]))
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), separators=separators).encode("utf-8", "surrogatepass")
    if "text" not in oddities:
        return text
    match draw(st.sampled_from(["cut", "longer", "twice", "escaped", "changed"])):
        case "cut":
            return text[: draw(st.integers(0, len(text)))]
        case "longer":
            return text + draw(st.sampled_from([b" ", b"\n", b"{}", b"\x00", b"\xff"]))
        case "twice":
            return text.replace(b"{", b'{"durability":"LOCAL",', 1)
        case "escaped":
            return text.replace(b"tenant_id", rb"ten\u0061nt_id")
    at = draw(st.integers(0, len(text) - 1))
    return text[:at] + bytes([text[at] ^ 1 << draw(st.integers(0, 7))]) + text[at + 1 :]


ODD_PROMISES: Fields = {
    "commitment": st.sampled_from([None, [], {"kind": "Placed"}, {"kind": "Revocation", "index": 0}]) | ODD_VALUES,
    "precondition": st.sampled_from([None, {}, {"kind": "NodeFreeOf"}]) | ODD_VALUES,
    "surprise": GOOD_VALUES,
    "tenant_id": ODD_COMMON["tenant_id"],
}
KEYS = [JOB + end for end in (b"-1", b"-2")]
ODD_KEYS = [b"", b" ", b"a" * 256, b"\xe9"]


@st.composite
def proposals(draw: st.DrawFn) -> Sent:
    """A proposal under one of a few keys, or one that is odd in some way."""
    value = {"tenant_id": TENANT.decode(), "commitment": draw(COMMITMENTS), "precondition": draw(PRECONDITIONS)}
    if draw(st.booleans()):
        del value["precondition"]
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(ODD_PROMISES)))
        value[name] = draw(ODD_PROMISES[name])
    body = json.dumps(value).encode("utf-8", "surrogatepass")
    keys = [b"Idempotency-Key: " + draw(st.sampled_from(KEYS * 4 + ODD_KEYS))]
    keys *= draw(st.sampled_from([1] * 8 + [0, 2]))
    return Sent(b"POST /v1/commitments HTTP/1.1", [*HEADERS, *keys, b"Content-Length: %d" % len(body)], body)


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    """A good request, or one that is odd in one way or two."""
    if draw(st.integers(0, 2)) == 0:
        return draw(proposals())
    oddities = draw(st.sets(st.sampled_from(ODDITIES), max_size=2))

    def either(what: str, usual: bytes, *odd: bytes) -> bytes:
        return draw(st.sampled_from(odd)) if what in oddities else usual

    action = draw(st.sampled_from(sorted(ROUTES)))
    path = b"/v1/jobs"
    if action:
        job = draw(ODD_JOBS if "path" in oddities else JOBS)
        path += f"/{job}{action.partition(',')[0].partition(' ')[0]}".encode()
    path += either("query", b"", b"?", b"?x=1", b"/", b"#")
    body = draw(bodies(*ROUTES[action], oddities))
    method, version = either("method", b"POST", b"PUT", b"GET"), either("version", b"HTTP/1.1", b"HTTP/1.0")
    types = either("type", b"application/json", b"application/json; charset=utf-8", b"text/plain", b"Application/JSON")
    headers = [
        b"Host: localhost",
        b"Content-Type: " + types,
        *draw(st.lists(st.sampled_from(USUAL_HEADERS), max_size=2)),
    ]
    if "header" in oddities:
        headers.append(draw(st.sampled_from(UNUSUAL_HEADERS)))
    return Sent(b"%b %b %b" % (method, path, version), [*headers, b"Content-Length: %d" % len(body)], body)


def answers_to(address: tuple[str, int], sent: list[bytes], cuts: list[int]) -> list[Answered]:
    """The answers to requests sent one after the other on one connection, fewer when the service ends it."""
    found: list[Answered] = []
    with socket.create_connection(address, timeout=DEADLINE_S) as connection, connection.makefile("rb") as reader:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for request in sent:
            places = [0, *sorted(cut % len(request) for cut in cuts), len(request)]
            with contextlib.suppress(ConnectionError):  # It refuses a head before it has the body.
                for start, end in itertools.pairwise(places):
                    connection.sendall(request[start:end])
            found.append(answer_from(reader))
            if (b"connection", b"close") in found[-1].headers:
                return found
    return found


def answer_from(reader: BufferedReader) -> Answered:
    """The next answer."""
    line, headers = reader.readline(), []
    while (field := reader.readline()) != b"\r\n":
        name, _, value = field.rstrip(b"\r\n").partition(b": ")
        headers.append((name, value))
    return Answered(line, headers, reader.read(int(dict(headers)[b"content-length"])))


_MADE = re.compile(
    rb'"(?:hlc|at|session|chain_link|prev_chain_link)":"[^"]*"|"lsn":[0-9]+|local-[0-9]+-[a-z0-9]+-[0-9]+|tenant-[ab]'
)


def comparable(answer: Answered) -> Answered:
    """The answer without what is another one in each."""
    headers = dict(answer.headers)
    assert int(headers[b"content-length"]) == len(answer.body)
    if session := headers.get(b"tally-session"):
        assert b'"session":"%b"' % session in answer.body or b'"session"' not in answer.body
    differing = {b"date", b"content-length", b"tally-session"}
    fields = [(name, b"" if name in differing else _MADE.sub(b"", value)) for name, value in answer.headers]
    return Answered(answer.line, fields, _MADE.sub(b"", answer.body))


CREATED = [
    Sent(b"POST /v1/jobs HTTP/1.1", [*HEADERS, b"Content-Length: %d" % len(body)], body)
    for end in (b"a", b"b")
    for body in [b'{"tenant_id":"%b","job_id":"%b%b","durability":"LOCAL"}' % (TENANT, JOB, end)]
]
"""Creations of two of the jobs."""


@given(sent=st.lists(requests(), min_size=1, max_size=5), cuts=st.lists(st.integers(0, 3000), max_size=3))
def test_every_request_has_the_same_answer_both_ways(
    address: tuple[str, int], sent: list[Sent], cuts: list[int]
) -> None:
    number = next(_numbers)
    sent = [*CREATED, *sent]
    ours, framework = (answers_to(address, [each.by(tenant, number) for each in sent], cuts) for tenant in WAYS)
    assert [comparable(answer) for answer in ours] == [comparable(answer) for answer in framework]


# --- which way -------------------------------------------------------------------------------------


@pytest.fixture
def services(shared: Shared) -> Services:
    return shared.services


def connected(services: Services, framework: Starlette | None = None) -> tuple[ProblemProtocol, Pieces]:
    """A connection to the service whose framework knows no path, so that all it is asked for is not found."""
    config = uvicorn.Config(
        framework or Starlette(), log_config=None, access_log=False, lifespan="off", date_header=False
    )
    config.load()
    given = {"config": config, "server_state": ServerState(), "app_state": {}, "bounds": BOUNDS, "names": NAMES}
    protocol, transport = ProblemProtocol(**given, fast_path=FastPath(services)), Pieces()
    protocol.connection_made(transport)
    return protocol, transport


def statuses(transport: Pieces) -> list[int]:
    return [int(piece[9:12]) for piece in transport.pieces]


async def answered(transport: Pieces, count: int) -> list[int]:
    await until(lambda: len(transport.pieces) == count)
    return statuses(transport)


def post(path: str, body: dict[str, object] | bytes, *headers: str) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, f"Content-Length: {len(text)}")).encode() + b"\r\n\r\n" + text


CREATE = {"tenant_id": "acme", "durability": "LOCAL"}
PROGRESS = {**CREATE, "type": "JobProgressReported", "dc_id": "use1", "completed": 1}
PROMISE = {"tenant_id": "acme", "commitment": {"kind": "Lease", "resource": "r", "holder": "h"}}
FOLLOWED = [
    post("/v1/jobs", {**CREATE, "job_id": "one"}),
    post("/v1/jobs/one/events", PROGRESS),
    post("/v1/jobs/one/cancel", {**CREATE, "reason": "why not"}),
    post("/v1/jobs", {"tenant_id": "acme", "spec": {"image": "a/b:1"}}),
    post("/v1/commitments", PROMISE, "Idempotency-Key: one"),
]


async def test_plain_writes_are_answered_without_the_framework(services: Services) -> None:
    protocol, transport = connected(services)
    for count, sent in enumerate(FOLLOWED, 1):
        protocol.data_received(sent)
        assert set(await answered(transport, count)) == {201}


async def test_a_body_behind_its_head_is_taken_without_the_framework_when_it_comes_soon(services: Services) -> None:
    protocol, transport = connected(services)
    for cut in (FOLLOWED[0].index(b"\r\n\r\n") + 4, len(FOLLOWED[0]) - 1):
        transport.pieces.clear()
        protocol.data_received(FOLLOWED[0][:cut])
        protocol.data_received(FOLLOWED[0][cut:])
        assert await answered(transport, 1) == [201]
        protocol.data_received(FOLLOWED[0][:cut])
        protocol.look(asyncio.get_running_loop().time())
        assert await answered(transport, 2) == [201, 404]
        protocol, transport = connected(services)


UNUSUAL = {
    "a key": post("/v1/jobs", CREATE, "Idempotency-Key: one"),
    "a session": post("/v1/jobs", CREATE, "Tally-Session: x"),
    "an unknown header": post("/v1/jobs", CREATE, "X-Request-Id: 1"),
    "an expectation": post("/v1/jobs", CREATE, "Expect: 100-continue"),
    "an encoding": post("/v1/jobs", CREATE, "Content-Encoding: gzip"),
    "chunks": b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "the last of its connection": post("/v1/jobs", CREATE, "Connection: close"),
    "another charset": post("/v1/jobs", CREATE, "Content-Type: application/json; charset=latin-1"),
    "HTTP/1.0": post("/v1/jobs", CREATE).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "another method": post("/v1/jobs", CREATE).replace(b"POST", b"PUT"),
    "a query": post("/v1/jobs?x=1", CREATE),
    "an escaped path": post("/v1/j%6fbs", CREATE),
    "a long body": post("/v1/jobs", json.dumps(CREATE).encode().ljust(FREE_BYTES + 1)),
    "no body": b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\r\n",
    "no type": post("/v1/jobs", CREATE).replace(b"Content-Type: application/json\r\n", b""),
    "an unknown field": post("/v1/jobs", {**CREATE, "unknown": 1}),
    "a member twice": post("/v1/jobs", b'{"tenant_id":"acme","tenant_id":"acme"}'),
    "a subject": post("/v1/jobs", {**CREATE, "subject": "somebody"}),
    "an unknown job": post("/v1/jobs/nobody/events", PROGRESS),
    "a job that the store may know": post("/v1/jobs", {"tenant_id": "acme", "job_id": "stored"}),
}


async def test_what_is_unusual_is_the_frameworks_and_nothing_of_it_is_taken(services: Services) -> None:
    for what, sent in UNUSUAL.items():
        protocol, transport = connected(services)
        before = services[Submitter].wal.next_lsn
        protocol.data_received(sent)
        assert await answered(transport, 1) == [404], what
        assert services[Submitter].wal.next_lsn == before, what


async def test_requests_behind_a_plain_write_are_answered_in_their_order(services: Services) -> None:
    protocol, transport = connected(services)
    first = post("/v1/jobs", {**CREATE, "job_id": "behind"})
    second = post("/v1/jobs/behind/events", PROGRESS)
    protocol.data_received(first + UNUSUAL["a key"] + second + b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await answered(transport, 4) == [201, 404, 201, 404]


async def test_a_plain_write_whose_client_left_is_chained_and_nothing_is_written(services: Services) -> None:
    protocol, transport = connected(services)
    before = services[Submitter].wal.next_lsn
    protocol.data_received(FOLLOWED[0])
    protocol.connection_lost(None)
    await until(lambda: before < services[Submitter].wal.next_lsn == services[Node].chained.lsn + 1)
    assert transport.pieces == []


async def test_a_plain_write_in_a_stop_is_answered_and_ends_its_connection(services: Services) -> None:
    protocol, transport = connected(services)
    protocol.data_received(FOLLOWED[0])
    protocol.shutdown()
    assert await answered(transport, 1) == [201]
    assert b"\r\nconnection: close\r\n" in transport.pieces[0]
    assert transport.closed
    started, another = connected(services)
    started.data_received(FOLLOWED[0][:-1])
    started.shutdown()
    assert started.server_state.tasks, "the framework waits for the body, and is told when time is up"
    started.connection_lost(None)
    await asyncio.gather(*started.server_state.tasks)
    assert another.pieces == []


async def test_an_event_that_is_not_chained_in_time_is_in_the_log_once_and_the_framework_says_so(
    make_settings: MakeSettings, proxy: PostgresProxy
) -> None:
    late = make_settings(write={"timeout": "1s"}, shutdown_grace="1s")
    async with running(late, proxy.url) as (service, services):
        await service.key_changes.recorded.wait()
        protocol, transport = connected(services, create_app(services))
        protocol.data_received(FOLLOWED[0])
        assert await answered(transport, 1) == [201]
        await until(lambda: services[Node].chained.lsn == services[Submitter].wal.next_lsn - 1)
        await proxy.refuse()
        lsn = services[Submitter].wal.next_lsn
        protocol.data_received(FOLLOWED[3])
        assert await answered(transport, 2) == [201, 503]
        told = json.loads(transport.pieces[-1].partition(b"\r\n\r\n")[2])
        assert (told["type"].rpartition("/")[2], told["lsn"], told["achieved"]) == ("durability-timeout", lsn, "LOCAL")
        assert [each.lsn for each in services[Submitter].backlog if each.tenant_id == "acme"] == [lsn]
        labels = {"method": "POST", "route": "/v1/jobs"}
        took_s = services[Metrics].registry.get_sample_value("http_request_duration_seconds_sum", labels)
        assert took_s is not None
        assert took_s >= 1


async def test_both_ways_refuse_alike_what_is_over_a_quota_and_take_one_request_for_one(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 10**15

    def clock() -> int:
        return now_ns

    application = create_app(services)
    large = {**CREATE, "spec": {"text": "x" * 600}}
    for bound in ({"principal_requests": 1}, {"tenant_requests": 1}, {"tenant_bytes": 1024}):
        given = services[Settings].quota.model_dump(exclude={"burst"}) | bound
        refused = partial(services[Metrics].count, "quota_refusals", 1)
        monkeypatch.setattr(services[AccessControl], "quotas", Quotas.of(given, 1.0, refused, clock))
        protocol, transport = connected(services, application)
        # The store is asked for the job of the first: what the connection began, the framework ends.
        first = {**large, "durability": "GLOBAL", "job_id": f"job-{next(_numbers)}"}
        for count, body in enumerate((first, large), 1):
            protocol.data_received(post("/v1/jobs", body))
            assert await answered(transport, 3 * count - 2) == [201, *[429] * 2, 201][: 3 * count - 2], bound
            for sent in (post("/v1/jobs", large), post("/v1/jobs", large, "X-Way: the framework's")):
                before = len(transport.pieces)
                protocol.data_received(sent)
                await answered(transport, before + 1)
            ours, framework = transport.pieces[-2:]
            assert b"\r\nretry-after: 1\r\n" in ours, bound
            assert ours == framework, bound
            now_ns += 10**9


async def test_both_ways_are_counted_alike(services: Services) -> None:
    def counted(status: str) -> float:
        labels = {"method": "POST", "route": "/v1/jobs", "status": status}
        return services[Metrics].registry.get_sample_value("http_requests_total", labels) or 0.0

    protocol, transport = connected(services)
    taken, unknown = counted("201"), counted("404")
    protocol.data_received(FOLLOWED[0])
    await answered(transport, 1)
    assert counted("201") == taken + 1
    protocol.data_received(UNUSUAL["a member twice"])
    await answered(transport, 2)
    assert (counted("201"), counted("404")) == (taken + 1, unknown), "the framework counts its own"

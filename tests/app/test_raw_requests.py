"""What a client may write on a connection, byte by byte: each request whole gets its answer, in order, and what is none
gets a problem and ends the connection."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.edge.connection.heads import ServedNames
from tests.app.service_thread import serving

DEADLINE_S = 60
BODY = b'{"tenant_id":"acme","durability":"LOCAL"}'
POST = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE_POST = POST + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
LAST_GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> str:
        return str(json.loads(self.body)["type"]).rsplit("/", 1)[-1]


@pytest.fixture(scope="module")
def base_url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("raw")
    http = {"hosts": ["ledger.example.org"], "header_timeout": "3s", "body_timeout": "3s"}
    with serving(postgres, folder, "raw_requests", http=http) as url:
        yield url


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[httpx.Client]:
    # None is kept: the service may end one that is silent for header_timeout while a request is on its way there.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=base_url, timeout=DEADLINE_S, limits=limits) as client:
        assert client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "known"}).status_code == 201
        assert client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "other"}).status_code == 201
        yield client


def exchange(base_url: str, *pieces: bytes) -> bytes:
    """All that the service answers to these pieces until it ends the connection."""
    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        return all_of(connection)


def all_of(connection: socket.socket) -> bytes:
    """What comes until the service ends the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return received


def answers(received: bytes) -> list[Answer]:
    """The answers to requests that were not HEAD, each with its length."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers["content-length"])
        found.append(Answer(int(status.split(" ")[1]), headers, received[:length]))
        received = received[length:]
    return found


def entries(client: httpx.Client) -> int:
    return int(client.get("/v1/node").json()["positions"]["written_lsn"])


@pytest.mark.parametrize("junk", [b"junk\r\n\r\n", b"\x00\xff\x01", b"GET\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
@pytest.mark.parametrize("split", [False, True])
def test_junk_behind_a_post_leaves_its_answer_as_it_is(client: httpx.Client, junk: bytes, split: bool) -> None:
    base_url = str(client.base_url).rstrip("/")
    sent = (WHOLE_POST, junk) if split else (WHOLE_POST + junk,)
    first, second = answers(exchange(base_url, *sent))
    assert first.status == 201
    made = json.loads(first.body)
    assert (second.status, second.problem) == (400, "malformed-http")
    assert second.headers["connection"] == "close"
    read = client.get(f"/v1/jobs/{made['job_id']}?tenant_id=acme", headers={"Tally-Session": made["session"]})
    assert read.status_code == 200


def test_junk_behind_several_requests_is_answered_last(client: httpx.Client) -> None:
    base_url = str(client.base_url).rstrip("/")
    found = answers(exchange(base_url, WHOLE_POST * 3 + b"junk\r\n\r\n" + WHOLE_POST))
    assert [answer.status for answer in found] == [201, 201, 201, 400]


def test_a_body_cut_by_junk_stores_nothing_and_what_came_before_is_answered(client: httpx.Client) -> None:
    base_url = str(client.base_url).rstrip("/")
    before = entries(client)
    cut = POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY[:5] + b"\r\nno number\r\n"
    found = answers(exchange(base_url, WHOLE_POST + cut))
    assert [answer.status for answer in found] == [201, 400]
    assert [answer.status for answer in answers(exchange(base_url, cut))] == [400]
    assert entries(client) == before + 1


CHUNKED = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("sent", "status", "problem"),
    [
        (b"GET /livez\r\n\r\n", 400, "malformed-http"),
        (b"GET /livez HTTP/0.9\r\nHost: localhost\r\n\r\n", 400, "malformed-http"),
        (b"GET /livez HTTP/2.0\r\nHost: localhost\r\n\r\n", 400, "malformed-http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed-http"),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "malformed-http"),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400, "malformed-http"),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n", 400, "malformed-http"),
        (b"GET /livez HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400, "malformed-http"),
        (b"GET /livez HTTP/1.1\nHost: localhost\n\n", 400, "malformed-http"),
        (b"GET /livez HTTP/1.1\r\nHost : localhost\r\n\r\n", 400, "malformed-http"),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: y\r\n folded\r\n\r\n", 400, "malformed-http"),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED + b"\r\n", 501, "transfer-coding-unsupported"),
        (POST + b"Transfer-Encoding: identity\r\n\r\n" + BODY, 501, "transfer-coding-unsupported"),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n" + BODY, 501, "transfer-coding-unsupported"),
        (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKED + b"\r\n", 400, "malformed-http"),
        (POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n" + CHUNKED + b"\r\n", 400, "malformed-http"),
        (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED, 400, "malformed-http"),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + CHUNKED, 400, "malformed-http"),
        (POST + b"Content-Length: 41\r\nContent-Length: 41\r\n\r\n" + BODY, 400, "malformed-http"),
        (POST + b"Content-Length: -1\r\n\r\n" + BODY, 400, "malformed-http"),
        (POST + b"Content-Length: +41\r\n\r\n" + BODY, 400, "malformed-http"),
        (
            POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED + b"\r\n",
            400,
            "malformed-http",
        ),
    ],
)
def test_a_head_that_two_readers_may_read_in_two_ways_is_refused(
    client: httpx.Client, sent: bytes, status: int, problem: str
) -> None:
    before = entries(client)
    (answer,) = answers(exchange(str(client.base_url).rstrip("/"), sent))
    assert (answer.status, answer.problem) == (status, problem)
    assert entries(client) == before


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("localhost.:8080", True),
        ("127.0.0.1", True),
        ("127.9.9.9:1", True),
        ("[::1]:8080", True),
        ("ledger.example.org:443", True),
        ("ledger.example.org.evil.example", False),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.0.2.7", False),
        ("[2001:db8::1]", False),
        ("127.1", False),
        ("", False),
        ("localhost:", False),
        ("localhost@evil.example", False),
        ("localhost, evil.example", False),
        ("localhost/x", False),
    ],
)
def test_a_name_that_is_not_ours_is_refused_so_that_no_page_can_bind_its_own_to_us(
    client: httpx.Client, host: str, is_ours: bool
) -> None:
    head = b"GET /livez HTTP/1.1\r\nConnection: close\r\nHost: %b\r\n\r\n" % host.encode()
    (answer,) = answers(exchange(str(client.base_url).rstrip("/"), head))
    assert (answer.status, is_ours or answer.problem) == ((200, True) if is_ours else (421, "host-not-allowed"))


@pytest.mark.parametrize(
    ("host", "is_ours"), [("192.0.2.7:8080", True), ("[2001:db8::1]", True), ("127.1", False), ("evil.example", False)]
)
def test_a_service_that_others_can_reach_answers_to_addresses_too(host: str, is_ours: bool) -> None:
    assert ServedNames("0.0.0.0", ()).has_host(host.encode()) is is_ours


@pytest.mark.parametrize(
    ("origin", "may_write"),
    [
        ("http://localhost", True),
        ("http://localhost:80", True),
        ("https://ledger.example.org", True),
        ("http://localhost:3000", False),
        ("https://localhost:80", False),
        ("http://evil.example", False),
        ("http://ledger.example.org.evil.example", False),
        ("null", False),
        ("", False),
        ("http://localhost\r\nOrigin: http://evil.example", False),
    ],
)
def test_a_page_of_another_origin_reads_what_its_browser_lets_it_and_changes_nothing(
    client: httpx.Client, origin: str, may_write: bool
) -> None:
    base_url = str(client.base_url).rstrip("/")
    before = entries(client)
    field = b"\r\nOrigin: %b\r\n" % origin.encode()
    (answer,) = answers(exchange(base_url, WHOLE_POST.replace(b"\r\n", field + b"Connection: close\r\n", 1)))
    assert (answer.status, may_write or answer.problem) == ((201, True) if may_write else (403, "origin-not-allowed"))
    assert entries(client) == before + may_write
    (answer,) = answers(exchange(base_url, LAST_GET.replace(b"\r\n", field, 1)))
    assert answer.status == 200


def test_http_1_0_is_answered_and_the_connection_ends(base_url: str) -> None:
    for head in (b"GET /livez HTTP/1.0\r\n\r\n", b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"):
        (answer,) = answers(exchange(base_url, head))
        assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_a_post_that_offers_another_protocol_is_taken_with_its_body(client: httpx.Client) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    sized = POST + offer + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    chunked = POST + offer + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED + b"\r\n"
    found = answers(exchange(str(client.base_url).rstrip("/"), sized + chunked, WHOLE_POST, LAST_GET))
    assert [answer.status for answer in found] == [201, 201, 201, 200]


def test_many_requests_that_offer_another_protocol_are_all_answered(client: httpx.Client) -> None:
    offer = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    found = answers(exchange(str(client.base_url).rstrip("/"), offer * 2500, LAST_GET))
    assert [answer.status for answer in found] == [200] * 2501


def test_trailers_are_no_headers_and_have_a_bound(client: httpx.Client) -> None:
    base_url = str(client.base_url).rstrip("/")
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    key = b"Idempotency-Key: in the trailer, and no key at all\r\n"
    found = answers(exchange(base_url, head + CHUNKED + key + b"Expect: 100-continue\r\n\r\n" + LAST_GET))
    assert [answer.status for answer in found] == [201, 200]
    for endless in (b"X: " + b"x" * 1_000_000, b"X: y\r\n" * 200_000):
        before = entries(client)
        (answer,) = answers(exchange(base_url, head + CHUNKED, endless))
        assert (answer.status, answer.problem) == (431, "headers-too-large")
        assert entries(client) == before
    (answer,) = answers(exchange(base_url, head + b"1;", b"x" * 1_000_000))
    assert (answer.status, answer.problem) == (431, "headers-too-large")


GETS = [
    "/livez",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/v1/node",
    "/v1/keys",
    "/v1/jobs?tenant_id=acme",
    "/v1/jobs/known?tenant_id=acme",
    "/v1/jobs/known/events?tenant_id=acme",
    "/v1/jobs/nobody?tenant_id=acme",
    "/v1/chain/verify?tenant_id=acme",
    "/v1/chain/entries?tenant_id=acme",
    "/v1/nothing",
]


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_the_body(client: httpx.Client, path: str) -> None:
    got, asked = client.get(path), client.head(path)
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    assert asked.headers.keys() == got.headers.keys()
    assert asked.headers["content-type"] == got.headers["content-type"]
    assert client.get("/livez").status_code == 200


def test_head_where_there_is_no_get_is_told_what_there_is(client: httpx.Client) -> None:
    refused = client.head("/v1/events")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def cursor(*value: object, text: str | None = None) -> str:
    raw = text if text is not None else json.dumps(value, separators=(",", ":"))
    return base64.urlsafe_b64encode(raw.encode()).rstrip(b"=").decode()


HUGE = 2**63 - 1
FORGED = [
    ("/v1/jobs?tenant_id=acme", cursor("jobs", "acme/FAILED", 1, 0, "node")),
    ("/v1/jobs?tenant_id=acme", cursor("jobs", "other/", 1, 0, "node")),
    ("/v1/jobs?tenant_id=acme", cursor("events", "acme/known", 1, 0, "node")),
    ("/v1/jobs?tenant_id=acme", cursor(text="[" * 300)),
    ("/v1/jobs/known/events?tenant_id=acme", cursor("events", "acme/other", 1, 0, "node")),
    ("/v1/jobs/known/events?tenant_id=acme", cursor("events", "acme/known", 1, 0, "\ud7ff")),
    ("/v1/chain/entries?tenant_id=acme", cursor("entries", "acme", 0)),
    ("/v1/chain/entries?tenant_id=acme", cursor("entries", "acme", HUGE + 1)),
    ("/v1/chain/entries?tenant_id=acme", cursor("entries", "acme", True)),
    ("/v1/snapshots?tenant_id=acme", cursor("snapshots", "other", 1)),
    ("/v1/log/acme/anchors", cursor("cosignatures", "acme", 1)),
    ("/v1/tenants", cursor("tenants", "", "\x00")),
    ("/v1/tenants", cursor("tenants", "other", "acme")),
]


@pytest.mark.parametrize(("path", "forged"), FORGED)
def test_a_forged_cursor_is_refused(client: httpx.Client, path: str, forged: str) -> None:
    answer = client.get(path + ("&" if "?" in path else "?") + f"cursor={forged}")
    assert (answer.status_code, answer.json()["path"]) == (422, "cursor")


def test_a_cursor_that_a_list_gave_out_is_taken_unchanged_only(client: httpx.Client) -> None:
    path = "/v1/jobs?tenant_id=acme&limit=1"
    given = client.get(path).json()["next_cursor"]
    assert client.get(f"{path}&cursor={given}").status_code == 200
    raw = base64.urlsafe_b64decode(given + "=" * (-len(given) % 4)).decode()
    name, scope, physical_ms, logical, node = json.loads(raw)
    assert cursor(name, scope, physical_ms, logical, node) == given
    changed = [
        *((name, scope, physical_ms, logical, other) for other in ("\x00", "Node", "node\n", "", 1, None)),
        *((name, scope, other, logical, node) for other in (float(physical_ms), -1, True, 2**63)),
        *((name, scope, physical_ms, other, node) for other in (2**32, -1, True, "0")),
        (name, scope, physical_ms, logical, node, 2),
        (name, scope, physical_ms, logical),
        (name, scope + "x", physical_ms, logical, node),
        (name, scope.replace("acme", "other"), physical_ms, logical, node),
        ("events", scope, physical_ms, logical, node),
    ]
    texts = [raw.replace(",", ", "), raw + " ", raw.replace('"jobs"', '"\\u006aobs"'), raw[:-1], "[" * 300]
    for forged in [cursor(*value) for value in changed] + [cursor(text=text) for text in texts]:
        answer = client.get(f"{path}&cursor={forged}")
        assert (answer.status_code, answer.json()["path"]) == (422, "cursor"), forged
    assert client.get(f"{path}&cursor={given}&status=FAILED").status_code == 422


@pytest.mark.parametrize("path", ["/v1/chain/entries?tenant_id=acme", "/v1/jobs?tenant_id=acme"])
def test_a_cursor_at_the_end_of_all_numbers_is_an_empty_page_or_refused(client: httpx.Client, path: str) -> None:
    for forged in (cursor("entries", "acme", HUGE), cursor("jobs", "acme/", HUGE, 2**32 - 1, "z" * 63)):
        assert client.get(f"{path}&cursor={forged}").status_code in (200, 422)


SEED = 20_261_122
PIECES = [
    b"GET ",
    b"POST ",
    b"HEAD ",
    b"BREW ",
    b"/v1/jobs",
    b"/v1/events",
    b"/livez",
    b"?tenant_id=acme",
    b"%0a",
    b"%",
    b"*",
    b" HTTP/1.1\r\n",
    b" HTTP/1.0\r\n",
    b" HTTP/0.9\r\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b"\xff\xfe",
    b"Host: localhost\r\n",
    b"Host: a, b\r\n",
    b"Content-Type: application/json\r\n",
    b"Content-Length: 41\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: x\r\n",
    b"Idempotency-Key: k\r\n",
    b"Tally-Session: x\r\n",
    b"Cookie: " + b"c" * 3000 + b"\r\n",
    b": \r\n",
    b" folded\r\n",
    BODY,
    CHUNKED,
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"5;x=y\r\n",
    b"{",
    b"[" * 200,
    WHOLE_POST,
    b"junk",
]


def generated(random_of: random.Random) -> bytes:
    """Some bytes that look more or less like requests."""
    if random_of.random() < 0.3:
        sent = bytearray(WHOLE_POST * 2)
        for _ in range(random_of.randint(1, 4)):
            at = random_of.randrange(len(sent))
            sent[at] ^= 1 << random_of.randrange(8)
        return bytes(sent)
    return b"".join(random_of.choices(PIECES, k=random_of.randint(1, 14)))


def posted(path: bytes, body: bytes, *fields: bytes) -> bytes:
    """A POST with these lines, each as it is."""
    lines = b"".join(b"%b\r\n" % field for field in fields)
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n%b" % (path, lines, len(body), body)


JSON_FIELD = b"Content-Type: application/json"
LINE = b'{"tenant_id":"acme","type":"JobCreated"}'
LEASE = b'{"tenant_id":"acme","commitment":{"kind":"Lease","resource":"blanks","holder":"h"}}'


@pytest.mark.parametrize(
    ("path", "body"),
    [(b"/v1/jobs", BODY), (b"/v1/events", LINE), (b"/v1/commitments", LEASE)],
)
def test_blanks_around_the_value_of_a_header_are_no_part_of_it(base_url: str, path: bytes, body: bytes) -> None:
    kind = b"Content-Type: application/x-ndjson" if path == b"/v1/events" else JSON_FIELD
    key = b"Idempotency-Key:%bblanks" + path[3:].replace(b"/", b"-")
    spellings = (
        posted(path, body, kind, key % b" " + b" "),
        posted(path, body, kind + b" \t", key % b"\t " + b"\t"),
        posted(path, body, kind, key % b""),
        posted(path, body, kind, key % b" "),
    )
    found = answers(exchange(base_url, *spellings, LAST_GET))[:-1]
    assert [each.status for each in found] == [found[0].status] * 4, found
    assert found[0].status in (200, 201)
    assert len({each.body for each in found}) == 1


def test_blanks_around_what_a_read_goes_by_are_no_part_of_it(base_url: str, client: httpx.Client) -> None:
    session = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "blanks"}).headers["Tally-Session"].encode()
    read = b"GET /v1/jobs/blanks?tenant_id=acme HTTP/1.1\r\nHost: localhost \r\nTally-Session: %b \t\r\n\r\n" % session
    watch = (
        b"GET /v1/watch?tenant_id=acme&to_seq=1 HTTP/1.1\r\nHost: localhost\t\r\nConnection: close \r\n"
        b"Accept: text/event-stream \r\nLast-Event-ID:  0 \t\r\n\r\n"
    )
    received = exchange(base_url, read, watch)
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 2, received


def test_no_bytes_make_a_failure_or_a_silence(client: httpx.Client) -> None:
    """Half of the clients end their side, half wait: the service ends each connection, none after a failure."""
    host, port = str(client.base_url).removeprefix("http://").rstrip("/").split(":")
    random_of = random.Random(SEED)
    requests = [generated(random_of) for _ in range(400)]
    with ExitStack() as stack:
        sent = []
        for number, request in enumerate(requests):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
            with contextlib.suppress(ConnectionError):
                connection.sendall(request)
                if number % 2:
                    connection.shutdown(socket.SHUT_WR)
            sent.append((request, connection))
        for request, connection in sent:
            for line in all_of(connection).split(b"\r\n"):
                assert not line.startswith(b"HTTP/1.1 5") or line.startswith(b"HTTP/1.1 501 "), (request, line)
    assert client.post("/v1/jobs", json={"tenant_id": "acme"}).status_code == 201
    verdict = client.get("/v1/chain/verify?tenant_id=acme").json()
    assert verdict["valid"] is True

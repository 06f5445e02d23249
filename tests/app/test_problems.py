"""Bad requests of many shapes: each gets its problem and its field, nothing is stored, no word leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.runtime.state.session import SECRET_BYTES, SessionTokens, Token
from ledger.facts.problems import PROBLEMS
from tests.app.service_thread import serving
from tests.conftest import connected_to

BODY_BYTES_MAX = 256 * 1024
JSON = {"content-type": "application/json"}
NDJSON = {"content-type": "application/x-ndjson"}
CREATED = b'{"tenant_id":"acme","type":"JobCreated"}\n'
IN_THE_FUTURE = Token("other", 1, 1, "99999999999999:0:other")
MADE_UP = SessionTokens(bytes(SECRET_BYTES)).encode(Token("other", 1, 1, "1:0:other"))


@pytest.fixture(scope="module")
def base_url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("problems")
    settings = {
        "http": {"body_bytes_max": BODY_BYTES_MAX},
        "wal": {"record_bytes_max": 64 * 1024},
        "read": {"wait": "50ms"},
    }
    with serving(postgres, folder, "problems", **settings) as url:
        yield url


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=30) as client:
        created = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "known"})
        assert created.status_code == 201
        ended = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "ended"})
        assert ended.status_code == 201
        end = client.post("/v1/jobs/ended/events", json={"tenant_id": "acme", "type": "JobCompleted"})
        assert end.status_code == 201
        yield client


@pytest.fixture(scope="module")
def sessions(postgres: EmbeddedPostgres, client: httpx.Client) -> SessionTokens:
    """Makes tokens as the nodes of that ledger do."""

    async def secret() -> bytes:
        async with connected_to(postgres.superuser_url("problems")) as connection:
            return bytes(await connection.fetchval("SELECT secret FROM scheduler.session_secret"))

    return SessionTokens(asyncio.run(secret()))


class Bad(NamedTuple):
    """One request and what it must be answered with."""

    name: str
    status: int
    problem: str
    field: str | None
    method: str
    path: str
    content: bytes | None = None
    headers: dict[str, str] = JSON
    shown: Token | None = None
    """Sent as a session token that the ledger itself made."""


def post(name: str, content: object, field: str | None, **change: Any) -> Bad:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    bad = Bad(name, 422, "invalid-request", field, "POST", "/v1/jobs", raw)
    return bad._replace(**change)


def spec(name: str, text: str, field: str) -> Bad:
    return post(name, f'{{"tenant_id":"acme","spec":{text}}}'.encode(), field)


def event(name: str, fields: dict[str, object], field: str | None, **change: Any) -> Bad:
    return post(name, {"tenant_id": "acme", **fields}, field, path="/v1/jobs/known/events")._replace(**change)


def lines(name: str, content: bytes, field: str | None, **change: Any) -> Bad:
    bad = Bad(name, 422, "invalid-event", field, "POST", "/v1/events", content, NDJSON)
    return bad._replace(**change)


def get(name: str, path: str, field: str | None, **change: Any) -> Bad:
    return Bad(name, 422, "invalid-request", field, "GET", path, None, {})._replace(**change)


DEEP = '{"a":' * 64 + "1" + "}" * 64
BOTTOMLESS = "[" * 20_000

BODIES = [
    post("no body", b"", None),
    post("not JSON", b"{tenant_id: acme}", None),
    post("half of a JSON text", b'{"tenant_id":"acme"', None),
    post("two JSON texts", b'{"tenant_id":"acme"}{"tenant_id":"acme"}', None),
    post("an array", [], None),
    post("a string", "acme", None),
    post("null", None, None),
    post("a byte order mark", b'\xef\xbb\xbf{"tenant_id":"acme"}', None),
    post("bytes that are not UTF-8", b'{"tenant_id":"acme","job_id":"\xff"}', None),
    post("a surrogate as UTF-8", b'{"tenant_id":"acme","spec":{"a":"\xed\xa0\x80"}}', None),
    post("a raw control character", b'{"tenant_id":"acme","spec":{"a":"\x00"}}', None),
    post("no tenant", {}, "tenant_id"),
    post("tenant null", {"tenant_id": None}, "tenant_id"),
    post("tenant a number", {"tenant_id": 7}, "tenant_id"),
    post("tenant empty", {"tenant_id": ""}, "tenant_id"),
    post("tenant in capitals", {"tenant_id": "Acme"}, "tenant_id"),
    post("tenant with a line end", {"tenant_id": "acme\n"}, "tenant_id"),
    post("tenant too long", {"tenant_id": "a" * 64}, "tenant_id"),
    post("the ledger's own tenant", {"tenant_id": "_system"}, "tenant_id"),
    post("a field nobody knows", {"tenant_id": "acme", "priority": 1}, "priority"),
    post("a server's field", {"tenant_id": "acme", "hlc": "1:0:a"}, "hlc"),
    post("job id of one dot", {"tenant_id": "acme", "job_id": "."}, "job_id"),
    post("job id of two dots", {"tenant_id": "acme", "job_id": ".."}, "job_id"),
    post("job id with a slash", {"tenant_id": "acme", "job_id": "a/b"}, "job_id"),
    post("job id too long", {"tenant_id": "acme", "job_id": "a" * 129}, "job_id"),
    post("job id empty", {"tenant_id": "acme", "job_id": ""}, "job_id"),
    post("fence negative", {"tenant_id": "acme", "fence_token": -1}, "fence_token"),
    post("fence beyond 2^53", {"tenant_id": "acme", "fence_token": 2**53}, "fence_token"),
    post("fence a fraction", {"tenant_id": "acme", "fence_token": 1.5}, "fence_token"),
    post("fence a whole float", b'{"tenant_id":"acme","fence_token":1.0}', "fence_token"),
    post("fence in a string", {"tenant_id": "acme", "fence_token": "1"}, "fence_token"),
    post("fence true", {"tenant_id": "acme", "fence_token": True}, "fence_token"),
    post("level unknown", {"tenant_id": "acme", "durability": "PLANETARY"}, "durability"),
    post("level in small letters", {"tenant_id": "acme", "durability": "local"}, "durability"),
    post("level NONE", {"tenant_id": "acme", "durability": "NONE"}, "durability"),
    post("spec a list", {"tenant_id": "acme", "spec": []}, "spec"),
    post("data centres a string", {"tenant_id": "acme", "assigned_dcs": "use1"}, "assigned_dcs"),
    post("a data centre a number", {"tenant_id": "acme", "assigned_dcs": ["use1", 2]}, "assigned_dcs.1"),
    post("a data centre empty", {"tenant_id": "acme", "assigned_dcs": [""]}, "assigned_dcs.0"),
    post("too many data centres", {"tenant_id": "acme", "assigned_dcs": ["d"] * 1025}, "assigned_dcs"),
    post("two thousand unknown fields", {"tenant_id": "acme"} | {f"f{n}": 1 for n in range(2000)}, ""),
    spec("U+0000 in a value", r'{"a":"x\u0000"}', "spec.a"),
    spec("U+0000 in a key", r'{"\u0000":1}', "spec"),
    spec("a lone surrogate", r'{"a":"\ud800"}', ""),
    spec("an integer beyond 2^53", '{"a":{"b":[9007199254740992]}}', "spec.a.b.0"),
    spec("an integer far beyond", '{"a":-99999999999999999999999999}', "spec.a"),
    spec("an integer of 5000 digits", '{"a":' + "7" * 5000 + "}", ""),
    spec("a number outside binary64", '{"a":1e400}', "spec.a"),
    spec("a negative one", '{"a":-1e400}', "spec.a"),
    spec("NaN", '{"a":NaN}', "spec.a"),
    spec("Infinity", '{"a":-Infinity}', "spec.a"),
    spec("nested 65 deep", DEEP, "spec" + ".a" * 63),
    spec("nested beyond any stack", BOTTOMLESS, ""),
    post("trace time a string", {"tenant_id": "acme", "trace_time": "1"}, "trace_time"),
    post("trace time beyond binary64", b'{"tenant_id":"acme","trace_time":1e999}', "trace_time"),
]

EVENTS = [
    event("no type", {}, "type"),
    event("type unknown", {"type": "JobPaused"}, "type"),
    event("type a number", {"type": 3}, "type"),
    event("type of a creation", {"type": "JobCreated"}, "type"),
    event("a system action", {"type": "TENANT_CREATED"}, "type"),
    event("accepted nowhere", {"type": "JobAccepted"}, "dc_id"),
    event("a negative count", {"type": "JobAccepted", "dc_id": "d", "worker_count": -1}, "worker_count"),
    event("a field of another type", {"type": "JobAccepted", "dc_id": "d", "error": "x"}, "error"),
    event("workflow without id", {"type": "WorkflowDispatched", "dc_id": "d"}, "workflow_id"),
    event("a text too long", {"type": "JobFailed", "error": "x" * 65_537}, "error")._replace(
        status=413, problem="payload-too-large", field=None
    ),
    event("a name too long", {"type": "JobFailed", "failed_dc": "x" * 257}, "failed_dc"),
    event("progress time not an HLC", {"type": "JobTimedOut", "last_progress_hlc": "now"}, "last_progress_hlc"),
    event("job id in the body", {"type": "JobCompleted", "job_id": "known"}, "job_id"),
    event("job unknown", {"type": "JobCompleted"}, None, path="/v1/jobs/nobody/events")._replace(
        status=404, problem="job-not-found"
    ),
    event("job of another tenant", {"type": "JobCompleted", "tenant_id": "other"}, None)._replace(
        status=404, problem="job-not-found"
    ),
    event("job ended", {"type": "JobFailed"}, None, path="/v1/jobs/ended/events")._replace(
        status=409, problem="job-ended"
    ),
    event("job id of one dot", {"type": "JobCompleted"}, "job_id", path="/v1/jobs/%2E/events"),
    event("job id of two dots", {"type": "JobCompleted"}, "job_id", path="/v1/jobs/%2E%2E/cancel"),
    event("job id not possible", {"type": "JobCompleted"}, "job_id", path="/v1/jobs/a%20b/events"),
    event("cancel an ended job", {"reason": "late"}, None, path="/v1/jobs/ended/cancel")._replace(
        status=409, problem="job-ended"
    ),
    event("cancel with a type", {"type": "JobFailed"}, "type", path="/v1/jobs/known/cancel"),
]

LINES = [
    lines("no lines", b"", None),
    lines("only empty lines", b"\n\n \r\n", None),
    lines("an empty line in the middle", CREATED + b"\n" + CREATED, None),
    lines("not JSON", CREATED + b"nonsense\n", None),
    lines("an array", b"[]\n", None),
    lines("no type", CREATED + b'{"tenant_id":"acme"}\n', "type"),
    lines("no job", CREATED + b'{"tenant_id":"acme","type":"JobFailed"}\n', "job_id"),
    lines(
        "a level in a line", CREATED + b'{"tenant_id":"acme","type":"JobCreated","durability":"LOCAL"}', "durability"
    ),
    lines("U+0000", CREATED + rb'{"tenant_id":"acme","type":"JobCreated","spec":{"a":"\u0000"}}', "spec.a"),
    lines("beyond 2^53", CREATED + b'{"tenant_id":"acme","type":"JobCreated","spec":{"a":9007199254740993}}', "spec.a"),
    lines("beyond binary64", CREATED + b'{"tenant_id":"acme","type":"JobCreated","spec":{"a":1E0400}}', "spec.a"),
    lines("NaN", CREATED + b'{"tenant_id":"acme","type":"JobCreated","spec":{"a":NaN}}', "spec.a"),
    lines("deep", CREATED + b'{"tenant_id":"acme","type":"JobCreated","spec":' + DEEP.encode() + b"}", None),
    lines("job id of two dots", CREATED + b'{"tenant_id":"acme","type":"JobCreated","job_id":".."}', "job_id"),
    lines("job unknown", CREATED + b'{"tenant_id":"acme","type":"JobFailed","job_id":"nobody"}', None),
    lines("job ended", CREATED + b'{"tenant_id":"acme","type":"JobFailed","job_id":"ended"}', None),
    lines(
        "a line too long", CREATED + b'{"tenant_id":"acme","type":"JobCreated","job_id":"' + b"a" * 70_000 + b'"}', None
    ),
    lines("level unknown", CREATED, "durability", path="/v1/events?durability=SOME", problem="invalid-request"),
]

HEADERS = [
    post("no content type", {"tenant_id": "acme"}, None, status=415, problem="unsupported-media-type", headers={}),
    post("text", {"tenant_id": "acme"}, None, status=415, problem="unsupported-media-type")._replace(
        headers={"content-type": "text/plain"}
    ),
    post("another charset", {"tenant_id": "acme"}, None, status=415, problem="unsupported-media-type")._replace(
        headers={"content-type": "application/json; charset=latin-1"}
    ),
    post("compressed", {"tenant_id": "acme"}, None, status=415, problem="unsupported-media-type")._replace(
        headers=JSON | {"content-encoding": "gzip"}
    ),
    lines("JSON for NDJSON", CREATED, None, status=415, problem="unsupported-media-type", headers=JSON),
    post("an empty key", {"tenant_id": "acme"}, "Idempotency-Key", headers=JSON | {"idempotency-key": ""}),
    post("a key with a space", {"tenant_id": "acme"}, "Idempotency-Key", headers=JSON | {"idempotency-key": "a b"}),
    post("a long key", {"tenant_id": "acme"}, "Idempotency-Key", headers=JSON | {"idempotency-key": "k" * 256}),
    post("a made-up session", {"tenant_id": "acme"}, "Tally-Session", headers=JSON | {"tally-session": "xyz"}),
    post("a session of another ledger", {"tenant_id": "acme"}, "Tally-Session")._replace(
        headers=JSON | {"tally-session": MADE_UP}
    ),
    post("a time far ahead", {"tenant_id": "acme"}, None, status=400, problem="clock-skew")._replace(
        shown=IN_THE_FUTURE
    ),
    post("too long by its header", b" " * (BODY_BYTES_MAX + 1), None, status=413, problem="payload-too-large"),
    lines("too long for lines", b" " * (BODY_BYTES_MAX + 1), None, status=413, problem="payload-too-large"),
]

QUERIES = [
    get("origin of a peer not possible", "/v1/exchange/held?origin=%00", "origin"),
    get("tenant of a peer not possible", "/v1/exchange/held?origin=log.example&after=%00", "after"),
    get("news for no ledger", "/v1/exchange/news", "origin"),
    get("news for a ledger not possible", "/v1/exchange/news?origin=%00", "origin"),
    get("news after a cursor made up", "/v1/exchange/news?origin=log.example&cursor=abc", "cursor"),
    get(
        "news after a tenant not possible",
        "/v1/exchange/news?origin=log.example&cursor=0123456789abcdef:1:%00",
        "cursor",
    ),
    get("news too late", "/v1/exchange/news?origin=log.example&wait_s=21", "wait_s"),
    get("news in no time", "/v1/exchange/news?origin=log.example&wait_s=-1", "wait_s"),
    get("news at no number", "/v1/exchange/news?origin=log.example&at=x%201%20acme", "at"),
    get("news at a tenant not possible", "/v1/exchange/news?origin=log.example&at=1%201%20A%00", "at"),
    get("news at too many places", "/v1/exchange/news?origin=log.example" + 9 * "&at=1%201%20acme", "at"),
    get("news with a log up to no number", "/v1/exchange/news?origin=log.example&have=x%20log", "have"),
    get("lacking of no tenant", "/v1/exchange/lacking?from_seq=1&to_seq=1", "tenant_id"),
    get("lacking to nowhere", "/v1/exchange/lacking?tenant_id=acme&from_seq=1", "to_seq"),
    get("lacking from 0", "/v1/exchange/lacking?tenant_id=acme&from_seq=0&to_seq=1", "from_seq"),
    get("lacking backwards", "/v1/exchange/lacking?tenant_id=acme&from_seq=2&to_seq=1", "from_seq"),
    get("lacking of too many", "/v1/exchange/lacking?tenant_id=acme&from_seq=1&to_seq=1000001", "to_seq"),
    get("have without a log", "/v1/exchange/lacking?tenant_id=acme&from_seq=1&to_seq=1&have=1", "have"),
    get("have up to no number", "/v1/exchange/lacking?tenant_id=acme&from_seq=1&to_seq=1&have=x%20log", "have"),
    get(
        "have of too many logs",
        "/v1/exchange/lacking?tenant_id=acme&from_seq=1&to_seq=1" + 65 * "&have=1%20log",
        "have",
    ),
    get("no tenant", "/v1/jobs", "tenant_id"),
    get("tenant not possible", "/v1/jobs?tenant_id=A%00", "tenant_id"),
    get("tenant not UTF-8", "/v1/jobs?tenant_id=%ff", "tenant_id"),
    get("tenant twice", "/v1/jobs?tenant_id=a&tenant_id=b", "tenant_id"),
    get("parameter unknown", "/v1/jobs?tenant_id=a&offset=1", "offset"),
    get("limit 0", "/v1/jobs?tenant_id=a&limit=0", "limit"),
    get("limit 1001", "/v1/jobs?tenant_id=a&limit=1001", "limit"),
    get("limit with a sign", "/v1/jobs?tenant_id=a&limit=%2B5", "limit"),
    get("limit with a zero", "/v1/jobs?tenant_id=a&limit=05", "limit"),
    get("limit empty", "/v1/jobs?tenant_id=a&limit=", "limit"),
    get("limit of 400 digits", "/v1/jobs?tenant_id=a&limit=" + "1" * 400, "limit"),
    get("status unknown", "/v1/jobs?tenant_id=a&status=DONE", "status"),
    get("cursor made up", "/v1/jobs?tenant_id=a&cursor=abc", "cursor"),
    get("cursor of another list", "/v1/jobs?tenant_id=a&cursor=WyJldmVudHMiLCJhLyIsMSwyLCJuIl0", "cursor"),
    get("cursor with true in it", "/v1/jobs?tenant_id=a&cursor=WyJqb2JzIiwiYS8iLHRydWUsMiwibiJd", "cursor"),
    get(
        "cursor beyond bigint",
        "/v1/jobs?tenant_id=a&cursor=WyJqb2JzIiwiYS8iLDE4NDQ2NzQ0MDczNzA5NTUxNjE1LDIsIm4iXQ",
        "cursor",
    ),
    get("job id not possible", "/v1/jobs/a%20b?tenant_id=acme", "job_id"),
    get("a line end in a path", "/v1/jobs/a%0Ab?tenant_id=acme", None),
    get("a line end behind a path", "/v1/jobs%0a?tenant_id=acme", None),
    get("a line end behind a number", "/v1/snapshots/1%0a", None),
    get("U+0000 in a path", "/v1/jobs/a%00?tenant_id=acme", None),
    get("another control character", "/livez%7f", None),
    get("consistency unknown", "/v1/jobs/known?tenant_id=acme&consistency=eventually", "consistency"),
    get("no bound given", "/v1/jobs/known?tenant_id=acme&consistency=bounded_staleness", "max_staleness_ms"),
    get("bound negative", "/v1/jobs/known?tenant_id=acme&max_staleness_ms=-1", "max_staleness_ms"),
    get("as of no HLC", "/v1/jobs/known?tenant_id=acme&as_of=yesterday", "as_of"),
    get("as of beyond bigint", "/v1/jobs/known?tenant_id=acme&as_of=9999999999999999999:0:a", "as_of"),
    get("job unknown", "/v1/jobs/nobody?tenant_id=acme", None, status=404, problem="job-not-found"),
    get("its events too", "/v1/jobs/nobody/events?tenant_id=acme", None, status=404, problem="job-not-found"),
    get("job before its time", "/v1/jobs/known?tenant_id=acme&as_of=1:0:a", None, status=404, problem="job-not-found"),
    get(
        "a session of nobody", "/v1/jobs/known?tenant_id=acme", None, status=503, problem="session-not-caught-up"
    )._replace(shown=Token("nobody", 1, 1, "1:0:nobody")),
    get("jobs of nobody", "/v1/jobs?tenant_id=nobody", None, status=404, problem="tenant-not-found"),
    get(
        "jobs of nobody ended", "/v1/jobs?tenant_id=nobody&status=FAILED", None, status=404, problem="tenant-not-found"
    ),
    get("verify whom", "/v1/chain/verify", "tenant_id"),
    get("verify twice", "/v1/chain/verify?tenant_id=a&tenantId=a", "tenant_id"),
    get("verify backwards", "/v1/chain/verify?tenant_id=acme&from_seq=3&to_seq=2", "from_seq"),
    get("verify nobody", "/chain/verify?tenantId=nobody", None, status=404, problem="tenant-not-found"),
    get("head of nobody", "/v1/chain/head?tenant_id=nobody", None, status=404, problem="tenant-not-found"),
    get("entries of nobody", "/v1/chain/entries?tenant_id=nobody", None, status=404, problem="tenant-not-found"),
    get("entries from 0", "/v1/chain/entries?tenant_id=acme&from_seq=0", "from_seq"),
    get("proof of 0", "/v1/chain/proof/inclusion?tenant_id=acme&seq=0", "seq"),
    get(
        "proof beyond the tree",
        "/v1/chain/proof/inclusion?tenant_id=acme&seq=4&tree_size=3",
        "seq",
        problem="seq-out-of-range",
    ),
    get(
        "proof in a tree to come",
        "/v1/chain/proof/inclusion?tenant_id=acme&seq=1&tree_size=99",
        "tree_size",
        problem="seq-out-of-range",
    ),
    get(
        "proof backwards",
        "/v1/chain/proof/consistency?tenant_id=acme&first=3&second=2",
        "first",
        problem="seq-out-of-range",
    ),
    get("snapshot unknown", "/v1/snapshots/999999", None, status=404, problem="not-found"),
    get("snapshot not a number", "/v1/snapshots/one", "snapshot_id"),
    get("snapshots of nobody", "/v1/snapshots?tenant_id=nobody", None, status=404, problem="tenant-not-found"),
    get("checkpoint of nobody", "/v1/log/nobody/checkpoint", None, status=404, problem="tenant-not-found"),
    get("a tile that is not one", "/v1/log/acme/tile/0/1", None, status=404, problem="not-found"),
    get("a tile to come", "/v1/log/acme/tile/0/x001/000", None, status=404, problem="not-found"),
    get("a partial tile of width 0", "/v1/log/acme/tile/0/000.p/0", None, status=404, problem="not-found"),
    get("nothing", "/v2/jobs", None, status=404, problem="not-found"),
    get("a slash too many", "/v1/jobs/", None, status=404, problem="not-found"),
]


@pytest.mark.parametrize(
    "bad", BODIES + EVENTS + LINES + HEADERS + QUERIES, ids=lambda bad: f"{bad.path[:30]} {bad.name}"
)
def test_a_bad_request_gets_its_problem_and_stores_nothing(
    client: httpx.Client, sessions: SessionTokens, bad: Bad
) -> None:
    before = written(client)
    headers = bad.headers if bad.shown is None else bad.headers | {"tally-session": sessions.encode(bad.shown)}
    answer = client.request(bad.method, bad.path, content=bad.content, headers=headers)
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, problem["type"].rsplit("/", 1)[-1]) == (bad.status, bad.problem), problem
    assert problem["status"] == bad.status
    assert len(answer.content) < 4096
    assert "Traceback" not in answer.text
    if bad.field is not None:
        assert problem.get("path", "") == bad.field
    if bad.status == 503:
        assert int(answer.headers["retry-after"]) >= 1
    assert written(client) == before


def written(client: httpx.Client) -> int:
    """Last position of the WAL: nothing is stored anywhere without one."""
    return int(client.get("/v1/node").json()["positions"]["written_lsn"])


@pytest.mark.parametrize(
    ("number", "content"), [(1, b"x\n" + CREATED), (3, CREATED * 2 + b"{}\n"), (700, CREATED * 699 + b"{}")]
)
def test_a_bad_line_is_named_by_its_number(client: httpx.Client, number: int, content: bytes) -> None:
    problem = client.post("/v1/events", content=content, headers=NDJSON).json()
    assert problem["line"] == number


def test_a_body_without_length_is_counted_while_it_streams(client: httpx.Client) -> None:
    pieces = (b" " * 4096 for _ in range(BODY_BYTES_MAX // 4096 + 2))
    answer = client.post("/v1/events", content=pieces, headers=NDJSON)
    assert answer.status_code == 413
    assert answer.json()["type"].endswith("/payload-too-large")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/jobs", "GET, HEAD, POST"),
        ("DELETE", "/v1/jobs/known", "GET, HEAD"),
        ("GET", "/v1/events", "POST"),
        ("PATCH", "/v1/snapshots", "GET, HEAD, POST"),
        ("OPTIONS", "/v1/chain/head", "GET, HEAD"),
    ],
)
def test_a_method_that_is_not_allowed_is_told_which_are(
    client: httpx.Client, method: str, path: str, allowed: str
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert f"not allowed here, {allowed} is" in answer.json()["detail"]
    assert answer.json()["type"].endswith("/method-not-allowed")


def test_a_path_that_is_none_is_told_where_the_paths_are(client: httpx.Client) -> None:
    assert client.get("/v2/jobs").json()["detail"] == "/v2/jobs is no path of this API; /docs describes those there are"


def test_the_page_of_problems_lists_exactly_those_there_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "problems.md"
    listed = re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \| ([^|]+) \| [^|]+ \|$", page.read_text(), re.MULTILINE)
    assert sorted(listed) == [(kind.name, str(kind.status), kind.title) for kind in PROBLEMS]


def test_a_key_used_with_another_body_is_refused(client: httpx.Client) -> None:
    headers = {"Idempotency-Key": "reused"}
    first = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "keyed"}, headers=headers)
    again = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "keyed"}, headers=headers)
    other = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "other"}, headers=headers)
    assert first.status_code == 201
    assert "idempotent-replay" not in first.headers
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotent-replay"] == "true"
    assert (other.status_code, other.json()["type"].rsplit("/", 1)[-1]) == (422, "idempotency-key-reused")


@pytest.mark.parametrize("job_id", ["...", ".a", "..a", "a.", "a" * 128, "." + "a" * 127, ".." + "a" * 126])
def test_a_job_id_that_a_url_can_name_is_taken(client: httpx.Client, job_id: str) -> None:
    assert client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": job_id}).status_code == 201
    assert client.get(f"/v1/jobs/{job_id}?tenant_id=acme").json()["job_id"] == job_id
    too_long = {"tenant_id": "acme", "job_id": job_id + "a" * 128}
    assert client.post("/v1/jobs", json=too_long).json()["path"] == "job_id"


def test_a_job_id_of_the_form_that_this_node_makes_is_refused(client: httpx.Client) -> None:
    made = client.post("/v1/jobs", json={"tenant_id": "acme"}).json()["job_id"]
    region, _, gate, _ = made.split("-")
    before = written(client)
    for job_id in (made, f"{region}-1-{gate}-1", f"{region}-99999999999999-{gate}-00000"):
        single = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": job_id})
        line = CREATED + b'{"tenant_id":"acme","type":"JobCreated","job_id":"%b"}' % job_id.encode()
        many = client.post("/v1/events", content=line, headers=NDJSON)
        for answer, problem in ((single, "invalid-request"), (many, "invalid-event")):
            assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (422, problem)
            assert answer.json()["path"] == "job_id"
        assert many.json()["line"] == 2
    assert written(client) == before
    other = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": f"{region}-1-other-1"})
    assert other.status_code == 201


HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "problem"),
    [
        (b"nonsense\r\n\r\n", 400, "malformed-http"),
        (b"GET /v1/jobs HTTP/9.9\r\n\r\n", 400, "malformed-http"),
        (HEAD + b"Content-Length: many\r\n\r\n", 400, "malformed-http"),
        (HEAD + b"a header without end", None, None),
        (HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431, "headers-too-large"),
        (HEAD + b"X: y\r\n" * 20_000 + b"\r\n", 431, "headers-too-large"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "headers-too-large"),
        (HEAD + b"X: " + b"x" * 4_000_000, 431, "headers-too-large"),
    ],
)
def test_what_the_parser_of_http_refuses_gets_a_problem_too(
    base_url: str, sent: bytes, status: int | None, problem: str | None
) -> None:
    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        if status is None:
            connection.sendall(b": y\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 4")
            return
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
    head, body = received.split(b"\r\n\r\n", 1)
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"content-type: application/problem+json" in head.lower()
    assert f"content-length: {len(body)}".encode() in head.lower()
    found = json.loads(body)
    assert (found["status"], found["type"].rsplit("/", 1)[-1]) == (status, problem)


def test_a_head_behind_a_large_body_is_not_too_large(base_url: str) -> None:
    host, port = base_url.removeprefix("http://").split(":")
    size = 200_000
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (size, b" " * size) + b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
        )
        connection.sendall(b"Connection: close\r\n\r\n")
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 422 ")
    assert b"HTTP/1.1 200 OK" in received

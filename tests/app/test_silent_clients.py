"""Clients that connect and say nothing, or begin and do not go on: each wait ends, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import asyncpg
import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.edge.connection.deadlines import PROGRESS_BYTES, Progress, connections_allowed
from ledger.errors import StartRefusedError
from tests.app.chains import followed, until
from tests.app.service_thread import serving
from tests.app.test_bundle_import import trusting
from tests.app.test_raw_requests import Answer, all_of, answers
from tests.conftest import connected_to

DATABASE = "silent_clients"
DEADLINE_S = 60
CONNECTIONS_MAX = 20
POST = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 41\r\n\r\n{"
UPLOAD = (
    b"POST /v1/bundles/import HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    b'Content-Length: 100000\r\n\r\n--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n'
)
NDJSON = {"Content-Type": "application/x-ndjson"}
VERIFY = b"GET /v1/chain/verify?tenant_id=acme HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def base_url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("silent")
    bounds = {"connections_max": CONNECTIONS_MAX, "header_timeout": "4s", "body_timeout": "4s"}
    with serving(postgres, folder, DATABASE, http=bounds, bundle={"trusted_keys": trusting(folder)}) as url:
        known = {"tenant_id": "acme", "job_id": "known"}
        assert httpx.post(f"{url}/v1/jobs", json=known, timeout=DEADLINE_S).status_code == 201
        yield url


@contextmanager
def connected(base_url: str, sent: bytes = b"", receive_buffer_bytes: int | None = None) -> Iterator[socket.socket]:
    host, port = base_url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.settimeout(DEADLINE_S)
    connection.connect((host, int(port)))
    with connection:
        connection.sendall(sent)
        yield connection


def answers_on(connection: socket.socket) -> list[Answer]:
    """What the service answers until it ends the connection."""
    return answers(all_of(connection))


def positions(base_url: str) -> int:
    return int(httpx.get(f"{base_url}/v1/node", timeout=DEADLINE_S).json()["positions"]["written_lsn"])


def test_a_connection_that_says_nothing_is_closed(base_url: str) -> None:
    with connected(base_url) as new, connected(base_url, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n") as kept:
        assert answers_on(new) == []
        assert [answer.status for answer in answers_on(kept)] == [200]


def test_half_a_head_and_half_a_body_are_told_that_they_were_too_slow(base_url: str) -> None:
    before = positions(base_url)
    chunked = POST.replace(b"Content-Length: 41", b"Transfer-Encoding: chunked")
    halves = (b"GET /livez HTTP/1.1\r\nHost: loc", POST, chunked + b"\x0a", POST[:-1], UPLOAD)
    with ExitStack() as stack:
        open_ones = [stack.enter_context(connected(base_url, half)) for half in halves]
        for connection in open_ones:
            (answer,) = answers_on(connection)
            assert answer.status in (408, 400)
            assert answer.headers["connection"] == "close"
            assert answer.problem == ("request-timeout" if answer.status == 408 else "malformed-http")
    assert positions(base_url) == before


def test_who_goes_on_sending_behind_the_answer_is_disconnected(base_url: str) -> None:
    endless = UPLOAD.replace(b"100000", b"%d" % (1 << 50)) + b"x" * 512

    def go_on_sending(connection: socket.socket) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            connection.sendall(bytes(PROGRESS_BYTES))

    with connected(base_url, endless) as connection:
        assert connection.recv(12) == b"HTTP/1.1 422"
        with pytest.raises(ConnectionError):
            go_on_sending(connection)


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/jobs", {}),
        ("/v1/jobs", {"job_id": "named"}),
        ("/v1/jobs", {"key": "k1"}),
        ("/v1/jobs/known/events", {"type": "JobAccepted", "dc_id": "dc1"}),
        ("/v1/jobs/known/events", {"type": "JobAccepted", "dc_id": "dc2", "key": "k2"}),
        ("/v1/jobs/known/cancel", {"reason": "late"}),
        ("/v1/events", {"type": "JobCreated"}),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else None,
)
async def test_who_sends_no_more_behind_a_write_is_answered(
    base_url: str, postgres: EmbeddedPostgres, path: str, given: dict[str, str]
) -> None:
    async with connected_to(postgres.superuser_url(DATABASE)) as database:
        with connected(base_url) as connection:
            async with database.transaction():
                await database.execute("LOCK TABLE scheduler.scheduler_log IN EXCLUSIVE MODE")
                connection.sendall(write(path, given))
                await until(lambda: chaining_waits(database), "the write is taken, and not chained", DEADLINE_S)
                connection.shutdown(socket.SHUT_WR)
            (answer,) = await asyncio.to_thread(answers_on, connection)
    assert answer.status == (200 if path == "/v1/events" else 201)
    assert answer.headers["connection"] == "close"


async def test_who_sends_no_more_behind_a_write_at_local_is_answered(base_url: str) -> None:
    for key in ({}, {"key": "k3"}):
        with connected(base_url, write("/v1/jobs", {"durability": "LOCAL", **key})) as connection:
            connection.shutdown(socket.SHUT_WR)
            (answer,) = await asyncio.to_thread(answers_on, connection)
        assert answer.status == 201
    with connected(base_url, write("/v1/jobs", {})) as connection:  # once this is chained, they are too
        assert connection.recv(65536).startswith(b"HTTP/1.1 201 ")


def write(path: str, given: dict[str, str]) -> bytes:
    """A request that writes, by default at GLOBAL; its key is in the head."""
    key = f"Idempotency-Key: {given['key']}\r\n" if "key" in given else ""
    fields = {name: value for name, value in given.items() if name != "key"}
    body = json.dumps({"tenant_id": "acme", "durability": "GLOBAL", **fields})
    form = "application/x-ndjson" if path == "/v1/events" else "application/json"
    if path == "/v1/events":
        body, path = json.dumps({"tenant_id": "acme", **fields}), f"{path}?durability=GLOBAL"
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Type: {form}\r\nContent-Length: {len(body)}\r\n\r\n"
        f"{body}"
    ).encode()


async def chaining_waits(connection: asyncpg.Connection) -> bool:
    """Whether the service waits to insert into a table that is locked."""
    statement = """SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database
        WHERE d.datname = current_database() AND NOT l.granted AND l.mode = 'RowExclusiveLock')"""
    waits: bool = await connection.fetchval(statement)
    return waits


def test_uploads_that_stall_give_their_room_back(base_url: str) -> None:
    with ExitStack() as stack:
        stalled = [stack.enter_context(connected(base_url, UPLOAD)) for _ in range(4)]
        answer = httpx.post(f"{base_url}/v1/bundles/import", files={"f": bytes(600)}, timeout=DEADLINE_S)
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (422, "bundle-invalid")
        assert [answer.status for connection in stalled for answer in answers_on(connection)] == [408] * 4


def test_bodies_that_never_end_take_bounded_memory_and_small_ones_pass(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    head = b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    body_bytes = 1 << 20
    most = head + b"Content-Length: %d\r\n\r\n" % body_bytes + b" " * (body_bytes - 1)
    with serving(postgres, tmp_path, "endless_bodies", http={"body_bytes_max": body_bytes}) as url:
        with ExitStack() as stack:
            open_ones = [stack.enter_context(connected(url, most)) for _ in range(18)]
            refused = select.poll()
            for connection in open_ones:
                refused.register(connection, select.POLLIN)
            descriptor, _ = refused.poll(DEADLINE_S * 1000)[0]
            (answer,) = [each.recv(65536) for each in open_ones if each.fileno() == descriptor]
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"/not-ready" in answer
            assert httpx.post(f"{url}/v1/jobs", json={"tenant_id": "acme"}, timeout=DEADLINE_S).status_code == 201
        large = b" " * (body_bytes - 1)
        deadline_s, status = time.monotonic() + DEADLINE_S, 503
        while status == 503 and time.monotonic() < deadline_s:
            status = httpx.post(f"{url}/v1/events", content=large, headers=NDJSON, timeout=DEADLINE_S).status_code
        assert status == 422


def test_who_does_not_read_the_answers_is_cut_off(base_url: str) -> None:
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200
    with connected(base_url, asked, receive_buffer_bytes=4096) as connection:
        ended = select.poll()
        ended.register(connection, select.POLLERR | select.POLLHUP)
        assert ended.poll(DEADLINE_S * 1000), "the connection is still there"
    assert httpx.get(f"{base_url}/livez", timeout=DEADLINE_S).status_code == 200


def closed_by_service(connections: Iterable[socket.socket]) -> list[tuple[int, int]]:
    """Those that the service has closed by now."""
    closed = select.poll()
    for connection in connections:
        closed.register(connection, select.POLLRDHUP)
    return closed.poll(0)


def test_with_one_connection_too_many_the_oldest_silent_one_goes(base_url: str) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(base_url)) for _ in range(CONNECTIONS_MAX * 3)]
        asked = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with connected(base_url, asked) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            ended = {number for number, _ in closed_by_service(silent)}
        assert {one.fileno() for one in silent[: CONNECTIONS_MAX * 2 + 1]} <= ended


def test_while_every_connection_is_busy_a_new_one_is_refused_at_once(base_url: str) -> None:
    with ExitStack() as stack:
        asked = POST.replace(b"\r\n\r\n{", b"\r\nExpect: 100-continue\r\n\r\n")
        busy = [stack.enter_context(connected(base_url, asked)) for _ in range(CONNECTIONS_MAX)]
        for connection in busy:
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        (refused,) = answers_on(stack.enter_context(connected(base_url)))
        assert (refused.status, refused.problem) == (503, "not-ready")
        assert int(refused.headers["retry-after"]) >= 1
        assert "http.connections_max" in json.loads(refused.body)["detail"]
        assert {answer.status for connection in busy for answer in answers_on(connection)} == {408}
    assert httpx.get(f"{base_url}/livez", timeout=DEADLINE_S).status_code == 200


@pytest.mark.parametrize("asked", [VERIFY, VERIFY * 2], ids=["alone", "another behind it"])
async def test_a_verification_that_nobody_waits_for_stops(
    base_url: str, postgres: EmbeddedPostgres, asked: bytes
) -> None:
    async with (
        connected_to(postgres.superuser_url(DATABASE)) as connection,
        asyncio.timeout(DEADLINE_S),
        connection.transaction(),
    ):
        # Else who keeps that table waits for it, too.
        await until(lambda: followed(connection), "the job table is at the chain's end")
        await connection.execute("LOCK TABLE scheduler.jobs IN ACCESS EXCLUSIVE MODE")
        for _ in range(3):  # one more than may run at once
            with connected(base_url, asked):
                await _until_waiting(connection, 1)
            await _until_waiting(connection, 0)
    assert httpx.get(f"{base_url}/v1/chain/verify?tenant_id=acme", timeout=DEADLINE_S).json()["valid"] is True


async def test_an_export_that_nobody_waits_for_stops_before_its_first_byte(
    base_url: str, postgres: EmbeddedPostgres
) -> None:
    async with (
        connected_to(postgres.superuser_url(DATABASE)) as connection,
        asyncio.timeout(DEADLINE_S),
        connection.transaction(),
    ):
        await connection.execute("LOCK TABLE scheduler.checkpoint_cosignature IN ACCESS EXCLUSIVE MODE")
        for _ in range(3):  # one more than may run at once
            with connected(base_url, export_of("acme")):
                await _until_waiting(connection, 1)
            await _until_waiting(connection, 0)
    assert exported_bytes(base_url, "acme") > 0


async def test_an_export_whose_reader_goes_away_in_the_middle_stops_and_gives_its_room_back(
    base_url: str, postgres: EmbeddedPostgres
) -> None:
    line = '{"type": "JobCreated", "tenant_id": "large", "spec": {"n": "%s"}}\n'
    for _ in range(3):
        events = "".join(line % b64encode(os.urandom(30_000)).decode() for _ in range(190))
        form = {"Content-Type": "application/x-ndjson"}
        sent = httpx.post(f"{base_url}/v1/events", content=events, headers=form, timeout=DEADLINE_S)
        assert sent.is_success, sent.text
    whole = exported_bytes(base_url, "large")
    assert whole > 16_000_000, "more than the sockets hold"
    async with connected_to(postgres.superuser_url(DATABASE)) as connection:
        await until(lambda: followed(connection), "no follower has a transaction of its own", DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):  # one more than may run at once
                with connected(base_url, export_of("large"), receive_buffer_bytes=4096) as reader:
                    assert reader.recv(12) == b"HTTP/1.1 200"
                    export = await _stalled(connection)
                while await connection.fetchval(f"SELECT count(*) {IN_TRANSACTION} AND pid = $1", export):
                    await asyncio.sleep(0.02)
    assert exported_bytes(base_url, "large") >= whole


IN_TRANSACTION = "FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"


async def _stalled(connection: asyncpg.Connection) -> int:
    """The backend of an export that waits, in its transaction, for its reader."""
    while True:
        pid: int | None = await connection.fetchval(
            f"SELECT pid {IN_TRANSACTION} AND state_change < clock_timestamp() - interval '0.3 s'"
        )
        if pid is not None:
            return pid
        await asyncio.sleep(0.02)


def export_of(tenant_id: str) -> bytes:
    """A request for a bundle."""
    body = json.dumps({"tenant_id": tenant_id}).encode()
    head = f"POST /v1/bundles/export HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def exported_bytes(base_url: str, tenant_id: str) -> int:
    """Length of a bundle that is exported whole."""
    answer = httpx.post(f"{base_url}/v1/bundles/export", json={"tenant_id": tenant_id}, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return len(answer.content)


async def _until_waiting(connection: asyncpg.Connection, count: int) -> None:
    """Wait until so many reads of the service wait for the table."""
    # Who keeps the table may come to it meanwhile, and asks for more than to read.
    statement = """SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
        WHERE d.datname = current_database() AND NOT l.granted AND l.mode = 'AccessShareLock'"""
    while await connection.fetchval(statement) != count:
        await asyncio.sleep(0.02)


def test_progress_is_bytes_by_the_time_and_a_stage_left_begins_anew() -> None:
    progress = Progress()
    assert progress.stalled_s("reading", 10, 100.0) == 0
    assert progress.stalled_s("reading", 9 + PROGRESS_BYTES, 120.0) == 20
    assert progress.stalled_s("reading", 10 + PROGRESS_BYTES, 130.0) == 0
    assert progress.stalled_s("reading", 10 + PROGRESS_BYTES, 155.0) == 25
    assert progress.stalled_s("", 0, 156.0) == 0
    assert progress.stalled_s("reading", 10 + PROGRESS_BYTES, 157.0) == 0


def test_connections_leave_descriptors_for_the_rest() -> None:
    assert connections_allowed(1000, 1_000_000) == 1000
    assert connections_allowed(1000, 1024) == 1024 - 128
    assert connections_allowed(1, 129) == 1
    with pytest.raises(StartRefusedError, match=r"may open 130 files.*\(ulimit -n\) to 1128"):
        connections_allowed(1000, 130)

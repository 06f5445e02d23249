"""A client that costs little beside the service it measures: keep-alive connections, one request at a time each.

It reads what uvicorn and etcd answer and no more of HTTP: a status line, ``content-length`` or chunks, a body, which
keeps the sizes of its chunks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from benchmarks.row import BenchmarkError

CONTENT_TYPES = {"json": "application/json", "ndjson": "application/x-ndjson"}
_STATUS = slice(9, 12)
_LENGTH = b"content-length: "
_CHUNKED = b"transfer-encoding: chunked\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Target(NamedTuple):
    """Where a service listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Target:
        """The target of a base URL."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(parts.hostname, parts.port)


class Answer(NamedTuple):
    """What came back; ``answer_bytes`` counts headers and body."""

    status: int
    body: bytes
    answer_bytes: int


class Connection(asyncio.Protocol):
    """One connection. ``on_answer(connection, answer)`` is called for each; it may send the next request."""

    def __init__(self, on_answer: Callable[[Connection, Answer], None], on_lost: Callable[[], None]) -> None:
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._received = b""
        self._body_at = self._end = 0
        self._transport: asyncio.Transport | None = None
        self.sent_at = 0.0
        """Free for the caller: when it sent the request that is under way."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is up."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        """Send one request; the one before it MUST have been answered."""
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Part of an answer."""
        received = self._received = self._received + data if self._received else data
        if not self._end:
            head_end = received.find(b"\r\n\r\n")
            if head_end < 0:
                return
            head = received[: head_end + 2].lower()
            if _CHUNKED in head:
                if not received.endswith(_LAST_CHUNK):
                    return
                self._body_at, self._end = head_end + 4, len(received)
            else:
                at = head.index(_LENGTH) + len(_LENGTH)
                self._body_at = head_end + 4
                self._end = self._body_at + int(head[at : head.index(b"\r", at)])
        if len(received) < self._end:
            return
        answer = Answer(int(received[_STATUS]), received[self._body_at : self._end], self._end)
        self._received, self._end = received[self._end :], 0
        self._on_answer(self, answer)

    def connection_lost(self, error: Exception | None) -> None:
        """The other side is gone, or ``close`` was called."""
        self._on_lost()

    def close(self) -> None:
        """Hang up."""
        self._on_lost = lambda: None
        if self._transport is not None:
            self._transport.close()


class Client:
    """One connection for awaiting answers one after the other."""

    def __init__(self, connection: Connection, token: str | None) -> None:
        self._connection = connection
        self._token = token
        self._waiting: asyncio.Future[Answer] | None = None

    @classmethod
    async def connect(cls, target: Target, token: str | None = None) -> Client:
        """A connected client, which shows ``token`` where ``get`` asks."""
        loop = asyncio.get_running_loop()
        client: Client | None = None

        def answered(_: Connection, answer: Answer) -> None:
            if client is not None and client._waiting is not None and not client._waiting.done():
                client._waiting.set_result(answer)

        def lost() -> None:
            if client is not None and client._waiting is not None and not client._waiting.done():
                client._waiting.set_exception(BenchmarkError("the service hung up"))

        _, connection = await loop.create_connection(lambda: Connection(answered, lost), *target)
        client = cls(connection, token)
        return client

    async def answered(self, request: bytes) -> Answer:
        """What one request is answered with, whatever that is.

        Raises:
            BenchmarkError: the service hung up.
        """
        self._waiting = asyncio.get_running_loop().create_future()
        self._connection.send(request)
        return await self._waiting

    async def ask(self, request: bytes, expected_status: int = 200) -> Answer:
        """The answer to one request.

        Raises:
            BenchmarkError: another status, or the service hung up.
        """
        answer = await self.answered(request)
        if answer.status != expected_status:
            raise BenchmarkError(f"answered {answer.status}, not {expected_status}: {answer.body[:500].decode()}")
        return answer

    async def get(self, path: str) -> Any:
        """The JSON value at ``path``."""
        return json.loads((await self.ask(get(path, self._token))).body)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def get(path: str, token: str | None = None) -> bytes:
    """A GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{_bearer(token)}\r\n".encode()


def post(path: str, body: bytes, kind: str = "json", token: str | None = None, key: str | None = None) -> bytes:
    """A POST request with ``body``, and an Idempotency-Key where one is given."""
    return _with_body("POST", path, body, kind, token, key)


def with_header(request: bytes, name: str, value: str) -> bytes:
    """A request with one more header."""
    head, separator, body = request.partition(b"\r\n\r\n")
    return b"%b\r\n%b: %b%b%b" % (head, name.encode(), value.encode(), separator, body)


def put(path: str, body: bytes) -> bytes:
    """A PUT request with ``body``, which is JSON."""
    return _with_body("PUT", path, body, "json", None, None)


def _with_body(method: str, path: str, body: bytes, kind: str, token: str | None, key: str | None) -> bytes:
    keyed = "" if key is None else f"Idempotency-Key: {key}\r\n"
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {CONTENT_TYPES[kind]}\r\n"
        f"Content-Length: {len(body)}\r\n{keyed}{_bearer(token)}\r\n"
    )
    return head.encode() + body


def _bearer(token: str | None) -> str:
    return "" if token is None else f"Authorization: Bearer {token}\r\n"

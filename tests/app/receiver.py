"""A receiver of webhooks: a small HTTP server that keeps what it was sent, and refuses, stalls or drips as it is told.

Signatures are checked here as the specification of Standard Webhooks has them, with nothing of the product.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

ENDLESS = -1
"""Answer 200, and a body without end."""
STALLED = -2
"""Answer nothing."""


class Received(NamedTuple):
    """One request, with the status that it was answered with."""

    headers: dict[str, str]
    body: bytes
    status: int

    @property
    def message_id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def seqs(self) -> list[int]:
        return [entry["seq"] for entry in self.said["entries"]]


def is_signed(request: Received, secret: str) -> bool:
    """Whether the request is what the holder of ``secret`` signed within the last five minutes."""
    at = request.headers["webhook-timestamp"]
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{request.headers['webhook-id']}.{at}.".encode() + request.body
    expected = "v1," + base64.b64encode(hmac.new(key, signed, "sha256").digest()).decode()
    is_ours = hmac.compare_digest(expected, request.headers["webhook-signature"])
    return is_ours and abs(time.time() - int(at)) < 300


class Receiver:
    """``judge`` says the status of the answer to a request; 200 when there is none."""

    def __init__(self) -> None:
        self.port = 0
        self.certified: ssl.SSLContext | None = None
        """What it speaks TLS with."""
        self.host = "127.0.0.1"
        self.requests: list[Received] = []
        self.judge: Callable[[Received], int] = lambda _: 200
        self.more: dict[str, str] = {}
        """Headers of answers."""
        self.held: asyncio.Event | None = None
        """What answers wait for."""
        self.stalled = 0
        self.asked: set[str] = set()
        """First lines of requests."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{'http' if self.certified is None else 'https'}://{self.host}:{self.port}/hook?from=tally"

    @property
    def taken(self) -> list[int]:
        """The seqs of all entries that were answered with 2xx, in the order in which they came."""
        return [
            seq for each in self.requests if 200 <= each.status < 300 or each.status == ENDLESS for seq in each.seqs
        ]

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.certified)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Be away."""
        if self._server is not None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *lines = head.decode().rstrip().split("\r\n")
                self.asked.add(line)
                headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                await self._answer(headers, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        status = self.judge(Received(headers, body, 0))
        self.requests.append(Received(headers, body, status))
        if self.held is not None:
            await self.held.wait()
        if status == STALLED:
            self.stalled += 1
            await asyncio.Event().wait()
        elif status == ENDLESS:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                await writer.drain()
        more = "".join(f"{name}: {value}\r\n" for name, value in self.more.items())
        writer.write(f"HTTP/1.1 {status} Said\r\n{more}Content-Length: 2\r\n\r\nok".encode())
        await writer.drain()


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """A receiver that listens."""
    receiver = Receiver()
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.stop()

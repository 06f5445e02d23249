"""A receiver of syslog over TLS: it keeps what it was sent, and resets or stalls connections as it is told.

Messages are parsed here as RFC 5424 (6) and RFC 5425 (4.3) have them, with nothing of the product.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from enum import Enum
from typing import NamedTuple

from tests.app.certificates import Authority

_FRAME = re.compile(rb"([1-9][0-9]*) ")
_PARAMETER = r'[!#-<>-\\^-~]{1,32}="(?:[^"\\\]]|\\["\\\]])*"'
_MESSAGE = re.compile(
    r"<(?P<priority>[0-9]|[1-9][0-9]|1[0-8][0-9]|19[01])>1 "
    r"(?P<at>-|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?(?:Z|[+-][0-9]{2}:[0-9]{2})) "
    r"(?P<host>[!-~]{1,255}) (?P<app>[!-~]{1,48}) (?P<process>[!-~]{1,128}) (?P<message_id>[!-~]{1,32}) "
    rf"\[(?P<element>[!#-<>-\\^-~]{{1,32}})(?P<data>(?: {_PARAMETER})*)\] (?P<text>.*)",
    re.DOTALL,
)


class Logged(NamedTuple):
    """One message."""

    facility: int
    severity: int
    at: datetime
    host: str
    app: str
    message_id: str
    element: str
    data: dict[str, str]
    text: str

    @classmethod
    def of(cls, message: str) -> Logged:
        found = _MESSAGE.fullmatch(message)
        assert found is not None, message
        pairs = re.findall(r' ([^=]+)="((?:[^"\\\]]|\\["\\\]])*)"', found["data"])
        data = {name: re.sub(r'\\(["\\\]])', r"\1", value) for name, value in pairs}
        facility, severity = divmod(int(found["priority"]), 8)
        at = datetime.fromisoformat(found["at"])
        return cls(
            facility,
            severity,
            at,
            found["host"],
            found["app"],
            found["message_id"],
            found["element"],
            data,
            found["text"],
        )


def parsed(stream: bytes) -> list[Logged]:
    """The messages of a stream, which ends with a whole one."""
    found = []
    while stream:
        frame = _FRAME.match(stream)
        assert frame is not None, stream[:40]
        end = frame.end() + int(frame[1])
        assert end <= len(stream)
        found.append(Logged.of(stream[frame.end() : end].decode()))
        stream = stream[end:]
    return found


class Does(Enum):
    """What the receiver does with a connection."""

    READ = "read it to its end, and end it"
    RESET = "reset it unread"
    STALL = "keep it open unread"


class SyslogReceiver:
    """``judge`` decides on each connection."""

    def __init__(self, authority: Authority) -> None:
        pair = authority.issue("syslog")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(pair.cert, pair.key)
        self.port = 0
        self.judge: Callable[[], Does] = lambda: Does.READ
        self.messages: list[Logged] = []
        """Of connections that were read and ended."""
        self.reset = self.stalled = 0
        """Connections."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"syslog+tls://localhost:{self.port}"

    @property
    def taken(self) -> list[int]:
        """The seqs of all messages, in the order in which they came."""
        return [int(message.data["seq"]) for message in self.messages]

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Be away."""
        if self._server is not None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            does = self.judge()
            if does is Does.RESET:
                self.reset += 1
                writer.transport.abort()  # type: ignore[attr-defined]
                return
            if does is Does.STALL:
                self.stalled += 1
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.Event().wait()
            self.messages += parsed(await reader.read())
        finally:
            self._tasks.discard(task)
            writer.close()


@asynccontextmanager
async def receiving_syslog(authority: Authority) -> AsyncIterator[SyslogReceiver]:
    """A receiver that listens."""
    receiver = SyslogReceiver(authority)
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.stop()

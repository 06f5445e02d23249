"""A TCP proxy in front of PostgreSQL that loses what networks lose.

It reads the client's messages one by one, so it can act at the COMMIT of a chaining transaction. Of a chaining
statement that is a transaction by itself that is the Sync behind it::

    BEFORE_COMMIT    the COMMIT never arrives; the connection breaks
    AFTER_COMMIT     the COMMIT arrives and is carried out; the connection breaks before its answer
    AT_COMMIT        the COMMIT is sent and the connection breaks at once, the answer unknown even to us
    LATE             a chaining statement that is a transaction by itself arrives when its connection is long broken,
                     before the next that chains, and is carried out

Beside that it stalls (nothing moves, no connection breaks), cuts all connections, and refuses new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from urllib.parse import urlsplit

_UNTYPED_CODES = (80877103, 80877104)
"""SSLRequest and GSSENCRequest: what may come before the startup message, without a type byte like it."""
_CHAINING = b"WITH fence AS MATERIALIZED ("
_READY = b"Z\0\0\0\5"
_COMMIT = re.compile(rb"Q....COMMIT;?\0", re.DOTALL)
_BEGIN = re.compile(rb"Q....BEGIN.*\0", re.DOTALL)
_ROLLBACK = re.compile(rb"Q....ROLLBACK;?\0", re.DOTALL)


class Trap(Enum):
    """Where the next chaining transaction loses its connection."""

    BEFORE_COMMIT = "before COMMIT"
    AFTER_COMMIT = "after COMMIT"
    AT_COMMIT = "at COMMIT"
    LATE = "late"


class _Link:
    """One proxied connection."""

    def __init__(
        self, client: asyncio.StreamWriter, server: asyncio.StreamWriter, from_server: asyncio.StreamReader
    ) -> None:
        self.client = client
        self.server = server
        self.from_server = from_server
        self.swallows_answers = False
        self._statements: set[bytes] = set()
        """Names of prepared statements that chain."""
        self._is_in_transaction = False
        self._chains = False
        """Whether the transaction has run one of them."""
        self.runs_alone = False
        """Whether one of them runs that is a transaction by itself."""
        self.held = b""
        """What is to arrive late."""

    def commits(self, message: bytes) -> bool:
        """Whether this is what commits a chaining transaction."""
        kind, said = message[:1], message[5:].split(b"\0", 2)
        if kind == b"P" and _CHAINING in message:
            self._statements.add(said[0])
        elif kind == b"B" and said[1] in self._statements:
            self._chains, self.runs_alone = self._is_in_transaction, not self._is_in_transaction
        elif kind == b"S" and self.runs_alone:
            self.runs_alone = False
            return True
        elif _BEGIN.fullmatch(message):
            self._is_in_transaction = True
        elif (is_commit := _COMMIT.fullmatch(message) is not None) or _ROLLBACK.fullmatch(message):
            is_commit, self._is_in_transaction, self._chains = is_commit and self._chains, False, False
            return is_commit
        return False

    async def arrive(self) -> None:
        """Carry out what is held."""
        self.server.write(self.held)
        said = b""
        while said[-len(_READY) - 1 : -1] != _READY:
            said += await self.from_server.read(65536)
        self.server.transport.abort()

    def cut(self) -> None:
        """Break it on both sides at once."""
        self.client.transport.abort()
        self.server.transport.abort()


class PostgresProxy:
    """Listens on a port of its own and forwards to ``upstream_url``. ``sprung`` counts the traps that closed."""

    def __init__(self, upstream_url: str) -> None:
        parts = urlsplit(upstream_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream = (parts.hostname, parts.port)
        self._upstream_url = parts
        self._place = socket.socket()
        """Keeps the port for us while nobody listens on it."""
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self._port: int = self._place.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._cuts = 0
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._moving = asyncio.Event()
        self._moving.set()
        self._traps: list[Trap] = []
        self._late: _Link | None = None
        self._cut_before: bytes | None = None
        self.sprung = 0

    @property
    def url(self) -> str:
        """The upstream's URL, by way of here."""
        login = f"{self._upstream_url.username}:{self._upstream_url.password}"
        return self._upstream_url._replace(netloc=f"{login}@127.0.0.1:{self._port}").geturl()

    async def accept(self) -> None:
        """Take connections, always on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def refuse(self) -> None:
        """Break all connections and take no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Break all connections."""
        self._cuts += 1
        for link in self._links:
            link.cut()

    def stall(self) -> None:
        """Move nothing any more, in either direction; connections stay."""
        self._moving.clear()

    def resume(self) -> None:
        """Move again."""
        self._moving.set()

    def set_traps(self, *traps: Trap) -> None:
        """Break the next chaining transactions at their COMMIT, one after the other."""
        self._traps = list(traps)

    def cut_before(self, text: str) -> None:
        """Break the next connection that sends ``text``, before it arrives."""
        self._cut_before = text.encode()

    async def close(self) -> None:
        """End everything."""
        await self.refuse()
        self.resume()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._place.close()

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        cuts = self._cuts
        try:
            from_server, to_server = await asyncio.open_connection(*self._upstream)
        except OSError:
            to_client.transport.abort()
            return
        link = _Link(to_client, to_server, from_server)
        if self._server is None or cuts != self._cuts:
            # It began before the cut.
            link.cut()
            return
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward_requests(link, from_client))
                group.create_task(self._forward_answers(link, from_server))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if link is self._late:
                to_client.transport.abort()
            else:
                link.cut()
            self._links.discard(link)

    async def _forward_requests(self, link: _Link, client: asyncio.StreamReader) -> None:
        untyped = True
        while True:
            kind = b"" if untyped else await client.readexactly(1)
            length = await client.readexactly(4)
            message = kind + length + await client.readexactly(int.from_bytes(length, "big") - 4)
            untyped = untyped and int.from_bytes(message[4:8], "big") in _UNTYPED_CODES
            await self._moving.wait()
            is_commit = link.commits(message)
            is_late = self._traps[:1] == [Trap.LATE]
            if is_late and (link.runs_alone or link.held):
                link.held += message
                if not is_commit:
                    continue
                self._traps.pop(0)
                self.sprung += 1
                self._late = link
                raise ConnectionAbortedError
            if self._late is not None and _CHAINING in message:
                late, self._late = self._late, None
                await late.arrive()
            trap = self._traps.pop(0) if is_commit and self._traps and not is_late else None
            if trap is not None:
                self.sprung += 1
            if self._cut_before is not None and self._cut_before in message:
                self._cut_before = None
                self.sprung += 1
                raise ConnectionAbortedError
            if trap is Trap.BEFORE_COMMIT:
                raise ConnectionAbortedError
            link.swallows_answers = trap is Trap.AFTER_COMMIT
            link.server.write(message)
            await link.server.drain()
            if trap is Trap.AT_COMMIT:
                raise ConnectionAbortedError

    async def _forward_answers(self, link: _Link, server: asyncio.StreamReader) -> None:
        while data := await server.read(65536):
            await self._moving.wait()
            if link.swallows_answers:
                raise ConnectionAbortedError
            link.client.write(data)
            await link.client.drain()
        raise ConnectionAbortedError


@asynccontextmanager
async def proxy_to(upstream_url: str) -> AsyncIterator[PostgresProxy]:
    """A proxy that accepts, closed on leaving."""
    proxy = PostgresProxy(upstream_url)
    await proxy.accept()
    try:
        yield proxy
    finally:
        with contextlib.suppress(OSError):
            await proxy.close()

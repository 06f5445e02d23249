"""A network between a client and a service that can be cut: connections break, and no new ones are taken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Network:
    """Listens on a port of its own, which stays the same whatever it leads to."""

    def __init__(self) -> None:
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self._port: int = self._place.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._service: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Address of the service, by way of here."""
        return f"http://127.0.0.1:{self._port}"

    async def lead_to(self, service: str) -> None:
        """Take connections from now on, for the service at this URL."""
        await self.cut()
        self._service = service
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def cut(self) -> None:
        """Break all connections and take no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """End everything."""
        await self.cut()
        self._place.close()

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there = urlsplit(self._service or "")
        writers = [to_client]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            from_service, to_service = await asyncio.open_connection(str(there.hostname), there.port)
            writers.append(to_service)
            moving = [_move(from_client, to_service), _move(from_service, to_client)]
            await asyncio.wait([asyncio.ensure_future(each) for each in moving], return_when=asyncio.FIRST_COMPLETED)
        for writer in writers:
            writer.transport.abort()


async def _move(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()


@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    """A network that leads nowhere yet."""
    between = Network()
    try:
        yield between
    finally:
        await between.close()

"""A client of ``GET /v1/watch`` that reads server-sent events as the HTML standard has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import orjson

from tests.app.chains import until

PATIENCE_S = 60.0


class Event(NamedTuple):
    """One event that has data."""

    id: str
    """The last id that was said by then."""
    name: str
    data: Any


class EventStream:
    """An open stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.last_id = ""
        self.retry_ms: int | None = None
        self.comments = 0
        self._events = self._parsed()
        self._next: asyncio.Future[Event] | None = None
        """The next event, where it is being waited for already."""

    async def take(self, count: int) -> list[Event]:
        """The next ``count`` events."""
        async with asyncio.timeout(PATIENCE_S):
            return [await self._taken() for _ in range(count)]

    async def rest(self) -> list[Event]:
        """All events up to the end of the stream."""
        async with asyncio.timeout(PATIENCE_S):
            return [event async for event in self._events]

    async def until_comment(self) -> None:
        """Read until the next comment; no event may come before."""
        seen = self.comments
        self._next = self._next or asyncio.ensure_future(anext(self._events))
        await until(lambda: self.comments > seen, "a comment")
        assert not self._next.done()

    async def _taken(self) -> Event:
        waited_for, self._next = self._next, None
        return await (waited_for or anext(self._events))

    async def _parsed(self) -> AsyncIterator[Event]:
        name, data = "", []
        async for line in self.response.aiter_lines():
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if data:
                    yield Event(self.last_id, name or "message", orjson.loads("\n".join(data)))
                name, data = "", []
            elif not field:
                self.comments += 1
            elif field == "id":
                self.last_id = value
            elif field == "event":
                name = value
            elif field == "data":
                data.append(value)
            elif field == "retry":
                self.retry_ms = int(value)


@asynccontextmanager
async def watching(
    client: httpx.AsyncClient, tenant_id: str = "acme", *, last_id: str | None = None, **params: object
) -> AsyncIterator[EventStream]:
    """A stream of the tenant's chain that was begun."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    query = {"tenant_id": tenant_id, **params}
    async with client.stream("GET", "/v1/watch", params=query, headers=headers, timeout=PATIENCE_S) as response:  # type: ignore[arg-type]
        if response.status_code != 200:
            await response.aread()
            raise AssertionError(response.text)
        yield EventStream(response)

"""An HTTP proxy in front of a ledger that others exchange with: it answers some requests itself, wrongly, and changes
some answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import httpx

Judged = tuple[int, bytes] | AsyncIterator[bytes] | None


class Asked(NamedTuple):
    """One request: its path, its parameters or JSON, and its headers with names in small letters."""

    path: str
    values: dict[str, Any]
    headers: dict[str, str]

    @property
    def is_export(self) -> bool:
        return self.path == "/v1/bundles/export"


def unchanged(asked: Asked, answer: dict[str, Any]) -> None:
    """The edit of a proxy that changes no answer."""


class PeerProxy:
    """``judge`` says status and body of an answer, perhaps later, or all its bytes as they are sent; None has the
    ledger at ``target`` answer. ``edit`` changes its news; whenever it is set, all tenants are listed again. Unless
    ``has_offers`` is set, news come without the entries that are lacking, so that these are asked for."""

    def __init__(self, target: str, client: httpx.AsyncClient) -> None:
        self.target = target
        self._client = client
        self.asked: list[Asked] = []
        self._times: Counter[str] = Counter()
        """By path, how often it was asked for."""
        self.judge: Callable[[Asked], Judged | Awaitable[Judged]] = lambda _: None
        self._edit: Callable[[Asked, dict[str, Any]], None] = unchanged
        self._has_list_begun = True
        self.has_offers = False
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def edit(self) -> Callable[[Asked, dict[str, Any]], None]:
        return self._edit

    @edit.setter
    def edit(self, edit: Callable[[Asked, dict[str, Any]], None]) -> None:
        self._edit, self._has_list_begun = edit, False

    def times_asked(self, path: str) -> int:
        return self._times[path]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            method, address, _ = line.split(" ")
            headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            where = urlsplit(address)
            asked = Asked(where.path, json.loads(body) if body else dict(parse_qsl(where.query)), headers)
            self.asked.append(asked)
            self._times[asked.path] += 1
            judged = self.judge(asked)
            if isinstance(judged, Awaitable):
                judged = await judged
            if isinstance(judged, AsyncIterator):
                async for piece in judged:
                    writer.write(piece)
                    await writer.drain()
                return
            status, answer = judged or self._edited(asked, *await self._forward(method, address, body, headers))
            writer.write(
                f"HTTP/1.1 {status} Said\r\nConnection: close\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
            )
            writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _edited(self, asked: Asked, status: int, body: bytes) -> tuple[int, bytes]:
        if asked.path != "/v1/exchange/news" or status != httpx.codes.OK:
            return status, body
        answer = json.loads(body)
        if not self._has_list_begun and not answer["is_list"]:
            # As another node of the ledger answers, which knows no cursor of this one.
            answer["is_list"] = self._has_list_begun = True
        if not self.has_offers:
            for each in answer["items"]:
                each["offer"] = None
        self._edit(asked, answer)
        return status, json.dumps(answer).encode()

    async def _forward(self, method: str, address: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        kept = {name: headers[name] for name in ("authorization", "content-type", "accept-encoding") if name in headers}
        try:
            answer = await self._client.request(method, self.target + address, content=body, headers=kept)
        except httpx.HTTPError:
            return 502, b""
        return answer.status_code, answer.content


@asynccontextmanager
async def proxy_to_peer(target: str) -> AsyncIterator[PeerProxy]:
    """A proxy that listens, in front of the ledger at ``target``."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        proxy = PeerProxy(target, client)
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()

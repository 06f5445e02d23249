"""Answers: JSON values, whole answers of writes, streams; and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.edge.accepted import Accepted
from app.runtime.answers import json_bytes
from app.runtime.logs import log
from ledger.errors import LedgerError

JSON_MEDIA_TYPE = "application/json"
IS_HEAD = "tally.is_head"
"""In the scope of a HEAD request, whose answer's body is dropped."""
PREFIX = "tally.prefix"
"""In the scope of a request of which a trusted proxy said what it took off the path."""


def path_outside(scope: Mapping[str, Any], root_path: str, path: str) -> str:
    """``path`` of this service as the client of a request reaches it. ``root_path`` is before it where no trusted proxy
    said another."""
    return f"{scope.get(PREFIX, root_path)}{path}"


class Answer(NamedTuple):
    """A whole answer, as the framework sends it and as the fast path writes it."""

    status: int
    lines: bytes
    """The headers, a line each, names in small letters."""
    body: bytes

    @classmethod
    def of(cls, status: int, body: bytes, headers: Mapping[str, str]) -> Answer:
        """An answer in JSON with these ``headers``, names in small letters."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return cls(status, (lines + _CONTENT_LINES % len(body)).encode(), body)

    @classmethod
    def by(cls, response: Response) -> Answer:
        """The answer that ``response`` gives."""
        lines = b"".join([b"%b: %b\r\n" % header for header in response.raw_headers])
        return cls(response.status_code, lines, bytes(response.body))

    def response(self) -> Response:
        """The answer for the framework."""
        response = Response(self.body, self.status)
        fields = (line.partition(b": ") for line in self.lines.splitlines())
        response.raw_headers = [(name, value) for name, _, value in fields]
        return response


_CONTENT_LINES = f"content-length: %d\r\ncontent-type: {JSON_MEDIA_TYPE}\r\n"


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``value`` as a JSON answer."""
    return Response(json_bytes(value), status, headers, media_type=JSON_MEDIA_TYPE)


class Streamed(Response):
    """An answer that ``send_all`` sends: the given head, and a body of unknown length."""

    def __init__(
        self,
        send_all: Callable[[Message, Scope, Receive, Send], Awaitable[None]],
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._send_all = send_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it.

        Raises:
            LedgerError: as ``send_all``; nothing was sent.
        """
        await self._send_all(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers},
            scope,
            receive,
            send,
        )


async def streamed(
    request: Request,
    accepted: Accepted,
    pieces: AsyncGenerator[bytes, None],
    media_type: str,
    headers: dict[str, str],
    tenant_id: str,
    **what: Any,
) -> Response:
    """Stream ``pieces`` as an answer, one export of the caller. It starts once the first piece, an empty one, has
    arrived and the read is recorded; a HEAD request gets only the head.

    Raises:
        ClientDisconnect: the client is gone.
        LedgerError: as the first piece, or as ``Accepted.record_read``; nothing was sent.
    """
    async with AsyncExitStack() as held:
        held.enter_context(accepted.access.quotas.exports.one(accepted.caller.id))
        await held.enter_async_context(aclosing(pieces))
        async with while_connected(request):
            await anext(pieces)
        await accepted.record_read(tenant_id, **what)
        if request.scope.get(IS_HEAD):
            return Response(headers=headers, media_type=media_type)
        send_all = partial(_send_pieces, request, accepted, pieces, held.pop_all())
    return Streamed(send_all, media_type, headers)


async def _send_pieces(
    request: Request,
    accepted: Accepted,
    pieces: AsyncGenerator[bytes, None],
    held: AsyncExitStack,
    head: Message,
    scope: Scope,
    _receive: Receive,
    send: Send,
) -> None:
    """Send the pieces as they arrive, then release what is ``held``. An error, a disconnected client or a revoked token
    truncates the body, which the client detects by its missing end."""
    async with held:
        await send(head)
        try:
            async for piece in pieces:
                if await request.is_disconnected():
                    return
                accepted.check_again()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except LedgerError as error:
            log.warning("answer_broken_off", path=scope["path"], error=str(error))
            accepted.report_break(error)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def while_connected(request: Request) -> AsyncIterator[None]:
    """Cancel the body of this context once the client disconnects. The body of the request MUST have been read.

    Raises:
        ClientDisconnect: it is gone.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        await gone(request.receive)
        is_gone = True
        task.cancel()

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()

"""Answers that are sent as they are made, of any length."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.edge.accepted import report_break
from app.edge.parts import parts_of
from app.trust.access.callers import check_again
from ledger.errors import LedgerError

log = structlog.get_logger()


class Streamed(Response):
    """Sends pieces as they come, in the task of the request; a client that went away, or whose token was revoked, ends
    it."""

    def __init__(
        self, request: Request, pieces: AsyncGenerator[bytes, None], media_type: str, headers: dict[str, str]
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._request = request
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it, or break off: a body without its end, which the client sees as one."""
        async with aclosing(self._pieces) as pieces:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for piece in pieces:
                    if await self._request.is_disconnected():
                        return
                    check_again(parts_of(self._request).callers, scope)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except LedgerError as error:
                log.warning("answer_broken_off", path=scope["path"], error=str(error))
                report_break(parts_of(self._request), scope, error)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def within(
    held: AbstractContextManager[None], pieces: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """The pieces; ``held`` is entered with the first and left with the last, or where they are closed."""
    with held:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

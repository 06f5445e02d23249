"""What surrounds every request: it is timed and counted, and no failure leaves without an answer."""

from __future__ import annotations

import asyncio
import random
import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.edge.accepted import ACCEPTED, Accepted, AccessControl
from app.edge.problems import respond
from app.runtime.metrics import UNMATCHED_ROUTE, Metrics
from ledger.errors import NotReadyError, ProblemError, QuotaExceededError, WalFullError
from ledger.facts.problems import INVALID_REQUEST

CLIENT_GONE_STATUS = 499
IS_HEAD = "tally.is_head"
"""In the scope of a request whose answer's body is kept back."""
REFUSAL_PAUSE_S = (0.25, 0.5)
"""How long who has had his share, or finds the backlog full, waits to be told so: to refuse him as fast as he asks
would take from the others. Something between these: who is refused together does not come back together."""


class Observed:
    """ASGI middleware. The route label is the template of the route, so it has few values.

    HEAD is GET to all within; the connection keeps the body back.
    """

    def __init__(self, app: ASGIApp, access: AccessControl, metrics: Metrics) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer it with a problem when nobody else did."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        accepted: Accepted | None = scope.get(ACCEPTED)
        began_s = time.perf_counter() if accepted is None else accepted.began_s
        asked = scope["method"]
        if asked == "HEAD":
            scope = {**scope, "method": "GET", IS_HEAD: True}
        status = 0

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if not scope["path"].isprintable():
                raise ProblemError(INVALID_REQUEST, "the path holds a control character; no path of this API does")
            await self._app(scope, receive, send_observed)
        except ClientDisconnect:
            status = status or CLIENT_GONE_STATUS
        except asyncio.CancelledError:
            # Only a stop whose time for open requests is up cancels them.
            if status:
                raise
            response = respond(NotReadyError("the service stops and had no time for this request; send it again"))
            await response(scope, receive, send_observed)
        except Exception as error:
            self._access.record_refusal(scope, error)
            self._access.report_break(scope, error)
            response = respond(error)
            if status:
                raise
            if isinstance(error, (QuotaExceededError, WalFullError)):
                error.__traceback__ = None
                self._access.release_memory(scope)
                await asyncio.sleep(random.uniform(*REFUSAL_PAUSE_S))  # noqa: S311
            await response(scope, receive, send_observed)
        finally:
            self._access.release_memory(scope)
            route = scope.get("route")
            self._metrics.observe_request(
                asked,
                UNMATCHED_ROUTE if route is None else route.path,
                status or CLIENT_GONE_STATUS,
                time.perf_counter() - began_s,
            )

"""The fast path: one event or proposal in its common form, taken and answered without the framework.

The steps that it skips cost more than the work for the event. Each step is the same as on the framework's path::

    1. head     POST to a job or to all, or a proposal with its key, HTTP/1.1, nothing but HEADERS, a body of at most
                BODY_BYTES_MAX
    2. accept   ``AccessControl``: the caller, the right, the caller's quota, before there is a body
    3. append   ``EventWrites`` or ``ProposalWrites``: the form, the tenant's quota, the record in the WAL, if it needs
                no database lookup and no encryption of fields
    4. answer   the same, once the record has reached its level

Every other request goes to the framework as it arrived. This module never sends an error response: it passes the
exception with the request to the route, which raises it. Once a record is in the WAL the route never appends it again.
One exception is a proposal whose key is chained already: the route appends it under that key, which adds no entry.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from app.edge.accepted import FAULT, Accepted, AccessControl, Services
from app.edge.answers import JSON_MEDIA_TYPE, Answer
from app.edge.connection.heads import (
    CachedHead,
    Fields,
)
from app.edge.forms.body import FREE_BYTES
from app.edge.routes.commitments import (
    proposals,
)
from app.edge.routes.jobs import submissions
from app.edge.routing import (
    RightedRoute,
)
from app.edge.writes import (
    CANCELLATION,
    CREATION,
    PROPOSING,
    REPORT,
    EventWrites,
    ProposalWrites,
    Write,
)
from app.runtime.metrics import Metrics
from app.runtime.state.node import Node
from app.write.intake.answers import Awaited
from ledger import names

BODY_BYTES_MAX = FREE_BYTES
"""The framework reads a longer body, and counts the bytes that all of them hold."""
HEADERS = {
    b"host": None,
    b"user-agent": None,
    b"accept": None,
    b"accept-encoding": None,
    b"authorization": None,
    b"content-length": None,
    b"content-type": JSON_MEDIA_TYPE.encode(),
    b"connection": b"keep-alive",
}
"""The headers of a fast-path write, and the one value that each may have; None if the route does not read it."""
_UNKNOWN = b"\n"
"""The value of no header."""
_ROUTES = {route.path: route for route in (*submissions.routes, *proposals.routes) if isinstance(route, RightedRoute)}
_WRITES: dict[bytes | None, Write] = {None: CREATION, b"/events": REPORT, b"/cancel": CANCELLATION}
_PROPOSALS_PATH = PROPOSING.path.encode()
_PATH = re.compile(rf"/v1/jobs(?:/({names.JOB_ID})(/events|/cancel))?|/v1/commitments".encode(), re.ASCII)
_ANY_WRITE = re.compile(b"/v1/(?:jobs(?:/[^/]+/(?:events|cancel))?|events|commitments)")


@dataclass(slots=True, eq=False)
class FastWrite:
    """A request that the fast path has accepted and whose body is incomplete."""

    handler: EventWrites | ProposalWrites
    write: Write
    accepted: Accepted
    job_id: str | None


class FastPath:
    """Takes the fast-path writes of all connections."""

    def __init__(self, services: Services) -> None:
        self._node: Node = services[Node]
        self._access: AccessControl = services[AccessControl]
        self._events: EventWrites = services[EventWrites]
        self._proposals: ProposalWrites = services[ProposalWrites]
        self._metrics: Metrics = services[Metrics]
        self._bytes_max = min(BODY_BYTES_MAX, self._events.event_bytes_max)

    def is_write(self, scope: Any) -> bool:
        """Whether this is a write of one of these routes, in whatever form."""
        return scope["method"] == "POST" and _ANY_WRITE.fullmatch(scope["raw_path"]) is not None

    def begin(self, scope: Any, cached: CachedHead | None = None) -> FastWrite | None:
        """The write that a head asks for. None if the request falls back to the framework; ``scope`` then carries the
        result of the access check, or its error."""
        if scope["method"] != "POST" or scope["query_string"] or scope["http_version"] != "1.1":
            return None
        match = _PATH.fullmatch(scope["raw_path"])
        if match is None or not self._node.accepting:
            return None
        job_id, action = match.groups()
        is_proposal = match.group() == _PROPOSALS_PATH
        key = self._key(scope["headers"]) if cached is None else cached.key
        if key is None or bool(key) != is_proposal:
            return None
        write = PROPOSING if is_proposal else _WRITES[action]
        route = scope["route"] = _ROUTES[write.path]
        try:
            accepted = self._access.accept_known(scope, route.rule)
        except Exception as error:
            scope[FAULT] = error
            return None
        if accepted is None:
            del scope["route"]
            return None
        if accepted.is_body_rate_limited:
            return None
        handler = self._proposals if is_proposal else self._events
        return FastWrite(handler, write, accepted, None if job_id is None else job_id.decode())

    def _key(self, headers: Fields) -> bytes | None:
        """The Idempotency-Key of a head that the fast path takes, empty if it has none; None for any other head."""
        seen, key = set(), b""
        for name, value in headers:
            if name == b"idempotency-key":
                if key or not value:
                    return None
                key = value
                continue
            expected = HEADERS.get(name, _UNKNOWN)
            if expected is not None and value != expected:
                return None
            if name == b"content-length" and (len(value) > len(str(BODY_BYTES_MAX)) or int(value) > self._bytes_max):
                return None
            seen.add(name)
        return key if seen >= {b"content-length", b"content-type"} else None

    def enter(self, fast: FastWrite, body: bytes) -> Awaited | None:
        """Append the write of a whole request to the WAL; None if the framework must answer: with the error in the
        scope, or by itself, when nothing was appended."""
        try:
            self._node.check_writable()
            fast.accepted.check_again()
            return fast.handler.enter(fast.write, fast.accepted, body, fast.job_id)
        except Exception as error:
            fast.accepted.scope[FAULT] = error
            return None

    def answer(self, fast: FastWrite, entered: Any) -> Answer | None:
        """The answer once ``entered.reached`` is done; None if the scope holds the error to answer with, or the
        framework can retry."""
        try:
            return fast.handler.answer(entered)
        except Exception as error:
            fast.accepted.scope[FAULT] = error
            return None

    def answered(self, fast: FastWrite, status: int) -> None:
        """Count a request that was answered."""
        took_s = time.perf_counter() - fast.accepted.began_s
        self._metrics.observe_request("POST", fast.write.path, status, took_s)

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

The heads of a client differ in the path and in the Idempotency-Key; all other lines, the block, equal those of one of
its last requests, byte for byte. The cache keeps the parsed headers of a block, which apply to each request that
arrived whole and alone::

    POST <path> HTTP/1.1                   read here: a short path without anything to decode, and no query
    Idempotency-Key: <visible characters>  read here, taken out of the block: at most one, nothing folded into it
    <block>                                cached
                                           an empty line
    <body>                                 as many bytes as the block says

    0 <= blocks <= BLOCKS_MAX, each of at most BLOCK_BYTES_MAX bytes
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from app.edge.accepted import FAULT, Accepted, AccessControl, Services
from app.edge.answers import JSON_MEDIA_TYPE, Answer
from app.edge.forms.body import FREE_BYTES
from app.edge.routes.commitments import proposals
from app.edge.routes.jobs import submissions
from app.edge.routing import RightedRoute
from app.edge.writes import CANCELLATION, CREATION, PROPOSING, REPORT, EventWrites, ProposalWrites, Write
from app.runtime.metrics import Metrics
from app.runtime.state.node import Node
from app.write.intake.answers import Entered
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


BLOCKS_MAX: Final = 4096
"""A client has one block for each length of its bodies. When the cache is full, it is cleared."""
BLOCK_BYTES_MAX: Final = 1024
_LINE = re.compile(rb"POST (/v1/[A-Za-z0-9._/-]{1,1024}) HTTP/1\.1(?=\r\n)")
_END = b"\r\n\r\n"
_KEY: Final = b"idempotency-key"
_KEY_FIELDS: Final = (b"\r\nIdempotency-Key: ", b"\r\nidempotency-key: ")
"""The usual spellings; a head with another one goes to the parser."""
_is_visible = re.compile(rb"[!-~]+").fullmatch

Fields = list[tuple[bytes, bytes]]
"""Headers: lower-case names, and values."""


class CachedHead(NamedTuple):
    """A request whose head needs no parser."""

    path: bytes
    key: bytes
    """Empty if there is none."""
    headers: Fields
    body: bytes
    authorization: bytes | None
    """Its one value; None if there is none."""


class HeaderCache:
    """The parsed blocks of one listener's clients."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Fields, int, bytes | None]] = {}

    def find(self, data: bytes) -> CachedHead | None:
        """The one request in ``data``, if its block is cached."""
        split = _split(data)
        if split is None:
            return None
        path, key, block, body = split
        known = self._known.get(block)
        if known is None or len(body) != known[1]:
            return None
        fields, _, authorization = known
        return CachedHead(path, key, [*fields, (_KEY, key)] if key else fields.copy(), body, authorization)

    def remember(self, data: bytes, headers: Fields) -> None:
        """Cache the block of a plain request that the parser found at the start of ``data``, with these ``headers``.
        Nothing is cached if ``data`` holds more than that request, or its spelling is unusual."""
        split = _split(data)
        if split is None:
            return
        _, key, block, body = split
        fields = [field for field in headers if field[0] != _KEY]
        said = [value for name, value in fields if name == b"authorization"]
        is_ambiguous = len(said) > 1 or any(fold in block for fold in (b"\r\n ", b"\r\n\t"))
        if is_ambiguous or dict(headers).get(_KEY, b"") != key or len(body) != int(dict(fields)[b"content-length"]):
            return
        if len(self._known) == BLOCKS_MAX:
            self._known.clear()
        self._known[block] = fields, len(body), said[0] if said else None


def _split(data: bytes) -> tuple[bytes, bytes, bytes, bytes] | None:
    """Path, key, block and body of data that starts with a head of the cacheable form."""
    line = _LINE.match(data)
    if line is None:
        return None
    begin = line.end()
    end = data.find(_END, begin, begin + BLOCK_BYTES_MAX)
    if end < 0:
        return None
    for field in _KEY_FIELDS:
        if (at := data.find(field, begin, end)) >= 0:
            key_end = data.find(b"\r\n", at + len(field))
            key = data[at + len(field) : key_end]
            if _is_visible(key) is None:
                return None
            return line[1], key, data[begin:at] + data[key_end:end], data[end + len(_END) :]
    return line[1], b"", data[begin:end], data[end + len(_END) :]


class FastPath:
    """Takes the fast-path writes of all connections."""

    def __init__(self, services: Services) -> None:
        self.node: Node = services[Node]
        self._access: AccessControl = services[AccessControl]
        self._events: EventWrites = services[EventWrites]
        self._proposals: ProposalWrites = services[ProposalWrites]
        self.metrics: Metrics = services[Metrics]
        self._bytes_max = min(BODY_BYTES_MAX, self._events.event_bytes_max)

    def is_write(self, scope: Any) -> bool:
        """Whether this is a write of one of these routes, in whatever form."""
        return scope["method"] == "POST" and _ANY_WRITE.fullmatch(scope["raw_path"]) is not None

    def begin(self, scope: Any, cached: CachedHead | None = None) -> FastWrite | None:
        """The write that a head asks for. None if the request falls back to the framework; ``scope`` then carries the
        result of the access check, or its error."""
        match = _PATH.fullmatch(scope["raw_path"])
        if match is None or scope["method"] != "POST" or scope["query_string"] or scope["http_version"] != "1.1":
            return None
        if not self.node.accepting:
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
        if accepted is None or accepted.is_body_rate_limited:
            return None
        handler = self._proposals if is_proposal else self._events
        return FastWrite(self, handler, write, accepted, None if job_id is None else job_id.decode())

    def _key(self, headers: Fields) -> bytes | None:
        """The Idempotency-Key of a head that the fast path takes, empty if it has none; None for any other head."""
        fields = dict(headers)
        key = fields.pop(_KEY, None)
        length = fields.get(b"content-length", b"")
        if key == b"" or len(fields) + (key is not None) < len(headers) or b"content-type" not in fields:
            return None
        if not 1 <= len(length) <= len(str(BODY_BYTES_MAX)) or int(length) > self._bytes_max:
            return None
        is_common = all(HEADERS.get(name, _UNKNOWN) in (None, value) for name, value in fields.items())
        return (key or b"") if is_common else None


@dataclass(slots=True, eq=False)
class FastWrite:
    """A request that the fast path has accepted."""

    path: FastPath
    handler: EventWrites | ProposalWrites
    write: Write
    accepted: Accepted
    job_id: str | None

    def enter(self, body: bytes) -> Entered[Any] | None:
        """Append the write of the whole request to the WAL; None if the framework must answer: with the error in the
        scope, or by itself, when nothing was appended."""
        try:
            self.path.node.check_writable()
            self.accepted.check_again()
            return self.handler.enter(self.write, self.accepted, body, self.job_id)
        except Exception as error:
            self.accepted.scope[FAULT] = error
            return None

    def answer(self, entered: Any) -> Answer | None:
        """The answer once ``entered.reached`` is done, which is counted; None if the scope holds the error to answer
        with, or the framework can retry."""
        try:
            answer = self.handler.answer(entered, self.accepted)
        except Exception as error:
            self.accepted.scope[FAULT] = error
            return None
        if answer is not None:
            accepted, took_s = self.accepted, time.perf_counter() - self.accepted.began_s
            self.path.metrics.observe_request(
                "POST", self.write.path, answer.status, took_s, accepted.traceparent, accepted.lsns
            )
        return answer

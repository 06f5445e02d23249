"""A write in its common form: one event or proposal, taken and answered from the connection, without the framework.

What it skips costs more than all that is done for the event. In order::

    1. head     POST to a job or to all, or a proposal with its key, HTTP/1.1, nothing but HEADERS, a body of at most
                BODY_BYTES_MAX
    2. right    asked for, and the request taken out of the caller's quota, before there is a body
    3. body     checked as the route checks it, and taken out of the quota of its tenant
    4. entered  as the route enters it, where that takes no question to the store and no seal
    5. answer   made as the route makes it, once the event has reached its level

A request that is not so is the framework's, which gets it as it came. Nothing here says no: what is raised on the way
is raised again by the route, and a request of which an event was entered is never handed on without that, but for
a proposal whose key was chained before: the route enters it again under that key, and neither adds to the chain.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from app.edge.charging import PACED, charge_caller
from app.edge.connection.header_cache import Fields, KnownHeads, KnownRequest
from app.edge.forms.body import FREE_BYTES, JSON_MEDIA_TYPE, parse
from app.edge.forms.requests import PROPOSAL, PROPOSAL_TAGS
from app.edge.parts import Parts
from app.edge.problems import respond
from app.edge.routes.commitments import ACCEPTED, PROPOSALS_PATH, proposals, recorded_body
from app.edge.routes.jobs import CANCELLATION, CREATION, REPORT, Submission, submissions
from app.edge.routing import BEGUN, Begun, RightedRoute
from app.edge.writes import Route as KeyRoute
from app.edge.writes import key_of, location_of, receipt_body, token_of
from app.runtime.principals import Principal, Right
from app.trust.access import callers
from app.write.intake.answers import Entered
from app.write.intake.proposals import EnteredProposal
from app.write.pending.linking import DuplicateLineError
from ledger import names
from ledger.errors import CommitmentConflictError

BODY_BYTES_MAX = FREE_BYTES
"""A longer body is read by the framework, which counts what all of them hold."""
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
"""The headers of a plain request, and the one value that each may have; None where the route would not look at it."""
_LINES = f"tally-session: %s\r\nlocation: %s\r\ncontent-length: %d\r\ncontent-type: {JSON_MEDIA_TYPE}\r\n"
_REQUIRED = {b"content-length", b"content-type"}
_UNKNOWN = b"\n"
"""The value of no header."""
_LINES_OF_VERDICT = f"tally-session: %s\r\ncontent-length: %d\r\ncontent-type: {JSON_MEDIA_TYPE}\r\n"
_ROUTES = {route.path: route for route in (*submissions.routes, *proposals.routes) if isinstance(route, RightedRoute)}
_PROPOSALS_PATH = PROPOSALS_PATH.encode()
_PATH = re.compile(rf"/v1/jobs(?:/({names.JOB_ID})(/events|/cancel))?|/v1/commitments".encode(), re.ASCII)
_WRITE = re.compile(b"/v1/(?:jobs(?:/[^/]+/(?:events|cancel))?|events|commitments)")


class Settling(Protocol):
    """What was entered, and will be answered."""

    @property
    def reached(self) -> asyncio.Future[Any]: ...


class PlainWrite(NamedTuple):
    """A request whose head is plain and whose caller has the right."""

    form: EventForm | ProposalForm
    route: RightedRoute
    job_id: str | None
    key: bytes | None
    begun: Begun
    caller: Principal


class PlainAnswer(NamedTuple):
    """An answer, but for the lines that every answer has."""

    status: int
    lines: bytes
    body: bytes


class EventForm:
    """One event without an Idempotency-Key."""

    takes_key = False

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.path = submission.path

    def enter(self, parts: Parts, write: PlainWrite, body: bytes) -> Entered | None:
        """The event in the WAL, None where the framework is to do that."""
        draft = self.submission.draft_of(body, write.job_id, write.caller.id)
        _charge(parts, write, draft.tenant_id, body)
        return None if parts.sealing.may_have_private(draft) else parts.submitter.enter_known(draft)

    def answer(self, parts: Parts, entered: Any) -> PlainAnswer:
        """The answer once it has reached its level."""
        receipt = entered.receipt()
        session, body = receipt_body(parts.sessions, receipt)
        return PlainAnswer(201, (_LINES % (session, location_of(receipt), len(body))).encode(), body)


class ProposalForm:
    """One proposal, which has an Idempotency-Key."""

    takes_key = True
    path = PROPOSALS_PATH

    def enter(self, parts: Parts, write: PlainWrite, body: bytes) -> EnteredProposal:
        """The proposal in the WAL."""
        wanted = parse(PROPOSAL, body, PROPOSAL_TAGS)
        _charge(parts, write, wanted["tenant_id"], body)
        assert write.key is not None
        key = key_of(write.key.decode("latin-1"), KeyRoute.COMMITMENTS, body, "")
        return parts.proposals.enter(wanted, write.caller.id, key)

    def answer(self, parts: Parts, entered: Any) -> PlainAnswer | None:
        """The verdict; None where the key was chained before: the framework then asks for it under the same key."""
        try:
            recorded = entered.recorded()
        except DuplicateLineError:
            return None
        except CommitmentConflictError as error:
            response = respond(error)
            lines = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
            return PlainAnswer(response.status_code, lines, bytes(response.body))
        session = token_of(parts.sessions, recorded.hlc, recorded.epoch, recorded.lsn)
        body = recorded_body(recorded, ACCEPTED)
        return PlainAnswer(201, (_LINES_OF_VERDICT % (session, len(body))).encode(), body)


def _charge(parts: Parts, write: PlainWrite, tenant_id: str, body: bytes) -> None:
    write.caller.check(Right.WRITE, tenant_id)
    if parts.quotas.bounds_tenants:
        parts.quotas.admit_tenants({tenant_id: 1}, {tenant_id: len(body)})
        write.begun.is_charged = True


_FORMS: Mapping[bytes | None, tuple[EventForm | ProposalForm, RightedRoute]] = {
    action: (EventForm(submission), _ROUTES[submission.path])
    for action, submission in ((None, CREATION), (b"/events", REPORT), (b"/cancel", CANCELLATION))
}
_PROPOSAL: tuple[EventForm | ProposalForm, RightedRoute] = ProposalForm(), _ROUTES[PROPOSALS_PATH]


class PlainWrites:
    """Takes the plain requests of all connections."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.known_heads = KnownHeads()
        self._bytes_max = min(BODY_BYTES_MAX, parts.settings.event_bytes_max)

    def is_write(self, scope: Any) -> bool:
        """Whether this is a write as a plain one, in whatever form."""
        return scope["method"] == "POST" and _WRITE.fullmatch(scope["raw_path"]) is not None

    def begin(self, scope: Any, known: KnownRequest | None = None) -> PlainWrite | None:
        """The write that a head asks for, None when that is the framework's; ``scope`` then knows what was done."""
        if scope["method"] != "POST" or scope["query_string"] or scope["http_version"] != "1.1":
            return None
        match = _PATH.fullmatch(scope["raw_path"])
        if match is None or not self._parts.accepting:
            return None
        job_id, action = match.groups()
        form, route = _PROPOSAL if match.group() == _PROPOSALS_PATH else _FORMS[action]
        key = self._plain_key(scope["headers"]) if known is None else known.key
        if key is None or bool(key) != form.takes_key:
            return None
        began_s, caller = time.perf_counter(), None
        try:
            caller = self._parts.callers.known(scope)
            if caller is None:
                return None
            callers.check(caller, route.rule, scope)
            if self._parts.quotas.bounds_principals:
                charge_caller(self._parts.quotas, caller, scope)
        except Exception as error:
            scope[BEGUN] = Begun(began_s, caller, error)
            scope["route"] = route
            return None
        begun = scope[BEGUN] = Begun(began_s, caller)
        scope["route"] = route
        if PACED in scope:
            return None
        return PlainWrite(form, route, None if job_id is None else job_id.decode(), key, begun, caller)

    def _plain_key(self, headers: Fields) -> bytes | None:
        """The Idempotency-Key of a plain head, empty where it has none; None where the head is not plain."""
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
        return key if seen >= _REQUIRED else None

    def enter(self, write: PlainWrite, body: bytes) -> Settling | None:
        """What a whole request asks for, in the WAL; None when the framework is to answer: with the error that
        ``write.begun`` has, or by itself, nothing being taken."""
        parts = self._parts
        try:
            parts.check_writable()
            if callers.is_outdated(parts.callers, write.begun.at_s, time.perf_counter()):
                return None
            return write.form.enter(parts, write, body)
        except Exception as error:
            write.begun.error = error
            return None

    def answer(self, write: PlainWrite, entered: Settling) -> PlainAnswer | None:
        """The answer once ``entered.reached`` is done; None when ``write.begun`` has the error to answer with, or the
        framework can ask again."""
        try:
            return write.form.answer(self._parts, entered)
        except Exception as error:
            write.begun.error = error
            return None

    def answered(self, write: PlainWrite, status: int) -> None:
        """Count a request that was answered."""
        took_s = time.perf_counter() - write.begun.at_s
        self._parts.metrics.observe_request("POST", write.form.path, status, took_s)

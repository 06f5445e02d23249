"""A write in its common form: one event, taken and answered from the connection, without the framework.

What it skips costs more than all that is done for the event. In order::

    1. head     POST to a job or to all, HTTP/1.1, nothing in it but HEADERS, a body of at most BODY_BYTES_MAX
    2. right    asked for, and the request taken out of the caller's quota, before there is a body
    3. body     checked as the route checks it, and taken out of the quota of its tenant
    4. entered  as the route enters it, where that takes no question to the store and no seal
    5. answer   made as the route makes it, once the event has reached its level

A request that is not so is the framework's, which gets it as it came. Nothing here says no: what is raised on the way
is raised again by the route, and a request of which an event was entered is never handed on without that.
"""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

from app.access import callers
from app.access.principals import Principal
from app.access.rights import Right
from app.http.body import FREE_BYTES, JSON_MEDIA_TYPE
from app.http.charging import PACED, charge_caller
from app.http.jobs import CANCELLATION, CREATION, REPORT, Submission, submissions
from app.http.routing import BEGUN, Begun, RightedRoute
from app.http.writing import location_of, receipt_body
from app.intake.answers import Entered
from app.parts import Parts
from ledger import names

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
_ROUTES = {route.path: route for route in submissions.routes if isinstance(route, RightedRoute)}
_SUBMISSIONS = {
    action: (_ROUTES[submission.path], submission)
    for action, submission in ((None, CREATION), (b"/events", REPORT), (b"/cancel", CANCELLATION))
}
"""By what stands behind ``/v1/jobs`` and the job."""
_PATH = re.compile(rf"/v1/jobs(?:/({names.JOB_ID})(/events|/cancel))?".encode(), re.ASCII)


class PlainWrite(NamedTuple):
    """A request whose head is plain and whose caller has the right."""

    route: RightedRoute
    submission: Submission
    job_id: str | None
    begun: Begun
    caller: Principal


class PlainWrites:
    """Takes the plain requests of all connections."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._bytes_max = min(BODY_BYTES_MAX, parts.settings.event_bytes_max)

    def begin(self, scope: Any) -> PlainWrite | None:
        """The write that a head asks for, None when that is the framework's; ``scope`` then knows what was done."""
        if scope["method"] != "POST" or scope["query_string"] or scope["http_version"] != "1.1":
            return None
        match = _PATH.fullmatch(scope["raw_path"])
        if match is None or not self._is_plain(scope["headers"]) or not self._parts.accepting:
            return None
        job_id, action = match.groups()
        route, submission = _SUBMISSIONS[action]
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
        return PlainWrite(route, submission, None if job_id is None else job_id.decode(), begun, caller)

    def _is_plain(self, headers: list[tuple[bytes, bytes]]) -> bool:
        seen = set()
        for name, value in headers:
            expected = HEADERS.get(name, _UNKNOWN)
            if expected is not None and value != expected:
                return False
            if name == b"content-length" and (len(value) > len(str(BODY_BYTES_MAX)) or int(value) > self._bytes_max):
                return False
            seen.add(name)
        return seen >= _REQUIRED

    def enter(self, write: PlainWrite, body: bytes) -> Entered | None:
        """The event of a whole request, in the WAL; None when the framework is to answer: with the error that
        ``write.begun`` has, or by itself, nothing being taken."""
        parts = self._parts
        try:
            parts.check_writable()
            if time.perf_counter() - write.begun.at_s > callers.ASK_AGAIN_S:
                return None
            draft = write.submission.draft_of(body, write.job_id, write.caller.id)
            write.caller.check(Right.WRITE, draft.tenant_id)
            if parts.quotas.bounds_tenants:
                parts.quotas.admit_tenants({draft.tenant_id: 1}, {draft.tenant_id: len(body)})
                write.begun.is_charged = True
            if parts.sealing.may_have_private(draft):
                return None
            return parts.submitter.enter_known(draft)
        except Exception as error:
            write.begun.error = error
            return None

    def answer(self, write: PlainWrite, entered: Entered) -> tuple[bytes, bytes] | None:
        """Header lines and body of the answer, which is a 201, once ``entered.reached`` is done; None when
        ``write.begun`` has the error to answer with."""
        try:
            receipt = entered.receipt()
            session, body = receipt_body(self._parts.sessions, receipt)
        except Exception as error:
            write.begun.error = error
            return None
        return (_LINES % (session, location_of(receipt), len(body))).encode(), body

    def answered(self, write: PlainWrite) -> None:
        """Count a request that was answered."""
        took_s = time.perf_counter() - write.begun.at_s
        self._parts.metrics.observe_request("POST", write.submission.path, 201, took_s)

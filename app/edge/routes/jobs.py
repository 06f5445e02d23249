"""``/v1/jobs``: submit, report, cancel, read, list."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BeforeValidator, TypeAdapter

from app.edge.accepted import record_read
from app.edge.answers import json_answer
from app.edge.charging import charge_tenant
from app.edge.forms.body import JSON_MEDIA_TYPE, body_of, parse, read_body
from app.edge.forms.fields import (
    JOB_ID_PATTERN,
    CursorQuery,
    Limit,
    Moment,
    Name,
    ReadableTenantId,
    WholeNumber,
    in_lower_case,
    moment,
)
from app.edge.forms.lists import Cursors, hlc_position, page
from app.edge.forms.requests import CANCEL_REQUEST, EVENT_REQUEST, EVENT_TAGS, JOB_REQUEST
from app.edge.parts import PartsDep, parts_of
from app.edge.routing import (
    BEGUN,
    PROBLEM_RESPONSE,
    SESSION_PARAMETER,
    WRITE_HEADERS,
    WRITE_PARAMETERS,
    Begun,
    CallerDep,
    LeanRoute,
    StrictRoute,
    answered,
    caller_of,
)
from app.edge.writes import Route, receipt_answer, request_key, session_tokens
from app.read.consistency import Promise, ReadLevel
from app.runtime.answers.jobs import EventAnswer, JobAnswer, JobEventList, JobList
from app.runtime.principals import Right
from app.runtime.settings.words import WORDS
from app.write.pending.requests import Draft, draft_of
from ledger import rfc3339
from ledger.errors import InvalidInputError
from ledger.facts.events import JOB_EVENTS, EventType

router = APIRouter(route_class=StrictRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)
submissions = APIRouter(route_class=LeanRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)

STALENESS_MS_MAX = 86_400_000

_LOCATION = {"schema": {"type": "string"}, "description": "The job, to be read without another parameter."}
_TAKEN = answered(EventAnswer, 201, headers={**WRITE_HEADERS, "Location": _LOCATION})
_EVENTS = Cursors("events", hlc_position)
_CANCELLATIONS = Cursors("cancellations", hlc_position)

_JOB_ID = re.compile(JOB_ID_PATTERN)

JobIdPath = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="The job.")]
TenantQuery = Annotated[ReadableTenantId, Query()]


class Submission(NamedTuple):
    """A way to send one event: to which path, checked by which model. ``event`` is None where the body's ``type`` says
    it."""

    path: str
    model: TypeAdapter[Any]
    key_route: Route
    event: EventType | None

    @property
    def described(self) -> dict[str, Any]:
        """What its route says of itself."""
        extra = {"requestBody": body_of(self.model), "parameters": WRITE_PARAMETERS}
        return {"status_code": 201, "responses": _TAKEN, "openapi_extra": extra}

    def draft_of(self, body: bytes, job_id: str | None, actor: str | None) -> Draft:
        """The event that ``body`` of ``actor`` describes.

        Raises:
            InvalidInputError: it describes none.
        """
        return draft_of(parse(self.model, body, EVENT_TAGS), self.event, job_id, actor)


CREATION = Submission("/v1/jobs", JOB_REQUEST, Route.JOBS, JOB_EVENTS["JobCreated"])
REPORT = Submission("/v1/jobs/{job_id}/events", EVENT_REQUEST, Route.JOB_EVENTS, None)
CANCELLATION = Submission(
    "/v1/jobs/{job_id}/cancel", CANCEL_REQUEST, Route.CANCEL, JOB_EVENTS["JobCancellationRequested"]
)


@submissions.post(CREATION.path, **CREATION.described)
async def submit_job(request: Request) -> Response:
    """Record that a job exists. Without ``job_id`` the node makes one."""
    return await _submit(request, CREATION, None)


@submissions.post(REPORT.path, **REPORT.described)
async def report_event(request: Request, job_id: JobIdPath) -> Response:
    """Record what happened to a job."""
    return await _submit(request, REPORT, job_id)


@submissions.post(CANCELLATION.path, **CANCELLATION.described)
async def cancel_job(request: Request, job_id: JobIdPath) -> Response:
    """Record that somebody wants the job to stop."""
    return await _submit(request, CANCELLATION, job_id)


async def _submit(request: Request, submission: Submission, job_id: str | None) -> Response:
    """Take the one event that a request holds. What is plain does not come here: see ``app.edge.fast_path``."""
    parts = parts_of(request)
    parts.check_writable()
    if job_id is not None and _JOB_ID.fullmatch(job_id) is None:
        raise InvalidInputError(f"job_id: {WORDS[JOB_ID_PATTERN]}", ("job_id",))
    body = await read_body(request, JSON_MEDIA_TYPE, parts.settings.event_bytes_max)
    unsealed = submission.draft_of(body, job_id, caller_of(request).id)
    begun: Begun | None = request.scope.get(BEGUN)
    if begun is None or not begun.is_charged:
        charge_tenant(request, unsealed.tenant_id, body)
    draft = await parts.sealing.prepare(unsealed)
    key = parts.sealing.key_of(request_key(request, submission.key_route, body, job_id or ""), draft.seal is not None)
    tokens = session_tokens(request)
    if tokens:
        parts.consistency.receive(tokens)
        if job_id is not None:
            await parts.consistency.wait_for_session(tokens)
    receipt = await parts.submitter.submit(draft, key=key)
    return receipt_answer(parts.sessions, receipt)


def promise_of(
    request: Request,
    parts: PartsDep,
    consistency: Annotated[
        ReadLevel, BeforeValidator(in_lower_case), Query(description="How fresh the answer must be.")
    ] = ReadLevel.SESSION,
    max_staleness_ms: Annotated[
        WholeNumber | None, Query(ge=0, le=STALENESS_MS_MAX, description="Needed with bounded_staleness.")
    ] = None,
    tally_session: Annotated[
        str | None,
        Header(description=SESSION_PARAMETER["description"], json_schema_extra=SESSION_PARAMETER["schema"]),
    ] = None,
) -> Promise:
    """The promise that ``request`` asks a read for; the clock learns of the times of its session.

    Raises:
        InvalidInputError: a token is malformed, or a bound is missing.
        ClockSkewError: the time of a token lies too far ahead.
    """
    if consistency is ReadLevel.BOUNDED_STALENESS and max_staleness_ms is None:
        raise InvalidInputError("max_staleness_ms: needed with bounded_staleness", ("max_staleness_ms",))
    tokens = session_tokens(request)
    parts.consistency.receive(tokens)
    return Promise(consistency, tokens, max_staleness_ms or 0)


PromiseDep = Annotated[Promise, Depends(promise_of)]


@router.get("/v1/jobs/{job_id}", responses=answered(JobAnswer))
async def read_job(
    request: Request,
    parts: PartsDep,
    promise: PromiseDep,
    caller: CallerDep,
    job_id: JobIdPath,
    tenant_id: Annotated[
        ReadableTenantId | None, Query(description="May be left out where only one tenant has a job of this id.")
    ] = None,
    as_of: Annotated[Moment | None, Query(description="Only what had happened by then: an HLC or a time.")] = None,
) -> Response:
    """One job, as fresh as ``consistency`` says, or as it was at ``as_of``."""
    at = moment("as_of", as_of, rfc3339.up_to)
    found = await parts.job_reader.read(tenant_id, job_id, promise, at, caller.patterns(Right.READ))
    await record_read(request, found["tenant_id"], job_id=job_id)
    return json_answer(found)


@router.get("/v1/cancellations", responses=answered(JobList))
async def list_cancellations(
    request: Request,
    parts: PartsDep,
    promise: PromiseDep,
    tenant_id: TenantQuery,
    dc: Annotated[Name, Query(description="The data centre.")],
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Jobs that are to be cancelled and whose data centre `dc` has not acknowledged that, newest first: of those that
    are assigned to it, or that it has accepted. A page may have fewer than `limit` items and still a `next_cursor`."""
    scope = f"{tenant_id}/{dc}"
    found = await parts.job_reader.list_cancellations(tenant_id, dc, promise, _CANCELLATIONS.at(scope, cursor), limit)
    await record_read(request, tenant_id, dc=dc, jobs=len(found.items))
    following = _CANCELLATIONS.next(scope, found.last) if found.last else None
    return page(found.items, following, damaged=found.damaged, consistency=found.consistency)


@router.get("/v1/jobs/{job_id}/events", responses=answered(JobEventList))
async def list_job_events(
    request: Request,
    parts: PartsDep,
    promise: PromiseDep,
    job_id: JobIdPath,
    tenant_id: TenantQuery,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Chained events of a job in HLC order."""
    scope = f"{tenant_id}/{job_id}"
    after = _EVENTS.at(scope, cursor)
    found = await parts.job_reader.list_events(tenant_id, job_id, promise, after, limit)
    await record_read(request, tenant_id, job_id=job_id, events=len(found.items))
    return page(found.items, _EVENTS.next(scope, found.last) if found.last else None, consistency=found.consistency)


# In front: routes are tried in order, and of all requests most are these.
router.routes[:0] = submissions.routes

"""``/v1/jobs``: submit, report, cancel, read, list."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BeforeValidator

from app.edge.accepted import AcceptedDep
from app.edge.answers import json_answer
from app.edge.forms.body import body_of
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
from app.edge.routing import (
    PROBLEM_RESPONSE,
    SESSION_PARAMETER,
    WRITE_HEADERS,
    WRITE_PARAMETERS,
    LeanRoute,
    StrictRoute,
    answered,
)
from app.edge.services import Service
from app.edge.writes import CANCELLATION, CREATION, REPORT, EventWrites, Write, shown_session
from app.read.consistency import Consistency, Promise, ReadLevel
from app.read.jobs import JobReader
from app.runtime.answers.jobs import EventAnswer, JobAnswer, JobEventList, JobList
from app.runtime.principals import Right
from app.runtime.state.session import SessionTokens
from ledger import rfc3339
from ledger.errors import InvalidInputError

router = APIRouter(route_class=StrictRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)
submissions = APIRouter(route_class=LeanRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)

STALENESS_MS_MAX = 86_400_000

_LOCATION = {"schema": {"type": "string"}, "description": "The job, to be read without another parameter."}
_TAKEN = answered(EventAnswer, 201, headers={**WRITE_HEADERS, "Location": _LOCATION})
_EVENTS = Cursors("events", hlc_position)
_CANCELLATIONS = Cursors("cancellations", hlc_position)

JobIdPath = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="The job.")]
TenantQuery = Annotated[ReadableTenantId, Query()]


def _described(write: Write) -> dict[str, Any]:
    """What the route of ``write`` says of itself."""
    extra = {"requestBody": body_of(write.form), "parameters": WRITE_PARAMETERS}
    return {"status_code": 201, "responses": _TAKEN, "openapi_extra": extra}


@submissions.post(CREATION.path, **_described(CREATION))
async def submit_job(request: Request, accepted: AcceptedDep, writes: Service[EventWrites]) -> Response:
    """Record that a job exists. Without ``job_id`` the node makes one."""
    return await writes.submit(CREATION, request, accepted)


@submissions.post(REPORT.path, **_described(REPORT))
async def report_event(
    request: Request, accepted: AcceptedDep, writes: Service[EventWrites], job_id: JobIdPath
) -> Response:
    """Record what happened to a job."""
    return await writes.submit(REPORT, request, accepted, job_id)


@submissions.post(CANCELLATION.path, **_described(CANCELLATION))
async def cancel_job(
    request: Request, accepted: AcceptedDep, writes: Service[EventWrites], job_id: JobIdPath
) -> Response:
    """Record that somebody wants the job to stop."""
    return await writes.submit(CANCELLATION, request, accepted, job_id)


async def promise_of(
    accepted: AcceptedDep,
    sessions: Service[SessionTokens],
    freshness: Service[Consistency],
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
    """The promise that the request asks a read for; the clock learns of the times of its session.

    Raises:
        InvalidInputError: a token is malformed, or a bound is missing.
        ClockSkewError: the time of a token lies too far ahead.
    """
    if consistency is ReadLevel.BOUNDED_STALENESS and max_staleness_ms is None:
        raise InvalidInputError("max_staleness_ms: needed with bounded_staleness", ("max_staleness_ms",))
    return Promise(consistency, shown_session(accepted, sessions, freshness), max_staleness_ms or 0)


PromiseDep = Annotated[Promise, Depends(promise_of)]


@router.get("/v1/jobs/{job_id}", responses=answered(JobAnswer))
async def read_job(
    jobs: Service[JobReader],
    promise: PromiseDep,
    accepted: AcceptedDep,
    job_id: JobIdPath,
    tenant_id: Annotated[
        ReadableTenantId | None, Query(description="May be left out where only one tenant has a job of this id.")
    ] = None,
    as_of: Annotated[Moment | None, Query(description="Only what had happened by then: an HLC or a time.")] = None,
) -> Response:
    """One job, as fresh as ``consistency`` says, or as it was at ``as_of``."""
    at = moment("as_of", as_of, rfc3339.up_to)
    found = await jobs.read(tenant_id, job_id, promise, at, accepted.caller.patterns(Right.READ))
    await accepted.record_read(found["tenant_id"], job_id=job_id)
    return json_answer(found)


@router.get("/v1/cancellations", responses=answered(JobList))
async def list_cancellations(
    accepted: AcceptedDep,
    jobs: Service[JobReader],
    promise: PromiseDep,
    tenant_id: TenantQuery,
    dc: Annotated[Name, Query(description="The data centre.")],
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Jobs that are to be cancelled and whose data centre `dc` has not acknowledged that, newest first: of those that
    are assigned to it, or that it has accepted. A page may have fewer than `limit` items and still a `next_cursor`."""
    scope = f"{tenant_id}/{dc}"
    found = await jobs.list_cancellations(tenant_id, dc, promise, _CANCELLATIONS.at(scope, cursor), limit)
    await accepted.record_read(tenant_id, dc=dc, jobs=len(found.items))
    following = _CANCELLATIONS.next(scope, found.last) if found.last else None
    return page(found.items, following, damaged=found.damaged, consistency=found.consistency)


@router.get("/v1/jobs/{job_id}/events", responses=answered(JobEventList))
async def list_job_events(
    accepted: AcceptedDep,
    jobs: Service[JobReader],
    promise: PromiseDep,
    job_id: JobIdPath,
    tenant_id: TenantQuery,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Chained events of a job in HLC order."""
    scope = f"{tenant_id}/{job_id}"
    after = _EVENTS.at(scope, cursor)
    found = await jobs.list_events(tenant_id, job_id, promise, after, limit)
    await accepted.record_read(tenant_id, job_id=job_id, events=len(found.items))
    return page(found.items, _EVENTS.next(scope, found.last) if found.last else None, consistency=found.consistency)


# In front: routes are tried in order, and of all requests most are these.
router.routes[:0] = submissions.routes

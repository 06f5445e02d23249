"""``/v1/jobs``: submit, report, cancel, read, list."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BeforeValidator, TypeAdapter

from app.http import cursor as cursors
from app.http.answers import EventAnswer, JobAnswer, JobEventList, JobList, JobStatus, json_answer
from app.http.body import JSON_MEDIA_TYPE, parse, read_body
from app.http.fields import (
    JOB_ID_PATTERN,
    CursorQuery,
    Limit,
    Moment,
    ReadableTenantId,
    in_upper_case,
    moment,
)
from app.http.promises import PromiseDep
from app.http.requests import CANCEL_REQUEST, EVENT_REQUEST, EVENT_TAGS, JOB_REQUEST
from app.http.routing import (
    IDEMPOTENCY_KEY_PARAMETER,
    PROBLEM_RESPONSE,
    SESSION_PARAMETER,
    WRITE_HEADERS,
    LeanRoute,
    StrictRoute,
    body_of,
)
from app.http.writing import Route, draft_of, receipt_answer, request_key, session_tokens
from app.parts import PartsDep, parts_of
from app.pending.requests import Draft
from app.read.jobs import Page
from ledger import rfc3339
from ledger.errors import InvalidInputError
from ledger.machines.events import JOB_EVENTS, EventType

router = APIRouter(route_class=StrictRoute, tags=["jobs"])
submissions = APIRouter(route_class=LeanRoute, tags=["jobs"])

_ANSWERED: dict[int | str, dict[str, Any]] = {
    201: {
        "model": EventAnswer,
        "headers": {
            **WRITE_HEADERS,
            "Location": {"schema": {"type": "string"}, "description": "The job, to be read without another parameter."},
        },
    },
    **PROBLEM_RESPONSE,
}
_HEADERS = [IDEMPOTENCY_KEY_PARAMETER, SESSION_PARAMETER]

_JOB_ID = re.compile(JOB_ID_PATTERN)

JobIdPath = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="The job.")]


class Submission(NamedTuple):
    """A way to send one event: to which path, checked by which model. ``event`` is None where the body's ``type`` says
    it."""

    path: str
    model: TypeAdapter[Any]
    key_route: Route
    event: EventType | None

    def draft_of(self, body: bytes, job_id: str | None) -> Draft:
        """The event that ``body`` describes.

        Raises:
            InvalidInputError: it describes none.
        """
        return draft_of(parse(self.model, body, EVENT_TAGS), self.event, job_id)


CREATION = Submission("/v1/jobs", JOB_REQUEST, Route.JOBS, JOB_EVENTS["JobCreated"])
REPORT = Submission("/v1/jobs/{job_id}/events", EVENT_REQUEST, Route.JOB_EVENTS, None)
CANCELLATION = Submission(
    "/v1/jobs/{job_id}/cancel", CANCEL_REQUEST, Route.CANCEL, JOB_EVENTS["JobCancellationRequested"]
)


@submissions.post(
    CREATION.path,
    status_code=201,
    responses=_ANSWERED,
    openapi_extra={"requestBody": body_of(JOB_REQUEST), "parameters": _HEADERS},
)
async def submit_job(request: Request) -> Response:
    """Record that a job exists. Without ``job_id`` the node makes one."""
    return await _submit(request, CREATION, None)


@submissions.post(
    REPORT.path,
    status_code=201,
    responses=_ANSWERED,
    openapi_extra={"requestBody": body_of(EVENT_REQUEST), "parameters": _HEADERS},
)
async def report_event(request: Request, job_id: JobIdPath) -> Response:
    """Record what happened to a job."""
    return await _submit(request, REPORT, job_id)


@submissions.post(
    CANCELLATION.path,
    status_code=201,
    responses=_ANSWERED,
    openapi_extra={"requestBody": body_of(CANCEL_REQUEST), "parameters": _HEADERS},
)
async def cancel_job(request: Request, job_id: JobIdPath) -> Response:
    """Record that somebody wants the job to stop."""
    return await _submit(request, CANCELLATION, job_id)


async def _submit(request: Request, submission: Submission, job_id: str | None) -> Response:
    """Take the one event that a request holds. What is plain does not come here: see ``app.http.plain``."""
    parts = parts_of(request)
    parts.check_writable()
    if job_id is not None and _JOB_ID.fullmatch(job_id) is None:
        raise InvalidInputError(f"job_id: must match {JOB_ID_PATTERN}", ("job_id",))
    body = await read_body(request, JSON_MEDIA_TYPE, parts.settings.event_bytes_max)
    draft = await parts.sealing.prepare(submission.draft_of(body, job_id))
    key = parts.sealing.key_of(request_key(request, submission.key_route, body, job_id or ""), (draft,))
    tokens = session_tokens(request)
    if tokens:
        parts.consistency.receive(tokens)
        if job_id is not None:
            await parts.consistency.wait_for_session(tokens)
    receipt = await parts.submitter.submit(draft, key=key)
    return receipt_answer(parts.sessions, receipt)


@router.get("/v1/jobs/{job_id}", responses={200: {"model": JobAnswer}, **PROBLEM_RESPONSE})
async def read_job(
    parts: PartsDep,
    promise: PromiseDep,
    job_id: JobIdPath,
    tenant_id: Annotated[
        ReadableTenantId | None, Query(description="May be left out where only one tenant has a job of this id.")
    ] = None,
    as_of: Annotated[Moment | None, Query(description="Only what had happened by then: an HLC or a time.")] = None,
) -> Response:
    """One job, as fresh as ``consistency`` says, or as it was at ``as_of``."""
    at = moment("as_of", as_of, rfc3339.up_to)
    return json_answer(await parts.job_reader.read(tenant_id, job_id, promise, at))


@router.get("/v1/jobs", responses={200: {"model": JobList}, **PROBLEM_RESPONSE})
async def list_jobs(
    parts: PartsDep,
    promise: PromiseDep,
    tenant_id: Annotated[ReadableTenantId, Query()],
    status: Annotated[JobStatus | None, BeforeValidator(in_upper_case), Query(description="In either case.")] = None,
    since: Annotated[Moment | None, Query(description="Created then or later: an HLC or a time.")] = None,
    until: Annotated[Moment | None, Query(description="Created before: an HLC or a time.")] = None,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Jobs of a tenant, newest first."""
    scope = "/".join((tenant_id, status or "", since or "", until or ""))
    after = cursors.decode_hlc("jobs", scope, cursor)
    first, end = moment("since", since, rfc3339.at_or_after), moment("until", until, rfc3339.at_or_after)
    return _page("jobs", scope, await parts.job_reader.list(tenant_id, promise, status, first, after or end, limit))


@router.get("/v1/jobs/{job_id}/events", responses={200: {"model": JobEventList}, **PROBLEM_RESPONSE})
async def list_job_events(
    parts: PartsDep,
    promise: PromiseDep,
    job_id: JobIdPath,
    tenant_id: Annotated[ReadableTenantId, Query()],
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Chained events of a job in HLC order."""
    scope = f"{tenant_id}/{job_id}"
    after = cursors.decode_hlc("events", scope, cursor)
    return _page("events", scope, await parts.job_reader.list_events(tenant_id, job_id, promise, after, limit))


def _page(name: str, scope: str, page: Page) -> Response:
    following = None if page.last is None else cursors.encode(name, scope, *page.last)
    return json_answer({"items": page.items, "next_cursor": following, "consistency": page.consistency})


# In front: routes are tried in order, and of all requests most are these.
router.routes[:0] = submissions.routes

"""``/v1/jobs``: submit, report, cancel, read, list."""

from __future__ import annotations

import re
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import TypeAdapter

from app.http import cursor as cursors
from app.http.answers import EventAnswer, JobAnswer, JobEventList, JobList, JobStatus, json_answer
from app.http.body import JSON_MEDIA_TYPE, parse, read_body
from app.http.fields import HLC_PATTERN, JOB_ID_PATTERN, CursorText, Limit, ReadableTenantId, WholeNumber
from app.http.requests import CANCEL_REQUEST, EVENT_REQUEST, EVENT_TAGS, JOB_REQUEST
from app.http.routing import (
    IDEMPOTENCY_KEY_PARAMETER,
    PROBLEM_RESPONSE,
    SESSION_PARAMETER,
    LeanRoute,
    StrictRoute,
    body_of,
)
from app.http.writing import Route, draft_of, receipt_answer, request_key, session_tokens
from app.parts import PartsDep, parts_of
from app.read.consistency import ReadLevel
from app.read.jobs import state_of
from app.session import decode_header
from app.store import chain_reads, reads
from app.store.reading import reading
from ledger import jobs as job_fold
from ledger.errors import InvalidInputError, JobNotFoundError, TenantNotFoundError
from ledger.events import JOB_EVENTS, EventType
from ledger.hlc import Hlc

router = APIRouter(route_class=StrictRoute, tags=["jobs"])
submissions = APIRouter(route_class=LeanRoute, tags=["jobs"])

STALENESS_MS_MAX = 86_400_000
_ANSWERED: dict[int | str, dict[str, Any]] = {
    201: {
        "model": EventAnswer,
        "headers": {
            "Tally-Session": {"schema": {"type": "string"}},
            "Location": {"schema": {"type": "string"}},
            "Idempotent-Replay": {"schema": {"type": "string", "enum": ["true"]}, "required": False},
        },
    },
    **PROBLEM_RESPONSE,
}
_HEADERS = [IDEMPOTENCY_KEY_PARAMETER, SESSION_PARAMETER]

_JOB_ID = re.compile(JOB_ID_PATTERN)

JobIdPath = Annotated[str, Path(pattern=JOB_ID_PATTERN)]


@submissions.post(
    "/v1/jobs",
    status_code=201,
    responses=_ANSWERED,
    openapi_extra={"requestBody": body_of(JOB_REQUEST), "parameters": _HEADERS},
)
async def submit_job(request: Request) -> Response:
    """Record that a job exists. Without ``job_id`` the node makes one."""
    return await _submit(request, JOB_REQUEST, Route.JOBS, JOB_EVENTS["JobCreated"], None)


@submissions.post(
    "/v1/jobs/{job_id}/events",
    status_code=201,
    responses=_ANSWERED,
    openapi_extra={"requestBody": body_of(EVENT_REQUEST), "parameters": _HEADERS},
)
async def report_event(request: Request, job_id: JobIdPath) -> Response:
    """Record what happened to a job."""
    return await _submit(request, EVENT_REQUEST, Route.JOB_EVENTS, None, job_id)


@submissions.post(
    "/v1/jobs/{job_id}/cancel",
    status_code=201,
    responses=_ANSWERED,
    openapi_extra={"requestBody": body_of(CANCEL_REQUEST), "parameters": _HEADERS},
)
async def cancel_job(request: Request, job_id: JobIdPath) -> Response:
    """Record that somebody wants the job to stop."""
    return await _submit(request, CANCEL_REQUEST, Route.CANCEL, JOB_EVENTS["JobCancellationRequested"], job_id)


async def _submit(
    request: Request, adapter: TypeAdapter[Any], route: Route, event: EventType | None, job_id: str | None
) -> Response:
    """Take the one event that a request holds; its ``type`` says which when ``event`` does not."""
    parts = parts_of(request)
    parts.check_writable()
    if job_id is not None and _JOB_ID.fullmatch(job_id) is None:
        raise InvalidInputError(f"job_id: must match {JOB_ID_PATTERN}", ("job_id",))
    bytes_max = min(parts.settings.http.body_bytes_max, parts.settings.wal.record_bytes_max)
    body = await read_body(request, JSON_MEDIA_TYPE, bytes_max)
    given = parse(adapter, body, EVENT_TAGS)
    draft = await parts.sealing.prepare(draft_of(given, event, job_id))
    key = parts.sealing.key_of(request_key(request, route, body, job_id or ""), (draft,))
    tokens = session_tokens(request)
    if tokens:
        parts.consistency.receive(tokens)
        if job_id is not None:
            await parts.consistency.wait_for_session(tokens)
    receipt = await parts.submitter.submit(draft, key=key)
    return receipt_answer(receipt)


@router.get("/v1/jobs/{job_id}", responses={200: {"model": JobAnswer}, **PROBLEM_RESPONSE})
async def read_job(
    parts: PartsDep,
    job_id: JobIdPath,
    tenant_id: Annotated[ReadableTenantId, Query()],
    consistency: Annotated[ReadLevel, Query()] = ReadLevel.SESSION,
    max_staleness_ms: Annotated[WholeNumber | None, Query(ge=0, le=STALENESS_MS_MAX)] = None,
    as_of: Annotated[str | None, Query(pattern=HLC_PATTERN)] = None,
    tally_session: Annotated[str | None, Header(json_schema_extra=SESSION_PARAMETER["schema"])] = None,
) -> Response:
    """One job, as fresh as ``consistency`` says, or as it was at ``as_of``."""
    if consistency is ReadLevel.BOUNDED_STALENESS and max_staleness_ms is None:
        raise InvalidInputError("max_staleness_ms: needed with bounded_staleness", ("max_staleness_ms",))
    tokens = decode_header(tally_session)
    parts.consistency.receive(tokens)
    try:
        at = None if as_of is None else Hlc.parse(as_of)
    except InvalidInputError as error:
        raise InvalidInputError(f"as_of: {error}", ("as_of",)) from None
    reader = parts.job_reader
    return json_answer(await reader.read(tenant_id, job_id, consistency, tokens, at, max_staleness_ms or 0))


@router.get("/v1/jobs", responses={200: {"model": JobList}, **PROBLEM_RESPONSE})
async def list_jobs(
    parts: PartsDep,
    tenant_id: Annotated[ReadableTenantId, Query()],
    status: Annotated[JobStatus | None, Query()] = None,
    limit: Annotated[Limit, Query()] = 100,
    cursor: Annotated[CursorText | None, Query()] = None,
) -> Response:
    """Jobs of a tenant, newest first."""
    scope = f"{tenant_id}/{status or ''}"
    after = cursors.decode_hlc("jobs", scope, cursor)
    async with reading(parts.pool) as connection:
        page = await reads.list_jobs(connection, tenant_id, status, after, limit)
        if not page.states and not await chain_reads.tenant_exists(connection, tenant_id):
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    following = cursors.encode("jobs", scope, *page.last_created) if page.more and page.last_created else None
    states = await parts.revealing.states(tenant_id, [state_of(tenant_id, state) for state in page.states])
    items = [{"tenant_id": tenant_id, **job_fold.view(state)} for state in states]
    return json_answer({"items": items, "next_cursor": following})


@router.get("/v1/jobs/{job_id}/events", responses={200: {"model": JobEventList}, **PROBLEM_RESPONSE})
async def list_job_events(
    parts: PartsDep,
    job_id: JobIdPath,
    tenant_id: Annotated[ReadableTenantId, Query()],
    limit: Annotated[Limit, Query()] = 100,
    cursor: Annotated[CursorText | None, Query()] = None,
) -> Response:
    """Chained events of a job in HLC order."""
    scope = f"{tenant_id}/{job_id}"
    after = cursors.decode_hlc("events", scope, cursor)
    async with reading(parts.pool) as connection:
        events, more = await reads.list_job_events(connection, tenant_id, job_id, after, limit)
        if not events and not await reads.job_exists(connection, tenant_id, job_id):
            raise JobNotFoundError(f"tenant {tenant_id} has no job {job_id}")
    following = None
    if more:
        last = events[-1]
        following = cursors.encode("events", scope, last.hlc_physical, last.hlc_logical, last.hlc_node)
    payloads = await parts.revealing.payloads(tenant_id, events)
    items = [_event_item(event, payload) for event, payload in zip(events, payloads, strict=True)]
    return json_answer({"items": items, "next_cursor": following})


def _event_item(event: reads.EventRow, shown: object) -> dict[str, object]:
    payload = orjson.loads(event.payload)
    return {
        "seq": event.seq,
        "hlc": event.t_hlc,
        "type": payload.get("type") if isinstance(payload, dict) else None,
        "action": event.action,
        "payload": shown,
        "payload_digest": event.payload_digest,
        "chain_link": event.chain_link,
    }


# In front: routes are tried in order, and of all requests most are these.
router.routes[:0] = submissions.routes

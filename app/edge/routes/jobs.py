"""``/v1/jobs``: submit, report, cancel, read, list and search; a list is a page or, for other programs, all jobs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BeforeValidator, Field

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import JSON_MEDIA_TYPE, json_answer, streamed
from app.edge.forms.body import NDJSON_MEDIA_TYPE, body_of
from app.edge.forms.fields import (
    JOB_ID_PATTERN,
    ActorName,
    CursorQuery,
    FieldName,
    Limit,
    Moment,
    Name,
    ReadableTenantId,
    TenantQuery,
    WholeNumber,
    moment,
)
from app.edge.forms.lists import (
    CSV_JOB_COLUMNS,
    CSV_MEDIA_TYPE,
    Cursors,
    csv_head,
    csv_rows,
    hlc_position,
    media_type_of,
    ndjson,
    page,
)
from app.edge.routing import (
    PROBLEM_RESPONSE,
    SESSION_PARAMETER,
    WRITE_HEADERS,
    WRITE_PARAMETERS,
    LeanRoute,
    StrictRoute,
    answered,
)
from app.edge.writes import CANCELLATION, CREATION, REPORT, EventWrites, Write, shown_session
from app.read.consistency import Consistency, Promise, ReadLevel
from app.read.jobs import JobReader, Page
from app.runtime.answers import HexHash, HlcText, JobId, TimeOfHlc, shape
from app.runtime.answers.jobs import DurabilityAnswer, JobAnswer, JobEventList, JobList, JobStatus, JobSummary
from app.runtime.principals import Right
from app.runtime.state.session import SessionTokens
from app.store.jobs.figures import BY_DAY, BY_DC, BY_HOUR, BY_STATUS, ERROR, Wanted
from app.store.jobs.order import ListRange, Order, Position
from ledger import rfc3339
from ledger.errors import InvalidInputError, refuse, reported_as
from ledger.facts.statuses import STATUSES
from ledger.machines.job_figures import HOUR_MS
from ledger.machines.job_search import (
    CONDITIONS_MAX,
    TRACE,
    VALUE_CHARACTERS_MAX,
    Direction,
    FieldIs,
    JobFilter,
    Sort,
    check_field,
    field_is,
)
from ledger.positions import Epoch, Lsn

router = APIRouter(route_class=StrictRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)
submissions = APIRouter(route_class=LeanRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)


ChainPlace = shape(
    "ChainPlace",
    "Where an event stands in its tenant's chain.",
    seq=int,
    chain_link=HexHash,
    prev_chain_link=HexHash | None,
)

EventAnswer = shape(
    "EventAnswer",
    "An event that was taken. ``chain`` is null when the answer came before chaining. ``home_region`` is the region\n"
    "that made the job's id: null if a caller chose the id, or a region that is neither this one nor a peer's made it.",
    job_id=JobId,
    home_region=str | None,
    tenant_id=str,
    type=str,
    action=str,
    hlc=HlcText,
    at=TimeOfHlc,
    epoch=Epoch,
    lsn=Lsn,
    fence_token=int,
    durability=DurabilityAnswer,
    chain=ChainPlace | None,
    session=str,
)


_EVENTS = Cursors("events", hlc_position)
_CANCELLATIONS = Cursors("cancellations", hlc_position)

JobIdPath = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="The job.")]


def _described(write: Write) -> dict[str, Any]:
    """The description of the route of ``write``."""
    return {
        "status_code": 201,
        "responses": answered(
            EventAnswer,
            201,
            headers={
                **WRITE_HEADERS,
                "Location": {
                    "schema": {"type": "string"},
                    "description": "The job, to be read without another parameter.",
                },
            },
        ),
        "openapi_extra": {"requestBody": body_of(write.form), "parameters": WRITE_PARAMETERS},
    }


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
        ReadLevel, BeforeValidator(str.lower), Query(description="How fresh the answer must be.")
    ] = ReadLevel.SESSION,
    max_staleness_ms: Annotated[
        WholeNumber | None, Query(ge=0, le=86_400_000, description="Needed with bounded_staleness.")
    ] = None,
    tally_session: Annotated[
        str | None,
        Header(description=SESSION_PARAMETER["description"], json_schema_extra=SESSION_PARAMETER["schema"]),
    ] = None,
) -> Promise:
    """The consistency promise that the request asks for; the clock learns the times of its session.

    Raises:
        InvalidInputError: a token is malformed, or a bound is missing.
        ClockSkewError: the time of a token lies too far ahead.
    """
    if consistency is ReadLevel.BOUNDED_STALENESS and max_staleness_ms is None:
        raise InvalidInputError("max_staleness_ms: needed with bounded_staleness", ("max_staleness_ms",))
    return Promise(consistency, shown_session(accepted, sessions, freshness), max_staleness_ms or 0)


PromiseDep = Annotated[Promise, Depends(promise_of)]

_COUNTED_BY: Final = (BY_STATUS, BY_HOUR, BY_DAY, BY_DC, ERROR)
"""What a summary counts by, besides a search field."""


def within_hours(wanted: Wanted, since: str | None, until: str | None) -> Wanted:
    """``wanted`` of the hours from that of ``since`` on that begin before ``until``.

    Raises:
        InvalidInputError: one is neither a time nor an HLC.
    """
    first, end = moment("since", since, rfc3339.at_or_after), moment("until", until, rfc3339.at_or_after)
    if first is not None:
        # The answer names both hours.
        wanted = wanted._replace(first=max(0, min(first.physical_ms, rfc3339.LAST_MS)) // HOUR_MS)
    if end is not None and end.physical_ms <= rfc3339.LAST_MS:
        wanted = wanted._replace(below=-(-max(0, end.physical_ms) // HOUR_MS))
    return wanted


def check_counted_field(by: str, others: Sequence[str] = ()) -> None:
    """Return if jobs can be counted by the values of this field, which is none of ``others`` that ``by`` may be.

    Raises:
        InvalidInputError: they cannot.
    """
    said = f"by is none of {', '.join(others)}, and no search field" if others else "by"
    with reported_as(partial(InvalidInputError, path=("by",)), said, InvalidInputError):
        check_field(by)
        refuse(InvalidInputError, (by == TRACE, f"{TRACE} is another one for nearly every job"))


@router.get("/v1/jobs/summary", responses=answered(JobSummary))
async def summarise_jobs(
    accepted: AcceptedDep,
    jobs: Service[JobReader],
    promise: PromiseDep,
    tenant_id: TenantQuery,
    by: Annotated[
        FieldName,
        Query(description="`status`, `hour`, `day`, `dc`, `error`, or a declared search field inside `spec`."),
    ] = BY_STATUS,
    dc: Annotated[Name | None, Query(description="Only jobs assigned to this data centre, or accepted by it.")] = None,
    since: Annotated[
        Moment | None, Query(description="Only jobs from the hour of this HLC or time on, or later.")
    ] = None,
    until: Annotated[
        Moment | None, Query(description="Only jobs of the hours that begin before this HLC or time.")
    ] = None,
    limit: Annotated[Limit, Query()] = 100,
) -> Response:
    """How many jobs of a tenant have which status, how long they ran, and with which errors they failed: by status,
    hour or day of creation, data centre, error, or value of a search field. As fresh as a list."""
    wanted = within_hours(Wanted(tenant_id, by, dc or ""), since, until)
    if by not in _COUNTED_BY:
        check_counted_field(by, _COUNTED_BY)
    found = await jobs.summary(promise, wanted, limit)
    await accepted.record_read(tenant_id, jobs=found["all"]["jobs"])
    return json_answer(found)


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
    found = await jobs.read(
        tenant_id, job_id, promise, moment("as_of", as_of, rfc3339.up_to), accepted.caller.patterns(Right.READ)
    )
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
    return page(
        found.items, _CANCELLATIONS.next(scope, found.last), damaged=found.damaged, consistency=found.consistency
    )


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
    found = await jobs.list_events(tenant_id, job_id, promise, _EVENTS.at(scope, cursor), limit)
    await accepted.record_read(tenant_id, job_id=job_id, events=len(found.items))
    return page(found.items, _EVENTS.next(scope, found.last), consistency=found.consistency)


LIMIT = 100
"""Jobs of a page where the request does not say how many."""
STREAMED_AT_ONCE = 500
"""Jobs that are in memory at once while all are sent."""
NEXT_CURSOR = "Tally-Next-Cursor"
DAMAGED = "DAMAGED"
"""In the place of a status, in a row of a table that names a damaged job."""

_EMPTY: Final = dict.fromkeys(CSV_JOB_COLUMNS)
_VARIES: Final = {"Vary": "Accept"}
_FORMS = answered(
    JobList,
    description="Jobs, newest first, or in another order.",
    headers={
        NEXT_CURSOR: {
            "schema": {"type": "string"},
            "required": False,
            "description": "Of a page as CSV or NDJSON: the cursor of the next one. Absent where there is none.",
        }
    },
)
_FORMS[200]["content"] |= {form: {"schema": {"type": "string"}} for form in (NDJSON_MEDIA_TYPE, CSV_MEDIA_TYPE)}


def _statuses(values: list[str]) -> list[str]:
    """``values`` in upper case, each a status.

    Raises:
        ValueError: one is none.
    """
    named = [value.upper() for value in values]
    if unknown := [name for name in named if name not in STATUSES]:
        raise ValueError(f"there is no status {unknown[0][:50]!r}; there are {', '.join(STATUSES)}")
    return named


StatusQuery = Annotated[
    list[JobStatus],
    BeforeValidator(_statuses),
    Field(max_length=len(STATUSES)),
    Query(description="In either case; several are any of these."),
]
WhereQuery = Annotated[
    list[str],
    Field(max_length=CONDITIONS_MAX),
    Query(
        description="FIELD:VALUE, such as spec.image:a/b:1 or spec.labels.team:ml; several must all hold. Private "
        "values are found by nothing."
    ),
]
ErrorQuery = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=VALUE_CHARACTERS_MAX,
        description="Part of the error with which they ended; letters of ASCII in either case.",
    ),
]

IdPartQuery = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=VALUE_CHARACTERS_MAX,
        description="Part of their id or of their name; letters of ASCII in either case.",
    ),
]


@router.get("/v1/jobs", responses=_FORMS)
async def list_jobs(
    request: Request,
    jobs: Service[JobReader],
    promise: PromiseDep,
    accepted: AcceptedDep,
    tenant_id: TenantQuery,
    status: StatusQuery = [],  # noqa: B006 (the framework makes a new one)
    actor: Annotated[
        ActorName | None, Query(description="Created by this principal. One whose name is private is not found.")
    ] = None,
    since: Annotated[Moment | None, Query(description="Created then or later: an HLC or a time.")] = None,
    until: Annotated[Moment | None, Query(description="Created before: an HLC or a time.")] = None,
    dc: Annotated[Name | None, Query(description="Assigned to this data centre, or accepted by it.")] = None,
    where: WhereQuery = [],  # noqa: B006
    error: ErrorQuery = None,
    id_part: IdPartQuery = None,
    name: Annotated[
        str | None, Query(min_length=1, max_length=VALUE_CHARACTERS_MAX, description="Of this name, the whole of it.")
    ] = None,
    in_conflict: Annotated[bool, Query(description="With a conflict, such as two creations that differ.")] = False,
    sort: Annotated[
        Sort,
        Query(description="What the list goes by. By `ended_at` only jobs that ended, by `run_ms` those that ran."),
    ] = Sort.CREATED_AT,
    direction: Annotated[
        Direction,
        Query(alias="order", description="Whether the newest, the last to end or the longest is the first."),
    ] = Direction.DESC,
    limit: Annotated[
        Limit | None, Query(description=f"Most items in the answer; {LIMIT} if left out, as CSV or NDJSON all.")
    ] = None,
    cursor: CursorQuery = None,
) -> Response:
    """Jobs of a tenant, newest first unless `sort` and `order` say otherwise: all, or those of which all is true that
    is asked for. With `Accept: text/csv` or `application/x-ndjson` and no `limit`, every job is sent. A page of what
    `dc`, `where`, `error`, `id_part`, `name` or `in_conflict` ask for, and in other orders `actor`, `since` or `until`,
    may have fewer than `limit` items and still a `next_cursor`: so many jobs are looked at for one. A job of which what
    is stored is not what was chained is not among the items: `damaged` names it and says why. As NDJSON it is a line
    with `damaged` instead of what the job is, as CSV a row whose status is `DAMAGED`."""
    wanted = JobFilter(tuple(dict.fromkeys(status)), actor, dc, _conditions(where), error, id_part, in_conflict, name)
    in_order = Order(sort, direction)
    scope = f"{tenant_id}/{hashlib.sha256(repr((wanted, since, until, *in_order)).encode()).hexdigest()[:32]}"
    cursors = Cursors("jobs", in_order.position_of)
    first, end = moment("since", since, rfc3339.at_or_after), moment("until", until, rfc3339.at_or_after)
    begin = cursors.at(scope, cursor)

    async def page_after(after: Position | None, count: int) -> Page:
        return await jobs.list(tenant_id, promise, wanted, ListRange(in_order, first, end, after), count)

    media_type = media_type_of(request.headers.getlist("accept"))
    if media_type != JSON_MEDIA_TYPE and limit is None:
        return await streamed(
            request,
            accepted,
            _all_pages(media_type, page_after, begin),
            media_type,
            _VARIES,
            tenant_id,
            jobs="all that are found",
        )
    found = await page_after(begin, limit or LIMIT)
    await accepted.record_read(tenant_id, jobs=len(found.items))
    next_cursor = cursors.next(scope, found.last)
    if media_type == JSON_MEDIA_TYPE:
        return page(found.items, next_cursor, headers=_VARIES, damaged=found.damaged, consistency=found.consistency)
    headers = {} if next_cursor is None else {NEXT_CURSOR: next_cursor}
    return Response(_head(media_type) + _rows(media_type, found), headers=_VARIES | headers, media_type=media_type)


def _conditions(texts: Sequence[str]) -> tuple[FieldIs, ...]:
    with reported_as(partial(InvalidInputError, path=("where",)), "where", InvalidInputError):
        return tuple(map(field_is, texts))


async def _all_pages(
    media_type: str, page_after: Callable[[Position | None, int], Awaitable[Page]], begin: Position | None
) -> AsyncGenerator[bytes, None]:
    """Page after page, after an empty piece that is yielded once the first page is read."""
    found = await page_after(begin, STREAMED_AT_ONCE)
    yield b""
    yield _head(media_type)
    while True:
        yield _rows(media_type, found)
        if found.last is None:
            return
        found = await page_after(found.last, STREAMED_AT_ONCE)


def _head(media_type: str) -> bytes:
    return csv_head(CSV_JOB_COLUMNS) if media_type == CSV_MEDIA_TYPE else b""


def _rows(media_type: str, found: Page) -> bytes:
    if media_type == CSV_MEDIA_TYPE:
        named = ({"job_id": each["job_id"], "status": DAMAGED, "error": each["detail"]} for each in found.damaged)
        return csv_rows(CSV_JOB_COLUMNS, [*found.items, *(_EMPTY | each for each in named)])
    return ndjson([*found.items, *({"job_id": each["job_id"], "damaged": each["detail"]} for each in found.damaged)])

"""``GET /v1/jobs``: jobs listed and searched, as a page or, for other programs, all of them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator, Field

from app.edge.accepted import Accepted, AcceptedDep
from app.edge.answers import Streamed, json_answer, started, within
from app.edge.forms import tables
from app.edge.forms.fields import (
    ActorName,
    CursorQuery,
    Limit,
    Moment,
    Name,
    in_upper_case,
    moment,
)
from app.edge.forms.lists import Cursors, hlc_position
from app.edge.middleware import IS_HEAD
from app.edge.routes.jobs import PromiseDep, TenantQuery
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.services import Service
from app.read.jobs import JobReader, Page
from app.runtime.answers.jobs import JobList, JobStatus
from app.store.reads import CreatedHlc
from ledger import rfc3339
from ledger.errors import InvalidInputError
from ledger.facts.statuses import STATUSES
from ledger.machines.job_search import CONDITIONS_MAX, VALUE_CHARACTERS_MAX, FieldIs, JobFilter, field_is

router = APIRouter(route_class=StrictRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)

LIMIT = 100
"""Jobs of a page where the request does not say how many."""
STREAMED_AT_ONCE = 500
"""Jobs that are in memory at once while all are sent."""
NEXT_CURSOR = "Tally-Next-Cursor"
DAMAGED = "DAMAGED"
"""In the place of a status, in a row of a table that names a damaged job."""

_JOBS = Cursors("jobs", hlc_position)
_EMPTY: Final = dict.fromkeys(tables.JOB_COLUMNS)
_VARIES: Final = {"Vary": "Accept"}
_NEXT_CURSOR_HEADER = {
    "schema": {"type": "string"},
    "required": False,
    "description": "Of a page as CSV or NDJSON: the cursor of the next one. Absent where there is none.",
}
_FORMS = answered(JobList, description="Jobs, newest first.", headers={NEXT_CURSOR: _NEXT_CURSOR_HEADER})
_FORMS[200]["content"] |= {media_type: {"schema": {"type": "string"}} for media_type in (tables.NDJSON, tables.CSV)}


def _statuses(values: object) -> object:
    """``values`` in upper case, each a status.

    Raises:
        ValueError: one is none.
    """
    named = [in_upper_case(value) for value in values] if isinstance(values, list) else values
    if isinstance(named, list) and (unknown := [name for name in named if name not in STATUSES]):
        raise ValueError(f"there is no status {str(unknown[0])[:50]!r}; there are {', '.join(STATUSES)}")
    return named


@router.get("/v1/jobs", responses=_FORMS)
async def list_jobs(
    request: Request,
    jobs: Service[JobReader],
    promise: PromiseDep,
    accepted: AcceptedDep,
    tenant_id: TenantQuery,
    status: Annotated[
        list[JobStatus],
        BeforeValidator(_statuses),
        Field(max_length=len(STATUSES)),
        Query(description="In either case; several are any of these."),
    ] = [],  # noqa: B006 (the framework makes a new one)
    actor: Annotated[
        ActorName | None, Query(description="Created by this principal. One whose name is private is not found.")
    ] = None,
    since: Annotated[Moment | None, Query(description="Created then or later: an HLC or a time.")] = None,
    until: Annotated[Moment | None, Query(description="Created before: an HLC or a time.")] = None,
    dc: Annotated[Name | None, Query(description="Assigned to this data centre, or accepted by it.")] = None,
    where: Annotated[
        list[str],
        Field(max_length=CONDITIONS_MAX),
        Query(
            description="FIELD:VALUE, such as spec.image:a/b:1 or spec.labels.team:ml; several must all hold. Private "
            "values are found by nothing."
        ),
    ] = [],  # noqa: B006
    error: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=VALUE_CHARACTERS_MAX,
            description="Part of the error with which they ended; letters of ASCII in either case.",
        ),
    ] = None,
    limit: Annotated[
        Limit | None, Query(description=f"Most items in the answer; {LIMIT} if left out, as CSV or NDJSON all.")
    ] = None,
    cursor: CursorQuery = None,
) -> Response:
    """Jobs of a tenant, newest first: all, or those of which all is true that is asked for. With `Accept: text/csv` or
    `application/x-ndjson` and no `limit`, every job is sent. A page of what `dc`, `where` or `error` ask for
    may have fewer than `limit` items and still a `next_cursor`: so many jobs are looked at for one. A job of which what
    is stored is not what was chained is not among the items: `damaged` names it and says why. As NDJSON it is a line
    with `damaged` instead of what the job is, as CSV a row whose status is `DAMAGED`."""
    wanted = JobFilter(tuple(dict.fromkeys(status)), actor, dc, _conditions(where), error)
    scope = f"{tenant_id}/{hashlib.sha256(repr((wanted, since, until)).encode()).hexdigest()[:32]}"
    first, end = moment("since", since, rfc3339.at_or_after), moment("until", until, rfc3339.at_or_after)
    begin = _JOBS.at(scope, cursor) or end

    async def page_below(below: CreatedHlc | None, count: int) -> Page:
        return await jobs.list(tenant_id, promise, wanted, first, below, count)

    media_type = tables.media_type_of(request.headers.getlist("accept"))
    if media_type != tables.JSON and limit is None:
        pieces = within(accepted.quotas.exports.one(accepted.caller.id), _all_pages(media_type, page_below, begin))
        return await _streamed(request, accepted, pieces, media_type, tenant_id)
    found = await page_below(begin, limit or LIMIT)
    await accepted.record_read(tenant_id, jobs=len(found.items))
    next_cursor = _JOBS.next(scope, found.last) if found.last else None
    if media_type == tables.JSON:
        whole = {
            "items": found.items,
            "next_cursor": next_cursor,
            "damaged": found.damaged,
            "consistency": found.consistency,
        }
        return json_answer(whole, headers=_VARIES)
    headers = {} if next_cursor is None else {NEXT_CURSOR: next_cursor}
    return Response(_head(media_type) + _rows(media_type, found), headers=_VARIES | headers, media_type=media_type)


def _conditions(texts: Sequence[str]) -> tuple[FieldIs, ...]:
    try:
        return tuple(map(field_is, texts))
    except InvalidInputError as error:
        raise InvalidInputError(f"where: {error}", ("where",)) from None


async def _streamed(
    request: Request, accepted: Accepted, pieces: AsyncGenerator[bytes, None], media_type: str, tenant_id: str
) -> Response:
    """All that ``pieces`` has, as an answer; it begins once the first page is there, and the read is on record."""
    async with started(request, pieces) as unless_sent:
        await accepted.record_read(tenant_id, jobs="all that are found")
        if request.scope.get(IS_HEAD):
            return Response(headers=_VARIES, media_type=media_type)
        unless_sent.pop_all()
    return Streamed(request, accepted, pieces, media_type, _VARIES)


async def _all_pages(
    media_type: str, page_below: Callable[[CreatedHlc | None, int], Awaitable[Page]], begin: CreatedHlc | None
) -> AsyncGenerator[bytes, None]:
    """Page after page, behind an empty piece that comes once the first one is there."""
    found = await page_below(begin, STREAMED_AT_ONCE)
    yield b""
    yield _head(media_type)
    while True:
        yield _rows(media_type, found)
        if found.last is None:
            return
        found = await page_below(found.last, STREAMED_AT_ONCE)


def _head(media_type: str) -> bytes:
    return tables.csv_head(tables.JOB_COLUMNS) if media_type == tables.CSV else b""


def _rows(media_type: str, found: Page) -> bytes:
    if media_type == tables.CSV:
        named = ({"job_id": each["job_id"], "status": DAMAGED, "error": each["detail"]} for each in found.damaged)
        return tables.csv_rows(tables.JOB_COLUMNS, [*found.items, *(_EMPTY | each for each in named)])
    return tables.ndjson(
        [*found.items, *({"job_id": each["job_id"], "damaged": each["detail"]} for each in found.damaged)]
    )

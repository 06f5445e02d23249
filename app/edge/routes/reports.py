"""``/v1/reports``: a page on the jobs of a tenant, made in the background."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Response

from app.edge.accepted import Accepted, AcceptedDep, Service
from app.edge.answers import json_answer, path_outside
from app.edge.forms.body import json_body
from app.edge.forms.requests import ReportRequest
from app.edge.routes.jobs import PromiseDep, check_counted_field, within_hours
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.read.job_reports import JobReport, JobReports
from app.runtime.answers.jobs import ReportAnswer
from app.runtime.principals import Right
from app.runtime.settings.config import Settings
from app.store.jobs.figures import BY_DAY, BY_DC, BY_HOUR, ERROR, Wanted
from ledger import names, rfc3339

router = APIRouter(route_class=StrictRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)

MEDIA_TYPE: Final = "text/html; charset=utf-8"
HOURS_MAX: Final = 72
"""A report on more hours has a row for each day."""
TIMES_MAX: Final = 400
GROUPS_MAX: Final = 20
"""Most rows of a table: of hours or days, and of other groups."""


@router.post("/v1/reports", status_code=202, responses=answered(ReportAnswer, 202))
async def start_report(
    accepted: AcceptedDep,
    settings: Service[Settings],
    reports: Service[JobReports],
    promise: PromiseDep,
    wanted: Annotated[dict[str, Any], json_body(ReportRequest)],
) -> Response:
    """Start a report on the jobs of a tenant that were created from the hour of `since` on and before `until`: by hour
    or day, data centre, error, and each field of `by`. One is made at a time, as one export of the caller. Beyond
    1,000,000 entries Spark makes it, where it is installed, for a caller who may also `audit`."""
    all_jobs = within_hours(Wanted(wanted["tenant_id"], BY_DAY), wanted.get("since"), wanted.get("until"))
    fields = dict.fromkeys(wanted.get("by", ()))
    for each in fields:
        check_counted_field(each)
    by_time = BY_HOUR if all_jobs.below - all_jobs.first <= HOURS_MAX else BY_DAY
    limits = {all_jobs._replace(by=by_time): TIMES_MAX}
    limits |= {all_jobs._replace(by=each): GROUPS_MAX for each in (BY_DC, ERROR, *fields)}
    with ExitStack() as held:
        held.enter_context(accepted.access.quotas.exports.one(accepted.caller.id))
        may_audit = accepted.caller.may(Right.AUDIT, all_jobs.tenant_id)
        report = reports.start(promise, limits, held, may_audit=may_audit)
    return _being_made(accepted, settings, reports, report)


@router.get(
    "/v1/reports/{report_id}",
    responses={
        200: {
            "description": "The report: one HTML file that loads nothing",
            "content": {MEDIA_TYPE.partition(";")[0]: {"schema": {"type": "string"}}},
        },
        **answered(ReportAnswer, 202, description="It is being made; ask again"),
    },
    response_class=Response,
)
async def read_report(
    accepted: AcceptedDep,
    settings: Service[Settings],
    reports: Service[JobReports],
    report_id: Annotated[
        str, Path(pattern=names.anchored(names.REPORT_ID), description="Its id, from `POST /v1/reports`.")
    ],
) -> Response:
    """The report, or 202 while it is being made. Its node keeps it in memory for an hour, until it restarts; others
    name that node. A report of Spark needs the right `audit`."""
    report = reports.find(report_id)
    accepted.check_tenant(report.tenant_id)
    if report.progress is not None:
        accepted.caller.check(Right.AUDIT, report.tenant_id)
    if not report.making.done():
        return _being_made(accepted, settings, reports, report)
    page = report.making.result()
    await accepted.record_read(report.tenant_id, jobs=page.jobs)
    headers = {
        "Content-Disposition": f'attachment; filename="{report.tenant_id}.report.html"',
        "Content-Security-Policy": "sandbox",
        "Cache-Control": "no-store",
    }
    return Response(page.html, headers=headers, media_type=MEDIA_TYPE)


def _being_made(accepted: Accepted, settings: Settings, reports: JobReports, report: JobReport) -> Response:
    answer = {
        "report_id": report.report_id,
        "tenant_id": report.tenant_id,
        "node_id": reports.node_id,
        "started_at": rfc3339.text_of(report.started_ms),
        "progress": report.progress,
    }
    location = path_outside(accepted.scope, settings.http.root_path, f"/v1/reports/{report.report_id}")
    return json_answer(answer, 202, {"Location": location, "Retry-After": "1"})

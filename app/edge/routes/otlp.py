"""``POST /v1/logs``: log records of OpenTelemetry by OTLP/HTTP, as events of jobs (docs/otlp.md).

A record whose type is one of ``JOB_EVENTS`` is that event, with its fields read from attributes. The answer comes once
each event has reached its level, and says how many records are not on record, and why::

    full success       every record is an event that the ledger holds, by this request or an earlier one
    partial success    all but the rejected records; sent again, those are rejected again
    429, 503           some may be on record: the same request again adds those that are not

The key of an event is made of all that is kept of its record, its nanosecond and its span. So a request that is sent
again, whole or in other parts, adds nothing that is on record.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson
import structlog
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from starlette.types import Scope

from app.edge.accepted import Accepted, AcceptedDep, Service
from app.edge.answers import JSON_MEDIA_TYPE
from app.edge.forms.body import read_body
from app.edge.forms.fields import NAME_CHARACTERS_MAX, TEXT_CHARACTERS_MAX
from app.edge.forms.otlp import (
    DEPTH_MAX,
    PROTOBUF_MEDIA_TYPE,
    Record,
    RecordBoundError,
    failure,
    records_of,
    success,
)
from app.edge.forms.requests import EVENT_LINE, EVENT_TAGS
from app.edge.forms.validation import invalid
from app.edge.problems import cut, dotted
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.writes import Reports, Route, for_each_job
from app.runtime.answers import optional, shape
from app.runtime.settings.config import OtlpSettings, Settings
from app.runtime.sharing import in_turns
from app.runtime.state.node import Node
from app.store.jobs.table import JobKey
from app.write.pending.requests import RequestKey
from ledger import canonical
from ledger.errors import (
    CanonicalError,
    ForbiddenError,
    InvalidInputError,
    JobNotFoundError,
    LedgerError,
    NotReadyError,
    ProblemError,
)
from ledger.facts.events import COMMON_FIELDS, EVENT_FIELDS, JOB_EVENTS, TRACEPARENT, Kind
from ledger.facts.problems import PAYLOAD_TOO_LARGE, Retry

RECORDS_MAX: Final = 30_000
"""Most records, resources and scopes in one request: a Collector joins up to 8192 requests of one record each."""
REASONS_MAX: Final = 8
"""Most reasons in one answer."""
REASON_CHARACTERS_MAX: Final = 300
PREFIX: Final = "tallystick."
ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: (PREFIX + name,) for name in ("type", *EVENT_FIELDS)},
    "job_id": (PREFIX + "job_id", "job.id"),
    "dc_id": (PREFIX + "dc_id", "service.name"),
    "failed_dc": (PREFIX + "failed_dc", "service.name"),
    "error": (PREFIX + "error", "exception.message"),
}
"""By field, the attributes that it is read from: the first that a record has. ``otlp.attributes`` names others."""
NO_EVENT: Final = "about no job: {type} is none of the events of jobs"

log = structlog.get_logger()


class OtlpRoute(StrictRoute):
    """A route that answers problems as OTLP/HTTP demands: a ``Status`` in the encoding of the request, 400 for a body
    that can never be taken, and 503 for each problem that a retry may solve and that has another status, by which an
    exporter would drop the records."""

    def problem(self, problem: Response, scope: Scope) -> Response:
        """The status of a problem."""
        media_type = _media_type(Request(scope))
        content = failure(orjson.loads(problem.body)["detail"], is_protobuf=media_type == PROTOBUF_MEDIA_TYPE)
        kept = {name: value for name, value in problem.headers.items() if not name.startswith("content-")}
        status = {422: 400, 408: 503, 500: 503}.get(problem.status_code, problem.status_code)
        return Response(content, status, kept, media_type=media_type)


LogsRejected = shape(
    "LogsRejected",
    "``ExportLogsPartialSuccess`` of OTLP: how many records are not on record, as text, and why.",
    rejectedLogRecords=str,
    errorMessage=str,
)
LogsAnswer = shape(
    "LogsAnswer",
    "``ExportLogsServiceResponse`` of OTLP; empty if every record is on record.",
    partialSuccess=optional(LogsRejected),
)
LogsFailure = shape("LogsFailure", "``google.rpc.Status``: 429, 502, 503 and 504 are worth a retry.", message=str)
_BINARY: Final = {PROTOBUF_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_LOGS: Final = {"description": "``ExportLogsServiceRequest`` of OTLP; what is not known counts nothing."}
_ANSWERS = answered(LogsAnswer, description="What of the request is not on record, if anything.") | answered(
    LogsFailure, "default", description="Why nothing, or not all, is on record now."
)
for _answer, _more in ((_ANSWERS[200], {}), (_ANSWERS["default"], PROBLEM_RESPONSE["default"]["content"])):
    _answer["content"] |= {**_BINARY, **_more}

router = APIRouter(route_class=OtlpRoute, tags=["events"])


@router.post(
    "/v1/logs",
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra={"requestBody": {"required": True, "content": {JSON_MEDIA_TYPE: {"schema": _LOGS}, **_BINARY}}},
)
async def record_logs(
    request: Request,
    accepted: AcceptedDep,
    node: Service[Node],
    settings: Service[Settings],
    reports: Service[Reports],
) -> Response:
    """Record log records of OpenTelemetry that are events of jobs (OTLP/HTTP, JSON or protobuf, plain or gzip). Records
    that are not on record afterwards are counted as rejected: those about no job, too."""
    node.check_writable()
    media_type = _media_type(request)
    body = await read_body(request, media_type, settings.http.body_bytes_max, takes_gzip=True)
    intake = _Intake(accepted, settings.otlp, reports)
    await intake.read(body, is_protobuf=media_type == PROTOBUF_MEDIA_TYPE)
    intake.admit()
    await for_each_job(intake.jobs, intake.record)
    if intake.unknown is not None:
        raise intake.unknown
    if intake.rejected:
        log.warning("logs_rejected", caller=accepted.caller.id, rejected=intake.rejected, reason=intake.message)
    content = success(intake.rejected, intake.message, is_protobuf=media_type == PROTOBUF_MEDIA_TYPE)
    return Response(content, media_type=media_type)


def _media_type(request: Request) -> str:
    """The encoding of the request and its answer: protobuf where the request says so, else JSON."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return PROTOBUF_MEDIA_TYPE if given == PROTOBUF_MEDIA_TYPE else JSON_MEDIA_TYPE


class LogEvent(NamedTuple):
    """An event of a job that a log record is."""

    given: dict[str, Any]
    key: RequestKey


@dataclass
class _Intake:
    """The records of one request: events by job, and how many are rejected for what."""

    accepted: Accepted
    settings: OtlpSettings
    reports: Reports
    jobs: defaultdict[JobKey, list[LogEvent]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    """Events and bytes of each tenant."""
    rejected: int = 0
    forbidden: ForbiddenError | None = None
    """The first error about a tenant that the caller may not write to."""
    unknown: NotReadyError | None = None
    """The last error about a job whose creation may be on its way. The records of other jobs do not wait for it: a
    creation among them may be what another request waits for."""
    _reasons: Counter[str] = field(default_factory=Counter)

    async def read(self, body: bytes, *, is_protobuf: bool) -> None:
        """Make events of the records of a request, in turns.

        Raises:
            InvalidInputError, ProblemError: as ``records_of``, or too many records.
        """
        parts = 0
        async for record in in_turns(records_of(body, is_protobuf=is_protobuf)):
            parts += 1
            if parts > RECORDS_MAX:
                raise ProblemError(
                    PAYLOAD_TOO_LARGE, f"at most {RECORDS_MAX} records, resources and scopes go into one request"
                )
            if isinstance(record, RecordBoundError):
                self._reject(str(record))
            elif record is not None:
                self._add(record)

    def admit(self) -> None:
        """Charge the events to the quotas of their tenants.

        Raises:
            ForbiddenError: none is of a tenant that the caller may write to.
            QuotaExceededError, RequestTooLargeError: as ``Quotas.admit_tenants``.
        """
        access = self.accepted.access
        if self.forbidden is not None:
            if not self.jobs:
                raise self.forbidden
            access.record_refusal(self.accepted.scope, self.forbidden)
        if access.quotas.bounds_tenants and self.jobs:
            access.quotas.admit_tenants(self.counts, self.sizes)

    async def record(self, job: JobKey, events: Sequence[LogEvent]) -> None:
        """Record the events of one job; one that the ledger refuses for good is rejected.

        Raises:
            LedgerError: the same request may succeed later.
        """
        is_whole = True
        # A thread may have logged the creation of its job behind what others logged of it.
        for event in sorted(events, key=lambda event: event.given["type"] != "JobCreated"):
            try:
                await self.reports.record(event.given, event.key, self.accepted)
            except LedgerError as error:
                if isinstance(error, JobNotFoundError) and is_whole and self.reports.may_be_created(job):
                    self.unknown = NotReadyError(f"job {job[1]} is not known yet; send the records again")
                    return
                if error.problem.retry is Retry.LATER:
                    raise
                self._reject(str(error))
                is_whole = False

    def _add(self, record: Record) -> None:
        try:
            given = event_of(record, self.settings)
            if "tenant_id" not in given and (own := self.accepted.caller.own_tenant) is not None:
                given["tenant_id"] = own
            given = checked(given)
            tenant_id = given["tenant_id"]
            if (tenant_id, given["job_id"]) not in self.jobs:
                self.accepted.check_tenant(tenant_id)
            content = canonical.encode(given)
        except CanonicalError as error:
            self._reject(f"{dotted(error.path)}: {error}")
            return
        except LedgerError as error:
            if isinstance(error, ForbiddenError):
                self.forbidden = self.forbidden or error
            self._reject(str(error))
            return
        self.counts[tenant_id] += 1
        self.sizes[tenant_id] += len(content)
        digest = hashlib.sha256(b"%d\n%b" % (record.at_ns, content))
        key = RequestKey(Route.LOGS, digest.hexdigest(), digest.digest())
        self.jobs[tenant_id, given["job_id"]].append(LogEvent(given, key))

    def _reject(self, reason: str) -> None:
        self.rejected += 1
        reason = cut(reason, REASON_CHARACTERS_MAX)
        if reason in self._reasons or len(self._reasons) < REASONS_MAX:
            self._reasons[reason] += 1

    @property
    def message(self) -> str:
        """The reasons, each with the number of its records."""
        told = [f"{count}: {reason}" for reason, count in self._reasons.items()]
        if others := self.rejected - self._reasons.total():
            told.append(f"{others}: other reasons")
        return "; ".join(told)


def event_of(record: Record, settings: OtlpSettings) -> dict[str, Any]:
    """The event that a record is, unchecked.

    Raises:
        InvalidInputError: it is none.
    """

    def read(name: str) -> Any:
        if name in settings.attributes:
            return _attribute(record, settings.attributes[name], kind_of(name))
        found = (_attribute(record, attribute, kind_of(name)) for attribute in ATTRIBUTES[name])
        return next((value for value in found if value is not None), None)

    named = str(read("type") or record.event_name)
    type_ = settings.types.get(named, named)
    if type_ not in JOB_EVENTS:
        raise InvalidInputError(NO_EVENT.format(type=repr(named) if named else "a record without type"))
    fields = ["job_id", *(each.name for each in (*COMMON_FIELDS, *JOB_EVENTS[type_].fields))]
    given = {name: value for name in dict.fromkeys(fields) if (value := read(name)) is not None}
    if type_ == "JobFailed" and "error" not in given and isinstance(record.body, str):
        given["error"] = _fit(record.body, Kind.TEXT)
    if record.at_ns:
        given["trace_time"] = record.at_ns / 1_000_000_000
    if record.traceparent is not None:
        given[TRACEPARENT] = record.traceparent
    return {"type": type_, **given}


def kind_of(name: str) -> Kind:
    """The kind of a field, or of the type."""
    return EVENT_FIELDS.get(name, Kind.TEXT)


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """``given``, which is a whole event.

    Raises:
        InvalidInputError: it is not: a field is missing, or not of its kind.
    """
    if "tenant_id" not in given:
        raise InvalidInputError("no tenant is named, and the token may write to several, or to all")
    if "job_id" not in given:
        raise InvalidInputError(f"{given['type']} without a job id")
    try:
        event: dict[str, Any] = EVENT_LINE.validate_python(given)
    except ValidationError as error:
        raise invalid(error, EVENT_TAGS, EVENT_LINE) from None
    return event


def _attribute(record: Record, name: str, kind: Kind) -> Any:
    """The value of an attribute as a field of this kind has it; of an object also its members under their own names,
    such as ``tallystick.spec.image``."""
    value = record.attributes.get(name)
    if kind is not Kind.OBJECT:
        return _fit(value, kind)
    members = {key[len(name) + 1 :]: each for key, each in record.attributes.items() if key.startswith(f"{name}.")}
    if not members:
        return value
    if not isinstance(value, dict | None):
        raise InvalidInputError(f"{name}: is a value and an object")
    # Copied, as records share the attributes of their resource.
    found: dict[str, Any] = {} if value is None else deepcopy(value)
    for key in sorted(members):
        *above, last = key.split(".", DEPTH_MAX + 1)
        if len(above) > DEPTH_MAX:
            raise InvalidInputError(f"{name}.{key[:40]}: is nested more than {DEPTH_MAX} deep")
        place = found
        for part in above:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise InvalidInputError(f"{name}.{'.'.join(above)}: is a value and an object")
        if isinstance(place.get(last), dict) or (last in place and isinstance(members[key], dict)):
            raise InvalidInputError(f"{name}.{key}: is given twice")
        place[last] = deepcopy(members[key])
    return found


def _fit(value: Any, kind: Kind) -> Any:
    """A value as an event can have it: loggers write numbers as text, and text of any length."""
    if kind in (Kind.COUNT, Kind.NUMBER) and isinstance(value, str) and re.fullmatch("[0-9]{1,16}", value):
        return int(value)
    if kind in (Kind.NAME, Kind.TEXT, Kind.JOB_ID, Kind.TENANT) and value is not None:
        text = value if isinstance(value, str) else canonical.encode(value).decode()
        limit = {Kind.NAME: NAME_CHARACTERS_MAX, Kind.TEXT: TEXT_CHARACTERS_MAX}.get(kind)
        return text.replace("\0", "")[:limit]
    return value

"""Request bodies, strictly: an unknown field, a number in a string, a null where a value belongs is refused.

An event is checked against exactly one model, chosen by ``type``. Only what identifies it is required; the
other fields of a type may be left out and are then left out of the payload. ``trace_time`` is the time of the
event in a trace that is being replayed, in seconds. ``subject`` says whose the private fields of the event are; it is
never stored.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Discriminator, Field, TypeAdapter, with_config
from typing_extensions import TypedDict, get_type_hints

from app.http.fields import (
    ASSIGNED_DCS_MAX,
    STATS_NAMES_MAX,
    Count,
    FieldName,
    HlcText,
    JobId,
    JsonObject,
    Level,
    Name,
    Number,
    ReadableTenantId,
    StatsName,
    StatsValue,
    TenantId,
    Text,
    TimeText,
)
from ledger.canonical import INTEGER_MAX
from ledger.machines.events import JOB_EVENTS
from ledger.private_fields import FIELDS_MAX

STRICT = ConfigDict(extra="forbid", strict=True)


class _Fact(TypedDict, total=False):
    tenant_id: Required[TenantId]
    fence_token: Count
    trace_time: Number
    subject: Name


class _Creation(_Fact, total=False):
    job_id: JobId
    spec: JsonObject
    assigned_dcs: Annotated[list[Name], Field(max_length=ASSIGNED_DCS_MAX)]


class _Cancellation(_Fact, total=False):
    reason: Text
    requestor: Text


class JobCreated(_Creation, total=False):
    """A job exists."""

    type: Required[Literal["JobCreated"]]


class JobAccepted(_Fact, total=False):
    """A data centre took the job."""

    type: Required[Literal["JobAccepted"]]
    dc_id: Required[Name]
    worker_count: Count


class WorkflowDispatched(_Fact, total=False):
    """A part of the job was sent to a data centre."""

    type: Required[Literal["WorkflowDispatched"]]
    workflow_id: Required[Name]
    dc_id: Required[Name]


class WorkflowCompleted(_Fact, total=False):
    """A part of the job is done."""

    type: Required[Literal["WorkflowCompleted"]]
    workflow_id: Required[Name]
    dc_id: Required[Name]


class JobProgressReported(_Fact, total=False):
    """How far a data centre has come; totals, not differences."""

    type: Required[Literal["JobProgressReported"]]
    dc_id: Required[Name]
    completed: Count
    failed: Count


class JobCancellationRequested(_Cancellation, total=False):
    """Somebody wants the job to stop."""

    type: Required[Literal["JobCancellationRequested"]]


class JobCancellationAcked(_Fact, total=False):
    """A data centre has stopped its part of the job."""

    type: Required[Literal["JobCancellationAcked"]]
    dc_id: Required[Name]
    workflows_cancelled: Count


class JobCompleted(_Fact, total=False):
    """The job is done."""

    type: Required[Literal["JobCompleted"]]
    final_status: Text
    aggregate_metrics: JsonObject


class JobFailed(_Fact, total=False):
    """The job went wrong."""

    type: Required[Literal["JobFailed"]]
    error: Text
    failed_dc: Name


class JobTimedOut(_Fact, total=False):
    """The job took too long."""

    type: Required[Literal["JobTimedOut"]]
    timeout_type: Text
    last_progress_hlc: HlcText


@with_config(STRICT)
class JobRequest(_Creation, total=False):
    """Body of ``POST /v1/jobs``."""

    durability: Level


@with_config(STRICT)
class CancelRequest(_Cancellation, total=False):
    """Body of ``POST /v1/jobs/{job_id}/cancel``."""

    durability: Level


@with_config(STRICT)
class SnapshotRequest(TypedDict):
    """Body of ``POST /v1/snapshots``."""

    tenant_id: ReadableTenantId


Statement = Annotated[dict[str, Any], Field(description="DSSE envelope by a key kept elsewhere: docs/formats/keys.md")]


@with_config(STRICT)
class AcknowledgeRequest(TypedDict, total=False):
    """Body of ``POST /v1/chain/acknowledge``."""

    tenant_id: Required[ReadableTenantId]
    reason: Required[Annotated[str, Field(min_length=1, max_length=1000)]]
    kind: Annotated[str, Field(min_length=1, max_length=40)]
    seq: Annotated[int, Field(ge=0, le=2**63 - 1)]


@with_config(STRICT)
class RotateRequest(TypedDict, total=False):
    """Body of ``POST /v1/keys/rotate``."""

    new_key_uri: Annotated[str, Field(min_length=1, max_length=2048)]
    log_key: bool


@with_config(STRICT)
class RevokeRequest(TypedDict, total=False):
    """Body of ``POST /v1/keys/{key_id}/revoke``."""

    from_hlc: HlcText
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    statement: Statement


@with_config(STRICT)
class AdmitRequest(TypedDict, total=False):
    """Body of ``POST /v1/keys/{key_id}/admit``."""

    statement: Statement


@with_config(STRICT)
class ExportRequest(TypedDict, total=False):
    """Body of ``POST /v1/bundles/export``."""

    tenant_id: Required[ReadableTenantId]
    from_seq: Annotated[int, Field(ge=1, le=INTEGER_MAX)]
    to_seq: Annotated[int, Field(ge=1, le=INTEGER_MAX)]


@with_config(STRICT)
class PrivacyRequest(TypedDict, total=False):
    """Body of ``PUT /v1/tenants/{tenant_id}/privacy``; ``subject`` is the field whose value names the person."""

    fields: Required[Annotated[list[FieldName], Field(max_length=FIELDS_MAX)]]
    subject: FieldName | None


@with_config(STRICT)
class ErasureRequest(TypedDict, total=False):
    """Body of ``POST /v1/tenants/{tenant_id}/erasures``; ``reason`` goes on record as it is."""

    subject: Required[Name]
    reason: Text


@with_config(STRICT)
class StatsReport(TypedDict, total=False):
    """Body of ``POST /v1/stats``, or a line of it: what one data centre, or one workflow there, says of a job.

    ``completed`` and ``failed`` are totals so far, as in JobProgressReported. ``counts`` is what happened in the
    ``interval_ms`` before ``time``, and is summed. ``values`` is what was measured then, and never is. Without a time
    it is that of arrival.
    """

    tenant_id: Required[TenantId]
    job_id: Required[JobId]
    dc_id: Required[Name]
    workflow_id: Name
    time: TimeText
    time_ms: Count
    completed: Count
    failed: Count
    interval_ms: Count
    counts: Annotated[dict[StatsName, Count], Field(max_length=STATS_NAMES_MAX)]
    values: Annotated[dict[StatsName, StatsValue], Field(max_length=STATS_NAMES_MAX)]


_ABOUT_A_JOB = (
    JobAccepted,
    WorkflowDispatched,
    WorkflowCompleted,
    JobProgressReported,
    JobCancellationRequested,
    JobCancellationAcked,
    JobCompleted,
    JobFailed,
    JobTimedOut,
)
EVENT_TAGS = frozenset(JOB_EVENTS)
"""Parts of an error's path that stand there because a model was chosen by ``type``."""


def _variants(models: tuple[Any, ...], suffix: str, **added: Any) -> list[Any]:
    """Strict forms of ``models``, each with the fields that one place adds to them."""
    variants = []
    for model in models:
        variant = TypedDict(  # type: ignore[misc]
            model.__name__ + suffix, {**get_type_hints(model, include_extras=True), **added}, total=False
        )
        variant.__doc__ = model.__doc__
        variants.append(with_config(STRICT)(variant))
    return variants


def _by_type(variants: list[Any]) -> TypeAdapter[Any]:
    union: Any = Annotated[reduce(or_, variants), Discriminator("type")]
    return TypeAdapter(union)


JOB_REQUEST: TypeAdapter[Any] = TypeAdapter(JobRequest)
CANCEL_REQUEST: TypeAdapter[Any] = TypeAdapter(CancelRequest)
STATS_REPORT: TypeAdapter[Any] = TypeAdapter(StatsReport)
EVENT_REQUEST = _by_type(_variants(_ABOUT_A_JOB, "Request", durability=Level))
"""Body of ``POST /v1/jobs/{job_id}/events``: the job stands in the path."""
EVENT_LINE = _by_type([*_variants((JobCreated,), "Line"), *_variants(_ABOUT_A_JOB, "Line", job_id=Required[JobId])])
"""A line of ``POST /v1/events``: the job stands in the line, the level in the query."""

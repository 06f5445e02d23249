"""Request bodies, strictly: an unknown field, a number in a string, a null where a value belongs is refused.

An event is checked against exactly one model, chosen by ``type``. Only what identifies it is required; the
other fields of a type may be left out and are then left out of the payload. ``trace_time`` is the time of the
event in a trace that is being replayed, in seconds. ``subject`` says whose the private fields of the event are; it is
never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, Required, get_args, get_origin

from pydantic import ConfigDict, Discriminator, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from app.edge.forms.fields import (
    ASSIGNED_DCS_MAX,
    NAME_CHARACTERS_MAX,
    STATS_NAMES_MAX,
    TEXT_CHARACTERS_MAX,
    Count,
    FieldName,
    HlcText,
    JobId,
    JsonObject,
    Level,
    Name,
    Number,
    PrincipalName,
    ReadableTenantId,
    RightName,
    StatsName,
    StatsValue,
    TenantId,
    Text,
    TimeText,
)
from app.runtime.principals import Right
from app.runtime.settings.types import PATTERNS_MAX, FetchedUrl, TenantsPattern
from app.trust.access.console_sessions import TOKEN_BYTES_MAX
from ledger import names
from ledger.canonical import INTEGER_MAX
from ledger.facts.events import JOB_EVENTS
from ledger.machines.job_search import FIELDS_MAX as SEARCH_FIELDS_MAX
from ledger.private_fields import FIELDS_MAX

ActionName = Annotated[str, Field(pattern="^[A-Z][A-Z_]{0,63}$", examples=["COMPLETE"])]
WEBHOOK_ACTIONS_MAX = 64

STRICT = ConfigDict(extra="forbid", strict=True)
ACCELERATORS_MAX = 64
GANG_MEMBERS_MAX = 1024


_DcNames = Annotated[list[Name], Field(max_length=ASSIGNED_DCS_MAX)]
_FACT = {"tenant_id": Required[TenantId], "fence_token": Count, "trace_time": Number, "subject": Name}
"""What every event may have."""
_CREATION = {
    "job_id": JobId,
    "spec": JsonObject,
    "assigned_dcs": _DcNames,
}
_CANCELLATION = {"reason": Text, "requestor": Text}
_OF_A_WORKFLOW = {"workflow_id": Required[Name], "dc_id": Required[Name]}
_EVENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "JobCreated": ("A job exists.", _CREATION),
    "JobAccepted": ("A data centre took the job.", {"dc_id": Required[Name], "worker_count": Count}),
    "WorkflowDispatched": ("A part of the job was sent to a data centre.", _OF_A_WORKFLOW),
    "WorkflowCompleted": ("A part of the job is done.", _OF_A_WORKFLOW),
    "JobProgressReported": (
        "How far a data centre has come; totals, not differences.",
        {"dc_id": Required[Name], "completed": Count, "failed": Count},
    ),
    "JobCancellationRequested": ("Somebody wants the job to stop.", _CANCELLATION),
    "JobCancellationAcked": (
        "A data centre has stopped its part of the job.",
        {"dc_id": Required[Name], "workflows_cancelled": Count},
    ),
    "JobCompleted": ("The job is done.", {"final_status": Text, "aggregate_metrics": JsonObject}),
    "JobFailed": ("The job went wrong.", {"error": Text, "failed_dc": Name}),
    "JobTimedOut": ("The job took too long.", {"timeout_type": Text, "last_progress_hlc": HlcText}),
}
"""What each type of event says, and the fields that it may have beside those of all."""
assert _EVENTS.keys() == JOB_EVENTS.keys()
EVENT_TAGS = frozenset(_EVENTS)
"""Parts of an error's path that stand there because a model was chosen by ``type``."""


def _fact(name: str, says: str, fields: Mapping[str, Any], **more: Any) -> Any:
    """The strict form of an event with these fields and those of all."""
    form = TypedDict(name, {**_FACT, **fields, **more}, total=False)  # type: ignore[misc]
    form.__doc__ = says
    return with_config(STRICT)(form)


def _event(name: str, suffix: str, **more: Any) -> Any:
    """The strict form of one type of event, with the fields that one place adds to it."""
    says, fields = _EVENTS[name]
    return _fact(name + suffix, says, fields, type=Required[Literal[name]], **more)


def _by_type(forms: Sequence[Any]) -> TypeAdapter[Any]:
    union: Any = Annotated[reduce(or_, forms), Discriminator("type")]
    return TypeAdapter(union)


_ABOUT_A_JOB = [name for name in _EVENTS if name != "JobCreated"]
JOB_REQUEST: TypeAdapter[Any] = TypeAdapter(
    _fact("JobRequest", "Body of ``POST /v1/jobs``.", _CREATION, durability=Level)
)
CANCEL_REQUEST: TypeAdapter[Any] = TypeAdapter(
    _fact("CancelRequest", "Body of ``POST /v1/jobs/{job_id}/cancel``.", _CANCELLATION, durability=Level)
)
EVENT_REQUEST = _by_type([_event(name, "Request", durability=Level) for name in _ABOUT_A_JOB])
"""Body of ``POST /v1/jobs/{job_id}/events``: the job stands in the path."""
EVENT_LINE = _by_type(
    [_event("JobCreated", "Line"), *(_event(name, "Line", job_id=Required[JobId]) for name in _ABOUT_A_JOB)]
)
"""A line of ``POST /v1/events``: the job stands in the line, the level in the query."""


def _form(name: str) -> tuple[object, ...]:
    """What ``native.event_lines`` needs to know of the lines of one type: the fields that it can check itself. A line
    that has others is left to ``EVENT_LINE``."""
    fields = []
    for field, says in {**_FACT, **_EVENTS[name][1]}.items():
        is_required = get_origin(says) is Required
        kind = next(
            (form for given, form in _CHECKED_FAST if given is (get_args(says)[0] if is_required else says)), None
        )
        if kind is not None and field not in _KEPT_APART:
            fields.append((field, *kind, int(is_required)))
        assert kind is not None or not is_required
    return name, JOB_EVENTS[name].record_type, name == "JobCreated", tuple(fields)


_KEPT_APART = frozenset({"tenant_id", "job_id", "subject"})
_CHECKED_FAST: Sequence[tuple[Any, tuple[int, int, int, int]]] = (
    (TenantId, (ord("s"), 1, 63, 0)),
    (Name, (ord("s"), 1, NAME_CHARACTERS_MAX, 0)),
    (Text, (ord("s"), 0, TEXT_CHARACTERS_MAX, 0)),
    (Count, (ord("i"), 0, INTEGER_MAX, 0)),
    (JsonObject, (ord("o"), 0, 0, 0)),
    (_DcNames, (ord("l"), 1, NAME_CHARACTERS_MAX, ASSIGNED_DCS_MAX)),
)
"""Kinds of value: what JSON calls it, the least and the most of its characters or of itself, and how many at most."""
EVENT_FORMS = tuple(map(_form, _EVENTS))
"""``EVENT_LINE`` for the lines that most are."""


PROMISE_PATTERN = names.anchored(names.PROMISE_NAME)
PromiseName = Annotated[str, Field(pattern=PROMISE_PATTERN, examples=["capsule-17"])]
"""A capsule, gang, node, mission or module."""
HeldName = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,200}$", examples=["team-ml"])]
"""A resource that is leased, or who has a quota."""
_Accelerators = Annotated[dict[Name, Count], Field(max_length=ACCELERATORS_MAX)]


@with_config(STRICT)
class ResourcesGiven(TypedDict, total=False):
    """An amount in each dimension; what is left out is 0."""

    cpu_millis: Count
    memory_bytes: Count
    disk_bytes: Count
    disk_bw_bps: Count
    accelerators: _Accelerators


def _kind(kind: str, says: str, **fields: Any) -> Any:
    """The strict form of one kind of commitment or precondition."""
    form = TypedDict(kind.replace("None", "NoPrecondition"), {"kind": Required[Literal[kind]], **fields}, total=False)  # type: ignore[misc]
    form.__doc__ = says
    return with_config(STRICT)(form)


_PLACED = {
    "capsule": Required[PromiseName],
    "node": Required[PromiseName],
    "reservation": Required[ResourcesGiven],
    "limit": ResourcesGiven,
}


@with_config(STRICT)
class GangMemberGiven(TypedDict, total=False):
    """One capsule of a gang."""

    capsule: Required[PromiseName]
    node: Required[PromiseName]
    reservation: Required[ResourcesGiven]
    limit: ResourcesGiven


_OF_A_MODULE = {"mission": Required[PromiseName], "module": Required[PromiseName], "epoch": Required[Count]}
_COMMITMENTS = {
    "Placement": ("A capsule runs on a node, which keeps the reservation for it.", _PLACED),
    "GangPlacement": (
        "All of these capsules are placed, or none.",
        {
            "gang": Required[PromiseName],
            "members": Required[Annotated[list[GangMemberGiven], Field(min_length=1, max_length=GANG_MEMBERS_MAX)]],
        },
    ),
    "IdentityBind": ("A capsule is somebody.", {"capsule": Required[PromiseName], "identity": Required[Name]}),
    "ModuleAdjustment": ("A module has so many replicas.", {**_OF_A_MODULE, "replicas": Required[Count]}),
    "QuotaGrant": (
        "Somebody may use so much.",
        {"subject": Required[HeldName], "resources": Required[ResourcesGiven]},
    ),
    "Lease": ("Somebody holds something.", {"resource": Required[HeldName], "holder": Required[Name]}),
    "Revocation": (
        "The commitment at that index holds no longer.",
        {"index": Required[Annotated[int, Field(ge=1, le=INTEGER_MAX)]]},
    ),
}
_PRECONDITIONS = {
    "None": ("No bet.", {}),
    "NodeFreeOf": (
        "The node has at least this much that nobody claimed.",
        {"node": Required[PromiseName], "at_least": Required[ResourcesGiven]},
    ),
    "GangUnplaced": ("The gang is not placed.", {"gang": Required[PromiseName]}),
    "ModuleAdjustmentVersion": ("The newest adjustment is of this epoch, 0 where there is none.", _OF_A_MODULE),
}
PROPOSAL_TAGS = frozenset({*_COMMITMENTS, *_PRECONDITIONS})
"""As ``EVENT_TAGS``, chosen by ``kind``."""


def _by_kind(forms: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Any:
    union: Any = reduce(or_, [_kind(kind, says, **fields) for kind, (says, fields) in forms.items()])
    return Annotated[union, Discriminator("kind")]


@with_config(STRICT)
class ProposalRequest(TypedDict, total=False):
    """Body of ``POST /v1/commitments``."""

    tenant_id: Required[TenantId]
    commitment: Required[_by_kind(_COMMITMENTS)]  # type: ignore[valid-type]
    precondition: _by_kind(_PRECONDITIONS)  # type: ignore[valid-type]


@with_config(STRICT)
class CapacityRequest(TypedDict):
    """Body of ``PUT /v1/nodes/{node}/capacity``."""

    tenant_id: TenantId
    capacity: ResourcesGiven


PROPOSAL: TypeAdapter[Any] = TypeAdapter(ProposalRequest)
CAPACITY: TypeAdapter[Any] = TypeAdapter(CapacityRequest)


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
    evidence: bool


@with_config(STRICT)
class PrivacyRequest(TypedDict, total=False):
    """Body of ``PUT /v1/tenants/{tenant_id}/privacy``; ``subject`` is the field whose value names the person."""

    fields: Required[Annotated[list[FieldName], Field(max_length=FIELDS_MAX)]]
    subject: FieldName | None


@with_config(STRICT)
class SearchFieldsRequest(TypedDict):
    """Body of ``PUT /v1/tenants/{tenant_id}/search``."""

    fields: Annotated[list[FieldName], Field(max_length=SEARCH_FIELDS_MAX)]


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


@with_config(STRICT)
class TokenRequest(TypedDict, total=False):
    """Body of ``POST /v1/tokens``; ``expires_in`` as in settings, such as ``30d``: left out, the token never does."""

    name: Required[PrincipalName]
    rights: Required[Annotated[list[RightName], Field(min_length=1, max_length=len(Right))]]
    tenants: Required[Annotated[list[TenantsPattern], Field(min_length=1, max_length=PATTERNS_MAX)]]
    expires_in: Annotated[str, Field(min_length=1, max_length=32, examples=["30d"])]


@with_config(STRICT)
class SignInRequest(TypedDict):
    """Body of ``POST /v1/console/session``: a token of the ledger, or of the issuer of ``auth.oidc``."""

    token: Annotated[str, Field(min_length=1, max_length=TOKEN_BYTES_MAX, pattern="^[A-Za-z0-9._~+/=-]+$")]


@with_config(STRICT)
class WebhookRequest(TypedDict, total=False):
    """Body of ``POST /v1/webhooks``: what to deliver where. Without ``actions`` or ``job`` it is all, without
    ``from_seq`` what is chained from now on."""

    tenant_id: Required[ReadableTenantId]
    url: Required[Annotated[FetchedUrl, Field(max_length=2048, examples=["https://receiver.example.org/ledger"])]]
    actions: Annotated[list[ActionName], Field(min_length=1, max_length=WEBHOOK_ACTIONS_MAX)]
    job: Name
    from_seq: Annotated[int, Field(ge=1, le=INTEGER_MAX)]


STATS_REPORT: TypeAdapter[Any] = TypeAdapter(StatsReport)
SIGN_IN: TypeAdapter[Any] = TypeAdapter(SignInRequest)

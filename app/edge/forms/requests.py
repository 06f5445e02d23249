"""Strict forms of request bodies: an unknown field, a number in a string, or a null in place of a value is refused.

An event is checked against exactly one model, chosen by ``type``. Only its identifying fields are required; omitted
fields of a type are omitted from the payload. ``trace_time`` is the time of the event in a trace that is being
replayed, in seconds. ``subject`` says whose the private fields of the event are; it is never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Discriminator, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from app.edge.forms.fields import (
    ASSIGNED_DCS_MAX,
    FORM_OF_KIND,
    IDEMPOTENCY_KEY_PATTERN,
    NAME_CHARACTERS_MAX,
    STATS_NAMES_MAX,
    TEXT_CHARACTERS_MAX,
    Count,
    FieldName,
    HlcText,
    JobId,
    KeptText,
    Level,
    Moment,
    Name,
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
from app.runtime.settings.types import PATTERNS_MAX, ReceiverUrl, TenantsPattern
from app.share.webhooks.formats import Format
from app.trust.console_sessions import TOKEN_BYTES_MAX
from ledger import names
from ledger.canonical import INTEGER_MAX
from ledger.facts.events import COMMON_FIELDS, JOB_EVENTS, EventType, Kind, Part
from ledger.facts.events import Field as EventField
from ledger.machines.job_search import FIELDS_MAX as SEARCH_FIELDS_MAX
from ledger.machines.promises import OVERCOMMIT_FACTOR, RULES_NEWEST
from ledger.private_fields import FIELDS_MAX
from ledger.signed_events import SIGNATURE_CHARACTERS_MAX
from signing.manifest import LOG_ORIGIN

REPORT_FIELDS_MAX = 5
EVENT_TAGS = frozenset(JOB_EVENTS)
"""Parts of an error's path that name the model chosen by ``type``."""


def _strict(name: str, meaning: str, /, **members: Any) -> Any:
    """The strict form of an object with these members."""
    form = TypedDict(name, members, total=False)  # type: ignore[misc]
    form.__doc__ = meaning
    return with_config(ConfigDict(extra="forbid", strict=True))(form)


SignatureGiven = _strict(
    "SignatureGiven",
    "What the caller of an event signed: docs/formats/signed-events.md.",
    id=Required[Annotated[str, Field(pattern=IDEMPOTENCY_KEY_PATTERN, examples=["backup-2026-11-30"])]],
    key_id=Required[Annotated[str, Field(pattern="^[0-9a-f]{16}$")]],
    not_before_ms=Required[Count],
    not_after_ms=Required[Count],
    sig=Required[Annotated[str, Field(max_length=SIGNATURE_CHARACTERS_MAX, description="Base64.")]],
)


def _fact(name: str, meaning: str, fields: Sequence[EventField], **more: Any) -> Any:
    """The strict form of an event with these fields and ``COMMON_FIELDS``."""
    members = {
        field.name: Required[FORM_OF_KIND[field.kind]] if field.is_required else FORM_OF_KIND[field.kind]
        for field in (*COMMON_FIELDS, *fields)
    }
    return _strict(name, meaning, **members, **more)


def _event(event: EventType, suffix: str, **more: Any) -> Any:
    """The strict form of one type of event, with the fields that one place adds to it."""
    return _fact(event.name + suffix, event.meaning, event.fields, type=Required[Literal[event.name]], **more)


def _by_type(forms: Sequence[Any]) -> TypeAdapter[Any]:
    union: Any = Annotated[reduce(or_, forms), Discriminator("type")]
    return TypeAdapter(union)


_CREATED, *_ABOUT_A_JOB = JOB_EVENTS.values()
assert _CREATED.part is Part.CREATION
JOB_REQUEST: TypeAdapter[Any] = TypeAdapter(
    _fact("JobRequest", "Body of ``POST /v1/jobs``.", _CREATED.fields, durability=Level, signature=SignatureGiven)
)
CANCEL_REQUEST: TypeAdapter[Any] = TypeAdapter(
    _fact(
        "CancelRequest",
        "Body of ``POST /v1/jobs/{job_id}/cancel``.",
        JOB_EVENTS["JobCancellationRequested"].fields,
        durability=Level,
        signature=SignatureGiven,
    )
)
EVENT_REQUEST = _by_type(
    [_event(event, "Request", durability=Level, signature=SignatureGiven) for event in _ABOUT_A_JOB]
)
"""Body of ``POST /v1/jobs/{job_id}/events``: the path names the job."""
EVENT_LINE = _by_type(
    [_event(_CREATED, "Line"), *(_event(event, "Line", job_id=Required[JobId]) for event in _ABOUT_A_JOB)]
)
"""A line of ``POST /v1/events``: the line names the job, the query the level."""


def _form(event: EventType) -> tuple[object, ...]:
    """The form of one type's lines for ``native.event_lines``: the fields that it can check itself. A line with other
    fields is left to ``EVENT_LINE``."""
    fields = []
    for field in (*COMMON_FIELDS, *event.fields):
        if field.kind in _CHECKED_IN_C and field.name != "subject":
            fields.append((field.name, *_CHECKED_IN_C[field.kind], int(field.is_required)))
        assert field.kind in (*_CHECKED_IN_C, Kind.TENANT) or not field.is_required
    return event.name, event.record_type, event.part is Part.CREATION, tuple(fields)


_CHECKED_IN_C: Mapping[Kind, tuple[int, int, int, int]] = {
    Kind.NAME: (ord("s"), 1, NAME_CHARACTERS_MAX, 0),
    Kind.TEXT: (ord("s"), 0, TEXT_CHARACTERS_MAX, 0),
    Kind.COUNT: (ord("i"), 0, INTEGER_MAX, 0),
    Kind.OBJECT: (ord("o"), 0, 0, 0),
    Kind.NAMES: (ord("l"), 1, NAME_CHARACTERS_MAX, ASSIGNED_DCS_MAX),
}
"""Kinds of value: their JSON type, the bounds of their length or value, and how many at most."""
EVENT_FORMS = tuple(map(_form, JOB_EVENTS.values()))
"""``EVENT_LINE`` for the most common lines."""


PROMISE_PATTERN = names.anchored(names.PROMISE_NAME)
PromiseName = Annotated[str, Field(pattern=PROMISE_PATTERN, examples=["capsule-17"])]
"""A capsule, gang, node, mission or module."""
HeldName = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,200}$", examples=["team-ml"])]
"""A leased resource, or the holder of a quota."""


ResourcesGiven = _strict(
    "ResourcesGiven",
    "An amount in each dimension; what is left out is 0.",
    cpu_millis=Count,
    memory_bytes=Count,
    disk_bytes=Count,
    disk_bw_bps=Count,
    accelerators=Annotated[dict[Name, Count], Field(max_length=64)],
)


OVERCOMMIT_PATTERN = names.anchored(OVERCOMMIT_FACTOR)
_Factor = Annotated[str, Field(pattern=OVERCOMMIT_PATTERN, examples=["1.5"])]
OvercommitGiven = _strict(
    "OvercommitGiven",
    "How many times its capacity a node may have reserved, in each dimension; what is left out is 1.",
    cpu_millis=_Factor,
    memory_bytes=_Factor,
    disk_bytes=_Factor,
    disk_bw_bps=_Factor,
    accelerators=Annotated[dict[Name, _Factor], Field(max_length=64)],
)


_PLACED = {
    "capsule": Required[PromiseName],
    "node": Required[PromiseName],
    "reservation": Required[ResourcesGiven],
    "limit": ResourcesGiven,
}


_GANG_MEMBER = _strict("GangMemberGiven", "One capsule of a gang.", **_PLACED)
_OF_A_MODULE = {"mission": Required[PromiseName], "module": Required[PromiseName], "epoch": Required[Count]}
_COMMITMENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Placement": ("A capsule runs on a node, which keeps the reservation for it.", _PLACED),
    "GangPlacement": (
        "All of these capsules are placed, or none.",
        {
            "gang": Required[PromiseName],
            "members": Required[Annotated[list[_GANG_MEMBER], Field(min_length=1, max_length=1024)]],  # type: ignore[valid-type]
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
_PRECONDITIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "None": ("No precondition.", {}),
    "NodeFreeOf": (
        "The node has at least this much that nobody claimed.",
        {"node": Required[PromiseName], "at_least": Required[ResourcesGiven]},
    ),
    "GangUnplaced": ("The gang is not placed.", {"gang": Required[PromiseName]}),
    "ModuleAdjustmentVersion": ("The newest adjustment is of this epoch, 0 where there is none.", _OF_A_MODULE),
}
PROPOSAL_TAGS = frozenset({*_COMMITMENTS, *_PRECONDITIONS})
"""As ``EVENT_TAGS``, chosen by ``kind``."""


def _by_kind(kinds: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Any:
    """Exactly one of these kinds of commitment or precondition."""
    forms = [
        _strict(kind.replace("None", "NoPrecondition"), meaning, kind=Required[Literal[kind]], **fields)
        for kind, (meaning, fields) in kinds.items()
    ]
    union: Any = reduce(or_, forms)
    return Annotated[union, Discriminator("kind")]


PROPOSAL: TypeAdapter[Any] = TypeAdapter(
    _strict(
        "ProposalRequest",
        "Body of ``POST /v1/commitments``.",
        tenant_id=Required[TenantId],
        commitment=Required[_by_kind(_COMMITMENTS)],
        precondition=_by_kind(_PRECONDITIONS),
    )
)
CAPACITY: TypeAdapter[Any] = TypeAdapter(
    _strict(
        "CapacityRequest",
        "Body of ``PUT /v1/nodes/{node}/capacity``.",
        tenant_id=Required[TenantId],
        capacity=Required[ResourcesGiven],
        overcommit=OvercommitGiven,
    )
)


RulesRequest = _strict(
    "RulesRequest",
    "Body of ``PUT /v1/tenants/{tenant_id}/rules``.",
    version=Required[Annotated[int, Field(ge=1, le=RULES_NEWEST)]],
)


ExclusionRequest = _strict(
    "ExclusionRequest",
    "Body of ``POST /v1/exclusions``.",
    tenant_id=Required[TenantId],
    log=Required[
        Annotated[
            str,
            Field(pattern=names.anchored(LOG_ORIGIN), description="As in `origin` of an event"),
        ]
    ],
    reason=Required[Annotated[str, Field(min_length=1, max_length=1000)]],
    excluded=Annotated[bool, Field(description="False: it counts again.")],
)


RetentionRequest = _strict(
    "RetentionRequest",
    "Body of ``PUT /v1/retention``. Without a period nothing leaves; a minimum that is left out stays as it is.",
    period=Annotated[KeptText | None, Field(description="How long entries stay.")],
    minimum=Annotated[KeptText | None, Field(description="How long they must stay; never shortened.")],
)


HoldRequest = _strict(
    "HoldRequest",
    "Body of ``POST /v1/holds``: of a job, of the jobs that a search finds now, or of the tenant.",
    tenant_id=Required[TenantId],
    reason=Required[Annotated[str, Field(min_length=1, max_length=1000)]],
    job_id=JobId,
    where=Annotated[str, Field(min_length=3, max_length=2048, description="FIELD:VALUE, as for lists of jobs.")],
)


PruneRequest = _strict(
    "PruneRequest",
    "Body of ``POST /v1/prunes``.",
    tenant_id=Required[TenantId],
    to_seq=Annotated[int, Field(ge=1, le=INTEGER_MAX, description="Last entry that may leave.")],
    dry_run=Annotated[bool, Field(description="True: say what would leave, and write nothing.")],
)


SnapshotRequest = _strict(
    "SnapshotRequest",
    "Body of ``POST /v1/snapshots``.",
    tenant_id=Required[ReadableTenantId],
)


Statement = Annotated[dict[str, Any], Field(description="DSSE envelope by a key kept elsewhere: docs/formats/keys.md")]


AcknowledgeRequest = _strict(
    "AcknowledgeRequest",
    "Body of ``POST /v1/chain/acknowledge``.",
    tenant_id=Required[ReadableTenantId],
    reason=Required[Annotated[str, Field(min_length=1, max_length=1000)]],
    kind=Annotated[str, Field(min_length=1, max_length=40)],
    seq=Annotated[int, Field(ge=0, le=2**63 - 1)],
)


RotateRequest = _strict(
    "RotateRequest",
    "Body of ``POST /v1/keys/rotate``.",
    new_key_uri=Annotated[str, Field(min_length=1, max_length=2048)],
    log_key=bool,
    second_key=bool,
)


RevokeRequest = _strict(
    "RevokeRequest",
    "Body of ``POST /v1/keys/{key_id}/revoke``.",
    from_hlc=HlcText,
    reason=Annotated[str, Field(min_length=1, max_length=1024)],
    statement=Statement,
)


AdmitRequest = _strict(
    "AdmitRequest",
    "Body of ``POST /v1/keys/{key_id}/admit``.",
    statement=Statement,
)


RetireRequest = _strict(
    "RetireRequest",
    "Body of ``POST /v1/exchange/regions/{region}/retire``; ``force`` retires a region whose ledger answers.",
    reason=Required[Annotated[str, Field(min_length=1, max_length=1000)]],
    force=bool,
)


AdmitRegionRequest = _strict(
    "AdmitRegionRequest",
    "Body of ``POST /v1/exchange/regions/{region}/admit``.",
    key_id=Required[Annotated[str, Field(pattern="^[0-9a-f]{16}$")]],
)


RevokeRegionKeyRequest = _strict(
    "RevokeRegionKeyRequest",
    "Body of ``POST /v1/exchange/regions/{region}/revoke``.",
    key_id=Required[Annotated[str, Field(pattern="^[0-9a-f]{16}$")]],
    reason=Required[Annotated[str, Field(min_length=1, max_length=1000)]],
)


ExportRequest = _strict(
    "ExportRequest",
    "Body of ``POST /v1/bundles/export``.",
    tenant_id=Required[ReadableTenantId],
    from_seq=Annotated[int, Field(ge=1, le=INTEGER_MAX)],
    to_seq=Annotated[int, Field(ge=1, le=INTEGER_MAX)],
    evidence=bool,
    without_signing=bool,
)


ReportRequest = _strict(
    "ReportRequest",
    "Body of ``POST /v1/reports``; ``by`` are declared search fields inside ``spec``.",
    tenant_id=Required[ReadableTenantId],
    since=Moment,
    until=Moment,
    by=Annotated[list[FieldName], Field(max_length=REPORT_FIELDS_MAX)],
)


PrivacyRequest = _strict(
    "PrivacyRequest",
    "Body of ``PUT /v1/tenants/{tenant_id}/privacy``; ``subject`` is the field whose value names the person.",
    fields=Required[Annotated[list[FieldName], Field(max_length=FIELDS_MAX)]],
    subject=FieldName | None,
)


CallerRequest = _strict(
    "CallerRequest",
    "Body of ``POST /v1/callers``.",
    name=Required[PrincipalName],
    public_key_pem=Required[
        Annotated[str, Field(max_length=8192, description="PEM: Ed25519, ECDSA P-256 or ML-DSA-44.")]
    ],
    tenants=Required[Annotated[list[TenantsPattern], Field(min_length=1, max_length=PATTERNS_MAX)]],
)


EventName: Any = Literal[tuple(JOB_EVENTS)]
SignaturesRequest = _strict(
    "SignaturesRequest",
    "Body of ``PUT /v1/tenants/{tenant_id}/signatures``.",
    types=Required[Annotated[list[EventName], Field(max_length=len(JOB_EVENTS))]],
)


SearchFieldsRequest = _strict(
    "SearchFieldsRequest",
    "Body of ``PUT /v1/tenants/{tenant_id}/search``.",
    fields=Required[Annotated[list[FieldName], Field(max_length=SEARCH_FIELDS_MAX)]],
)


ErasureRequest = _strict(
    "ErasureRequest",
    "Body of ``POST /v1/tenants/{tenant_id}/erasures``; ``reason`` goes on record as it is.",
    subject=Required[Name],
    reason=Text,
)


TokenRequest = _strict(
    "TokenRequest",
    "Body of ``POST /v1/tokens``; ``expires_in`` as in settings, such as ``30d``: left out, the token never does.",
    name=Required[PrincipalName],
    rights=Required[Annotated[list[RightName], Field(min_length=1, max_length=len(Right))]],
    tenants=Required[Annotated[list[TenantsPattern], Field(min_length=1, max_length=PATTERNS_MAX)]],
    expires_in=Annotated[str, Field(min_length=1, max_length=32, examples=["30d"])],
)


WebhookRequest = _strict(
    "WebhookRequest",
    "Body of ``POST /v1/webhooks``: what to deliver where. Without ``actions`` or ``job`` it is all, without\n"
    "``from_seq`` what is chained from now on.",
    tenant_id=Required[ReadableTenantId],
    url=Required[Annotated[ReceiverUrl, Field(max_length=2048, examples=["https://receiver.example.org/ledger"])]],
    actions=Annotated[
        list[Annotated[str, Field(pattern="^[A-Z][A-Z_]{0,63}$", examples=["COMPLETE"])]],
        Field(min_length=1, max_length=64),
    ],
    job=Name,
    format=Literal[*map(str, Format)],
    from_seq=Annotated[int, Field(ge=1, le=INTEGER_MAX)],
)


ReplayRequest = _strict(
    "ReplayRequest",
    "Body of ``POST /v1/webhooks/{webhook_id}/replay``: the entry from which all are delivered again.",
    from_seq=Required[Annotated[int, Field(ge=1, le=INTEGER_MAX)]],
)


STATS_REPORT: TypeAdapter[Any] = TypeAdapter(
    _strict(
        "StatsReport",
        "Body of ``POST /v1/stats``, or a line of it: what one data centre, or one workflow there, says of a job.\n\n"
        "``completed`` and ``failed`` are totals so far, as in JobProgressReported. ``counts`` is what happened in "
        "the\n``interval_ms`` before ``time``, and is summed. ``values`` is what was measured then, and never is. "
        "Without a time\nit is that of arrival.",
        tenant_id=Required[TenantId],
        job_id=Required[JobId],
        dc_id=Required[Name],
        workflow_id=Name,
        time=TimeText,
        time_ms=Count,
        completed=Count,
        failed=Count,
        interval_ms=Count,
        counts=Annotated[dict[StatsName, Count], Field(max_length=STATS_NAMES_MAX)],
        values=Annotated[dict[StatsName, StatsValue], Field(max_length=STATS_NAMES_MAX)],
    )
)
SIGN_IN: TypeAdapter[Any] = TypeAdapter(
    _strict(
        "SignInRequest",
        "Body of ``POST /v1/console/session``: a token of the ledger, or of the issuer of ``auth.oidc``.",
        token=Required[
            Annotated[str, Field(min_length=1, max_length=TOKEN_BYTES_MAX, pattern="^[A-Za-z0-9._~+/=-]+$")]
        ],
    )
)

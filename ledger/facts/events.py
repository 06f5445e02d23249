"""The kinds of entry: events of jobs, proposals, and what the ledger records about itself.

To add an event of a job, declare it in ``JOB_EVENTS``, write the generated files again (``make facts``), and, where it
changes a job's status, declare the status (:mod:`ledger.facts.statuses`). If the job's state needs more than the newest
such event, add a rule in :mod:`ledger.machines.job_fold`. What the ledger records about itself is declared in the same
way in ``SYSTEM_RECORD_TYPES``.

The type number is in the WAL record, the action in ``scheduler_log``, the name in the payload. Numbers 1 to 15 are job
events, 34 and 35 proposals and capacities of nodes; 16 and 33 are records of the WAL alone, which become no entry of
their own. The ledger writes the others itself: 22, 23, 31, 42, 43, 45 to 48 and 52 into the chain of the tenant they
are about, the rest into ``_system``.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum, StrEnum, auto
from typing import Final, Literal, NamedTuple

SYSTEM_TENANT = "_system"
"""Tenant whose chain records what happens to the ledger itself: tenants, keys, lost WALs."""


class Durability(IntEnum):
    """How far an event must have come before it is acknowledged; a higher level implies the lower ones."""

    NONE = 0
    LOCAL = 1
    REGIONAL = 2
    GLOBAL = 3


# --- events of jobs -------------------------------------------------------------------------------


class Kind(Enum):
    """Kinds of value of a field; ``app.edge.forms.fields`` has the bounds of each."""

    TENANT = auto()
    JOB_ID = auto()
    NAME = auto()
    NAMES = auto()
    TEXT = auto()
    COUNT = auto()
    NUMBER = auto()
    HLC = auto()
    TRACEPARENT = auto()
    OBJECT = auto()


class Field(NamedTuple):
    """A member of an event. An optional one that a caller leaves out is left out of the payload."""

    name: str
    kind: Kind
    is_required: bool = False


class Part(Enum):
    """The part of a job's state that an event updates. Of several events that update one part, the fold keeps the one
    of highest rank; where a comment says more, :mod:`ledger.machines.job_fold` has a rule for it."""

    CREATION = auto()  # the first counts
    ACCEPTANCE = auto()  # for each data centre
    RUN = auto()
    PROGRESS = auto()  # for each data centre; updates RUN, too
    WORKFLOW = auto()  # for each workflow; updates RUN, too
    CANCELLATION = auto()
    ACKNOWLEDGEMENT = auto()  # for each data centre
    END = auto()  # keeps the outcome


class EventType(NamedTuple):
    """One kind of job event."""

    name: str
    """The ``type`` of its payload."""
    action: str
    """The action of its entries in the log."""
    record_type: int
    """The type of its records in the WAL."""
    durability: Durability
    """The level that a request gets which asks for none."""
    part: Part
    meaning: str
    """What happened, in a sentence; Markdown."""
    fields: tuple[Field, ...]
    """The members of its own, beside ``COMMON_FIELDS``."""
    past: str
    """What happened, in the few words of a heading."""
    headline: tuple[str, ...] = ()
    """What else the console shows at once: texts with fields in braces, each left out where a field is not given."""
    tone: Literal["", "ok", "bad"] = ""
    """How the console colours it."""


TRACEPARENT: Final = "traceparent"
"""Member of a payload with the span of W3C Trace Context that the event belongs to."""

COMMON_FIELDS: Final = (
    Field("tenant_id", Kind.TENANT, is_required=True),
    Field("fence_token", Kind.COUNT),
    Field("trace_time", Kind.NUMBER),
    Field("subject", Kind.NAME),
    Field(TRACEPARENT, Kind.TRACEPARENT),
)
"""The members that every event may have."""

_DC = Field("dc_id", Kind.NAME, is_required=True)
_WORKFLOW = Field("workflow_id", Kind.NAME, is_required=True)

JOB_EVENTS: Final[Mapping[str, EventType]] = {
    event.name: event
    for event in (
        EventType(
            name="JobCreated",
            action="ENQUEUE",
            record_type=1,
            durability=Durability.GLOBAL,
            part=Part.CREATION,
            meaning="A job exists.",
            fields=(Field("job_id", Kind.JOB_ID), Field("spec", Kind.OBJECT), Field("assigned_dcs", Kind.NAMES)),
            past="Created",
        ),
        EventType(
            name="JobAccepted",
            action="DEQUEUE",
            record_type=2,
            durability=Durability.REGIONAL,
            part=Part.ACCEPTANCE,
            meaning="A data centre took the job.",
            fields=(_DC, Field("worker_count", Kind.COUNT)),
            past="Accepted",
            headline=("in {dc_id}", "workers: {worker_count}"),
        ),
        EventType(
            name="JobProgressReported",
            action="EXECUTE",
            record_type=3,
            durability=Durability.LOCAL,
            part=Part.PROGRESS,
            meaning="How far a data centre has come; totals, not differences.",
            fields=(_DC, Field("completed", Kind.COUNT), Field("failed", Kind.COUNT)),
            past="Reported progress",
            headline=("{completed} done", "{failed} failed"),
        ),
        EventType(
            name="JobCompleted",
            action="COMPLETE",
            record_type=6,
            durability=Durability.GLOBAL,
            part=Part.END,
            meaning="The job is done.",
            fields=(Field("final_status", Kind.TEXT), Field("aggregate_metrics", Kind.OBJECT)),
            past="Completed",
            headline=("{final_status}",),
            tone="ok",
        ),
        EventType(
            name="JobFailed",
            action="FAIL",
            record_type=7,
            durability=Durability.GLOBAL,
            part=Part.END,
            meaning="The job went wrong.",
            fields=(Field("error", Kind.TEXT), Field("failed_dc", Kind.NAME)),
            past="Failed",
            headline=("{error}", "in {failed_dc}"),
            tone="bad",
        ),
        EventType(
            name="JobCancellationRequested",
            action="CANCEL",
            record_type=4,
            durability=Durability.GLOBAL,
            part=Part.CANCELLATION,
            meaning="Somebody wants the job to stop.",
            fields=(Field("reason", Kind.TEXT), Field("requestor", Kind.TEXT)),
            past="Cancellation requested",
            headline=("{reason}", "asked by {requestor}"),
            tone="bad",
        ),
        EventType(
            name="JobCancellationAcked",
            action="CANCEL_ACK",
            record_type=5,
            durability=Durability.REGIONAL,
            part=Part.ACKNOWLEDGEMENT,
            meaning="A data centre has stopped its part of the job.",
            fields=(_DC, Field("workflows_cancelled", Kind.COUNT)),
            past="Cancellation acknowledged",
            headline=("by {dc_id}",),
            tone="bad",
        ),
        EventType(
            name="JobTimedOut",
            action="TIMEOUT",
            record_type=8,
            durability=Durability.GLOBAL,
            part=Part.END,
            meaning="The job took too long.",
            fields=(Field("timeout_type", Kind.TEXT), Field("last_progress_hlc", Kind.HLC)),
            past="Timed out",
            headline=("{timeout_type}",),
            tone="bad",
        ),
        EventType(
            name="WorkflowDispatched",
            action="DISPATCH",
            record_type=9,
            durability=Durability.REGIONAL,
            part=Part.WORKFLOW,
            meaning="A part of the job was sent to a data centre.",
            fields=(_WORKFLOW, _DC),
            past="Dispatched a workflow",
        ),
        EventType(
            name="WorkflowCompleted",
            action="WORKFLOW_COMPLETE",
            record_type=10,
            durability=Durability.REGIONAL,
            part=Part.WORKFLOW,
            meaning="A part of the job is done.",
            fields=(_WORKFLOW, _DC),
            past="Completed a workflow",
        ),
    )
}
"""Events of jobs by name. JobCreated stays the first, which the forms of the edge assert. A required field is of a kind
that is text, a name, a list or an object: the forms of the edge have no required numbers or HLCs."""

EVENT_FIELDS: Final[Mapping[str, Kind]] = {
    "job_id": Kind.JOB_ID,
    **{field.name: field.kind for event in JOB_EVENTS.values() for field in (*COMMON_FIELDS, *event.fields)},
}
"""Every member of events of jobs, with its kind, which is the same in all."""

EVENTS_BY_ACTION: Final = {event.action: event for event in JOB_EVENTS.values()}
"""Events of jobs by the action of their entries; entries with other actions change no job."""


# --- entries about commitments, and about the ledger ---------------------------------------------


class CommitmentAction(StrEnum):
    """Actions of entries about commitments: how a proposal was judged, and the capacity of a node."""

    PROPOSED = "PROPOSED"
    """Not judged yet: in the WAL, and in chains only as an imported entry."""
    PROPOSE_ACCEPTED = "PROPOSE_ACCEPTED"
    PROPOSE_REJECTED = "PROPOSE_REJECTED"
    CAPACITY_SET = "CAPACITY_SET"


VERDICTS = frozenset({CommitmentAction.PROPOSE_ACCEPTED, CommitmentAction.PROPOSE_REJECTED})


class SystemAction(StrEnum):
    """Actions of entries that the ledger writes about itself."""

    TENANT_CREATED = "TENANT_CREATED"
    KEY_ADDED = "KEY_ADDED"
    KEY_ROTATED = "KEY_ROTATED"
    KEY_REVOKED = "KEY_REVOKED"
    KEY_ADMITTED = "KEY_ADMITTED"
    WAL_LOST = "WAL_LOST"
    REFUSED = "REFUSED"
    """Holds an event that PostgreSQL refused, or that lost against another of its key: see
    :mod:`ledger.machines.jobs`."""
    LOG_FORKED = "LOG_FORKED"
    BREAK_FOUND = "BREAK_FOUND"
    BREAK_ACKNOWLEDGED = "BREAK_ACKNOWLEDGED"
    CONFLICT = "CONFLICT"
    """Holds an event whose HLC another one has: see :mod:`ledger.chain.conflict`."""
    SUBJECT_ERASED = "SUBJECT_ERASED"
    PRIVACY_DECLARED = "PRIVACY_DECLARED"
    ACT_ALLOWED = "ACT_ALLOWED"
    ACCESS_REFUSED = "ACCESS_REFUSED"
    PAYLOADS_READ = "PAYLOADS_READ"
    EPOCH_START = "EPOCH_START"
    TOKEN_ISSUED = "TOKEN_ISSUED"  # noqa: S105 (an action)
    TOKEN_REVOKED = "TOKEN_REVOKED"  # noqa: S105 (an action)
    WEBHOOK_ADDED = "WEBHOOK_ADDED"
    WEBHOOK_REMOVED = "WEBHOOK_REMOVED"
    WEBHOOK_DEAD_LETTERED = "WEBHOOK_DEAD_LETTERED"
    REGION_RETIRED = "REGION_RETIRED"
    REGION_ADMITTED = "REGION_ADMITTED"
    LOG_EXCLUDED = "LOG_EXCLUDED"
    """The facts of a log do not count in this tenant: see :mod:`ledger.machines.exclusions`."""
    LOG_INCLUDED = "LOG_INCLUDED"
    REGION_KEY_REVOKED = "REGION_KEY_REVOKED"
    RETENTION_SET = "RETENTION_SET"
    """How long entries of this tenant are kept: see :mod:`ledger.machines.retention`."""
    HOLD_PLACED = "HOLD_PLACED"
    HOLD_RELEASED = "HOLD_RELEASED"
    PRUNED = "PRUNED"
    """A prefix of this chain is in the archive, and leaves the database."""
    CALLER_REGISTERED = "CALLER_REGISTERED"
    CALLER_REVOKED = "CALLER_REVOKED"
    SIGNATURES_REQUIRED = "SIGNATURES_REQUIRED"
    """Which events of a tenant their callers must sign."""
    STATEMENT_REGISTERED = "STATEMENT_REGISTERED"
    """Holds a signed statement of SCITT, which a caller sent: see :mod:`signing.cose`."""


BATCH_RECORD_TYPE = 16
RETURNED_RECORD_TYPE = 33
"""A record of a discarded tail of the WAL, appended again: it holds the event with its own type and HLC."""
PROPOSED_RECORD_TYPE = 34
CAPACITY_RECORD_TYPE = 35
DECIDED_RECORD_TYPES = frozenset({PROPOSED_RECORD_TYPE, CAPACITY_RECORD_TYPE})
"""Records whose entries follow from the chain before them: proposals are judged, by capacities."""

SYSTEM_RECORD_TYPES = {
    17: SystemAction.TENANT_CREATED,
    18: SystemAction.KEY_ADDED,
    19: SystemAction.WAL_LOST,
    20: SystemAction.KEY_ROTATED,
    21: SystemAction.KEY_REVOKED,
    22: SystemAction.SUBJECT_ERASED,
    23: SystemAction.PRIVACY_DECLARED,
    24: SystemAction.LOG_FORKED,
    25: SystemAction.KEY_ADMITTED,
    26: SystemAction.BREAK_ACKNOWLEDGED,
    27: SystemAction.TOKEN_ISSUED,
    28: SystemAction.TOKEN_REVOKED,
    29: SystemAction.ACT_ALLOWED,
    30: SystemAction.ACCESS_REFUSED,
    31: SystemAction.PAYLOADS_READ,
    32: SystemAction.EPOCH_START,
    36: SystemAction.WEBHOOK_ADDED,
    37: SystemAction.WEBHOOK_REMOVED,
    38: SystemAction.WEBHOOK_DEAD_LETTERED,
    39: SystemAction.BREAK_FOUND,
    40: SystemAction.REGION_RETIRED,
    41: SystemAction.REGION_ADMITTED,
    42: SystemAction.LOG_EXCLUDED,
    43: SystemAction.LOG_INCLUDED,
    44: SystemAction.REGION_KEY_REVOKED,
    45: SystemAction.RETENTION_SET,
    46: SystemAction.HOLD_PLACED,
    47: SystemAction.HOLD_RELEASED,
    48: SystemAction.PRUNED,
    49: SystemAction.CALLER_REGISTERED,
    50: SystemAction.CALLER_REVOKED,
    51: SystemAction.SIGNATURES_REQUIRED,
    52: SystemAction.STATEMENT_REGISTERED,
}


# --- every kind of entry --------------------------------------------------------------------------

ACTOR = "actor"
"""Member of a payload with the principal who sent the event, set by the service; no client can set it. It sorts
first in canonical JSON, so a payload that begins with it has an actor."""

ACTIONS: Final[Mapping[int, str]] = {
    **{event.record_type: event.action for event in JOB_EVENTS.values()},
    **{number: action.value for number, action in SYSTEM_RECORD_TYPES.items()},
    PROPOSED_RECORD_TYPE: CommitmentAction.PROPOSED.value,
    CAPACITY_RECORD_TYPE: CommitmentAction.CAPACITY_SET.value,
}
"""Action of the log by WAL record type, for every record that becomes an entry; a proposal's is its verdict there."""

REFUSED_TYPE: Final = "Refused"
CONFLICT_TYPE: Final = "Conflict"
PROPOSAL_TYPE: Final = "CommitmentProposed"
CAPACITY_TYPE: Final = "CapacitySet"

TYPE_OF_ACTION: Final[Mapping[str, str]] = {
    **{action: event.name for action, event in EVENTS_BY_ACTION.items()},
    **{action.value: PROPOSAL_TYPE for action in CommitmentAction},
    **{action.value: action.value for action in SystemAction},
    CommitmentAction.CAPACITY_SET.value: CAPACITY_TYPE,
    SystemAction.CONFLICT.value: CONFLICT_TYPE,
    SystemAction.REFUSED.value: REFUSED_TYPE,
}
"""The ``type`` of the payload of an entry, by action: every action that there is."""

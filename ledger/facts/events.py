"""The kinds of entry: job events, what the ledger itself records, and their names and numbers.

The type number stands in the WAL record, the action in ``scheduler_log``, the name in the payload.
Numbers 1 to 10 are job events, 34 and 35 proposals and capacities of nodes; 16 and 33 are records of the WAL alone,
which become no entry of their own. The rest the ledger writes itself: 22, 23 and 31 into the chain of the tenant they
are about, the others into ``_system``.
"""

from enum import IntEnum, StrEnum
from typing import NamedTuple

SYSTEM_TENANT = "_system"
"""Tenant whose chain records what happens to the ledger itself: tenants, keys, lost WALs."""


class Durability(IntEnum):
    """How far an event must have come before it is acknowledged; a higher level implies the lower ones."""

    NONE = 0
    LOCAL = 1
    REGIONAL = 2
    GLOBAL = 3


class EventType(NamedTuple):
    """One kind of job event: ``name`` in the payload, ``action`` in the log, ``record_type`` in the WAL."""

    name: str
    action: str
    record_type: int
    durability: Durability


class SystemAction(StrEnum):
    """Actions of entries that the ledger writes about itself."""

    TENANT_CREATED = "TENANT_CREATED"
    KEY_ADDED = "KEY_ADDED"
    KEY_ROTATED = "KEY_ROTATED"
    KEY_REVOKED = "KEY_REVOKED"
    KEY_ADMITTED = "KEY_ADMITTED"
    WAL_LOST = "WAL_LOST"
    REFUSED = "REFUSED"
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


class CommitmentAction(StrEnum):
    """Actions of entries about commitments: how a proposal was judged, and what a node has."""

    PROPOSED = "PROPOSED"
    """Not judged yet: in the WAL, and in chains only as an entry of somewhere else."""
    PROPOSE_ACCEPTED = "PROPOSE_ACCEPTED"
    PROPOSE_REJECTED = "PROPOSE_REJECTED"
    CAPACITY_SET = "CAPACITY_SET"


VERDICTS = frozenset({CommitmentAction.PROPOSE_ACCEPTED, CommitmentAction.PROPOSE_REJECTED})

BATCH_RECORD_TYPE = 16
RETURNED_RECORD_TYPE = 33
"""A record of an end of the WAL that lost, appended again: it holds the event with its own type and HLC."""
PROPOSED_RECORD_TYPE = 34
CAPACITY_RECORD_TYPE = 35
DECIDED_RECORD_TYPES = frozenset({PROPOSED_RECORD_TYPE, CAPACITY_RECORD_TYPE})
"""Records whose entries follow from the chain before them: they are judged, or what is judged hangs on them."""

ACTOR = "actor"
"""Member of a payload that says who sent the event, as the service knows it; no client can set it. The first member of
its canonical form: no other begins so."""

JOB_EVENTS = {
    event.name: event
    for event in (
        EventType("JobCreated", "ENQUEUE", 1, Durability.GLOBAL),
        EventType("JobAccepted", "DEQUEUE", 2, Durability.REGIONAL),
        EventType("JobProgressReported", "EXECUTE", 3, Durability.LOCAL),
        EventType("JobCancellationRequested", "CANCEL", 4, Durability.GLOBAL),
        EventType("JobCancellationAcked", "CANCEL_ACK", 5, Durability.REGIONAL),
        EventType("JobCompleted", "COMPLETE", 6, Durability.GLOBAL),
        EventType("JobFailed", "FAIL", 7, Durability.GLOBAL),
        EventType("JobTimedOut", "TIMEOUT", 8, Durability.GLOBAL),
        EventType("WorkflowDispatched", "DISPATCH", 9, Durability.REGIONAL),
        EventType("WorkflowCompleted", "WORKFLOW_COMPLETE", 10, Durability.REGIONAL),
    )
}
"""Job events by name; the durability is the default that a caller may override."""

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
}

ACTIONS: dict[int, str] = {event.record_type: event.action for event in JOB_EVENTS.values()} | {
    number: str(action) for number, action in SYSTEM_RECORD_TYPES.items()
}
ACTIONS |= {
    PROPOSED_RECORD_TYPE: str(CommitmentAction.PROPOSED),
    CAPACITY_RECORD_TYPE: str(CommitmentAction.CAPACITY_SET),
}
"""Action of the log by WAL record type, for every record that becomes an entry; a proposal's is its verdict there."""

EVENTS_BY_ACTION = {event.action: event for event in JOB_EVENTS.values()}
"""Job events by the action their entries carry; entries with other actions do not touch a job."""

EVERY_ACTION = frozenset((*ACTIONS.values(), *SystemAction, *CommitmentAction))
"""The action of every entry that there can be."""

"""What entries say of their job, and what its state means.

The state of a job, and how events and states are merged, is in :mod:`ledger.machines.job_fold`. States folded from
parts of a chain in different places are merged in the order of the parts (``merge_states``): the outcome is the fold of
all entries in chain order.

An event that PostgreSQL refused is kept by a REFUSED entry. The job id may be what was refused, so the entry has
another one that follows from it::

    "refused:" + lowercase hex SHA-256 of the job id

Its payload has the event's record type, job id and bytes (base64) and the SQLSTATE. It is no part of the job's state.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from ledger import rfc3339
from ledger.canonical import INTEGER_MAX, NESTING_MAX
from ledger.chain.conflict import held_event
from ledger.errors import InvalidInputError
from ledger.facts.events import ACTIONS, EVENTS_BY_ACTION, JOB_EVENTS, Part, SystemAction
from ledger.facts.statuses import ACCEPTED, CANCELLED, CANCELLING, ENDED, REACHED, REFUSED, STATUS_OF_END, SUBMITTED
from ledger.hlc import Hlc
from ledger.machines.job_fold import CREATION, HlcParts, JobFold, JobState, Refused, creator_of, refused_of, seqs_of

__all__ = [
    "JobFold",
    "JobParts",
    "JobState",
    "Refusal",
    "awaits_ack",
    "creator_of",
    "dcs_of",
    "decode_state",
    "encode_state",
    "ended_text",
    "folded",
    "merge_states",
    "named_dcs",
    "outcome",
    "payload_of",
    "refusal_of",
    "refused_job_id",
    "reporting_dc",
    "said_of_job",
    "said_of_row",
    "seqs_of",
    "status",
    "view",
]

KEY_REUSED: Final = "idempotency-key-reused"
"""Reason of a refusal: the key of an event that was acknowledged turned out to be taken by another body."""
KEY_REPLAYED: Final = "idempotent-replay"
"""Reason of a refusal: the same request as that of an acknowledged event had been chained as another event."""

ABOUT_JOBS: Final = frozenset((*EVENTS_BY_ACTION, SystemAction.REFUSED.value, SystemAction.CONFLICT.value))
"""Actions of the entries that may say something of their job."""

_MAY_END: Final = frozenset((Part.END, Part.CANCELLATION, Part.ACKNOWLEDGEMENT))
ENDING: Final = frozenset(
    (*(event.action for event in JOB_EVENTS.values() if event.part in _MAY_END), SystemAction.CONFLICT.value)
)
"""Actions of the entries by which a job may end."""

_STATE_DECODER: Final = msgspec.msgpack.Decoder(JobState)

Said = tuple[str, Mapping[str, Any], HlcParts, str]
"""What an entry says of its job: action, payload, HLC and digest, the first four arguments of ``JobFold.add``."""


# --- what an entry says ---------------------------------------------------------------------------


def said_of_job(action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, job_id: str) -> Said | None:
    """What an entry says of its job, None when it says nothing.

    A CONFLICT entry counts as the event that it holds: which of two that claim one HLC was chained first then makes
    no difference. A REFUSED entry says that its event lost, where it names the winner.
    """
    if action in EVENTS_BY_ACTION:
        return action, payload, hlc, digest
    if action == SystemAction.REFUSED:
        return None if refused_of(payload, job_id) is None else (SystemAction.REFUSED.value, payload, hlc, digest)
    held = held_event(payload, job_id) if action == SystemAction.CONFLICT else None
    if held is None or held.event.action not in EVENTS_BY_ACTION:
        return None
    return held.event.action, payload_of(held.payload), held.hlc, held.event.payload_digest


def said_of_row(
    job_id: Any, seq: Any, physical: Any, logical: Any, node: Any, action: Any, digest: Any, text: Any
) -> Said | None:
    """What a stored row says of its job, None of nothing; so also one that somebody edited beyond its types."""
    if (
        job_id.__class__ is node.__class__ is digest.__class__ is str
        and seq.__class__ is physical.__class__ is logical.__class__ is int
    ):
        payload, hlc = payload_of(text), (physical, logical, node)
        if action in EVENTS_BY_ACTION:
            return action, payload, hlc, digest
        return said_of_job(action, payload, hlc, digest, job_id)
    return None


def payload_of(text: Any) -> dict[str, Any]:
    """The payload, empty when an edit made it something else than an object."""
    try:
        payload = orjson.loads(text)
    except (ValueError, TypeError):
        return {}
    return payload if isinstance(payload, dict) else {}


def folded(job_id: str, state: JobState | None, entries: Iterable[Sequence[Any]]) -> JobState | None:
    """``state`` merged with what entries say of the job: (seq, *HLC, action, digest, payload) each; None of nothing.

    Raises:
        InvalidInputError: one of them was edited into something that is no entry.
    """
    fold = JobFold(job_id, state)
    for seq, physical, logical, node, action, digest, payload in entries:
        is_entry = (
            seq.__class__ is physical.__class__ is logical.__class__ is int
            and node.__class__ is digest.__class__ is str
            and isinstance(payload, dict)
        )
        if not is_entry:
            raise InvalidInputError(f"what stands at seq {seq} is no entry")
        said = said_of_job(action, payload, (physical, logical, node), digest, job_id)
        if said is not None:
            fold.add(*said, seq)
    return None if fold.is_empty else fold.state()


# --- states of parts of a chain -------------------------------------------------------------------


class JobParts:
    """Folds entries as they come, those up to ``upto_seq``, into the states of their jobs; all of them are held."""

    def __init__(self, upto_seq: int = 2**63 - 1) -> None:
        self._upto_seq = upto_seq
        self._folds: dict[str, JobFold] = {}

    def __len__(self) -> int:
        return len(self._folds)

    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        """The next entries, by ``ENTRY_COLUMNS``; those that say nothing of a job are passed over."""
        seqs, _, physical, logical, nodes, job_ids, actions, _, _, _, digests, texts, _ = columns
        folds = self._folds
        for job_id, seq, ms, count, node, action, digest, text in zip(
            job_ids, seqs, physical, logical, nodes, actions, digests, texts, strict=True
        ):
            said = said_of_row(job_id, seq, ms, count, node, action, digest, text)
            if said is not None and seq <= self._upto_seq:
                if job_id not in folds:
                    folds[job_id] = JobFold(job_id)
                folds[job_id].add(*said, seq)

    def take(self) -> list[JobState]:
        """The states so far, which are held no more."""
        states = [fold.state() for fold in self._folds.values()]
        self._folds.clear()
        return states


def merge_states(parts: Sequence[JobState]) -> JobState | None:
    """The state of one job, from its parts in chain order; None of none."""
    if not parts:
        return None
    fold = JobFold(parts[0].job_id, parts[0])
    for part in parts[1:]:
        fold.join(part)
    return fold.state()


def encode_state(state: JobState) -> bytes:
    """As MessagePack, whatever edited payloads left in it."""
    try:
        return msgspec.msgpack.encode(state)
    except (RecursionError, OverflowError):
        return msgspec.msgpack.encode(_shallow(state, NESTING_MAX + len(("state", "created", "spec"))))


def decode_state(data: bytes) -> JobState:
    """What ``encode_state`` gave: a state that has the same encoded form, or like the original none."""
    return _STATE_DECODER.decode(data)


def _shallow(value: Any, room: int) -> Any:
    """``value`` without what lies so deep that it has no canonical form anyway."""
    if isinstance(value, dict):
        return {name: _shallow(part, room - 1) for name, part in value.items()} if room else {}
    if isinstance(value, list | tuple):
        return [_shallow(part, room - 1) for part in value] if room else []
    return value


# --- refused events -------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """One such entry."""

    seq: int
    hlc: Hlc
    action: str
    """Of the event that it keeps."""
    sqlstate: str

    @property
    def is_creation(self) -> bool:
        """Whether the event was to create the job."""
        return self.action == CREATION

    def text(self) -> str:
        """Why the job that it was to create takes no events, to be said behind its name."""
        return (
            f"was never made: PostgreSQL refused its creation with SQLSTATE {self.sqlstate}, and the REFUSED entry at "
            f"seq {self.seq} keeps its bytes; mend what refuses it and create the job again"
        )


def refused_job_id(job_id: str) -> str:
    """Job id of the entries that stand in for events of ``job_id``."""
    return f"refused:{sha256(job_id.encode()).hexdigest()}"


def refusal_of(job_id: str, entries: Iterable[tuple[int, str, str]]) -> Refusal | None:
    """What the (seq, HLC, payload) of REFUSED entries say of the job: of its first creation, else of its newest event;
    None when none of them is of this job."""
    found = [each for entry in entries if (each := _refusal(job_id, *entry)) is not None]
    return next((each for each in found if each.is_creation), found[-1] if found else None)


def _refusal(job_id: str, seq: int, t_hlc: str, payload: str) -> Refusal | None:
    try:
        facts = orjson.loads(payload)
        action, sqlstate, hlc = ACTIONS[facts["record_type"]], facts["sqlstate"], Hlc.parse(t_hlc)
        is_of_job = facts["job_id"] == b64encode(job_id.encode()).decode()
    except (ValueError, TypeError, KeyError):
        return None
    if not is_of_job or action not in EVENTS_BY_ACTION or not isinstance(sqlstate, str):
        return None
    return Refusal(seq, hlc, action, sqlstate)


# --- what a state means ---------------------------------------------------------------------------


def status(state: JobState) -> str:
    """The status: REFUSED for a job that never was, then cancellation, then that of the highest fence, within it of the
    highest precedence."""
    if state.refused is not None and state.created is None and state.refused.action == CREATION:
        return REFUSED
    if state.cancel is not None:
        if state.end is not None or _all_acknowledged(state):
            return CANCELLED
        return CANCELLING
    fence, value = -1, SUBMITTED
    if state.end is not None:
        fence, value = state.end.rank[0], STATUS_OF_END[state.end.action]
    for part, reached in REACHED:
        held = state.reached.get(part)
        if held is not None and held[0] > fence:
            fence, value = held[0], reached
    for rank in state.accepted.values():
        if rank[0] > fence:
            fence, value = rank[0], ACCEPTED
    return value


def _all_acknowledged(state: JobState) -> bool:
    assigned = state.created.assigned_dcs if state.created is not None else ()
    asked = state.accepted.keys() or assigned
    return bool(state.ack) and all(dc in state.ack for dc in asked)


def outcome(state: JobState) -> Mapping[str, Any]:
    """What its end gave of final_status, aggregate_metrics and error, as far as that counts."""
    return state.end.outcome if state.end is not None and status(state) in ENDED else {}


def view(state: JobState, refusal: Refusal | None = None) -> dict[str, Any]:
    """What ``GET /v1/jobs/{job_id}`` says of the job itself; tenant and consistency are the caller's. ``refusal`` is of
    an event of the job that PostgreSQL would not hold."""
    created, now = state.created, status(state)
    if created is None and refusal is not None and refusal.is_creation:
        now = REFUSED
    ended = state.end.outcome if state.end is not None and now in ENDED else {}
    result = {name: ended[name] for name in ("final_status", "aggregate_metrics") if name in ended}
    return {
        "job_id": state.job_id,
        "status": now,
        "spec": created.spec if created is not None else {},
        "assigned_dcs": created.assigned_dcs if created is not None else [],
        "fence_token": state.fence,
        "completed": min(sum(report.completed for report in state.progress.values()), INTEGER_MAX),
        "failed": min(sum(report.failed for report in state.progress.values()), INTEGER_MAX),
        "actor": created.actor if created is not None else None,
        "created_hlc": "{}:{}:{}".format(*created.order[:3]) if created is not None else None,
        "created_at": rfc3339.text_of(created.order[0]) if created is not None else None,
        "last_hlc": "{}:{}:{}".format(*state.last_hlc),
        "last_at": rfc3339.text_of(state.last_hlc[0]),
        "last_seq": state.last_seq,
        "result": result or None,
        "error": ended.get("error"),
        "refused": _refused(state.refused, refusal),
    }


def _refused(refused: Refused | None, refusal: Refusal | None) -> dict[str, Any] | None:
    """Which event of the job was refused though it was acknowledged, why, and against which it lost or where its bytes
    are kept."""
    if refused is None:
        return (
            None
            if refusal is None
            else {
                "type": EVENTS_BY_ACTION[refusal.action].name,
                "hlc": refusal.hlc.text(),
                "reason": f"sqlstate-{refusal.sqlstate}",
                "seq": refusal.seq,
                "lost_to": None,
            }
        )
    return {
        "type": EVENTS_BY_ACTION[refused.action].name,
        "hlc": "{}:{}:{}".format(*refused.rank[1:4]),
        "reason": refused.reason,
        "seq": None,
        "lost_to": {"job_id": refused.lost_to_job_id, "hlc": refused.lost_to_hlc},
    }


def ended_text(status: str, refused: Refused | None) -> str | None:
    """Why a job takes no more events, to be said behind its name; None while it does."""
    if status == REFUSED and refused is not None:
        how = "the same request" if refused.reason == KEY_REPLAYED else "another request"
        return (
            f"was never made, though it was acknowledged at LOCAL: with its Idempotency-Key {how} had made job "
            f"{refused.lost_to_job_id} first"
        )
    return "has ended and takes no more events" if status in ENDED else None


# --- data centres ---------------------------------------------------------------------------------
#
# A job has the data centres that it is assigned to, and those that have accepted it. An entry that a data centre
# reported of itself (``dc_id``) concerns that one; any other entry of a job concerns all data centres of the job, and
# those that it names.


def reporting_dc(payload: Mapping[str, Any]) -> str | None:
    """The data centre that reported the event of itself; None when none did."""
    dc = payload.get("dc_id")
    return dc if isinstance(dc, str) else None


def named_dcs(payload: Mapping[str, Any]) -> frozenset[str]:
    """The data centres that the payload of an entry names, beside the one that reports it."""
    assigned = payload.get("assigned_dcs")
    named = [payload.get("failed_dc"), *(assigned if isinstance(assigned, list) else ())]
    return frozenset(dc for dc in named if isinstance(dc, str))


def dcs_of(state: JobState) -> frozenset[str]:
    """The data centres of the job."""
    return frozenset((*(state.created.assigned_dcs if state.created is not None else ()), *state.accepted))


def awaits_ack(state: JobState, dc: str) -> bool:
    """Whether the job is to be cancelled, and ``dc``, one of its data centres, has not acknowledged that."""
    return state.cancel is not None and dc not in state.ack and dc in dcs_of(state)

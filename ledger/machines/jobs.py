"""The state of a job, merged from its events: a semilattice, so order and repetition do not matter.

Every event is one small ``JobState``; ``merge`` joins two states field by field::

    merge(a, b) == merge(b, a)      merge(a, merge(b, c)) == merge(merge(a, b), c)      merge(a, a) == a

Of two facts that compete for one field the one of higher rank stays; ``rank = (fence, HLC, digest, seq)``.
Only ``created`` goes the other way: the JobCreated of lowest HLC stays, then of lowest digest.

What one event says is in :mod:`ledger.machines.job_fold`, which also merges many events into one state faster
than this does; the parts of a state are in :mod:`ledger.machines.job_state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson

from ledger import rfc3339
from ledger.chain.conflict import held_event
from ledger.errors import InvalidInputError
from ledger.machines.events import EVENTS_BY_ACTION, SystemAction
from ledger.machines.job_fold import CREATION, JobFold, refused_of
from ledger.machines.job_state import (
    HlcParts,
    JobState,
    Progress,
    Rank,
    Refused,
    Workflow,
    merge_creations,
    seqs_of,
)
from ledger.machines.refusals import Refusal

__all__ = [
    "STATUSES",
    "JobFold",
    "JobState",
    "ended_text",
    "event_fact",
    "fact_of",
    "folded",
    "is_ended",
    "merge",
    "said_of_job",
    "seqs_of",
    "status",
    "view",
]

SUBMITTED: Final = "SUBMITTED"
ACCEPTED: Final = "ACCEPTED"
RUNNING: Final = "RUNNING"
CANCELLING: Final = "CANCELLING"
CANCELLED: Final = "CANCELLED"
COMPLETED: Final = "COMPLETED"
FAILED: Final = "FAILED"
TIMED_OUT: Final = "TIMED_OUT"
REFUSED: Final = "REFUSED"
"""The creation was acknowledged at LOCAL and lost against another of its Idempotency-Key: the job never was."""

STATUSES: Final = (SUBMITTED, ACCEPTED, RUNNING, CANCELLING, CANCELLED, COMPLETED, FAILED, TIMED_OUT, REFUSED)
"""Every status a job can have."""

KEY_REUSED: Final = "idempotency-key-reused"
"""Reason of a refusal: the key of an event that was acknowledged turned out to be taken by another body."""
KEY_REPLAYED: Final = "idempotent-replay"
"""Reason of a refusal: the same request as that of an acknowledged event had been chained as another event."""

ABOUT_JOBS: Final = frozenset((*EVENTS_BY_ACTION, SystemAction.REFUSED.value, SystemAction.CONFLICT.value))
"""Actions of the entries that may say something of their job."""

_ENDED: Final = frozenset((CANCELLED, COMPLETED, FAILED, TIMED_OUT, REFUSED))
_STATUS_OF_END: Final = {"COMPLETE": COMPLETED, "FAIL": FAILED, "TIMEOUT": TIMED_OUT}
ENDING: Final = frozenset((*_STATUS_OF_END, "CANCEL", "CANCEL_ACK", SystemAction.CONFLICT.value))
"""Actions of the entries by which a job may end."""

_Fact = TypeVar("_Fact", Progress, Workflow)


def is_ended(status: str) -> bool:
    """Whether a job of this status takes no more events at the edge."""
    return status in _ENDED


# --- one event as a state -------------------------------------------------------------------------


def said_of_job(
    action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, job_id: str
) -> tuple[str, Mapping[str, Any], HlcParts, str] | None:
    """What an entry says of its job: the first four arguments of ``JobFold.add``, None when it says nothing.

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
    try:
        inner = orjson.loads(held.payload)
    except ValueError:
        inner = None
    return held.event.action, inner if isinstance(inner, dict) else {}, held.hlc, held.event.payload_digest


def fact_of(
    action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, job_id: str, seq: int
) -> JobState | None:
    """The state that one entry is by itself, None when it says nothing of a job.

    Arguments are those of ``event_fact``.
    """
    said = said_of_job(action, payload, hlc, digest, job_id)
    return None if said is None else event_fact(*said, job_id, seq)


def event_fact(action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, job_id: str, seq: int) -> JobState:
    """The state that one event is by itself. Arguments and errors are those of ``JobFold.add``."""
    fold = JobFold(job_id)
    fold.add(action, payload, hlc, digest, seq)
    return fold.state()


def folded(job_id: str, state: JobState | None, entries: Iterable[Sequence[Any]]) -> JobState | None:
    """``state`` merged with what entries say of the job: (seq, *HLC, action, digest, payload) each; None of nothing.

    Raises:
        InvalidInputError: one of them was edited into something that is no entry.
    """
    fold = JobFold(job_id, state)
    for seq, physical, logical, node, action, digest, payload in entries:
        if (*map(type, (seq, physical, logical, node, digest)),) != _ENTRY_TYPES or not isinstance(payload, dict):
            raise InvalidInputError(f"what stands at seq {seq} is no entry")
        said = said_of_job(action, payload, (physical, logical, node), digest, job_id)
        if said is not None:
            fold.add(*said, seq)
    return None if fold.is_empty else fold.state()


_ENTRY_TYPES: Final = (int, int, int, str, str)


# --- merging --------------------------------------------------------------------------------------


def merge(a: JobState, b: JobState) -> JobState:
    """The join of two states of one job.

    Raises:
        InvalidInputError: they are of different jobs.
    """
    (job_id, a_hlc, a_seq, a_fence, a_created, a_cancel, a_run, a_end, a_acc, a_ack, a_progress, a_flow) = a[:12]
    (b_id, b_hlc, b_seq, b_fence, b_created, b_cancel, b_run, b_end, b_acc, b_ack, b_progress, b_flow) = b[:12]
    a_others, a_refused = a.others, a.refused
    b_others, b_refused = b.others, b.refused
    if job_id != b_id:
        raise InvalidInputError(f"states of two jobs cannot be merged: {job_id} and {b_id}")
    if b_created is not None:
        a_created, a_others = merge_creations(a_created, a_others, b_created, b_others)
    if a_cancel is None or (b_cancel is not None and b_cancel > a_cancel):
        a_cancel = b_cancel
    if a_run is None or (b_run is not None and b_run > a_run):
        a_run = b_run
    if a_end is None or (b_end is not None and b_end.rank > a_end.rank):
        a_end = b_end
    if b_flow:
        a_flow = _merge_workflows(a_flow, b_flow) if a_flow else b_flow
    if a_refused is None or (b_refused is not None and b_refused.rank > a_refused.rank):
        a_refused = b_refused
    last_hlc, last_hlc_seq = max((a_hlc, a.last_hlc_seq), (b_hlc, b.last_hlc_seq))
    fence, fence_seq = max((a_fence, a.fence_seq), (b_fence, b.fence_seq))
    return JobState(
        job_id,
        last_hlc,
        a_seq if a_seq >= b_seq else b_seq,
        fence,
        a_created,
        a_cancel,
        a_run,
        a_end,
        _merge_ranks(a_acc, b_acc) if b_acc else a_acc,
        _merge_ranks(a_ack, b_ack) if b_ack else a_ack,
        _merge_facts(a_progress, b_progress) if b_progress else a_progress,
        a_flow,
        a_others,
        a_refused,
        last_hlc_seq,
        fence_seq,
    )


def _merge_ranks(a: Mapping[str, Rank], b: Mapping[str, Rank]) -> Mapping[str, Rank]:
    merged = dict(a)
    for name, rank in b.items():
        held = merged.get(name)
        if held is None or rank > held:
            merged[name] = rank
    return merged


def _merge_facts(a: Mapping[str, _Fact], b: Mapping[str, _Fact]) -> Mapping[str, _Fact]:
    merged = dict(a)
    for name, fact in b.items():
        held = merged.get(name)
        if held is None or fact.rank > held.rank:
            merged[name] = fact
    return merged


def _merge_workflows(
    a: Mapping[str, Mapping[str, Workflow]], b: Mapping[str, Mapping[str, Workflow]]
) -> Mapping[str, Mapping[str, Workflow]]:
    merged = dict(a)
    for dc, workflows in b.items():
        held = merged.get(dc)
        merged[dc] = workflows if held is None else _merge_facts(held, workflows)
    return merged


# --- what a state means ---------------------------------------------------------------------------


def status(state: JobState) -> str:
    """The status: REFUSED for a job that never was, then cancellation, then the highest fence, and within it how far
    the job has come."""
    if state.refused is not None and state.created is None and state.refused.action == CREATION:
        return REFUSED
    if state.cancel is not None:
        if state.end is not None or _all_acknowledged(state):
            return CANCELLED
        return CANCELLING
    fence, value = -1, SUBMITTED
    if state.end is not None:
        fence, value = state.end.rank[0], _STATUS_OF_END[state.end.action]
    if state.run is not None and state.run[0] > fence:
        fence, value = state.run[0], RUNNING
    for rank in state.accepted.values():
        if rank[0] > fence:
            fence, value = rank[0], ACCEPTED
    return value


def _all_acknowledged(state: JobState) -> bool:
    assigned = state.created.assigned_dcs if state.created is not None else ()
    asked = state.accepted.keys() or assigned
    return bool(state.ack) and all(dc in state.ack for dc in asked)


def view(state: JobState, refusal: Refusal | None = None) -> dict[str, Any]:
    """What ``GET /v1/jobs/{job_id}`` says of the job itself; tenant and consistency are the caller's. ``refusal`` is of
    an event of the job that PostgreSQL would not hold."""
    created, now = state.created, status(state)
    if created is None and refusal is not None and refusal.is_creation:
        now = REFUSED
    outcome = state.end.outcome if state.end is not None and is_ended(now) else {}
    result = {name: outcome[name] for name in ("final_status", "aggregate_metrics") if name in outcome}
    return {
        "job_id": state.job_id,
        "status": now,
        "spec": created.spec if created is not None else {},
        "assigned_dcs": created.assigned_dcs if created is not None else [],
        "fence_token": state.fence,
        "completed": sum(report.completed for report in state.progress.values()),
        "failed": sum(report.failed for report in state.progress.values()),
        "created_hlc": "{}:{}:{}".format(*created.order[:3]) if created is not None else None,
        "created_at": rfc3339.text_of(created.order[0]) if created is not None else None,
        "last_hlc": "{}:{}:{}".format(*state.last_hlc),
        "last_at": rfc3339.text_of(state.last_hlc[0]),
        "last_seq": state.last_seq,
        "result": result or None,
        "error": outcome.get("error"),
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
    return "has ended and takes no more events" if is_ended(status) else None

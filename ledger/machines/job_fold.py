"""The state of one job while events, or other states of it, are merged into it in place.

A semilattice, so order and repetition do not matter. With ``a | b`` for the state that joining a with b gives, where an
event counts as the state that it is by itself::

    a | b == b | a      a | (b | c) == (a | b) | c      a | a == a

Of two facts that compete for one field the one of higher rank stays; ``rank = (fence, HLC, digest, seq)``. Only
``created`` goes the other way: the JobCreated of lowest HLC stays, then of lowest digest; of the others it is
remembered which said something else.

A fact is recorded whatever it says; a field of the wrong type counts as not given. So the fold is total over payloads,
also over those of a chain that someone has edited.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, TypeVar

from ledger.canonical import INTEGER_MAX
from ledger.errors import InvalidInputError
from ledger.facts.events import ACTIONS, ACTOR, EVENTS_BY_ACTION, JOB_EVENTS, Part, SystemAction
from ledger.machines.job_state import (
    Created,
    End,
    HlcParts,
    JobState,
    Progress,
    Rank,
    Refused,
    Workflow,
    merge_creations,
)

_Fact = TypeVar("_Fact", Progress, Workflow)
_Key = TypeVar("_Key")

CREATION: Final = JOB_EVENTS["JobCreated"].action


_PARTS: Final = attrgetter(*JobState._fields)
_NOTHING: Final = JobState("", (0, 0, ""), 0, 0)
"""What is known of a job before its first event."""


class JobFold:
    """What is known of one job so far; empty, or what ``state`` says. ``state`` itself is never changed."""

    __slots__ = ("is_empty", *JobState._fields)

    def __init__(self, job_id: str, state: JobState | None = None) -> None:
        self.is_empty = state is None
        known = _NOTHING if state is None else state
        _, self.last_hlc, self.last_seq, self.fence, self.created, self.cancel, reached, self.end, *_ = known
        self.job_id = job_id
        self.reached = dict(reached)
        self.accepted, self.ack, self.progress = dict(known.accepted), dict(known.ack), dict(known.progress)
        self.workflow = {dc: dict(facts) for dc, facts in known.workflow.items()}
        self.others = known.others
        self.refused, self.last_hlc_seq, self.fence_seq = known.refused, known.last_hlc_seq, known.fence_seq

    def add(self, action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, seq: int) -> None:
        """Merge one event.

        ``digest`` is the payload's SHA-256 as lowercase hex, ``seq`` the event's place in the chain (0 when it has none
        yet). Never raises for what ``payload`` holds.

        Raises:
            InvalidInputError: ``action`` is neither that of a job event nor REFUSED.
        """
        take = _TAKE.get(action)
        if take is None:
            raise InvalidInputError(f"{action} is not the action of a job event")
        fence = _count(payload.get("fence_token"))
        if self.is_empty:
            self.last_hlc, self.fence = hlc, fence
            self.last_seq = self.last_hlc_seq = self.fence_seq = seq
            self.is_empty = False
        else:
            if hlc > self.last_hlc or (hlc == self.last_hlc and seq > self.last_hlc_seq):
                self.last_hlc, self.last_hlc_seq = hlc, seq
            if seq > self.last_seq:
                self.last_seq = seq
            if fence > self.fence or (fence == self.fence and seq > self.fence_seq):
                self.fence, self.fence_seq = fence, seq
        take(self, (fence, hlc[0], hlc[1], hlc[2], digest, seq), action, payload)

    def join(self, other: JobState) -> None:
        """Merge another state of the job.

        Raises:
            InvalidInputError: it is of another job.
        """
        if other.job_id != self.job_id:
            raise InvalidInputError(f"states of two jobs cannot be merged: {self.job_id} and {other.job_id}")
        self.is_empty = False
        self.last_hlc, self.last_hlc_seq = max((self.last_hlc, self.last_hlc_seq), (other.last_hlc, other.last_hlc_seq))
        self.fence, self.fence_seq = max((self.fence, self.fence_seq), (other.fence, other.fence_seq))
        self.last_seq = max(self.last_seq, other.last_seq)
        self.created, self.others = merge_creations(self.created, self.others, other.created, other.others)
        if other.cancel is not None:
            _take_cancelled(self, other.cancel)
        for part, rank in other.reached.items():
            _raise_rank(self.reached, part, rank)
        if other.end is not None and (self.end is None or other.end.rank > self.end.rank):
            self.end = other.end
        if other.refused is not None and (self.refused is None or other.refused.rank > self.refused.rank):
            self.refused = other.refused
        for dc, rank in other.accepted.items():
            _raise_rank(self.accepted, dc, rank)
        for dc, rank in other.ack.items():
            _raise_rank(self.ack, dc, rank)
        _raise_facts(self.progress, other.progress)
        for dc, facts in other.workflow.items():
            _raise_facts(self.workflow.setdefault(dc, {}), facts)

    def state(self) -> JobState:
        """What was folded so far; to be asked once nothing more is added."""
        return JobState._make(_PARTS(self))


Take = Callable[[JobFold, Rank, str, Mapping[str, Any]], None]
"""Takes what one kind of event says beside fence and position."""


def _take_created(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    assigned = payload.get("assigned_dcs")
    if assigned.__class__ is not list or not all(dc.__class__ is str for dc in assigned):
        assigned = []
    created = Created(rank[1:], payload.get("spec", {}), assigned, payload.get(ACTOR))
    fold.created, fold.others = merge_creations(fold.created, fold.others, created, {})


def _take_cancelled(fold: JobFold, rank: Rank, *_: Any) -> None:
    if fold.cancel is None or rank > fold.cancel:
        fold.cancel = rank


def _take_ended(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    if fold.end is not None and fold.end.rank >= rank:
        return
    outcome: dict[str, Any] = {}
    if action == "COMPLETE":
        for name in ("final_status", "aggregate_metrics"):
            if name in payload:
                outcome[name] = payload[name]
    else:
        name = "error" if action == "FAIL" else "timeout_type"
        if name in payload:
            outcome["error"] = payload[name]
    fold.end = End(rank, action, outcome)


def _take_of_dc(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    dc = payload.get("dc_id")
    if dc.__class__ is str:
        _raise_rank(fold.ack if EVENTS_BY_ACTION[action].part is Part.ACKNOWLEDGEMENT else fold.accepted, dc, rank)


def _take_reached(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    _raise_rank(fold.reached, EVENTS_BY_ACTION[action].part, rank)


def _raise_rank(ranks: dict[_Key, Rank], key: _Key, rank: Rank) -> None:
    held = ranks.get(key)
    if held is None or rank > held:
        ranks[key] = rank


def _raise_facts(facts: dict[str, _Fact], others: Mapping[str, _Fact]) -> None:
    for name, fact in others.items():
        held = facts.get(name)
        if held is None or fact.rank > held.rank:
            facts[name] = fact


def _take_progress(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    _raise_rank(fold.reached, Part.RUN, rank)
    dc = payload.get("dc_id")
    if dc.__class__ is str:
        held = fold.progress.get(dc)
        if held is None or rank > held.rank:
            fold.progress[dc] = Progress(rank, _count(payload.get("completed")), _count(payload.get("failed")))


def _take_workflow(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    _raise_rank(fold.reached, Part.RUN, rank)
    dc, workflow_id = payload.get("dc_id"), payload.get("workflow_id")
    if dc.__class__ is str and workflow_id.__class__ is str:
        facts = fold.workflow.setdefault(dc, {})
        held = facts.get(workflow_id)
        if held is None or rank > held.rank:
            facts[workflow_id] = Workflow(rank, action)


def _take_refused(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    refused = refused_of(payload, fold.job_id)
    if refused is None:
        return
    refused_action, reason, lost_to = refused
    order = (int(refused_action == CREATION), *rank[1:])
    if fold.refused is None or order > fold.refused.rank:
        fold.refused = Refused(order, refused_action, reason, lost_to["job_id"], lost_to["hlc"])


def refused_of(payload: Mapping[str, Any], job_id: str) -> tuple[str, str, Mapping[str, str]] | None:
    """Action, reason and winner of the event of ``job_id`` that a REFUSED entry keeps because it lost against another
    of its key; None of any other REFUSED entry."""
    reason, lost_to, kind, kept = (payload.get(name) for name in ("reason", "lost_to", "record_type", "job_id"))
    if not isinstance(reason, str) or not isinstance(lost_to, dict) or kind.__class__ is not int:
        return None
    if not all(isinstance(lost_to.get(name), str) for name in ("job_id", "hlc")):
        return None
    if ACTIONS.get(kind) not in EVENTS_BY_ACTION or kept != b64encode(job_id.encode("utf-8", "replace")).decode():
        return None
    return ACTIONS[kind], reason, lost_to


def _count(value: Any) -> int:
    return int(value) if value.__class__ is int and 0 <= value <= INTEGER_MAX else 0


_RULES: Final[Mapping[Part, Take]] = {
    Part.CREATION: _take_created,
    Part.ACCEPTANCE: _take_of_dc,
    Part.PROGRESS: _take_progress,
    Part.WORKFLOW: _take_workflow,
    Part.CANCELLATION: _take_cancelled,
    Part.ACKNOWLEDGEMENT: _take_of_dc,
    Part.END: _take_ended,
}
"""The parts of a state that are more than the newest event that raised them."""
_TAKE: Final[Mapping[str, Take]] = {
    SystemAction.REFUSED.value: _take_refused,
    **{action: _RULES.get(event.part, _take_reached) for action, event in EVENTS_BY_ACTION.items()},
}

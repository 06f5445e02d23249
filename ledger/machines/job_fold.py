"""The merged state of one job, and the fold that merges events, or other states of the job, into it in place.

Every part of a state has the seq of its entry as the last element of its order, so of two equal facts one wins.
Folding only the entries of ``seqs_of(state)`` gives all that is shown of a job: a table of jobs need keep no more.

States are a semilattice, so order and repetition do not matter. ``a | b`` is the join of states a and b; an event is
the state of its fold alone::

    a | b == b | a      a | (b | c) == (a | b) | c      a | a == a

Of two facts that compete for one field the one of higher rank stays; ``rank = (fence, HLC, digest, seq)``. Only
``created`` is the reverse: the JobCreated of lowest HLC stays, then of lowest digest; other creations that differ from
it are kept too.

Every fact is recorded; a field of the wrong type is treated as missing. So the fold is total over payloads, edited ones
included.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

from ledger import canonical
from ledger.canonical import INTEGER_MAX, NESTING_MAX
from ledger.errors import CanonicalError, InvalidInputError
from ledger.facts.events import ACTIONS, ACTOR, EVENTS_BY_ACTION, JOB_EVENTS, TRACEPARENT, Part, SystemAction
from ledger.machines.exclusions import UNCOUNTED
from ledger.private_fields import PRIVATE_MARK

HlcParts = tuple[int, int, str]
"""``(physical_ms, logical, node_id)``; a ``ledger.hlc.Hlc`` is one."""

Rank = tuple[int, int, int, str, str, int]
"""``(fence, physical_ms, logical, node_id, payload digest as hex, seq)``; seq is 0 for an unchained event."""

Order = tuple[int, int, str, str, int]
"""``(*HLC, payload digest, seq)``; among creations of a job the lowest wins."""

CREATOR_CHARACTERS_MAX: Final = 256
"""Longest name by which jobs are listed; no principal has a longer one."""
TRACE_SECONDS_MAX: Final = 10**11
"""Later times of a trace, about 3,000 years, count as missing."""
OTHERS_MAX: Final = 16
"""Most creations that a state keeps besides the first, if they differ from it: those of lowest order."""


class Created(NamedTuple):
    """The first JobCreated."""

    order: Order
    spec: Any
    assigned_dcs: list[str]
    actor: Any = None
    """The job's creator, None if unknown; sealed if it is private."""
    traced_ms: int | None = None
    """The time of the event in a trace, if it carries one."""
    traceparent: Any = None
    """The span that created the job, None if it named none."""


class End(NamedTuple):
    """The winning end; ``outcome`` holds its final_status, aggregate_metrics and error, as far as given."""

    rank: Rank
    action: str
    outcome: Mapping[str, Any]
    traced_ms: int | None = None
    """As in ``Created``."""


class Progress(NamedTuple):
    """The winning progress report of one data centre."""

    rank: Rank
    completed: int
    failed: int


class Workflow(NamedTuple):
    """The winning fact about one workflow; ``action`` is DISPATCH or WORKFLOW_COMPLETE."""

    rank: Rank
    action: str


class Refused(NamedTuple):
    """An acknowledged event of the job that lost against another of its Idempotency-Key, from its REFUSED entry. A
    creation takes precedence, then the newest."""

    rank: Rank
    """``(1 for a creation else 0, *HLC, digest, seq)`` of the entry."""
    action: str
    reason: str
    lost_to_job_id: str
    lost_to_hlc: str


class JobState(NamedTuple):
    """All that is known of one job. Never change a state in place: states share their parts."""

    job_id: str
    last_hlc: HlcParts
    last_seq: int
    fence: int
    """Highest fence token seen."""
    created: Created | None = None
    cancel: Rank | None = None
    reached: Mapping[Part, Rank] = {}
    """The highest rank of each part of ``ledger.facts.statuses.REACHED``."""
    end: End | None = None
    accepted: Mapping[str, Rank] = {}
    ack: Mapping[str, Rank] = {}
    progress: Mapping[str, Progress] = {}
    workflow: Mapping[str, Mapping[str, Workflow]] = {}
    others: Mapping[str, Order] = {}
    """By ``creation_digest``, the first of each group of creations that differ from ``created``."""
    refused: Refused | None = None
    last_hlc_seq: int = 0
    """Seq of the entry of ``last_hlc``."""
    fence_seq: int = 0
    """Seq of the newest entry of that fence."""
    uncounted: int = 0
    """Seq of the newest entry whose fact does not count, because its log is excluded; 0 without one."""
    traced_ms: Mapping[str, int] = {}
    """By data centre, the time of its acceptance in a trace, if the event carries one."""


_NOTHING: Final = JobState("", (0, 0, ""), 0, 0)
"""The state of a job before its first event."""
_ELSE: Final = slice(JobState._fields.index("created") + 1, JobState._fields.index("last_hlc_seq"))
_NOTHING_ELSE: Final[Any] = _NOTHING[_ELSE]
"""What the state of a job that is only created has besides its creation."""


def seqs_of(state: JobState) -> list[int]:
    """Ascending seqs of the entries that determine ``state``: folding only these gives it again, except for its
    workflows. A job may have thousands of these; no shown field depends on them, and the log has them."""
    seqs = {state.last_seq, state.last_hlc_seq, state.fence_seq}
    if state.created is not None:
        seqs.add(state.created.order[-1])
    if state.uncounted:
        seqs.add(state.uncounted)
    if state[_ELSE] == _NOTHING_ELSE:
        return sorted(seqs)
    ranks: Mapping[str, Rank] | Mapping[Part, Rank] | Mapping[str, Order]
    for ranks in (state.accepted, state.ack, state.reached, state.others):
        if ranks:
            seqs.update([rank[-1] for rank in ranks.values()])
    if state.cancel is not None:
        seqs.add(state.cancel[-1])
    for fact in (state.end, state.refused, *state.progress.values()):
        if fact is not None:
            seqs.add(fact.rank[-1])
    return sorted(seqs)


def creator_of(state: JobState) -> str | None:
    """The principal that created the job, by which it is listed; None if it is unknown or private, or if an edited
    payload holds no name."""
    return None if state.created is None else creator_named(state.created.actor)


def creator_named(actor: Any) -> str | None:
    """The principal that a creation names, as ``creator_of``."""
    is_name = actor.__class__ is str and 0 < len(actor) <= CREATOR_CHARACTERS_MAX and actor.isprintable()
    return actor if is_name else None


def creation_digest(spec: Any, assigned_dcs: list[str]) -> str:
    """SHA-256, in hex, of the canonical JSON of a creation's content.

    Raises:
        CanonicalError: there is no canonical form.
    """
    return hashlib.sha256(_encoded({"assigned_dcs": assigned_dcs, "spec": spec})).hexdigest()


def creation_of(spec: Any, assigned_dcs: list[str]) -> str | None:
    """The ``creation_digest``; None if it would cover sealed values, which cannot be compared, or edited values without
    a canonical form."""
    try:
        encoded = _encoded({"assigned_dcs": assigned_dcs, "spec": spec})
    except CanonicalError:
        return None
    return None if f'"{PRIVATE_MARK}"'.encode() in encoded else hashlib.sha256(encoded).hexdigest()


def merge_creations(
    a: Created | None, a_others: Mapping[str, Order], b: Created | None, b_others: Mapping[str, Order]
) -> tuple[Created | None, Mapping[str, Order]]:
    """The winner of two creations, and the creations that differ from it, from two states of one job."""
    if a is None or b is None:
        return (b, b_others) if a is None else (a, a_others)
    first, second = (a, b) if a.order <= b.order else (b, a)
    if first.order[3] == second.order[3] and not a_others and not b_others:
        return first, _NO_OTHERS
    found = dict(a_others)
    for digest, order in (*b_others.items(), (_digest_of(second), second.order)):
        found[digest] = min(order, found.get(digest, order))
    found.pop(_digest_of(first), None)
    return first, dict(sorted(found.items(), key=lambda item: item[1])[:OTHERS_MAX])


def _digest_of(created: Created) -> str:
    """The identity of a creation; an edited payload without canonical form is unique."""
    try:
        return creation_digest(created.spec, created.assigned_dcs)
    except CanonicalError:
        return created.order[3]


_NO_OTHERS: Final[Mapping[str, Order]] = {}


def _encoded(value: dict[str, Any]) -> bytes:
    try:
        return canonical.encode(value)
    except CanonicalError:
        return canonical.encode(_binary64(value, NESTING_MAX))


def _binary64(value: Any, depth_left: int) -> Any:
    """``value`` with integers beyond 2^53 as the floats they were before canonical JSON printed them."""
    if depth_left == 0:
        raise CanonicalError(f"nested deeper than {NESTING_MAX}")
    if value.__class__ is int and abs(value) > INTEGER_MAX:
        try:
            return float(value)
        except OverflowError as error:
            raise CanonicalError(f"an integer of {value.bit_length()} bits is not a binary64") from error
    if isinstance(value, dict):
        return {name: _binary64(part, depth_left - 1) for name, part in value.items()}
    return [_binary64(part, depth_left - 1) for part in value] if isinstance(value, list | tuple) else value


def created_state(job_id: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, seq: int) -> JobState:
    """The fold of one JobCreated, which is all that most jobs are when they are first followed."""
    fence, created = _count(payload.get("fence_token")), _created((*hlc, digest, seq), payload)
    return JobState._make((job_id, hlc, seq, fence, created, *_NOTHING_ELSE, seq, seq, 0, _NOTHING.traced_ms))


# --- folding --------------------------------------------------------------------------------------

_Fact = TypeVar("_Fact", Progress, Workflow)
_Key = TypeVar("_Key")

CREATION: Final = JOB_EVENTS["JobCreated"].action


_PARTS: Final = attrgetter(*JobState._fields)


class JobFold:
    """Folds events of one job, starting empty or from ``state``. ``state`` itself is never changed."""

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
        self.uncounted = known.uncounted
        self.traced_ms = dict(known.traced_ms)

    def add(self, action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, seq: int) -> None:
        """Merge one event.

        ``digest`` is the payload's SHA-256 as lowercase hex, ``seq`` the event's place in the chain (0 when it has none
        yet). Never raises for what ``payload`` holds.

        Raises:
            InvalidInputError: ``action`` is not that of a job event, REFUSED or UNCOUNTED.
        """
        if (take := _TAKE.get(action)) is None:
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
        self.uncounted = max(self.uncounted, other.uncounted)
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
            _take_accepted(self, dc, rank, other.traced_ms.get(dc))
        for dc, rank in other.ack.items():
            _raise_rank(self.ack, dc, rank)
        _raise_facts(self.progress, other.progress)
        for dc, facts in other.workflow.items():
            _raise_facts(self.workflow.setdefault(dc, {}), facts)

    def state(self) -> JobState:
        """The folded state; call it after the last event is added."""
        return JobState._make(_PARTS(self))


Take = Callable[[JobFold, Rank, str, Mapping[str, Any]], None]
"""Merges the content of one kind of event, apart from fence and position."""


def _take_uncounted(fold: JobFold, rank: Rank, *_: Any) -> None:
    fold.uncounted = max(fold.uncounted, rank[-1])


def _take_created(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    fold.created, fold.others = merge_creations(fold.created, fold.others, _created(rank[1:], payload), {})


def _created(order: Order, payload: Mapping[str, Any]) -> Created:
    said = payload.get(ACTOR), traced_ms(payload.get("trace_time")), payload.get(TRACEPARENT)
    return Created(order, payload.get("spec", {}), assigned_dcs(payload.get("assigned_dcs")), *said)


def assigned_dcs(value: Any) -> list[str]:
    """The data centres that a creation assigns; an edited payload may hold any value."""
    return value if value.__class__ is list and all(dc.__class__ is str for dc in value) else []


def traced_ms(seconds: Any) -> int | None:
    """The ``trace_time`` of an event in milliseconds; None if it carries none."""
    is_time = seconds.__class__ in (int, float) and abs(seconds) <= TRACE_SECONDS_MAX
    return int(seconds * 1000 + (0.5 if seconds > 0 else -0.5)) if is_time else None


def _take_cancelled(fold: JobFold, rank: Rank, *_: Any) -> None:
    if fold.cancel is None or rank > fold.cancel:
        fold.cancel = rank


def _take_ended(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    if fold.end is not None and fold.end.rank >= rank:
        return
    if action == "COMPLETE":
        outcome = {name: payload[name] for name in ("final_status", "aggregate_metrics") if name in payload}
    else:
        name = "error" if action == "FAIL" else "timeout_type"
        outcome = {"error": payload[name]} if name in payload else {}
    fold.end = End(rank, action, outcome, traced_ms(payload.get("trace_time")))


def _take_of_dc(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    dc = payload.get("dc_id")
    if dc.__class__ is not str:
        return
    if EVENTS_BY_ACTION[action].part is Part.ACKNOWLEDGEMENT:
        _raise_rank(fold.ack, dc, rank)
    else:
        _take_accepted(fold, dc, rank, traced_ms(payload.get("trace_time")))


def _take_accepted(fold: JobFold, dc: str, rank: Rank, at_ms: int | None) -> None:
    if (held := fold.accepted.get(dc)) is None or rank > held:
        fold.accepted[dc] = rank
        fold.traced_ms.pop(dc, None)
        if at_ms is not None:
            fold.traced_ms[dc] = at_ms


def _take_reached(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    _raise_rank(fold.reached, EVENTS_BY_ACTION[action].part, rank)


def _raise_rank(ranks: dict[_Key, Rank], key: _Key, rank: Rank) -> None:
    if (held := ranks.get(key)) is None or rank > held:
        ranks[key] = rank


def _raise_facts(facts: dict[str, _Fact], others: Mapping[str, _Fact]) -> None:
    for name, fact in others.items():
        if (held := facts.get(name)) is None or fact.rank > held.rank:
            facts[name] = fact


def _take_progress(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    _raise_rank(fold.reached, Part.RUN, rank)
    dc = payload.get("dc_id")
    if dc.__class__ is str and ((held := fold.progress.get(dc)) is None or rank > held.rank):
        fold.progress[dc] = Progress(rank, _count(payload.get("completed")), _count(payload.get("failed")))


def _take_workflow(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    _raise_rank(fold.reached, Part.RUN, rank)
    dc, workflow_id = payload.get("dc_id"), payload.get("workflow_id")
    if dc.__class__ is str and workflow_id.__class__ is str:
        facts = fold.workflow.setdefault(dc, {})
        if (held := facts.get(workflow_id)) is None or rank > held.rank:
            facts[workflow_id] = Workflow(rank, action)


def _take_refused(fold: JobFold, rank: Rank, action: str, payload: Mapping[str, Any]) -> None:
    if (refused := refused_of(payload, fold.job_id)) is None:
        return
    refused_action, reason, lost_to = refused
    order = (int(refused_action == CREATION), *rank[1:])
    if fold.refused is None or order > fold.refused.rank:
        fold.refused = Refused(order, refused_action, reason, lost_to["job_id"], lost_to["hlc"])


def refused_of(payload: Mapping[str, Any], job_id: str) -> tuple[str, str, Mapping[str, str]] | None:
    """Action, reason and winner of the event of ``job_id`` that a REFUSED entry keeps because the event lost against
    another of its key; None for any other REFUSED entry."""
    reason, lost_to, kind, kept = (payload.get(name) for name in ("reason", "lost_to", "record_type", "job_id"))
    if (
        not isinstance(reason, str)
        or not isinstance(lost_to, dict)
        or kind.__class__ is not int
        or not all(isinstance(lost_to.get(name), str) for name in ("job_id", "hlc"))
        or ACTIONS.get(kind) not in EVENTS_BY_ACTION
        or kept != b64encode(job_id.encode("utf-8", "replace")).decode()
    ):
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
"""The parts of a state that hold more than the rank of their newest event."""
_TAKE: Final[Mapping[str, Take]] = {
    SystemAction.REFUSED.value: _take_refused,
    UNCOUNTED: _take_uncounted,
    **{action: _RULES.get(event.part, _take_reached) for action, event in EVENTS_BY_ACTION.items()},
}

"""The facts that entries give about their job, and the meaning of its state.

The state of a job, and the merging of events and states, is in :mod:`ledger.machines.job_fold`. States folded
separately from parts of a chain are merged in the order of the parts (``merge_states``): the result is the fold of all
entries in chain order.

An event that PostgreSQL refused is kept by a REFUSED entry. The reason may be its job id, so the entry has another job
id that follows from it::

    "refused:" + lowercase hex SHA-256 of the job id

Its payload has the event's record type, job id, bytes (base64) and the SQLSTATE. It is not part of the job's state.
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
from ledger.facts.events import ACTIONS, EVENTS_BY_ACTION, JOB_EVENTS, Part, SystemAction
from ledger.facts.statuses import ACCEPTED, CANCELLED, CANCELLING, ENDED, REACHED, REFUSED, STATUS_OF_END, SUBMITTED
from ledger.hlc import Hlc
from ledger.machines.exclusions import COUNT_ALL, UNCOUNTED, Exclusions
from ledger.machines.job_fold import (
    CREATION,
    HlcParts,
    JobFold,
    JobState,
    Refused,
    created_state,
    creation_of,
    creator_of,
    refused_of,
    seqs_of,
)

__all__ = [
    "JobFold",
    "JobParts",
    "JobState",
    "Refusal",
    "awaits_ack",
    "conflict_of",
    "conflicts",
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
"""Reason of a refusal: the key of an acknowledged event was already taken by another body."""
KEY_REPLAYED: Final = "idempotent-replay"
"""Reason of a refusal: the request of an acknowledged event was already chained as another event."""

ABOUT_JOBS: Final = frozenset((*EVENTS_BY_ACTION, SystemAction.REFUSED.value, SystemAction.CONFLICT.value))
"""Actions of the entries that may be about a job."""

_MAY_END: Final = frozenset((Part.END, Part.CANCELLATION, Part.ACKNOWLEDGEMENT))
ENDING: Final = frozenset(
    (*(event.action for event in JOB_EVENTS.values() if event.part in _MAY_END), SystemAction.CONFLICT.value)
)
"""Actions of the entries by which a job may end."""

_STATE_DECODER: Final = msgspec.msgpack.Decoder(JobState)

Said = tuple[str, Mapping[str, Any], HlcParts, str]
"""An entry's fact about its job: action, payload, HLC and digest, the first four arguments of ``JobFold.add``."""


# --- what an entry says ---------------------------------------------------------------------------


def said_of_job(action: str, payload: Mapping[str, Any], hlc: HlcParts, digest: str, job_id: str) -> Said | None:
    """An entry's fact about its job, None if it has none.

    A CONFLICT entry is treated as the event that it holds, so the order in which two events of one HLC were chained
    makes no difference. A REFUSED entry that names a winner gives the fact that its event lost.
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
    job_id: Any,
    seq: Any,
    physical: Any,
    logical: Any,
    node: Any,
    action: Any,
    digest: Any,
    text: Any,
    origin: Any = None,
    *,
    exclusions: Exclusions = COUNT_ALL,
) -> Said | None:
    """A stored row's fact about its job, None if it has none or was edited into other types. A fact of an excluded log
    is UNCOUNTED and says nothing but that it exists."""
    if (
        job_id.__class__ is node.__class__ is digest.__class__ is str
        and seq.__class__ is physical.__class__ is logical.__class__ is int
    ):
        payload, hlc = payload_of(text), (physical, logical, node)
        if action in EVENTS_BY_ACTION:
            said: Said | None = (action, payload, hlc, digest)
        else:
            said = said_of_job(action, payload, hlc, digest, job_id)
        if said is not None and exclusions.logs and not exclusions.counts(origin):
            return UNCOUNTED, {}, said[2], said[3]
        return said
    return None


def payload_of(text: Any) -> dict[str, Any]:
    """The payload, empty if an edit made it no object."""
    try:
        payload = orjson.loads(text)
    except (ValueError, TypeError):
        return {}
    return payload if isinstance(payload, dict) else {}


def folded(
    job_id: str, state: JobState | None, rows: Iterable[Sequence[Any]], exclusions: Exclusions = COUNT_ALL
) -> JobState | None:
    """``state`` merged with the facts of rows of ``FOLD_COLUMNS`` about the job; None if there is no fact. ``state``
    MUST be folded with the same exclusions."""
    facts = [(*said, row[1]) for row in rows if (said := said_of_row(*row, exclusions=exclusions)) is not None]
    if state is None and len(facts) == 1 and facts[0][0] == CREATION:
        return created_state(job_id, *facts[0][1:])
    fold = JobFold(job_id, state)
    for fact in facts:
        fold.add(*fact)
    return None if fold.is_empty else fold.state()


# --- states of parts of a chain -------------------------------------------------------------------


class JobParts:
    """Folds entries up to ``upto_seq`` into the states of their jobs, which are all held in memory."""

    def __init__(self, upto_seq: int = 2**63 - 1, exclusions: Exclusions = COUNT_ALL) -> None:
        self._upto_seq = upto_seq
        self._exclusions = exclusions
        self._folds: dict[str, JobFold] = {}

    def __len__(self) -> int:
        return len(self._folds)

    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        """Add the next entries, by ``ENTRY_COLUMNS``; entries without a fact about a job are skipped."""
        seqs, _, physical, logical, nodes, job_ids, actions, _, _, _, digests, texts, origins = columns
        folds, exclusions = self._folds, self._exclusions
        for job_id, seq, *facts in zip(
            job_ids, seqs, physical, logical, nodes, actions, digests, texts, origins, strict=True
        ):
            said = said_of_row(job_id, seq, *facts, exclusions=exclusions)
            if said is not None and seq <= self._upto_seq:
                if job_id not in folds:
                    folds[job_id] = JobFold(job_id)
                folds[job_id].add(*said, seq)

    def take(self) -> list[JobState]:
        """Remove and return the states so far."""
        states = [fold.state() for fold in self._folds.values()]
        self._folds.clear()
        return states


def merge_states(parts: Sequence[JobState]) -> JobState | None:
    """The state of one job, from its parts in chain order; None if there are no parts."""
    if not parts:
        return None
    fold = JobFold(parts[0].job_id, parts[0])
    for part in parts[1:]:
        fold.join(part)
    return fold.state()


def encode_state(state: JobState) -> bytes:
    """``state`` as MessagePack; also encodes what edited payloads left in it."""
    try:
        return msgspec.msgpack.encode(state)
    except (RecursionError, OverflowError):
        return msgspec.msgpack.encode(_shallow(state, NESTING_MAX + len(("state", "created", "spec"))))


def decode_state(data: bytes) -> JobState:
    """Decode the bytes of ``encode_state``; the result has the original's canonical form, or like the original none."""
    return _STATE_DECODER.decode(data)


def _shallow(value: Any, room: int) -> Any:
    """``value`` without parts that are nested too deep for a canonical form."""
    if isinstance(value, dict):
        return {name: _shallow(part, room - 1) for name, part in value.items()} if room else {}
    if isinstance(value, list | tuple):
        return [_shallow(part, room - 1) for part in value] if room else []
    return value


# --- refused events -------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A REFUSED entry for an event that PostgreSQL refused."""

    seq: int
    hlc: Hlc
    action: str
    """Action of the event that it keeps."""
    sqlstate: str

    @property
    def is_creation(self) -> bool:
        """Whether the event was a creation of the job."""
        return self.action == CREATION

    def text(self) -> str:
        """The reason why the job accepts no events, as text to follow the job's name."""
        return (
            f"was never made: PostgreSQL refused its creation with SQLSTATE {self.sqlstate}, and the REFUSED entry at "
            f"seq {self.seq} keeps its bytes; mend what refuses it and create the job again"
        )


def refused_job_id(job_id: str) -> str:
    """Job id of the entries that replace refused events of ``job_id``."""
    return f"refused:{sha256(job_id.encode()).hexdigest()}"


def refusal_of(job_id: str, entries: Iterable[tuple[int, str, str]]) -> Refusal | None:
    """The refusal of the job's first creation, else of its newest event, from REFUSED entries as (seq, HLC, payload);
    None if none is about this job."""
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
    """The status: REFUSED if the job was never created, then cancellation, then the status of the highest fence, and
    within a fence the one of highest precedence."""
    if state.refused is not None and state.created is None and state.refused.action == CREATION:
        return REFUSED
    if state.cancel is not None:
        return CANCELLED if state.end is not None or _all_acknowledged(state) else CANCELLING
    fence, value = (-1, SUBMITTED) if state.end is None else (state.end.rank[0], STATUS_OF_END[state.end.action])
    if state.reached:
        for part, reached in REACHED:
            if (held := state.reached.get(part)) is not None and held[0] > fence:
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
    """The end's final_status, aggregate_metrics and error, as far as they apply."""
    return state.end.outcome if state.end is not None and status(state) in ENDED else {}


def run_ms(state: JobState) -> int | None:
    """The run time of an ended job: from the first acceptance to the end that counts, of the try that ended. None if no
    data centre accepted it, or if it ends before it starts."""
    if (end := state.end) is None:
        return None
    fence = max((rank[0] for rank in state.accepted.values() if rank[0] <= end.rank[0]), default=None)
    if fence is None:
        return None
    started = {dc: rank[1] for dc, rank in state.accepted.items() if rank[0] == fence}
    if end.traced_ms is not None and started.keys() <= state.traced_ms.keys():
        ran_ms = end.traced_ms - min(state.traced_ms[dc] for dc in started)
    else:
        ran_ms = end.rank[1] - min(started.values())
    return ran_ms if ran_ms >= 0 else None


def ended_ms(state: JobState) -> int:
    """When an ended job ended: with its end, or the last acknowledgement of its cancellation."""
    if state.end is not None:
        return state.end.rank[1]
    return max(rank[1] for rank in (state.cancel, *state.ack.values()) if rank is not None)


def times_of_end(state: JobState, status: str) -> tuple[int | None, int | None]:
    """When a job of this status ended, and its run time; None while it runs, or if it never was."""
    return (ended_ms(state), run_ms(state)) if status in ENDED and status != REFUSED else (None, None)


NAME_CHARACTERS_MAX: Final = 200
"""How much of a job's name is shown and searched."""


def name_of(state: JobState) -> str | None:
    """What people call the job: the member of its spec that names it, else its command line; None without either."""
    match state.created.spec if state.created is not None else None:
        case {"name": str(name)} | {"task": str(name)} | {"job": str(name)} | {"script": str(name)}:
            pass
        case {"command": list(parts)}:
            name = " ".join(str(part) for part in parts if isinstance(part, str | int))
        case _:
            return None
    return name[:NAME_CHARACTERS_MAX] or None


def view(state: JobState, refusal: Refusal | None = None) -> dict[str, Any]:
    """The job's own fields of ``GET /v1/jobs/{job_id}``; the caller adds tenant and consistency. ``refusal`` is about
    an event of the job that PostgreSQL refused."""
    created, now = state.created, status(state)
    if created is None and refusal is not None and refusal.is_creation:
        now = REFUSED
    over_ms, ran_ms = times_of_end(state, now)
    ended = state.end.outcome if state.end is not None and over_ms is not None else {}
    return {
        "job_id": state.job_id,
        "name": name_of(state),
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
        "ended_at": None if over_ms is None else rfc3339.text_of(over_ms),
        "run_ms": ran_ms,
        "result": {name: ended[name] for name in ("final_status", "aggregate_metrics") if name in ended} or None,
        "error": ended.get("error"),
        "refused": _refused(state.refused, refusal),
        "uncounted_seq": state.uncounted or None,
    }


CREATED_TWICE: Final = "creation"
"""Kind of a conflict: the job was created more than once, with different content."""
LOWEST_HLC: Final = "lowest-hlc"
"""Rule of a conflict: the creation of lowest HLC counts."""


def conflicts(state: JobState) -> list[dict[str, Any]]:
    """The conflicts of a job as the API shows them: the entries of each, and which of them counts by which rule. None
    between creations with sealed values, which cannot be compared."""
    created = state.created
    if created is None or not state.others or creation_of(created.spec, created.assigned_dcs) is None:
        return []
    orders = (created.order, *sorted(state.others.values()))
    return [conflict_of([(order[-1], order[:3]) for order in orders])]


def conflict_of(creations: Sequence[tuple[int, HlcParts]]) -> dict[str, Any]:
    """A conflict between creations of one job, the one that counts first; (seq, HLC) of each."""
    entries = [
        {
            "seq": seq,
            "hlc": "{}:{}:{}".format(*hlc),
            "at": rfc3339.text_of(hlc[0]),
            "node_id": hlc[2],
            "counts": number == 0,
        }
        for number, (seq, hlc) in enumerate(creations)
    ]
    return {"kind": CREATED_TWICE, "rule": LOWEST_HLC, "entries": entries}


def _refused(refused: Refused | None, refusal: Refusal | None) -> dict[str, Any] | None:
    """The acknowledged event of the job that was refused, the reason, and its winner or the place of its bytes."""
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
    """The reason why a job accepts no more events, as text to follow its name; None while it does."""
    if status == REFUSED and refused is not None:
        how = "the same request" if refused.reason == KEY_REPLAYED else "another request"
        return (
            f"was never made, though it was acknowledged at LOCAL: with its Idempotency-Key {how} had made job "
            f"{refused.lost_to_job_id} first"
        )
    return "has ended and takes no more events" if status in ENDED else None


# --- data centres ---------------------------------------------------------------------------------
#
# The data centres of a job are the assigned ones and the ones that accepted it. An entry that a data centre reported
# about itself (``dc_id``) concerns that data centre; any other entry concerns all data centres of the job, and the ones
# that it names.


def reporting_dc(payload: Mapping[str, Any]) -> str | None:
    """The data centre that reported the event about itself; None if none did."""
    dc = payload.get("dc_id")
    return dc if isinstance(dc, str) else None


def named_dcs(payload: Mapping[str, Any]) -> frozenset[str]:
    """The data centres that the payload of an entry names, besides the reporting one."""
    assigned = payload.get("assigned_dcs")
    named = [payload.get("failed_dc"), *(assigned if isinstance(assigned, list) else ())]
    return frozenset(dc for dc in named if isinstance(dc, str))


def dcs_of(state: JobState) -> frozenset[str]:
    """The data centres of the job."""
    return frozenset((*(state.created.assigned_dcs if state.created is not None else ()), *state.accepted))


def awaits_ack(state: JobState, dc: str) -> bool:
    """Whether the job is under cancellation that ``dc``, one of its data centres, has not acknowledged."""
    return state.cancel is not None and dc not in state.ack and dc in dcs_of(state)

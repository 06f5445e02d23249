"""The merged state of one job: its parts, and the entries that they come from.

Every part names the seq of its entry, the last in its order, so of two entries that say the same one stays. Folding the
entries of ``seqs_of(state)`` alone gives all that is shown of a job: a table of jobs need keep no more than these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ledger import canonical
from ledger.canonical import INTEGER_MAX, NESTING_MAX
from ledger.errors import CanonicalError
from ledger.facts.events import Part
from ledger.private_fields import PRIVATE_MARK

HlcParts = tuple[int, int, str]
"""``(physical_ms, logical, node_id)``; a ``ledger.hlc.Hlc`` is one."""

Rank = tuple[int, int, int, str, str, int]
"""``(fence, physical_ms, logical, node_id, payload digest as hex, seq)``; seq is 0 of what is not chained yet."""

Order = tuple[int, int, str, str, int]
"""``(*HLC, payload digest, seq)``; among creations of a job the lowest wins."""

CREATOR_CHARACTERS_MAX: Final = 256
"""Longest name by which jobs are listed; no principal has a longer one."""
OTHERS_MAX: Final = 16
"""Most creations that differ from the first one which a state remembers: those of lowest order."""


class Created(NamedTuple):
    """The first JobCreated."""

    order: Order
    spec: Any
    assigned_dcs: list[str]
    actor: Any = None
    """Who created the job, None where that is not known; sealed where it is private."""


class End(NamedTuple):
    """The winning end; ``outcome`` holds what it gave of final_status, aggregate_metrics and error."""

    rank: Rank
    action: str
    outcome: Mapping[str, Any]


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
    """An event of the job that was acknowledged and lost against another of its Idempotency-Key, as its REFUSED entry
    has it: a creation before any other, then the newest."""

    rank: Rank
    """``(1 for a creation else 0, *HLC, digest, seq)`` of the entry."""
    action: str
    reason: str
    lost_to_job_id: str
    lost_to_hlc: str


class JobState(NamedTuple):
    """All that is known of one job. Never change one in place: states share their parts."""

    job_id: str
    last_hlc: HlcParts
    last_seq: int
    fence: int
    """Highest fence token seen."""
    created: Created | None = None
    cancel: Rank | None = None
    reached: Mapping[Part, Rank] = {}
    """Of each part of ``ledger.facts.statuses.REACHED`` the highest rank."""
    end: End | None = None
    accepted: Mapping[str, Rank] = {}
    ack: Mapping[str, Rank] = {}
    progress: Mapping[str, Progress] = {}
    workflow: Mapping[str, Mapping[str, Workflow]] = {}
    others: Mapping[str, Order] = {}
    """The first of every other creation that says something else than ``created``, by its ``creation_digest``."""
    refused: Refused | None = None
    last_hlc_seq: int = 0
    """Of the entry of ``last_hlc``."""
    fence_seq: int = 0
    """Of the newest entry of that fence."""


def seqs_of(state: JobState) -> list[int]:
    """Seqs of the entries that ``state`` comes from, ascending: folding these alone gives it again, but for its
    workflows. Those may be thousands, nothing that is shown of a job follows from one, and the log has them."""
    seqs = {state.last_seq, state.last_hlc_seq, state.fence_seq}
    ranks: Mapping[str, Rank] | Mapping[Part, Rank] | Mapping[str, Order]
    for ranks in (state.accepted, state.ack, state.reached, state.others):
        if ranks:
            seqs.update([rank[-1] for rank in ranks.values()])
    if state.cancel is not None:
        seqs.add(state.cancel[-1])
    for fact in (state.end, state.refused, *state.progress.values()):
        if fact is not None:
            seqs.add(fact.rank[-1])
    if state.created is not None:
        seqs.add(state.created.order[-1])
    return sorted(seqs)


def creator_of(state: JobState) -> str | None:
    """The principal that created the job, by which it is listed; None where that is not known or private, or where what
    an edited payload says is no name."""
    actor = state.created.actor if state.created is not None else None
    is_name = actor.__class__ is str and 0 < len(actor) <= CREATOR_CHARACTERS_MAX and actor.isprintable()
    return actor if is_name else None


def creation_digest(spec: Any, assigned_dcs: list[str]) -> str:
    """SHA-256, in hex, of the canonical JSON of what a creation says of its job.

    Raises:
        CanonicalError: there is no canonical form.
    """
    return hashlib.sha256(_encoded({"assigned_dcs": assigned_dcs, "spec": spec})).hexdigest()


def creation_of(spec: Any, assigned_dcs: list[str]) -> str | None:
    """The ``creation_digest``; None where sealed values are part of it, which can be compared with nothing, and of what
    an edited payload said that has no canonical form."""
    try:
        encoded = _encoded({"assigned_dcs": assigned_dcs, "spec": spec})
    except CanonicalError:
        return None
    return None if f'"{PRIVATE_MARK}"'.encode() in encoded else hashlib.sha256(encoded).hexdigest()


def merge_creations(
    a: Created | None, a_others: Mapping[str, Order], b: Created | None, b_others: Mapping[str, Order]
) -> tuple[Created | None, Mapping[str, Order]]:
    """The first of two creations, and what others say something else, from two states of one job."""
    if a is None or b is None:
        return (b, b_others) if a is None else (a, a_others)
    first, second = (a, b) if a.order <= b.order else (b, a)
    if first.order[3] == second.order[3] and not a_others and not b_others:
        return first, _NO_OTHERS
    found = dict(a_others)
    for digest, order in (*b_others.items(), (_digest_of(second), second.order)):
        found[digest] = min(order, found.get(digest, order))
    found.pop(_digest_of(first), None)
    lowest = sorted(found.items(), key=lambda item: item[1])[:OTHERS_MAX]
    return first, dict(lowest)


def _digest_of(created: Created) -> str:
    """Which creation this is; that of a payload which somebody edited beyond canonical form is its own."""
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
    if isinstance(value, list | tuple):
        return [_binary64(part, depth_left - 1) for part in value]
    return value

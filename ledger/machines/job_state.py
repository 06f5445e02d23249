"""The merged state of one job: its parts and its encoded form.

Encoded form, canonical JSON, in the column ``jobs.state``; what is absent was never reported::

    {"job_id", "last_hlc": HLC, "last_seq", "fence",
     "created": [*HLC, digest], "spec", "assigned_dcs": [dc],
     "cancel": RANK, "run": RANK, "end": [*RANK, action], "final_status", "aggregate_metrics", "error",
     "accepted": {dc: RANK}, "ack": {dc: RANK}, "progress": {dc: [*RANK, completed, failed]},
     "workflow": {dc: {id: [*RANK, action]}}, "others": {creation digest: [*HLC, digest]},
     "refused": [is_creation, *HLC, digest, action, reason, job_id, t_hlc]}

with ``HLC = [physical_ms, logical, node_id]`` and ``RANK = [fence, *HLC, digest]``. What a caller gave
freely (``spec``, ``aggregate_metrics``) stands no deeper here than in the payload it came from, so that
every payload within the bound on nesting has a state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from ledger import canonical
from ledger.canonical import INTEGER_MAX, NESTING_MAX
from ledger.errors import CanonicalError, InvalidInputError
from ledger.private_fields import PRIVATE_MARK

HlcParts = tuple[int, int, str]
"""``(physical_ms, logical, node_id)``; a ``ledger.hlc.Hlc`` is one."""

Rank = tuple[int, int, int, str, str]
"""``(fence, physical_ms, logical, node_id, payload digest as hex)``."""


Order = tuple[int, int, str, str]
"""``(*HLC, payload digest)``; among creations of a job the lowest wins."""

OTHERS_MAX: Final = 16
"""Most creations that differ from the first one which a state remembers: those of lowest order."""


class Created(NamedTuple):
    """The first JobCreated."""

    order: Order
    spec: Any
    assigned_dcs: list[str]


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

    rank: tuple[int, int, int, str, str]
    """``(1 for a creation else 0, *HLC, digest)`` of the entry."""
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
    run: Rank | None = None
    end: End | None = None
    accepted: Mapping[str, Rank] = {}
    ack: Mapping[str, Rank] = {}
    progress: Mapping[str, Progress] = {}
    workflow: Mapping[str, Mapping[str, Workflow]] = {}
    others: Mapping[str, Order] = {}
    """The first of every other creation that says something else than ``created``, by its ``creation_digest``."""
    refused: Refused | None = None


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


def to_json(state: JobState) -> bytes:
    """Canonical bytes of ``state``: equal states have equal bytes.

    Raises:
        CanonicalError: a value in it has no canonical form, which only an edited payload can hold.
    """
    value: dict[str, Any] = {
        "job_id": state.job_id,
        "last_hlc": list(state.last_hlc),
        "last_seq": state.last_seq,
        "fence": state.fence,
    }
    _, _, _, _, created, cancel, run, end, accepted, ack, progress, workflow, others, refused = state
    if created is not None:
        value["created"] = list(created.order)
        value["spec"] = created.spec
        value["assigned_dcs"] = created.assigned_dcs
    if cancel is not None:
        value["cancel"] = list(cancel)
    if run is not None:
        value["run"] = list(run)
    if end is not None:
        value["end"] = [*end.rank, end.action]
        value.update(end.outcome)
    if accepted:
        value["accepted"] = {dc: list(rank) for dc, rank in accepted.items()}
    if ack:
        value["ack"] = {dc: list(rank) for dc, rank in ack.items()}
    if progress:
        value["progress"] = {dc: [*rank, done, failed] for dc, (rank, done, failed) in progress.items()}
    if workflow:
        value["workflow"] = {
            dc: {name: [*rank, action] for name, (rank, action) in facts.items()} for dc, facts in workflow.items()
        }
    if others:
        value["others"] = {digest: list(order) for digest, order in others.items()}
    if refused is not None:
        value["refused"] = [*refused.rank, *refused[1:]]
    return _encoded(value)


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


def from_json(data: bytes | str) -> JobState:
    """The state that ``to_json`` made ``data`` from.

    Raises:
        InvalidInputError: ``data`` is not of this form.
    """
    try:
        return _from_value(orjson.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidInputError(f"not the state of a job: {error!r}") from error


def _from_value(value: dict[str, Any]) -> JobState:
    get = value.get
    created, cancel, run, end = get("created"), get("cancel"), get("run"), get("end")
    return JobState(
        _typed(value["job_id"], str),
        _parts(value["last_hlc"], _HLC_TYPES),
        _typed(value["last_seq"], int),
        _typed(value["fence"], int),
        None if created is None else _created(created, value),
        None if cancel is None else _parts(cancel, _RANK_TYPES),
        None if run is None else _parts(run, _RANK_TYPES),
        None if end is None else End(_parts(end[:5], _RANK_TYPES), _typed(end[5], str), _outcome(value)),
        {dc: _parts(rank, _RANK_TYPES) for dc, rank in get("accepted", _NOTHING).items()},
        {dc: _parts(rank, _RANK_TYPES) for dc, rank in get("ack", _NOTHING).items()},
        {dc: _progress(fact) for dc, fact in get("progress", _NOTHING).items()},
        {
            dc: {name: Workflow(_parts(fact[:5], _RANK_TYPES), _typed(fact[5], str)) for name, fact in facts.items()}
            for dc, facts in get("workflow", _NOTHING).items()
        },
        {_typed(digest, str): _parts(order, _ORDER_TYPES) for digest, order in get("others", _NOTHING).items()},
        None if get("refused") is None else _refused(value["refused"]),
    )


def _created(order: Any, value: Mapping[str, Any]) -> Created:
    assigned_dcs = [_typed(dc, str) for dc in _typed(value["assigned_dcs"], list)]
    return Created(_parts(order, _ORDER_TYPES), value["spec"], assigned_dcs)


def _progress(fact: Any) -> Progress:
    return Progress(_parts(fact[:5], _RANK_TYPES), _typed(fact[5], int), _typed(fact[6], int))


def _refused(value: Any) -> Refused:
    return Refused(_parts(value[:5], _RANK_TYPES), *_parts(value[5:], (str, str, str, str)))


def _parts(value: Any, types: tuple[type, ...]) -> Any:
    """``value`` as a tuple whose parts have just these types, else TypeError: what merges must compare."""
    if (*map(type, value),) != types:
        raise TypeError(f"{value!r:.100} where {', '.join(each.__name__ for each in types)} must stand")
    return tuple(value)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.100} where {kind.__name__} must stand")
    return value


_HLC_TYPES: Final = (int, int, str)
_ORDER_TYPES: Final = (*_HLC_TYPES, str)
_RANK_TYPES: Final = (int, *_HLC_TYPES, str)


def _outcome(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[name] for name in ("final_status", "aggregate_metrics", "error") if name in value}


_NOTHING: Final[Mapping[str, Any]] = {}

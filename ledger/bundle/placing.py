"""What becomes of each incoming entry: chained, a duplicate, or kept in a CONFLICT entry beside one that has its HLC.

A function of the entries, in the order of the merge, and of what stands in the chains at their HLCs. What becomes of
an entry depends on nothing but entries of the same physical and logical time: a CONFLICT entry has those of the event
that it holds. So a merge may be cut between any two of them and each piece decided by itself.

A proposal and its verdict have one HLC and are no conflict. Behind its verdict a proposal is a duplicate; behind a
proposal that came first its verdict is held in a CONFLICT entry, as the chain would lack it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import orjson

from ledger.bundle.incoming import Incoming
from ledger.chain.conflict import Event, conflict_hlc, conflict_payload, held_event
from ledger.chain.standing import Standing, place_of
from ledger.errors import InvalidInputError
from ledger.facts.events import EVENTS_BY_ACTION, VERDICTS, CommitmentAction, SystemAction
from ledger.hlc import Hlc
from ledger.machines.jobs import payload_of, said_of_job
from ledger.machines.promises import proposed_payload

_CONFLICT: Final = SystemAction.CONFLICT.value


@dataclass(slots=True)
class Decided:
    """What becomes of one batch of entries."""

    placed: list[tuple[Incoming, str | None]] = field(default_factory=list)
    """Entries to be chained, in order; with the payload digest of the one beside which it is kept when that has its
    HLC already."""
    duplicates: int = 0
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    """Every event whose HLC another one has, whether it was in the chain already or is placed now; no verdicts on
    proposals that stand there."""

    def jobs(self) -> set[tuple[str, str]]:
        """(tenant, job id) of each job that something is said of by what is placed."""
        return {(entry.tenant_id, entry.job_id) for entry, _ in self.placed if _is_about_its_job(entry)}


def _is_about_its_job(entry: Incoming) -> bool:
    if entry.action in EVENTS_BY_ACTION:
        return True
    facts = payload_of(entry.payload)
    return said_of_job(entry.action, facts, (0, 0, ""), entry.payload_digest, entry.job_id) is not None


def event_of(entry: Incoming) -> Event:
    """The event of an entry as the chain knows it."""
    return Event(entry.t_hlc, entry.job_id, entry.action, entry.payload_digest)


def events_to_find(entries: Iterable[Incoming]) -> dict[str, list[Event]]:
    """By tenant, the events that decide about ``entries``: themselves, and those that CONFLICT entries hold."""
    wanted: dict[str, list[Event]] = {}
    for entry in entries:
        events = wanted.setdefault(entry.tenant_id, [])
        events.append(event_of(entry))
        held = held_by(entry)
        if held is not None:
            events.append(held)
    return wanted


def decide(entries: Sequence[Incoming], standing: Mapping[str, dict[str, Event]]) -> Decided:
    """What becomes of ``entries``, in the order of the merge; what is placed is added to ``standing``.

    ``standing`` is what stands in each tenant's chain at the HLCs of ``events_to_find``.
    """
    decided = Decided()
    for entry in entries:
        here, event = standing[entry.tenant_id], event_of(entry)
        first = here.get(entry.t_hlc)
        if first is None and entry.action != _CONFLICT:
            decided.placed.append((entry, None))
            here[entry.t_hlc] = event
            continue
        stands, kept_digest = _place(entry, event, here)
        if first is not None and stands != entry.t_hlc and entry.action != _CONFLICT and not _judges(entry, first):
            decided.conflicts.append(_conflict(entry, event, first))
        if stands is not None:
            decided.duplicates += 1
            continue
        decided.placed.append((entry, kept_digest))
        t_hlc = entry.t_hlc if kept_digest is None else conflict_hlc(event).text()
        here[t_hlc] = event._replace(t_hlc=t_hlc)
    return decided


def note_beginning(beginnings: dict[str, str], entry: Incoming) -> None:
    """Note the first link of the chain of an older link version that a bundle begins with ``entry``, by tenant.

    Raises:
        InvalidInputError: it is not the first of its chain, or another such chain of the tenant was noted.
    """
    if entry.seq != 1 or beginnings.setdefault(entry.tenant_id, entry.chain_link) != entry.chain_link:
        raise InvalidInputError(
            f"a chain of link version {entry.link_version} can only be imported from its beginning, and one a tenant"
        )


def check_beginnings(placed: Iterable[tuple[Incoming, str | None]], ends: dict[str, tuple[int, str | None]]) -> None:
    """Refuse the beginning of a chain that cannot be kept as it is, where a chain is already or with two events of one
    HLC. ``ends`` are seq and link of the
    last entry of each tenant's chain, and are moved behind what is placed.

    Raises:
        InvalidInputError: names what prevents it.
    """
    for entry, kept_digest in placed:
        seq, link = ends[entry.tenant_id]
        if entry.key.rank == 0 and kept_digest is not None:
            raise InvalidInputError(
                f"seq {entry.seq} of a chain of link version {entry.link_version} has HLC {entry.t_hlc}, as another "
                "event has; such a chain is kept as it is, and takes no CONFLICT entry"
            )
        if entry.key.rank == 0 and (entry.seq, entry.prev_chain_link) != (seq + 1, link):
            raise InvalidInputError(
                f"a chain of link version {entry.link_version} can only be imported as the beginning of an empty "
                f"chain; that of tenant {entry.tenant_id} ends at seq {seq}"
            )
        ends[entry.tenant_id] = (seq + 1, entry.chain_link)


def chained_as(entry: Incoming, kept_digest: str | None) -> tuple[Hlc, str, bytes]:
    """HLC, action and payload that ``entry`` is chained with: its own, or those of the CONFLICT entry that holds it
    beside the one of ``kept_digest``."""
    if kept_digest is None:
        hlc = Hlc.parse(entry.t_hlc) if entry.key.rank == 0 else Hlc(*entry.key[1:4])
        return hlc, entry.action, entry.payload.encode()
    event = event_of(entry)
    return conflict_hlc(event), _CONFLICT, conflict_payload(event, entry.payload, kept_digest)


def _place(entry: Incoming, event: Event, here: Standing) -> tuple[str | None, str | None]:
    """As ``place_of``; a CONFLICT entry is where the event is that it holds, whatever else it says."""
    held = held_by(entry)
    if held is None:
        return place_of(event, here)
    if entry.t_hlc in here:
        return entry.t_hlc, None
    return (held.t_hlc if here.get(held.t_hlc) == held else None), None


def _judges(entry: Incoming, first: Event) -> bool:
    """Whether ``entry`` is the verdict on ``first``, a proposal as a WAL has it."""
    if entry.action not in VERDICTS or (first.job_id, first.action) != (entry.job_id, CommitmentAction.PROPOSED):
        return False
    return entry.key.rank == 1 and sha256(proposed_payload(entry.payload)).hexdigest() == first.payload_digest


def held_by(entry: Incoming) -> Event | None:
    """The event that a CONFLICT entry holds, None for another entry."""
    if entry.action != _CONFLICT:
        return None
    held = held_event(orjson.loads(entry.payload), entry.job_id)
    return None if held is None else held.event


def _conflict(entry: Incoming, event: Event, kept: Event) -> dict[str, Any]:
    return {
        "tenant_id": entry.tenant_id,
        "hlc": event.t_hlc,
        "job_id": event.job_id,
        "action": event.action,
        "digest": event.payload_digest,
        "kept_digest": kept.payload_digest,
        "conflict_hlc": conflict_hlc(event).text(),
    }

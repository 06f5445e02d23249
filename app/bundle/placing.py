"""What becomes of each incoming entry: chained, a duplicate, or kept in a CONFLICT entry beside one that has its HLC.

A pure function of the entries, what stands in the chains at their HLCs, and where the chains end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.bundle.sorting import Incoming
from app.store.chaining import ChainedEntry, ChainHead
from app.store.growth import Grower, Place
from app.store.standing import place_of
from ledger.conflict import Event, conflict_hlc, conflict_payload, held_event
from ledger.errors import InvalidInputError
from ledger.events import SystemAction
from ledger.hlc import Hlc


@dataclass(slots=True)
class Decided:
    """What becomes of one batch of entries."""

    placed: list[tuple[Incoming, str | None]] = field(default_factory=list)
    """Entries to be chained, in order; with the payload digest of the one beside which it is kept when that has its
    HLC already."""
    duplicates: int = 0
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    """Every event whose HLC another one has, whether it was in the chain already or is placed now."""

    def jobs(self) -> set[tuple[str, str]]:
        """(tenant, job id) of all that is placed."""
        return {(entry.tenant_id, entry.job_id) for entry, _ in self.placed}


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


def decide(
    entries: Sequence[Incoming], standing: Mapping[str, dict[str, ChainedEntry]], heads: Mapping[str, ChainHead]
) -> Decided:
    """What becomes of ``entries``, in the order of the merge; what is placed is added to ``standing``.

    ``standing`` is what stands in each chain at the HLCs of ``events_to_find``.

    Raises:
        InvalidInputError: the beginning of a chain would have to go where a chain is already.
    """
    decided = Decided()
    ends = {tenant: (head.seq, head.chain_link) for tenant, head in heads.items()}
    for entry in entries:
        here, event = standing[entry.tenant_id], event_of(entry)
        seq = ends[entry.tenant_id][0]
        stands, kept_digest = _place(entry, event, here)
        first = here.get(entry.t_hlc)
        if first is not None and first.event != event and entry.action != SystemAction.CONFLICT:
            decided.conflicts.append(_conflict(entry, event, first.event))
        if stands is not None:
            decided.duplicates += 1
            continue
        if entry.key.rank == 0 and (entry.seq, entry.prev_chain_link) != (seq + 1, ends[entry.tenant_id][1]):
            raise InvalidInputError(
                f"a chain of link version {entry.link_version} can only be imported as the beginning of an empty "
                f"chain; that of tenant {entry.tenant_id} ends at seq {seq}"
            )
        decided.placed.append((entry, kept_digest))
        ends[entry.tenant_id] = (seq + 1, entry.chain_link)
        t_hlc = entry.t_hlc if kept_digest is None else conflict_hlc(event).text()
        here[t_hlc] = ChainedEntry(seq + 1, entry.chain_link, None, event._replace(t_hlc=t_hlc))
    return decided


def chain(decided: Decided, grower: Grower) -> None:
    """Chain what was decided to be placed."""
    for entry, kept_digest in decided.placed:
        hlc, payload = Hlc.parse(entry.t_hlc), entry.payload.encode()
        if entry.key.rank == 0 and kept_digest is None:
            place = Place(entry.seq, entry.chain_link, entry.prev_chain_link)
            grower.keep(entry.tenant_id, hlc, entry.job_id, entry.action, entry.link_version, place, payload)
            continue
        action = entry.action
        if kept_digest is not None:
            event = event_of(entry)
            hlc, action = conflict_hlc(event), SystemAction.CONFLICT.value
            payload = conflict_payload(event, entry.payload, kept_digest)
        grower.append(entry.tenant_id, hlc, entry.job_id, action, payload, entry.origin)
    grower.finish()


def _place(entry: Incoming, event: Event, here: Mapping[str, ChainedEntry]) -> tuple[ChainedEntry | None, str | None]:
    """As ``place_of``; a CONFLICT entry is where the event is that it holds, whatever else it says."""
    held = held_by(entry)
    if held is None:
        return place_of(event, here)
    standing = here.get(held.t_hlc)
    is_there = standing is not None and standing.event == held
    return here.get(entry.t_hlc) or (standing if is_there else None), None


def held_by(entry: Incoming) -> Event | None:
    """The event that a CONFLICT entry holds, None for another entry."""
    if entry.action != SystemAction.CONFLICT:
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

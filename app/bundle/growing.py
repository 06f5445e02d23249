"""Chaining what a merge placed: linked anew, as a CONFLICT entry, or kept as it is at the beginning of a chain."""

from __future__ import annotations

from app.store.growth import Grower, Place
from ledger.bundle.placing import Decided, event_of
from ledger.conflict import conflict_hlc, conflict_payload
from ledger.events import SystemAction
from ledger.hlc import Hlc


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

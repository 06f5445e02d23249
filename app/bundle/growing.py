"""Chaining what a merge placed: linked anew, as a CONFLICT entry, or kept as it is at the beginning of a chain."""

from __future__ import annotations

from app.store.growth import ChainPosition, Grower
from ledger.bundle.placing import Decided, chained_as
from ledger.hlc import Hlc


def chain(decided: Decided, grower: Grower) -> None:
    """Chain what was decided to be placed."""
    for entry, kept_digest in decided.placed:
        if entry.key.rank == 0:
            place, hlc = ChainPosition(entry.seq, entry.chain_link, entry.prev_chain_link), Hlc.parse(entry.t_hlc)
            payload = entry.payload.encode()
            grower.keep(entry.tenant_id, hlc, entry.job_id, entry.action, entry.link_version, place, payload)
        else:
            hlc, action, payload = chained_as(entry, kept_digest)
            grower.append(entry.tenant_id, hlc, entry.job_id, action, payload, entry.origin)
    grower.finish()

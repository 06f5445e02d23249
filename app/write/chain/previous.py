"""What the chain already says about the events of a batch: which keyed lines are chained.

Read inside the chaining transaction, or ahead of it. What was read ahead holds exactly when every head the batch
touches is where it was then: keyed lines change only together with the head of their tenant.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from app.store import Connection, idempotency, node
from app.store.standing import Chained, find_standing
from app.write.pending.backlog import Pending
from app.write.pending.keyed_entry import is_bound
from app.write.pending.linking import (
    ChainedKeys,
    KeyWinner,
    event_of,
    events_of,
    is_refused_in,
)
from app.write.pending.requests import RequestName
from ledger.chain.conflict import Event, Standing, place_of
from ledger.facts.events import SystemAction


async def chained_keys(connection: Connection, batch: Sequence[Pending]) -> ChainedKeys:
    """By chained line, what each keyed request in the batch has in the chain.

    Raises:
        KeyRowError: a row of the table of keys names an entry that came with another key, or none.
    """
    requests: dict[RequestName, dict[int, Pending]] = {}
    for pending in batch:
        if (key := pending.idempotency) is not None:
            requests.setdefault((pending.tenant_id, key.route, key.key), {})[key.line] = pending
    found: ChainedKeys = {}
    for name, line in await idempotency.find_claims(connection, sorted(requests)) if requests else ():
        if not is_bound(line, name, requests[name]):
            what = f"names seq {line.seq}, whose entry did not come with that key: somebody put the row there"
            raise idempotency.key_row_error(line.tenant_id, name[2], line.seq, what)
        found.setdefault(name, {})[line.line] = KeyWinner(line.body_digest, line.t_hlc, line.job_id)
    return found


async def standing(connection: Connection, batch: Sequence[Pending]) -> dict[str, Chained]:
    """By tenant, what already stands in the chain at the HLCs of the batch."""
    events: dict[str, list[Event]] = {}
    for pending in batch:
        events.setdefault(pending.tenant_id, []).append(event_of(pending))
    return {tenant: await find_standing(connection, tenant, each) for tenant, each in events.items()}


def stands(pending: Pending, here: Standing) -> bool:
    """Whether something of the event is among ``here``: itself, or the REFUSED or CONFLICT entry that keeps it."""
    event = event_of(pending)
    at, _ = place_of(event, here)
    return at is not None or is_refused_in(pending, here.get(event.t_hlc))


async def absent(connection: Connection, batch: Sequence[Pending]) -> list[Pending]:
    """Those of which nothing is in the chain."""
    chained = events_of(await standing(connection, batch))
    return [pending for pending in batch if not stands(pending, chained[pending.tenant_id])]


async def begun_unrecorded(connection: Connection, begun: Collection[str]) -> set[str]:
    """Those of these tenants whose chain began without a record of it: the record had to wait, or only the chain was
    restored."""
    return {
        tenant_id
        for tenant_id in begun
        if not await node.is_recorded(connection, SystemAction.TENANT_CREATED, f"tenant:{tenant_id}")
    }

"""What the chain already says about the events of a batch: keyed lines that are chained, states of their jobs.

Read inside the chaining transaction, or ahead of it. What was read ahead holds exactly when every head the batch
touches is where it was then: keyed lines and job states change only together with the head of their tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from app.pending.backlog import Pending
from app.pending.keyed_entry import is_bound
from app.pending.linking import (
    ChainedKeys,
    KeyWinner,
    LinkedBatch,
    event_of,
    is_refused_in,
    tenant_begun_by,
)
from app.pending.requests import RequestName
from app.store import chaining, idempotency, node
from app.store.chaining import ChainHead
from app.store.growth import JobKey
from app.store.standing import Chained, find_standing
from ledger.chain.conflict import Event
from ledger.chain.standing import Standing, place_of
from ledger.errors import ChainDamagedError
from ledger.machines import jobs
from ledger.machines.events import SystemAction

if TYPE_CHECKING:
    from app.store import Connection

CACHED_JOBS_MAX = 50_000
"""Job states kept so that a job whose events follow each other is not read back each time."""


class JobStateCache:
    """Job states as of the last commit, valid for a tenant only while nobody else moved its head."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, tuple[int, dict[str, jobs.JobState]]] = OrderedDict()
        self._count = 0

    def begin(self, heads: dict[str, ChainHead]) -> None:
        """Forget tenants whose head is not where this cache left it."""
        for tenant, head in heads.items():
            cached = self._tenants.get(tenant)
            if cached is not None and cached[0] != head.seq:
                self._forget(tenant)

    def get(self, job: tuple[str, str]) -> jobs.JobState | None:
        """The state of a job, None when it must be read."""
        cached = self._tenants.get(job[0])
        return cached[1].get(job[1]) if cached is not None else None

    def commit(self, linked: LinkedBatch) -> None:
        """Take over what a committed batch left behind."""
        for tenant, links in linked.links.items():
            states = self._tenants[tenant][1] if tenant in self._tenants else {}
            self._tenants[tenant] = (links[-1].seq, states)
            self._tenants.move_to_end(tenant)
        for (tenant, job_id), state in linked.job_states.items():
            states = self._tenants[tenant][1]
            self._count += job_id not in states
            states[job_id] = state
        while self._count > CACHED_JOBS_MAX:
            self._forget(next(iter(self._tenants)))

    def _forget(self, tenant: str) -> None:
        self._count -= len(self._tenants.pop(tenant)[1])


async def chained_keys(connection: Connection, batch: Sequence[Pending]) -> ChainedKeys:
    """By chained line, what each keyed request in the batch has in the chain.

    Raises:
        ChainDamagedError: a row of the table of keys names an entry that came with another key, or none.
    """
    requests: dict[RequestName, dict[int, Pending]] = {}
    for pending in batch:
        if (key := pending.idempotency) is not None:
            requests.setdefault((pending.tenant_id, key.route, key.key), {})[key.line] = pending
    found: ChainedKeys = {}
    for name, line in await idempotency.find_claims(connection, sorted(requests)) if requests else ():
        if not is_bound(line, name, requests[name]):
            raise ChainDamagedError(
                line.tenant_id,
                f"the row of Idempotency-Key {name[2]!r} in scheduler.idempotency names seq {line.seq}, whose entry "
                "did not come with that key: somebody put the row there. Remove it",
            )
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


async def begun_unrecorded(connection: Connection, held: Sequence[Pending]) -> set[str]:
    """Tenants that began while the record of it, one of ``held``, had to wait, and still do without one."""
    begun = [tenant_id for pending in held if (tenant_id := tenant_begun_by(pending))]
    return {
        tenant_id
        for tenant_id in begun
        if not await node.is_recorded(connection, SystemAction.TENANT_CREATED, f"tenant:{tenant_id}")
    }


async def job_states(
    connection: Connection, batch: Sequence[Pending], cache: JobStateCache, newer: Mapping[JobKey, jobs.JobState]
) -> dict[JobKey, jobs.JobState]:
    """State of each job in the batch that has one: from ``newer``, else from the cache, else from Postgres."""
    states: dict[JobKey, jobs.JobState] = {}
    unknown: set[JobKey] = set()
    for pending in batch:
        job = (pending.tenant_id, pending.job_id)
        if job in states or job in unknown:
            continue
        state = newer.get(job) or cache.get(job)
        if state is None:
            unknown.add(job)
        else:
            states[job] = state
    if unknown:
        states |= await chaining.load_job_states(connection, sorted(unknown))
    return states

"""The tables that name the entries that count, kept by a follower as far as the chain was followed: for each job, and
for what is promised."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.chain import job_terms
from app.chain.followers import Turn
from app.store import Connection, commitments
from app.store import job_table as store
from app.store import job_terms as terms_store
from app.store.following import FollowedEntry
from app.store.job_table import JobKey
from ledger.machines import jobs
from ledger.machines.job_fold import JobFold
from ledger.machines.job_state import HlcParts
from ledger.machines.jobs import JobState
from ledger.positions import Lsn
from ledger.verification.projection_check import JOB_COLUMNS, stored_form

CACHED_JOBS_MAX = 50_000
"""Job states kept so that a job whose events follow each other is not read back each time."""
ENTRIES_A_STEP = 200
"""Entries read between two turns of the event loop."""
JOBS_A_STEP = 50
"""Jobs whose entries are folded between two turns."""

_STORED = len(JOB_COLUMNS)

OnFollowed = Callable[[Mapping[JobKey, JobState], Mapping[str, Lsn]], None]
"""Takes new states of jobs, and up to which LSN each tenant's cover the records of this node."""


class JobTable:
    """Folds entries into the states of their jobs. ``on_followed`` runs once states are committed."""

    name = store.FOLLOWER

    def __init__(self, on_followed: OnFollowed) -> None:
        self._on_followed = on_followed
        self._cache = _StateCache()
        self._states: dict[JobKey, JobState] = {}
        """Those that the last turn wrote."""

    async def empty(self, connection: Connection, tenant_ids: Sequence[str]) -> None:
        """Remove the rows of these tenants."""
        await store.empty(connection, tenant_ids)
        await commitments.empty(connection, tenant_ids)
        await terms_store.empty(connection, tenant_ids)

    async def take(self, connection: Connection, turn: Turn) -> None:
        """Fold the entries, and store the states that they leave, what they are searched by, and which entries promise
        something."""
        await commitments.take(connection, turn.entries)
        self._cache.begin(turn.after)
        said = {tenant_id: await _said(entries) for tenant_id, entries in turn.entries.items()}
        touched = sorted((tenant_id, job_id) for tenant_id, of_jobs in said.items() for job_id in of_jobs)
        before = {job: state for job in touched if (state := self._cache.get(job)) is not None}
        read: dict[str, dict[str, list[_Said]]] = {}
        if unknown := [job for job in touched if job not in before and turn.after[job[0]]]:
            entries = await store.entries_of(connection, unknown)
            read = {tenant_id: await _said(of_tenant) for tenant_id, of_tenant in entries.items()}
        states: dict[JobKey, JobState] = {}
        for number, job in enumerate(touched, 1):
            tenant_id, job_id = job
            fold = JobFold(job_id, before.get(job))
            for facts in (read.get(tenant_id, {}).get(job_id, ()), said[tenant_id][job_id]):
                for fact in facts:
                    fold.add(*fact)
            states[job] = fold.state()
            if number % JOBS_A_STEP == 0:
                await asyncio.sleep(0)
        self._states = states
        if self._states:
            await store.store(
                connection, [(job[0], *stored_form(state)[:_STORED]) for job, state in self._states.items()]
            )
        if declared := await terms_store.declared(connection, turn.after):
            await job_terms.follow(connection, declared, states, before)
            for fields in declared.values():
                if fields.built_to is not None:
                    built = await self._next_built(connection, fields.tenant_id, fields.built_to)
                    await job_terms.build(connection, turn, fields, built)

    async def unfinished(self, connection: Connection) -> Sequence[str]:
        """Tenants whose jobs are not all found by the fields that they declared."""
        return await terms_store.unbuilt(connection)

    async def _next_built(self, connection: Connection, tenant_id: str, after: str) -> dict[JobKey, JobState]:
        """The jobs of the tenant behind one, as the table has them now."""
        jobs_behind = await terms_store.next_jobs(connection, tenant_id, after, job_terms.BUILT_AT_ONCE)
        read = await store.entries_of(connection, [(tenant_id, job_id) for job_id in jobs_behind])
        said = await _said(read.get(tenant_id, ()))
        states: dict[JobKey, JobState] = {}
        for job_id in jobs_behind:
            fold = JobFold(job_id)
            for fact in said.get(job_id, ()):
                fold.add(*fact)
            states[tenant_id, job_id] = fold.state()
        return states

    def taken(self, turn: Turn) -> None:
        """Remember the states."""
        self._cache.commit(turn.places, self._states)
        self._on_followed(self._states, turn.covered_lsn)
        self._states = {}

    def failed(self) -> None:
        """Forget all states: which of them are stored is not known."""
        self._cache = _StateCache()
        self._states = {}


_Said = tuple[str, Mapping[str, Any], HlcParts, str, int]
"""The arguments of ``JobFold.add``."""


async def _said(entries: Sequence[FollowedEntry]) -> dict[str, list[_Said]]:
    """By job, what the entries say of it. One that somebody edited beyond its types says nothing."""
    found: dict[str, list[_Said]] = defaultdict(list)
    for number, entry in enumerate(entries, 1):
        said = jobs.said_of_row(*entry[:-1])
        if said is not None:
            found[entry[0]].append((*said, entry[1]))
        if number % ENTRIES_A_STEP == 0:
            await asyncio.sleep(0)
    return found


class _StateCache:
    """Job states as of the last turn, valid for a tenant only while nobody else follows it."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, tuple[int, dict[str, JobState]]] = OrderedDict()
        self._count = 0

    def begin(self, places: Mapping[str, int]) -> None:
        """Forget tenants that are not where this cache left them."""
        for tenant_id, seq in places.items():
            cached = self._tenants.get(tenant_id)
            if cached is not None and cached[0] != seq:
                self._forget(tenant_id)

    def get(self, job: JobKey) -> JobState | None:
        """The state of a job, None when it must be read."""
        cached = self._tenants.get(job[0])
        return cached[1].get(job[1]) if cached is not None else None

    def commit(self, places: Mapping[str, int], states: Mapping[JobKey, JobState]) -> None:
        """Take over what a committed turn left behind."""
        for tenant_id, seq in places.items():
            known = self._tenants[tenant_id][1] if tenant_id in self._tenants else {}
            self._tenants[tenant_id] = (seq, known)
            self._tenants.move_to_end(tenant_id)
        for (tenant_id, job_id), state in states.items():
            known = self._tenants[tenant_id][1]
            self._count += job_id not in known
            known[job_id] = state
        while self._count > CACHED_JOBS_MAX:
            self._forget(next(iter(self._tenants)))

    def _forget(self, tenant_id: str) -> None:
        self._count -= len(self._tenants.pop(tenant_id)[1])

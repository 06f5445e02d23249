"""The tables that a follower derives from chained entries: jobs, the search terms of jobs, and commitments."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.store import Connection, commitments
from app.store import job_search as terms_store
from app.store import job_table as store
from app.store.following import FollowedEntry
from app.store.job_search import JobTerm, SearchFields
from app.store.job_table import JobKey, JobSpan
from ledger.machines import jobs
from ledger.machines.job_fold import HlcParts, JobFold
from ledger.machines.job_search import terms_of
from ledger.machines.jobs import JobState
from ledger.positions import Lsn
from ledger.verification.projection_check import JOB_COLUMNS, stored_form

CACHED_JOBS_MAX = 50_000
"""Job states kept in memory, so that a job with frequent events is not read back each time."""
ENTRIES_A_STEP = 200
"""Entries read between two turns of the event loop."""
JOBS_A_STEP = 50
"""Jobs whose entries are folded, or whose terms are made, between two turns of the event loop."""
BUILT_AT_ONCE = 500
"""Jobs older than the declared search fields whose terms are added in one turn."""
DOUBTED_MAX = 10_000
"""Jobs with false rows that wait to be rewritten; others are found again when they are read."""

_STORED = len(JOB_COLUMNS)
OnFollowed = Callable[[Mapping[JobKey, JobState], Mapping[str, Lsn]], None]
"""Takes new states of jobs, and by tenant the LSN up to which they cover the records of this node."""


@dataclass(slots=True)
class Turn:
    """The entries that are followed in one transaction, by tenant."""

    after: dict[str, int] = field(default_factory=dict)
    """The position of each tenant before the turn."""
    entries: dict[str, Sequence[FollowedEntry]] = field(default_factory=dict)
    """The next entries, in seq order."""
    places: dict[str, int] = field(default_factory=dict)
    """The position of each tenant after the turn."""
    covered_lsn: dict[str, Lsn] = field(default_factory=dict)
    """For tenants at the end of their chain, an LSN up to which all records of this node are in it."""
    unfinished: set[str] = field(default_factory=set)
    """Tenants that need another turn, even without new entries."""


class JobTable:
    """Folds entries into the states of their jobs. ``on_followed`` runs once states are committed."""

    def __init__(self, on_followed: OnFollowed) -> None:
        self._on_followed = on_followed
        self._cache = _StateCache()
        self._states: dict[JobKey, JobState] = {}
        """States that the last turn wrote."""
        self._doubted: dict[JobKey, None] = {}
        """Jobs with false rows."""
        self._rewritten: Sequence[JobKey] = ()
        """Jobs of ``_doubted`` whose rows the last turn rewrote."""

    def doubt(self, tenant_id: str, job_id: str) -> None:
        """Rewrite the row of this job from its entries, with the next turn of its tenant."""
        if len(self._doubted) < DOUBTED_MAX:
            self._doubted[tenant_id, job_id] = None

    async def empty(self, connection: Connection, tenant_ids: Sequence[str]) -> None:
        """Remove the rows of these tenants."""
        await store.empty(connection, tenant_ids)
        await commitments.empty(connection, tenant_ids)
        await terms_store.empty_terms(connection, tenant_ids)

    async def take(self, connection: Connection, turn: Turn) -> None:
        """Fold the entries; store the resulting states, their search terms, and the commitments."""
        await commitments.take(connection, turn.entries)
        self._cache.begin(turn.after)
        said = {tenant_id: await _said(entries) for tenant_id, entries in turn.entries.items()}
        doubted = [job for job in self._doubted if job[0] in turn.after]
        touched = sorted({*doubted, *((tenant_id, job_id) for tenant_id in said for job_id in said[tenant_id])})
        before = {job: state for job in touched if (state := self._cache.get(job)) is not None}
        unknown = [job for job in touched if job not in before and turn.after[job[0]]]
        read = await _folded(connection, [JobSpan(*job, to_seq=turn.after[job[0]]) for job in unknown])
        states: dict[JobKey, JobState] = {}
        for number, job in enumerate(touched, 1):
            tenant_id, job_id = job
            fold = JobFold(job_id, before.get(job) or read.get(job))
            for fact in said.get(tenant_id, {}).get(job_id, ()):
                fold.add(*fact)
            if not fold.is_empty:
                states[job] = fold.state()
            if number % JOBS_A_STEP == 0:
                await asyncio.sleep(0)
        self._states, self._rewritten = states, doubted
        if self._states:
            await store.store(
                connection, [(job[0], *stored_form(state)[:_STORED]) for job, state in self._states.items()]
            )
        await _follow_terms(connection, turn, states, before)

    def taken(self, turn: Turn) -> None:
        """The turn was committed: keep its states in memory."""
        self._cache.commit(turn.places, self._states)
        self._on_followed(self._states, turn.covered_lsn)
        self._states = {}
        for job in self._rewritten:
            self._doubted.pop(job, None)

    def failed(self) -> None:
        """Forget all states: it is not known which of them are stored."""
        self._cache = _StateCache()
        self._states = {}


async def _next_built(connection: Connection, fields: SearchFields, to_seq: int) -> dict[JobKey, JobState]:
    """The states of the tenant's next jobs after ``built_to``, from their entries up to ``to_seq``."""
    assert fields.built_to is not None
    job_ids = await terms_store.next_jobs(connection, fields.tenant_id, fields.built_to, BUILT_AT_ONCE)
    read = await _folded(connection, [JobSpan(fields.tenant_id, job_id, to_seq=to_seq) for job_id in job_ids])
    keys = [(fields.tenant_id, job_id) for job_id in job_ids]
    return {key: read.get(key) or JobFold(key[1]).state() for key in keys}


async def _folded(connection: Connection, spans: Sequence[JobSpan]) -> dict[JobKey, JobState]:
    """The state of each job, folded from its entries; jobs without a state are left out. Entries are taken as stored:
    a read of the job recomputes them."""
    states: dict[JobKey, JobState] = {}
    entries = await store.entries_of(connection, spans) if spans else []
    for number, (span, rows) in enumerate(zip(spans, entries, strict=True), 1):
        state = jobs.folded(span.job_id, None, map(store.FOLDED, rows))
        while len(rows) > store.ENTRIES_MAX:
            (rows,) = await store.entries_of(connection, [span._replace(after_seq=rows[-1][0])])
            state = jobs.folded(span.job_id, state, map(store.FOLDED, rows))
        if state is not None:
            states[span.tenant_id, span.job_id] = state
        if number % JOBS_A_STEP == 0:
            await asyncio.sleep(0)
    return states


_Said = tuple[str, Mapping[str, Any], HlcParts, str, int]
"""The arguments of ``JobFold.add``."""


async def _said(entries: Sequence[FollowedEntry]) -> dict[str, list[_Said]]:
    """The fold arguments of the entries, by job. An edited entry with wrong types is skipped."""
    found: dict[str, list[_Said]] = defaultdict(list)
    for number, entry in enumerate(entries, 1):
        said = jobs.said_of_row(*entry[:-1])
        if said is not None:
            found[entry[0]].append((*said, entry[1]))
        if number % ENTRIES_A_STEP == 0:
            await asyncio.sleep(0)
    return found


class _StateCache:
    """Job states as of the last turn, valid for a tenant only while no other node follows it."""

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
        """The state of a job, None if it must be read."""
        cached = self._tenants.get(job[0])
        return cached[1].get(job[1]) if cached is not None else None

    def commit(self, places: Mapping[str, int], states: Mapping[JobKey, JobState]) -> None:
        """Take over the states and positions of a committed turn."""
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


async def _follow_terms(
    connection: Connection, turn: Turn, states: Mapping[JobKey, JobState], before: Mapping[JobKey, JobState]
) -> None:
    """Store the terms of jobs whose terms changed since ``before``, and of at most ``BUILT_AT_ONCE`` jobs after
    ``built_to``, which are older than the declaration of the fields."""
    declared = await terms_store.declared(connection, turn.after)
    changed: dict[JobKey, list[JobTerm]] = {}
    for number, (job, state) in enumerate(states.items() if declared else (), 1):
        if (fields := declared.get(job[0])) is not None:
            now = _terms(job, state, fields)
            if job not in before or _terms(job, before[job], fields) != now:
                changed[job] = now
        if number % JOBS_A_STEP == 0:
            await asyncio.sleep(0)
    for tenant_id, fields in declared.items():
        if fields.built_to is None:
            continue
        built = await _next_built(connection, fields, turn.places[tenant_id])
        changed |= {job: _terms(job, state, fields) for job, state in built.items()}
        is_done = len(built) < BUILT_AT_ONCE
        await terms_store.advance_terms(connection, fields, None if is_done else max(job_id for _, job_id in built))
        if not is_done:
            turn.unfinished.add(tenant_id)
    if changed:
        await terms_store.store_terms(connection, list(changed), (term for terms in changed.values() for term in terms))


def _terms(job: JobKey, state: JobState, fields: SearchFields) -> list[JobTerm]:
    if state.created is None:
        return []
    physical, logical, node, *_ = state.created.order
    return [JobTerm(*job, term, physical, logical, node) for term in sorted(terms_of(state, fields.fields))]

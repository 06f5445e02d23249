"""The terms that jobs are searched by, kept with the job table for tenants that declared fields."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from app.store import Connection
from app.store import job_search as store
from app.store.job_search import JobTerm, SearchFields
from app.store.job_table import JobKey
from app.write.followers.followers import Turn
from ledger.machines.job_search import terms_of
from ledger.machines.jobs import JobState

BUILT_AT_ONCE = 500
"""Jobs whose terms are added in one turn, of those that were there before the fields were declared."""
JOBS_A_STEP = 100
"""Jobs whose terms are made between two turns of the event loop."""


async def follow(
    connection: Connection,
    declared: Mapping[str, SearchFields],
    states: Mapping[JobKey, JobState],
    before: Mapping[JobKey, JobState],
) -> None:
    """Keep the terms of these jobs, whose states were ``before`` what they are now; only those that are others."""
    changed: dict[JobKey, list[JobTerm]] = {}
    for number, (job, state) in enumerate(states.items(), 1):
        fields = declared.get(job[0])
        if fields is None:
            continue
        now = list(_terms(job, state, fields))
        if job not in before or list(_terms(job, before[job], fields)) != now:
            changed[job] = now
        if number % JOBS_A_STEP == 0:
            await asyncio.sleep(0)
    await _store(connection, changed)


async def build(connection: Connection, turn: Turn, fields: SearchFields, states: Mapping[JobKey, JobState]) -> None:
    """Keep the terms of ``states``, the jobs that come behind ``built_to``: all of them, or ``BUILT_AT_ONCE``."""
    await _store(connection, {job: list(_terms(job, state, fields)) for job, state in states.items()})
    is_done = len(states) < BUILT_AT_ONCE
    await store.advance_terms(connection, fields, None if is_done else max(job_id for _, job_id in states))
    if not is_done:
        turn.unfinished.add(fields.tenant_id)


async def _store(connection: Connection, changed: Mapping[JobKey, list[JobTerm]]) -> None:
    if changed:
        await store.store_terms(connection, list(changed), (term for terms in changed.values() for term in terms))


def _terms(job: JobKey, state: JobState, fields: SearchFields) -> Iterator[JobTerm]:
    if state.created is not None:
        physical, logical, node, *_ = state.created.order
        for term in sorted(terms_of(state, fields.fields)):
            yield JobTerm(*job, term, physical, logical, node)

"""Reads one job, a list of jobs, or the events of a job, at the requested consistency level."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from app.read.consistency import Promise, ReadLevel, UnfitError
from app.read.copies import PRIMARY, Copies, Judge, Source
from app.read.folded_jobs import DamagedJob, FoldedJobs
from app.read.job_summary import NO_FIGURES, Figures, summary_of
from app.read.revealing import Revealing
from app.store import Connection, reads
from app.store.chain_reads import ListedEntry
from app.store.following import Place
from app.store.jobs import figures as job_figures
from app.store.jobs import search as job_search
from app.store.jobs.figures import BY_STATUS, Wanted
from app.store.jobs.order import CreatedHlc, ListRange, Order, Position
from app.store.jobs.table import ListedRow
from app.store.reading import Pool, json_in, reading
from app.trust.retention import RetentionReader
from ledger import rfc3339
from ledger.chain.conflict import held_event
from ledger.errors import ChainDamagedError, InvalidInputError, JobNotFoundError, TenantNotFoundError
from ledger.facts.events import ACTOR
from ledger.facts.statuses import CANCELLING, STATUSES
from ledger.hlc import Hlc
from ledger.machines import jobs
from ledger.machines.exclusions import Exclusions
from ledger.machines.job_fold import HlcParts
from ledger.machines.job_search import SEARCHED, JobFilter
from ledger.machines.jobs import Refusal

State = jobs.JobState | None
Value = TypeVar("Value")
_FoundJob = tuple[State, Refusal | None, list[ListedEntry]]
"""A job, its refusal, and its creations if it has several."""

CANCELLATIONS_A_PAGE: Final = 200
CANCELLATION_PAGES_MAX: Final = 5
"""Most pages of jobs under cancellation that are searched for one answer."""
LOOKED_AT_ONCE: Final = 2000
"""Most jobs whose entries one statement of a search reads."""
LOOKED_AT_MAX: Final = 20_000
"""Most jobs whose entries are read for one answer."""
LOOKING_S: Final = 2.0
"""Time after which a search starts no further statement for one answer."""


class _Found(NamedTuple):
    """Jobs of a list, jobs left out because they are damaged, and the position after which the next part begins, None
    if there is no next part."""

    states: Sequence[jobs.JobState]
    damaged: Sequence[DamagedJob]
    last: Position | None


class Page(NamedTuple):
    """Part of a list; ``last`` is where the next part begins, None if there is none. ``damaged`` names jobs that belong
    here but are not among the items, because their stored rows differ from what was chained."""

    items: list[dict[str, Any]]
    last: Position | None
    consistency: dict[str, Any]
    damaged: Sequence[dict[str, str]] = ()


class JobReader:
    """Reads jobs as the API shows them."""

    def __init__(
        self,
        copies: Copies,
        revealing: Revealing,
        folded: FoldedJobs,
        hurry: Callable[[str], None],
        report: Callable[[ChainDamagedError, str], object],
        retention: RetentionReader,
    ) -> None:
        """``hurry`` asks the job table to follow a tenant's chain now, since a caller waits for a list of its jobs.
        ``report`` receives damaged jobs that a list leaves out. ``retention`` tells which jobs have left."""
        self._retention = retention
        self._copies = copies
        self._revealing = revealing
        self._folded = folded
        self._folds = folded.folds
        self._check = folded.folds.check
        self._hurry = hurry
        self._report = report

    async def read(
        self,
        tenant_id: str | None,
        job_id: str,
        promise: Promise,
        as_of: Hlc | None,
        tenants: Sequence[str] = ("*",),
    ) -> dict[str, Any]:
        """The job as ``GET /v1/jobs/{job_id}`` shows it, or as it was at ``as_of``.

        Without ``tenant_id``, exactly one tenant that matches the patterns ``tenants`` must have a job of this id.

        Raises:
            JobNotFoundError, ArchivedError: no such job, or not yet at ``as_of``; an entry of it has left.
            InvalidInputError: no tenant was named, and several have a job of this id.
            ChainDamagedError: the job's stored rows are damaged, or the tenant is quarantined and the level promises
                writes that may be held back.
            SessionNotCaughtUpError, WriteLostError, TooStaleError, FencedError: the level cannot be kept.
        """
        of_tenant = tenant_id or await self._tenant_of(job_id, tenants, promise)

        async def look(pool: Pool, judge: Judge) -> _FoundJob:
            async with reading(pool, snapshot=as_of is not None) as connection:
                if as_of is None:
                    return await self._job_now(connection, of_tenant, job_id, promise, judge)
                await self._copies.judged(connection, promise, judge)
                return await self._job_at(connection, of_tenant, job_id, as_of)

        (state, refusal, creations), source = await self._copies.read(of_tenant, look, promise)
        if refusal is not None:
            state = state or jobs.JobState(job_id, (*refusal.hlc,), refusal.seq, 0)
        if state is None:
            at = _behind(source) if as_of is None else f" at that time{_behind(source)}"
            raise JobNotFoundError(f"tenant {of_tenant} has no job {job_id}{at}")
        (shown,) = await self._revealing.states(of_tenant, [state])
        view = jobs.view(shown, refusal)
        return {
            "tenant_id": of_tenant,
            **view,
            **await self._creations(of_tenant, state, view, creations),
            "consistency": _kept(promise, source),
        }

    async def _job_now(
        self, connection: Connection, tenant_id: str, job_id: str, promise: Promise, judge: Judge
    ) -> _FoundJob:
        """The job, nearly always by one statement. Entries may leave before a second one, and then all of it has."""
        job = [(tenant_id, job_id)]
        known = self._folds.remembered(tenant_id, job_id)
        rows, seen = await reads.job_and_seen(connection, tenant_id, job_id, known.seq, *self._copies.asked_of(promise))
        judge(seen)
        if rows.has_left:
            await self._retention.refuse_departed(connection, job)
        try:
            state = await self._folded.state_of(connection, tenant_id, job_id, known, rows)
        except ChainDamagedError:
            await self._retention.refuse_departed(connection, job)
            raise
        refusal = await reads.find_refusal(connection, self._check, tenant_id, job_id) if rows.has_refusals else None
        creations = await reads.creations(connection, self._check, tenant_id, job_id, _creations_in(state))
        if rows.is_large or rows.has_refusals or creations:
            await self._retention.refuse_departed(connection, job)
        return state, refusal, creations

    async def _job_at(self, connection: Connection, tenant_id: str, job_id: str, as_of: Hlc) -> _FoundJob:
        """The job as it was at ``as_of``, in a transaction that shows one state."""
        await self._retention.refuse_departed(connection, [(tenant_id, job_id)])
        state = await self._folds.state_at(connection, tenant_id, job_id, as_of)
        refusal = await reads.find_refusal(connection, self._check, tenant_id, job_id)
        creations = await reads.creations(connection, self._check, tenant_id, job_id, _creations_in(state))
        return state, None if refusal is not None and refusal.hlc > as_of else refusal, creations

    async def list(
        self,
        tenant_id: str,
        promise: Promise,
        wanted: JobFilter,
        listed: ListRange,
        limit: int,
    ) -> Page:
        """Jobs of the tenant that match ``wanted``, as ``listed`` says.

        Lists come from the job table. All levels but EVENTUAL wait until the table has followed the chain to its end
        as of the first read; the answer reports the table's position. A page for which entries of many jobs were read
        may have fewer than ``limit`` and be followed by another.

        Raises:
            TenantNotFoundError: there is no such tenant; other errors as ``read``.
        """

        async def find(connection: Connection, place: Place) -> _Found:
            is_unindexed = not listed.order.is_by_creation and wanted.actor is not None
            if wanted.looks_inside or is_unindexed or listed.is_within_creations:
                return await self._searched(connection, tenant_id, place, wanted, listed, limit)
            rows, last = await reads.list_jobs(connection, tenant_id, wanted.statuses, wanted.actor, listed, limit)
            states, damaged, cut = await self._states(connection, tenant_id, rows, place, listed.order)
            return _Found([state for state in states if wanted.finds(state)], damaged, cut or last)

        return await self._listed(tenant_id, promise, find)

    async def list_cancellations(
        self, tenant_id: str, dc: str, promise: Promise, below: CreatedHlc | None, limit: int
    ) -> Page:
        """Jobs of the tenant under cancellation that data centre ``dc`` has not acknowledged, newest first, created
        before ``below``. A page may have fewer than ``limit`` and be followed by another.

        Raises:
            as ``list``.
        """

        async def find(connection: Connection, place: Place) -> _Found:
            found: list[jobs.JobState] = []
            damaged: list[DamagedJob] = []
            last: Position | None = below
            for _ in range(CANCELLATION_PAGES_MAX):
                rows, last = await reads.list_jobs(
                    connection, tenant_id, (CANCELLING,), None, ListRange(after=last), CANCELLATIONS_A_PAGE
                )
                states, met, cut = await self._states(connection, tenant_id, rows, place, Order())
                last = cut or last
                damaged += met
                for state in states:
                    if jobs.awaits_ack(state, dc):
                        if len(found) == limit:
                            return _Found(found, damaged, _created(found[-1]))
                        found.append(state)
                if last is None:
                    break
            return _Found(found, damaged, last)

        return await self._listed(tenant_id, promise, find)

    async def _states(
        self, connection: Connection, tenant_id: str, rows: Sequence[ListedRow], place: Place, order: Order
    ) -> tuple[Sequence[jobs.JobState], Sequence[DamagedJob], Position | None]:
        """The jobs of these rows as of the table's position, the damaged ones, and the row after which the next part
        begins, None if all were read."""
        states, damaged, read = await self._folded.states_of(connection, tenant_id, rows, place.seq)
        return states, damaged, None if read == len(rows) else reads.position_of(order, rows[read - 1])

    async def summary(self, promise: Promise, wanted: Wanted, limit: int) -> dict[str, Any]:
        """The figures of the jobs of a tenant, as ``GET /v1/jobs/summary`` shows them, as fresh as a list: at most
        ``limit`` groups, the newest hours or those of most jobs.

        Raises:
            InvalidInputError: the tenant is not searched by the field.
            TenantNotFoundError: there is no such tenant; other errors as ``read``.
        """

        async def find(connection: Connection, place: Place) -> Figures:
            return await _figures(connection, wanted, limit)

        found, consistency = await self._at_table(wanted.tenant_id, promise, find, NO_FIGURES)
        return summary_of(wanted, *found) | {"consistency": consistency}

    async def report(
        self, promise: Promise, limits: Mapping[Wanted, int], entries_max: int
    ) -> tuple[Sequence[dict[str, Any]], int]:
        """Summaries of the same jobs of one tenant in one state, each of at most so many groups; and the number of
        entries that the jobs follow from. Without summaries if they are more than ``entries_max``.

        Raises:
            as ``summary``.
        """
        first = next(iter(limits))

        async def find(connection: Connection, place: Place) -> tuple[Sequence[Figures], int]:
            entries = await job_figures.entries(connection, first, entries_max)
            if entries > entries_max:
                return (), entries
            return [await _figures(connection, wanted, limit) for wanted, limit in limits.items()], entries

        nothing: tuple[Sequence[Figures], int] = ([NO_FIGURES for _ in limits], 0)
        (found, entries), consistency = await self._at_table(first.tenant_id, promise, find, nothing)
        return [
            summary_of(wanted, *figures) | {"consistency": consistency}
            for wanted, figures in zip(limits, found, strict=False)
        ], entries

    async def _listed(
        self, tenant_id: str, promise: Promise, find: Callable[[Connection, Place], Awaitable[_Found]]
    ) -> Page:
        """The jobs that ``find`` finds in the job table, once the table is as far as ``promise`` demands."""
        (states, damaged, last), consistency = await self._at_table(tenant_id, promise, find, _Found([], [], None))
        for job in damaged:
            self._report(job.error, "job_list")
        shown = await self._revealing.states(tenant_id, states)
        items = [
            {"tenant_id": tenant_id, **jobs.view(each), "conflicts": jobs.conflicts(state)}
            for state, each in zip(states, shown, strict=True)
        ]
        return Page(items, last, consistency, [job.shown() for job in damaged])

    async def _at_table(
        self, tenant_id: str, promise: Promise, find: Callable[[Connection, Place], Awaitable[Value]], nothing: Value
    ) -> tuple[Value, dict[str, Any]]:
        """The result of ``find`` on the job table, once the table is as far as ``promise`` demands, ``nothing`` before
        its start; and the consistency of the answer."""
        awaited: tuple[int, float] | None = None
        """The end of the chain that the table must reach, from the first read, and the time of that read. If the
        promise bounds staleness, an older end is replaced."""
        is_bounded = promise.level is ReadLevel.BOUNDED_STALENESS

        async def look(pool: Pool, judge: Judge) -> tuple[Value, Place, int] | None:
            nonlocal awaited
            async with reading(pool, snapshot=True) as connection:
                place, seen = await reads.place_and_seen(connection, tenant_id, *self._copies.asked_of(promise))
                judge(seen)
                if place is None:
                    return None
                now_s = time.monotonic()
                if awaited is None or (is_bounded and now_s - awaited[1] > promise.max_staleness_ms / 1000):
                    awaited = place.head_seq, now_s
                if promise.level is not ReadLevel.EVENTUAL and place.seq < awaited[0]:
                    self._hurry(tenant_id)
                    raise UnfitError
                found = nothing if place.is_begun else await find(connection, place)
                # The list lacks the entries after the table's position; the oldest of them sets the staleness.
                is_behind = place.seq < place.head_seq
                return found, place, await reads.age_ms(connection, tenant_id, place.seq + 1) if is_behind else 0

        result, source = await self._copies.read(tenant_id, look, promise)
        if result is None:
            raise TenantNotFoundError(f"there is no tenant {tenant_id}{_behind(source)}")
        found, place, behind_ms = result
        as_of = {"as_of_seq": place.seq, "head_seq": place.head_seq}
        return found, _kept(promise, source) | {"staleness_ms": max(source.staleness_ms, behind_ms)} | as_of

    async def list_events(
        self, tenant_id: str, job_id: str, promise: Promise, after: CreatedHlc | None, limit: int
    ) -> Page:
        """Chained events of a job in HLC order, from above ``after``.

        Raises:
            JobNotFoundError: there is no such job; errors else as ``read``.
        """

        async def look(pool: Pool, judge: Judge) -> tuple[list[reads.EventRow], bool, Exclusions] | None:
            async with reading(pool, snapshot=True) as connection:
                await self._copies.judged(connection, promise, judge)
                check = self._check
                await self._retention.refuse_departed(connection, [(tenant_id, job_id)])
                excluded = await self._folds.exclusions(connection, tenant_id)
                events, more = await reads.list_job_events(connection, check, tenant_id, job_id, after, limit)
                exists = events or await reads.job_exists(connection, tenant_id, job_id)
                if not exists and await reads.find_refusal(connection, check, tenant_id, job_id) is not None:
                    refused = await reads.list_job_events(
                        connection, check, tenant_id, job_id, after, limit, are_refused=True
                    )
                    return (*refused, excluded)
                return (events, more, excluded) if exists else None

        found, source = await self._copies.read(tenant_id, look, promise)
        if found is None:
            raise JobNotFoundError(f"tenant {tenant_id} has no job {job_id}{_behind(source)}")
        events, more, excluded = found
        payloads = await self._revealing.payloads(tenant_id, [event.entry for event in events])
        items = [
            {**_event_item(event, payload), "counts": excluded.counts(event.entry.origin)}
            for event, payload in zip(events, payloads, strict=True)
        ]
        end = events[-1].entry if more else None
        return Page(
            items, None if end is None else (end.hlc_physical, end.hlc_logical, end.hlc_node), _kept(promise, source)
        )

    async def _searched(
        self,
        connection: Connection,
        tenant_id: str,
        place: Place,
        wanted: JobFilter,
        listed: ListRange,
        limit: int,
    ) -> _Found:
        """Jobs whose entries match, as far as the search came within its time and bounds."""
        found: list[jobs.JobState] = []
        damaged: list[DamagedJob] = []
        fragments, give_up_s, left = wanted.fragments(), time.monotonic() + LOOKING_S, LOOKED_AT_MAX
        declared = (await job_search.declared(connection, [tenant_id])).get(tenant_id)
        terms = wanted.terms(declared.fields) if declared is not None and declared.built_to is None else []
        term = await job_search.narrowest(connection, tenant_id, terms, listed.order)
        while True:
            part = await job_search.candidates(
                connection,
                tenant_id,
                wanted.statuses,
                wanted.actor,
                fragments,
                term,
                listed,
                limit - len(found),
                min(LOOKED_AT_ONCE, left),
                in_conflict=wanted.in_conflict,
            )
            states, met, cut = await self._states(connection, tenant_id, part.jobs, place, listed.order)
            found += [state for state in states if wanted.finds(state)]
            damaged += met
            last, left = cut or part.last, left - part.looked_at
            if last is None or len(found) == limit or left <= 0 or time.monotonic() > give_up_s:
                return _Found(found, damaged, last)
            listed = listed._replace(after=last)

    async def _creations(
        self, tenant_id: str, state: jobs.JobState, view: dict[str, Any], events: Sequence[ListedEntry]
    ) -> dict[str, Any]:
        """The creations among ``events`` that differ from what ``view`` shows, by HLC, and the conflict of ``state``
        with them."""
        entries = []
        for event, shown in zip(events, await self._revealing.payloads(tenant_id, events), strict=True):
            is_first = state.created is not None and state.created.order[-1] == event.seq
            payload = orjson.loads(orjson.dumps(shown))
            hlc: HlcParts = (event.hlc_physical, event.hlc_logical, event.hlc_node)
            if (held := held_event(payload, event.job_id)) is not None:
                payload, hlc = jobs.payload_of(held.payload), held.hlc
            said = {"spec": payload.get("spec", {}), "assigned_dcs": payload.get("assigned_dcs", [])}
            if not is_first and said == orjson.loads(orjson.dumps({name: view[name] for name in said})):
                continue
            item = {"seq": event.seq, "hlc": event.t_hlc, "at": rfc3339.time_of(event.t_hlc), **said}
            entries.append((not is_first, hlc, event.seq, self._folds.log_of(tenant_id, event.origin), item))
        entries.sort()  # no two have one seq
        items = [item for is_other, *_, item in entries if is_other]
        if not items:
            return {"other_creations": [], "conflicts": []}
        conflict = jobs.conflict_of([(seq, hlc) for _, hlc, seq, *_ in entries])
        logs = [{**entry, "log": log} for entry, (*_, log, _) in zip(conflict["entries"], entries, strict=True)]
        return {"other_creations": items, "conflicts": [{**conflict, "entries": logs}]}

    async def _tenant_of(self, job_id: str, among: Sequence[str], promise: Promise) -> str:
        """The only tenant that matches the patterns ``among`` and has a job of this id.

        Raises:
            JobNotFoundError: none has.
            InvalidInputError: several have.
        """

        async def look(pool: Pool, judge: Judge) -> list[str]:
            async with reading(pool, snapshot=True) as connection:
                await self._copies.judged(connection, promise, judge)
                return await reads.tenants_of_job(connection, job_id, among)

        tenants, source = await self._copies.read(None, look, promise)
        if not tenants:
            raise JobNotFoundError(f"no tenant has a job {job_id}{_behind(source)}")
        if len(tenants) > 1:
            raise InvalidInputError(
                f"tenant_id: several tenants have a job {job_id}; say whose is meant", ("tenant_id",)
            )
        return tenants[0]


async def _figures(connection: Connection, wanted: Wanted, limit: int) -> Figures:
    other = None
    if wanted.by.startswith(SEARCHED):
        await job_search.require_built(connection, wanted.tenant_id, wanted.by)
        other = await job_figures.other(connection, wanted)
    by_status, _ = await job_figures.read(connection, wanted._replace(by=BY_STATUS), len(STATUSES))
    if wanted.by == BY_STATUS:
        return by_status, by_status, len(by_status), None
    return by_status, *await job_figures.read(connection, wanted, limit), other


def _behind(source: Source) -> str:
    """The addition to a "not found" text if the copy was not the primary."""
    return "" if source is PRIMARY else f" (says {source.name}, {source.staleness_ms} ms behind)"


def _kept(promise: Promise, source: Source) -> dict[str, Any]:
    return {"level": promise.level.name, "source": source.name, "staleness_ms": source.staleness_ms}


def _event_item(event: reads.EventRow, shown: object) -> dict[str, Any]:
    entry = event.entry
    payload = json_in(entry.payload)
    return {
        "seq": entry.seq,
        "hlc": entry.t_hlc,
        "at": rfc3339.time_of(entry.t_hlc),
        "type": payload.get("type") if isinstance(payload, dict) else None,
        "action": entry.action,
        "actor": (shown if isinstance(shown, dict) else payload).get(ACTOR) if isinstance(payload, dict) else None,
        "payload": entry.payload if payload is None else shown,
        "payload_digest": entry.payload_digest,
        "chain_link": entry.chain_link,
        "state": event.state,
        "origin": json_in(entry.origin),
    }


def _creations_in(state: State) -> list[int]:
    """Seqs of the creations of a job that was created more than once."""
    if state is None or state.created is None or not state.others:
        return []
    return [state.created.order[-1], *(order[-1] for order in state.others.values())]


def _created(state: jobs.JobState) -> CreatedHlc:
    """The job's sort key in lists; every listed job has a creation."""
    assert state.created is not None
    return state.created.order[:3]

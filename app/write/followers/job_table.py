"""The tables that a follower derives from chained entries: jobs, the search terms of jobs, and commitments."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from app.runtime.sharing import in_turns
from app.store import Connection, commitments, exclusions
from app.store.following import FollowedEntry, entries_behind
from app.store.jobs import figures as job_figures
from app.store.jobs import search as terms_store
from app.store.jobs import table as store
from app.store.jobs.search import JobTerm, SearchFields
from app.store.jobs.table import JobKey, JobSpan
from app.store.retention import covered_to
from ledger.errors import ChainDamagedError
from ledger.facts.statuses import SUBMITTED
from ledger.machines import jobs
from ledger.machines.exclusions import COUNT_ALL, Exclusions
from ledger.machines.job_figures import figure_of
from ledger.machines.job_fold import CREATION
from ledger.machines.job_search import terms_of
from ledger.machines.jobs import JobState
from ledger.positions import Lsn
from ledger.verification.projection_check import job_row, new_job_row

CACHED_JOBS_MAX = 50_000
"""Job states kept in memory, so that a job with frequent events is not read back each time."""
TURN_S = 0.0005
"""Time of the event loop that folding takes before others go first."""
ROWS_A_PIECE = 256
"""Rows of new jobs that are made and sent before others go first."""
BUILT_AT_ONCE = 2000
"""Entries older than the declared search fields of which the jobs that they create are indexed in one turn."""
CREATING: Final = (CREATION, "CONFLICT")
"""Actions of entries that may hold a creation."""
CONFLICTS_LOGGED_MAX = 10
"""Jobs in conflict that one turn names in the log."""
DOUBTED_MAX = 10_000
"""Jobs with false rows that wait to be rewritten; others are found again when they are read."""


_NONE_KNOWN: Final[Mapping[str, Any]] = {}

log = structlog.get_logger()


@dataclass(slots=True)
class Turn:
    """The entries that are followed in one transaction, by tenant."""

    after: dict[str, int] = field(default_factory=dict)
    """The position of each tenant before the turn."""
    moved: set[str] = field(default_factory=set)
    """Tenants whose position is not where this node left it."""
    entries: dict[str, Sequence[FollowedEntry]] = field(default_factory=dict)
    """The next entries, in seq order."""
    places: dict[str, int] = field(default_factory=dict)
    """The position of each tenant after the turn."""
    covered_lsn: dict[str, Lsn] = field(default_factory=dict)
    """For tenants at the end of their chain, an LSN up to which all records of this node are in it."""
    unfinished: set[str] = field(default_factory=set)
    """Tenants that need another turn, even without new entries."""
    exclusions: dict[str, Exclusions] = field(default_factory=dict)
    """What is excluded in each chain with statements."""
    declared: dict[str, SearchFields] = field(default_factory=dict)
    """The search fields of tenants that declared some."""
    states: dict[JobKey, JobState] = field(default_factory=dict)
    """New states of jobs, but of those in ``created``."""
    created: dict[JobKey, FollowedEntry] = field(default_factory=dict)
    """New jobs that have one entry, their creation: most are not folded before they have a second."""
    in_conflict: list[JobKey] = field(default_factory=list)
    """Jobs that its entries brought into conflict."""
    rewritten: list[JobKey] = field(default_factory=list)
    """Jobs whose false rows are rewritten."""

    def is_plain(self, tenant_id: str) -> bool:
        """Whether rows of this tenant's jobs follow from their entries alone."""
        return tenant_id not in self.exclusions and tenant_id not in self.declared

    def counted(self, tenant_id: str, state: JobState) -> Sequence[str]:
        """The fields by whose values a job of the tenant counts."""
        declared = self.declared.get(tenant_id)
        return () if declared is None else declared.counted(state)

    def exclusions_seq(self, tenant_id: str) -> int:
        """Seq of the newest statement that decides about this chain, 0 without one."""
        return self.exclusions.get(tenant_id, COUNT_ALL).seq


class JobTable:
    """Folds entries into the states of their jobs."""

    def __init__(
        self,
        on_followed: Callable[[Mapping[JobKey, JobState], Mapping[str, Lsn]], None],
        log_origin: str | None = None,
        count_conflicts: Callable[[int], object] = lambda count: None,
        floor_of: commitments.FloorOf = commitments.nothing_left,
    ) -> None:
        """``on_followed`` gets new states of jobs once they are committed, but not of those that are only created, and
        by tenant the LSN up to which they cover the records of this node. ``log_origin`` is that of this ledger's logs.
        ``count_conflicts`` gets the number of jobs that new entries brought into conflict. ``floor_of`` gives what is
        promised at the floor of a chain."""
        self._on_followed = on_followed
        self._log_origin = log_origin
        self._count_conflicts = count_conflicts
        self._floor_of = floor_of
        self._counted_seqs: dict[str, int] = {}
        """By tenant, the seq up to which conflicts were counted: a table that is rewritten meets them again."""
        self._known: dict[str, dict[str, JobState | FollowedEntry]] = {}
        """By tenant and job, states as of the last turn, or the creation that is all of the job; valid only while no
        other node follows the tenant."""
        self._known_with: dict[str, int] = {}
        """By tenant, seq of the newest deciding statement with which these states were folded."""
        self._known_from: dict[str, int] = {}
        """By tenant, the first entry of the chain when they were folded: entries before it have left since."""
        self._doubted: dict[JobKey, None] = {}
        """Jobs with false rows."""

    def doubt(self, tenant_id: str, job_id: str) -> None:
        """Rewrite the row of this job from its entries, with the next turn of its tenant."""
        if len(self._doubted) < DOUBTED_MAX:
            self._doubted[tenant_id, job_id] = None

    async def read_exclusions(self, connection: Connection, turn: Turn, tenant_ids: Sequence[str]) -> list[str]:
        """Put into ``turn`` what is excluded in these chains; returns those whose rows were written with other
        exclusions, and MUST be written from the first entry on in this transaction."""
        stated = await exclusions.statements(connection, tenant_ids, self._log_origin)
        turn.exclusions = {
            each: found.exclusions(exclusions.own_log(self._log_origin, each)) for each, found in stated.items()
        }
        if not turn.exclusions:
            return []
        written = await exclusions.written_with(connection, list(turn.exclusions))
        changed = {each: found.seq for each, found in turn.exclusions.items() if found.seq > written.get(each, 0)}
        if changed:
            await exclusions.write_with(connection, changed)
        return list(changed)

    async def empty(self, connection: Connection, tenant_ids: Sequence[str]) -> None:
        """Remove the rows of these tenants."""
        await store.empty(connection, tenant_ids)
        await commitments.empty(connection, tenant_ids)
        await terms_store.empty_terms(connection, tenant_ids)

    async def take(self, connection: Connection, turn: Turn) -> None:
        """Fold the entries; store the resulting states, their search terms, and the commitments."""
        first_seqs = await store.first_seqs(connection, turn.after)
        seeded_to = {
            tenant_id: await self._seed(connection, tenant_id, after_seq)
            for tenant_id, after_seq in turn.after.items()
            if first_seqs.get(tenant_id, 1) > 1
        }
        await commitments.take(connection, turn.entries, seeded_to)
        for tenant_id in turn.after:
            # Another node may have rewritten the rows with new exclusions, or removed entries, up to where this node
            # left the position.
            is_other = turn.exclusions_seq(tenant_id) != self._known_with.get(tenant_id, 0)
            if tenant_id in turn.moved or is_other or first_seqs.get(tenant_id) != self._known_from.get(tenant_id):
                self._known.pop(tenant_id, None)
        self._known_from |= first_seqs
        turn.declared = await terms_store.declared(connection, turn.after)
        facts: defaultdict[JobKey, list[FollowedEntry]] = defaultdict(list)
        for tenant_id, entries in turn.entries.items():
            for entry in entries:
                if entry.action in jobs.ABOUT_JOBS and isinstance(entry.job_id, str):
                    facts[tenant_id, entry.job_id].append(entry)
        turn.rewritten = [job for job in self._doubted if job[0] in turn.after]
        before = {job: state for job in (*facts, *turn.rewritten) if (state := self._known_state(*job)) is not None}
        # A job whose first new entry creates it is nearly always new. If one has a row, none of these rows is stored.
        new = {job: entries for job, entries in facts.items() if entries[0].action == CREATION and job not in before}
        await _admit_values(connection, turn, turn.entries)
        if new and not turn.rewritten and not await store.add(connection, _new_rows(new, turn)):
            turn.states, turn.created = {}, {}
        touched = sorted({*turn.rewritten, *facts}.difference(turn.states, turn.created))
        unknown = [job for job in touched if job not in before and turn.after[job[0]]]
        before |= await _folded(connection, turn, [JobSpan(*job, to_seq=turn.after[job[0]]) for job in unknown])
        states = await _folded_onto(before, {job: facts.get(job, ()) for job in touched}, turn)
        if states:
            await store.store(connection, _rows(turn, states))
        turn.states |= states
        for job, state in turn.states.items():
            if state.others and self._is_new_conflict(job, state, before.get(job)):
                turn.in_conflict.append(job)
        await _follow_terms(connection, turn, before)

    def _known_state(self, tenant_id: str, job_id: str) -> JobState | None:
        known = self._known.get(tenant_id, _NONE_KNOWN).get(job_id)
        return jobs.folded(job_id, None, [known]) if isinstance(known, FollowedEntry) else known

    async def _seed(self, connection: Connection, tenant_id: str, after_seq: int) -> int:
        """Store what entries promise that are leaving or have left, where the table is not behind them. Returns up to
        which seq."""
        if after_seq >= await covered_to(connection, tenant_id):
            return 0
        try:
            floor = await self._floor_of(connection, tenant_id)
        except ChainDamagedError as error:
            # Verification names it, and readers of commitments refuse to answer.
            log.error("commitments_not_seeded", tenant_id=tenant_id, error=str(error))
            return 0
        if after_seq < floor.seq:
            await commitments.seed(connection, tenant_id, floor)
        return floor.seq

    def taken(self, turn: Turn) -> None:
        """The turn was committed: keep its states in memory; beyond the bound whole tenants are evicted."""
        self._known_with |= {tenant_id: turn.exclusions_seq(tenant_id) for tenant_id in turn.exclusions}
        taken: dict[JobKey, JobState | FollowedEntry] = {**turn.states, **turn.created}
        for (tenant_id, job_id), known in taken.items():
            self._known.setdefault(tenant_id, {})[job_id] = known
        while sum(map(len, self._known.values())) > CACHED_JOBS_MAX:
            del self._known[next(iter(self._known))]
        self._on_followed(turn.states, turn.covered_lsn)
        for job in turn.rewritten:
            self._doubted.pop(job, None)
        if turn.in_conflict:
            self._count_conflicts(len(turn.in_conflict))
            for tenant_id, job_id in turn.in_conflict[:CONFLICTS_LOGGED_MAX]:
                log.warning("job_in_conflict", tenant_id=tenant_id, job_id=job_id)
        for tenant_id, seq in turn.places.items():
            self._counted_seqs[tenant_id] = max(seq, self._counted_seqs.get(tenant_id, 0))

    def _is_new_conflict(self, job: JobKey, state: JobState, before: JobState | None) -> bool:
        """Whether entries that were never followed brought the job into conflict."""
        if state.last_seq <= self._counted_seqs.get(job[0], 0) or (before is not None and jobs.conflicts(before)):
            return False
        return bool(jobs.conflicts(state))

    def failed(self) -> None:
        """Forget all states: it is not known which of them are stored."""
        self._known.clear()


def _rows(turn: Turn, states: Mapping[JobKey, JobState]) -> list[tuple[Any, ...]]:
    """Rows of (tenant, ``*JOB_COLUMNS``)."""
    return [(job[0], *job_row(state, turn.counted(job[0], state))) for job, state in states.items()]


async def _new_rows(new: Mapping[JobKey, Sequence[FollowedEntry]], turn: Turn) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Rows of new jobs, in pieces; puts into ``turn`` what these jobs are."""
    rows: list[tuple[Any, ...]] = []
    for (tenant_id, job_id), entries in new.items():
        row = new_job_row(entries[0]) if len(entries) == 1 and turn.is_plain(tenant_id) else None
        if row is not None:
            turn.created[tenant_id, job_id] = entries[0]
        else:
            state = jobs.folded(job_id, None, entries, turn.exclusions.get(tenant_id, COUNT_ALL))
            if state is None or state.created is None:
                continue
            turn.states[tenant_id, job_id] = state
            row = job_row(state, turn.counted(tenant_id, state))
        rows.append((tenant_id, *row))
        if len(rows) == ROWS_A_PIECE:
            yield rows
            await asyncio.sleep(0)
            rows = []
    yield rows


async def _folded_onto(
    before: Mapping[JobKey, JobState], facts: Mapping[JobKey, Sequence[FollowedEntry]], turn: Turn
) -> dict[JobKey, JobState]:
    """The states of these jobs after their new entries; jobs without a state are left out."""
    states = {}
    async for job, entries in in_turns(facts.items(), TURN_S):
        excluded = turn.exclusions.get(job[0], COUNT_ALL)
        state = jobs.folded(job[1], before.get(job), entries, excluded)
        if state is not None:
            states[job] = state
    return states


async def _folded(connection: Connection, turn: Turn, spans: Sequence[JobSpan]) -> dict[JobKey, JobState]:
    """The state of each job, folded from its entries; jobs without a state are left out. Entries are taken as stored:
    a read of the job recomputes them."""
    states: dict[JobKey, JobState] = {}
    entries = await store.entries_of(connection, spans) if spans else []
    async for span, rows in in_turns(zip(spans, entries, strict=True), TURN_S):
        excluded = turn.exclusions.get(span.tenant_id, COUNT_ALL)
        state = jobs.folded(span.job_id, None, map(store.FOLDED, rows), excluded)
        while len(rows) > store.ENTRIES_MAX:
            (rows,) = await store.entries_of(connection, [span._replace(after_seq=rows[-1][0])])
            state = jobs.folded(span.job_id, state, map(store.FOLDED, rows), excluded)
        if state is not None:
            states[span.tenant_id, span.job_id] = state
    return states


def _creations(entries: Iterable[FollowedEntry]) -> Iterator[FollowedEntry]:
    """The entries that may hold a creation."""
    return (entry for entry in entries if entry.action in CREATING and isinstance(entry.job_id, str))


async def _admit_values(connection: Connection, turn: Turn, entries: Mapping[str, Sequence[FollowedEntry]]) -> None:
    """Admit values of declared fields to the figures, by the creations among these entries."""
    creations: list[tuple[str, str]] = []
    of_declared = (
        (tenant_id, entry)
        for tenant_id, of_tenant in entries.items()
        if tenant_id in turn.declared
        for entry in _creations(of_tenant)
    )
    async for tenant_id, entry in in_turns(of_declared, TURN_S):
        state = jobs.folded(entry.job_id, None, [entry], turn.exclusions.get(tenant_id, COUNT_ALL))
        figure = None if state is None else figure_of(state, SUBMITTED, turn.counted(tenant_id, state))
        if figure is not None:
            creations.append((tenant_id, figure))
    await job_figures.admit(connection, creations)


async def _follow_terms(connection: Connection, turn: Turn, before: Mapping[JobKey, JobState]) -> None:
    """Store the terms of jobs whose terms changed since ``before``, and terms and rows of the jobs that at most
    ``BUILT_AT_ONCE`` entries after ``built_to`` create, which are older than the declaration of the fields."""
    declared = turn.declared
    changed: dict[JobKey, list[JobTerm]] = {}
    async for job, state in in_turns(turn.states.items() if declared else (), TURN_S):
        if (fields := declared.get(job[0])) is not None:
            now = _terms(job, state, fields.fields)
            if job not in before or job in turn.rewritten or _terms(job, before[job], fields.fields) != now:
                changed[job] = now
    for tenant_id, fields in [*declared.items()]:
        if fields.built_to is None:
            continue
        place = turn.places[tenant_id]
        entries = await entries_behind(connection, tenant_id, fields.built_to, place, BUILT_AT_ONCE)
        is_done = len(entries) < BUILT_AT_ONCE
        turn.declared[tenant_id] = fields._replace(built_to=None if is_done else entries[-1].seq)
        await _admit_values(connection, turn, {tenant_id: entries})
        job_ids = sorted({entry.job_id for entry in _creations(entries)})
        spans = [JobSpan(tenant_id, each, to_seq=turn.places[tenant_id]) for each in job_ids]
        built = await _folded(connection, turn, spans)
        changed |= {job: _terms(job, built.get(job), fields.fields) for job in ((tenant_id, each) for each in job_ids)}
        await store.store(connection, _rows(turn, built))
        await terms_store.advance_terms(connection, fields, turn.declared[tenant_id].built_to)
        if not is_done:
            turn.unfinished.add(tenant_id)
    if changed:
        await terms_store.store_terms(connection, list(changed), (term for terms in changed.values() for term in terms))


def _terms(job: JobKey, state: JobState | None, fields: Iterable[str]) -> list[JobTerm]:
    if state is None or state.created is None:
        return []
    physical, logical, node, *_ = state.created.order
    return [(*job, term, physical, logical, node) for term in sorted(terms_of(state, fields))]

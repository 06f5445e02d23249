"""Checks the job table against the fold of the chain, job by job.

Both sides are streams ordered by job id and are joined, so only one job is held at a time. A stored job is right if
``seqs`` names the entries that determine the fold of all its entries, and its other columns follow from that fold. A
break is reported at the last seq of the job.

Missing or edited entries give another fold, so if the chain itself is broken, a table that differs is left undecided.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from typing import Any, Final, NamedTuple

import msgspec

from ledger.decoding import decoder_of
from ledger.facts.statuses import SUBMITTED
from ledger.machines import job_figures, job_fold, job_search, jobs
from ledger.machines.exclusions import COUNT_ALL, Exclusions
from ledger.machines.job_fold import JobFold
from ledger.machines.jobs import JobState
from ledger.verification.reader import Rows
from ledger.verification.verdict import Break, Findings, Found, is_number

FOLD_COLUMNS: Final = (
    "job_id",
    "seq",
    "hlc_physical",
    "hlc_logical",
    "hlc_node",
    "action",
    "payload_digest",
    "payload",
    "origin",
)
"""Columns of one entry as readers give it for the fold, ordered by job id and seq."""

JOB_COLUMNS: Final = (
    "job_id",
    "status",
    "created_physical",
    "created_logical",
    "created_node",
    "created_by",
    "last_seq",
    "ended_ms",
    "run_ms",
    "figure",
    "seqs",
)
"""Columns of one stored job as readers give it, ordered by job id; ``seqs`` is what PostgreSQL prints, ``{1,2,5}``."""

CHAIN_ASPECTS: Final = ("links", "payloads", "head")
"""A break in one of these aspects explains jobs that differ."""

OnBreak = Callable[[Break], object]
"""Takes a break as it is found."""


class StoredJob(NamedTuple):
    """One row in the order of ``JOB_COLUMNS``."""

    job_id: str
    status: str
    created_physical: int | None
    created_logical: int | None
    created_node: str | None
    created_by: str | None
    last_seq: int
    ended_ms: int | None
    """When it ended; None for a job that has not, or that no list has."""
    run_ms: int | None
    """Its run time, at most ``RUN_MS_MAX``; None unless it ended and ran."""
    figure: str | None
    seqs: str
    search_fields: Sequence[str] | None = None
    """The fields by which the tenant's jobs are indexed; None if there is no index, or if the reader has none."""
    terms: str | None = None
    """The job's terms in the index, in the form of ``terms_text``."""


def terms_text(state: JobState, fields: Sequence[str]) -> str:
    """The index entries of a job for these fields: ``term:physical:logical:node`` each, by term."""
    if state.created is None:
        return ""
    place = "{}:{}:{}".format(*state.created.order[:3])
    return " ".join(f"{term}:{place}" for term in sorted(job_search.terms_of(state, fields)))


def job_row(state: JobState, fields: Sequence[str] = ()) -> tuple[Any, ...]:
    """The values of ``JOB_COLUMNS`` for a job of this state, whose tenant is searched by ``fields``."""
    physical, logical, node = state.created.order[:3] if state.created is not None else (None, None, None)
    status, creator, seqs = jobs.status(state), jobs.creator_of(state), jobs.seqs_of(state)
    ended_ms, run_ms = jobs.times_of_end(state, status) if state.created is not None else (None, None)
    run_ms = None if run_ms is None else min(run_ms, job_figures.RUN_MS_MAX)
    figure = job_figures.figure_of(state, status, fields)
    return state.job_id, status, physical, logical, node, creator, state.last_seq, ended_ms, run_ms, figure, seqs


class _Creation(msgspec.Struct, gc=False):
    """The members of a creation of which the row of a new job is made."""

    assigned_dcs: Any = None
    actor: Any = None
    trace_time: Any = None


_creation: Final = decoder_of(_Creation).decode


def new_job_row(entry: Sequence[Any]) -> tuple[Any, ...] | None:
    """As ``job_row``, for a job with one entry, its creation, that counts; the tenant is searched by no fields. None if
    the entry was edited into one that must be folded."""
    job_id, seq, physical, logical, node, _, digest, payload, _ = entry
    try:
        created = _creation(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None
    if not (
        job_id.__class__ is node.__class__ is digest.__class__ is str
        and seq.__class__ is physical.__class__ is logical.__class__ is int
    ):
        return None
    traced_ms = job_fold.traced_ms(created.trace_time)
    figure = job_figures.figure_of_new(physical, traced_ms, job_fold.assigned_dcs(created.assigned_dcs))
    creator = job_fold.creator_named(created.actor)
    return job_id, SUBMITTED, physical, logical, node, creator, seq, None, None, figure, [seq]


def stored_form(state: JobState, fields: Sequence[str] = ()) -> StoredJob:
    """The row of ``job_row`` as readers give it."""
    row = job_row(state, fields)
    return StoredJob._make((*row[:-1], seqs_text(row[-1]), None, None))


def seqs_text(seqs: Sequence[int]) -> str:
    """Seqs as PostgreSQL prints them."""
    return f"{{{','.join(map(str, seqs))}}}"


async def compare_jobs(
    entries: Rows, stored_jobs: Rows, on_break: OnBreak | None = None, exclusions: Exclusions = COUNT_ALL
) -> Found:
    """Compare every stored job with the fold of its entries, and find jobs that only one side has.

    The breaks, with each of which ``on_break`` is called, apply only if the chain itself is whole.
    """
    comparison = JobComparison(stored_jobs, on_break, exclusions)
    async for rows in entries:
        await comparison.add(rows)
    return await comparison.outcome()


def conclude(parts: Iterable[Found], findings: Findings) -> None:
    """Add the results for the projection, after all other findings: they are breaks if the chain is whole."""
    findings.begin("projection")
    is_whole = not findings.has(*CHAIN_ASPECTS)
    for found in parts:
        if is_whole:
            findings.merge(found)
        elif found.counts:
            findings.leave_undecided("projection")


def has_id(job: StoredJob, findings: Findings) -> bool:
    """Whether a stored job has an id and a last seq; reports one that does not."""
    if type(job.job_id) is str and is_number(job.last_seq):
        return True
    seq = job.last_seq if is_number(job.last_seq) else 1
    findings.add("projection", seq, f"a job is stored with id {job.job_id!r} and that seq")
    return False


def compare(state: JobState | None, stored: StoredJob | None, findings: Findings) -> None:
    """Judge the fold of a job's entries, None if it has none, against its row, None if it has none."""
    if (found := difference(state, stored)) is not None:
        findings.add(found.kind, found.seq, *found[2:])


def difference(state: JobState | None, stored: StoredJob | None) -> Break | None:
    """As ``compare``; the break if there is one."""
    if state is None:
        return None if stored is None else _break(stored.last_seq, f"job {stored.job_id} is stored but has no entries")
    if stored is None:
        return _break(state.last_seq, f"job {state.job_id} has entries but is not stored")
    expected = stored_form(state, stored.search_fields or ())
    if stored.search_fields is None:
        stored = stored._replace(figure=job_figures.without_fields(stored.figure))
    if stored[: len(JOB_COLUMNS)] != expected[: len(JOB_COLUMNS)]:
        column = next(name for name in JOB_COLUMNS if getattr(stored, name) != getattr(expected, name))
        return _break(
            state.last_seq,
            f"column {column} of job {state.job_id} is not what its entries give",
            getattr(expected, column),
            getattr(stored, column),
        )
    if stored.search_fields is not None and stored.terms != (terms := terms_text(state, stored.search_fields)):
        return _break(
            state.last_seq, f"what job {state.job_id} is searched by is not what its entries give", terms, stored.terms
        )
    return None


def _break(seq: int | None, detail: str, expected: str | int | None = None, actual: str | int | None = None) -> Break:
    return Break(seq or 1, "projection", detail, expected, actual)


class JobComparison:
    """Compares stored jobs with the fold of entries that come by job id and seq, some at a time."""

    def __init__(self, stored_jobs: Rows, on_break: OnBreak | None = None, exclusions: Exclusions = COUNT_ALL) -> None:
        self._exclusions = exclusions
        self._findings = Findings(on_break)
        self._batches = stored_jobs
        self._stored: deque[StoredJob] = deque()
        """Rows that were read and not compared yet."""
        self._fold: JobFold | None = None

    async def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Take the next entries, of ``FOLD_COLUMNS``, in two turns of the event loop."""
        folded, self._fold = _fold(rows, self._fold, self._exclusions)
        await asyncio.sleep(0)
        await self._compare(folded)
        await asyncio.sleep(0)

    async def outcome(self) -> Found:
        """The result; call it after the last entry."""
        if self._fold is not None:
            await self._compare([self._fold.state()])
        while await self._next() is not None:
            compare(None, self._stored.popleft(), self._findings)
        return self._findings.found

    async def _compare(self, folded: Sequence[JobState]) -> None:
        """Judge the next jobs of the fold, in order, and the stored ones up to them."""
        for state in folded:
            while (stored := await self._next()) is not None and stored.job_id < state.job_id:
                compare(None, self._stored.popleft(), self._findings)
            is_stored = stored is not None and stored.job_id == state.job_id
            compare(state, self._stored.popleft() if is_stored else None, self._findings)

    async def _next(self) -> StoredJob | None:
        while not self._stored:
            if (rows := await anext(self._batches, None)) is None:
                return None
            self._stored.extend(job for job in starmap(StoredJob, rows) if has_id(job, self._findings))
        return self._stored[0]


def _fold(
    rows: Sequence[Sequence[Any]], fold: JobFold | None, exclusions: Exclusions
) -> tuple[list[JobState], JobFold | None]:
    """Fold ``rows`` onto ``fold``; returns the states of completed jobs, and the fold of the last row's job."""
    folded: list[JobState] = []
    for row in rows:
        if (said := jobs.said_of_row(*row, exclusions=exclusions)) is None:
            continue
        if fold is None or fold.job_id != row[0]:
            folded += [] if fold is None else [fold.state()]
            fold = JobFold(row[0])
        fold.add(*said, row[1])
    return folded, fold

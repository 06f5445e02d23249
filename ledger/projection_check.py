"""Checking the stored job states against the fold of the chain, job by job.

Both sides come ordered by job id and are joined as they stream by, so only one job is held at a time. A stored
job is right when ``state`` is the canonical encoding of the fold of its entries, and its other columns follow
from it. A break is reported at the last seq of the job.

Entries that are missing or edited give another fold, so once the chain itself is broken a job that does not fit
is left undecided.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

import orjson

from ledger import jobs
from ledger.errors import CanonicalError
from ledger.jobs import JobState
from ledger.verdict import Findings, is_number

FOLD_COLUMNS: Final = (
    "job_id",
    "seq",
    "hlc_physical",
    "hlc_logical",
    "hlc_node",
    "action",
    "payload_digest",
    "payload",
)
"""Columns of one entry as readers give it for the fold, ordered by job id and seq."""

JOB_COLUMNS: Final = (
    "job_id",
    "status",
    "created_physical",
    "created_logical",
    "created_node",
    "last_seq",
    "state",
)
"""Columns of one stored job as readers give it, ordered by job id; ``state`` is the stored text."""

_FOLDED_TYPES: Final = (str, int, int, int, str, str)
"""Types of job id, seq, HLC parts and digest. An entry with others is a break of the chain and folds into nothing."""

Rows = AsyncIterator[Sequence[Sequence[Any]]]
"""Batches of rows."""


class StoredJob(NamedTuple):
    """One row in the order of ``JOB_COLUMNS``."""

    job_id: str
    status: str
    created_physical: int | None
    created_logical: int | None
    created_node: str | None
    last_seq: int
    state: str


def stored_form(state: JobState) -> StoredJob:
    """The row that stores ``state``.

    Raises:
        CanonicalError: the state has no canonical encoding.
    """
    physical, logical, node = state.created.order[:3] if state.created is not None else (None, None, None)
    encoded = jobs.to_json(state).decode()
    return StoredJob(state.job_id, jobs.status(state), physical, logical, node, state.last_seq, encoded)


async def check_projection(entries: Rows, stored_jobs: Rows, findings: Findings) -> None:
    """Compare every stored job with the fold of its entries, and find jobs that only one side has."""
    join = _Join(stored_jobs, findings)
    state: JobState | None = None
    async for rows in entries:
        folded, state = _fold(rows, state)
        await asyncio.sleep(0)
        await join.compare(folded)
        await asyncio.sleep(0)
    if state is not None:
        await join.compare([state])
    await join.finish()


def _fold(rows: Sequence[Sequence[Any]], state: JobState | None) -> tuple[list[JobState], JobState | None]:
    """Fold ``rows`` onto ``state``; the jobs that ended before the last row, and the state of the last."""
    folded: list[JobState] = []
    for job_id, seq, physical, logical, node, action, digest, text in rows:
        if (*map(type, (job_id, seq, physical, logical, node, digest)),) != _FOLDED_TYPES:
            continue
        fact = jobs.fact_of(action, _payload(text), (physical, logical, node), digest, job_id, seq)
        if fact is None:
            continue
        if state is None:
            state = fact
        elif state.job_id == job_id:
            state = jobs.merge(state, fact)
        else:
            folded.append(state)
            state = fact
    return folded, state


def _payload(text: str) -> dict[str, Any]:
    """The payload, empty when an edit made it something else than an object."""
    try:
        payload = orjson.loads(text)
    except (ValueError, TypeError):
        return {}
    return payload if isinstance(payload, dict) else {}


class _Join:
    def __init__(self, stored_jobs: Rows, findings: Findings) -> None:
        self._batches = stored_jobs
        self._rows: deque[StoredJob] = deque()
        self._findings = findings
        self._is_chain_whole = not findings.has("links", "payloads", "head")

    async def compare(self, folded: Sequence[JobState]) -> None:
        """Judge the next jobs of the fold, in order, and the stored ones up to them."""
        for state in folded:
            stored = await self._next()
            while stored is not None and stored.job_id < state.job_id:
                self._rows.popleft()
                self._report(stored.last_seq, f"job {stored.job_id} is stored but has no entries")
                stored = await self._next()
            if stored is None or stored.job_id != state.job_id:
                self._report(state.last_seq, f"job {state.job_id} has entries but is not stored")
                continue
            self._rows.popleft()
            self._compare_one(state, stored)

    async def finish(self) -> None:
        """No job of the fold follows."""
        while (stored := await self._next()) is not None:
            self._rows.popleft()
            self._report(stored.last_seq, f"job {stored.job_id} is stored but has no entries")

    async def _next(self) -> StoredJob | None:
        while not self._rows:
            rows = await anext(self._batches, None)
            if rows is None:
                return None
            for job in map(StoredJob._make, rows):
                if type(job.job_id) is str and is_number(job.last_seq):
                    self._rows.append(job)
                else:
                    seq = job.last_seq if is_number(job.last_seq) else 1
                    self._findings.add("projection", seq, f"a job is stored with id {job.job_id!r} and that seq")
        return self._rows[0]

    def _compare_one(self, state: JobState, stored: StoredJob) -> None:
        try:
            expected = stored_form(state)
        except CanonicalError as error:
            self._report(state.last_seq, f"the entries of job {state.job_id} have no state: {error}")
            return
        if stored == expected:
            return
        column = next(name for name in JOB_COLUMNS if getattr(stored, name) != getattr(expected, name))
        detail = f"column {column} of job {state.job_id} is not what its entries give"
        self._report(state.last_seq, detail, getattr(expected, column), getattr(stored, column))

    def _report(
        self, seq: int, detail: str, expected: str | int | None = None, actual: str | int | None = None
    ) -> None:
        if self._is_chain_whole:
            self._findings.add("projection", seq, detail, expected=expected, actual=actual)
        else:
            self._findings.leave_undecided("projection")

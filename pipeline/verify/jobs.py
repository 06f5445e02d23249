"""The tasks that compare jobs: the states that ranges folded are merged and compared with the stored ones.

Rows come sorted by tenant and job, so a task holds one job at a time. All other rows are passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

import msgspec
import pyarrow as pa

from ledger.machines import job_parts
from ledger.verification.projection_check import JobJudge, StoredJob
from ledger.verification.verdict import Break
from pipeline.verify.task_rows import BREAK, CANDIDATE, JOBS, PART, STORED, TaskRow, batched, encode, rows_in

SORTED_BY: Final = ("tenant_id", "job_id", "kind", "number", "place")
"""Parts come in chain order, stored jobs in the order that they are stored in."""


def compare_jobs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of one partition, which has all rows of every job in it, sorted by ``SORTED_BY``."""
    return batched(_compared(rows_in(batches)))


def _compared(rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
    for tenant_id, of_tenant in groupby(rows, key=lambda row: row.tenant_id):
        comparing = _Comparing(tenant_id)
        for job_id, of_job in groupby(of_tenant, key=lambda row: row.job_id):
            yield from comparing.compare(job_id, of_job)
        yield from comparing.finish()


class _Comparing:
    """Compares jobs of one tenant."""

    def __init__(self, tenant_id: str) -> None:
        self._tenant_id = tenant_id
        self._breaks: list[Break] = []
        self._candidates: list[Break] = []
        self._judge = JobJudge(self._breaks.append, self._candidates.append)
        self._is_any_compared = False

    def compare(self, job_id: str | None, rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
        parts, stored = [], []
        for row in rows:
            if row.kind == PART:
                parts.append(job_parts.decode(row.data))
            elif row.kind == STORED:
                job = StoredJob(*msgspec.msgpack.decode(row.data))
                if self._judge.may_stand(job):
                    stored.append(job)
                self._is_any_compared = True
            else:
                yield row
        if job_id is not None:
            self._judge.compare_all(job_parts.merged(parts), stored)
            self._is_any_compared = True
        yield from self._found(BREAK, self._breaks)
        yield from self._found(CANDIDATE, self._candidates)

    def finish(self) -> Iterator[TaskRow]:
        """No job of the tenant follows in this partition."""
        if self._is_any_compared:
            outcome = (self._judge.found.found(), self._judge.candidates.found())
            yield TaskRow(self._tenant_id, JOBS, -1, 0, None, encode(outcome))

    def _found(self, kind: str, breaks: list[Break]) -> Iterator[TaskRow]:
        for each in breaks:
            # They belong to no range, so they stay when one is checked again.
            yield TaskRow(self._tenant_id, kind, -1, 0, None, encode(each))
        breaks.clear()

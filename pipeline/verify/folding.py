"""The tasks that fold: what the ranges of a tenant gave becomes its verdict, or what must be checked again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa

from ledger.verification.range_fold import CheckAgain, Ends, JobsFound, fold
from ledger.verification.range_summary import RangeSummary, RangeTask
from ledger.verification.verdict import Break, Findings
from pipeline.verify.task_rows import AGAIN, BREAK, JOBS, REFUSED, SUMMARY, VERDICT, TaskRow, batched, encode, rows_in

SORTED_BY: Final = ("tenant_id", "kind", "number")
FOLDED: Final = (SUMMARY, JOBS, REFUSED)
"""Kinds of rows that are folded."""
_JOBS_DECODER: Final = msgspec.msgpack.Decoder(JobsFound)


class PlannedChain(NamedTuple):
    """One tenant's chain as it was planned."""

    ends: Ends
    tasks: list[RangeTask]


@dataclass(frozen=True)
class FoldChains:
    """Folds the rows of one partition, which has all of every tenant in it, sorted by ``SORTED_BY``."""

    chains: Mapping[str, PlannedChain]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return batched(self._rows(rows_in(batches)))

    def _rows(self, rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
        for tenant_id, of_tenant in groupby(rows, key=lambda row: row.tenant_id):
            yield from _folded(self.chains[tenant_id], of_tenant)


def _folded(chain: PlannedChain, rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
    tenant_id = chain.ends.tenant_id
    summaries: list[RangeSummary] = []
    jobs: list[JobsFound] = []
    refused: list[TaskRow] = []
    for row in rows:
        if row.kind == SUMMARY:
            summaries.append(RangeSummary.decode(row.data))
        elif row.kind == JOBS:
            jobs.append(_JOBS_DECODER.decode(row.data))
        else:
            refused.append(row)
    if refused:
        # What the lowest range met first is what reading from end to end would have met.
        yield min(refused, key=lambda row: row.number)
        return
    breaks: list[Break] = []
    outcome = fold(chain.ends, [*zip(chain.tasks, summaries, strict=True)], _merged(jobs), breaks.append)
    if isinstance(outcome, CheckAgain):
        for task in outcome.tasks:
            yield TaskRow(tenant_id, AGAIN, task.number, 0, None, encode(task))
        return
    for each in breaks:
        yield TaskRow(tenant_id, BREAK, -1, 0, None, encode(each))
    yield TaskRow(tenant_id, VERDICT, 0, 0, None, encode(outcome))


def _merged(jobs: Sequence[JobsFound]) -> JobsFound | None:
    if not jobs:
        return None
    found, candidates = Findings(), Findings()
    for each in jobs:
        found.merge(each.found)
        candidates.merge(each.candidates)
    return JobsFound(found.found(), candidates.found())

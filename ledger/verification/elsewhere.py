"""Verification of a chain whose ranges and jobs are checked elsewhere, several at once, and folded here in order.

Ranges are planned by seq. Where one turns out to be empty, the next reaches to the entry that comes next, so that a seq
which somebody made enormous costs one look.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from ledger.verification.in_order import Snapshots, end_of_range
from ledger.verification.projection_check import CHAIN_ASPECTS, conclude
from ledger.verification.range_fold import Ends, Fold
from ledger.verification.range_summary import RangeSummary, RangeTask
from ledger.verification.reader import ChainReader
from ledger.verification.snapshot_check import OpenedRow
from ledger.verification.verdict import Break, Findings, Found


class CheckedRange(NamedTuple):
    """What checking a range by itself came to; ``summary`` counts the breaks as well."""

    summary: RangeSummary
    breaks: Sequence[Break]


class ComparedJobs(NamedTuple):
    """What comparing some of the jobs came to; ``candidates`` count if the chain itself is whole."""

    found: Found
    breaks: Sequence[Break]
    candidates: Found
    candidate_breaks: Sequence[Break]


class Elsewhere(Protocol):
    """Checks parts of a tenant's ledger, in the state that the reader of the verification shows."""

    ranges_at_once: int

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check one range by itself; the snapshots are those that its checker takes."""

    def compared_jobs(self) -> AsyncIterator[ComparedJobs]:
        """Compare all jobs, some at a time."""


class _Planned(NamedTuple):
    task: RangeTask
    snapshots: Sequence[OpenedRow]
    new_snapshots: Sequence[OpenedRow]
    """Those that no range before was planned with."""
    checked: asyncio.Future[CheckedRange]


async def fold_ranges(ends: Ends, chain: Fold, reader: ChainReader, snapshots: Snapshots, elsewhere: Elsewhere) -> None:
    """Check all entries from seq 1 on and fold them into ``chain``."""
    assert ends.first_seq == 1
    assert ends.last is not None
    last_seq = ends.last.seq
    under_way: deque[_Planned] = deque()
    task, next_seq, is_next_near = ends.task(0, None, end_of_range(1)), 1, True
    try:
        while under_way or task.number == 0 or next_seq <= last_seq:
            # 1. Have as many under way as are of use.
            while len(under_way) < elsewhere.ranges_at_once and is_next_near and next_seq <= max(last_seq, 1):
                under_way.append(await _plan(task, snapshots, elsewhere))
                next_seq = (task.to_seq or 0) + 1
                task = ends.task(task.number + 1, next_seq, end_of_range(next_seq))
            # 2. Fold the first of them.
            planned = under_way.popleft()
            summary = await _checked(planned, chain, elsewhere)
            chain.add(summary._replace(snapshots=[*planned.new_snapshots]))
            # 3. Pass over what is empty, once nothing else is under way.
            is_next_near = is_next_near and summary.last_row is not None
            if not is_next_near and not under_way:
                next_seq, is_next_near = await _next_seq(reader, next_seq, last_seq), True
                task = task._replace(to_seq=end_of_range(next_seq))
    finally:
        for planned in under_way:
            planned.checked.cancel()
        await asyncio.gather(*(planned.checked for planned in under_way), return_exceptions=True)


async def _plan(task: RangeTask, snapshots: Snapshots, elsewhere: Elsewhere) -> _Planned:
    assert task.to_seq is not None
    needed = await snapshots.up_to(task.to_seq)
    return _Planned(task, needed, snapshots.take(), asyncio.ensure_future(elsewhere.check(task, needed)))


async def _checked(planned: _Planned, chain: Fold, elsewhere: Elsewhere) -> RangeSummary:
    """What checking a range gave, once all that it assumed is so; its breaks are told."""
    checked = await planned.checked
    changed = chain.wrongly_assumed(planned.task, checked.summary)
    if changed is not None:
        checked = await elsewhere.check(changed, planned.snapshots)
    _tell(chain.findings, checked.breaks)
    chain.findings.merge(checked.summary.found)
    return checked.summary


async def _next_seq(reader: ChainReader, from_seq: int, last_seq: int) -> int:
    """Seq of the first entry from ``from_seq`` on, one above ``last_seq`` when there is none."""
    async for rows in reader.entries(from_seq, None):
        return int(rows[0][0])
    return last_seq + 1


async def compare_jobs_elsewhere(elsewhere: Elsewhere, findings: Findings) -> None:
    """As ``projection_check.check_projection``."""
    is_chain_whole = not findings.has(*CHAIN_ASPECTS)
    found, candidates = Findings(), Findings()
    async for part in elsewhere.compared_jobs():
        _tell(findings, part.breaks)
        if is_chain_whole:
            _tell(findings, part.candidate_breaks)
        found.merge(part.found)
        candidates.merge(part.candidates)
    conclude(found.found(), candidates.found(), findings)


def _tell(findings: Findings, breaks: Sequence[Break]) -> None:
    if findings.on_break is not None:
        for each in breaks:
            findings.on_break(each)

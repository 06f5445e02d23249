"""Who checks the parts of a ledger for a verification: this process, one range after another, or others beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ledger.verification.commitment_check import judge_commitments
from ledger.verification.entry_check import EntryRow, PackedEntries
from ledger.verification.projection_check import JobsFound, OnBreak, compare_jobs
from ledger.verification.range_check import RangeChecker
from ledger.verification.range_summary import RangeSummary, RangeTask
from ledger.verification.reader import ChainReader
from ledger.verification.snapshot_check import OpenedRow
from ledger.verification.verdict import Break, Findings


class CheckedRange(NamedTuple):
    """What checking a range by itself came to; ``summary`` counts the breaks as well."""

    summary: RangeSummary
    breaks: Sequence[Break]


class Checks(Protocol):
    """Checks parts of a tenant's ledger, in the state that the reader of the verification shows."""

    ranges_at_once: int

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check one range by itself; the snapshots are those that its checker takes."""

    async def compare_jobs(self, on_break: OnBreak | None, on_candidate: OnBreak | None) -> JobsFound:
        """Compare all jobs; the calls are told what is found."""

    async def judge_commitments(self, on_candidate: OnBreak | None) -> JobsFound:
        """Judge all verdicts on proposals once more, and the table of commitments."""


class InOrder:
    """Checks the ranges one behind the other, while their entries stream by from one reader."""

    ranges_at_once = 1

    def __init__(self, reader: ChainReader, from_seq: int | None, to_seq: int | None) -> None:
        self._reader = reader
        self._batches = reader.entries(from_seq, to_seq)
        self._ahead: Sequence[EntryRow] | None = None
        """Entries that were read and belong to a range to come."""
        self._number = 0

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check the range that comes next."""
        assert task.number == self._number, "entries that have streamed by are not read again"
        assert task.to_seq is not None
        self._number += 1
        breaks: list[Break] = []
        checker = RangeChecker(task, snapshots, Findings(breaks.append))
        while (ahead := await anext(self._batches, None) if self._ahead is None else self._ahead) is not None:
            self._ahead = self._check(checker, ahead, task.to_seq)
            await asyncio.sleep(0)
            if self._ahead is not None:
                break
        return CheckedRange(await finished(checker, self._reader), breaks)

    async def compare_jobs(self, on_break: OnBreak | None, on_candidate: OnBreak | None) -> JobsFound:
        """Compare all jobs."""
        return await compare_jobs(self._reader.entries_by_job(), self._reader.jobs(), on_break, on_candidate)

    async def judge_commitments(self, on_candidate: OnBreak | None) -> JobsFound:
        """Judge all verdicts."""
        reader = self._reader
        return await judge_commitments(
            reader.commitments(), reader.promised(), await reader.followed_seq(), on_candidate
        )

    def _check(self, checker: RangeChecker, ahead: Sequence[EntryRow], to_seq: int) -> Sequence[EntryRow] | None:
        """Check those entries that are not above ``to_seq``; the others, None where there are none."""
        if isinstance(ahead, PackedEntries):
            passed = checker.check_packed(ahead, to_seq)
            if passed is not None:
                return ahead.behind(passed.at)
        count = next((at for at, row in enumerate(ahead) if row[0] > to_seq), len(ahead))
        if count:
            checker.check(ahead[:count])
        return ahead[count:] or None


async def finished(checker: RangeChecker, reader: ChainReader) -> RangeSummary:
    """What the whole needs of a range whose entries were all checked; its stored tiles are compared."""
    for tiles in checker.tiles():
        stored = await reader.tiles(*tiles)
        if stored is None:
            break
        checker.compare_tiles(tiles, stored)
    return checker.finish()

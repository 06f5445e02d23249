"""Who checks the parts of a ledger for a verification: this process, one range after another, or others beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from ledger.verification.entry_check import EntryColumns
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


class InOrder:
    """Checks the ranges one behind the other, while their entries stream by from one reader."""

    ranges_at_once = 1

    def __init__(self, reader: ChainReader, from_seq: int | None, to_seq: int | None) -> None:
        self._reader = reader
        self._batches = reader.entries(from_seq, to_seq)
        self._ahead: EntryColumns | None = None
        """Entries that were read and belong to a range to come."""
        self._number = 0

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check the range that comes next."""
        assert task.number == self._number, "entries that have streamed by are not read again"
        assert task.to_seq is not None
        self._number += 1
        breaks: list[Break] = []
        checker = RangeChecker(task, snapshots, Findings(breaks.append))
        async for columns in self._up_to(task.to_seq):
            checker.check_columns(columns)
            await asyncio.sleep(0)
        return CheckedRange(await finished(checker, self._reader), breaks)

    async def compare_jobs(self, on_break: OnBreak | None, on_candidate: OnBreak | None) -> JobsFound:
        """Compare all jobs."""
        return await compare_jobs(self._reader.entries_by_job(), self._reader.jobs(), on_break, on_candidate)

    async def _up_to(self, to_seq: int) -> AsyncIterator[EntryColumns]:
        """The next entries, before the first that is above ``to_seq``."""
        while (columns := self._ahead or await self._read()) is not None:
            seqs = columns[0]
            count = next((at for at, seq in enumerate(seqs) if seq > to_seq), len(seqs))
            self._ahead = [column[count:] for column in columns] if count < len(seqs) else None
            if count:
                yield columns if self._ahead is None else [column[:count] for column in columns]
            if self._ahead is not None:
                return

    async def _read(self) -> EntryColumns | None:
        rows = await anext(self._batches, None)
        return None if rows is None else [*zip(*rows, strict=True)]


async def finished(checker: RangeChecker, reader: ChainReader) -> RangeSummary:
    """What the whole needs of a range whose entries were all checked; its stored tiles are compared."""
    for tiles in checker.tiles():
        stored = await reader.tiles(*tiles)
        if stored is None:
            break
        checker.compare_tiles(tiles, stored)
    return checker.finish()

"""The ranges of a chain checked one behind the other, while its entries stream by from one reader.

Each range goes on from what the one before has passed, so nothing about entries is left to the fold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from ledger.verification.entry_check import EntryChecker, EntryColumns, EntryRow
from ledger.verification.range_check import RangeChecker
from ledger.verification.range_fold import Ends
from ledger.verification.range_summary import RangeSummary, RangeTask
from ledger.verification.reader import ChainReader
from ledger.verification.snapshot_check import OpenedRow, OpenSnapshot, SnapshotRow, has_place, open_row
from ledger.verification.verdict import Findings

RANGE_ENTRIES: Final = 8192
"""Entries of a range, of which about 200 bytes each are held: 32 tiles of the stored tree, which are read at once."""


async def checked_ranges(
    ends: Ends,
    entries: EntryChecker,
    reader: ChainReader,
    snapshots: Snapshots,
    to_seq: int | None,
    findings: Findings,
) -> AsyncIterator[RangeSummary]:
    """Check one range behind the other while the entries up to ``to_seq`` stream by; ``entries`` passed those before.

    What is wrong is in ``findings`` when a summary is given. There is one at least.
    """
    first = ends.first_seq
    task = ends.task(0, None, end_of_range(first))
    checker = await _begin(task, snapshots, findings, entries)
    async for rows in reader.entries(None if first == 1 else first, to_seq):
        columns: EntryColumns = [*zip(*rows, strict=True)]
        while (count := _count_to(columns[0], checker.end_seq)) < len(columns[0]):
            if count:
                checker.check_columns([column[:count] for column in columns])
                columns = [column[count:] for column in columns]
            yield await finish(checker, reader, snapshots)
            task = ends.task(task.number + 1, checker.end_seq + 1, end_of_range(columns[0][0]))
            checker = await _begin(task, snapshots, findings, entries)
        checker.check_columns(columns)
        await asyncio.sleep(0)
    yield await finish(checker, reader, snapshots)


async def _begin(task: RangeTask, snapshots: Snapshots, findings: Findings, entries: EntryChecker) -> RangeChecker:
    assert task.to_seq is not None
    return RangeChecker(task, await snapshots.up_to(task.to_seq), findings, entries)


async def finish(checker: RangeChecker, reader: ChainReader, snapshots: Snapshots) -> RangeSummary:
    for tiles in checker.tiles():
        stored = await reader.tiles(*tiles)
        if stored is None:
            break
        checker.compare_tiles(tiles, stored)
    return checker.finish()._replace(snapshots=snapshots.take())


def end_of_range(seq: int) -> int:
    """The last seq of the range that ``seq`` lies in."""
    return -(-seq // RANGE_ENTRIES) * RANGE_ENTRIES


def _count_to(seqs: Sequence[int], last_seq: int) -> int:
    """How many of ``seqs`` come before the first that is above ``last_seq``."""
    if max(seqs) <= last_seq:
        return len(seqs)
    return next(index for index, seq in enumerate(seqs) if seq > last_seq)


class Snapshots:
    """Opens the snapshots of a chain as its ranges come to need them."""

    def __init__(
        self, rows: AsyncIterator[Sequence[SnapshotRow]], open_snapshot: OpenSnapshot | None, findings: Findings
    ) -> None:
        self._rows = rows
        self._open_snapshot = open_snapshot
        self._findings = findings
        self._opened: list[OpenedRow] = []
        """Those that a range to come may need."""
        self._untaken: list[OpenedRow] = []

    async def up_to(self, to_seq: int) -> list[OpenedRow]:
        """Those that the next range, which ends at ``to_seq``, overlaps or may overlap."""
        while not self._opened or self._opened[-1].stored_from <= to_seq:
            if not await self._read():
                break
        needed = self._opened
        self._opened = [each for each in needed if max(each.stored_from, each.stored_to, each.to_seq) > to_seq]
        return needed

    async def rest(self) -> AsyncIterator[list[OpenedRow]]:
        """Those that no range has read, once there is none to come."""
        while await self._read():
            self._opened.clear()
            yield self.take()

    async def _read(self) -> bool:
        """Open the next of them; False when there are no more."""
        rows = await anext(self._rows, None)
        for row in rows or ():
            if has_place(row, self._findings):
                self._opened.append(open_row(row, self._open_snapshot, self._findings))
                self._untaken.append(self._opened[-1])
                await asyncio.sleep(0)
        return rows is not None

    def take(self) -> list[OpenedRow]:
        """Those opened since the last call, in the order they are stored in."""
        taken, self._untaken = self._untaken, []
        return taken


async def entry_checker(
    reader: ChainReader,
    findings: Findings,
    tenant_id: str,
    first: int,
    last_seq: int,
    expected_prev: str | None,
) -> EntryChecker:
    """A checker that starts behind entry ``first - 1``, which must still be the one verified before."""
    if first == 1:
        return EntryChecker(tenant_id, findings, first_seq=1, prev_link=None)
    before: EntryRow | None = None
    async for rows in reader.entries(first - 1, first - 1):
        before = rows[0] if before is None else before
    if before is None:
        if expected_prev is not None and last_seq >= first:
            findings.add("gap", first - 1, f"seq {first - 1}, verified before, is missing", expected=first - 1)
        is_known = expected_prev is not None
        return EntryChecker(tenant_id, findings, first_seq=first, prev_link=expected_prev, is_prev_known=is_known)
    version, link = before[7], before[9]
    if expected_prev is not None and link != expected_prev:
        detail = f"seq {first - 1} is not the entry that was verified before"
        findings.add("link", first - 1, detail, expected=expected_prev, actual=link)
    return EntryChecker(tenant_id, findings, first_seq=first, prev_link=link, may_be_v1=version == 1)

"""The driver of a verification: it plans ranges, runs their checks, and folds the results in order.

Ranges are planned by seq. If a range is empty, the next one ends at the next entry, so a forged huge seq costs a single
query. ``Checks`` checks ranges one after another in this process, or in other processes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

from ledger.facts.events import SYSTEM_TENANT
from ledger.job_index.builder import IndexBuilder
from ledger.machines.retention import Floor, Judge, archived
from ledger.verification.caller_check import NOBODY_KNOWN, CallerJudge
from ledger.verification.commitment_check import judge_commitments
from ledger.verification.entry_check import EntryRow, PackedEntries
from ledger.verification.floor_check import floor_of, from_floor
from ledger.verification.left_index import IndexSource, index_at_floor, index_of_left
from ledger.verification.projection_check import CHAIN_ASPECTS, OnBreak, compare_jobs, conclude
from ledger.verification.range_check import SEQ_MAX, RangeChecker, RangeSummary, RangeTask
from ledger.verification.range_fold import ChainBounds, Fold
from ledger.verification.reader import ChainReader
from ledger.verification.snapshot_check import OpenedRow, OpenSnapshot, SnapshotRow, has_place, open_row
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import Anchor, Break, Findings, Found, Head, Verdict

CheckedRange = tuple[RangeSummary, Sequence[Break]]
"""The result of checking a range by itself, and its breaks, which the summary counts as well."""


class Checks(Protocol):
    """Checks parts of a tenant's ledger, in the same state that the verification's reader shows."""

    ranges_at_once: int

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check one range by itself; ``snapshots`` as for ``RangeChecker``."""

    async def compare_jobs(self, on_break: OnBreak | None) -> Found:
        """Compare all jobs; ``on_break`` is called with each break."""

    async def judge_commitments(self, on_break: OnBreak | None, floor: Floor | None) -> Found:
        """Judge all verdicts on proposals again, and the table of commitments, from the floor on."""


class InOrder:
    """Checks the ranges one after the other, as their entries stream from one reader."""

    ranges_at_once = 1

    def __init__(
        self, reader: ChainReader, from_seq: int | None, to_seq: int | None, callers: CallerJudge = NOBODY_KNOWN
    ) -> None:
        self._reader = reader
        self._callers = callers
        self._batches = reader.entries(from_seq, to_seq)
        self._ahead: Sequence[EntryRow] | None = None
        """Entries that were read and belong to a later range."""

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check the next range."""
        assert task.to_seq is not None
        breaks: list[Break] = []
        checker = RangeChecker(task, snapshots, Findings(breaks.append), self._callers)
        while (ahead := await anext(self._batches, None) if self._ahead is None else self._ahead) is not None:
            self._ahead = self._check(checker, ahead, task.to_seq)
            await asyncio.sleep(0)
            if self._ahead is not None:
                break
        return await finished(checker, self._reader), breaks

    async def compare_jobs(self, on_break: OnBreak | None) -> Found:
        """Compare all jobs."""
        reader = self._reader
        return await compare_jobs(reader.entries_by_job(), reader.jobs(), on_break, await reader.exclusions())

    async def judge_commitments(self, on_break: OnBreak | None, floor: Floor | None) -> Found:
        """Judge all verdicts."""
        return await judge_commitments(self._reader, on_break, floor)

    def _check(self, checker: RangeChecker, ahead: Sequence[EntryRow], to_seq: int) -> Sequence[EntryRow] | None:
        """Check the entries up to ``to_seq``; returns the others, None if there are none."""
        if isinstance(ahead, PackedEntries) and (passed := checker.check_packed(ahead, to_seq)) is not None:
            return ahead.behind(passed.at)
        if count := next((at for at, row in enumerate(ahead) if row[0] > to_seq), len(ahead)):
            checker.check(ahead[:count])
        return ahead[count:] or None


async def finished(checker: RangeChecker, reader: ChainReader) -> RangeSummary:
    """Compare the stored tiles of a range whose entries were all checked; returns the range's summary."""
    for tiles in checker.tiles():
        if (stored := await reader.tiles(*tiles)) is None:
            break
        checker.compare_tiles(tiles, stored)
    return checker.finish()


RANGE_ENTRIES: Final = 8192
"""Entries of a range, of which about 200 bytes each are held: 32 tiles of the stored tree, which are read at once."""


async def verify(
    reader: ChainReader,
    *,
    tenant_id: str,
    from_seq: int | None = None,
    to_seq: int | None = None,
    expected_prev: str | None = None,
    expected_snapshot: str | None = None,
    expected_frontier: Sequence[bytes] = (),
    open_snapshot: OpenSnapshot | None = None,
    checkpoints: Sequence[TreeHead] = (),
    anchors: Sequence[Anchor] = (),
    projection: bool = True,
    on_break: Callable[[Break], object] | None = None,
    elsewhere: Checks | None = None,
    judge_statement: Judge | None = None,
    is_all_read: bool = False,
    callers: CallerJudge = NOBODY_KNOWN,
    is_leaving: bool = False,
    job_index: IndexBuilder | None = None,
    take_index: Callable[[IndexBuilder], object] | None = None,
    archived_index: IndexSource | None = None,
) -> Verdict:
    """Verify entries ``from_seq..to_seq`` of a tenant and all that depends on them.

    Args:
        reader: the ledger, in one consistent state.
        tenant_id: the tenant, which every link covers.
        from_seq: first entry, from 1, by default the first of the chain.
        to_seq: last entry, by default the last of the chain; a higher seq means the last.
        expected_prev: chain link of entry ``from_seq - 1`` at its last verification.
        expected_snapshot: payload digest, at that time, of the snapshot that ends there.
        expected_frontier: right edge of the tree over the entries before ``from_seq``, empty if unknown.
        open_snapshot: opens envelopes and judges signatures; without it both are skipped.
        checkpoints: tree heads kept outside this ledger, which its chain must extend.
        anchors: tree heads from external witnesses, kept in the ledger; the chain must extend these too.
        projection: whether to fold all entries again and compare stored job states. Verdicts on proposals are judged
            again in any case.
        on_break: is called with every break as it is found.
        elsewhere: checks ranges and jobs of a whole chain in other processes, if given.
        judge_statement: judges statements about retention; without it a floor is taken unjudged.
        is_all_read: whether every entry from ``from_seq`` on is verified, so that only a floor directly before it
            counts; else entries below a floor are passed over.
        callers: judges what callers signed. ``elsewhere`` has its own.
        is_leaving: whether a prune is to take these entries, from the first one on: what left before is taken as its
            PRUNED entry says, and the projection is judged. The reader then shows of it what depends on these entries.
        job_index: the index of jobs of at least the entries before ``from_seq``.
        take_index: is called with the index of all entries up to the last one.
        archived_index: has the entries that left, for their index of jobs, where the reader does not have it.

    Raises:
        ArchivedError: all of the range has left.
    """
    findings = Findings(on_break)
    # 1. The ends of the chain. Of the entries that left with a prune nothing is read.
    about_retention = () if tenant_id == SYSTEM_TENANT else await reader.retention_entries()
    floor = floor_of(about_retention, judge_statement, findings)
    if is_all_read and floor is not None and floor.to_seq + 1 != (from_seq or 1):
        floor = None
    if floor is not None and to_seq is not None and to_seq <= floor.to_seq:
        raise archived(f"tenant {tenant_id} up to seq {to_seq}", floor)
    last = await reader.last_entry() or Head(0, None, None)
    start = 1 if floor is None else floor.to_seq + 1
    first = max(from_seq or 1, start)
    is_to_end = to_seq is None or to_seq >= last.seq
    is_whole = first == start and is_to_end
    ends = ChainBounds(
        tenant_id,
        await reader.head(),
        await reader.tree(),
        checkpoints,
        anchors,
        first,
        last=last,
        is_to_end=is_to_end,
        expected_prev=expected_prev,
        expected_snapshot=expected_snapshot,
        expected_frontier=expected_frontier,
        floor=floor,
        job_index=job_index,
    )
    if floor is not None and first == start:
        # A restore brings back what left, and the tree is made again from that.
        is_unbuilt = ends.tree_size < floor.to_seq and await _entry_at(reader, 1) is not None
        ends = await from_floor(ends, None if is_unbuilt else reader.tiles, floor, findings, with_left=not is_leaving)
        behind = index_at_floor(floor, await reader.index_at(floor.to_seq))
        if behind.left() is None and archived_index is not None:
            behind = await index_of_left([archived_index], floor)
        ends = ends._replace(job_index=behind)
    # 2. Entries, and with them snapshots, tree and checkpoints; the head.
    to_read = None if is_to_end else to_seq
    checks: Checks = InOrder(reader, None if first == 1 else first, to_read, callers)
    has_projection = is_whole or is_leaving
    if elsewhere is not None and has_projection:
        checks = elsewhere
    chain = await _fold_chain(reader, ends, checks, to_read, open_snapshot, findings)
    if take_index is not None:
        take_index(chain.job_index)
    # 3. The projection.
    if has_projection and (projection or chain.commitments):
        await _judge_projection(chain, checks, on_break, with_jobs=projection)
    return chain.verdict()


async def _fold_chain(
    reader: ChainReader,
    ends: ChainBounds,
    checks: Checks,
    to_seq: int | None,
    open_snapshot: OpenSnapshot | None,
    findings: Findings,
) -> Fold:
    """Check and fold the entries up to ``to_seq``, by default all, with their snapshots."""
    chain, first, last = Fold(ends, findings), ends.first_seq, ends.last
    assert last is not None
    if not ends.is_from_start:
        chain.begin_behind(await _entry_at(reader, first - 1))
    snapshots = Snapshots(reader.snapshots(first, to_seq), open_snapshot, findings)
    end_seq = await _fold_ranges(chain, reader, snapshots, checks, last.seq if to_seq is None else to_seq)
    async for opened in snapshots.behind(end_seq):
        chain.add_unreached(opened)
    chain.close()
    return chain


async def _judge_projection(chain: Fold, checks: Checks, on_break: OnBreak | None, *, with_jobs: bool) -> None:
    """Judge verdicts on proposals and compare the job table. The chain is judged first, since differences are breaks
    only if it is whole."""
    if chain.findings.has(*CHAIN_ASPECTS):
        on_break = None
    found = [await checks.judge_commitments(on_break, chain.ends.floor)]
    if with_jobs:
        found.append(await checks.compare_jobs(on_break))
    conclude(found, chain.findings)


async def _entry_at(reader: ChainReader, seq: int) -> EntryRow | None:
    found: EntryRow | None = None
    async for rows in reader.entries(seq, seq):
        found = rows[0] if found is None else found
    return found


async def _fold_ranges(chain: Fold, reader: ChainReader, snapshots: Snapshots, checks: Checks, last_seq: int) -> int:
    """Check all entries up to ``last_seq``, in at least one range, and fold the results. Returns the end of the last
    range."""
    under_way: deque[asyncio.Future[CheckedRange]] = deque()
    number, end_seq, next_seq, is_next_near = 0, 0, chain.ends.first_seq, True
    try:
        while under_way or number == 0 or next_seq <= last_seq:
            # 1. Start as many ranges as are useful.
            while len(under_way) < checks.ranges_at_once and is_next_near and (number == 0 or next_seq <= last_seq):
                to_seq = min(-(-next_seq // RANGE_ENTRIES) * RANGE_ENTRIES, SEQ_MAX)
                needed = await snapshots.up_to(to_seq)
                begin = chain.ends.first_seq if chain.ends.first_seq > 1 else None
                task = chain.ends.task(number, end_seq + 1 if number else begin, to_seq)
                under_way.append(asyncio.ensure_future(checks.check(task, needed)))
                number, end_seq, next_seq = number + 1, to_seq, to_seq + 1
            # 2. Fold the first one.
            summary, breaks = await under_way.popleft()
            if chain.findings.on_break is not None:
                for each in breaks:
                    chain.findings.on_break(each)
            chain.add(summary)
            await asyncio.sleep(0)
            # 3. Skip a gap, once no other range is running.
            is_next_near = is_next_near and summary.last_row is not None
            if not is_next_near and not under_way and next_seq <= last_seq:
                next_seq, is_next_near = await _next_seq(reader, next_seq, last_seq), True
    finally:
        for checked in under_way:
            checked.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    return end_seq


async def _next_seq(reader: ChainReader, from_seq: int, last_seq: int) -> int:
    """Seq of the first entry from ``from_seq`` on, one above ``last_seq`` when there is none."""
    async for rows in reader.entries(from_seq, None):
        return int(rows[0][0])
    return last_seq + 1


class Snapshots:
    """Opens the snapshots of a chain as its ranges need them."""

    def __init__(
        self, rows: AsyncIterator[Sequence[SnapshotRow]], open_snapshot: OpenSnapshot | None, findings: Findings
    ) -> None:
        self._rows = rows
        self._open_snapshot = open_snapshot
        self._findings = findings
        self._opened: list[OpenedRow] = []
        """Snapshots that a later range may need."""

    async def up_to(self, to_seq: int) -> list[OpenedRow]:
        """The snapshots that the next range, which ends at ``to_seq``, overlaps or may overlap."""
        while not self._opened or self._opened[-1].stored_from <= to_seq:
            if not await self._read():
                break
        needed = self._opened
        self._opened = [each for each in needed if max(each.stored_from, each.stored_to, each.to_seq) > to_seq]
        return needed

    async def behind(self, end_seq: int) -> AsyncIterator[list[OpenedRow]]:
        """The snapshots that begin after the last range, which ends at ``end_seq``."""
        is_any_left = True
        while is_any_left:
            yield [each for each in self._opened if each.stored_from > end_seq]
            self._opened = []
            is_any_left = await self._read()

    async def _read(self) -> bool:
        """Open the next batch; False if there are no more."""
        rows = await anext(self._rows, None)
        for row in rows or ():
            if has_place(row, self._findings):
                self._opened.append(open_row(row, self._open_snapshot, self._findings))
                await asyncio.sleep(0)
        return rows is not None

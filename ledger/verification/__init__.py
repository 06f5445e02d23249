"""Verification of one tenant's ledger: one pure algorithm over a reader, wherever the rows come from.

A chain is checked in ranges (:mod:`ledger.verification.range_check`), whose summaries are folded into the verdict
(:mod:`ledger.verification.range_fold`). Here the ranges come one behind the other from one reader; on Spark each is
checked by itself.

The reader MUST show one consistent state of the ledger throughout. Rows stream by in batches; what is kept
does not grow with their number. Between batches the event loop gets its turn.

What is checked depends on the range that is asked for. Entries, and the snapshots that lie wholly inside it, always;
the head when the range reaches the end; the stored tree, roots of the whole tree and checkpoints when it begins at
seq 1; the projection when it is the whole chain. The rest is ``not_checked``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Protocol

from ledger.verification.entry_check import ENTRY_COLUMNS, EntryChecker, EntryColumns, EntryRow
from ledger.verification.projection_check import FOLD_COLUMNS, JOB_COLUMNS, Rows, check_projection
from ledger.verification.range_check import RangeChecker
from ledger.verification.range_fold import Ends, Fold
from ledger.verification.range_summary import RangeSummary, RangeTask
from ledger.verification.snapshot_check import (
    SNAPSHOT_COLUMNS,
    OpenedRow,
    OpenedSnapshot,
    OpenSnapshot,
    SnapshotRow,
    has_place,
    open_row,
)
from ledger.verification.tree_check import Anchor, StoredTree, TreeHead
from ledger.verification.verdict import ASPECTS, KINDS, Break, Findings, Head, Verdict

__all__ = [
    "ASPECTS",
    "ENTRY_COLUMNS",
    "FOLD_COLUMNS",
    "JOB_COLUMNS",
    "KINDS",
    "SNAPSHOT_COLUMNS",
    "Anchor",
    "Break",
    "ChainReader",
    "Head",
    "OpenSnapshot",
    "OpenedSnapshot",
    "StoredTree",
    "TreeHead",
    "Verdict",
    "verify",
]

RANGE_ENTRIES: Final = 8192
"""Entries of a range, of which about 200 bytes each are held: 32 tiles of the stored tree, which are read at once."""


class ChainReader(Protocol):
    """Reads one tenant's ledger, in one consistent state. Text is well-formed Unicode; batches are not empty."""

    async def head(self) -> Head | None:
        """The row of ``chain_heads``, None when there is none."""

    async def last_entry(self) -> Head | None:
        """The entry of highest seq, None when there is none."""

    def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[EntryRow]]:
        """Batches of ``ENTRY_COLUMNS`` by seq, in order of storage where seqs repeat; None is no bound."""

    def snapshots(self, from_seq: int, to_seq: int | None) -> AsyncIterator[Sequence[SnapshotRow]]:
        """Batches of ``SNAPSHOT_COLUMNS`` by ``from_seq``, of snapshots wholly in the range."""

    async def tree(self) -> StoredTree | None:
        """The stored tree's size and root, None when there is none."""

    async def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes] | None:
        """Stored tiles ``first..last`` of a level, those there are; None when this form of a ledger stores none."""

    def jobs(self) -> Rows:
        """Batches of ``JOB_COLUMNS`` by job id."""

    def entries_by_job(self) -> Rows:
        """Batches of ``FOLD_COLUMNS`` by job id and seq."""


async def verify(
    reader: ChainReader,
    *,
    tenant_id: str,
    from_seq: int | None = None,
    to_seq: int | None = None,
    expected_prev: str | None = None,
    expected_snapshot: str | None = None,
    open_snapshot: OpenSnapshot | None = None,
    checkpoints: Sequence[TreeHead] = (),
    anchors: Sequence[Anchor] = (),
    projection: bool = True,
    on_break: Callable[[Break], object] | None = None,
) -> Verdict:
    """Verify entries ``from_seq..to_seq`` of a tenant and all that hangs on them.

    Args:
        reader: the ledger, in one consistent state.
        tenant_id: whose; it is bound by every link.
        from_seq: first entry, from 1, by default the first there is.
        to_seq: last entry, by default the last there is; a higher one is taken for that.
        expected_prev: chain link that entry ``from_seq - 1`` had when it was last verified.
        expected_snapshot: payload digest that the snapshot which ends there had then.
        open_snapshot: opens envelopes and judges signatures; without it neither is looked at.
        checkpoints: tree heads kept outside this ledger, which its chain must extend.
        anchors: what outsiders said of tree heads, kept inside; the chain must extend those too.
        projection: whether to fold all entries once more and compare job states.
        on_break: is called with every break as it is found.
    """
    findings = Findings(on_break)
    # 1. What there is.
    last = await reader.last_entry() or Head(0, None, None)
    first = max(from_seq or 1, 1)
    is_to_end = to_seq is None or to_seq >= last.seq
    ends = Ends(
        tenant_id,
        await reader.head(),
        await reader.tree(),
        checkpoints,
        anchors,
        first,
        are_signatures_judged=open_snapshot is not None,
        last=last,
        is_to_end=is_to_end,
        expected_prev=expected_prev,
        expected_snapshot=expected_snapshot,
    )
    # 2. Entries, and with them snapshots, tree and checkpoints; the head.
    chain = Fold(ends, findings)
    entries = await _entry_checker(reader, findings, tenant_id, first, last.seq, expected_prev)
    to_read = None if is_to_end else to_seq
    snapshots = _Snapshots(reader.snapshots(first, to_read), open_snapshot, findings)
    async for summary in _ranges(ends, entries, reader, snapshots, to_read, findings):
        chain.add(summary)
        await asyncio.sleep(0)
    async for opened in snapshots.rest():
        chain.add_unreached(opened)
    chain.close()
    # 3. The projection.
    if projection and first == 1 and is_to_end:
        await check_projection(reader.entries_by_job(), reader.jobs(), findings)
    return chain.verdict()


async def _ranges(
    ends: Ends,
    entries: EntryChecker,
    reader: ChainReader,
    snapshots: _Snapshots,
    to_seq: int | None,
    findings: Findings,
) -> AsyncIterator[RangeSummary]:
    """Check one range behind the other while the entries up to ``to_seq`` stream by; ``entries`` passed those before.

    What is wrong is in ``findings`` when a summary is given. There is one at least.
    """
    first = ends.first_seq
    task = ends.task(0, None, _end_of_range(first))
    checker = await _begin(task, snapshots, findings, entries)
    async for rows in reader.entries(None if first == 1 else first, to_seq):
        columns: EntryColumns = [*zip(*rows, strict=True)]
        while (count := _count_to(columns[0], checker.end_seq)) < len(columns[0]):
            if count:
                checker.check_columns([column[:count] for column in columns])
                columns = [column[count:] for column in columns]
            yield await _finish(checker, reader, snapshots)
            task = ends.task(task.number + 1, checker.end_seq + 1, _end_of_range(columns[0][0]))
            checker = await _begin(task, snapshots, findings, entries)
        checker.check_columns(columns)
        await asyncio.sleep(0)
    yield await _finish(checker, reader, snapshots)


async def _begin(task: RangeTask, snapshots: _Snapshots, findings: Findings, entries: EntryChecker) -> RangeChecker:
    assert task.to_seq is not None
    return RangeChecker(task, await snapshots.up_to(task.to_seq), findings, entries)


async def _finish(checker: RangeChecker, reader: ChainReader, snapshots: _Snapshots) -> RangeSummary:
    for tiles in checker.tiles():
        stored = await reader.tiles(*tiles)
        if stored is None:
            break
        checker.compare_tiles(tiles, stored)
    return checker.finish()._replace(snapshots=snapshots.take())


def _end_of_range(seq: int) -> int:
    """The last seq of the range that ``seq`` lies in."""
    return -(-seq // RANGE_ENTRIES) * RANGE_ENTRIES


def _count_to(seqs: Sequence[int], last_seq: int) -> int:
    """How many of ``seqs`` come before the first that is above ``last_seq``."""
    if max(seqs) <= last_seq:
        return len(seqs)
    return next(index for index, seq in enumerate(seqs) if seq > last_seq)


class _Snapshots:
    """Opens the snapshots of a chain as its ranges come to need them."""

    def __init__(
        self, rows: AsyncIterator[Sequence[SnapshotRow]], open_snapshot: OpenSnapshot | None, findings: Findings
    ) -> None:
        self._rows = rows
        self._open_snapshot = open_snapshot
        self._findings = findings
        self._is_all_read = False
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


async def _entry_checker(
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

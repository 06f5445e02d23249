"""Verification of one tenant's ledger: one pure algorithm over a reader, wherever the rows come from.

The reader MUST show one consistent state of the ledger throughout. Rows stream by in batches; what is kept
does not grow with their number. Between batches the event loop gets its turn.

What is checked depends on the range. Entries, and the snapshots that lie wholly inside it, always; the head
when the range reaches the end; the stored tree, roots of the whole tree and checkpoints when it begins at seq 1;
the projection when it is the whole chain. The rest is ``not_checked``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

from ledger.merkle import Frontier
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryChecker, EntryRow, EntryRun
from ledger.verification.head_check import check_head, readable_ends
from ledger.verification.projection_check import FOLD_COLUMNS, JOB_COLUMNS, Rows, check_projection
from ledger.verification.snapshot_check import (
    SNAPSHOT_COLUMNS,
    OpenedSnapshot,
    OpenSnapshot,
    RangeTree,
    SnapshotChecker,
    SnapshotRow,
    open_row,
)
from ledger.verification.tile_check import TILES_AT_ONCE, TileWalk
from ledger.verification.tree_check import Anchor, StoredTree, TreeChecker, TreeHead
from ledger.verification.verdict import ASPECTS, KINDS, Break, Findings, Head, Verdict, begin_aspects
from ledger.verification.walk import Walk

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
    head, tree = readable_ends(await reader.head(), await reader.tree(), last, findings)
    first = max(from_seq or 1, 1)
    is_from_start = first == 1
    is_to_end = to_seq is None or to_seq >= last.seq
    # 2. Entries, and with them snapshots, tree and checkpoints.
    begin_aspects(findings, are_signatures_judged=open_snapshot is not None, is_from_start=is_from_start)
    tree_checker = TreeChecker(findings, tree, checkpoints, anchors, is_from_start=is_from_start)
    walk = _Verification(
        await _entry_checker(reader, findings, tenant_id, first, last.seq, expected_prev),
        SnapshotChecker(
            tenant_id,
            findings,
            partial(open_row, open_snapshot=open_snapshot, findings=findings),
            is_from_start=is_from_start,
            follows=None if expected_snapshot is None else (first - 1, expected_snapshot),
        ),
        tree_checker,
        TileWalk(tree.size if tree is not None else 0, reader.tiles, tree_checker.report_tile),
        reader.snapshots(first, None if is_to_end else to_seq),
    )
    async for rows in reader.entries(None if is_from_start else first, None if is_to_end else to_seq):
        await walk.take(rows)
        await asyncio.sleep(0)
    await walk.finish(last.seq)
    # 3. The head.
    if is_to_end:
        findings.begin("head")
        reach = max(walk.snapshots.highest_seq, tree.size if tree is not None else 0)
        reach = max(reach, first - 1 if expected_prev is not None else 0)
        check_head(findings, head, last, reach)
    # 4. The projection.
    if projection and is_from_start and is_to_end:
        await check_projection(reader.entries_by_job(), reader.jobs(), findings)
    return Verdict(
        tenant_id=tenant_id,
        entries_checked=walk.entries.entries_checked,
        from_seq=first,
        to_seq=walk.entries.last_seq,
        head=last,
        verdicts=findings.verdicts(),
        first_break=findings.first_break(),
        breaks=findings.counts(),
        compared_with=", ".join(walk.tree.compared_sources()) or None,
        signed_to=walk.snapshots.signed_to or Head(first - 1, expected_prev, None),
        anchors=walk.tree.anchored(),
        signed_digest=walk.snapshots.signed_digest,
    )


class _Verification:
    """Takes the entries through all that follows them."""

    def __init__(
        self,
        entries: EntryChecker,
        snapshots: SnapshotChecker,
        tree: TreeChecker,
        tiles: TileWalk,
        snapshot_rows: AsyncIterator[Sequence[SnapshotRow]],
    ) -> None:
        self.entries = entries
        self.snapshots = snapshots
        self.tree = tree
        self._tiles = tiles
        self._snapshot_rows = snapshot_rows
        self._are_snapshots_read = False
        self._leaves = _GrownLeaves(tiles)
        self._walk = Walk(snapshots, tree, self._leaves, entries.next_seq)

    async def take(self, rows: Sequence[EntryRow]) -> None:
        """The next batch."""
        runs = self.entries.check(rows)
        await self._read_snapshots(self.entries.last_seq)
        for run in runs:
            self._leaves.run = run
            for _ in self._walk.take(run.first_seq, run.first_seq + len(run.links) - 1):
                await asyncio.sleep(0)
        await self._tiles.compare(at_least=TILES_AT_ONCE)

    async def finish(self, last_seq: int) -> None:
        """No entry follows in the range; ``last_seq`` is that of the last there is."""
        while not self._are_snapshots_read:
            await self._read_snapshots(self.snapshots.last_waiting_from() + 1)
            self.snapshots.finish()
        self.snapshots.finish()
        await self._tiles.compare()
        self.tree.finish(last_seq=last_seq)

    async def _read_snapshots(self, to_seq: int) -> None:
        """Have at hand every snapshot that begins at or below ``to_seq``."""
        while not self._are_snapshots_read and self.snapshots.last_waiting_from() <= to_seq:
            rows = await anext(self._snapshot_rows, None)
            if rows is None:
                self._are_snapshots_read = True
            else:
                self.snapshots.add(rows)


class _GrownLeaves:
    """Hashes the entries as they stream by, into one tree and the tree of the range that a snapshot covers."""

    run: EntryRun
    """The entries that the walk is passing."""

    def __init__(self, tiles: TileWalk) -> None:
        self._tiles = tiles

    def begin_tree(self, seq: int) -> None:
        self._frontier, self._tree_from_seq = Frontier(), seq
        self._range, self._range_from = RangeTree(0), (0, b"")

    def begin_range(self, seq: int) -> None:
        self._range, self._range_from = RangeTree(self._frontier.size), (seq, self.link(seq))

    def pass_to(self, seq: int) -> None:
        frontier, size_before = self._frontier, self._frontier.size
        begin = self._tree_from_seq + size_before - self.run.first_seq
        links = self.run.links[begin : seq - self.run.first_seq + 1]
        grown = frontier.grow([sha256(b"\x00" + link).digest() for link in links])
        self._range.grow(grown)
        if self._tree_from_seq == 1:
            self._tiles.grow(grown, size_before)

    def link(self, seq: int) -> bytes:
        from_seq, from_link = self._range_from
        return from_link if seq == from_seq else self.run.links[seq - self.run.first_seq]

    def hlc(self, seq: int) -> Any:
        return self.run.hlcs[seq - self.run.first_seq]

    def range_root(self, from_seq: int, to_seq: int) -> bytes:
        root = self._range.root(self._frontier)
        self._range = RangeTree(0)
        return root

    def tree_root(self, size: int) -> bytes:
        return self._frontier.root()


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

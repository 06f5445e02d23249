"""Verification in ranges over a ledger in memory, each by itself and in any order, folded as the pipeline does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from ledger.machines import jobs
from ledger.machines.job_fold import JobState
from ledger.machines.jobs import JobParts
from ledger.machines.retention import Floor
from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS
from ledger.verification.commitment_check import judge_commitments
from ledger.verification.driver import CheckedRange, finished
from ledger.verification.projection_check import (
    JOB_COLUMNS,
    OnBreak,
    StoredJob,
    compare,
    compare_jobs,
    has_id,
)
from ledger.verification.range_check import RangeChecker, RangeSummary, RangeTask, opened_for
from ledger.verification.range_fold import ChainBounds, fold, tasks
from ledger.verification.snapshot_check import OpenedRow, OpenSnapshot
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import Anchor, Break, Findings, Found, Verdict
from tests.ledger.ledger_in_memory import OPEN, Ledger, MemoryReader, Row, in_stored_order


class Ranges:
    """Checks the ranges of one ledger."""

    def __init__(self, ledger: Ledger, ends: ChainBounds, open_snapshot: OpenSnapshot | None, random: Random) -> None:
        self._ledger = ledger
        self._ends = ends
        self._open_snapshot = open_snapshot
        self._random = random
        self._entries = sorted(ledger.entries, key=lambda row: row["seq"])
        self.breaks: dict[int, list[Break]] = {}
        self.job_parts: dict[str, list[tuple[int, bytes]]] = defaultdict(list)

    def verdict(self, borders: Sequence[int], *, projection: bool) -> Verdict:
        """The verdict, and ``breaks`` in full."""
        planned = tasks(self._ends, borders)
        summaries: dict[int, RangeSummary] = {}
        for task in self._random.sample(planned, len(planned)):
            summary = self._check(task, with_jobs=projection)
            summaries[task.number] = msgspec.msgpack.decode(msgspec.msgpack.encode(summary), type=RangeSummary)
        listed: list[Break] = []
        candidates: list[Break] = []
        jobs = [self._compare_jobs(candidates.append)] if projection else None
        verdict = fold(self._ends, [summaries[task.number] for task in planned], jobs, listed.append)
        self._compare_listed(verdict, listed, candidates)
        return verdict

    def _compare_listed(self, verdict: Verdict, listed: list[Break], candidates: list[Break]) -> None:
        """All breaks that were listed are those that the verdict counts."""
        everything = [*listed, *(each for breaks in self.breaks.values() for each in breaks)]
        counts = Counter(each.kind for each in everything)
        if "projection" in verdict.breaks:
            counts["projection"] += len(candidates)
        assert +counts == Counter(verdict.breaks)

    def _check(self, task: RangeTask, *, with_jobs: bool) -> RangeSummary:
        breaks = self.breaks[task.number] = []
        ledger, random = self._ledger, self._random
        snapshots = [row for row in in_stored_order(ledger.snapshots) if self._is_read(task, row)]
        findings = Findings(breaks.append)
        stored = [[row[name] for name in SNAPSHOT_COLUMNS] for row in snapshots]
        checker = RangeChecker(task, opened_for(task, stored, self._open_snapshot, findings), findings)
        rows = [row for row in self._entries if task.holds(row["seq"])]
        parts = JobParts()
        while rows:
            count = random.randint(1, len(rows))
            columns = [[row[name] for row in rows[:count]] for name in ENTRY_COLUMNS]
            rows = rows[count:]
            checker.check([*zip(*columns, strict=True)])
            if with_jobs:
                parts.add(columns)
                if random.random() < 0.5:
                    self._ship(task, parts.take())
        if with_jobs:
            self._ship(task, parts.take())
        for tiles in checker.tiles():
            checker.compare_tiles(tiles, self._tiles(*tiles))
        return checker.finish()

    def _is_read(self, task: RangeTask, row: Row) -> bool:
        from_seq, to_seq = row["from_seq"], row["to_seq"]
        if from_seq is None or to_seq is None:
            return task.number == 0
        return task.overlaps(min(from_seq, to_seq), max(from_seq, to_seq))

    def _ship(self, task: RangeTask, states: Sequence[JobState]) -> None:
        for state in states:
            self.job_parts[state.job_id].append((task.number, jobs.encode_state(state)))

    def _tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes]:
        return {
            index: hashes
            for (its_level, index), hashes in self._ledger.tiles.items()
            if its_level == level and first <= index <= last
        }

    def _compare_jobs(self, on_candidate: Any) -> Found:
        findings = Findings(on_candidate)
        stored: dict[str, list[StoredJob]] = defaultdict(list)
        for row in self._ledger.jobs:
            job = StoredJob(*(row[name] for name in JOB_COLUMNS))
            if has_id(job, findings):
                stored[job.job_id].append(job)
        for job_id in {*self.job_parts, *stored}:
            # A stable sort keeps the parts of one range in their order.
            ordered = sorted(self.job_parts.get(job_id, ()), key=lambda part: part[0])
            first, *others = stored[job_id] or [None]
            compare(jobs.merge_states([jobs.decode_state(data) for _, data in ordered]), first, findings)
            for job in others:
                compare(None, job, findings)
        return findings.found


def verdict_in_ranges(
    ledger: Ledger,
    borders: Sequence[int] = (),
    *,
    open_snapshot: OpenSnapshot | None = OPEN,
    checkpoints: Sequence[TreeHead] = (),
    anchors: Sequence[Anchor] = (),
    first_seq: int = 1,
    projection: bool = True,
    seed: int = 0,
) -> Verdict:
    """The verdict on a ledger whose ranges begin at seq 1 and at each of ``borders``."""
    ends = ChainBounds(ledger.tenant_id, ledger.head, ledger.tree, checkpoints, anchors, first_seq)
    ranges = Ranges(ledger, ends, open_snapshot, Random(seed))
    return ranges.verdict(borders, projection=projection and first_seq == 1)


class Beside:
    """Checks ranges by themselves and jobs in two parts, as ``ledger.verification.Checks``."""

    def __init__(self, ledger: Ledger, ranges_at_once: int) -> None:
        self.ranges_at_once = ranges_at_once
        self._ledger = ledger

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check one range by itself."""
        breaks: list[Break] = []
        checker = RangeChecker(task, snapshots, Findings(breaks.append))
        reader = MemoryReader(self._ledger)
        async for rows in reader.entries(task.from_seq, task.to_seq):
            checker.check(rows)
        return await finished(checker, reader), breaks

    async def compare_jobs(self, on_break: OnBreak | None) -> Found:
        """Compare the jobs, those with an odd last character first."""
        compared = Findings()
        for is_odd in (True, False):
            part = Ledger(
                self._ledger.tenant_id,
                [row for row in self._ledger.entries if _is_odd(row["job_id"]) == is_odd],
                jobs=[row for row in self._ledger.jobs if _is_odd(row["job_id"]) == is_odd],
            )
            reader = MemoryReader(part)
            compared.merge(await compare_jobs(reader.entries_by_job(), reader.jobs(), on_break))
        return compared.found

    async def judge_commitments(self, on_break: OnBreak | None, floor: Floor | None) -> Found:
        """Judge the verdicts."""
        return await judge_commitments(MemoryReader(self._ledger), on_break, floor)


def _is_odd(job_id: Any) -> bool:
    return isinstance(job_id, str) and bool(job_id) and ord(job_id[-1]) % 2 == 1

"""A process that checks parts of one tenant's ledger for a verification that runs in another.

``python -m app.read.checking_process`` reads requests from its standard input, one after the other, answers each on its
standard output, and exits at the end of its input. Requests and answers are frames: length (u32 big-endian), then
MessagePack. The first request is ``Begin``. Until ``End`` the process reads the database snapshot that ``Begin`` names,
over its own connection.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, BinaryIO, Final

import msgspec

from app.store import sessions
from app.store.chain_reader import CopiedEntries, JobRange, PostgresChainReader, consistent_reader
from app.store.sessions import AT_A_NODE
from ledger.decoding import decode_packed
from ledger.machines.retention import Floor
from ledger.verification.caller_check import CallerJudge
from ledger.verification.commitment_check import judge_commitments
from ledger.verification.driver import CheckedRange, finished
from ledger.verification.projection_check import JobComparison, compare_jobs
from ledger.verification.range_check import RangeChecker, RangeTask
from ledger.verification.snapshot_check import OpenedRow
from ledger.verification.verdict import Break, Findings, Found
from signing.callers import KeyedJudge, SavedCallers

LENGTH_BYTES: Final = 4
NICENESS: Final = 10
"""The processes that serve requests have priority."""
CONNECT_TIMEOUT_S: Final = 10.0
GC_ALLOCATIONS: Final = 100_000
"""Allocations between collections of the young generation."""
STORED_AT_ONCE: Final = 4096
"""Most job rows held while their entries are copied. No request has as many, unless ids were made equal or NULL."""
STORED_CHARACTERS_MAX: Final = 16 << 20
"""Most characters in those rows. A row has a few hundred, unless someone edited it."""
BREAKS_TOLD_MAX: Final = 1000
"""Most breaks reported for one request, lowest seq first; all are counted. Every job may have one."""


class Begin(msgspec.Struct, tag=True):
    """Names the tenant and the database snapshot; the answer is true."""

    database_url: str
    exported: str
    tenant_id: str
    callers: SavedCallers | None
    """Those whose signatures are judged."""
    leaving_to: int | None = None
    """As for ``PostgresChainReader``."""


class CheckRange(msgspec.Struct, tag=True):
    """Check a range by itself; the answer is a ``CheckedRange``."""

    task: RangeTask
    snapshots: list[OpenedRow]


class CompareJobs(msgspec.Struct, tag=True):
    """Compare the jobs of these ids; the answer is a ``ComparedJobs``."""

    part: JobRange


ComparedJobs = tuple[Found, list[Break]]
"""The result of comparing some jobs, and its first breaks."""


class JudgeCommitments(msgspec.Struct, tag=True):
    """Judge all verdicts on proposals, and the table of commitments; the answer is a ``ComparedJobs``."""

    floor: Floor | None


class End(msgspec.Struct, tag=True):
    """No more requests about this ledger; has no answer. Another ``Begin`` may follow."""


Request = CheckRange | CompareJobs | JudgeCommitments

_REQUEST_DECODER: Final = msgspec.msgpack.Decoder(Request | End)


def framed(value: object) -> bytes:
    """``value`` as one frame."""
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def _work(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests. Reading may block: the process has no other work."""
    while data := _read(requests):
        begin = decode_packed(data, Begin)
        judge = KeyedJudge.of_saved(begin.callers)
        connection = await sessions.connect(begin.database_url, AT_A_NODE, timeout_s=CONNECT_TIMEOUT_S)
        async with consistent_reader(connection, begin.tenant_id, begin.exported, begin.leaving_to) as reader:
            _write(answers, True)
            while data := _read(requests):
                request = _REQUEST_DECODER.decode(data)
                if isinstance(request, End):
                    break
                _write(answers, await _answer(reader, request, judge))
        connection.terminate()


async def _answer(reader: PostgresChainReader, request: Request, callers: CallerJudge) -> object:
    if isinstance(request, CheckRange):
        return await _checked(reader, request, callers)
    if isinstance(request, CompareJobs):
        return await _compared(reader, request)
    breaks = _FirstBreaks()
    return await judge_commitments(reader, breaks.add, request.floor), breaks.found()


async def _checked(reader: PostgresChainReader, request: CheckRange, callers: CallerJudge) -> CheckedRange:
    task, is_in_order = request.task, True
    breaks: list[Break] = []
    checker = RangeChecker(task, request.snapshots, Findings(), callers)

    def take(entries: CopiedEntries) -> None:
        nonlocal is_in_order
        is_in_order = is_in_order and checker.check_packed(entries) is not None

    if not (await reader.copied(task.from_seq, task.to_seq, take) and is_in_order):
        # The entries are broken or unusual: check them one by one.
        checker = RangeChecker(task, request.snapshots, Findings(breaks.append), callers)
        async for rows in reader.entries(task.from_seq, task.to_seq):
            checker.check(rows)
    return await finished(checker, reader), breaks


class _FirstBreaks:
    """The first ``BREAKS_TOLD_MAX`` breaks by seq."""

    def __init__(self) -> None:
        self._held: list[Break] = []

    def add(self, each: Break) -> None:
        self._held.append(each)
        if len(self._held) > 2 * BREAKS_TOLD_MAX:
            self._held = self.found()

    def found(self) -> list[Break]:
        return sorted(self._held, key=lambda each: each.seq)[:BREAKS_TOLD_MAX]


async def _compared(reader: PostgresChainReader, request: CompareJobs) -> ComparedJobs:
    if (compared := await _compared_copied(reader, request)) is not None:
        return compared
    breaks = _FirstBreaks()
    entries, stored = reader.entries_by_job(request.part), reader.jobs(request.part)
    return await compare_jobs(entries, stored, breaks.add, await reader.exclusions()), breaks.found()


async def _compared_copied(reader: PostgresChainReader, request: CompareJobs) -> ComparedJobs | None:
    """Compare the jobs while their entries are copied. None if the entries cannot be copied, or if there are more job
    rows than may be held: no rows can be read during the copy."""
    stored: list[Sequence[Any]] = []
    characters = 0
    async with aclosing(reader.jobs(request.part)) as batches:
        async for rows in batches:
            stored.extend(rows)
            characters += sum(len(value) for row in rows for value in row if isinstance(value, str))
            if len(stored) > STORED_AT_ONCE or characters > STORED_CHARACTERS_MAX:
                return None

    async def at_once() -> AsyncIterator[list[Sequence[Any]]]:
        if stored:
            yield stored

    breaks = _FirstBreaks()
    comparison = JobComparison(at_once(), breaks.add, await reader.exclusions())
    if not await reader.copied_by_job(request.part, comparison.add):
        return None
    return await comparison.outcome(), breaks.found()


def _write(answers: BinaryIO, answer: object) -> None:
    answers.write(framed(answer))
    answers.flush()


def _read(requests: BinaryIO) -> bytes:
    """The next frame, empty at the end of the input."""
    return requests.read(int.from_bytes(requests.read(LENGTH_BYTES), "big"))


if __name__ == "__main__":
    os.nice(NICENESS)
    # There are many rows and job states, and none is in a reference cycle.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)
    asyncio.run(_work(sys.stdin.buffer, sys.stdout.buffer))

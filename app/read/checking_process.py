"""A process that checks parts of one tenant's ledger for a verification that runs in another.

``python -m app.read.checking_process`` reads requests from its standard input, one after the other, answers each on its
standard output, and ends with its input. Both ways go frames: length (u32 big-endian), then MessagePack. The first
request is ``Begin``; from there to ``End`` the database is seen in the state that it names, over a connection of this
process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from app.store import sessions
from app.store.chain_reader import CopiedEntries, JobRange, PostgresChainReader, consistent_reader
from app.store.sessions import AT_A_NODE
from ledger.verification.commitment_check import judge_commitments
from ledger.verification.driver import CheckedRange, finished
from ledger.verification.projection_check import JobComparison, JobsFound, compare_jobs
from ledger.verification.range_check import RangeChecker, RangeTask
from ledger.verification.snapshot_check import OpenedRow
from ledger.verification.verdict import Break, Findings

LENGTH_BYTES: Final = 4
NICENESS: Final = 10
"""What serves requests goes first."""
CONNECT_TIMEOUT_S: Final = 10.0
GC_ALLOCATIONS: Final = 100_000
"""Allocations between collections of the young generation."""
STORED_AT_ONCE: Final = 4096
"""Jobs that are held while their entries come; no request is for as many, unless ids were made equal or none."""
STORED_CHARACTERS_MAX: Final = 16 << 20
"""Of what they say, which is some hundred of each, unless somebody put much into them."""
BREAKS_TOLD_MAX: Final = 1000
"""Breaks of one request that are reported, the first by seq; all are counted. Every job may have one."""


class Begin(msgspec.Struct, tag=True):
    """Whose ledger, and which state of it; the answer is true."""

    database_url: str
    exported: str
    tenant_id: str


class CheckRange(msgspec.Struct, tag=True):
    """Check a range by itself; the answer is a ``CheckedRange``."""

    task: RangeTask
    snapshots: list[OpenedRow]


class CompareJobs(msgspec.Struct, tag=True):
    """Compare the jobs of these ids; the answer is what was found, and its breaks."""

    part: JobRange


class ComparedJobs(NamedTuple):
    """What comparing some of the jobs came to; ``candidates`` are breaks that count if the chain is whole."""

    jobs: JobsFound
    breaks: list[Break]
    candidates: list[Break]


class JudgeCommitments(msgspec.Struct, tag=True):
    """Judge all verdicts on proposals, and the table of commitments; the answer is as of ``CompareJobs``."""


class End(msgspec.Struct, tag=True):
    """There is nothing more to ask of this ledger; not answered. Another ``Begin`` may follow."""


Request = CheckRange | CompareJobs | JudgeCommitments

_REQUEST_DECODER: Final = msgspec.msgpack.Decoder(Request | End)


def framed(value: object) -> bytes:
    """``value`` as one frame."""
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def _work(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests. Reading blocks: there is nothing else to do meanwhile."""
    while data := _read(requests):
        begin = msgspec.msgpack.decode(data, type=Begin)
        connection = await sessions.connect(begin.database_url, AT_A_NODE, timeout_s=CONNECT_TIMEOUT_S)
        async with consistent_reader(connection, begin.tenant_id, begin.exported) as reader:
            _write(answers, True)
            while data := _read(requests):
                request = _REQUEST_DECODER.decode(data)
                if isinstance(request, End):
                    break
                _write(answers, await _answer(reader, request))
        connection.terminate()


async def _answer(reader: PostgresChainReader, request: Request) -> object:
    if isinstance(request, CheckRange):
        return await _checked(reader, request)
    if isinstance(request, CompareJobs):
        return await _compared(reader, request)
    return await _judged(reader)


async def _checked(reader: PostgresChainReader, request: CheckRange) -> CheckedRange:
    task, is_in_order = request.task, True
    breaks: list[Break] = []
    checker = RangeChecker(task, request.snapshots, Findings())

    def take(entries: CopiedEntries) -> None:
        nonlocal is_in_order
        is_in_order = is_in_order and checker.check_packed(entries) is not None

    if not (await reader.copied(task.from_seq, task.to_seq, take) and is_in_order):
        # Something is wrong with the entries, or unusual: each is checked by itself.
        checker = RangeChecker(task, request.snapshots, Findings(breaks.append))
        async for rows in reader.entries(task.from_seq, task.to_seq):
            checker.check(rows)
    summary = await finished(checker, reader)
    summary.snapshots.clear()  # The verification has them.
    return CheckedRange(summary, breaks)


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
    compared = await _compared_copied(reader, request)
    if compared is not None:
        return compared
    breaks, candidates = _FirstBreaks(), _FirstBreaks()
    entries, stored = reader.entries_by_job(request.part), reader.jobs(request.part)
    return ComparedJobs(
        await compare_jobs(entries, stored, breaks.add, candidates.add), breaks.found(), candidates.found()
    )


async def _compared_copied(reader: PostgresChainReader, request: CompareJobs) -> ComparedJobs | None:
    """What comparing them comes to where the entries can be copied; None where not, or where more jobs are stored than
    are to be held, as nothing else can be read beside the entries."""
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

    breaks, candidates = _FirstBreaks(), _FirstBreaks()
    comparison = JobComparison(at_once(), breaks.add, candidates.add)
    if not await reader.copied_by_job(request.part, comparison.add):
        return None
    return ComparedJobs(await comparison.outcome(), breaks.found(), candidates.found())


async def _judged(reader: PostgresChainReader) -> ComparedJobs:
    candidates = _FirstBreaks()
    return ComparedJobs(
        await judge_commitments(reader.commitments(), reader.promised(), await reader.followed_seq(), candidates.add),
        [],
        candidates.found(),
    )


def _write(answers: BinaryIO, answer: object) -> None:
    answers.write(framed(answer))
    answers.flush()


def _read(requests: BinaryIO) -> bytes:
    """The next frame, nothing at the end."""
    return requests.read(int.from_bytes(requests.read(LENGTH_BYTES), "big"))


if __name__ == "__main__":
    os.nice(NICENESS)
    # Rows and states of jobs are many, and none is a cycle.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)
    asyncio.run(_work(sys.stdin.buffer, sys.stdout.buffer))

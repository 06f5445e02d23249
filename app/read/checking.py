"""Verifying a long chain in processes beside the service: its event loop keeps its turns, and two cores share the work.

Each process has a connection of its own, in the state of the database that the verification sees, and ends with it.
What is asked of a process is answered in that order.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec
import structlog

from app.read.checking_process import LENGTH_BYTES, Begin, CheckRange, ComparedJobs, CompareJobs, Request, framed
from app.store.chain_reader import PostgresChainReader
from ledger.errors import LedgerError
from ledger.verification.checks import CheckedRange
from ledger.verification.projection_check import JobsFound, OnBreak, merged
from ledger.verification.range_summary import RangeTask
from ledger.verification.snapshot_check import OpenedRow
from ledger.verification.verdict import Break, Verdict

PROCESSES_MAX: Final = 2
REQUESTS_AHEAD: Final = 2
"""Requests that a process has at a time, so that it does not wait for the next."""
JOBS_A_REQUEST: Final = 5000
LONG_ENTRIES: Final = 50_000
"""Entries of a chain for which it is worth starting processes."""

COMMAND: Final = (sys.executable, "-m", "app.read.checking_process")

log = structlog.get_logger()

_Answer = TypeVar("_Answer")
_CHECKED_DECODER: Final = msgspec.msgpack.Decoder(CheckedRange)
_COMPARED_DECODER: Final = msgspec.msgpack.Decoder(ComparedJobs)


class CheckingFailedError(LedgerError):
    """A process ended before it had answered; what it said is on standard error."""


class CheckingProcesses:
    """Checks parts of one ledger, as ``ledger.verification.Checks``."""

    def __init__(self, reader: PostgresChainReader, processes: Sequence[_Asked]) -> None:
        self._reader = reader
        self._processes = processes
        self.ranges_at_once = len(processes) * REQUESTS_AHEAD

    async def started(self) -> None:
        """Return once all of them are at work; nobody needs to wait for that.

        Raises:
            CheckingFailedError: one could not begin.
        """
        await asyncio.gather(*(each.begun for each in self._processes))

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check one range by itself."""
        return await self._ask(CheckRange(task, [*snapshots]), _CHECKED_DECODER)

    async def compare_jobs(self, on_break: OnBreak | None, on_candidate: OnBreak | None) -> JobsFound:
        """Compare all jobs, some at a time."""
        left = deque(await self._reader.job_ranges(JOBS_A_REQUEST))
        under_way: deque[asyncio.Future[ComparedJobs]] = deque()
        compared = merged(())
        try:
            while left or under_way:
                while left and len(under_way) < self.ranges_at_once:
                    under_way.append(asyncio.ensure_future(self._ask(CompareJobs(left.popleft()), _COMPARED_DECODER)))
                answer = await under_way.popleft()
                compared = merged((compared, answer.jobs))
                _tell(on_break, answer.breaks)
                _tell(on_candidate, answer.candidates)
        finally:
            for each in under_way:
                each.cancel()
        return compared

    async def _ask(self, request: Request, decoder: msgspec.msgpack.Decoder[_Answer]) -> _Answer:
        process = min(self._processes, key=lambda each: each.waiting)
        return decoder.decode(await process.ask(framed(request)))


def _tell(on_break: OnBreak | None, breaks: Sequence[Break]) -> None:
    if on_break is not None:
        for each in breaks:
            on_break(each)


class _Asked:
    """A process, and those who wait for its answers."""

    def __init__(self, process: Process, begin: bytes) -> None:
        self._process = process
        self._answers: deque[asyncio.Future[bytes]] = deque()
        self._reading = asyncio.ensure_future(self._read())
        self.begun = asyncio.ensure_future(self.ask(begin))
        """Done once the process is at work."""

    @property
    def waiting(self) -> int:
        """Requests that have no answer yet."""
        return len(self._answers)

    async def ask(self, frame: bytes) -> bytes:
        """The answer to a request.

        Raises:
            CheckingFailedError: the process ended.
        """
        if self._reading.done():
            raise CheckingFailedError("a process that checks parts of a ledger has ended")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        assert self._process.stdin is not None
        # Requests are bounded in number, and small.
        self._process.stdin.write(frame)
        return await answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                length = int.from_bytes(await self._process.stdout.readexactly(LENGTH_BYTES), "big")
                data = await self._process.stdout.readexactly(length)
                answer = self._answers.popleft()
                if not answer.done():
                    answer.set_result(data)
        except (asyncio.IncompleteReadError, OSError):
            for answer in self._answers:
                if not answer.done():
                    answer.set_exception(CheckingFailedError("a process that checks parts of a ledger ended too early"))

    async def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await asyncio.gather(self._reading, self.begun, return_exceptions=True)


@asynccontextmanager
async def checking(database_url: str, reader: PostgresChainReader) -> AsyncIterator[CheckingProcesses]:
    """Processes that see the state which ``reader`` shows; ended on leaving.

    Raises:
        OSError: they cannot be started.
    """
    begin = framed(Begin(database_url, await reader.exported(), reader.tenant_id))
    processes: list[_Asked] = []
    try:
        for _ in range(min(PROCESSES_MAX, os.cpu_count() or 1)):
            # A session of its own: who interrupts the service by the keyboard ends this process through it.
            process = await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True)
            processes.append(_Asked(process, begin))
        yield CheckingProcesses(reader, processes)
    finally:
        for each in processes:
            await each.stop()


async def verified(
    database_url: str, reader: PostgresChainReader, verify_rows: Callable[..., Awaitable[Verdict]]
) -> Verdict:
    """The verdict of ``verify_rows`` on a whole chain, given ``elsewhere`` where it is a long one.

    Where the processes fail, the chain is verified without them, and ``on_break`` is called again for what they found.
    """
    last = await reader.last_entry()
    if last is None or last.seq < LONG_ENTRIES:
        return await verify_rows()
    try:
        async with checking(database_url, reader) as elsewhere:
            return await verify_rows(elsewhere=elsewhere)
    except (CheckingFailedError, OSError) as error:
        log.warning("checking_processes_failed", tenant_id=reader.tenant_id, error=str(error))
    return await verify_rows()

"""Verifies a long chain in worker processes: the service's event loop stays free, and two cores share the work.

Each process has its own connection, in the database snapshot that the verification reads. A process handles one
request at a time. Idle processes are kept for the next verification if the caller passes ``KeptProcesses``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from app.read.checking_process import (
    LENGTH_BYTES,
    Begin,
    CheckRange,
    ComparedJobs,
    CompareJobs,
    End,
    JudgeCommitments,
    Request,
    framed,
)
from app.runtime.logs import log
from app.store.chain_reader import PostgresChainReader
from ledger.decoding import decode_packed
from ledger.errors import LedgerError
from ledger.machines.retention import Floor
from ledger.verification.driver import CheckedRange
from ledger.verification.projection_check import OnBreak
from ledger.verification.range_check import RangeTask
from ledger.verification.snapshot_check import OpenedRow
from ledger.verification.verdict import Break, Findings, Found, Verdict
from signing.callers import KeyedJudge, SavedCallers

PROCESSES_MAX: Final = 2
REQUESTS_AHEAD: Final = 2
"""Ranges prepared for each process at a time, so that no process waits for its next one."""
JOBS_A_REQUEST: Final = 1000
"""Few enough that PostgreSQL sorts their entries in memory, and that the processes finish at about the same time."""
COMPARISONS_AT_ONCE: Final = 64
"""Most requests whose answers are held at a time."""
KEPT_S: Final = 60.0
"""How long processes wait for the next verification. Starting one takes as long as verifying 20,000 entries."""
LONG_ENTRIES: Final = 50_000
"""Length of a chain from which starting processes pays."""

COMMAND: Final = (sys.executable, "-m", "app.read.checking_process")


class CheckingFailedError(LedgerError):
    """A process ended before it answered; its messages are on standard error."""


class KeptProcesses:
    """Idle processes, at most ``PROCESSES_MAX``, each kept for ``KEPT_S``."""

    def __init__(self) -> None:
        self._ending: dict[Process, asyncio.TimerHandle] = {}
        self._is_closed = False

    def taken(self, count: int) -> list[Process]:
        """Remove and return up to ``count`` processes."""
        taken: list[Process] = []
        while self._ending and len(taken) < count:
            process, timer = self._ending.popitem()
            timer.cancel()
            if process.returncode is None:
                taken.append(process)
        return taken

    def keep(self, process: Process) -> bool:
        """Keep an idle process, which leaves its ledger; False if there is no room."""
        if self._is_closed or len(self._ending) >= PROCESSES_MAX or process.returncode is not None:
            return False
        assert process.stdin is not None
        process.stdin.write(framed(End()))
        self._ending[process] = asyncio.get_running_loop().call_later(KEPT_S, self._end, process)
        return True

    def _end(self, process: Process) -> None:
        del self._ending[process]
        if process.returncode is None:
            process.kill()

    async def close(self) -> None:
        """End the kept processes and accept no more."""
        self._is_closed = True
        for process in self.taken(PROCESSES_MAX):
            process.kill()
            await process.wait()


class CheckingProcesses:
    """Checks parts of one ledger, as ``ledger.verification.Checks``."""

    def __init__(self, reader: PostgresChainReader, processes: Sequence[Process], begin: Begin) -> None:
        self._reader = reader
        self._free: asyncio.Queue[Process] = asyncio.Queue()
        for each in processes:
            self._free.put_nowait(each)
        self.ranges_at_once = len(processes) * REQUESTS_AHEAD
        self.begun = asyncio.gather(*(self._ask(begin, bool) for _ in processes), return_exceptions=True)
        """Done once every process has started work or failed; no caller needs to wait for it."""

    async def check(self, task: RangeTask, snapshots: Sequence[OpenedRow]) -> CheckedRange:
        """Check one range by itself."""
        checked: CheckedRange = await self._ask(CheckRange(task, [*snapshots]), CheckedRange)
        return checked

    async def compare_jobs(self, on_break: OnBreak | None) -> Found:
        """Compare all jobs, some at a time."""
        parts, compared = await self._reader.job_ranges(JOBS_A_REQUEST), Findings()
        for first in range(0, len(parts), COMPARISONS_AT_ONCE):
            requests = map(CompareJobs, parts[first : first + COMPARISONS_AT_ONCE])
            for found, breaks in await asyncio.gather(*(self._ask(each, ComparedJobs) for each in requests)):
                compared.merge(found)
                _report(breaks, on_break)
        return compared.found

    async def judge_commitments(self, on_break: OnBreak | None, floor: Floor | None) -> Found:
        """Judge all verdicts, in one process: each verdict depends on the earlier ones."""
        found: Found
        found, breaks = await self._ask(JudgeCommitments(floor), ComparedJobs)
        _report(breaks, on_break)
        return found

    def take_idle(self) -> list[Process]:
        """Remove and return the processes that have answered every request. No caller may be waiting."""
        idle: list[Process] = []
        while not self._free.empty():
            idle.append(self._free.get_nowait())
        return idle

    async def _ask(self, request: Begin | Request, answer: Any) -> Any:
        """Send ``request`` to an idle process and return its answer, of the type ``answer``.

        Raises:
            CheckingFailedError: the process ended.
        """
        process = await self._free.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdin.is_closing():
                raise BrokenPipeError
            process.stdin.write(framed(request))
            length = await process.stdout.readexactly(LENGTH_BYTES)
            data = await process.stdout.readexactly(int.from_bytes(length, "big"))
        except (asyncio.IncompleteReadError, OSError) as error:
            self._free.put_nowait(process)  # Other callers must not wait for ever.
            raise CheckingFailedError("a process that checks parts of a ledger ended too early") from error
        # A process whose caller was cancelled is not used again: its late answer would be taken for the next one.
        self._free.put_nowait(process)
        return decode_packed(data, answer)


def _report(breaks: Sequence[Break], on_break: OnBreak | None) -> None:
    if on_break is not None:
        for each in breaks:
            on_break(each)


@asynccontextmanager
async def checking(
    database_url: str,
    reader: PostgresChainReader,
    kept: KeptProcesses | None = None,
    callers: SavedCallers | None = None,
) -> AsyncIterator[CheckingProcesses]:
    """Processes that read the same database snapshot as ``reader``; on exit they are moved to ``kept`` or ended.

    Raises:
        OSError: they cannot be started.
    """
    begin = Begin(database_url, await reader.exported(), reader.tenant_id, callers, reader.leaving_to)
    count = min(PROCESSES_MAX, os.cpu_count() or 1)
    processes = [] if kept is None else kept.taken(count)
    elsewhere, idle = None, list[Process]()
    try:
        while len(processes) < count:
            # In a session of its own: Ctrl-C reaches the service alone, which then ends this process.
            process = await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE, stdout=PIPE, start_new_session=True)
            processes.append(process)
        elsewhere = CheckingProcesses(reader, processes, begin)
        yield elsewhere
        idle = elsewhere.take_idle()
    finally:
        for process in processes:
            if kept is None or process not in idle or not kept.keep(process):
                if process.returncode is None:
                    process.kill()
                await process.wait()
        if elsewhere is not None:
            await elsewhere.begun


async def verified(
    database_url: str,
    reader: PostgresChainReader,
    verify_rows: Callable[..., Awaitable[Verdict]],
    callers: KeyedJudge,
    kept: KeptProcesses | None = None,
) -> Verdict:
    """The verdict of ``verify_rows`` on a whole chain, with this judge of ``callers``; a long chain is verified with
    ``elsewhere``.

    If the processes fail, the chain is verified without them, and ``on_break`` is called again for the same breaks.
    """
    if (last := await reader.last_entry()) is None or last.seq < LONG_ENTRIES:
        return await verify_rows(callers=callers)
    try:
        async with checking(database_url, reader, kept, callers.saved()) as elsewhere:
            return await verify_rows(callers=callers, elsewhere=elsewhere)
    except (CheckingFailedError, OSError) as error:
        log.warning("checking_processes_failed", tenant_id=reader.tenant_id, error=str(error))
    return await verify_rows(callers=callers)

"""How background tasks run, pause and end.

``kept_running`` restarts a task that failed, ``repeat`` does something at intervals; ``paced`` keeps a task to its
share of the time; ``called_in`` lets another thread call into the loop, ``in_own_thread`` waits for work that may
hang; ``stop_deadline`` ends a process whose stop hangs. ``attempts_within`` paces what is tried again,
``is_set_within`` waits for an event, ``Broadcast`` wakes all that wait. ``Slots`` and ``MemoryBudget`` bound heavy
work, ``keep_newest`` a cache. Acknowledged records are durable, so a kill loses none of them: the next start
recovers them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from ledger.errors import DatabaseUnavailableError, LedgerError, NotReadyError
from ledger.exit_code import ExitCode

PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 60.0
POLL_FIRST_S = 0.005
POLL_LONGEST_S = 0.1
"""Pauses between reads of Postgres while waiting for other nodes' writes."""


def end_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled: where a database hangs, the driver may end a cancelled statement
    with an error of its own, and code that catches it would go on."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def kept_running(
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    pause_first_s: float = PAUSE_FIRST_S,
    report: Callable[[BaseException, str], object] = lambda error, task: None,
) -> None:
    """Run ``work`` to its end; when it fails, log that and restart it, after exponentially longer pauses. ``report``
    gets each failure that is no outage, and the name of the task."""
    pause_s = pause_first_s
    task = (work.func if isinstance(work, partial) else work).__qualname__
    while True:
        try:
            await work()
            return
        except (*DATABASE_FAULTS, DatabaseUnavailableError) as error:
            # An outage: a trace through the driver is of no use.
            log.warning("task_delayed", task=task, error=f"{type(error).__name__}: {error}", retry_in_s=pause_s)
        except Exception as error:
            # Edited rows and files may hold anything; the trace shows what was not foreseen.
            log.error("task_failed", task=task, exc_info=error, retry_in_s=pause_s)
            report(error, task)
        end_if_cancelled()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


async def repeat(work: Callable[[], Awaitable[object]], every_s: float, event: str) -> None:
    """Run ``work`` for ever, with a pause of ``every_s``. The first of several failures in a row is logged as
    ``event``; what was not foreseen ends it."""
    has_failed = False
    while True:
        try:
            await work()
            has_failed = False
        except (LedgerError, *DATABASE_FAULTS) as error:
            if not has_failed:
                log.warning(event, error=str(error))
            has_failed = True
            end_if_cancelled()
        await asyncio.sleep(every_s)


@asynccontextmanager
async def paced(share: float, *, rest_max_s: float = math.inf) -> AsyncIterator[None]:
    """Run the body, then rest so long that the body took at most ``share`` of the time (0 to 1), its waits included;
    rest at most ``rest_max_s`` seconds."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    yield
    await asyncio.sleep(min(rest_max_s, (loop.time() - began_s) * (1 - share) / share))


async def attempts_within(
    seconds: float, *, pause_first_s: float = POLL_FIRST_S, pause_max_s: float = POLL_LONGEST_S
) -> AsyncIterator[None]:
    """Yield once for each attempt, with pauses that double. Stop if the next attempt would start later than ``seconds``
    from now."""
    deadline_s, pause_s = time.monotonic() + seconds, pause_first_s
    while True:
        yield
        if time.monotonic() + pause_s > deadline_s:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, pause_max_s)


async def is_set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until ``event`` is set, at most ``seconds``; returns whether it is. Not ``asyncio.wait_for``, which before
    Python 3.12 loses a cancellation that comes right after the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


class Broadcast:
    """Wakes every task that waits, each time that something has happened. Belongs to one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def send(self) -> None:
        """Wake all that wait now."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next time."""
        await self._next.wait()


Value = TypeVar("Value")
Values = TypeVarTuple("Values")


def called_in(loop: asyncio.AbstractEventLoop, callback: Callable[[*Values], None]) -> Callable[[*Values], None]:
    """A function for any thread that runs ``callback`` in ``loop``; calls are dropped once the loop has ended."""

    def call(*values: *Values) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, *values)

    return call


def in_own_thread(work: Callable[[], Value], name: str) -> asyncio.Future[Value]:
    """The outcome of ``work`` in a thread of its own, which ends with the process: work that never ends holds up
    neither a stop nor other work. The caller MUST NOT cancel the future, as the thread goes on."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Value] = loop.create_future()
    # The exception is retrieved in any case: every caller may have stopped waiting by then.
    outcome.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def run() -> None:
        try:
            settle: Callable[[], None] = partial(outcome.set_result, work())
        except BaseException as error:
            settle = partial(outcome.set_exception, error)
        called_in(loop, settle)()

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


@contextmanager
def stop_deadline(seconds: float, before_end: Callable[[], object] = lambda: None) -> Iterator[Callable[[], None]]:
    """Ends the process, with exit code 1, ``seconds`` after the first call of what it yields, unless the context was
    left before. ``before_end`` is called first, after the last line of the log, and MUST NOT wait long."""

    def end() -> None:
        frames = sys._current_frames()
        stands = {
            thread.name: "".join(traceback.format_stack(frames[thread.ident], limit=3)).strip().splitlines()
            for thread in threading.enumerate()
            if thread is not threading.current_thread() and thread.ident in frames
        }
        log.critical("stop_overdue", after_s=seconds, threads=stands)
        before_end()
        os._exit(ExitCode.COULD_NOT_RUN)

    def begin() -> None:
        with contextlib.suppress(RuntimeError):  # It has begun.
            timer.start()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    try:
        yield begin
    finally:
        timer.cancel()


WAIT_S = 30.0
"""Longest that a caller waits for room."""


class Slots:
    """Slots for work that holds memory, connections or disk: a caller without a slot waits for ``WAIT_S``, then is
    asked to retry."""

    def __init__(self, count: int, what: str) -> None:
        """``what`` names the work, in the plural."""
        self._count = count
        self._what = what
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold one slot inside the context.

        Raises:
            NotReadyError: no slot was free for ``WAIT_S``.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise NotReadyError(f"{self._count} {self._what} are under way; try again when one is done") from None
        try:
            yield
        finally:
            self._free.release()


Key = TypeVar("Key")


def keep_newest(cache: OrderedDict[Key, Value], key: Key, value: Value, count_max: int) -> None:
    """Put ``value`` into a cache of at most ``count_max`` values; the oldest is evicted for it."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > count_max:
        cache.popitem(last=False)


@dataclass(eq=False)
class MemoryBudget:
    """Bytes that all requests together may hold in memory; one principal may hold three quarters of them."""

    _bytes_max: int
    _what: str
    """What the bytes are."""
    _held_bytes: int = 0
    _held_by: Counter[str] = field(default_factory=Counter)

    def take(self, count: int, principal: str | None = None) -> None:
        """Hold ``count`` more bytes for ``principal``; None has no share of its own.

        Raises:
            NotReadyError: the budget has too few left.
        """
        has_share = principal is not None and 4 * (self._held_by[principal] + count) > 3 * self._bytes_max
        if has_share or self._held_bytes + count > self._bytes_max:
            raise NotReadyError(f"{self._bytes_max} bytes of {self._what} are in memory; try again, or send less")
        self._held_bytes += count
        if principal is not None:
            self._held_by[principal] += count

    def give_back(self, count: int, principal: str | None = None) -> None:
        """Release ``count`` bytes of ``principal``."""
        self._held_bytes -= count
        if principal is not None:
            self._held_by[principal] -= count
            if not self._held_by[principal]:
                del self._held_by[principal]

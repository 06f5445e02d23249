"""Closed-loop load on services in turn: so many connections, each sending its next request when the last is answered.

Who is compared is up at once, and loaded slice by slice, A B B A A B B A, so that both meet the machine as it is in the
same seconds::

    first         requests of each side are answered, not counted
    slice         of one side, then of the other; the next time the other way round
      warm up     requests answered, not counted
      window      requests answered are counted; the rate is theirs
      drain       nothing is sent, what is under way is answered
      settle      what the service does behind its answers comes to an end: all is chained, and followers had their time
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import uvloop

from benchmarks.http_client import Answer, Client, Connection, Target
from benchmarks.ledger_checks import wait_until_chained
from benchmarks.row import BenchmarkError

CONNECTIONS = 64
SLICES = 4
FIRST_S = 0.6
WARM_UP_S = 0.15
WINDOW_S = 0.6
"""Of each slice."""
FOLLOWED_S = 0.2
"""After the last entry is chained: followers begin within 0.125 s, and are not asked whether they are done."""


class Side(NamedTuple):
    """One of those that are loaded in turn. All of it goes to the process of the client."""

    url: str
    requests: Callable[[], Sequence[bytes]]
    """Made there before anything is sent, and sent over and over."""
    status: int = 201
    """Of each answer."""
    settle: Callable[[str], Awaitable[None]] | None = None
    """Takes the URL, and returns once next to nothing is left to be done for what was answered."""


class Load(NamedTuple):
    """What the client saw of one side. ``answered`` counts every request."""

    answered: int
    rate: float
    p50_ms: float
    p99_ms: float
    answer_bytes: float
    """Mean size of an answer, headers included."""
    client_cpu: float
    """Share of one core that the client took in the windows: near 1, it was the bottleneck."""

    def __str__(self) -> str:
        return (
            f"{self.rate:,.0f}/s, p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms, {self.answered} answers of "
            f"{self.answer_bytes:.0f} bytes, client at {self.client_cpu:.0%} of a core"
        )


async def followed(url: str, token: str | None = None) -> None:
    """The ``settle`` of a node of ours."""
    client = await Client.connect(Target.of(url), token)
    try:
        await wait_until_chained(client)
    finally:
        client.close()
    await asyncio.sleep(FOLLOWED_S)


def drive_in_turn(sides: Sequence[Side]) -> list[Load]:
    """Load all sides in turn; what the client saw of each.

    Raises:
        BenchmarkError: a request was answered with anything but the status, or a service hung up.
    """
    return uvloop.run(_drive_in_turn(sides))


async def _drive_in_turn(sides: Sequence[Side]) -> list[Load]:
    drivers = [_Driver(side) for side in sides]
    for driver in drivers:
        await driver.open()
        await driver.slice(FIRST_S, 0.0)
    for number in range(SLICES):
        for driver in drivers if number % 2 == 0 else reversed(drivers):
            await driver.slice(WARM_UP_S, WINDOW_S)
    return [driver.close() for driver in drivers]


async def drive_once(side: Side, seconds: float) -> Load:
    """Load one side for a while; what the client saw.

    Raises:
        BenchmarkError: as ``drive_in_turn``.
    """
    driver = _Driver(side)
    await driver.open()
    await driver.slice(WARM_UP_S, seconds)
    return driver.close()


class _Driver:
    def __init__(self, side: Side) -> None:
        self._side = side
        self._requests: Iterator[bytes] = itertools.cycle(side.requests())
        self._connections: list[Connection] = []
        self._answered = self._answer_bytes = self._counted = 0
        self._took_s = self._cpu_s = 0.0
        self._under_way = 0
        self._latencies_s: list[float] = []
        self._is_counting = self._is_sending = False
        self._drained = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        loop, target = asyncio.get_running_loop(), Target.of(self._side.url)
        self._connections = [
            (await loop.create_connection(lambda: Connection(self._take, self._lose), *target))[1]
            for _ in range(CONNECTIONS)
        ]

    async def slice(self, warm_up_s: float, window_s: float) -> None:
        """Load for a while, and wait for what is left behind."""
        self._drained.clear()
        self._is_sending = True
        for connection in self._connections:
            self._send(connection)
        await self._phase(warm_up_s)
        before, cpu_before_s, began_s = self._answered, time.process_time(), time.perf_counter()
        self._is_counting = window_s > 0
        await self._phase(window_s)
        self._is_counting = self._is_sending = False
        if window_s:
            self._took_s += time.perf_counter() - began_s
            self._cpu_s += time.process_time() - cpu_before_s
            self._counted += self._answered - before
        drained = asyncio.ensure_future(self._drained.wait())
        await asyncio.wait((self._failure, drained), return_when="FIRST_COMPLETED")
        if self._failure.done():
            self._failure.result()
        if self._side.settle is not None:
            await self._side.settle(self._side.url)

    def close(self) -> Load:
        """Hang up; what was seen."""
        for connection in self._connections:
            connection.close()
        cuts = statistics.quantiles([latency_s * 1000 for latency_s in self._latencies_s], n=100)
        return Load(
            answered=self._answered,
            rate=self._counted / self._took_s,
            p50_ms=cuts[49],
            p99_ms=cuts[98],
            answer_bytes=self._answer_bytes / self._answered,
            client_cpu=self._cpu_s / self._took_s,
        )

    async def _phase(self, seconds: float) -> None:
        done, _ = await asyncio.wait((self._failure,), timeout=seconds)
        if done:
            self._failure.result()

    def _send(self, connection: Connection) -> None:
        self._under_way += 1
        connection.sent_at = time.perf_counter()
        connection.send(next(self._requests))

    def _take(self, connection: Connection, answer: Answer) -> None:
        if self._is_counting:
            self._latencies_s.append(time.perf_counter() - connection.sent_at)
        self._under_way -= 1
        self._answered += 1
        self._answer_bytes += answer.answer_bytes
        if answer.status != self._side.status:
            self._fail(f"answered {answer.status}: {answer.body[:500].decode()}")
        elif self._is_sending:
            self._send(connection)
        elif not self._under_way:
            self._drained.set()

    def _lose(self) -> None:
        self._fail("the service hung up")

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_exception(BenchmarkError(reason))

"""Closed-loop load: so many connections, each sending its next request when the last is answered.

warm up       requests answered, not counted
window        requests answered are counted; the rate is theirs
drain         nothing is sent, what is under way is answered
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import uvloop

from benchmarks.http_client import Answer, Connection, Target
from benchmarks.row import BenchmarkError


class Load(NamedTuple):
    """What the client saw. ``answered`` counts every request of all three phases."""

    answered: int
    rate: float
    p50_ms: float
    p99_ms: float
    answer_bytes: float
    """Mean size of an answer, headers included."""
    client_cpu: float
    """Share of one core that the client took in the window: near 1, it was the bottleneck."""


def drive(
    target: Target, requests: Sequence[bytes], connections: int, warm_up_s: float, window_s: float, *, status: int = 201
) -> Load:
    """Send ``requests``, over and over, on ``connections`` at once.

    Raises:
        BenchmarkError: one was answered with anything but ``status``, or the service hung up.
    """
    return uvloop.run(_Driver(requests, status).run(target, connections, warm_up_s, window_s))


class _Driver:
    def __init__(self, requests: Sequence[bytes], status: int) -> None:
        self._requests = itertools.cycle(requests)
        self._status = status
        self._answered = 0
        self._answer_bytes = 0
        self._under_way = 0
        self._latencies_s: list[float] = []
        self._is_sending = True
        self._drained = asyncio.Event()
        self._failure: asyncio.Future[None]

    async def run(self, target: Target, connections: int, warm_up_s: float, window_s: float) -> Load:
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        opened = [
            (await loop.create_connection(lambda: Connection(self._take, self._lose), *target))[1]
            for _ in range(connections)
        ]
        for connection in opened:
            self._send(connection)
        await self._phase(warm_up_s)
        self._latencies_s.clear()
        before, cpu_before_s, began_s = self._answered, time.process_time(), time.perf_counter()
        await self._phase(window_s)
        took_s = time.perf_counter() - began_s
        counted, cpu_s = self._answered - before, time.process_time() - cpu_before_s
        latencies_ms = [latency_s * 1000 for latency_s in self._latencies_s]
        self._is_sending = False
        await asyncio.wait((self._failure, loop.create_task(self._drained.wait())), return_when="FIRST_COMPLETED")
        if self._failure.done():
            self._failure.result()
        for connection in opened:
            connection.close()
        cuts = statistics.quantiles(latencies_ms, n=100)
        return Load(
            answered=self._answered,
            rate=counted / took_s,
            p50_ms=cuts[49],
            p99_ms=cuts[98],
            answer_bytes=self._answer_bytes / self._answered,
            client_cpu=cpu_s / took_s,
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
        self._latencies_s.append(time.perf_counter() - connection.sent_at)
        self._under_way -= 1
        self._answered += 1
        self._answer_bytes += answer.answer_bytes
        if answer.status != self._status:
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

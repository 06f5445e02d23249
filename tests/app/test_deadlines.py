"""Each write that waits to be chained fails when its own time is up, and none before."""

from __future__ import annotations

import asyncio

import pytest

from app.write.intake.answers import Deadlines
from ledger.errors import DurabilityTimeoutError
from ledger.positions import Lsn

TIMEOUT_S = 0.05
CLOCK_S = 0.002
"""What the loop's time is told by."""
DEADLINE_S = 30


async def test_each_that_is_not_done_fails_when_its_own_time_is_up() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    for _ in range(3):
        came_s = loop.time()
        done, first, second = (loop.create_future() for _ in range(3))
        for future in (done, first, second):
            deadlines.add(future, Lsn(1), TIMEOUT_S)
        done.set_result(None)
        with pytest.raises(DurabilityTimeoutError, match=r"not chained within 0\.05 s"):
            await asyncio.wait_for(first, DEADLINE_S)
        assert loop.time() - came_s >= TIMEOUT_S - CLOCK_S
        assert isinstance(second.exception(), DurabilityTimeoutError)
        assert done.result() is None


async def test_those_that_are_done_are_not_kept_until_their_time_would_be_up() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    for _ in range(100):
        future = loop.create_future()
        deadlines.add(future, Lsn(1), 3600)
        future.set_result(None)
    await asyncio.sleep(0)
    assert len(deadlines._waiting) == 0

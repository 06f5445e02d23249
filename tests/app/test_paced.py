"""The background takes its share of the time, and what waited long for others does not rest for ever."""

from __future__ import annotations

import asyncio
import math

import pytest

from app.runtime.tasks import paced
from tests.app.clock_loop import Clock, ClockLoop


@pytest.mark.parametrize(
    ("share", "took_s", "rest_max_s", "rest_s"),
    [(0.05, 0.01, 5, 0.19), (0.5, 3, math.inf, 3), (1, 3, math.inf, 0), (0.05, 1.5, 5, 5), (0.05, 60, 5, 5)],
)
def test_work_rests_for_its_share_and_no_longer_than_it_may(
    share: float, took_s: float, rest_max_s: float, rest_s: float
) -> None:
    clock = Clock()

    async def work() -> None:
        async with paced(share, rest_max_s=rest_max_s):
            clock.now_s += took_s

    began_s = clock.now_s
    with asyncio.Runner(loop_factory=lambda: ClockLoop(clock)) as runner:
        runner.run(work())
    assert clock.now_s - began_s - took_s == pytest.approx(rest_s)

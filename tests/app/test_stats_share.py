"""The share of the event loop that stats have: however many come, the rest of it is left to jobs."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.write import stats as stats_module
from app.write.stats import OWED_S_MAX, LoopShare, StatsIntake
from tests.app.clock_loop import Clock, ClockLoop

SENDERS = 32
WORK_S = 0.002
JOBS = 200


@given(steps=st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 3)), max_size=40))
def test_no_more_is_used_than_the_burst_and_the_share_of_the_time_that_went_by(
    steps: list[tuple[float, float]],
) -> None:
    clock = Clock()
    share = LoopShare(0.25, 1.0, clock=clock)
    used_s = 0.0
    for work_s, idle_s in steps:
        if share.spent() < 1:
            with share.charged():
                clock.now_s += work_s
            used_s += work_s
        clock.now_s += idle_s
        assert used_s <= 1.0 + 0.5 + 0.25 * (clock.now_s - 100) + 1e-9
        assert share.spent() >= 0
        assert 0 <= share.owed_s() <= OWED_S_MAX


def test_what_is_owed_is_waited_for_and_never_longer_than_the_bound() -> None:
    clock = Clock()
    share = LoopShare(0.2, 0.1, clock=clock)
    share.charge(0.1)
    assert share.spent() == pytest.approx(1.0)
    assert share.owed_s() == pytest.approx(0.0)
    share.charge(0.1)
    assert share.owed_s() == pytest.approx(0.5)
    clock.now_s += 0.5
    assert share.owed_s() == pytest.approx(0.0)
    share.charge(1000)
    assert share.owed_s() == OWED_S_MAX
    clock.now_s += 1000
    assert share.spent() == 0


def test_under_a_storm_jobs_have_more_than_half_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stats_module, "ANSWERING_S", 2 * WORK_S)
    monkeypatch.setattr(stats_module, "ANSWERING_BURST_S", WORK_S)
    monkeypatch.setattr(stats_module, "CHECKING_BURST_S", WORK_S)
    monkeypatch.setattr(stats_module, "LoopShare", partial(LoopShare, clock=clock))
    intake = StatsIntake(1 << 20)
    used_s = {"jobs": 0.0, "stats": 0.0}
    done = asyncio.Event()

    def work(of: str) -> None:
        clock.now_s += WORK_S
        used_s[of] += 0 if done.is_set() else WORK_S

    async def send() -> None:
        while not done.is_set():
            await intake.admit()
            work("stats")
            async with intake.turn(100) as is_mine:
                if is_mine:
                    with intake.checking.charged():
                        work("stats")
            await asyncio.sleep(0)

    async def submit() -> None:
        for _ in range(JOBS):
            work("jobs")
            await asyncio.sleep(0)
        done.set()

    async def storm() -> None:
        await asyncio.gather(submit(), *(send() for _ in range(SENDERS)))

    with asyncio.Runner(loop_factory=lambda: ClockLoop(clock)) as runner:
        runner.run(storm())
    assert 0.1 * used_s["jobs"] < used_s["stats"] <= used_s["jobs"]

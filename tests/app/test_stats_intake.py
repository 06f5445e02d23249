"""The queue of stats reports: bounded in lines and bytes, fair to what it keeps, and never in the way of others."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.write import stats as stats_module
from app.write.stats import Chunk, StatsIntake

KIB = Chunk(b"x" * 1023 + b"\n", 1)


def test_neither_bytes_nor_lines_pass_their_bounds() -> None:
    by_bytes = StatsIntake(10 << 10)
    assert [by_bytes.offer(KIB) for _ in range(11)] == [True] * 10 + [False]
    by_lines = StatsIntake(10 << 10, lines_max=10)
    assert [by_lines.offer(Chunk(b"\n" * 4, 4)) for _ in range(3)] == [True, True, False]


def test_room_is_made_by_writing_and_not_by_taking() -> None:
    intake = StatsIntake(1 << 10)
    assert intake.offer(KIB)
    (taken,) = intake.take(None)
    assert not intake.offer(KIB)
    intake.written(taken)
    assert intake.offer(KIB)


def test_the_fuller_it_is_the_fewer_are_kept() -> None:
    intake = StatsIntake(16 << 10)
    weights = []
    for _ in range(16):
        weights.append(intake.weight())
        intake.offer(KIB)
    assert weights == [1] * 8 + [2] * 4 + [4] * 2 + [8] * 2


@given(weight=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 2**32))
def test_what_is_kept_stands_for_what_was_not(weight: int, seed: int) -> None:
    offered = 4000
    kept = StatsIntake(1 << 20, draw=random.Random(seed).randbytes).sample(range(offered), weight)
    # Eight standard deviations of a fair draw.
    assert abs(len(kept) * weight - offered) <= 8 * (offered * (weight - 1)) ** 0.5


def test_taking_waits_no_longer_than_it_is_told_and_can_be_hurried() -> None:
    intake = StatsIntake(1 << 20)
    assert intake.take(0.0) == []
    intake.hurry()
    assert intake.take(None) == []
    intake.offer(KIB)
    assert intake.take(None) == [KIB]


async def test_one_body_is_checked_at_a_time_and_what_cannot_wait_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats_module, "CHECKED_BYTES_MAX", 3)
    intake = StatsIntake(1 << 20)
    inside, most = 0, 0

    async def check(body_bytes: int) -> bool:
        nonlocal inside, most
        async with intake.turn(body_bytes) as is_mine:
            if is_mine:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1
            return is_mine

    assert await asyncio.gather(*(check(1) for _ in range(5))) == [True] * 3 + [False] * 2
    assert most == 1
    assert await check(3)

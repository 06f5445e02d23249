"""Watermarks: each who waits is told when his position is reached, his time is up, or it never will be."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from app.runtime.state.node import Watermark
from ledger.errors import DurabilityTimeoutError, WalPoisonedError


async def test_a_watermark_resolves_whom_it_reached_and_nobody_else() -> None:
    watermark = Watermark("durable", 5)
    futures = {lsn: watermark.reached(lsn) for lsn in (9, 5, 7, 6, 9, 8)}
    assert {lsn for lsn, future in futures.items() if future.done()} == {5}
    watermark.advance(7)
    assert {lsn for lsn, future in futures.items() if future.done()} == {5, 6, 7}
    watermark.advance(6)
    assert watermark.lsn == 7
    watermark.advance(9)
    assert all(future.done() for future in futures.values())


async def test_a_watermark_that_failed_fails_all_who_wait_and_who_come_later_but_for_what_was_reached() -> None:
    watermark = Watermark("durable", 5)
    waiting = watermark.reached(6, 30)
    watermark.fail(WalPoisonedError("gone"))
    with pytest.raises(WalPoisonedError):
        await waiting
    with pytest.raises(WalPoisonedError):
        await watermark.reached(6, 30)
    await watermark.reached(5, 30)


async def test_a_wait_that_timed_out_leaves_the_watermark_to_others() -> None:
    watermark = Watermark("chained", 5)
    with pytest.raises(DurabilityTimeoutError, match="chained did not reach LSN 6"):
        await watermark.reached(6, 0.01)
    watermark.advance(6)
    await watermark.reached(6, 0)


async def test_each_of_those_who_wait_has_a_deadline_of_its_own() -> None:
    watermark = Watermark("durable", 5)
    for_ever = watermark.reached(6)
    long = watermark.reached(7, 3600)
    short = watermark.reached(9, 0.02)
    shorter = watermark.reached(8, 0.01)
    done, _ = await asyncio.wait((shorter, short), timeout=30)
    assert done == {shorter, short}
    for future, message in ((shorter, "LSN 8 in 0.01 s"), (short, "LSN 9 in 0.02 s")):
        with pytest.raises(DurabilityTimeoutError, match=message):
            future.result()
    assert not for_ever.done()
    assert not long.done()
    with pytest.raises(DurabilityTimeoutError, match="LSN 7"):
        await watermark.reached(7, 0.01)
    watermark.advance(7)
    assert for_ever.done()
    assert long.done()


def test_whoever_comes_at_the_same_moment_as_others_whose_time_was_up_has_a_deadline_too() -> None:
    async def wait_in_vain() -> None:
        watermark = Watermark("durable", 5)
        for _ in range(100):
            with pytest.raises(DurabilityTimeoutError, match="LSN 6"):
                await asyncio.wait_for(watermark.reached(6, 0), 30)

    uvloop.run(wait_in_vain())  # whose time stands still while it calls one after the other


async def test_one_who_stopped_waiting_takes_nobody_along() -> None:
    watermark = Watermark("durable", 5)
    waiting = [watermark.reached(6, 30) for _ in range(3)]
    waiting[1].cancel()
    watermark.advance(6)
    assert [future.cancelled() for future in waiting] == [False, True, False]
    await asyncio.gather(waiting[0], waiting[2])

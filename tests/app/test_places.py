"""The places in C of those who wait for a position do what those in Python do: the same who, when and in what order."""

from __future__ import annotations

import asyncio
import gc
import math
import shutil
import sysconfig
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runtime.state.node import Places, PythonPlaces
from ledger.errors import DurabilityTimeoutError, WalPoisonedError
from ledger.positions import Lsn

CORES = pytest.mark.parametrize("core", [Places, PythonPlaces])


class OwnTime(asyncio.SelectorEventLoop):
    """A loop whose time passes when it is told."""

    now_s = 100.0

    def time(self) -> float:
        """Its own time, in seconds."""
        return self.now_s

    def turn(self) -> None:
        """Call what is due."""
        self.call_soon(self.stop)
        self.run_forever()


@pytest.fixture
def loop() -> Iterator[OwnTime]:
    made = OwnTime()
    yield made
    made.close()


class Side:
    """One of the two, all that it does written down."""

    def __init__(self, core: type[PythonPlaces], loop: OwnTime) -> None:
        side = self

        class Told(core):  # type: ignore[misc, valid-type]
            def look_at(self, ends_s: float) -> None:
                side.seen.append(("looks", ends_s))
                loop.call_at(ends_s, side.expire, ends_s)

        self.loop = loop
        self.seen: list[object] = []
        self.futures: list[asyncio.Future[None]] = []
        self.places: PythonPlaces = Told(Lsn(3))
        self.places.on_wanted = lambda: self.seen.append("wanted")

    def expire(self, ends_s: float) -> None:
        if ends_s == self.places.looks_at_s:
            for lsn, timeout_s, future in self.places.overdue(self.loop.time()):
                self.seen.append(("overdue", lsn, timeout_s, self.futures.index(future)))
                if not future.done():
                    future.set_exception(DurabilityTimeoutError("late"))

    def do(self, what: str, *args: Any) -> None:
        match what:
            case "reached":
                self.futures.append(self.places.reached(*args))
                number = len(self.futures)
                self.futures[-1].add_done_callback(lambda _: self.seen.append(("told", number)))
            case "cancel":
                if self.futures:
                    self.futures[args[0] % len(self.futures)].cancel()
            case "leave":
                self.seen.append([self.futures.index(future) for future in self.places.leave()])
            case "fail":
                self.places.failure = WalPoisonedError("gone")
            case "mend":
                self.places.failure = None
            case "silent":
                self.places.on_wanted = None
            case _:
                getattr(self.places, what)(*args)

    def state(self) -> object:
        places = self.places
        told = [
            (future.done(), future.cancelled(), future.done() and not future.cancelled() and repr(future.exception()))
            for future in self.futures
        ]
        return self.seen, told, places.lsn, places.wanted_lsn, places.looks_at_s, str(places.failure)


LSNS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reached"), LSNS),
        st.tuples(st.just("reached"), LSNS, st.sampled_from((math.inf, 0, 0.5, 1.0, 1.0, 2.5))),
        st.tuples(st.just("advance"), LSNS),
        st.tuples(st.just("want"), LSNS),
        st.tuples(st.just("pass"), st.sampled_from((0.5, 1.0, 3.0))),
        st.tuples(st.just("turn")),
        st.tuples(st.just("cancel"), LSNS),
        st.sampled_from((("leave",), ("fail",), ("mend",), ("silent",))),
    ),
    max_size=40,
)


@given(STEPS)
def test_both_tell_the_same_to_the_same(steps: Sequence[tuple[Any, ...]]) -> None:
    loop = OwnTime()
    sides = [Side(core, loop) for core in (Places, PythonPlaces)]

    async def do(step: tuple[Any, ...]) -> None:
        for side in sides:
            side.do(*step)

    for step in [*steps, ("turn",)]:
        if step[0] == "pass":
            loop.now_s += step[1]
        elif step[0] == "turn":
            loop.turn()
        else:
            loop.run_until_complete(do(step))
        assert sides[0].state() == sides[1].state()
    loop.close()


def test_they_are_built_where_there_is_a_compiler() -> None:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    assert (shutil.which("cc") is not None and header.is_file()) == (Places is not PythonPlaces)


@CORES
def test_thousands_wait_and_are_told_in_the_order_in_which_they_are_reached(
    core: type[PythonPlaces], loop: OwnTime
) -> None:
    side = Side(core, loop)

    async def wait() -> None:
        for lsn in range(4, 5004):
            side.do("reached", lsn, 30.0)
            if lsn % 3 == 0:
                side.do("advance", lsn - 100)
        side.do("reached", 4950, 30.0)
        side.do("advance", 4960)

    loop.run_until_complete(wait())
    loop.turn()
    told = [seen[1] for seen in side.seen if isinstance(seen, tuple) and seen[0] == "told"]
    assert told == [*range(1, 4948), 5001, *range(4948, 4958)]
    assert sum(not future.done() for future in side.futures) == 5003 - 4960


@CORES
def test_each_waits_as_long_as_he_said_and_one_who_stopped_takes_nobody_along(
    core: type[PythonPlaces], loop: OwnTime
) -> None:
    side = Side(core, loop)

    async def wait() -> None:
        for timeout_s in (9.0, 2.0, 5.0, math.inf, 2.0, 7.0):
            side.do("reached", 9, timeout_s)
        side.do("cancel", 5)

    loop.run_until_complete(wait())
    for up in ({5}, {1, 4, 5}, {1, 2, 4, 5}, {1, 2, 4, 5}, {0, 1, 2, 4, 5}):
        assert {number for number, future in enumerate(side.futures) if future.done()} == up
        loop.now_s = side.places.looks_at_s
        loop.turn()
    assert [future.cancelled() for future in side.futures] == [number == 5 for number in range(6)]

    async def wait_again() -> None:
        for _ in range(3):
            side.do("reached", 8)
        side.do("cancel", 7)
        side.do("advance", 8)

    loop.run_until_complete(wait_again())
    assert [future.cancelled() for future in side.futures[6:]] == [False, True, False]
    assert not side.futures[3].done()
    looks = [seen[1] for seen in side.seen if isinstance(seen, tuple) and seen[0] == "looks"]
    assert looks == [109.0, 102.0, 105.0, 107.0, 109.0]


@CORES
def test_memory_is_of_those_who_wait_now(core: type[PythonPlaces], loop: OwnTime) -> None:
    places = Side(core, loop).places
    places.on_wanted = None

    async def wait(first: int, count: int) -> None:
        for lsn in range(first, first + count):
            places.reached(Lsn(lsn))
            places.advance(Lsn(lsn - 50))
            if lsn % 1000 == 0:
                await asyncio.sleep(0)

    loop.run_until_complete(wait(60, 5_000))
    tracemalloc.start()
    try:
        loop.run_until_complete(wait(5_060, 20_000))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000


@CORES
def test_of_those_who_wait_no_more_nothing_is_kept(core: type[PythonPlaces], loop: OwnTime) -> None:
    places = Side(core, loop).places

    async def wait() -> list[weakref.ref[Any]]:
        futures = [places.reached(Lsn(lsn), timeout_s) for lsn in range(4, 500) for timeout_s in (0.0, 30.0)]
        places.advance(Lsn(200))
        places.overdue(loop.now_s + 1)
        places.advance(Lsn(300))
        places.leave()
        return [weakref.ref(future) for future in futures]

    kept = loop.run_until_complete(wait())
    loop.turn()
    assert not [future for future in kept if future() is not None]


@CORES
def test_places_that_nobody_has_any_more_go_with_those_who_wait(core: type[PythonPlaces], loop: OwnTime) -> None:
    async def wait() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        side = Side(core, loop)
        future = side.places.reached(Lsn(9))
        future.add_done_callback(lambda _: side.seen.clear())  # so they hold each other
        return weakref.ref(future), weakref.ref(side)

    kept = loop.run_until_complete(wait())
    gc.collect()
    assert [what() for what in kept] == [None, None]


@pytest.mark.parametrize("bad", [("9",), (None,), (2**80,), (), (9, "1"), (9, 1.0, 2)])
def test_what_is_no_position_is_an_error_and_nobody_waits(bad: tuple[Any, ...], loop: OwnTime) -> None:
    if Places is PythonPlaces:
        return  # mypy sees to it
    side = Side(Places, loop)

    async def wait() -> None:
        with pytest.raises((TypeError, OverflowError)):
            side.places.reached(*bad)

    loop.run_until_complete(wait())
    assert side.places.leave() == []


@CORES
def test_a_loop_that_is_closed_is_an_error_where_it_would_be_told(core: type[PythonPlaces]) -> None:
    loop = OwnTime()
    side = Side(core, loop)

    async def wait() -> None:
        side.do("reached", 9)

    loop.run_until_complete(wait())
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        side.places.advance(Lsn(9))

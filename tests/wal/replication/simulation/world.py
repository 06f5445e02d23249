"""Simulated time: what happens next, in an order that the seed alone decides; and processes that live in it."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

TRACE_LINES = 60

Act = Callable[[], None]


class World:
    """Time in seconds from 0, and all that is to happen."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self._due: list[tuple[float, int, Act]] = []
        self._count = 0

    def later(self, delay_s: float, act: Act) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._count, act))

    def run(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Let happen what is due; True as soon as ``is_done``, False when it is ``until_s``."""
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._due)
            act()
            if is_done():
                return True
        self.now_s = until_s
        return is_done()

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now_s:9.4f} {text}")

    def between(self, least: float, most: float) -> float:
        return self.rng.uniform(least, most)

    def happens(self, chance: float) -> bool:
        return self.rng.random() < chance


class Process:
    """What runs on a machine: it may be killed, and stopped for a while. Timers go by its own clock, which jumps."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = False
        self.is_paused = False
        self._life = 0
        self._held_back: list[Act] = []
        self._timers: dict[int, Act] = {}
        self._timer_count = 0

    def begin_life(self) -> None:
        self.is_alive, self.is_paused = True, False
        self._life += 1
        self._held_back = []
        self._timers = {}

    def die(self) -> None:
        self.is_alive = False
        self._life += 1

    def mine(self, act: Act) -> Act:
        """``act``, done only while this life lasts, and when the process is not paused."""
        life = self._life

        def guarded() -> None:
            if life != self._life or not self.is_alive:
                return
            if self.is_paused:
                self._held_back.append(guarded)
            else:
                act()

        return guarded

    def after(self, delay_s: float, act: Act) -> None:
        """A timer by the own clock."""
        self._timer_count += 1
        number = self._timer_count

        def fires() -> None:
            if self._timers.pop(number, None) is not None:
                act()

        self._timers[number] = act
        self.world.later(delay_s, self.mine(fires))

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        held_back, self._held_back = self._held_back, []
        for act in held_back:
            act()

    def jump_clock(self) -> None:
        """The clock jumps ahead, or back: every timer is due now, or later by as much."""
        timers, self._timers = self._timers, {}
        ahead = self.world.happens(0.5)
        for act in timers.values():
            self.after(0.0 if ahead else self.world.between(0.5, 2.0), act)

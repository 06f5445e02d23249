"""Room for a few pieces of heavy work at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledger.errors import NotReadyError

WAIT_S = 30.0
"""Longest that a caller waits for room."""


class Slots:
    """Work that holds memory, connections or disk: who finds no room waits a while, then is told to come again."""

    def __init__(self, count: int, what: str) -> None:
        """``what`` names the work, in the plural."""
        self._count = count
        self._what = what
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """One slot, until it is left.

        Raises:
            NotReadyError: there was none for ``WAIT_S``.
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


class MemoryBudget:
    """Bytes that all requests together may hold in memory; one principal three quarters of them."""

    def __init__(self, bytes_max: int, what: str) -> None:
        """``what`` says what they are."""
        self._bytes_max = bytes_max
        self._what = what
        self._held_bytes = 0
        self._held_by: Counter[str] = Counter()

    def take(self, count: int, principal: str | None = None) -> None:
        """Hold so many more for ``principal``; None is everybody.

        Raises:
            NotReadyError: that were too many.
        """
        has_share = principal is not None and 4 * (self._held_by[principal] + count) > 3 * self._bytes_max
        if has_share or self._held_bytes + count > self._bytes_max:
            raise NotReadyError(f"{self._bytes_max} bytes of {self._what} are in memory; try again, or send less")
        self._held_bytes += count
        if principal is not None:
            self._held_by[principal] += count

    def give_back(self, count: int, principal: str | None = None) -> None:
        """Hold so many less for ``principal``."""
        self._held_bytes -= count
        if principal is not None:
            self._held_by[principal] -= count
            if not self._held_by[principal]:
                del self._held_by[principal]

"""Room for a few pieces of heavy work at once."""

from __future__ import annotations

import asyncio
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

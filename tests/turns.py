"""Whether other tasks get their turn while one works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """How often another task had its turn."""

    count = 0

    async def take(self) -> None:
        """Take every turn there is."""
        while True:
            self.count += 1
            await asyncio.sleep(0)


@contextmanager
def counted_turns() -> Iterator[Turns]:
    """Counts the turns of a task beside this one, for as long as the context is open."""
    turns = Turns()
    counting = asyncio.ensure_future(turns.take())
    try:
        yield turns
    finally:
        counting.cancel()

"""Work of the background that takes no more than its share of the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def paced(share: float, *, rest_min_s: float = 0.0) -> AsyncIterator[None]:
    """Do what is inside, then rest so long that it took no more than ``share`` of the time (0 to 1), the time that it
    waited for others included; at least ``rest_min_s`` seconds."""
    assert 0 < share <= 1
    began_s = time.monotonic()
    yield
    took_s = time.monotonic() - began_s
    await asyncio.sleep(max(rest_min_s, took_s * (1 - share) / share))

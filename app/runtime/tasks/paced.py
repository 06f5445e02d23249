"""Work of the background that takes no more than its share of the time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def paced(share: float, *, rest_max_s: float = math.inf) -> AsyncIterator[None]:
    """Do what is inside, then rest so long that it took no more than ``share`` of the time (0 to 1), the time that it
    waited for others included; but no longer than ``rest_max_s`` seconds."""
    assert 0 < share <= 1
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    yield
    took_s = loop.time() - began_s
    await asyncio.sleep(min(rest_max_s, took_s * (1 - share) / share))

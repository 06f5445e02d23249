"""Work for a client that waits for it, and that stops when the client has gone away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request


@asynccontextmanager
async def while_connected(request: Request) -> AsyncIterator[None]:
    """Cancel what is done within once the client is gone. The body of the request MUST have been read.

    Raises:
        ClientDisconnect: it is gone.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()

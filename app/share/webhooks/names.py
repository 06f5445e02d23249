"""Looking up the names of receivers, which lead to servers of whoever registered them, and may never be answered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread


class Names:
    """Looks up addresses, each name in a thread of its own and once at a time. Belongs to one event loop.

    A lookup cannot be told to stop: those that event loops make wait for each other, so that a few names whose servers
    never answer hold up whatever else the process looks up.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[list[str]]] = {}

    async def addresses(self, host: str) -> list[str]:
        """Of ``host``, in no order.

        Raises:
            OSError, UnicodeError: it has none, or is no name.
        """
        found = self._under_way.get(host)
        if found is None:
            loop = asyncio.get_running_loop()
            found = self._under_way[host] = loop.create_future()
            found.add_done_callback(partial(self._is_over, host))
            # It ends with the process, whatever it waits for.
            Thread(target=_look_up, args=(loop, found, host), name="look up", daemon=True).start()
        return await asyncio.shield(found)

    def _is_over(self, host: str, found: asyncio.Future[list[str]]) -> None:
        del self._under_way[host]
        found.exception()  # also where nobody waited for so long


def _look_up(loop: asyncio.AbstractEventLoop, found: asyncio.Future[list[str]], host: str) -> None:
    tell: Callable[[], None]
    try:
        addresses = [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        tell = partial(found.set_result, addresses)
    except (OSError, UnicodeError) as error:
        tell = partial(found.set_exception, error)
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(tell)

"""A node from its start to its end, in one event loop.

Start, serve, stop::

    start    app.node.start.procedure brings the node up; parts are made; recovered records go to the appender
    serve    uvicorn in this event loop, beside the tasks of the node
    stop     not ready, no more appends; open requests end; the WAL is flushed and the backlog drained as far as
             the budget goes; control file; exit code 0

Exit code 1 when the node failed (poisoned WAL, fenced, database went back): a restart recovers or refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable

from app.edge.listener import listening
from app.node.wiring import running
from app.runtime.logs import log
from app.runtime.settings.config import Settings
from terminal import stop_signals

GC_ALLOCATIONS = 250_000
"""Allocations between collections of the young generation: many events are in flight, and none is a cycle."""

SWITCH_INTERVAL_S = 0.0005
"""Longest that the WAL's writer thread waits for a busy event loop: a tenth of the default, about one fsync."""


async def serve(
    settings: Settings,
    database_url: str,
    *,
    accept_lost_wal: bool = False,
    own_port: int | None = None,
    on_ready: Callable[[str], None],
    on_stop: Callable[[], None],
) -> int:
    """Run the service until a signal that stops a process (docs/runbook.md, Stopping) or a failure of the node; returns
    the exit code.

    With ``own_port`` the port is shared with other nodes, and this one listens there on loopback too. ``on_ready`` is
    called with the base URL once requests are answered, ``on_stop`` when it is time to stop.

    Raises:
        LedgerError: the start was refused.
    """
    # Objects alive now live until the end: the collector need not scan them, nor run every few hundred objects.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    signalled = asyncio.Event()

    def asked_to_stop() -> None:
        signalled.set()
        on_stop()

    stop_signals.handle(asked_to_stop)
    async with contextlib.AsyncExitStack() as stack:
        entered = await stop_signals.unless(
            signalled, stack.enter_async_context(running(settings, database_url, accept_lost_wal=accept_lost_wal))
        )
        if entered is None:
            log.info("stopped_while_starting")
            return 0
        service, services = entered
        url, serving = await stack.enter_async_context(listening(services, own_port))
        on_ready(url)
        await stop_signals.ended_or_set(serving, signalled, service.lifecycle.stop_requested)
        on_stop()
        service.lifecycle.begin_stop()
        log.info("stopping", node_id=service.node.node_id)
    return 0 if service.node.failure is None else 1

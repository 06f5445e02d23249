"""``tally serve --nodes N``: nodes of one ledger on one machine, each a process of its own, behind one port.

A child has its own data folder and its own address on loopback. It shares a pair of sockets with its parent, to report
that it is ready, and to notice that the parent is gone. A child that ends after it was ready is restarted. If the first
start of a child is refused, all end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from app.runtime.settings.config import Settings
from ledger.errors import ConfigurationError, StartRefusedError
from ledger.exit_code import ExitCode
from terminal import stop_signals

PAUSE_MIN_S, PAUSE_MAX_S = 1.0, 30.0
"""Pause before a restart of a node; doubled each time that the node was not ready."""
STOP_MARGIN_S = 10.0
"""How much longer than ``shutdown_grace`` a node may take to end before it is killed."""

log = structlog.get_logger()


async def run(settings: Settings, count: int) -> int:
    """Keep ``count`` nodes running until a signal that stops a process (docs/runbook.md, Stopping), or until the first
    start of one is refused; the exit code.

    The first starts alone, so that its key becomes the root of a new ledger.

    Raises:
        ConfigurationError: a setting is that of one node.
        StartRefusedError: the port is in use.
    """
    if settings.gate is not None:
        raise ConfigurationError("gate is that of one node: leave it out with --nodes, each node makes its own")
    stop = asyncio.Event()
    stop_signals.handle(stop.set)
    with _reserved(settings) as port:
        nodes = [_Node(settings, number, port, stop) for number in range(1, count + 1)]
        first = asyncio.create_task(nodes[0].keep_running())
        await stop_signals.ended_or_set(first, nodes[0].ready, stop)
        others = () if stop.is_set() else (node.keep_running() for node in nodes[1:])
        codes: list[int] = await asyncio.gather(first, *others)
    return max(codes)


class _Node:
    """One node and its present process. ``ready`` is set once its first process was ready."""

    def __init__(self, settings: Settings, number: int, port: int, stop: asyncio.Event) -> None:
        self.ready = asyncio.Event()
        self._number = number
        self._environment = dict(os.environ) | environment_of(settings, number, port)
        self._own_port = port + number if settings.listen_port else 0
        self._stop = stop
        self._end_s = settings.shutdown_grace.total_seconds() + STOP_MARGIN_S

    async def keep_running(self) -> int:
        """Run it until all are to stop; returns the exit code of its last process."""
        pause_s = PAUSE_MIN_S
        while True:
            code, was_ready = await self._run()
            if self._stop.is_set():
                return code
            if not self.ready.is_set():
                log.error("node_start_refused", node=self._number, exit_code=code)
                self._stop.set()
                return code or ExitCode.COULD_NOT_RUN
            pause_s = PAUSE_MIN_S if was_ready else min(2 * pause_s, PAUSE_MAX_S)
            log.warning("node_ended", node=self._number, exit_code=code, again_in_s=pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
                return ExitCode.FINE

    async def _run(self) -> tuple[int, bool]:
        """Run one process to its end; returns its exit code, 1 if a signal killed it, and whether it had been ready."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "cli", "serve"),
                *("--parent", str(theirs.fileno()), "--own-port", str(self._own_port)),
                env=self._environment,
                pass_fds=(theirs.fileno(),),
            )
            theirs.close()
            log.info("node_started", node=self._number, pid=process.pid)
            stopping = asyncio.create_task(self._end(process))
            try:
                if was_ready := bool(await asyncio.get_running_loop().sock_recv(ours, 1)):
                    self.ready.set()
                code = await process.wait()
            finally:
                stopping.cancel()
        return code if code >= 0 else ExitCode.COULD_NOT_RUN, was_ready

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End the process once all are to stop."""
        await self._stop.wait()
        process.terminate()
        await asyncio.sleep(self._end_s)
        log.error("node_killed", node=self._number, after_s=self._end_s)
        process.kill()


def environment_of(settings: Settings, number: int, port: int) -> dict[str, str]:
    """The settings of one of several nodes that differ, as environment variables.

    Folders are ``nodes/1`` and so on below those of the settings, a node id that was given gets ``-1``. All nodes share
    one master key of private fields.
    """
    below = Path("nodes", str(number))
    changed = {
        "DATA_DIR": settings.data_dir / below,
        "WAL__DIR": settings.wal.dir and settings.wal.dir / below,
        "STATS__DIR": settings.stats.dir and settings.stats.dir / below,
        "NODE_ID": settings.node_id and f"{settings.node_id}-{number}",
        "PRIVACY__MASTER_KEY_URI": settings.privacy_master_key_uri,
        "PORT": port,
    }
    return {f"TALLY_{name}": str(value) for name, value in changed.items() if value is not None}


@contextmanager
def _reserved(settings: Settings) -> Iterator[int]:
    """The port that the nodes share. It is bound here too, without a listener, so that it stays ours while no node
    runs."""
    family = socket.AF_INET6 if ":" in settings.http.host else socket.AF_INET
    try:
        with socket.create_server((settings.http.host, settings.listen_port), family=family) as free:
            port: int = free.getsockname()[1]
        with socket.socket(family) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((settings.http.host, port))
            yield port
    except OSError as error:
        raise StartRefusedError(
            f"cannot listen on {settings.http.host}:{settings.listen_port}: {error.strerror}; TALLY_PORT moves it"
        ) from error

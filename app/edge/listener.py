"""The HTTP server of a node: uvicorn in this event loop, on a socket of ours, with connections of ours."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from app.edge.accepted import Services
from app.edge.application import create_app
from app.edge.connection.deadlines import DESCRIPTORS_RESERVED, ConnectionBounds, connections_allowed
from app.edge.connection.heads import ServedNames, TrustedProxies
from app.edge.connection.protocol import ProblemProtocol
from app.edge.connection.tls import TlsConnection
from app.edge.fast_path import FastPath, HeaderCache
from app.read.copies import CONNECTIONS_MAX as REPLICA_CONNECTIONS_MAX
from app.runtime.logs import log
from app.runtime.settings.config import Settings
from app.runtime.state.node import Node
from app.share.exchange import Regions
from app.share.watch import Watchers
from app.trust.tls import ServerTls
from ledger.errors import StartRefusedError

OPEN_REQUESTS_SHARE = 0.5
"""Part of ``shutdown_grace`` for open requests; the rest is for the backlog."""
LISTEN_BACKLOG = 2048
LOOPBACK = "127.0.0.1"
TICKS_A_LOOK = 3
"""Tenths of a second between checks of connections for stalled clients."""
CONNECTIONS_A_LOOK = 512
"""About how many connections each check covers; more take turns."""


class Server(uvicorn.Server):
    """Uvicorn without its own signal handling: the service decides when to stop. It ends stalled connections."""

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; true ends the server."""
        if counter % TICKS_A_LOOK == 0:
            now_s = asyncio.get_running_loop().time()
            connections = tuple(self.server_state.connections)
            turns = 1 + len(connections) // CONNECTIONS_A_LOOK
            for connection in connections[counter // TICKS_A_LOOK % turns :: turns]:
                connection.look(now_s)  # type: ignore[union-attr]
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def connection_bounds(settings: Settings) -> ConnectionBounds:
    """The bounds in the settings. The limit of open files is raised for ``http.connections_max``, which is lowered to
    fit it.

    Raises:
        StartRefusedError: this process may open too few files.
    """
    reserved = DESCRIPTORS_RESERVED + len(settings.database_replica_urls) * REPLICA_CONNECTIONS_MAX
    wanted = settings.http.connections_max
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + reserved and soft < hard:
        soft = min(wanted + reserved, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = connections_allowed(wanted, soft, reserved)
    if allowed < wanted:
        log.warning("connections_limited", connections_max=allowed, wanted=wanted, descriptors=soft, reserved=reserved)
    return ConnectionBounds(
        allowed, settings.http.header_timeout.total_seconds(), settings.http.body_timeout.total_seconds()
    )


def _protocol_for(services: Services) -> Callable[..., asyncio.Protocol]:
    """The factory of the protocols of connections."""
    settings: Settings = services[Settings]
    bounds: ConnectionBounds = services[ConnectionBounds]
    tls: ServerTls | None = services[ServerTls | None]
    served = partial(
        ProblemProtocol,
        bounds=bounds,
        names=ServedNames(settings.http.host, settings.http.hosts),
        fast_path=FastPath(services),
        header_cache=HeaderCache(),
        proxies=TrustedProxies(settings.http.trusted_proxies) if settings.http.trusted_proxies else None,
    )

    def secured(tls: ServerTls, **given: Any) -> TlsConnection:
        # The current context: certificates are replaced while the node runs.
        return TlsConnection(served(**given), tls.context, bounds)

    return served if tls is None else partial(secured, tls)


def _listener(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A listening socket; one that ``is_shared`` is one of several on this port, among which connections are spread.

    Raises:
        StartRefusedError: the port is in use, or not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG, reuse_port=is_shared)
    except OSError as error:
        raise StartRefusedError(f"cannot listen on {host}:{port}: {error.strerror}; TALLY_PORT moves it") from error
    # Inherited by every connection; else the second piece of an answer may wait 40 ms for the caller's delayed ACK.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


@contextlib.asynccontextmanager
async def listening(services: Services, own_port: int | None = None) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """The HTTP server over ``services``: its base URL and its task; leaving ends it once open requests are answered.

    With ``own_port`` the port is shared with other nodes, and the node listens there on loopback too.
    """
    settings: Settings = services[Settings]
    node: Node = services[Node]
    listeners = [_listener(settings.http.host, settings.listen_port, is_shared=own_port is not None)]
    if own_port is not None:
        listeners.append(_listener(LOOPBACK, own_port))
    server = Server(
        uvicorn.Config(
            create_app(services),
            http=_protocol_for(services),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            # Uvicorn would believe any client on this machine; the connection asks http.trusted_proxies.
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, math.ceil(settings.shutdown_grace.total_seconds() * OPEN_REQUESTS_SHARE)),
        )
    )
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=listeners))
    scheme = "http" if services[ServerTls | None] is None else "https"
    for own in listeners[1:]:
        log.info("own_address", node_id=node.node_id, url=_url(scheme, own))
    try:
        yield _url(scheme, listeners[0]), serving
    finally:
        node.stop_accepting()
        services[Watchers].close()
        services[Regions].news.end()
        server.should_exit = True
        await asyncio.wait((serving,))
        for listener in listeners:
            listener.close()


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

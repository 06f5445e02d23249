"""Serving a baseline application exactly as ``app.main`` serves the service."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from types import SimpleNamespace

import uvicorn
from fastapi import FastAPI

from app.access.rights import everyone_may
from app.config import Settings
from app.main import GC_ALLOCATIONS, LISTEN_BACKLOG, Server, protocol_for
from app.metrics import Metrics


async def serve(app: FastAPI) -> None:
    """Serve ``app`` on a free port until SIGTERM, and say where."""
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)
    listener = socket.create_server(("127.0.0.1", 0), backlog=LISTEN_BACKLOG)
    protocol = protocol_for(Settings())
    server = Server(
        uvicorn.Config(app, http=protocol, log_config=None, access_log=False, lifespan="off")  # type: ignore[arg-type]
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))
    print(f"answers at http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    await server.serve(sockets=[listener])


def application() -> FastAPI:
    """An application with the service's middleware and without routes."""
    from app.background.slots import Room
    from app.http.middleware import Observed

    app = FastAPI(redirect_slashes=False)
    # All of the service's parts that its routes ask for: the right of every request.
    app.state.parts = SimpleNamespace(authorize=everyone_may)
    app.add_middleware(Observed, metrics=Metrics(), bodies=Room(0, "bodies"))
    return app

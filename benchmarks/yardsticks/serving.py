"""Serving an application as uvicorn's documentation says: uvloop, httptools, no access log."""

from __future__ import annotations

import signal
import socket
import sys

import uvicorn
from fastapi import FastAPI


def serve(app: FastAPI) -> None:
    """Serve ``app`` on a free port until SIGTERM, and say where."""
    # uvicorn raises the signal again once all is answered.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"answers at http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_config=None, access_log=False)
    uvicorn.Server(config).run(sockets=[listener])

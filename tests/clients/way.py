"""A way to a service on which requests are seen, and answers may be lost or be others than those of the service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

import httpx

PATIENCE_S = 60.0
LOST = None
"""In place of an answer: the request arrives, and nothing comes back."""


class Seen(NamedTuple):
    """A request that came by."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """An answer that is none of the service's."""

    status: int
    headers: dict[str, str]
    body: bytes


def problem(status: int, kind: str, reason: str | None = None, **headers: str) -> Answer:
    """A problem as the service tells it."""
    body = {"type": f"https://tallystick.dev/problems/{kind}", "title": kind, "status": status, "detail": "as it is"}
    if reason is not None:
        body["reason"] = reason
    return Answer(status, {"Content-Type": "application/problem+json", **headers}, json.dumps(body).encode())


class Way(ThreadingHTTPServer):
    """Leads to ``service``, if any. ``instead`` are what the next requests are answered with in its place."""

    daemon_threads = True

    def __init__(self, service: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.service = service
        self.instead: list[Answer | None] = []
        self.closed = False
        """Whether requests are dropped before they arrive."""
        self.seen: list[Seen] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Forward(BaseHTTPRequestHandler):
    server: Way

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.closed:
            return
        self.server.seen.append(Seen(self.command, self.path, dict(self.headers), body))
        instead = self.server.instead.pop(0) if self.server.instead else ()
        if instead is LOST:
            self._ask(body)
        elif instead == ():
            self._tell(self._ask(body))
        else:
            self._tell(instead)

    def _ask(self, body: bytes) -> Answer:
        headers = {name: value for name, value in self.headers.items() if name not in ("Host", "Connection")}
        url = f"{self.server.service}{self.path}"
        answer = httpx.request(self.command, url, content=body, headers=headers, timeout=PATIENCE_S)
        return Answer(answer.status_code, dict(answer.headers), answer.content)

    def _tell(self, answer: Any) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "date", "server", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def way_to(service: str | None) -> Iterator[Way]:
    """A way that is open until the end."""
    with Way(service) as way:
        thread = Thread(target=way.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield way
        finally:
            way.shutdown()
            thread.join()

"""How answers leave a connection: in one piece where all is there, at once where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from app.edge.connection.deadlines import ConnectionBounds
from app.edge.connection.heads import ServedNames
from app.edge.connection.protocol import ProblemProtocol
from tests.app import chains

NAMES = ServedNames("127.0.0.1", ())
BOUNDS = ConnectionBounds(1000, 60.0, 60.0)


class Pieces(asyncio.Transport):
    """A connection that keeps what is written, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data:
            self.pieces.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        return

    def is_closing(self) -> bool:
        return self.closed

    def resume_reading(self) -> None:
        return

    def pause_reading(self) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return 0

    def whole(self, ends_with: bytes) -> bool:
        return b"".join(self.pieces).endswith(ends_with)


async def plain(request: Request) -> Response:
    return PlainTextResponse(request.query_params.get("say", "hello"))


async def fails_behind_its_head(request: Request) -> Response:
    class Failing(PlainTextResponse):
        async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            raise RuntimeError("too late for another answer")

    return Failing("hello")


async def empty(request: Request) -> Response:
    return Response(status_code=200)


async def streamed(request: Request) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield b"first"
        await request.app.state.may_go_on.wait()
        yield b"last"

    async def waiting() -> AsyncIterator[bytes]:
        await request.app.state.may_begin.wait()
        async for piece in body():
            yield piece

    return StreamingResponse(waiting())


@pytest.fixture
def application() -> Starlette:
    endpoints = {"/": plain, "/fails": fails_behind_its_head, "/empty": empty, "/streamed": streamed}
    app = Starlette(routes=[Route(path, endpoint, methods=["GET", "HEAD"]) for path, endpoint in endpoints.items()])
    app.state.may_begin, app.state.may_go_on = asyncio.Event(), asyncio.Event()
    return app


def connected(application: Starlette) -> tuple[ProblemProtocol, Pieces]:
    """A connection to ``application``."""
    config = uvicorn.Config(application, log_config=None, access_log=False, lifespan="off")
    config.load()
    protocol, transport = (
        ProblemProtocol(config=config, server_state=ServerState(), app_state={}, bounds=BOUNDS, names=NAMES),
        Pieces(),
    )
    protocol.connection_made(transport)
    return protocol, transport


async def until(holds: Callable[[], object]) -> None:
    await chains.until(holds, "the connection comes to it", 30)


def asking(path: str, method: str = "GET", more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n".encode()


async def test_an_answer_that_is_there_leaves_in_one_piece_each_time(application: Starlette) -> None:
    protocol, transport = connected(application)
    for count in (1, 2):
        protocol.data_received(asking("/"))
        await until(lambda: transport.whole(b"hello"))
        assert len(transport.pieces) == count
        assert transport.pieces[-1].startswith(b"HTTP/1.1 200 OK\r\n")
        transport.pieces[-1] = b""


async def test_requests_sent_behind_each_other_are_answered_in_their_order(application: Starlette) -> None:
    protocol, transport = connected(application)
    protocol.data_received(asking("/?say=one") + asking("/", "HEAD") + asking("/?say=three"))
    await until(lambda: transport.whole(b"three"))
    assert [piece.split(b"\r\n\r\n")[1] for piece in transport.pieces] == [b"one", b"", b"three"]


@pytest.mark.parametrize(("path", "method"), [("/", "HEAD"), ("/empty", "GET"), ("/empty", "HEAD")])
@pytest.mark.parametrize("more", ["", "connection: close\r\n"])
async def test_a_head_without_a_body_leaves_too(application: Starlette, path: str, method: str, more: str) -> None:
    protocol, transport = connected(application)
    protocol.data_received(asking(path, method, more))
    await until(lambda: transport.whole(b"\r\n\r\n"))
    assert transport.closed == bool(more)


async def test_the_head_of_a_stream_waits_for_nothing(application: Starlette) -> None:
    protocol, transport = connected(application)
    protocol.data_received(asking("/streamed"))
    await until(lambda: transport.whole(b"\r\n\r\n"))
    application.state.may_begin.set()
    await until(lambda: transport.whole(b"5\r\nfirst\r\n"))
    application.state.may_go_on.set()
    await until(lambda: transport.whole(b"4\r\nlast\r\n0\r\n\r\n"))


async def test_a_head_whose_body_failed_leaves_before_the_connection_closes(application: Starlette) -> None:
    protocol, transport = connected(application)
    protocol.data_received(asking("/fails"))
    await until(lambda: transport.closed)
    assert b"content-length: 5\r\n" in b"".join(transport.pieces)

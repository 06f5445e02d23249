"""Requests to other servers over HTTP/1.1: the cost of one request, and answers read within bounds.

Invariants, for each answer::

    interim heads (1xx) <= INTERIM_HEADS_MAX
    bytes of a head     <= HEAD_BYTES_MAX        lines of a head <= HEAD_LINES_MAX
    reads               <= PIECES_FREE + bytes / PIECE_BYTES_MIN
    bytes of the body   <= bytes_max of the request; RATE_BYTES_MIN of them, or the end, in each RATE_WINDOW_S
    chunks of the body  <= PIECES_FREE + bytes / PIECE_BYTES_MIN
    redirects followed  = bodies decompressed = 0

A short answer is whole within ``within_s``. A long one begins within ``within_s`` and ends ``all_within_s`` later.
Errors name the server.

The parser below (h11, by httpcore) parses all bytes of one read before any other task runs: 64 KiB of interim heads
take 150 ms. So it is given one head at a time. The cost of TLS is bounded by the time of a request alone.
"""

# ruff: noqa: ASYNC109 (the interface of httpcore has these timeouts)

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx
import orjson

from ledger.errors import LedgerError, reported_as
from ledger.text import printable

RATE_WINDOW_S: Final = 20.0
RATE_BYTES_MIN: Final = 128 * 1024
PROBLEM_BYTES_MAX: Final = 16 * 1024
DETAIL_CHARACTERS_MAX: Final = 500
"""Characters repeated of what a server says about a request that it refuses."""
NO_ANSWER: Final = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
"""Errors of ``httpx`` when there is no answer; also when a redirect names no valid address, which ``httpx`` parses
although it is not followed."""


class NoAnswerError(LedgerError):
    """Another server does not answer, or not as requested."""

    def __init__(
        self, message: str, *, status: int | None = None, refusal: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """``status`` is that of an answer which is no 200, ``refusal`` the problem (RFC 9457) in it."""
        super().__init__(message)
        self.status, self.refusal = status, refusal


def client_of(
    context: ssl.SSLContext, *, timeout_s: float | None, has_proxies: bool = False, **given: Any
) -> httpx.AsyncClient:
    """A client whose answers have the bounds of this module. ``timeout_s`` is for each step of a request; with
    ``has_proxies`` it uses the proxies of the environment."""
    return httpx.AsyncClient(
        transport=BoundedTransport(context, has_proxies), timeout=timeout_s, trust_env=False, **given
    )


class Reply(NamedTuple):
    """An answer of any final status, whole."""

    status: int
    headers: httpx.Headers
    body: bytes


async def read_answer(
    client: httpx.AsyncClient, method: str, url: str, *, bytes_max: int, within_s: float, **asked: Any
) -> bytes:
    """The body of the answer to the request that ``asked`` describes, in the arguments of ``httpx``.

    Raises:
        NoAnswerError: there is no answer within ``within_s``, its status is not 200, or it is over a bound.
    """
    request = _request(client, method, url, asked)
    return (await _whole(request, _answer(client, request), bytes_max, within_s)).body


async def read_reply(
    client: httpx.AsyncClient, method: str, url: str, *, bytes_max: int, within_s: float, **asked: Any
) -> Reply:
    """The same of any status, for a protocol that gives meaning to others than 200.

    Raises:
        NoAnswerError: there is no answer within ``within_s``, or it is over a bound.
    """
    request = _request(client, method, url, asked)
    return await _whole(request, _reply(client, request), bytes_max, within_s)


async def _whole(
    request: httpx.Request, answering: AbstractAsyncContextManager[httpx.Response], bytes_max: int, within_s: float
) -> Reply:
    try:
        async with asyncio.timeout(within_s), answering as answer:
            body = b"".join([piece async for piece in pieces_of(answer, bytes_max=bytes_max)])
            return Reply(answer.status_code, answer.headers, body)
    except TimeoutError:
        raise NoAnswerError(f"{_place(request)} has not answered all within {within_s:g} s") from None


async def stream_answer(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    bytes_max: int,
    within_s: float,
    all_within_s: float,
    **asked: Any,
) -> AsyncGenerator[bytes, None]:
    """The same in pieces. The time that the caller takes between them is not counted.

    Raises:
        NoAnswerError: as above, or the body has not ended within ``all_within_s``.
    """
    request = _request(client, method, url, asked)
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(within_s):
                answer = await stack.enter_async_context(_answer(client, request))
        except TimeoutError:
            raise NoAnswerError(f"{_place(request)} does not answer within {within_s:g} s") from None
        async for piece in pieces_of(answer, bytes_max=bytes_max, all_within_s=all_within_s):
            yield piece


def _request(client: httpx.AsyncClient, method: str, url: str, asked: dict[str, Any]) -> httpx.Request:
    headers = {"Accept-Encoding": "identity", **asked.pop("headers", {})}
    with reported_as(NoAnswerError, f"{url} cannot be asked", *NO_ANSWER):
        return client.build_request(method, url, headers=headers, **asked)


@asynccontextmanager
async def _reply(client: httpx.AsyncClient, request: httpx.Request) -> AsyncIterator[httpx.Response]:
    try:
        answer = await client.send(request, stream=True, follow_redirects=False)
    except NO_ANSWER as error:
        raise NoAnswerError(f"{_place(request)} does not answer: {reason_of(error)}") from error
    async with aclosing(answer):
        yield answer


@asynccontextmanager
async def _answer(client: httpx.AsyncClient, request: httpx.Request) -> AsyncIterator[httpx.Response]:
    async with _reply(client, request) as answer:
        if answer.status_code != httpx.codes.OK:
            problem = await _problem(answer)
            raise NoAnswerError(
                f"{_place(request)} answers {answer.status_code}{_detail(problem)}",
                status=answer.status_code,
                refusal=problem,
            )
        yield answer


async def _problem(answer: httpx.Response) -> dict[str, Any]:
    """The problem (RFC 9457) in an answer; empty if it is none."""
    if answer.headers.get("content-type", "").partition(";")[0] != "application/problem+json":
        return {}
    try:
        said = orjson.loads(b"".join([piece async for piece in pieces_of(answer, bytes_max=PROBLEM_BYTES_MAX)]))
    except (NoAnswerError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _detail(problem: Mapping[str, Any]) -> str:
    """What a problem says, as the end of a message."""
    said = problem.get("detail")
    return f": {printable(said[:DETAIL_CHARACTERS_MAX])}" if isinstance(said, str) else ""


def _place(request: httpx.Request) -> str:
    return str(request.url.copy_with(query=None))


def retry_after_s(value: str | None, now_s: float) -> float:
    """The seconds that ``Retry-After`` asks for: a number, or a date (RFC 9110, 10.2.3), compared with ``now_s``, the
    time since the epoch. 0 if it is neither."""
    text = (value or "").strip(" \t")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() - now_s)


def reason_of(error: Exception) -> str:
    """The text of an error of ``NO_ANSWER``, or its class if it has none."""
    return str(error) or type(error).__name__


async def pieces_of(
    answer: httpx.Response, *, bytes_max: int, all_within_s: float | None = None
) -> AsyncGenerator[bytes, None]:
    """The body of an answer in pieces, as they come.

    Raises:
        NoAnswerError: it is longer than ``bytes_max``, slower than the module says, has not ended within
            ``all_within_s``, or ends where it should not.
    """
    loop = asyncio.get_running_loop()
    ends_s = None if all_within_s is None else loop.time() + all_within_s
    window_ends_s = loop.time() + RATE_WINDOW_S
    length = pieces = in_window = 0
    body = answer.aiter_raw()
    assert isinstance(body, AsyncGenerator)
    async with aclosing(body):
        while True:
            # 1. the next piece
            until_s = window_ends_s if ends_s is None else min(window_ends_s, ends_s)
            try:
                async with asyncio.timeout_at(until_s):
                    piece = await anext(body, None)
            except TimeoutError:
                if ends_s is not None and until_s == ends_s:
                    raise NoAnswerError(
                        f"{_place(answer.request)} has not sent all within {all_within_s:g} s"
                    ) from None
                rate = f"{RATE_BYTES_MIN} bytes in {RATE_WINDOW_S:g} s"
                raise NoAnswerError(f"{_place(answer.request)} sends too slowly: less than {rate}") from None
            except NO_ANSWER as error:
                raise NoAnswerError(f"{_place(answer.request)} breaks off: {reason_of(error)}") from error
            if piece is None:
                return
            # 2. within bounds
            length, pieces, in_window = length + len(piece), pieces + 1, in_window + len(piece)
            if length > bytes_max:
                raise NoAnswerError(f"{_place(answer.request)} answers more than {bytes_max} bytes")
            if pieces > PIECES_FREE + length / PIECE_BYTES_MIN:
                raise NoAnswerError(f"{_place(answer.request)} sends chunks of less than {PIECE_BYTES_MIN} bytes")
            if in_window >= RATE_BYTES_MIN:
                in_window, window_ends_s = 0, loop.time() + RATE_WINDOW_S
            # 3. to the caller, whose time is not the server's
            given_s = loop.time()
            yield piece
            taken_s = loop.time() - given_s
            window_ends_s += taken_s
            ends_s = None if ends_s is None else ends_s + taken_s


INTERIM_HEADS_MAX: Final = 8
"""Answers of 100 to 199 before the final one."""
HEAD_BYTES_MAX: Final = 32 * 1024
HEAD_LINES_MAX: Final = 128
PIECES_FREE: Final = 256
"""Reads that may return any number of bytes: a head or a short answer takes a few."""
PIECE_BYTES_MIN: Final = 256
"""Average bytes of the other reads: each costs the event loop a turn."""
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""This machine, which is never reached through a proxy."""
KEEPALIVE_S: Final = 5.0
"""How long an idle connection is kept."""

_READ_BYTES: Final = 64 * 1024


@dataclass(eq=False)
class BoundedTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 over connections that bound the heads of answers."""

    _context: ssl.SSLContext
    _has_proxies: bool
    """Whether it uses the proxies of the environment (``HTTPS_PROXY``, ``ALL_PROXY``, ``NO_PROXY``)."""
    _pools: dict[str | None, httpcore.AsyncConnectionPool] = field(default_factory=dict)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        target = httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        with _as_httpx():
            answer = await self._pool_for(request.url).handle_async_request(
                httpcore.Request(
                    method=request.method,
                    url=target,
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_Body(answer), extensions=dict(answer.extensions)
        )

    async def aclose(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()

    def _pool_for(self, url: httpx.URL) -> httpcore.AsyncConnectionPool:
        proxy = None
        if self._has_proxies and url.host not in LOOPBACK and not proxy_bypass(url.host):
            proxies = getproxies()
            proxy = proxies.get(url.scheme) or proxies.get("all")
        if proxy not in self._pools:
            self._pools[proxy] = self._new_pool(url.scheme, proxy)
        return self._pools[proxy]

    def _new_pool(self, scheme: str, proxy: str | None) -> httpcore.AsyncConnectionPool:
        if proxy is None:
            return httpcore.AsyncConnectionPool(
                ssl_context=self._context, network_backend=_Backend(), keepalive_expiry=KEEPALIVE_S
            )
        try:
            found = httpx.Proxy(proxy if "://" in proxy else f"http://{proxy}")
        except (ValueError, httpx.InvalidURL):
            found = None
        if found is None or found.url.scheme not in ("http", "https"):
            # Its URL may contain a password.
            raise httpx.UnsupportedProtocol(f"the proxy of the environment for {scheme} is no HTTP proxy") from None
        return httpcore.AsyncHTTPProxy(
            proxy_url=httpcore.URL(
                scheme=found.url.raw_scheme,
                host=found.url.raw_host,
                port=found.url.port,
                target=found.url.raw_path,
            ),
            proxy_auth=found.raw_auth,
            ssl_context=self._context,
            network_backend=_Backend(),
            keepalive_expiry=KEEPALIVE_S,
        )


@dataclass(eq=False)
class _Body(httpx.AsyncByteStream):
    """The body of an answer, whose errors are those of ``httpx``."""

    _answer: httpcore.Response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx():
            async for piece in self._answer.aiter_stream():
                yield piece

    async def aclose(self) -> None:
        await self._answer.aclose()


@contextmanager
def _as_httpx() -> Iterator[None]:
    """Translate errors of ``httpcore`` to those of ``httpx``, which have the same names."""
    try:
        yield
    except (
        httpcore.TimeoutException,
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.ProxyError,
        httpcore.UnsupportedProtocol,
    ) as error:
        kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__)
        raise kind(str(error)) from error


class _Backend(httpcore.AnyIOBackend):
    """Opens connections whose streams are bounded."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return BoundedStream(await super().connect_tcp(host, port, timeout, local_address, socket_options))


class BoundedStream(httpcore.AsyncNetworkStream):
    """A connection that gives the parser one head of an answer at a time, and no byte after the body.

    The parser takes bytes after one answer for the start of the next. So a connection whose answer stated no length, or
    had more bytes than stated, reports itself as readable when idle, and the pool closes it.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._ahead = b""
        """Bytes read, and not given to the parser yet."""
        self._is_head = True
        self._body_left: int | None = None
        """Bytes of the body that the parser lacks; None if the head does not say."""
        self._heads = self._reads = self._length = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._is_head:
            return await self._next_head(timeout)
        data = self._ahead or await self._more(timeout)
        count = min(max_bytes, len(data), len(data) if self._body_left is None else self._body_left)
        self._ahead = data[count:]
        if self._body_left is not None:
            self._body_left -= count
        return data[:count]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # Nothing is read before a request is written whole.
        self._is_head = True
        self._heads = self._reads = self._length = 0
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return BoundedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        is_readable = info == "is_readable" and (self._ahead or self._body_left is None)
        return True if is_readable else self._stream.get_extra_info(info)

    async def _next_head(self, timeout: float | None) -> bytes:
        """The next whole head; its beginning if the connection ends in it."""
        seen = 0
        while (end := _head_end(self._ahead, seen)) is None:
            seen = end = len(self._ahead)
            data = await self._more(timeout) if seen <= HEAD_BYTES_MAX else b""
            if not data:
                break
            self._ahead += data
        head, self._ahead = self._ahead[:end], self._ahead[end:]
        if len(head) > HEAD_BYTES_MAX:
            raise httpcore.RemoteProtocolError(f"the head of the answer is longer than {HEAD_BYTES_MAX} bytes")
        if head.count(b"\n") > HEAD_LINES_MAX:
            raise httpcore.RemoteProtocolError(f"the head of the answer has more than {HEAD_LINES_MAX} lines")
        status = head.partition(b"\n")[0].partition(b" ")[2][:3]
        # 101 leaves HTTP (RFC 9110, 15.2.2): no other head follows.
        self._is_head = status.startswith(b"1") and status != b"101"
        self._body_left = _body_length(status, head)
        self._heads += self._is_head
        if self._heads > INTERIM_HEADS_MAX:
            raise httpcore.RemoteProtocolError(f"more than {INTERIM_HEADS_MAX} interim answers (1xx)")
        return head

    async def _more(self, timeout: float | None) -> bytes:
        data = await self._stream.read(_READ_BYTES, timeout)
        self._reads += 1
        self._length += len(data)
        if self._reads > PIECES_FREE + self._length / PIECE_BYTES_MIN:
            raise httpcore.RemoteProtocolError(f"the answer comes in pieces of less than {PIECE_BYTES_MIN} bytes")
        return data


def _head_end(data: bytes, seen: int) -> int | None:
    """The end of the head at the start of ``data``, after its empty line; None if there is no empty line. The bytes up
    to ``seen`` contain none."""
    ends = [at + len(mark) for mark in (b"\n\r\n", b"\n\n") if (at := data.find(mark, max(0, seen - 2))) >= 0]
    return min(ends, default=None)


def _body_length(status: bytes, head: bytes) -> int | None:
    """How many bytes follow the head (RFC 9112, 6.3); None if it names no length, or may name two."""
    if status == b"204":
        return 0
    lines = [line.partition(b":") for line in head.lower().split(b"\n")[1:]]
    if any(name.startswith((b" ", b"\t")) or name == b"transfer-encoding" for name, _, _ in lines):
        return None
    lengths = [value.strip() for name, _, value in lines if name == b"content-length"]
    return int(lengths[0]) if len(lengths) == 1 and re.fullmatch(rb"[0-9]{1,18}", lengths[0]) else None

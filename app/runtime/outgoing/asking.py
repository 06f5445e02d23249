"""Other servers, asked over HTTP: what one request to them may cost, and their answers, read within bounds.

Invariants, for each answer, besides those of its head (``app.runtime.outgoing.bounded_transport``)::

    bytes of the body   <= bytes_max of the request; RATE_BYTES_MIN of them, or the end, in each RATE_WINDOW_S
    chunks of the body  <= PIECES_FREE + bytes / PIECE_BYTES_MIN
    redirects followed  = bodies decompressed = 0

A short answer is whole within ``within_s``. A long one begins within ``within_s`` and ends ``all_within_s`` later. The
error names the server that was asked.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx

from app.runtime.outgoing.bounded_transport import PIECE_BYTES_MIN, PIECES_FREE, BoundedTransport
from ledger.errors import LedgerError

RATE_WINDOW_S: Final = 20.0
RATE_BYTES_MIN: Final = 128 * 1024
NO_ANSWER: Final = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
"""What ``httpx`` raises where there is no answer; also where one leads to what is no address, for it reads that though
nobody goes there."""


class NoAnswerError(LedgerError):
    """Another server does not answer, or with something else than it was asked for."""


def client_of(
    context: ssl.SSLContext, *, timeout_s: float | None, has_proxies: bool = False, **given: Any
) -> httpx.AsyncClient:
    """A client whose answers are bounded as the modules say. ``timeout_s`` is for each step of a request; with
    ``has_proxies`` it asks through those of the environment."""
    transport = BoundedTransport(context, has_proxies=has_proxies)
    return httpx.AsyncClient(transport=transport, timeout=timeout_s, trust_env=False, **given)


async def read_answer(
    client: httpx.AsyncClient, method: str, url: str, *, bytes_max: int, within_s: float, **asked: Any
) -> bytes:
    """The body of the answer to what ``asked`` contains, as ``httpx`` takes it.

    Raises:
        NoAnswerError: there is none within ``within_s``, or not with 200, or beyond a bound.
    """
    request = _request(client, method, url, asked)
    try:
        async with asyncio.timeout(within_s), _answer(client, request) as answer:
            return b"".join([piece async for piece in pieces_of(answer, bytes_max=bytes_max)])
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
    try:
        return client.build_request(method, url, headers=headers, **asked)
    except NO_ANSWER as error:
        raise NoAnswerError(f"{url} cannot be asked: {reason_of(error)}") from error


@asynccontextmanager
async def _answer(client: httpx.AsyncClient, request: httpx.Request) -> AsyncIterator[httpx.Response]:
    try:
        answer = await client.send(request, stream=True, follow_redirects=False)
    except NO_ANSWER as error:
        raise NoAnswerError(f"{_place(request)} does not answer: {reason_of(error)}") from error
    async with aclosing(answer):
        if answer.status_code != httpx.codes.OK:
            raise NoAnswerError(f"{_place(request)} answers {answer.status_code}")
        yield answer


def _place(request: httpx.Request) -> str:
    return str(request.url.copy_with(query=None))


def retry_after_s(value: str | None, now_s: float) -> float:
    """The seconds that ``Retry-After`` asks for: a number of them, or a date (RFC 9110, 10.2.3), which is judged by
    ``now_s``, the time since the epoch. 0 where it says neither."""
    text = (value or "").strip(" \t")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() - now_s)


def reason_of(error: Exception) -> str:
    """What one of ``NO_ANSWER`` says, or what it is."""
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
    place = _place(answer.request)
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
                    raise NoAnswerError(f"{place} has not sent all within {all_within_s:g} s") from None
                rate = f"{RATE_BYTES_MIN} bytes in {RATE_WINDOW_S:g} s"
                raise NoAnswerError(f"{place} sends too slowly: less than {rate}") from None
            except NO_ANSWER as error:
                raise NoAnswerError(f"{place} breaks off: {reason_of(error)}") from error
            if piece is None:
                return
            # 2. within bounds
            length, pieces, in_window = length + len(piece), pieces + 1, in_window + len(piece)
            if length > bytes_max:
                raise NoAnswerError(f"{place} answers more than {bytes_max} bytes")
            if pieces > PIECES_FREE + length / PIECE_BYTES_MIN:
                raise NoAnswerError(f"{place} sends chunks of less than {PIECE_BYTES_MIN} bytes")
            if in_window >= RATE_BYTES_MIN:
                in_window, window_ends_s = 0, loop.time() + RATE_WINDOW_S
            # 3. to the caller, whose time is not the server's
            given_s = loop.time()
            yield piece
            taken_s = loop.time() - given_s
            window_ends_s += taken_s
            ends_s = None if ends_s is None else ends_s + taken_s

"""What another server may cost that the node asks: its answers have bounds, and it is the one that is named."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from ipaddress import ip_network
from time import monotonic, thread_time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runtime import outgoing
from app.runtime.outgoing import NoAnswerError, client_of, read_answer, stream_answer
from app.share.webhooks.sending import Names, Outcome, attempt, message_of
from app.store.webhooks import Webhook
from tallystick_client.core import _seconds
from tests.app.test_webhooks import ENTRY

BYTES_MAX = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\n"
INTERIM = b"HTTP/1.1 103\r\n\r\n"
CONTEXT = ssl.create_default_context()
TURN_S_MAX = 0.05
"""Most CPU time of one turn of the event loop that an answer may cause: to parse one read of interim heads takes thrice
that."""


class Stranger:
    """A server that does what it likes with each request."""

    def __init__(self, *answers: bytes, then: bytes = b"") -> None:
        """It sends ``answers``, one for each request of a connection, and ``then`` for ever."""
        self._answers, self._then = answers, then
        self.connections = self.requests = 0
        self.sent = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for answer in self._answers:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                writer.write(answer)
                await writer.drain()
            while self._then:
                writer.write(self._then)
                self.sent += len(self._then)
                await writer.drain()
                await asyncio.sleep(0)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def strangers(*all_of: Stranger) -> AsyncIterator[list[str]]:
    """Addresses of servers that listen."""
    servers = [await asyncio.start_server(each.serve, "127.0.0.1", 0) for each in all_of]
    try:
        yield [f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}/x" for each in servers]
    finally:
        for each in servers:
            each.close()


@asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(CONTEXT, timeout_s=5) as client:
        yield client


async def read(url: str, within_s: float = 5.0) -> bytes:
    async with client() as asking_client:
        return await read_answer(asking_client, "GET", url, bytes_max=BYTES_MAX, within_s=within_s)


async def longest_turn_s(until_done: asyncio.Task[object]) -> float:
    """The most CPU time that passed meanwhile between two turns of another task of the event loop."""
    longest_s = 0.0
    # A full collection of what all tests hold takes longer than any answer.
    gc.disable()
    try:
        while not until_done.done():
            began_s = thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, thread_time() - began_s)
    finally:
        gc.enable()
    return longest_s


@pytest.mark.parametrize(
    ("answer", "then", "reason"),
    [
        (b"", INTERIM * 4096, "more than 8 interim answers"),
        (b"", b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" * 2048, "more than 8 interim answers"),
        (HEAD, b"x: y\r\n" * 1024, "longer than 32768 bytes|more than 128 lines"),
        (HEAD + b"x: ", b"y" * 4096, "longer than 32768 bytes"),
        (HEAD + b"a:\r\n" * 200 + b"Content-Length: 0\r\n\r\n", b"", "more than 128 lines"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 4096, "chunks of less than 256 bytes"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b"x" * 4096 + b"\r\n", "more than 1048576 bytes"),
        (HEAD + b"Content-Length: 1048577\r\n\r\n", b"x" * 4096, "more than 1048576 bytes"),
        (HEAD + b"Content-Length: 9\r\n\r\nx", b"", "has not answered all within 0.3 s"),
        (b"HTTP/1.1 302 Found\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n", b"", "answers 302"),
    ],
    ids=[
        *("interim", "continue", "lines without end", "a line without end", "many lines", "small chunks"),
        *("chunks without end", "long body", "body that does not end", "redirect"),
    ],
)
async def test_an_answer_beyond_a_bound_ends_at_once_and_its_server_is_named(
    answer: bytes, then: bytes, reason: str
) -> None:
    stranger = Stranger(answer, then=then)
    async with strangers(stranger) as [url]:
        asked = asyncio.create_task(read(url, within_s=0.3 if "within" in reason else 5.0))
        waited_s = await longest_turn_s(asked)
        with pytest.raises(NoAnswerError, match=reason) as raised:
            await asked
    assert url in str(raised.value)
    assert stranger.requests == 1
    assert waited_s < TURN_S_MAX


async def test_what_is_honest_is_read_whatever_its_form() -> None:
    body = b"x" * 70_000
    chunked = (
        b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:5], body[5:300], body[300:])) + b"0\r\n\r\n"
    )
    forms = (
        HEAD + b"Content-Length: 70000\r\n\r\n" + body,
        HEAD + b"Transfer-Encoding: chunked\r\nVia: HTTP/1.1 a\r\n\r\n" + chunked,
        INTERIM * 3 + HEAD.replace(b"\r", b"") + b"Content-Length: 70000\n\n" + body,
    )
    for form in forms:
        async with strangers(Stranger(form)) as [url]:
            assert await read(url) == body


async def test_a_connection_is_kept_for_the_next_request_only_where_nothing_may_follow_the_answer() -> None:
    whole = HEAD + b"Content-Length: 2\r\n\r\nok"
    kept = Stranger(whole, b"HTTP/1.1 204 No Content\r\n\r\n", whole)
    stuffing = Stranger(whole + INTERIM * 4096, whole)
    chunking = Stranger(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + INTERIM * 4096, whole)

    async def ask_twice(url: str) -> None:
        async with client() as asking_client:
            for _ in range(2):
                assert await read_answer(asking_client, "GET", url, bytes_max=9, within_s=5) == b"ok"

    async with strangers(kept, stuffing, chunking) as [one, *others]:
        async with client() as asking_client:
            for status in (200, 204, 200):
                answer = await asking_client.get(one)
                assert answer.status_code == status
        for url in others:
            asked = asyncio.create_task(ask_twice(url))
            assert await longest_turn_s(asked) < TURN_S_MAX
            await asked
    assert (kept.connections, kept.requests) == (1, 3)
    assert (stuffing.connections, chunking.connections) == (2, 2)


async def test_what_comes_byte_by_byte_costs_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "PIECES_FREE", 4)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"x: ")
        while not writer.is_closing():
            writer.write(b"y")
            await asyncio.sleep(0)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(NoAnswerError, match="pieces of less than 256 bytes"):
            await read(f"http://127.0.0.1:{port}/x")


async def test_a_long_answer_has_a_least_rate_and_the_time_of_the_caller_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing, "RATE_WINDOW_S", 0.2)
    monkeypatch.setattr(outgoing, "RATE_BYTES_MIN", 1000)
    head = HEAD + b"Content-Length: 2000\r\n\r\n"
    servers = Stranger(head + b"x" * 999), Stranger(head + b"x" * 2000)
    async with strangers(*servers) as [slow, fast], client() as asking_client:

        def asked(url: str) -> AsyncIterator[bytes]:
            bounds = {"bytes_max": BYTES_MAX, "within_s": 5, "all_within_s": 60.0}
            return stream_answer(asking_client, "GET", url, **bounds)

        with pytest.raises(NoAnswerError, match=f"{slow} sends too slowly: less than 1000 bytes in 0.2 s"):
            async for _ in asked(slow):
                pass
        length = 0
        async for piece in asked(fast):
            length += len(piece)
            busy_until_s = monotonic() + 0.3
            while monotonic() < busy_until_s:
                await asyncio.sleep(0)
        assert length == 2000


async def test_a_proxy_of_the_environment_is_asked_where_a_client_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = Stranger(HEAD + b"Content-Length: 2\r\n\r\nok")
    async with strangers(proxy) as [url]:
        monkeypatch.setenv("http_proxy", url)
        async with client_of(CONTEXT, timeout_s=5, has_proxies=True) as proxied:
            there = "http://elsewhere.invalid/x"
            assert await read_answer(proxied, "GET", there, bytes_max=9, within_s=5) == b"ok"
            monkeypatch.setenv("no_proxy", "elsewhere.invalid")
            with pytest.raises(NoAnswerError, match="does not answer"):
                await read_answer(proxied, "GET", there, bytes_max=9, within_s=5)
            monkeypatch.setenv("https_proxy", "socks5://user:secret@127.0.0.1:1")
            with pytest.raises(NoAnswerError, match="is no HTTP proxy") as raised:
                await read_answer(proxied, "GET", "https://other.invalid/x", bytes_max=9, within_s=5)
            assert "secret" not in str(raised.value)


async def test_a_receiver_that_answers_with_interim_heads_without_end_costs_one_short_attempt() -> None:
    stranger = Stranger(b"", then=INTERIM * 4096)
    networks = [ip_network("127.0.0.0/8")]
    async with strangers(stranger) as [url], client() as webhook_client:
        message = message_of(Webhook("5f0c9a1e2b3d4c5f", "acme", url, None, None, "standard"), [ENTRY], "log/acme")
        asked = asyncio.create_task(attempt(webhook_client, url, message, b"secret", Names(), networks))
        waited_s = await longest_turn_s(asked)
        answer = await asked
    assert answer.outcome is Outcome.AWAY
    assert "interim answers" in answer.said
    assert waited_s < TURN_S_MAX
    assert stranger.sent < 4 << 20


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 7\t", 7.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 37.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 37.0),
        ("Sun Nov  6 08:49:37 1994", 37.0),
        ("Sun, 06 Nov 1994 08:48:00 GMT", 0.0),
        (None, 0.0),
        ("", 0.0),
        ("-1", 0.0),
        ("1.5", 0.0),
        ("soon", 0.0),
        ("Sun, 99 Nov 1994 08:49:37 GMT", 0.0),
        ("Sun, 06 Nov 99999999999 08:49:37 GMT", 0.0),
        ("Sun, 06 Nov 1994 08:49:37 +999999999999", 0.0),
        ("²", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date_in_each_form_that_http_has(value: str | None, seconds: float) -> None:
    now = datetime(1994, 11, 6, 8, 49, 0, tzinfo=UTC)
    assert outgoing.retry_after_s(value, now.timestamp()) == seconds


@given(st.text(max_size=40))
def test_no_retry_after_does_anything_but_say_how_long(value: str) -> None:
    assert outgoing.retry_after_s(value, 0.0) >= 0
    assert _seconds(value) >= 0

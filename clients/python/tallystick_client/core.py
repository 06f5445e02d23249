"""Sends requests: failover between nodes, retries with backoff, the session, problems as exceptions.

Only requests that are safe to repeat are retried: reads, and writes with an Idempotency-Key. Each round tries every
node once, beginning with the one that answered last. The pause between rounds doubles each time, with jitter, or
follows Retry-After. A redirect is followed only to an address that was given as a node, so that the token goes nowhere
else.

A watch reads server-sent events and reconnects as needed; it delivers each entry exactly once.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import random
import re
import secrets
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeAlias
from urllib.parse import urlsplit

import httpx

from tallystick_client.answers import Entry
from tallystick_client.errors import (
    TRANSIENT_STATUS,
    LaggedError,
    NotTheLedgerError,
    ProblemError,
    TransientError,
    UnreachableError,
    WriteLostError,
    problem,
)
from tallystick_client.signing import EventSigner
from tallystick_client.transport import Call, Reply, Transport, shown

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.25, 10.0
RETRY_AFTER_MAX_S = 60.0
SESSION_TOKENS_MAX = 16
"""Nodes whose writes are remembered; a ledger accepts twice as many tokens."""
SILENCE_MAX_S = 45.0
"""Longest wait for the next piece of a stream of events: the service sends a heartbeat every 15 s."""
UPLOAD_ANSWER_MAX_S = 4 * 3600.0
"""Longest wait for the answer to an upload: the files are verified and merged first."""
PAGE = 1000
"""Items of a list in one request."""
QUOTED_CHARACTERS = 60
"""How much of an answer that is not a ledger's is shown."""
JSON, NDJSON = "application/json", "application/x-ndjson"

_TOKEN = re.compile("[A-Za-z0-9_-]+")
"""A session token."""
_SPAN = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

OnWait = Callable[[Exception, float], object]
"""Called with the reason for a retry, and the seconds before it."""


class _OtherLedgerError(UnreachableError):
    """A node leads to a node of another region's ledger, which knows no session of this one."""


class Core:
    """The nodes of one ledger, and this client's last write on each."""

    def __init__(
        self,
        nodes: Sequence[str],
        token: str | None,
        patience_s: float,
        timeout_s: float,
        transport: Transport,
        on_wait: OnWait | None = None,
        signing: EventSigner | None = None,
    ) -> None:
        self.signing = signing
        self._nodes = [_address(node.strip().rstrip("/")) for node in nodes]
        if not self._nodes:
            raise ValueError("name at least one node")
        self._at = 0
        """Index of the node that is tried first."""
        self._authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.patience_s = patience_s
        self._timeout_s = timeout_s
        self.transport = transport
        self._on_wait = on_wait
        self._sessions: dict[str, tuple[tuple[int, int], str]] = {}
        """By node, the position of its last known write, and the token of that."""

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        content: str | bytes | None = None,
        content_type: str = JSON,
        files: Any = None,
        key: str | None = None,
        session: str | None = None,
        repeatable: bool | None = None,
        patience_s: float | None = None,
        timeout_s: float | None = None,
        signature: str | None = None,
        traceparent: str | None = None,
    ) -> Reply:
        """Send a request and return its successful answer. Parameters that are None are left out; ``files`` are sent in
        place of ``content``. The span of the request is ``traceparent``, by default that which is current.

        Raises:
            ProblemError: the ledger rejected the request.
            UnreachableError, NotTheLedgerError: no ledger answered.
        """
        content = content.encode() if isinstance(content, str) else content
        if repeatable is None:
            repeatable = method != "POST" or key is not None
        until = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        within_s: float | None = timeout_s or self._timeout_s
        timeout = httpx.Timeout(within_s)
        if files is not None:
            within_s, timeout = None, httpx.Timeout(timeout.connect, read=UPLOAD_ANSWER_MAX_S)
        failures, span = 0, traceparent or current_span()
        while True:
            headers = self._headers(None if content is None else content_type, key, session)
            headers |= {} if signature is None else {"Tally-Signature": signature}
            headers |= {} if span is None else {"traceparent": span}
            call = Call(method, self._url(path, params), headers, content, timeout, within_s, files)
            try:
                reply = await self.transport.exchange(call)
                if reply.status < 300:
                    self._learn(reply)
                    return reply
                self._refuse(call, reply)
            except (UnreachableError, TransientError) as error:
                failures, failed = failures + 1, error
                session = None if isinstance(error, _OtherLedgerError) else session
            await self.retry(failures, failed, until if repeatable else None)

    async def wait(self, delay_s: float, why: Exception) -> None:
        """Wait for a retry."""
        if self._on_wait is not None:
            self._on_wait(why, delay_s)
        await self.transport.pause(delay_s)

    async def pages(
        self, path: str, params: Mapping[str, Any], *, patience_s: float | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The pages of a list, one by one; errors as ``ask``."""
        cursor = None
        while True:
            page = value_of(
                await self.ask("GET", path, params={"limit": PAGE, **params, "cursor": cursor}, patience_s=patience_s)
            )
            yield page
            if (cursor := page["next_cursor"]) is None:
                return

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        content_type: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        silence_max_s: float = SILENCE_MAX_S,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The pieces of an answer of ``content_type``, from the current node; errors as ``ask``. Never retried."""
        call = Call(
            method,
            self._url(path, params),
            {**self._headers(None if content is None else JSON, None, None), **(headers or {})},
            content,
            httpx.Timeout(self._timeout_s, read=silence_max_s),
            self._timeout_s,
        )
        async with self.transport.open(call, content_type) as answer:
            if isinstance(answer, Reply):
                self._refuse(call, answer)
            else:
                yield answer

    async def retry(self, failures: int, error: Exception, until: float | None) -> None:
        """Move to the next node after ``failures``, the last of which is ``error``; wait first if every node was tried.

        Raises:
            Exception: ``error``, if the wait would end after ``until``, or ``until`` is None.
        """
        delay_s = self.turn(failures, error)
        if until is None or (delay_s and time.monotonic() + delay_s > until):
            raise error
        if delay_s:
            await self.wait(delay_s, error)

    def turn(self, failures: int, error: Exception) -> float:
        """Move to the next node after ``failures``; returns the seconds to wait first, 0 while a node was not tried
        yet."""
        self._at = (self._at + 1) % len(self._nodes)
        rounds, others = divmod(failures, len(self._nodes))
        if others:
            return 0.0
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(rounds - 1, 10))
        asked_s = error.retry_after_s if isinstance(error, TransientError) else 0.0
        return max(backoff_s * random.uniform(0.5, 1.0), min(asked_s, RETRY_AFTER_MAX_S))  # noqa: S311

    def _url(self, path: str, params: Mapping[str, Any] | None) -> str:
        given = {name: value for name, value in (params or {}).items() if value is not None}
        url = self._nodes[self._at] + path
        try:
            return str(httpx.URL(url, params=given)) if given else url
        except httpx.InvalidURL as error:
            raise UnreachableError(f"no answer from {shown(self._nodes[self._at])}: {error}") from error

    def _headers(self, content_type: str | None, key: str | None, session: str | None) -> dict[str, str]:
        given = {
            "Content-Type": content_type,
            "Idempotency-Key": key,
            "Tally-Session": self.session_with(session),
        }
        headers = {name: value for name, value in given.items() if value is not None}
        for name, value in headers.items():
            if found := control_character(value):
                raise ValueError(f"{name} has {found} inside")
        # An uncompressed answer cannot be a decompression bomb.
        return {"Accept-Encoding": "identity", **self._authorization, **headers}

    def session_with(self, brought: str | None) -> str | None:
        """The value of ``Tally-Session``: the last write on each node, with newer and unknown writes of ``brought``."""
        tokens = dict(self._sessions)
        for token in brought.split(",") if brought else ():
            node, position = _place(token)
            if node not in tokens or tokens[node][0] < position:
                tokens[node] = position, token
        return ",".join(token for _, token in [*tokens.values()][-SESSION_TOKENS_MAX:]) or None

    def _learn(self, reply: Reply) -> None:
        """Remember the answered write, unless a later one of that node is known."""
        token = reply.headers.get("Tally-Session", "")
        if _TOKEN.fullmatch(token) is None:
            return
        node, position = _place(token)
        known = self._sessions.pop(node, None)
        self._sessions[node] = known if known is not None and known[0] > position else (position, token)
        while len(self._sessions) > SESSION_TOKENS_MAX:
            self._sessions.pop(next(iter(self._sessions)), None)

    def _refuse(self, call: Call, reply: Reply) -> NoReturn:
        """Raise the problem in ``reply``, unless it redirects to another of our nodes, which is then tried next."""
        location = reply.headers.get("Location")
        if reply.status in (307, 308, 421) and location is not None:
            led = [at for at, node in enumerate(self._nodes) if location.startswith(node + "/") or location == node]
            if led and led[0] != self._at:
                self._at = led[0] - 1  # where the next turn goes from
                if reply.status == 421:
                    self._sessions.clear()
                    raise _OtherLedgerError(f"{call.node} leads to {location}")
                raise UnreachableError(f"{call.node} leads to {location}")
        document = json_in(reply.content)
        if isinstance(document, dict) and isinstance(document.get("type"), str):
            found: ProblemError = problem(reply.status, document, location)
            if isinstance(found, TransientError):
                found.retry_after_s = _seconds(reply.headers.get("Retry-After"))
            if isinstance(found, WriteLostError):
                self._sessions.clear()
            raise found
        if 300 <= reply.status < 400:
            raise NotTheLedgerError(
                f"{call.node} redirects to {(location or 'nowhere')[:200]} ({reply.status}); redirects are followed to "
                "nodes that were named, name the service itself"
            )
        found_else = no_ledger(reply)
        raise UnreachableError(str(found_else)) if reply.status in TRANSIENT_STATUS else found_else


def bearer(token: str | None, place: str) -> str | None:
    """``token`` without surrounding white space, such as the end of a line in a file; None without one.

    Raises:
        ValueError: it is no token. The message does not repeat it.
    """
    token = (token or "").strip()
    if token and re.fullmatch(r"[!-~]+", token) is None:
        reason = f": it has {found} inside" if (found := control_character(token)) else ""
        raise ValueError(f"{place} is no token{reason}; a token is one word of ASCII")
    return token or None


def current_span() -> str | None:
    """The span in which the program is, as W3C Trace Context writes it: that of OpenTelemetry, if it is used, else that
    of the environment, ``TRACEPARENT``; None without one."""
    if (tracing := sys.modules.get("opentelemetry.trace")) is not None:
        span = tracing.get_current_span().get_span_context()
        if span.is_valid:
            return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
    given = os.environ.get("TRACEPARENT", "")
    return given if _SPAN.fullmatch(given) else None


def control_character(value: str) -> str | None:
    """The name of the first control character of ``value``, None where it has none."""
    found = re.search(r"[\x00-\x1f\x7f-\x9f]", value)
    if found is None:
        return None
    names = {"\0": "NUL", "\t": "a tab", "\n": "a line feed", "\r": "a carriage return"}
    return f"{names.get(found[0], 'a control character')} (U+{ord(found[0]):04X})"


def _address(node: str) -> str:
    if found := control_character(node):
        raise ValueError(f"the address of a node has {found} inside")
    if urlsplit(node).scheme not in ("http", "https") or not urlsplit(node).netloc:
        raise ValueError(f"{shown(node)!r} is not an address of a node; it begins with http:// or https://")
    return node


def value_of(reply: Reply) -> Any:
    """The JSON of an answer of success.

    Raises:
        NotTheLedgerError: it is no JSON object.
    """
    value = json_in(reply.content)
    if not isinstance(value, dict):
        raise no_ledger(reply)
    return value


def no_ledger(reply: Reply) -> NotTheLedgerError:
    """The error that ``reply`` is not from a ledger; its text has the first characters of ``reply``."""
    kind = reply.headers.get("Content-Type", "no content type")[:QUOTED_CHARACTERS]
    start = " ".join(reply.content[: 4 * QUOTED_CHARACTERS].decode("utf-8", "replace").split())
    described = f"status {reply.status}, {kind}, {start[:QUOTED_CHARACTERS]!r}"
    return NotTheLedgerError(f"{reply.node} does not answer as a Tallystick does: {described}")


def json_of(value: object) -> str:
    """``value`` as JSON.

    Raises:
        TypeError, ValueError: it cannot be JSON.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def new_key() -> str:
    """A new unique Idempotency-Key."""
    return f"py-{secrets.token_hex(16)}"


def json_in(content: bytes) -> Any:
    """The JSON value in an answer, or a part of one; None without one."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _seconds(retry_after: str | None) -> float:
    """Seconds to wait by ``Retry-After``, a number or a date (RFC 9110, 10.2.3); 0 if it is neither."""
    text = (retry_after or "").strip(" \t")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() - time.time())


def _place(token: str) -> tuple[str, tuple[int, int]]:
    """Node and position in a session token; an unreadable token is treated as a node of its own."""
    try:
        _, node, epoch, lsn, *_ = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))[:-16].decode().split(" ")
        return node, (int(epoch), int(lsn))
    except (ValueError, binascii.Error):
        return token, (0, 0)


# --- watching -------------------------------------------------------------------------------------

SEQ_DIGITS_MAX = 19
EVENT_BYTES_MAX = 16 << 20
"""Longest event that is read; the service's longest is a fifth of that."""


Event: TypeAlias = tuple[int | None, str, bytes | None]
"""Id, name and data of a server-sent event; the data are None if it only reports the service's position."""


class Events:
    """The events in the bytes of a stream (HTML Living Standard, server-sent events)."""

    _rest = b""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that ``piece`` completes."""
        *whole, self._rest = (self._rest + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise NotTheLedgerError(f"an event does not end after {EVENT_BYTES_MAX:,} bytes")
        return [_event(text) for text in whole]


async def watched(core: Core, params: Mapping[str, Any], raise_lagged: bool) -> AsyncGenerator[Entry, None]:
    """The entries, over as many connections as needed. The first connection is retried within ``core``'s patience,
    later ones for ever."""
    position: int | None = None
    failures, until = 0, time.monotonic() + core.patience_s
    while True:
        failed: Exception = UnreachableError("the stream ended")
        try:
            events = Events()
            resumed = {} if position is None else {"Last-Event-ID": str(position)}
            async with core.open("GET", "/v1/watch", "text/event-stream", params=params, headers=resumed) as pieces:
                until = float("inf")
                async for piece in pieces:
                    for reported, name, data in events.feed(piece):
                        if data is None:
                            position = position if reported is None else reported
                            continue
                        told = _json(data, ("from_seq", "head_seq") if name == "lagged" else ("seq",))
                        if name == "lagged":
                            position = told["from_seq"] - 1
                            if raise_lagged:
                                raise LaggedError(told["from_seq"], told["head_seq"])
                        else:
                            position, failures = told["seq"], 0
                            yield told
        except (UnreachableError, TransientError) as error:
            failed = error
        failures += 1
        await core.retry(failures, failed, until)


def _event(text: bytes) -> Event:
    told: int | None = None
    name, data = "", list[bytes]()
    for line in text.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"id":
            told = int(value) if value.isdigit() and len(value) <= SEQ_DIGITS_MAX else None
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"data":
            data.append(value)
    return told, name, b"\n".join(data) if data else None


def _json(data: bytes, whole_numbers: Sequence[str]) -> Any:
    told = json_in(data)
    if not isinstance(told, dict) or not all(isinstance(told.get(name), int) for name in whole_numbers):
        raise NotTheLedgerError(f"a watched service does not answer as a Tallystick does: {data[:60]!r}")
    return told

"""The HTTP client of the ``tally`` command: one place for timeouts, retries and problem documents.

A request is repeated only when repeating cannot do harm: reads, and writes with an ``Idempotency-Key``.
Waits double from 0.25 s to 10 s with jitter; a ``Retry-After`` longer than that is honoured up to a minute.

The other side is not trusted to be a ledger. An answer has ``ANSWER_BYTES_MAX`` at most and is whole within the
timeout, however slowly it drips; it is read as it stands (no compression), is JSON of the shape that the caller names,
and redirects are told, not followed. Whatever else comes is a ``NotTheLedgerError``.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from urllib.request import getproxies

import httpx
import msgspec
import orjson

from app.runtime.outgoing.asking import NO_ANSWER, retry_after_s
from cli import bearer
from ledger.errors import ConfigurationError, LedgerError
from ledger.secret_text import secret_text, without_login
from terminal.outcome import err

Value = TypeVar("Value")
Parameter = str | int | list[str] | None
"""A parameter of a query; one of a list comes once for each."""

REQUEST_TIMEOUT_S = 60.0
"""Longest time for one request and its whole answer; above ``write.timeout``, so that the service's own answer comes
first."""
ANSWER_BYTES_MAX = 64 << 20
"""Largest answer that is read, other than a download; the longest list of the service has a quarter of that."""
_LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")
"""This machine, as ``httpx`` names what a proxy is not for."""
_TAR = "application/x-tar"
_EVENTS = "text/event-stream"
QUOTED_CHARACTERS = 60
"""How much of a foreign answer is shown."""
DOWNLOAD_PAUSE_MAX_S = 600.0
"""Longest wait for the next piece of a download; before the first, a long chain may have to be signed."""
SILENCE_MAX_S = 45.0
"""Longest wait for the next piece of a stream of events: the service gives a sign of life every 15 s."""
PATIENCE_S = 5.0
"""How long a request is repeated by default before the command gives up: somebody looks at the screen."""
CA_VARIABLE = "TALLY_CA"
UPLOAD_ANSWER_MAX_S = 4 * 3600.0
"""Longest wait for the answer once files were sent: they are verified and merged first."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.25, 10.0
RETRY_AFTER_MAX_S = 60.0
TRANSIENT = frozenset({429, 502, 503, 504})
"""Answers after which the same request may succeed: the ledger's own 429 and 503, and those of a proxy before it."""


class UnreachableError(LedgerError):
    """Nothing answers at the service's address, or not in time."""


class RequestRefusedError(LedgerError):
    """The service answered with a problem document. ``kind`` is the last part of its ``type``."""

    def __init__(self, status: int, kind: str, detail: str, body: Mapping[str, Any]) -> None:
        super().__init__(f"{kind} ({status}): {detail}")
        self.status = status
        self.kind = kind
        self.detail = detail
        self.body = body


class NotTheLedgerError(LedgerError):
    """Something answers at the address, and not as a Tallystick does."""


class Reply(NamedTuple):
    """A whole answer, whatever sent it."""

    status: int
    headers: httpx.Headers
    content: bytes

    @property
    def is_json(self) -> bool:
        """Whether it says that it is JSON, of whichever kind."""
        kind: str = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return kind == "application/json" or kind.endswith("+json")


def problem_of(url: str, reply: Reply) -> LedgerError:
    """What an answer other than success says: the ledger's problem, or that no ledger sent it."""
    if 300 <= reply.status < 400:
        location = reply.headers.get("Location", "nowhere")
        return NotTheLedgerError(
            f"{url} redirects to {location[:200]} ({reply.status}); redirects are not followed, name the service itself"
        )
    body = _json_of(reply)
    if not isinstance(body, dict) or not isinstance(body.get("type"), str):
        return NotTheLedgerError(f"{url} does not answer as a Tallystick does: {_described(reply)}")
    kind = body["type"].rsplit("/", 1)[-1] or f"http-{reply.status}"
    detail = str(body.get("detail") or body.get("title") or f"status {reply.status}")
    if reply.status == HTTPStatus.UNAUTHORIZED:
        detail = f"{detail} (tally shows what {bearer.VARIABLE} or --token-file holds)"
    if "line" in body:
        detail = f"line {body['line']}: {detail}"
    return RequestRefusedError(reply.status, kind, detail, body)


def _json_of(reply: Reply) -> Any:
    """The JSON value of the answer, None when it is none (or nested deeper than any answer of the ledger)."""
    if not reply.is_json:
        return None
    try:
        return orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return None


def _described(reply: Reply) -> str:
    kind = reply.headers.get("Content-Type", "no content type")[:QUOTED_CHARACTERS]
    start = reply.content[: 4 * QUOTED_CHARACTERS].decode("utf-8", "replace").split()
    return f"status {reply.status}, {kind}, {' '.join(start)[:QUOTED_CHARACTERS]!r}"


def wait_s(attempt: int, retry_after: str | None, jitter: float) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 0); ``jitter`` is within [0, 1)."""
    backoff: float = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2**attempt) * (0.5 + jitter / 2)
    return max(backoff, min(retry_after_s(retry_after, time.time()), RETRY_AFTER_MAX_S))


def say_wait(error: LedgerError, delay_s: float) -> None:
    """For ``on_wait``: tell whoever looks at the screen."""
    err.print(f"trying again in {delay_s:.1f} s: {error}", markup=False)


class _CountedFile(io.FileIO):
    """A file that tells how much of it is read."""

    def __init__(self, path: Path, advance: Callable[[int], object]) -> None:
        super().__init__(path, "rb")
        self._advance = advance

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size) or b""
        self._advance(len(data))
        return data


class LedgerClient:
    """A connection to one service. ``on_wait`` is told why, and how many seconds, a retry waits."""

    def __init__(
        self,
        url: str,
        *,
        patience_s: float = PATIENCE_S,
        timeout_s: float = REQUEST_TIMEOUT_S,
        on_wait: Callable[[LedgerError, float], None] | None = None,
    ) -> None:
        url = secret_text(url, "the address of the service").strip().rstrip("/")
        self.url = without_login(url)
        """For messages."""
        if not url.startswith(("http://", "https://")):
            raise UnreachableError(f"{self.url} is not an address of a service; it begins with http:// or https://")
        self._address = url
        # As it stands on the wire: what is not compressed cannot be a bomb.
        headers = {"Accept-Encoding": "identity", **bearer.headers()}
        # Without TLS, which a proxy may ask for, reading whom to trust takes longer than most answers do.
        nobody = bool(getproxies()) or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusted = _trusted() if url.startswith("https://") else nobody
        # Proxies of the environment are for what is elsewhere: none is shown the token for this machine.
        direct = dict.fromkeys(_LOOPBACK)
        self._http = httpx.Client(timeout=timeout_s, headers=headers, verify=trusted, mounts=direct)
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._on_wait = on_wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, shape: Any = dict, /, **params: Parameter) -> Any:
        """The JSON that ``GET path`` answers; parameters that are None are left out.

        ``shape`` is a TypedDict of what the caller reads of it; members beyond that are kept.

        Raises:
            RequestRefusedError: the service refused.
            UnreachableError: no answer within the patience.
            NotTheLedgerError: the answer is not of that shape, or no ledger sent it.
        """
        return self._value(self._send("GET", path, params=params, repeatable=True), shape)

    def get_file(self, path: str, **params: str | int | None) -> bytes:
        """The file in JSON that ``GET path`` answers, byte for byte; errors as ``get``."""
        reply = self._send("GET", path, params=params, repeatable=True)
        if not reply.is_json:
            raise NotTheLedgerError(f"{self.url} does not answer as a Tallystick does: {_described(reply)}")
        return reply.content

    def get_text(self, path: str) -> str:
        """The text that ``GET path`` answers; errors as ``get``."""
        reply = self._send("GET", path, repeatable=True)
        kind = reply.headers.get("Content-Type", "").partition(";")[0]
        if kind != "text/plain":
            raise NotTheLedgerError(f"{self.url} does not answer as a Tallystick does: {_described(reply)}")
        return reply.content.decode("utf-8", "replace")

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | str,
        shape: Any = dict,
        *,
        key: str | None = None,
        session: str | None = None,
        repeatable: bool = False,
    ) -> Any:
        """The JSON that ``POST path`` answers; ``shape`` and errors as ``get``. Repeated on failure with an
        Idempotency-Key ``key``, or if it is ``repeatable``: twice is once. ``session`` is a token to be shown. A
        ``body`` that is text is sent as it is."""
        repeatable = repeatable or key is not None
        content = body.encode() if isinstance(body, str) else orjson.dumps(body)
        reply = self._send("POST", path, content=content, key=key, session=session, repeatable=repeatable)
        return self._value(reply, shape)

    def post_once(self, path: str, body: Mapping[str, Any], shape: Any, *, repeatable: bool) -> tuple[Any, bool]:
        """The JSON that ``POST path`` answers, and whether something was made (201), as it was not there already; as
        ``post``."""
        reply = self._send("POST", path, content=orjson.dumps(body), repeatable=repeatable)
        return self._value(reply, shape), reply.status == HTTPStatus.CREATED

    def put(self, path: str, body: Mapping[str, Any], shape: Any = dict) -> Any:
        """The JSON that ``PUT path`` answers; as ``get``. Repeated on failure: saying it twice is saying it once."""
        return self._value(self._send("PUT", path, content=orjson.dumps(body), repeatable=True), shape)

    def delete(self, path: str, shape: Any = dict) -> Any:
        """The JSON that ``DELETE path`` answers; as ``put``."""
        return self._value(self._send("DELETE", path, repeatable=True), shape)

    def post_text(self, path: str, text: bytes, shape: Any = dict) -> Any:
        """The JSON that ``POST path`` answers to a body of text; as ``get``. Never repeated."""
        reply = self._send("POST", path, content=text, content_type="text/plain", repeatable=False)
        return self._value(reply, shape)

    def download(self, path: str, body: Mapping[str, Any], write: Callable[[bytes], object]) -> None:
        """Hand the tar file that ``POST path`` answers to ``write``, piece by piece; errors as ``get``. Never repeated.

        When it returns, the answer came to its end.
        """
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=DOWNLOAD_PAUSE_MAX_S)
        with (
            self._failures(),
            self._http.stream("POST", f"{self._address}{path}", json=body, timeout=timeout) as response,
        ):
            if response.status_code != 200 or response.headers.get("Content-Type") != _TAR:
                raise problem_of(self.url, _whole(response, time.monotonic() + self._timeout_s))
            for piece in response.iter_raw():
                write(piece)

    @contextlib.contextmanager
    def events(self, path: str, *, last_id: int | None = None, **params: str | int | None) -> Iterator[Iterator[bytes]]:
        """The lines of the server-sent events that ``GET path`` answers, as they come; ``last_id`` is shown as
        Last-Event-ID. Errors as ``get``, also while lines are read. Never repeated.

        Raises:
            NotTheLedgerError: a line has more than ``ANSWER_BYTES_MAX``.
        """
        timeout = httpx.Timeout(self._timeout_s, read=SILENCE_MAX_S)
        headers = {} if last_id is None else {"Last-Event-ID": str(last_id)}
        with (
            self._failures(),
            self._http.stream(
                "GET", f"{self._address}{path}", params=given(params), headers=headers, timeout=timeout
            ) as response,
        ):
            if response.status_code != 200 or not response.headers.get("Content-Type", "").startswith(_EVENTS):
                raise problem_of(self.url, _whole(response, time.monotonic() + self._timeout_s))
            yield _lines(response)

    def upload(
        self,
        path: str,
        files: Sequence[Path],
        advance: Callable[[int], object],
        shape: Any = dict,
        **params: str | None,
    ) -> Any:
        """Send files as multipart/form-data, streamed; returns the JSON that answers. Never repeated.

        ``advance`` is told how many bytes of the files were sent, piece by piece.

        Raises:
            RequestRefusedError, UnreachableError, NotTheLedgerError: as ``get``.
            OSError: a file cannot be read.
        """
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=UPLOAD_ANSWER_MAX_S)
        with contextlib.ExitStack() as stack:
            parts = [("file", (file.name, stack.enter_context(_CountedFile(file, advance)), _TAR)) for file in files]
            stack.enter_context(self._failures())
            response = stack.enter_context(
                self._http.stream("POST", f"{self._address}{path}", params=given(params), files=parts, timeout=timeout)
            )
            reply = _whole(response, time.monotonic() + self._timeout_s)
        if reply.status >= 300:
            raise problem_of(self.url, reply)
        return self._value(reply, shape)

    def post_lines(
        self, path: str, lines: bytes, shape: Any = dict, *, key: str, **params: str | None
    ) -> tuple[Any, bool]:
        """Send NDJSON; returns the answer and whether the ledger already had it (``Idempotent-Replay``)."""
        reply = self._send(
            "POST",
            path,
            content=lines,
            content_type="application/x-ndjson",
            key=key,
            params=params,
            repeatable=True,
        )
        return self._value(reply, shape), reply.headers.get("Idempotent-Replay") == "true"

    def _value(self, reply: Reply, shape: Any) -> Any:
        value = _json_of(reply)
        try:
            msgspec.convert(value, shape)
        except msgspec.ValidationError as error:
            wrong = _described(reply) if value is None else str(error)
            raise NotTheLedgerError(f"{self.url} does not answer as a Tallystick does: {wrong}") from None
        return value

    def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Parameter] | None = None,
        content: bytes | None = None,
        content_type: str = "application/json",
        key: str | None = None,
        session: str | None = None,
        repeatable: bool,
    ) -> Reply:
        """The answer of success; what is ``repeatable`` is tried again while that may help and the patience lasts."""
        kind = None if content is None else content_type
        headers = given({"Content-Type": kind, "Idempotency-Key": key, "Tally-Session": session})
        with self._failures():
            request = self._http.build_request(
                method, f"{self._address}{path}", params=given(params or {}), content=content, headers=headers
            )
        give_up_at = time.monotonic() + self._patience_s
        attempt = 0
        while True:
            try:
                with self._failures():
                    reply = _within(self._timeout_s, partial(self._exchange, request))
                if reply.status < 300:
                    return reply
                error, retry_after = problem_of(self.url, reply), reply.headers.get("Retry-After")
                is_transient = reply.status in TRANSIENT
            except UnreachableError as away:
                error, retry_after, is_transient = away, None, True
            delay = wait_s(attempt, retry_after, random.random())  # noqa: S311 (spreads retries, no secret)
            if not (repeatable and is_transient) or time.monotonic() + delay > give_up_at:
                raise error
            if self._on_wait is not None:
                self._on_wait(error, delay)
            time.sleep(delay)
            attempt += 1

    def _exchange(self, request: httpx.Request, until: float) -> Reply:
        with contextlib.closing(self._http.send(request, stream=True)) as response:
            return _whole(response, until)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What goes wrong on the way, in our words."""
        try:
            yield
        except UnicodeEncodeError:
            raise  # what is asked for cannot be sent
        except NO_ANSWER as error:
            raise UnreachableError(f"no answer from {self.url}: {str(error) or type(error).__name__}") from error
        except TimeoutError as error:
            raise UnreachableError(f"no whole answer from {self.url} in {self._timeout_s:g} s") from error


def _trusted() -> ssl.SSLContext:
    """Who vouches for a service: the file of CAs that ``TALLY_CA`` names and nobody else, or those of the system.

    Raises:
        ConfigurationError: the file cannot be read, or holds none.
    """
    named = os.environ.get(CA_VARIABLE)
    try:
        return ssl.create_default_context(cafile=named or None)
    except OSError as error:
        raise ConfigurationError(f"{CA_VARIABLE} {named} is no file of CA certificates in PEM: {error}") from None


def _whole(response: httpx.Response, until: float) -> Reply:
    """The answer, read to its end.

    Raises:
        NotTheLedgerError: it is longer than any answer of the ledger.
        TimeoutError: it does not end until ``until``, of ``time.monotonic``.
    """
    pieces: list[bytes] = []
    size = 0
    for piece in response.iter_raw():
        size += len(piece)
        if size > ANSWER_BYTES_MAX:
            raise NotTheLedgerError(f"the answer of {response.url.host} does not end after {ANSWER_BYTES_MAX:,} bytes")
        if time.monotonic() > until:
            raise TimeoutError
        pieces.append(piece)
    return Reply(response.status_code, response.headers, b"".join(pieces))


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """The lines of an answer, as they come.

    Raises:
        NotTheLedgerError: one is longer than any answer of the ledger.
    """
    rest = b""
    for piece in response.iter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > ANSWER_BYTES_MAX:
            raise NotTheLedgerError(f"a line of {response.url.host} does not end after {ANSWER_BYTES_MAX:,} bytes")


def _within(timeout_s: float, work: Callable[[float], Reply]) -> Reply:
    """What ``work`` returns, which is told until when it has time, by ``time.monotonic``.

    It runs in a thread of its own, which is left behind when the time is over: a name that is looked up, or a head
    that drips, is waited for in no other way that ends.

    Raises:
        TimeoutError: it did not return in time.
    """
    until = time.monotonic() + timeout_s
    done: Future[Reply] = Future()

    def run() -> None:
        try:
            done.set_result(work(until))
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(timeout_s)


def given(values: Mapping[str, Value | None]) -> dict[str, Value]:
    """Those of ``values`` that are not None."""
    return {name: value for name, value in values.items() if value is not None}

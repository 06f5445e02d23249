"""uvicorn's HTTP/1.1 protocol with problems as answers to parse errors, limits on heads, trailers, connections and idle
time, one system call for an answer instead of two, and the fast path for writes (``app.edge.fast_path``).

0 <= bytes of request line and headers <= HEAD_BYTES_MAX
0 <= connections <= http.connections_max, but for those that are just being refused or ended
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, cast

from app.edge.accepted import CUT_OFF
from app.edge.connection.deadlines import PROGRESS_BYTES, ConnectionBounds, Progress, end_longest_waiting
from app.edge.connection.heads import ServedNames, TrustedProxies, check_head
from app.edge.fast_path import CachedHead, FastPath, FastWrite, Fields, HeaderCache
from app.edge.library_internals import (
    STATUS_LINE,
    AnswerTransport,
    Application,
    FlowControl,
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
    HTTPScope,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from app.edge.problems import problem_response
from app.trust.callers import AUTHORIZATION, CERTIFICATE
from app.trust.tls import CallerCertificate, shown
from app.write.intake.answers import Entered
from ledger.errors import ProblemError
from ledger.facts.problems import HEADERS_TOO_LARGE, MALFORMED_HTTP, NOT_READY, REQUEST_TIMEOUT

HEAD_BYTES_MAX = 64 * 1024
"""Most bytes of request line and headers together."""
TRAILER_BYTES_MAX = 64 * 1024
"""Most bytes of a chunked body that may follow each other without a byte of content: extensions and trailers."""
LINGER_S = 2.0
"""How long further data of a refused client is discarded, so that the client can read the refusal."""
STRICT_TRANSPORT = (b"strict-transport-security", b"max-age=31536000")
"""Header of each answer over TLS: browsers must not use plain HTTP again."""
_OF_EACH_REQUEST: Final = (
    *("type", "asgi", "http_version", "server", "client"),
    *("scheme", "root_path", "state", "method", "query_string"),
)
"""Members that are shared by the scopes of a connection's fast-path writes."""


class ProblemProtocol(HttpToolsProtocol):
    """One connection. Without ``fast_path`` all requests go to the framework; without ``proxies`` no proxy is
    trusted."""

    def __init__(
        self,
        *given: Any,
        bounds: ConnectionBounds,
        names: ServedNames,
        fast_path: FastPath | None = None,
        header_cache: HeaderCache | None = None,
        proxies: TrustedProxies | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._fast_path = fast_path
        self._header_cache = HeaderCache() if header_cache is None else header_cache
        self._first: bytes | None = None
        """The data being parsed, if it arrived at an idle connection."""
        self._kept: RequestResponseCycle | None = None
        """An answered cycle that the framework never had: the next request with a cached head reuses it."""
        self._write: FastWrite | None = None
        """The running request, while the fast path has it and its body is incomplete."""
        self._names = names
        self._proxies = proxies
        """None also if the client of the connection is no trusted proxy."""
        self._certificate: CallerCertificate | None = None
        self._bounds = bounds
        self._progress = Progress()
        self.waiting_since_s = 0.0
        """When the client could start a head, or started it."""
        self._body_is_open = False
        self._received_bytes = 0
        """Bytes that were parsed."""
        self.written_bytes = 0
        """Bytes of answers, whether or not the client has taken them."""
        self._chunk_bytes = 0
        self._head_begins = 0
        """Bytes received with the piece in which this head began."""
        self._head_is_open = False
        self._content_ends = 0
        """Bytes received with the last piece that held a byte of content, or ended a head or a body."""
        self._upgrades = False
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; ``cycle`` is the newest."""
        self._fault: ProblemError | None = None
        """Why nothing more is read. Requests that arrived whole are answered first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; if there are too many, the connection that has waited longest for its client is ended."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        self._certificate = shown(transport.get_extra_info("peercert"))
        if self._proxies is not None and not self._proxies.has(self.client):
            self._proxies = None
        self.waiting_since_s = self.loop.time()
        if len(self.connections) > self._bounds.connections_max:
            self._make_room()

    def abort(self) -> None:
        """End the connection now."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client disconnected: the running request is notified, waiting requests are dropped."""
        self._hand_over()
        self.pipeline.clear()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client half-closed. A write that arrived whole is still answered, if TCP allows that; for any other
        request the client counts as disconnected."""
        running = self._running
        if (
            running is None
            or running.more_body
            or running.response_complete
            or self.pipeline
            or self.scheme == "https"
            or self._fast_path is None
            or not self._fast_path.is_write(running.scope)
        ):
            return False
        running.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Take data of the client; refuse a head or trailer without end."""
        is_idle = (
            self._fast_path is not None
            and not (self._head_is_open or self._body_is_open or self._fault is not None)
            and self._is_answered()
            and self._proxies is None
            and self._certificate is None
        )
        if is_idle and self._takes_cached(data):
            return
        self._first = data if is_idle else None
        rest: bytes | memoryview | None = data
        while rest is not None and self._fault is None:
            rest = self._feed(rest)
        self._first = None

    def _takes_cached(self, data: bytes) -> bool:
        """Take ``data`` without the parser, if it is a request with a cached head."""
        cycle = self._kept
        cached = None if cycle is None else self._header_cache.find(data)
        if cycle is None or cached is None:
            return False
        self.cycle = self._running = cycle
        cycle.default_headers = self._default_headers(cycle.scope)
        cycle.response_started = cycle.response_complete = False
        cycle.body = bytearray(cached.body)
        # Without state of the request before: its caller and its charges.
        self.scope = cycle.scope = cast(HTTPScope, {name: cycle.scope[name] for name in _OF_EACH_REQUEST})
        self.scope["headers"] = self.headers = cached.headers
        self.scope["path"], self.scope["raw_path"] = cached.path.decode(), cached.path
        self.scope[AUTHORIZATION] = cached.authorization  # type: ignore[typeddict-unknown-key]
        self._begin(cycle, self.app, cached)
        return True

    def _feed(self, data: bytes | memoryview) -> memoryview | None:
        """Parse ``data``, up to a request that offers another protocol; what follows that is still to be parsed."""
        head = self.headers
        self._chunk_bytes = len(data)
        self._received_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade()
            return memoryview(data)[upgrade.args[0] :]
        except HttpParserError as error:
            refused = error.__context__
            self._refuse(refused if isinstance(refused, ProblemError) else _malformed("it could not be parsed"))
            return None
        if not self._head_is_open:
            if self._received_bytes - self._content_ends > TRAILER_BYTES_MAX:
                self._refuse(
                    ProblemError(HEADERS_TOO_LARGE, f"chunk extensions and trailers may have {TRAILER_BYTES_MAX} bytes")
                )
        elif self.headers is not head:
            self.waiting_since_s = self.loop.time()
        elif self._received_bytes - self._head_begins > HEAD_BYTES_MAX:
            # All of it belongs to an incomplete head; the parser reports a header only once the head is whole.
            self._refuse(_head_too_large())
        return None

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_begins = self._received_bytes
        self._head_is_open = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; a trailer is dropped, since no code here uses it."""
        if not self._head_is_open:
            return
        # Blanks around a value are no part of it (RFC 9110, 5.5); the parser takes off those before it.
        name, value = name.lower(), value.strip(b" \t")
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole.

        Raises:
            ProblemError: it is too large, or may not be served; the parser stops.
        """
        self._head_is_open = False
        self._content_ends = self._received_bytes
        if self._received_bytes > self._head_begins or self._chunk_bytes > HEAD_BYTES_MAX:
            head_bytes = len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
            if head_bytes > HEAD_BYTES_MAX:
                raise _head_too_large()
        check_head(self.parser.get_http_version(), self.parser.get_method(), self.headers, self._names)
        self._upgrades = self.parser.should_upgrade()
        if self._upgrades:
            return
        self._body_is_open = True
        if self._proxies is not None:
            self._proxies.believe(self.scope)
        if self._certificate is not None:
            self.scope[CERTIFICATE] = self._certificate.names_now()  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Content of a body."""
        self._content_ends = self._received_bytes
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._content_ends = self._received_bytes
        self._body_is_open = False
        if not self._upgrades:
            super().on_message_complete()
            if self._write is not None:
                if self._first is not None:
                    self._header_cache.remember(self._first, self.headers)
                self._take(self.cycle, self._write)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Application) -> None:
        self._running = cycle
        cycle.default_headers = self._default_headers(cycle.scope)
        self._begin(cycle, app)

    def _begin(self, cycle: RequestResponseCycle, app: Application, cached: CachedHead | None = None) -> None:
        if self._fast_path is not None and not self.flow.write_paused:
            self._write = self._fast_path.begin(cycle.scope, cached)
        if self._write is None:
            self._start_framework(cycle, app)
        elif not cycle.more_body:
            self._take(cycle, self._write)

    def _default_headers(self, scope: HTTPScope) -> Fields:
        """Headers of every answer to a request of this scope."""
        now = self.server_state.default_headers
        return now if scope["scheme"] == "http" else [*now, STRICT_TRANSPORT]

    def _start_framework(self, cycle: RequestResponseCycle, app: Application) -> None:
        if cycle is self._kept:
            self._kept = None
        if cycle.scope["method"] != "HEAD":
            cycle.transport = AnswerTransport(self, cycle)
        cycle.scope[CUT_OFF] = self.cut_off  # type: ignore[typeddict-unknown-key]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """An answer is written: start the next request, or answer the fault."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._fault is not None:
            self._answer_fault(self._fault)
        self.waiting_since_s = self.loop.time()
        self.flow.resume_reading()

    def shutdown(self) -> None:
        """The service stops: the running request is the connection's last."""
        self._hand_over()
        super().shutdown()

    # --- the fast path ----------------------------------------------------------------------------

    def _take(self, cycle: RequestResponseCycle, write: FastWrite) -> None:
        """Answer the running request, which is whole, once its event has reached its level."""
        entered = write.enter(bytes(cycle.body))
        self._write = None
        if entered is None:
            self._start_framework(cycle, self.app)
        else:
            entered.reached.add_done_callback(partial(self._settled, write, entered, cycle))

    def _hand_over(self) -> None:
        """Pass the running request to the framework, unless it has it."""
        if self._write is not None:
            self._write = None
            self._start_framework(self.cycle, self.app)

    def _settled(self, write: FastWrite, entered: Entered[Any], cycle: RequestResponseCycle, _reached: object) -> None:
        if (answer := write.answer(entered)) is None:
            self._start_framework(cycle, self.app)
        elif not cycle.disconnected:
            self._send(cycle, answer.status, answer.lines, answer.body)

    def _send(self, cycle: RequestResponseCycle, status: int, lines: bytes, body: bytes) -> None:
        """Write a whole answer, as the framework and uvicorn do."""
        first = [b"%b: %b\r\n" % field for field in cycle.default_headers]
        last = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        data = b"".join((STATUS_LINE[status], *first, lines, last, body))
        cycle.response_started = cycle.response_complete = True
        self.written_bytes += len(data)
        self.transport.write(data)
        if cycle.keep_alive:
            self._kept = cycle
        else:
            self.transport.close()
        self.on_response_complete()

    def _go_on_without_upgrade(self) -> None:
        """Take a request that offers another protocol as if it offered none; its body is still to be parsed."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(_malformed("CONNECT is for proxies"))
            return
        line = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"".join((line, *fields, b"\r\n")))

    # --- bounds -----------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """End the connection if its client is gone, or has stalled for too long.

        A body that has not come by now is not waited for here: the framework does.
        """
        self._hand_over()
        unread_bytes = self.transport.get_write_buffer_size()
        stage: object
        if unread_bytes:
            stage, moved_bytes = "writing", self.written_bytes - unread_bytes
        elif self._body_is_open and self._fault is None and not self.flow.read_paused:
            # The rest of an answered request is not wanted, however fast it arrives.
            is_answered = self.cycle.response_complete
            stage, moved_bytes = (self.cycle, is_answered), 0 if is_answered else self._received_bytes
        else:
            stage, moved_bytes = None, 0
        stalled_s = self._progress.stalled_s(stage, moved_bytes, now_s)
        is_stalled = stage is not None and stalled_s > self._bounds.body_timeout_s
        if unread_bytes and is_stalled:
            self.cut_off()
        elif unread_bytes or self.transport.is_closing():
            return
        elif self.pipeline:
            if self._is_gone():
                self.transport.abort()
        elif self._fault is not None:
            return
        elif self._body_is_open:
            if is_stalled:
                self._end_reading()
        elif self._is_answered() and now_s - self.waiting_since_s > self._bounds.header_timeout_s:
            self._end_waiting()

    def _is_gone(self) -> bool:
        """Whether the client has closed its side: no event reports it while requests wait and reading is paused."""
        ended = select.poll()
        ended.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(ended.poll(0))

    def cut_off(self) -> None:
        """Reset the connection, and discard all that the system has not sent."""
        with contextlib.suppress(OSError):  # The client may have ended it this moment.
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        self.transport.abort()

    def _end_reading(self) -> None:
        if self.cycle.response_complete:
            self.transport.close()
            return
        self._refuse(
            _too_slow(
                f"fewer than {PROGRESS_BYTES} bytes of the body came within http.body_timeout"
                f" ({self._bounds.body_timeout_s:g} s)"
            )
        )

    def _end_waiting(self) -> None:
        if self._head_is_open:
            self._refuse(
                _too_slow(f"the head did not come within http.header_timeout ({self._bounds.header_timeout_s:g} s)")
            )
        else:
            self.transport.close()

    def _make_room(self) -> None:
        if end_longest_waiting(self.connections, self):
            return
        self._fault = ProblemError(
            NOT_READY, f"all {self._bounds.connections_max} connections of http.connections_max are busy; try again"
        )
        self._write_fault(self._fault)
        self.transport.close()

    def is_waiting(self) -> bool:
        """Whether no answer is under way to the client, and no whole head of it is here."""
        return (
            not self._body_is_open and self._fault is None and self._is_answered() and not self.transport.is_closing()
        )

    # --- refusals ---------------------------------------------------------------------------------

    def _refuse(self, fault: ProblemError) -> None:
        """Stop reading, and answer ``fault`` once earlier whole requests are answered."""
        self._fault = fault
        cut_short = self.cycle
        if cut_short is not None and cut_short.more_body and not cut_short.response_complete:
            if cut_short is not self._running:
                self.pipeline.popleft()
            else:
                cut_short.disconnected = True
                cut_short.message_event.set()
                if cut_short.response_started:
                    self.transport.close()
                else:
                    self._answer_fault(fault)
                return
        if self._is_answered():
            self._answer_fault(fault)

    def _is_answered(self) -> bool:
        return not self.pipeline and (self._running is None or self._running.response_complete)

    def _answer_fault(self, fault: ProblemError) -> None:
        """Answer the refusal, and end the connection once the client has read it, or after ``LINGER_S``."""
        self._write_fault(fault)
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _write_fault(self, fault: ProblemError) -> None:
        self.transport.write(fault_answer(fault, [STRICT_TRANSPORT] if self.scheme == "https" else ()))


class _Flow(FlowControl):
    """Pauses reading while whole requests wait."""

    def __init__(self, transport: asyncio.Transport, connection: ProblemProtocol) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        """Read on, unless requests wait to be answered."""
        if not self._connection.pipeline:
            super().resume_reading()


def fault_answer(fault: ProblemError, fields: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The whole answer to a refusal before there is a request; the connection ends after it."""
    answer = problem_response(fault.problem, str(fault), headers={"Connection": "close"})
    head = b"".join(b"%b: %b\r\n" % field for field in (*answer.raw_headers, *fields))
    return b"".join((STATUS_LINE[answer.status_code], head, b"\r\n", answer.body))


def _malformed(why: str) -> ProblemError:
    return ProblemError(MALFORMED_HTTP, f"the request is refused, {why}; the connection is closed")


def _too_slow(what: str) -> ProblemError:
    return ProblemError(REQUEST_TIMEOUT, f"{what}; the connection is closed")


def _head_too_large() -> ProblemError:
    return ProblemError(HEADERS_TOO_LARGE, f"request line and headers may have {HEAD_BYTES_MAX} bytes together")

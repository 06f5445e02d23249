"""HTTP/1.1 as uvicorn speaks it, but what its parser refuses is answered with a problem, a head has a bound, and an
answer leaves in one system call where uvicorn makes two.

0 <= bytes of request line and headers <= HEAD_BYTES_MAX
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.http.problems import HEADERS_TOO_LARGE, MALFORMED_HTTP, ProblemError, problem_response

HEAD_BYTES_MAX = 64 * 1024
"""Longest request line and headers together."""
LINGER_S = 2.0
"""How long what the client still sends is thrown away, so that it gets to read why it was refused."""
_FIELD_BYTES = len(b": \r\n")
_OF_KNOWN_LENGTH = b"content-length: "
"""Stands in the head of an answer whose body is there already, or follows at once."""


class ProblemProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._chunk_bytes = 0
        self._head_bytes = 0
        self._head_chunks_bytes = 0
        """Bytes of the chunks that hold a piece of this head: at least its size."""
        self._head_is_open = False
        self._refused = False
        self._fault = ProblemError(MALFORMED_HTTP, "the request could not be parsed; the connection is closed")

    def data_received(self, data: bytes) -> None:
        """Take what the client sent, unless it is a head without end."""
        if self._refused:
            return
        head = self.headers
        self._chunk_bytes = len(data)
        if self._head_is_open:
            self._head_chunks_bytes += len(data)
        super().data_received(data)
        if self._head_is_open and self.headers is head and not self._refused:
            # All of it belongs to a head that is not whole yet; the parser tells of a header only once that is.
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._fault = _head_too_large()
                self.send_400_response(str(self._fault))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_bytes = 0
        self._head_chunks_bytes = self._chunk_bytes
        self._head_is_open = True

    def on_headers_complete(self) -> None:
        """The head is whole.

        Raises:
            ProblemError: it is too large; the parser gives up, and ``send_400_response`` is called.
        """
        self._head_is_open = False
        if self._head_chunks_bytes > HEAD_BYTES_MAX:
            head_bytes = len(self.url) + sum(len(name) + len(value) + _FIELD_BYTES for name, value in self.headers)
            if head_bytes > HEAD_BYTES_MAX:
                self._fault = _head_too_large()
                raise self._fault
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before and self.scope["method"] != "HEAD":
            self.cycle.transport = _AnswerTransport(self.transport, self.cycle)

    def send_400_response(self, _message: str) -> None:
        """Answer what the parser refused, and end the connection once the client has read it, or soon."""
        self._refused = True
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if under_way and self.cycle.response_started:
            self.transport.close()
            return
        answer = problem_response(self._fault.kind, str(self._fault), headers={"Connection": "close"})
        head = b"".join(b"%b: %b\r\n" % field for field in answer.raw_headers)
        self.transport.write(b"".join((STATUS_LINE[answer.status_code], head, b"\r\n", answer.body)))
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


class _AnswerTransport(asyncio.Transport):
    """The transport of a connection as one answer writes to it: a head that says how long its body is waits for the
    first piece of that, which may be empty."""

    __slots__ = ("_cycle", "_head", "_transport", "_was_held")

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle
        self._head: bytes | None = None
        self._was_held = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write the next piece of the answer."""
        if self._head is not None:
            data, self._head = b"".join((self._head, data)), None
        elif self._cycle.response_started and not self._was_held and _OF_KNOWN_LENGTH in data:
            self._head, self._was_held = bytes(data), True
            return
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection once all is written."""
        if self._head is not None:
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closing or closed."""
        return self._transport.is_closing()


def _head_too_large() -> ProblemError:
    return ProblemError(HEADERS_TOO_LARGE, f"request line and headers may have {HEAD_BYTES_MAX} bytes together")

"""TLS between the plain transport of a connection and its HTTP protocol, the same on every event loop.

    client  <-- records -->  TlsConnection  <-- bytes -->  ProblemProtocol

A connection in its handshake is bounded like any other: it is counted, may be evicted when there are too many, and has
``http.header_timeout``. Only an incomplete record is buffered here: unsent data waits in the plain transport, whose
bounds apply. The service closes a connection with close_notify, and does not wait for the client's, which a client that
is gone never sends (RFC 8446, section 6.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from app.edge.connection.deadlines import ConnectionBounds, end_longest_waiting
from app.edge.connection.protocol import ProblemProtocol, fault_answer
from ledger.errors import ProblemError
from ledger.facts.problems import MALFORMED_HTTP

READ_BYTES_MAX = 64 * 1024
"""Most bytes that are passed on at once."""


class TlsConnection(asyncio.Protocol, asyncio.Transport):
    """A protocol to the plain transport of a connection, and the transport of ``served``, which starts once the
    handshake is done."""

    def __init__(self, served: ProblemProtocol, context: ssl.SSLContext, bounds: ConnectionBounds) -> None:
        super().__init__()
        self._served = served
        self._connections: set[Any] = served.connections
        self._bounds = bounds
        self._context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._plain: asyncio.Transport
        self._is_secured = self._is_closing = False
        self._has_ended = False
        """Whether close_notify was sent; further data of the client is discarded."""
        self.waiting_since_s = 0.0

    # --- below: the plain transport ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self._plain = transport
        self.waiting_since_s = asyncio.get_running_loop().time()
        self._connections.add(self)
        if len(self._connections) > self._bounds.connections_max:
            # If all are busy, this one connection stays beyond the bound, to be refused; the next one evicts it.
            end_longest_waiting(self._connections, self)

    def data_received(self, data: bytes) -> None:
        """Whole or partial records."""
        if self._is_closing or self._has_ended:
            return
        self._incoming.write(data)
        if self._is_secured or self._shake():
            self._read()

    def eof_received(self) -> None:
        """The client sends nothing more."""
        if self._is_secured:
            self._served.eof_received()

    def pause_writing(self) -> None:
        """The client does not take what is written."""
        if self._is_secured:
            self._served.pause_writing()

    def resume_writing(self) -> None:
        """It does again."""
        if self._is_secured:
            self._served.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._is_closing = True
        if self._is_secured:
            self._served.connection_lost(exc)
        else:
            self._connections.discard(self)

    def _shake(self) -> bool:
        """Continue the handshake; returns whether it is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._refuse(error)
            return False
        self._flush()
        self._is_secured = True
        self._connections.discard(self)
        self._served.connection_made(self)
        return True

    def _refuse(self, error: ssl.SSLError) -> None:
        """End a failed handshake with its reason: an alert, or an HTTP answer to a client that speaks plain HTTP."""
        self._is_closing = True
        self._flush()
        if error.reason == "HTTP_REQUEST":
            told = ProblemError(MALFORMED_HTTP, "this port takes HTTPS: ask https:// here; the connection is closed")
            self._plain.write(fault_answer(told))
        self._plain.close()

    def _read(self) -> None:
        """Pass the content of the records on."""
        while not (self._is_closing or self._has_ended):
            try:
                data = self._tls.read(READ_BYTES_MAX)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:
                self._flush()
                self.abort()
                return
            if not data:
                self._served.eof_received()
                self.close()
                return
            self._served.data_received(data)
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._plain.write(self._outgoing.read())

    # --- above: the transport of what is served ---------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write ``data``, in as few records as possible."""
        if data and not self._has_ended:
            self._tls.write(data)
            self._flush()

    def write_eof(self) -> None:
        """Send close_notify; further data of the client is discarded."""
        if self._has_ended:
            return
        self._has_ended = True
        # It raises if the client has not sent its close_notify.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._flush()

    def get_write_buffer_size(self) -> int:
        """Encrypted bytes that the system has not taken."""
        return self._plain.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Stop reading; data that arrived is passed on whole, as by a plain transport."""
        self._plain.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._plain.resume_reading()

    def close(self) -> None:
        """Close the connection once all is written."""
        if self._is_closing:
            return
        self._is_closing = True
        self.write_eof()
        self._plain.close()

    def abort(self) -> None:
        """End the connection now."""
        self._is_closing = True
        self._plain.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closing or closed."""
        return self._is_closing or self._plain.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As asyncio's own transports for TLS, else as the plain one."""
        if name == "sslcontext":
            return self._context
        return self._tls.getpeercert() if name == "peercert" else self._plain.get_extra_info(name, default)

    # --- as all connections are asked, while the handshake runs -----------------------------------

    def look(self, now_s: float) -> None:
        """End the connection if the handshake takes too long."""
        if now_s - self.waiting_since_s > self._bounds.header_timeout_s:
            self.abort()

    def is_waiting(self) -> bool:
        """Whether the connection is open: during a handshake no answer is under way."""
        return not self.is_closing()

    def shutdown(self) -> None:
        """The service stops."""
        self.abort()

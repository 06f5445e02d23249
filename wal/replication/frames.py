"""Frames over a connected socket, plain or TLS, read and sent by one thread that blocks, with a deadline for each wait.

Everything here is bounded::

    a frame              by its reader's limit, checked against the prefix, before memory for it is allocated
    a buffer             by OWN_BYTES; a longer frame takes the rest from a budget that all connections share
    a wait               for the next frame, for the rest of a frame, and for a peer that does not receive
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from ledger.errors import InvalidInputError, LedgerError
from ledger.positions import Lsn
from wal.native import Stream
from wal.replication import messages
from wal.replication.configuration import split_address
from wal.replication.messages import FRAME_BYTES_MAX, PREFIX_BYTES, Frame, Status, StatusReport, WalStatus
from wal.replication.tls import PeerTls

READ_BYTES = 1 << 20
"""First size of a connection's buffer; frames that it holds at the same time are synced together."""
OWN_BYTES = 2 << 20
"""Size up to which a buffer takes nothing from the budget: a frame with a usual batch fits."""
FRAME_TIMEOUT_S = 60.0
"""Deadline for the rest of a frame after its first byte, and for the peer to receive a sent frame."""


class ConnectionOverError(LedgerError):
    """The peer closed, was silent for too long, or sent more than the memory budget allows; or this side stops."""


class Budget:
    """Bytes that several connections may hold together; thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self._left_bytes = total_bytes
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Take so many bytes until ``give_back``; False if fewer are left."""
        with self._lock:
            is_there = size_bytes <= self._left_bytes
            self._left_bytes -= size_bytes if is_there else 0
            return is_there

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._left_bytes += size_bytes


class FrameSocket:
    """One connection; belongs to one thread. It owns ``connected``, and MUST be closed. Another thread ends all waits
    by shutting down a duplicate of the socket. After a method has raised, no more frames can be read or sent.
    """

    def __init__(self, connected: socket.socket, budget: Budget) -> None:
        self._socket = connected
        self._budget = budget
        self._buffer = bytearray(READ_BYTES)
        self._taken_bytes = 0
        """Bytes taken from the budget."""
        self._at = self._end = 0
        """Bytes that were read and not returned yet are between these offsets."""

    def close(self) -> None:
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = 0
        self._socket.close()

    # --- reading ----------------------------------------------------------------------------------

    def next(self, idle_s: float, frame_bytes_max: int = FRAME_BYTES_MAX) -> Frame:
        """Wait for the next frame; its body is valid until the next call.

        Raises:
            InvalidInputError: the bytes are not a frame, or it is longer than allowed.
            ConnectionOverError, OSError: no frame comes in time, or the connection is over.
        """
        if self._at == self._end:
            self._begin_buffer()
            self._read(time.monotonic() + idle_s)
        deadline_s = time.monotonic() + FRAME_TIMEOUT_S
        while (length := self._length_of_next(frame_bytes_max)) > self._end - self._at:
            self._make_space(length)
            self._read(deadline_s)
        return self._take(length)

    def more(self) -> Iterator[Frame]:
        """Frames that have arrived already, as far as the buffer reaches; raises what ``next`` raises."""
        with suppress(ConnectionOverError):  # ``next`` finds the connection over, too
            while self._at + (length := self._length_of_next(FRAME_BYTES_MAX)) <= len(self._buffer):
                if length <= self._end - self._at:
                    yield self._take(length)
                else:
                    self._read(0.0)

    @property
    def can_stream(self) -> bool:
        """Whether a stream could receive the next bytes: the connection has no TLS, and the buffer is empty."""
        return not isinstance(self._socket, ssl.SSLSocket) and self._at == self._end

    def give_to(self, stream: Stream, idle_s: float) -> None:
        """Let ``stream`` receive until bytes arrive that it does not handle; ``next`` returns these.

        Raises:
            ConnectionOverError, OSError: no bytes come in time, the connection is over, or the peer does not receive.
        """
        self._begin_buffer()
        self._end, unsent, is_late = stream.serve(self._socket.fileno(), self._buffer, idle_s, FRAME_TIMEOUT_S)
        if is_late:
            raise ConnectionOverError("the peer is silent")
        self._send(unsent)

    def _take(self, length: int) -> Frame:
        begin, self._at = self._at, self._at + length
        return messages.decode(memoryview(self._buffer)[begin : self._at])

    def _length_of_next(self, frame_bytes_max: int) -> int:
        """Bytes of the next frame; of its prefix, if that has not arrived yet."""
        if self._end - self._at < PREFIX_BYTES:
            return PREFIX_BYTES
        if (length := messages.length_of(memoryview(self._buffer)[self._at : self._end])) > frame_bytes_max:
            raise InvalidInputError(f"a frame of {length} bytes is out of bounds here")
        return length

    def _begin_buffer(self) -> None:
        """Start at the front of the buffer, which is empty; a long buffer is replaced."""
        self._at = self._end = 0
        if self._taken_bytes:
            self._buffer = bytearray(READ_BYTES)
            self._budget.give_back(self._taken_bytes)
            self._taken_bytes = 0

    def _make_space(self, length: int) -> None:
        """Make space in the buffer for the rest of a frame of this length. The buffer grows to at most twice the bytes
        it holds of the frame, so a peer gets no memory for bytes that it only announces."""
        if self._end < len(self._buffer):
            return
        has = self._end - self._at
        size = max(READ_BYTES, min(length, 2 * has))
        taken_bytes = max(0, size - OWN_BYTES)
        if not self._budget.take(taken_bytes):
            raise ConnectionOverError(f"no room for a frame of {length} bytes, as others hold too many")
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = taken_bytes
        buffer = bytearray(size)
        buffer[:has] = memoryview(self._buffer)[self._at : self._end]
        self._buffer, self._at, self._end = buffer, 0, has

    def _read(self, deadline_s: float) -> None:
        """Wait for bytes until ``deadline_s``, and read those that have arrived."""
        with self._waiting(deadline_s):
            count = self._socket.recv_into(memoryview(self._buffer)[self._end :])
        if not count:
            raise ConnectionOverError("the peer closed the connection")
        self._end += count

    # --- writing ----------------------------------------------------------------------------------

    def send(self, *frames: Frame) -> None:
        """Send frames, one after the other.

        Raises:
            ConnectionOverError, OSError: the peer does not receive them.
        """
        self._send(b"".join(part for frame in frames for part in messages.encode(frame)))

    def _send(self, data: bytes) -> None:
        left, deadline_s = memoryview(data), time.monotonic() + FRAME_TIMEOUT_S
        while left:
            with self._waiting(deadline_s):
                left = left[self._socket.send(left) :]

    @contextmanager
    def _waiting(self, deadline_s: float) -> Iterator[None]:
        """Socket operations inside wait for the peer until this time of the monotonic clock; not at all after it.

        Raises:
            ConnectionOverError: the time is up.
        """
        self._socket.settimeout(max(0.0, deadline_s - time.monotonic()))
        try:
            yield
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise ConnectionOverError("the peer is silent, or takes nothing") from error


def open_connection(host: str, port: int, tls: PeerTls | None, timeout_s: float) -> socket.socket:
    """A connection to the safekeeper there; with ``tls`` its certificate MUST name ``host``.

    Raises:
        OSError: it cannot be opened in this time.
    """
    connection = socket.create_connection((host, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection if tls is None else tls.context().wrap_socket(connection, server_hostname=host)


def connect(host: str, port: int, tls: PeerTls | None, timeout_s: float) -> FrameSocket:
    """As ``open_connection``, for frames."""
    return FrameSocket(open_connection(host, port, tls, timeout_s), Budget(FRAME_BYTES_MAX))


def status(host: str, port: int, tls: PeerTls | None, timeout_s: float) -> StatusReport:
    """The state of all logs of a safekeeper. Each answer is awaited for ``timeout_s``; no further report is requested
    after ``FRAME_TIMEOUT_S`` in all.

    Raises:
        InvalidInputError: the peer does not answer like a safekeeper.
        ConnectionOverError, OSError: no answer, or not in time.
    """
    wals: list[WalStatus] = []
    ends_s = time.monotonic() + FRAME_TIMEOUT_S
    with closing(connect(host, port, tls, timeout_s)) as frames:
        while True:
            after = wals[-1].node_id if wals else ""
            frames.send(Frame(Status(after)))
            report = frames.next(timeout_s, OWN_BYTES).message
            if not isinstance(report, StatusReport):
                raise InvalidInputError(f"a safekeeper reports how it stands, and does not answer {report}")
            wals += report.wals
            if not report.more:
                return StatusReport(report.region, tuple(wals), more=False)
            if not report.wals or wals[-1].node_id <= after:
                raise InvalidInputError(f"a safekeeper reports its logs by node, and none twice: not behind {after!r}")
            if time.monotonic() > ends_s:
                raise ConnectionOverError("the peer reports on and on")


def status_or_fault(address: str, tls: PeerTls | None, timeout_s: float) -> StatusReport | str:
    """As ``status`` of the safekeeper at ``address``, or in words why it does not answer."""
    try:
        return status(*split_address(address), tls, timeout_s)
    except (OSError, LedgerError) as error:
        return str(error)


def unchained_in(wal: WalStatus, wal_id: str, chained_lsn: Lsn) -> int:
    """How many records of this log are above ``chained_lsn``, the last chained LSN of the log ``wal_id``; 0 if it is
    another log."""
    return max(0, max(wal.tail.lsn, wal.durable_lsn) - chained_lsn) if wal.wal_id == wal_id else 0

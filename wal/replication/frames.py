"""Frames over a connected socket, plain or TLS, by one thread that waits for it, but never longer than it may.

Everything here is bounded::

    a frame              by what its reader allows, checked by its prefix, before memory for it is allocated
    a buffer             by OWN_BYTES; a longer frame takes the rest from a budget that all connections share
    waiting              for the next frame, for the rest of one, and for a peer that does not take what it is sent
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
from wal.replication.messages import FRAME_BYTES_MAX, PREFIX_BYTES, Frame, Status, StatusReport, WalStatus
from wal.replication.tls import PeerTls

READ_BYTES = 1 << 20
"""A buffer of this size is what a connection begins with; what it holds at once is synced together."""
OWN_BYTES = 2 << 20
"""And this is what it may always hold: a frame that carries a usual batch."""
FRAME_TIMEOUT_S = 60.0
"""A frame is whole within this after its first byte, and a sent frame is received by the peer."""


class ConnectionOverError(LedgerError):
    """The peer closed, or is silent for too long, or sends more than there is memory for; or this side stops."""


class Budget:
    """Bytes that several connections may hold together; for any thread."""

    def __init__(self, total_bytes: int) -> None:
        self._left_bytes = total_bytes
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Take so many bytes, which are the caller's until given back; False if there are not as many."""
        with self._lock:
            is_there = size_bytes <= self._left_bytes
            self._left_bytes -= size_bytes if is_there else 0
            return is_there

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._left_bytes += size_bytes


class FrameSocket:
    """One connection; belongs to one thread. It takes ``connected`` over, and MUST be closed. Another thread ends all
    waiting when it shuts a duplicate of the socket down. After a method has raised, nothing more can be read or sent.
    """

    def __init__(self, connected: socket.socket, budget: Budget) -> None:
        self._socket = connected
        self._budget = budget
        self._buffer = bytearray(READ_BYTES)
        self._taken_bytes = 0
        """Of the budget."""
        self._at = self._end = 0
        """What was read and not given out is between these."""

    def close(self) -> None:
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = 0
        self._socket.close()

    # --- reading ----------------------------------------------------------------------------------

    def next(self, idle_s: float, frame_bytes_max: int = FRAME_BYTES_MAX) -> Frame:
        """The next frame, waited for; its body holds until the next call of this.

        Raises:
            InvalidInputError: it is not one, or longer than allowed.
            ConnectionOverError, OSError: none comes any more, or not in time.
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
        """Frames that have come already, as far as the buffer reaches; raises what ``next`` raises."""
        with suppress(ConnectionOverError):  # ``next`` finds the connection over, too
            while self._at + (length := self._length_of_next(FRAME_BYTES_MAX)) <= len(self._buffer):
                if length <= self._end - self._at:
                    yield self._take(length)
                else:
                    self._read(0.0)

    @property
    def can_stream(self) -> bool:
        """Whether a stream could receive what comes next: nothing that came is left."""
        return not isinstance(self._socket, ssl.SSLSocket) and self._at == self._end

    def give_to(self, stream: Stream, idle_s: float) -> None:
        """Let ``stream`` receive until something comes that it does not handle, which ``next`` gives then.

        Raises:
            ConnectionOverError, OSError: none comes any more, or not in time; or the peer does not take an answer.
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
        """Bytes of the next frame; of its prefix, where not even that has come."""
        if self._end - self._at < PREFIX_BYTES:
            return PREFIX_BYTES
        length = messages.length_of(memoryview(self._buffer)[self._at : self._end])
        if length > frame_bytes_max:
            raise InvalidInputError(f"a frame of {length} bytes is out of bounds here")
        return length

    def _begin_buffer(self) -> None:
        """Start at the front again, since nothing is left; a long buffer is not kept."""
        self._at = self._end = 0
        if self._taken_bytes:
            self._buffer = bytearray(READ_BYTES)
            self._budget.give_back(self._taken_bytes)
            self._taken_bytes = 0

    def _make_space(self, length: int) -> None:
        """Make space in the buffer behind what was read of a frame of this length: up to twice what it holds of it, so
        a peer gets no memory for bytes that it only announces."""
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
        """Read what has come, once anything has, but wait no longer than until ``deadline_s``."""
        with self._waiting(deadline_s):
            count = self._socket.recv_into(memoryview(self._buffer)[self._end :])
        if not count:
            raise ConnectionOverError("the peer closed the connection")
        self._end += count

    # --- writing ----------------------------------------------------------------------------------

    def send(self, *frames: Frame) -> None:
        """Send frames, one behind the other.

        Raises:
            ConnectionOverError, OSError: the peer does not take them.
        """
        self._send(b"".join(part for frame in frames for part in messages.encode(frame)))

    def _send(self, data: bytes) -> None:
        left, deadline_s = memoryview(data), time.monotonic() + FRAME_TIMEOUT_S
        while left:
            with self._waiting(deadline_s):
                left = left[self._socket.send(left) :]

    @contextmanager
    def _waiting(self, deadline_s: float) -> Iterator[None]:
        """What waits for the peer here does so until this time of the monotonic clock; not at all once it is over.

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
        OSError: it cannot be made in this time.
    """
    connection = socket.create_connection((host, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection if tls is None else tls.context().wrap_socket(connection, server_hostname=host)


def connect(host: str, port: int, tls: PeerTls | None, timeout_s: float) -> FrameSocket:
    """As ``open_connection``, for frames."""
    return FrameSocket(open_connection(host, port, tls, timeout_s), Budget(FRAME_BYTES_MAX))


def status(host: str, port: int, tls: PeerTls | None, timeout_s: float) -> StatusReport:
    """The state of all logs of a safekeeper; each of its answers is waited for so long, and no more are asked for once
    they took ``FRAME_TIMEOUT_S`` together.

    Raises:
        InvalidInputError: what answers there is no safekeeper.
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


def unchained_in(wal: WalStatus, wal_id: str, chained_lsn: Lsn) -> int:
    """How many records of this log are above ``chained_lsn``, what is chained of the log ``wal_id``; none if it is
    another one."""
    return max(0, max(wal.tail.lsn, wal.durable_lsn) - chained_lsn) if wal.wal_id == wal_id else 0

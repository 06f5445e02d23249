"""Connections to the members of a quorum, all driven by one thread: it sends and receives frames and reports losses.

Other threads make the connections, so a slow name server or TLS handshake delays no other member; only ``wait`` blocks.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ledger.errors import InvalidInputError
from wal.replication.configuration import split_address
from wal.replication.frames import open_connection
from wal.replication.messages import PREFIX_BYTES, Frame, decode, encode, length_of
from wal.replication.tls import PeerTls, is_damage, reason_of

RECEIVE_BYTES = 1 << 18
CALLED = 1 << 32
"""``wake`` adds this to ``wake_fd``, which ends shipping in C, too; the writer of the log adds 1."""
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 2.0
"""Pause between attempts to reach a lost member: ``PAUSE_FIRST_S`` first, doubled each time, up to ``PAUSE_MAX_S``."""


class Connected(NamedTuple):
    """The connection to a member was opened."""

    address: str


class Lost(NamedTuple):
    """A connection was lost, or could not be opened; ``is_damaged`` if it carried damaged bytes."""

    address: str
    reason: str
    is_damaged: bool = False


class Received(NamedTuple):
    """A member sent a frame."""

    address: str
    frame: Frame


Event = Connected | Lost | Received


class Wires:
    """One connection to each of ``addresses``, opened by ``open_due`` and kept until it is lost or closed."""

    def __init__(self, addresses: Iterable[str], tls: PeerTls | None, timeout_s: float) -> None:
        self._wires = {address: _Wire(address) for address in addresses}
        self._tls = tls
        self._timeout_s = timeout_s
        self._silence = f"nothing was heard for {timeout_s:g} s"
        self.epoll = select.epoll()
        """Watches ``wake_fd`` and all connections."""
        self._polled: dict[int, _Wire] = {}
        """By descriptor."""
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Ends a ``wait`` when it is written to."""
        self.epoll.register(self.wake_fd, select.EPOLLIN)
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        """Guards the attributes below, and ``wake_fd``: a late thread must not write to a reused descriptor."""
        self._made: list[tuple[_Wire, socket.socket | OSError]] = []
        """Finished attempts to connect."""
        self._is_left = False

    def wake(self) -> None:
        """End a ``wait``, or shipping in C; thread-safe. Does nothing after ``close``."""
        with self._lock:
            if self.wake_fd >= 0:
                os.eventfd_write(self.wake_fd, CALLED)

    def descriptor_of(self, address: str) -> int | None:
        """Descriptor of the connection, for shipping in C; None if it is closed, has TLS, or frames wait."""
        wire = self._wires[address]
        is_bare = wire.socket is not None and self._tls is None and not wire.out and not wire.received
        return wire.descriptor if is_bare and not self._events else None

    def is_open(self, address: str) -> bool:
        """Whether the connection to the member is open."""
        return self._wires[address].socket is not None

    def went_on(self, address: str, received: bytes, unsent: bytes, error: int) -> None:
        """Take over from C: the bytes that it received, those it could not send, and the errno of a failure."""
        wire = self._wires[address]
        if wire.socket is None:
            return  # an answer that was handled before has closed it
        wire.received_s = time.monotonic()
        try:
            if error:
                raise _closed() if error < 0 else OSError(error, os.strerror(error))
            if unsent:
                wire.out.append(memoryview(unsent))
                self._flush(wire)
            wire.received += received
            self._events += wire.take_frames()
        except (OSError, InvalidInputError) as fault:
            self._fail(wire, fault)

    def open_due(self) -> None:
        """Start to connect to each member that is not connected, once its pause is over."""
        for wire in self._wires.values():
            if wire.socket is None and not wire.is_connecting and time.monotonic() >= wire.next_try_s:
                wire.is_connecting = True
                threading.Thread(target=self._connect, args=(wire,), name="wal-connector", daemon=True).start()

    def send(self, address: str, frame: Frame) -> None:
        """Send without waiting; ``wait`` sends the rest. Does nothing if the connection is lost."""
        wire = self._wires[address]
        if wire.socket is not None:
            try:
                wire.out.append(memoryview(b"".join(encode(frame))))
                self._flush(wire)
            except OSError as error:
                self._fail(wire, error)

    def close_one(self, address: str, reason: str, *, is_last: bool) -> None:
        """Close a connection, and open it again after a pause; never again if ``is_last``."""
        self._lose(self._wires[address], reason)
        if is_last:
            self._wires[address].next_try_s = math.inf

    def settled(self, address: str) -> None:
        """The member follows: reset the pause after a loss to the shortest."""
        self._wires[address].pause_s = PAUSE_FIRST_S

    def wait(self, timeout_s: float) -> list[Event]:
        """The events so far, at once if there are any; else wait for up to ``timeout_s`` seconds or until ``wake``."""
        if not self._events:
            for descriptor, mask in self.epoll.poll(timeout_s):
                wire = self._polled.get(descriptor)
                if descriptor == self.wake_fd:
                    os.eventfd_read(self.wake_fd)
                elif wire is not None:
                    self._serve(wire, mask)
            self._take_connections()
            self.lose_silent()
        events, self._events = list(self._events), deque()
        return events

    def lose_silent(self) -> None:
        """Close connections that were silent for too long."""
        silent_since_s = time.monotonic() - self._timeout_s
        for wire in self._wires.values():
            if wire.socket is not None and wire.received_s < silent_since_s:
                self._lose(wire, self._silence)

    def leave(self) -> None:
        """Close all connections; ``wake_fd`` stays open."""
        with self._lock:
            self._is_left = True
        self._take_connections()
        for wire in self._wires.values():
            self._close(wire)

    def close(self) -> None:
        """Close everything."""
        self.leave()
        self.epoll.close()
        with self._lock:
            os.close(self.wake_fd)
            self.wake_fd = -1

    def _connect(self, wire: _Wire) -> None:
        """Connect to the member, on a thread of its own; ``wait`` takes the result."""
        made: socket.socket | OSError
        try:
            made = open_connection(*split_address(wire.address), self._tls, self._timeout_s)
            made.setblocking(False)
        except TimeoutError:
            made = TimeoutError(self._silence)
        except OSError as error:
            made = error
        with self._lock:
            if not self._is_left:
                self._made.append((wire, made))
                os.eventfd_write(self.wake_fd, CALLED)
            elif isinstance(made, socket.socket):
                made.close()

    def _take_connections(self) -> None:
        with self._lock:
            made, self._made = self._made, []
        for wire, result in made:
            wire.is_connecting = False
            if isinstance(result, OSError):
                self._fail(wire, result)
                continue
            wire.socket, wire.descriptor = result, result.fileno()
            wire.out, wire.received, wire.received_s = deque(), bytearray(), time.monotonic()
            self._polled[wire.descriptor] = wire
            self.epoll.register(wire.descriptor, select.EPOLLIN)
            self._events.append(Connected(wire.address))

    def _serve(self, wire: _Wire, mask: int) -> None:
        try:
            if mask & ~select.EPOLLOUT:
                wire.receive()
                self._events += wire.take_frames()
            self._flush(wire)
        except (OSError, InvalidInputError) as error:
            self._fail(wire, error)

    def _flush(self, wire: _Wire) -> None:
        """Send as many bytes as the socket accepts, and poll for the rest.

        Raises:
            OSError: the connection is broken.
        """
        assert wire.socket is not None
        with contextlib.suppress(*_NOT_NOW):
            while wire.out:
                wire.out[0] = wire.out[0][wire.socket.send(wire.out[0]) :]
                if not wire.out[0]:
                    wire.out.popleft()
        if wire.has_rest != bool(wire.out):
            wire.has_rest = bool(wire.out)
            self.epoll.modify(wire.descriptor, select.EPOLLIN | (select.EPOLLOUT if wire.has_rest else 0))

    def _fail(self, wire: _Wire, error: OSError | InvalidInputError) -> None:
        """Lose the connection for this reason, or for the peer's TLS alert if that was not read yet."""
        if isinstance(error, InvalidInputError):
            self._lose(wire, str(error), is_damaged=True)
        else:
            error = wire.last_alert() or error
            self._lose(wire, reason_of(error), is_damaged=is_damage(error))

    def _lose(self, wire: _Wire, reason: str, *, is_damaged: bool = False) -> None:
        self._close(wire)
        wire.next_try_s = max(wire.next_try_s, time.monotonic() + wire.pause_s)
        wire.pause_s = min(2 * wire.pause_s, PAUSE_MAX_S)
        self._events.append(Lost(wire.address, reason, is_damaged))

    def _close(self, wire: _Wire) -> None:
        if wire.socket is not None:
            del self._polled[wire.descriptor]
            self.epoll.unregister(wire.descriptor)
            wire.socket.close()
            wire.socket, wire.has_rest = None, False


@dataclass(eq=False, slots=True)
class _Wire:
    """The connection to one member, plain or TLS, and the bytes under way."""

    address: str
    socket: socket.socket | None = None
    """None while there is no connection."""
    descriptor: int = -1
    is_connecting: bool = False
    next_try_s: float = 0.0
    pause_s: float = PAUSE_FIRST_S
    out: deque[memoryview] = field(default_factory=deque)
    """Bytes to be sent."""
    has_rest: bool = False
    """The socket did not accept all of ``out``."""
    received: bytearray = field(default_factory=bytearray)
    """Bytes of a frame that is not whole yet."""
    received_s: float = 0.0

    def receive(self) -> None:
        """Receive the bytes that have arrived.

        Raises:
            OSError: the connection is broken, or the peer closed it.
        """
        assert self.socket is not None
        with contextlib.suppress(*_NOT_NOW):
            if not (data := self.socket.recv(RECEIVE_BYTES)):
                raise _closed()
            self.received += data
            while isinstance(self.socket, ssl.SSLSocket) and (pending := self.socket.pending()):
                self.received += self.socket.recv(pending)

    def take_frames(self) -> list[Received]:
        """All frames that are whole.

        Raises:
            InvalidInputError: one is damaged.
        """
        self.received_s = time.monotonic()
        frames, at = [], 0
        with memoryview(self.received) as found:
            while len(found) - at >= PREFIX_BYTES:
                length = length_of(found[at : at + PREFIX_BYTES])
                if len(found) - at < length:
                    break
                frames.append(Received(self.address, decode(bytes(found[at : at + length]))))
                at += length
        del self.received[:at]
        return frames

    def last_alert(self) -> ssl.SSLError | None:
        """The TLS alert of the peer, if it sent one that was not read yet."""
        try:
            while isinstance(self.socket, ssl.SSLSocket) and self.socket.recv(RECEIVE_BYTES):
                pass
        except OSError as error:
            is_end = isinstance(error, (*_NOT_NOW, ssl.SSLZeroReturnError, ssl.SSLEOFError))
            return error if isinstance(error, ssl.SSLError) and not is_end else None
        return None


_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _closed() -> OSError:
    return ConnectionResetError("the member closed the connection")

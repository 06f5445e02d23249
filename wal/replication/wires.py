"""Connections to the members of a quorum, all driven by one thread: frames out, frames in, who was lost and why.

Nothing here blocks but ``wait``: names are looked up by threads of their own, and TLS is spoken over memory, so that a
slow name server or handshake holds up nobody else.
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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ledger.errors import InvalidInputError
from wal.replication.configuration import split_address
from wal.replication.messages import PREFIX_BYTES, Frame, decode, encode, length_of
from wal.replication.tls import PeerTls, is_damage, reason_of

RECEIVE_BYTES = 1 << 18
SILENCE_LOOKS = 20
"""So often within the time after which a silent member is lost it is looked whether one is."""
CALLED = 1 << 32
"""What is added to the bell so that Python hears it; whoever writes the log adds 1."""
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 2.0
"""Between attempts to reach a member that is lost: at first this, then twice as long each time, up to this."""


class Connected(NamedTuple):
    """A member can be spoken to."""

    address: str


class Lost(NamedTuple):
    """A member cannot be spoken to any more, or was not reached; ``is_damaged`` where what it sent was damaged."""

    address: str
    reason: str
    is_damaged: bool = False


class Received(NamedTuple):
    """A member said something."""

    address: str
    frame: Frame


Event = Connected | Lost | Received


class Wires:
    """One connection to each of ``addresses``, opened by ``open`` and kept until it is lost or closed."""

    def __init__(self, addresses: Mapping[str, str], tls: PeerTls | None, timeout_s: float) -> None:
        self._wires = {address: _Wire(address, tls) for address in addresses}
        self._timeout_s = timeout_s
        self._poll = select.epoll()
        self._polled: dict[int, _Wire] = {}
        """By descriptor."""
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Ends a ``wait`` when it is rung."""
        self._bell_is_held = threading.Lock()
        """Over each ring, and when it is closed: a resolver that is late must not write to whose number it then is."""
        self._poll.register(self.bell, select.EPOLLIN)
        self._events: deque[Event] = deque()
        self._encoded: tuple[Frame, Encoded] | None = None
        """The frame that was sent last: often it goes to all."""
        self._look_for_silent_s = 0.0

    def ring(self) -> None:
        """End a ``wait``, and what goes on instead of one; from any thread. Nothing once it is closed."""
        with self._bell_is_held:
            if self.bell >= 0:
                os.eventfd_write(self.bell, CALLED)

    @property
    def epoll(self) -> int:
        """What has the bell and all connections, for who waits instead."""
        return self._poll.fileno()

    def descriptor_of(self, address: str) -> int | None:
        """The connection, where nothing is between it and the member but frames, and none of them is on its way here;
        None else."""
        wire = self._wires[address]
        return wire.descriptor if wire.is_bare and not self._events else None

    def is_open(self, address: str) -> bool:
        """Whether the member can be spoken to."""
        return self._wires[address].is_open

    def went_on(self, address: str, said: bytes, unsent: bytes, error: int) -> None:
        """Another one has spoken over the connection: what he read, what he could not send, and what errno was then."""
        wire = self._wires[address]
        if not wire.is_open:
            return  # what was heard of it first has ended it
        wire.heard_s = time.monotonic()
        try:
            if error:
                raise _closed() if error < 0 else OSError(error, os.strerror(error))
            if unsent:
                wire.send((unsent, b""))
                self._flush(wire)
            for frame in wire.take(said) if said else ():
                self._events.append(Received(address, frame))
        except (OSError, InvalidInputError) as fault:
            self._fail(wire, fault)

    def open_due(self) -> None:
        """Begin to connect to each member that is not connected, once its pause is over."""
        now_s = time.monotonic()
        for wire in self._wires.values():
            if wire.socket is None and now_s >= wire.next_try_s:
                wire.heard_s = now_s
                try:
                    if wire.is_found(self.ring):
                        wire.connect()
                        wire.is_awaited_to_write = True
                        self._polled[wire.descriptor] = wire
                        self._poll.register(wire.descriptor, select.EPOLLIN | select.EPOLLOUT)
                except OSError as error:
                    self._fail(wire, error)

    def send(self, address: str, frame: Frame) -> None:
        """Send as far as it goes at once, the rest by ``wait``. Nothing happens where the member is lost."""
        wire = self._wires[address]
        if wire.is_open:
            try:
                if self._encoded is None or self._encoded[0] is not frame:
                    self._encoded = frame, encode(frame)
                wire.send(self._encoded[1])
                self._flush(wire)
            except OSError as error:
                self._fail(wire, error)

    def close_one(self, address: str, reason: str) -> None:
        """Give a connection up: it will be tried again after a pause."""
        self._lose(self._wires[address], reason)

    def give_up(self, address: str) -> None:
        """Do not connect to the member again."""
        self._wires[address].next_try_s = math.inf

    def settled(self, address: str) -> None:
        """The member does what it should: should it be lost, it is tried again at once."""
        self._wires[address].pause_s = PAUSE_FIRST_S

    def wait(self, timeout_s: float) -> list[Event]:
        """What happened, at once if anything did, else within ``timeout_s`` seconds or when the bell was rung."""
        if not self._events:
            for descriptor, mask in self._poll.poll(timeout_s):
                wire = self._polled.get(descriptor)
                if descriptor == self.bell:
                    os.eventfd_read(self.bell)
                elif wire is not None:
                    self._serve(wire, mask)
            self.lose_silent()
        events, self._events = list(self._events), deque()
        return events

    def leave(self) -> None:
        """Let all connections go; the bell may still be rung."""
        for wire in self._wires.values():
            if wire.socket is not None:
                self._let_go(wire)

    def close(self) -> None:
        """Let everything go."""
        self.leave()
        self._poll.close()
        with self._bell_is_held:
            os.close(self.bell)
            self.bell = -1

    def _serve(self, wire: _Wire, mask: int) -> None:
        try:
            if not wire.is_open and wire.goes_on():
                self._events.append(Connected(wire.address))
            if wire.is_open and mask & ~select.EPOLLOUT:
                for frame in wire.receive():
                    self._events.append(Received(wire.address, frame))
            self._flush(wire)
        except (OSError, InvalidInputError) as error:
            self._fail(wire, error)

    def _flush(self, wire: _Wire) -> None:
        wire.flush()
        if wire.wants_to_write != wire.is_awaited_to_write:
            wire.is_awaited_to_write = wire.wants_to_write
            self._poll.modify(wire.descriptor, select.EPOLLIN | (select.EPOLLOUT if wire.wants_to_write else 0))

    def lose_silent(self) -> None:
        """Give up who said nothing for too long; it is looked for now and then."""
        now_s = time.monotonic()
        if now_s < self._look_for_silent_s:
            return
        self._look_for_silent_s = now_s + self._timeout_s / SILENCE_LOOKS
        for wire in self._wires.values():
            if wire.socket is not None and now_s - wire.heard_s > self._timeout_s:
                self._lose(wire, f"nothing was heard for {self._timeout_s:g} s")

    def _fail(self, wire: _Wire, error: OSError | InvalidInputError) -> None:
        """Lose the member for this reason; for what it said last, where the connection broke before that was read."""
        if isinstance(error, InvalidInputError):
            self._lose(wire, str(error), is_damaged=True)
        else:
            error = wire.last_words() or error
            with contextlib.suppress(OSError):
                wire.flush()  # what this side has to say of it
            self._lose(wire, reason_of(error), is_damaged=is_damage(error))

    def _lose(self, wire: _Wire, reason: str, *, is_damaged: bool = False) -> None:
        if wire.socket is not None:
            self._let_go(wire)
        wire.next_try_s = max(wire.next_try_s, time.monotonic() + wire.pause_s)
        wire.pause_s = min(2 * wire.pause_s, PAUSE_MAX_S)
        self._events.append(Lost(wire.address, reason, is_damaged))

    def _let_go(self, wire: _Wire) -> None:
        if self._polled.pop(wire.descriptor, None) is not None:
            self._poll.unregister(wire.descriptor)
        wire.close()


Encoded = tuple[bytes, bytes | memoryview]
"""A frame's beginning and its body."""

_Where = tuple[socket.AddressFamily, socket.SocketKind, int, Any]


class _Wire:
    """One connection: a socket, perhaps TLS over it, and the bytes under way."""

    def __init__(self, address: str, tls: PeerTls | None) -> None:
        self.address = address
        self._host, self._port = split_address(address)
        self._tls = tls
        self.socket: socket.socket | None = None
        self.descriptor = -1
        self.is_open = False
        self.is_awaited_to_write = False
        self.heard_s = 0.0
        self.next_try_s = 0.0
        self.pause_s = PAUSE_FIRST_S
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._room = memoryview(bytearray(RECEIVE_BYTES))
        self._is_looking = False
        self._found: _Where | OSError | None = None
        self._where: _Where | None = None

    @property
    def is_bare(self) -> bool:
        """It is open, without TLS, and nothing is half sent or half received."""
        return self.is_open and self._tls is None and not self._out and not self._in

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out) or not self._is_connected

    def is_found(self, ring: Callable[[], None]) -> bool:
        """Whether it is known where the member is; begins to look that up, and rings once it is.

        Raises:
            OSError: there is no such host.
        """
        found, self._found = self._found, None
        if isinstance(found, OSError):
            raise found
        if found is not None:
            self._where = found
            return True
        if not self._is_looking:
            self._is_looking = True
            threading.Thread(target=self._look_up, args=(ring,), name="wal-resolver", daemon=True).start()
        return False

    def _look_up(self, ring: Callable[[], None]) -> None:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            self._found = family, kind, protocol, where
        except OSError as error:
            self._found = error
        self._is_looking = False
        ring()

    def connect(self) -> None:
        assert self._where is not None
        family, kind, protocol, where = self._where
        self.socket = socket.socket(family, kind, protocol)
        self.descriptor = self.socket.fileno()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_connected = self.is_open = False
        self._out, self._in = deque(), bytearray()
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(where)
        if self._tls is not None:
            self._from_net, self._to_net = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._ssl = self._tls.context().wrap_bio(self._from_net, self._to_net, server_hostname=self._host)

    def goes_on(self) -> bool:
        """Take the next step towards an open connection; whether it is open now."""
        assert self.socket is not None
        if not self._is_connected:
            if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            try:
                self.socket.getpeername()
            except OSError:
                return False
            self._is_connected = True
            self.heard_s = time.monotonic()
        if self._tls is not None:
            self._take_in()
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                return False
            finally:
                self._give_out()
        self.is_open = True
        return True

    def send(self, encoded: Encoded) -> None:
        for part in encoded:
            if self._tls is not None:
                self._ssl.write(part) if part else None
            elif part:
                self._out.append(memoryview(part))
        if self._tls is not None:
            self._give_out()

    def flush(self) -> None:
        while self.socket is not None and self._out and self._is_connected:
            try:
                sent = self.socket.sendmsg(list(self._out)[:64])
            except BlockingIOError:
                return
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]

    def receive(self) -> list[Frame]:
        """All frames that are whole."""
        if self._tls is None:
            return self.take(self._read_socket())
        self._take_in()
        with contextlib.suppress(ssl.SSLWantReadError):
            while data := self._ssl.read(RECEIVE_BYTES):
                self._in += data
        self._give_out()
        return self.take(b"")

    def take(self, data: bytes | memoryview) -> list[Frame]:
        """All frames that are whole now that this has come."""
        self._in += data
        self.heard_s = time.monotonic()
        frames, at = [], 0
        with memoryview(self._in) as found:
            while len(found) - at >= PREFIX_BYTES:
                length = length_of(found[at : at + PREFIX_BYTES])
                if len(found) - at < length:
                    break
                frames.append(decode(bytes(found[at : at + length])))
                at += length
        del self._in[:at]
        return frames

    def last_words(self) -> ssl.SSLError | None:
        """Why the peer ended TLS, where it said so and that was not read yet."""
        if self._tls is None or not self.is_open:
            return None
        try:
            self._take_in()
            while self._ssl.read(RECEIVE_BYTES):
                pass
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return None
        except ssl.SSLError as error:
            return error
        except OSError:
            return None
        return None

    def close(self) -> None:
        assert self.socket is not None
        self.socket.close()
        self.socket, self.is_open = None, False

    def _read_socket(self) -> bytes | memoryview:
        """What has come; holds until the next call."""
        assert self.socket is not None
        try:
            count = self.socket.recv_into(self._room)
        except BlockingIOError:
            return b""
        if not count:
            raise _closed()
        return self._room[:count]

    def _take_in(self) -> None:
        if data := self._read_socket():
            self._from_net.write(data)

    def _give_out(self) -> None:
        if data := self._to_net.read():
            self._out.append(memoryview(data))


def _closed() -> OSError:
    return ConnectionResetError("the member closed the connection")

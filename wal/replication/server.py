"""A safekeeper on a socket: one thread for each connection, which may block.

Always true::

    connections <= CONNECTIONS_MAX, of one node <= CONNECTIONS_OF_NODE_MAX, without a name yet <= NAMELESS_MAX
    no thread waits for a peer without a deadline, and none that waits for a peer holds the lock of a log

If a new connection exceeds the bound of its node, or of connections without a name, the oldest of them is closed. So
clients that only connect, and the connections of a dead peer, do not lock out others.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address

from ledger.errors import ConfigurationError, InvalidInputError
from ledger.positions import NO_EPOCH
from wal.replication import messages
from wal.replication.frames import Budget, ConnectionOverError, FrameSocket
from wal.replication.messages import Ack, Frame, Refusal
from wal.replication.safekeeper import Conversation, Safekeeper
from wal.replication.tls import PeerTls, names_of, reason_of

CONNECTIONS_MAX = 256
CONNECTIONS_OF_NODE_MAX = 16
NAMELESS_MAX = 32
GREETING_TIMEOUT_S = 10.0
"""Deadline of the TLS handshake, and of the first message."""
FIRST_FRAME_BYTES_MAX = 4096
IDLE_TIMEOUT_S = 120.0
"""The writer of a log is never silent for longer: it reports the committed position periodically."""
LARGE_FRAMES_BYTES_MAX = 256 << 20
"""Budget for long frames, of all connections together."""
STOP_TIMEOUT_S = 10.0
ENDING_TIMEOUT_S = 1.0
"""How long a new connection waits for others that were shut down to end."""
_NO_DESCRIPTORS_PAUSE_S = 0.1


@dataclass(eq=False, slots=True)
class _Connection:
    """One connection, as other threads use it. ``handle`` is a duplicate of its socket, so that another thread can shut
    the connection down."""

    handle: socket.socket
    peer: str
    node_id: str | None = None
    is_ended: bool = False
    thread: threading.Thread | None = None

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the connection down; its thread notices."""
        self.is_ended = True
        with contextlib.suppress(OSError):
            self.handle.shutdown(how)


class Server:
    """Serves ``safekeeper`` on ``listener``, which it owns. Without ``tls`` every client is trusted."""

    def __init__(self, safekeeper: Safekeeper, listener: socket.socket, tls: PeerTls | None) -> None:
        self._safekeeper = safekeeper
        self._listener = listener
        self._tls = tls
        self._budget = Budget(LARGE_FRAMES_BYTES_MAX)
        self._is_stopping = False
        self._changed = threading.Condition()
        """Guards the attributes below."""
        self.connections: list[_Connection] = []
        """The oldest first."""

    def stop(self) -> None:
        """End ``run``; callable from any thread, or a signal handler."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Serve until ``stop``. Then received messages are answered, and all connections are closed; a connection whose
        peer does not receive the answer is abandoned after ``STOP_TIMEOUT_S``."""
        self._listener.setblocking(True)
        while not self._is_stopping:
            self._accept()
        self._listener.close()
        with self._changed:
            connections = list(self.connections)
            for each in connections:
                each.end(socket.SHUT_RD)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for thread in (each.thread for each in connections if each.thread is not None):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # --- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            accepted, (host, port, *_) = self._listener.accept()
        except OSError as error:
            if not (self._is_stopping or isinstance(error, ConnectionError)):
                self._safekeeper.report("safekeeper_connection_refused", {"error": str(error)})
                time.sleep(_NO_DESCRIPTORS_PAUSE_S)
            return
        if (connection := self._admit(accepted, f"{host}:{port}")) is None:
            accepted.close()
            return
        connection.thread = threading.Thread(target=self._serve, args=(connection, accepted), daemon=True)
        try:
            connection.thread.start()
        except RuntimeError as error:
            self._safekeeper.report("safekeeper_connection_refused", {"error": str(error)})
            accepted.close()
            self._forget(connection)

    def _admit(self, accepted: socket.socket, peer: str) -> _Connection | None:
        """Admit a new connection; None if there are too many."""
        with self._changed:
            if any(each.is_ended for each in self.connections):
                self._changed.wait_for(lambda: len(self.connections) < CONNECTIONS_MAX, ENDING_TIMEOUT_S)
            if len(self.connections) >= CONNECTIONS_MAX:
                self._safekeeper.report("safekeeper_connection_refused", {"error": f"{CONNECTIONS_MAX} are open"})
                return None
            nameless = [each for each in self.connections if each.node_id is None and not each.is_ended]
            if len(nameless) >= NAMELESS_MAX:
                nameless[0].end()
            connection = _Connection(accepted.dup(), peer)
            self.connections.append(connection)
            return connection

    def _named(self, connection: _Connection, node_id: str) -> None:
        """Record that the connection is about the log of this node."""
        with self._changed:
            connection.node_id = node_id
            of_node = [each for each in self.connections if each.node_id == node_id and not each.is_ended]
            if len(of_node) > CONNECTIONS_OF_NODE_MAX:
                of_node[0].end()

    def _forget(self, connection: _Connection) -> None:
        with self._changed:
            self.connections.remove(connection)
            connection.handle.close()
            self._changed.notify()

    # --- one connection, in its thread ------------------------------------------------------------

    def _serve(self, connection: _Connection, accepted: socket.socket) -> None:
        facts: dict[str, object] = {"peer": connection.peer}
        try:
            try:
                peer, names = self._secured(accepted)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                raise  # the peer hung up without a reason
            except ssl.SSLError as error:
                self._safekeeper.report("safekeeper_peer_refused", {**facts, "error": reason_of(error)})
                return
            with contextlib.closing(peer):
                self._converse(connection, peer, Conversation(self._safekeeper, names))
        except (ConnectionOverError, InvalidInputError, OSError) as error:
            reason = "this side stops" if self._is_stopping else str(error)
            self._safekeeper.report("safekeeper_connection_ended", {**facts, "error": reason})
        except Exception as error:
            # A bug: this connection ends with it, and no other.
            self._safekeeper.report("safekeeper_connection_failed", {**facts, "error": repr(error)})
        finally:
            accepted.close()
            self._forget(connection)

    def _secured(self, accepted: socket.socket) -> tuple[FrameSocket, Collection[str] | None]:
        """The connection after the TLS handshake, if any, and the names in the peer's certificate."""
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is None:
            return FrameSocket(accepted, self._budget), None
        accepted.settimeout(GREETING_TIMEOUT_S)
        secured = self._tls.context().wrap_socket(accepted, server_side=True)
        return FrameSocket(secured, self._budget), names_of(secured)

    def _converse(self, connection: _Connection, peer: FrameSocket, conversation: Conversation) -> None:
        idle_s, frame_bytes_max = GREETING_TIMEOUT_S, FIRST_FRAME_BYTES_MAX
        try:
            while not (conversation.is_over or self._is_stopping):
                frame = peer.next(idle_s, frame_bytes_max)
                frames = [frame, *(peer.more() if connection.node_id is not None else ())]
                answers = conversation.answer(frames)
                # A refused peer has nothing to continue, and a lend would take the log from another stream.
                is_lone = len(frames) == 1 and bool(frame.body)
                is_appended = is_lone and bool(answers) and isinstance(answers[-1].message, Ack)
                del frame, frames
                if answers:
                    peer.send(*answers)
                if is_appended and peer.can_stream and (stream := conversation.lend()) is not None:
                    peer.give_to(stream, idle_s)
                if connection.node_id is None and conversation.node_id is not None:
                    self._named(connection, conversation.node_id)
                    idle_s, frame_bytes_max = IDLE_TIMEOUT_S, messages.FRAME_BYTES_MAX
        except InvalidInputError as error:
            if connection.node_id is not None:
                facts = {"node_id": connection.node_id, "reason": "damaged", "detail": str(error)}
                self._safekeeper.report("wal_replication_append_reject", facts)
            peer.send(Frame(Refusal("damaged", str(error), NO_EPOCH)))
            raise
        finally:
            conversation.close()


def listen(host: str, port: int, *, is_secured: bool) -> socket.socket:
    """A socket that listens there.

    Raises:
        ConfigurationError: it could be reached from other machines, and clients would not have to prove their identity.
        OSError: the address cannot be bound.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    if not is_secured and not ip_address(address[0]).is_loopback:
        raise ConfigurationError(
            f"{host} is not loopback: without certificates anybody could write the logs of all nodes. "
            "Give --tls-cert, --tls-key and --tls-ca, or listen on 127.0.0.1"
        )
    return socket.create_server(
        address, family=family, backlog=CONNECTIONS_MAX, dualstack_ipv6=family == socket.AF_INET6
    )

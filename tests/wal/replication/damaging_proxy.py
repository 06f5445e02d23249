"""A proxy between a node and one member that damages what passes, one bit at a time, when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading

FLIPPED_BYTES_MIN = 200
"""A bit is flipped in what is longer: a frame that carries a batch, and none that only says what is committed."""


class DamagingProxy:
    """Forwards connections from ``port`` to ``target_port``, both on loopback."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.flips_left = 0
        """In so many of the next frames with a batch a bit is flipped on the way to the member."""
        self.links = 0
        """Connections that were opened."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.links += 1
                self._open.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", self._target_port))
                except OSError:
                    near.close()
                    continue
                self._open.append(far)
                threading.Thread(target=self._forward, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._forward, args=(far, near, False), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_to_member: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 20)):
                if is_to_member and self.flips_left and len(data) > FLIPPED_BYTES_MIN:
                    self.flips_left -= 1
                    data[-8] ^= 1
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

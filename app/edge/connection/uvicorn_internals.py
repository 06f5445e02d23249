"""An answer leaves in one system call where uvicorn makes two: the head waits for the first piece of its body."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from app.edge.connection.protocol import ProblemProtocol

_OF_KNOWN_LENGTH = b"content-length: "
"""Stands in the head of an answer whose body is there already, or follows at once."""


class AnswerTransport(asyncio.Transport):
    """The transport of a connection as one answer writes to it: a head that says how long its body is waits for the
    first piece of that, which may be empty."""

    __slots__ = ("_connection", "_cycle", "_head", "_transport", "_was_held")

    def __init__(self, connection: ProblemProtocol, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._transport = connection.transport
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
        self._connection.written_bytes += len(data)
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection once all is written."""
        if self._head is not None:
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closing or closed."""
        return self._transport.is_closing()

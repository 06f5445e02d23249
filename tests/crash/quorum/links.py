"""A TCP link that is cut, stalled and led elsewhere while two processes speak over it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket

CHUNK_BYTES = 1 << 16


class Link:
    """Listens on a port of its own, for as long as it lives, and forwards to ``target_port`` of this machine."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._moving = asyncio.Event()
        self._moving.set()
        self._is_cut = False
        self._left_bytes = math.inf
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._serve, sock=self._listening)

    def cut(self) -> None:
        """Break all connections, and each new one at once."""
        self._is_cut = True
        self._break()

    def stall(self) -> None:
        """Move nothing any more, in either direction; connections stay."""
        self._moving.clear()

    def stall_behind(self, count: int) -> None:
        """Stall once so many bytes more came from the target."""
        self._left_bytes = count

    @property
    def is_in_use(self) -> bool:
        """Whether anybody is connected over it."""
        return bool(self._open)

    @property
    def is_stalled(self) -> bool:
        """Whether nothing moves any more."""
        return not self._moving.is_set()

    def heal(self) -> None:
        """Be a link as any other again."""
        self._is_cut, self._left_bytes = False, math.inf
        self._moving.set()

    def lead_to(self, port: int) -> None:
        """Forward new connections to another port, and break the old ones."""
        self.target_port = port
        self._break()

    async def close(self) -> None:
        """End everything."""
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _break(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._is_cut:
            to_near.transport.abort()
            return
        try:
            far, to_far = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            to_near.transport.abort()
            return
        ends = {to_near, to_far}
        self._open |= ends
        with contextlib.suppress(OSError, ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(near, to_far))
                group.create_task(self._forward(far, to_near, is_answer=True))
        self._open -= ends
        for end in ends:
            end.transport.abort()

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        while data := await source.read(CHUNK_BYTES):
            if is_answer:
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    self.stall()
            await self._moving.wait()
            if self._is_cut:
                break
            sink.write(data)
            await sink.drain()
        raise ConnectionAbortedError

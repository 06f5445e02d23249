"""``tally serve`` or ``tally dev`` as a child process: started, listened to, killed, and never left behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from tests.forked import Forked
from tests.tally import COLD, IMPORTED, bare_environment

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
"""Longest that anything a child must say or do is waited for."""
LINE_BYTES_MAX = 1 << 22
LINES_SHOWN = 60
"""Last lines of a child that a failing test shows."""

_READY = re.compile(r"answers at (http://\S+),")

Found = TypeVar("Found")


class ServeProcess:
    """One child. What it says on stderr is kept; ``says`` and ``ready`` wait for a line."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self.lines: list[str] = []
        self._heard = asyncio.Condition()
        self._closed = False
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    @classmethod
    async def launch(
        cls,
        data_dir: Path,
        database_url: str | None,
        *,
        tracer: Sequence[str] = (),
        program: Sequence[str | Path] = COLD[1:],
        arguments: Sequence[str] = (),
        **settings: object,
    ) -> ServeProcess:
        """Start ``tally serve`` on ``database_url``, or ``tally dev`` without one, with ``arguments``.

        ``program`` takes the place of ``tally``; ``tracer`` traces it as ``Forked`` has it. ``settings`` are
        names of environment variables in lower case without their prefix: ``wal__dir``. Writes wait for
        their level as long as a busy machine may take.
        """
        environment = bare_environment() | {"PYTHONPATH": str(ROOT)}
        given = {"data_dir": data_dir, "port": 0, "database_url": database_url, "write__timeout": "60s", **settings}
        environment |= {f"TALLY_{name.upper()}": str(value) for name, value in given.items() if value is not None}
        data_dir.mkdir(exist_ok=True)
        command = "dev" if database_url is None else "serve"
        how: dict[str, Any] = {
            "env": environment,
            "cwd": data_dir,
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
        }
        return cls(await asyncio.to_thread(Forked, IMPORTED, *program, command, *arguments, tracer=tracer, **how))

    @property
    def returncode(self) -> int | None:
        """As ``ended`` returns it, None while the child runs."""
        return self.process.poll()

    async def ready(self, within_s: float = WAIT_S) -> str:
        """Base URL, once the child answers requests.

        Raises:
            AssertionError: it ended before; the text has what it said.
        """
        return await self._wait_for(lambda line: (said := _READY.search(line)) and said[1], "that it answers", within_s)

    async def ready_or_ended(self) -> str | None:
        """Base URL once the child answers requests, however long that takes, None when it ended before."""
        try:
            return await self.ready(math.inf)
        except AssertionError:
            await self.ended()
            return None

    async def says(self, event: str, within_s: float = WAIT_S) -> dict[str, Any]:
        """The first log event of this name, once it is logged."""
        return await self._wait_for(lambda line: _log_event(line, event), event, within_s)

    async def says_line(self, text: str) -> str:
        """The first line that has ``text`` in it, once it is there."""
        return await self._wait_for(lambda line: line if text in line else None, text)

    def events(self, event: str) -> list[dict[str, Any]]:
        """The log events of this name so far."""
        return [found for line in self.lines if (found := _log_event(line, event))]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; one to a child that has ended goes nowhere."""
        self.process.send_signal(number)

    async def ended(self, within_s: float = WAIT_S) -> int:
        """Exit code, negative for a signal.

        Raises:
            AssertionError: it did not end in time.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._gone()
                await self._listening
        except TimeoutError:
            raise AssertionError(f"not ended within {within_s:g} s; it said:\n{self.last_words()}") from None
        return self.process.wait()

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def terminate(self, within_s: float = WAIT_S) -> int:
        """SIGTERM, and wait for the end; the exit code."""
        self.signal(signal.SIGTERM)
        return await self.ended(within_s)

    def last_words(self) -> str:
        """The last lines it said."""
        return "\n".join(self.lines[-LINES_SHOWN:])

    async def _gone(self) -> None:
        """Wait for the end of the process."""
        if self.returncode is not None:
            return
        loop, ended, descriptor = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(self.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    async def _listen(self) -> None:
        lines = asyncio.StreamReader(LINE_BYTES_MAX)
        assert self.process.stderr is not None
        end = os.dup(self.process.stderr.fileno())
        self.process.stderr.close()
        # uvloop closes the descriptor and then the file, when another thread may have it: this file closes nothing.
        reading, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), FileIO(end, closefd=False)
        )
        async for line in lines:
            async with self._heard:
                self.lines.append(line.decode(errors="replace").rstrip())
                self._heard.notify_all()
        reading.close()
        async with self._heard:
            self._closed = True
            self._heard.notify_all()

    async def _wait_for(self, find: Callable[[str], Found | None], wanted: str, within_s: float = WAIT_S) -> Found:
        seen = 0
        async with asyncio.timeout(within_s), self._heard:
            while True:
                unread = self.lines[seen:]
                seen += len(unread)
                for line in unread:
                    if found := find(line):
                        return found
                assert not self._closed, f"it ended without saying {wanted}; it said:\n{self.last_words()}"
                await self._heard.wait()


def _log_event(line: str, event: str) -> dict[str, Any] | None:
    if f'"event": "{event}"' not in line:
        return None
    found: dict[str, Any] = json.loads(line)
    return found if found["event"] == event else None

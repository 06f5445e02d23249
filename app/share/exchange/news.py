"""News for peers: the newest checkpoint of each tenant, and how much of a peer's ledger is imported here.

A peer asks with the cursor of the last answer, and is answered as soon as there are changes after it::

    run:number          every change of this run up to ``number`` was told
    run:number:tenant   the tenants up to this one were listed, of all that there are
    empty, another run  the list begins

A run is that of a node. Its changes are numbered in memory and forgotten with it; then the peer lists all again. A list
that another node began goes on, and then every change of this run is told.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import NamedTuple

TOLD_MAX = 200
"""Tenants in one answer."""


class Cursor(NamedTuple):
    """What was told: the changes of this run up to ``number``, and while tenants are listed, those up to ``after``."""

    number: int
    after: str | None = None


class News:
    """The changes of one node's run. Belongs to one event loop."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self._number = 0
        self._numbers: dict[str, int] = {}
        """The number of the last change of each tenant, ascending."""
        self._sizes: dict[str, int] = {}
        """The size of the newest checkpoint of each tenant that was seen."""
        self._changed = asyncio.Event()
        self._ends = False

    def signed(self, sizes: Mapping[str, int]) -> None:
        """There are checkpoints of these sizes; one that is known changes nothing."""
        newer = {name: size for name, size in sizes.items() if size > self._sizes.get(name, -1)}
        self._sizes |= newer
        self.changed(newer)

    def changed(self, tenant_ids: Iterable[str]) -> None:
        """There is news of these tenants."""
        for name in tenant_ids:
            self._number += 1
            self._numbers.pop(name, None)
            self._numbers[name] = self._number
        self._wake()

    def end(self) -> None:
        """The node stops: nobody waits any longer."""
        self._ends = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def read(self, cursor: str) -> Cursor:
        """What a peer was told, by the cursor of its request."""
        run, _, rest = cursor.partition(":")
        number, _, after = rest.partition(":")
        if run == self.run and int(number) <= self._number:
            return Cursor(int(number), after or None)
        return Cursor(0, after) if after else Cursor(self._number, "")

    def cursor(self, number: int, after: str | None = None) -> str:
        """The cursor of an answer."""
        return f"{self.run}:{number}" if after is None else f"{self.run}:{number}:{after}"

    async def after(self, number: int, wait_s: float) -> tuple[list[str], int]:
        """The tenants that changed after ``number``, those that changed first and at most ``TOLD_MAX``, and the number
        up to which they are told. Waits up to ``wait_s`` for one; then there is none."""
        ends_s = asyncio.get_running_loop().time() + wait_s
        try:
            async with asyncio.timeout_at(ends_s):
                while number == self._number and not self._ends:
                    await self._changed.wait()
        except TimeoutError:
            return [], number
        newer = [*takewhile(lambda each: each[1] > number, reversed(self._numbers.items()))]
        told = newer[: -TOLD_MAX - 1 : -1]
        return [name for name, _ in told], told[-1][1] if told else number

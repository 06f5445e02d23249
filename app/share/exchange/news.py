"""News for peers: the newest checkpoint of each tenant, and how much of a peer's ledger is imported here.

A peer asks with the cursor of the last answer, and is answered as soon as there are changes after it::

    run:number          every change of this run up to ``number`` was reported
    run:number:tenant   the tenants up to this one were listed, of all that there are
    empty, another run  the list begins

A run is that of a node. Its changes are numbered in memory and forgotten with it; then the peer lists all again. A list
that another node began is continued, and then every change of this run is reported.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

from app.runtime.tasks import Broadcast

TOLD_MAX = 200
"""Tenants in one answer."""
ECHO_S = 1.0
"""How long a checkpoint over imported entries alone may wait for other news. Otherwise each import would have every
peer prove it and search what it has."""


class Cursor(NamedTuple):
    """What was reported: changes of this run up to ``number``, and while tenants are listed, those up to ``after``."""

    number: int
    after: str | None = None


class News:
    """The changes of one node's run. Belongs to one event loop."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.waiting = 0
        """Requests that wait."""
        self._number = 0
        self._numbers: dict[tuple[str, str | None], int] = {}
        """The number of the last change of each tenant, ascending; by the log of the ledger that it concerns, None for
        all."""
        self._sizes: dict[str, int] = {}
        """The size of the newest checkpoint of each tenant that was seen."""
        self._imported: dict[str, int] = {}
        """By tenant, up to which seq its chain has nothing but imported entries since the size that was seen."""
        self._echoes: set[str] = set()
        """Tenants whose newest checkpoint is reported within ``ECHO_S``."""
        self._changed = Broadcast()
        self._ends = False

    def signed(self, sizes: Mapping[str, int]) -> None:
        """There are checkpoints of these sizes; one that is known changes nothing. One that covers nothing new but
        imported entries, which peers mostly have, is reported within ``ECHO_S``."""
        newer = {name: size for name, size in sizes.items() if size > self._sizes.get(name, -1)}
        self._sizes |= newer
        echoes = [name for name, size in newer.items() if 0 < size <= self._imported.get(name, 0)]
        if echoes and not self._echoes:
            asyncio.get_running_loop().call_later(ECHO_S, self._tell_echoes)
        self._echoes.update(echoes)
        if others := [name for name in newer if name not in echoes]:
            self.changed(others)

    def unsigned(self, seqs: Mapping[str, int]) -> dict[str, int]:
        """Those of these tenants that have no checkpoint up to their seq yet."""
        return {name: seq for name, seq in seqs.items() if self._sizes.get(name, 0) < seq}

    async def wait_signed(self, seqs: Mapping[str, int], wait_s: float) -> None:
        """Return once there are checkpoints of these tenants up to these seqs, or ``wait_s`` later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.unsigned(seqs):
                    await self._changed.wait()

    def _tell_echoes(self) -> None:
        echoes, self._echoes = self._echoes, set()
        self.changed(sorted(echoes))

    def imported(self, tenant_id: str, from_seq: int, to_seq: int) -> None:
        """These entries of a tenant's chain came from another ledger."""
        if from_seq <= max(self._sizes.get(tenant_id, 0), self._imported.get(tenant_id, 0)) + 1:
            self._imported[tenant_id] = to_seq

    def changed(self, tenant_ids: Iterable[str], log_origin: str | None = None) -> None:
        """There are newer checkpoints of these tenants; or more of the ledger of this log is imported."""
        for name in tenant_ids:
            self._number += 1
            self._numbers.pop((name, log_origin), None)
            self._numbers[name, log_origin] = self._number
        self._changed.send()

    def _newer(self, number: int, log_origin: str) -> list[tuple[str, str | None, int]]:
        """Tenant, log and number of the changes after ``number`` that concern the ledger of this log, ascending."""
        newer = [*takewhile(lambda each: each[1] > number, reversed(self._numbers.items()))]
        return [(name, log, at) for (name, log), at in reversed(newer) if log in (None, log_origin)]

    def end(self) -> None:
        """The node stops: end all waits."""
        self._ends = True
        self._changed.send()

    def read(self, cursor: str) -> Cursor:
        """What was reported to a peer, by the cursor of its request."""
        run, _, rest = cursor.partition(":")
        number, _, after = rest.partition(":")
        if run == self.run and int(number) <= self._number:
            return Cursor(int(number), after or None)
        return Cursor(0, after) if after else Cursor(self._number, "")

    def cursor(self, number: int, after: str | None = None) -> str:
        """The cursor of an answer."""
        return f"{self.run}:{number}" if after is None else f"{self.run}:{number}:{after}"

    async def after(self, number: int, wait_s: float, log_origin: str) -> tuple[dict[str, bool], int]:
        """The tenants that changed after ``number`` for the ledger of this log, those that changed first and at most
        ``TOLD_MAX``, each with whether it has a newer checkpoint; and the number up to which they are reported. Waits
        up to ``wait_s`` for one; then there is none."""
        ends_s = asyncio.get_running_loop().time() + wait_s
        try:
            async with asyncio.timeout_at(ends_s):
                while True:
                    if told := self._newer(number, log_origin)[:TOLD_MAX]:
                        signed = {name for name, log, _ in told if log is None}
                        return {name: name in signed for name, _, _ in told}, told[-1][2]
                    number = self._number
                    if self._ends:
                        return {}, number
                    self.waiting += 1
                    try:
                        await self._changed.wait()
                    finally:
                        self.waiting -= 1
        except TimeoutError:
            return {}, number

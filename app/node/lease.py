"""The lease on a node's WAL: which of several processes tries to write it.

It keeps a standby waiting while the writer lives, and lets it go on soon after the writer died. Nothing is safe because
of it: a writer whose lease ran out is stopped by the epoch that another won, at the safekeepers and in Postgres.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import structlog

from app.store.node import HeldLease
from ledger.errors import FencedError, LedgerError, StartRefusedError
from signing.files import read_regular
from wal.segment import store_file

LOOKS_A_TTL = 5
"""How often, in the life of a lease, a standby looks whether it is free, and its holder makes it last longer."""

RELEASE_TIMEOUT_S = 2.0
"""How long a stop waits for that at the most; a lease that is not released runs out."""

HOLDER_NAME = "holder"

log = structlog.get_logger()


def holder_of(folder: Path) -> str:
    """The holder that every run on this WAL folder is, made once.

    Raises:
        StartRefusedError: the file with its name cannot be read.
    """
    path = folder / HOLDER_NAME
    if not path.exists():
        store_file(path, secrets.token_hex(8).encode())
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StartRefusedError(
            f"the name of this node as a holder of leases cannot be read from {path}: {error}. Remove it: the next "
            "start makes another one, and waits until the lease has run out"
        ) from error


class Leases(Protocol):
    """Where leases are kept. Whatever cannot be reached raises OSError, or what its driver raises."""

    async def take(
        self, node_id: str, holder: str, run: str, ttl_s: float, *, seize: bool = False, ran_out: bool = True
    ) -> HeldLease:
        """Take the lease where it is free, or that of the same holder or run; with ``ran_out`` also where it ran out,
        with ``seize`` in any case. Who holds it then."""

    async def renew(self, node_id: str, run: str, ttl_s: float) -> bool:
        """Let it last from now; False when another run holds it, or nobody."""

    async def release(self, node_id: str, run: str) -> None:
        """Let another have it at once; nothing happens when another has it."""


class Lease:
    """The lease of ``node_id`` for one run. ``holder`` is the same for every run on one WAL folder: who holds the lock
    of that folder need not wait for a lease that an earlier process took there and died with."""

    def __init__(
        self, leases: Leases, node_id: str, holder: str, run: str, ttl_s: float, faults: tuple[type[BaseException], ...]
    ) -> None:
        self._leases = leases
        self._node_id = node_id
        self._holder = holder
        self._run = run
        self._ttl_s = ttl_s
        self._faults = faults
        self.is_reached = True
        """Whether it could be made to last when that was tried last."""

    async def take(self, *, seize: bool = False, on_waiting: Callable[[], Awaitable[None]] | None = None) -> None:
        """Return once it is held, however long another has it. Who waits already goes on while none can be asked.
        ``on_waiting()`` is awaited once, where another has it.

        Whoever holds it could not make it last either while none could be asked. So, asked again, it is not taken
        because it ran out meanwhile, but once it could be made to last for a ttl, and was not.
        """
        loop = asyncio.get_running_loop()
        waits, asked_since_s = False, -math.inf
        while True:
            now_s = loop.time()
            ran_out = now_s - asked_since_s >= self._ttl_s
            try:
                held = await self._leases.take(
                    self._node_id, self._holder, self._run, self._ttl_s, seize=seize, ran_out=ran_out
                )
            except self._faults as error:
                if not waits:
                    raise
                if asked_since_s < math.inf:
                    log.warning("wal_lease_not_asked", node_id=self._node_id, error=str(error))
                asked_since_s = math.inf
            else:
                if held.run == self._run:
                    log.info("wal_lease_taken", node_id=self._node_id, waited=waits)
                    return
                if not waits or asked_since_s == math.inf:
                    left_s = round(held.left_s, 1)
                    log.info("wal_lease_waiting", node_id=self._node_id, holder=held.holder, left_s=left_s)
                if not waits and on_waiting is not None:
                    await on_waiting()
                waits, asked_since_s = True, min(asked_since_s, loop.time())
            await asyncio.sleep(self._ttl_s / LOOKS_A_TTL)

    async def keep(self, on_lost: Callable[[LedgerError], None]) -> None:
        """Let it last, for ever; ends when another has it, and says so. While none can be asked the epoch decides."""
        while True:
            await asyncio.sleep(self._ttl_s / LOOKS_A_TTL)
            try:
                if not await self._leases.renew(self._node_id, self._run, self._ttl_s):
                    on_lost(FencedError(f"the lease of {self._node_id} is another's; this process stops"))
                    return
                self.is_reached = True
            except self._faults as error:
                if self.is_reached:
                    log.warning("wal_lease_not_renewed", node_id=self._node_id, error=str(error))
                self.is_reached = False

    async def release(self) -> None:
        """Let a standby go on at once."""
        try:
            async with asyncio.timeout(min(self._ttl_s / LOOKS_A_TTL, RELEASE_TIMEOUT_S)):
                await self._leases.release(self._node_id, self._run)
        except self._faults as error:
            log.warning("wal_lease_not_released", node_id=self._node_id, error=str(error))

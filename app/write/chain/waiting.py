"""Tenants that wait: they are passed over, and chained as soon as their wait ends.

A tenant waits while another session keeps its rows locked, or while its commitments are read from a long history.

The quarantine lists the waiting tenants and where their records begin; the records stay in the backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import asyncpg

from app.runtime.state.node import ROWS_LOCKED
from app.store import chaining
from app.store.commit import InDoubt, or_in_doubt
from app.write.pending.backlog import Backlog, Pending
from app.write.pending.linking import tenants_begun_by
from app.write.pending.quarantine import Quarantine

RETRY_S = 0.5
"""Interval of retries of waiting tenants."""


class WaitingTenants:
    """The tenants that the appender of ``backlog`` passes over.

    ``is_reading`` reports whether the history of a tenant is being read, ``connected`` returns a connection,
    ``on_fault`` gets the error of PostgreSQL, ``on_due`` is called when ``chain_unblocked`` is due.
    """

    def __init__(
        self,
        quarantine: Quarantine,
        backlog: Backlog,
        *,
        is_reading: Callable[[str], bool],
        connected: Callable[[], Awaitable[asyncpg.Connection[asyncpg.Record]]],
        on_fault: Callable[[Exception], None],
        on_due: Callable[[], None],
    ) -> None:
        self._quarantine = quarantine
        self._backlog = backlog
        self._is_reading = is_reading
        self._connected = connected
        self._on_fault = on_fault
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next retry; None if it is due or no tenant waits."""

    async def find(self, batch: Sequence[Pending]) -> bool:
        """Pass over the tenants of ``batch`` whose rows another session keeps locked; returns whether there are any."""
        locked = await self._locked_of([each for each in batch if each.tenant_id not in self._quarantine])
        if locked is None:
            return False
        self.begin(locked, ROWS_LOCKED)
        return bool(locked)

    def begin(self, tenant_ids: Iterable[str], reason: str) -> None:
        """Pass these tenants over from now on."""
        for tenant_id in sorted(tenant_ids):
            self._quarantine.begin_wait(tenant_id, reason, self._backlog)
            self._retry_later()

    async def chain_unblocked(
        self, next_of: Callable[[str], Sequence[Pending]], chain: Callable[[Sequence[Pending]], Awaitable[None]]
    ) -> None:
        """``chain`` the batches, given by ``next_of``, of the tenants whose wait has ended; does nothing before the
        next retry is due."""
        if not (waiting := self._quarantine.waiting) or self._timer is not None:
            return
        for tenant_id in sorted(waiting):
            if self._is_reading(tenant_id):
                continue
            batch = next_of(tenant_id)
            if (locked := await self._locked_of(batch)) is None:
                break
            if locked:
                continue
            del waiting[tenant_id]
            while batch and tenant_id not in waiting:
                await chain(batch)
                batch = next_of(tenant_id)
            if tenant_id not in waiting:
                await self._quarantine.end_wait(tenant_id)
        if waiting:
            self._retry_later()

    async def _locked_of(self, batch: Sequence[Pending]) -> set[str] | None:
        """The tenants of ``batch`` with a locked row that it needs; None if PostgreSQL does not answer."""
        own = {pending.tenant_id for pending in batch}
        found = await or_in_doubt(self._locked({*own, *tenants_begun_by(batch)}))
        if isinstance(found, InDoubt):
            self._on_fault(found.error)
            return None
        return found & own

    async def _locked(self, tenant_ids: Iterable[str]) -> set[str]:
        return await chaining.locked_tenants(await self._connected(), sorted(tenant_ids))

    def _retry_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        self._timer = None
        self._on_due()

"""Tenants that wait: they are passed over, and chained as soon as they need not.

Another session keeps their rows locked, or what is promised to them is being read from a long history.

The quarantine has them and where their records begin; the records wait in the backlog, beside those of all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import asyncpg

from app.runtime.database_faults import DATABASE_FAULTS
from app.runtime.state.node import ROWS_LOCKED
from app.store import chaining
from app.write.pending.backlog import Backlog, Pending
from app.write.pending.linking import tenants_begun_by
from app.write.pending.quarantine import Quarantine

RETRY_S = 0.5
"""How often it is looked whether somebody still has to wait."""


class LockedTenants:
    """What the appender of ``backlog`` passes over. ``is_reading`` says whether the history of a tenant is being read,
    ``connected`` gives its connection, ``on_fault`` takes why asking
    failed, ``on_due`` is called when it is time to ``chain_free``."""

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
        """When it is looked again, None when that is due or nobody waits."""

    async def found(self, batch: Sequence[Pending]) -> bool:
        """Whether another session keeps rows of some tenants of ``batch`` locked; they are passed over from now on."""
        try:
            locked = await self._of([each for each in batch if each.tenant_id not in self._quarantine])
        except DATABASE_FAULTS as error:
            self._on_fault(error)
            return False
        self.begin(locked, ROWS_LOCKED)
        return bool(locked)

    def begin(self, tenant_ids: Iterable[str], reason: str) -> None:
        """Pass these tenants over from now on."""
        for tenant_id in sorted(tenant_ids):
            self._quarantine.begin_wait(tenant_id, reason, self._backlog)
            self._look_soon()

    async def chain_free(
        self, waiting: Callable[[str], Sequence[Pending]], chain: Callable[[Sequence[Pending]], Awaitable[None]]
    ) -> None:
        """``chain`` what is ``waiting`` of the tenants that need not wait any more, in batches; nothing before it is
        due."""
        if not self._quarantine.locked or self._timer is not None:
            return
        for tenant_id in sorted(self._quarantine.locked):
            batch = waiting(tenant_id)
            try:
                if self._is_reading(tenant_id) or await self._of(batch):
                    continue
            except DATABASE_FAULTS as error:
                self._on_fault(error)
                break
            del self._quarantine.locked[tenant_id]
            while batch and tenant_id not in self._quarantine.locked:
                await chain(batch)
                batch = waiting(tenant_id)
            if tenant_id not in self._quarantine.locked:
                await self._quarantine.end_wait(tenant_id)
        if self._quarantine.locked:
            self._look_soon()

    async def _of(self, batch: Sequence[Pending]) -> set[str]:
        """The tenants of ``batch`` of which rows are locked that it would need."""
        tenants = {pending.tenant_id for pending in batch}
        tenants.update(tenants_begun_by(batch))
        locked = await chaining.locked_tenants(await self._connected(), sorted(tenants))
        return locked & {pending.tenant_id for pending in batch}

    def _look_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._look_now)

    def _look_now(self) -> None:
        self._timer = None
        self._on_due()

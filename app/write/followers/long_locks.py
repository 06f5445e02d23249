"""Rows that another session of PostgreSQL keeps locked: told once that has lasted, as another node has them briefly."""

from __future__ import annotations

import time

import structlog

TOLD_S = 5.0
"""How long a lock lasts before somebody is told."""

log = structlog.get_logger()


class LongLocks:
    """Which tenants' rows are locked for long. ``event`` is what the log calls that."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._since_s: dict[str, float] = {}
        self.tenants: set[str] = set()
        """Those that have waited for long."""

    def met(self, tenant_id: str) -> None:
        """The tenant's rows are locked now."""
        since_s = self._since_s.setdefault(tenant_id, time.monotonic())
        if tenant_id not in self.tenants and time.monotonic() - since_s >= TOLD_S:
            self.tenants.add(tenant_id)
            log.warning(self._event, tenant_id=tenant_id, error="another session keeps its rows locked (see pg_locks)")

    def ended(self, tenant_id: str) -> None:
        """They were had, or something else is wrong by now."""
        self._since_s.pop(tenant_id, None)
        self.tenants.discard(tenant_id)

    def ended_but_of(self, tenant_ids: set[str]) -> None:
        """Those of all others are needed no longer."""
        for tenant_id in self._since_s.keys() - tenant_ids:
            self.ended(tenant_id)

"""Excludes logs of other ledgers from a tenant's jobs, and includes them again, by entries of the tenant's chain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from app.store.exclusions import own_log
from app.store.jobs.table import JobFolds
from app.store.reading import Pool, reading
from app.write.intake.system_entries import SystemEntries, facts_of
from ledger import canonical
from ledger.errors import InvalidInputError, TenantNotFoundError, refuse
from ledger.facts.events import ACTOR, SystemAction
from ledger.machines.exclusions import NO_STATEMENTS, SUBJECT, Statement

_of_log = partial(InvalidInputError, path=("log",))


@dataclass(eq=False)
class ExclusionChanges:
    """Makes statements about logs; each is chained on return."""

    system: SystemEntries
    pool: Pool
    folds: JobFolds
    log_origin: str

    async def statements(self, tenant_id: str) -> list[Statement]:
        """The deciding statement about each log, by log.

        Raises:
            TenantNotFoundError: there is no such tenant.
            ChainDamagedError: a statement is not what was chained.
        """
        self._require(tenant_id)
        async with reading(self.pool, snapshot=True) as connection:
            found = await self.folds.statements(connection, [tenant_id])
        return [statement for _, statement in sorted(found.get(tenant_id, NO_STATEMENTS).by_log.items())]

    async def exclude(self, tenant_id: str, log: str, reason: str, actor: str | None) -> Statement:
        """Count no facts of ``log`` in this tenant from now on, earlier ones included.

        Raises:
            InvalidInputError: the log is this ledger's, or that of another tenant.
            TenantNotFoundError: there is no such tenant.
            LedgerError: as ``Submitter.submit``.
        """
        self._require(tenant_id)
        refuse(
            _of_log,
            (not log.endswith(f"/{tenant_id}"), f"a log of tenant {tenant_id} ends in /{tenant_id}"),
            (
                log == own_log(self.log_origin, tenant_id),
                "it is this ledger's own; a ledger cannot speak for itself, so exclude it at another ledger",
            ),
        )
        return await self._state(SystemAction.LOG_EXCLUDED, tenant_id, log, reason, actor)

    async def include(self, tenant_id: str, log: str, reason: str, actor: str | None) -> Statement:
        """Count the facts of ``log`` in this tenant again.

        Raises:
            InvalidInputError: the log is not excluded, or is this ledger's.
            TenantNotFoundError: there is no such tenant.
            LedgerError: as ``Submitter.submit``.
        """
        excluded = [each.log for each in await self.statements(tenant_id) if each.is_excluded]
        refuse(
            _of_log,
            (log not in excluded, f"{log} is not excluded; excluded are: {', '.join(excluded) or 'none'}"),
            (
                log == own_log(self.log_origin, tenant_id),
                "it is this ledger's own; a ledger cannot speak for itself, so include it at another ledger",
            ),
        )
        return await self._state(SystemAction.LOG_INCLUDED, tenant_id, log, reason, actor)

    def _require(self, tenant_id: str) -> None:
        if tenant_id not in self.system.tenants:
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")

    async def _state(self, action: SystemAction, tenant_id: str, log: str, reason: str, actor: str | None) -> Statement:
        payload = canonical.encode(facts_of(type=action.value, log=log, reason=reason, **{ACTOR: actor}))
        hlc, place = await self.system.chain_about(action, SUBJECT, payload, tenant_id, actor)
        is_excluded = action is SystemAction.LOG_EXCLUDED
        return Statement((*hlc, ""), log, is_excluded, place.seq, None, reason, actor)

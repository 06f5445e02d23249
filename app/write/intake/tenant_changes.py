"""Changes that an operator makes by entries of a tenant's chain: its retention, and which logs count for its jobs.

*Retention* is how long entries are kept, and holds. What loosens is signed and names the entry about retention before
it, so it counts only if none comes between (:mod:`ledger.machines.retention`). If one does, another entry is written
behind the newest one, ``ATTEMPTS_MAX`` times at most.

*Exclusions* take logs of other ledgers out of a tenant's jobs, and put them back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS, text_of
from app.store import retention
from app.store.appended import ChainPosition
from app.store.exclusions import own_log
from app.store.jobs.table import JobFolds
from app.store.reading import Pool, reading, run_in
from app.trust.key_in_use import KeyInUse
from app.trust.retention import RetentionReader
from app.write.intake.system_entries import SystemEntries, facts_of
from ledger import canonical
from ledger.errors import (
    InvalidInputError,
    JobNotFoundError,
    LedgerError,
    NotFoundError,
    ProblemError,
    SignerAwayError,
    TenantNotFoundError,
    refuse,
)
from ledger.facts import problems
from ledger.facts.events import ACTOR, SYSTEM_TENANT, SystemAction
from ledger.hlc import Hlc
from ledger.machines import exclusions
from ledger.machines.exclusions import NO_STATEMENTS, Statement
from ledger.machines.retention import HOLDS_MAX, JOBS_A_HOLD_MAX, NO_ENTRY, SUBJECT, Hold, Place, Retention, archived
from signing import retention_statement

ATTEMPTS_MAX: Final = 3
"""Entries that one change may take, if others are chained between each time."""
NEW_TENANTS_INTERVAL_S: Final = 1.0
"""Pause between two searches for tenants that began at this node."""
BEFORE_THE_END_MS: Final = 60_000
"""Tenants that began so long before the last end of this node, as after PostgreSQL was away, may lack the policy."""

Facts = dict[str, object]


@dataclass(kw_only=True, eq=False)
class RetentionChanges:
    """Makes entries about retention; each is chained on return."""

    system: SystemEntries
    pool: Pool
    reader: RetentionReader
    keys: KeyInUse
    log_origin: str
    record_bytes_max: int
    default_period_s: int | None = None
    default_minimum_s: int | None = None
    """Policy of tenants that begin at this node."""
    chained: Collection[str] = ()
    """The tenants with a chain at the start of this node."""
    last_hlc: Hlc
    """The highest that this node had given before."""

    async def read(self, tenant_id: str) -> Retention:
        """Policy, holds and floor of a tenant.

        Raises:
            TenantNotFoundError: there is no such tenant.
            ChainDamagedError: an entry about them is not what was chained.
        """
        if tenant_id != SYSTEM_TENANT and tenant_id not in self.system.tenants:
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
        return await run_in(reading(self.pool, snapshot=True), self.reader.read, tenant_id)

    async def run(self) -> None:
        """Give tenants that begin at this node the default policy, until cancelled; those too that began right before
        its last end."""
        known, is_first = {*self.chained, SYSTEM_TENANT}, True
        while self.default_period_s is not None or self.default_minimum_s is not None:
            await asyncio.sleep(NEW_TENANTS_INTERVAL_S)
            if is_first:
                try:
                    known -= await self._begun_before_the_end()
                    is_first = False
                except (LedgerError, *DATABASE_FAULTS) as error:
                    log.warning("default_retention_delayed", tenant_id=None, error=text_of(error))
            for tenant_id in sorted(self.system.tenants - known):
                try:
                    if (await self.read(tenant_id)).newest == NO_ENTRY:
                        await self.set_policy(tenant_id, self.default_period_s, self.default_minimum_s, None)
                    known.add(tenant_id)
                except (LedgerError, *DATABASE_FAULTS) as error:
                    log.warning("default_retention_delayed", tenant_id=tenant_id, error=text_of(error))

    async def _begun_before_the_end(self) -> set[str]:
        since_ms = self.last_hlc.physical_ms - BEFORE_THE_END_MS
        async with reading(self.pool) as connection:
            return await retention.begun_at(connection, self.last_hlc.node_id, since_ms) - {SYSTEM_TENANT}

    async def set_policy(
        self, tenant_id: str, period_s: int | None, minimum_s: int | None, actor: str | None
    ) -> Retention:
        """Keep entries for this period, and never for less than this minimum, from now on. A minimum that is left out
        stays; a period that is left out ends: nothing leaves.

        Raises:
            TenantNotFoundError: there is no such tenant.
            ProblemError: the minimum would be shortened, or other changes came between each time.
            LedgerError: as ``enter``.
        """
        for _ in range(ATTEMPTS_MAX):
            known = await self.read(tenant_id)
            if minimum_s is not None and minimum_s < (known.minimum_s or 0):
                raise ProblemError(
                    problems.RETENTION_CONFLICT,
                    f"the minimum of tenant {tenant_id} is {known.minimum_s} s, and is never shortened: give that, or "
                    "more",
                )
            facts = facts_of(period_s=period_s, minimum_s=minimum_s)
            if await self.enter(SystemAction.RETENTION_SET, tenant_id, facts, known.newest, actor) is not None:
                return await self.read(tenant_id)
        raise _came_between(tenant_id)

    async def place(
        self, tenant_id: str, reason: str, job_ids: Sequence[str] | None, where: str | None, actor: str | None
    ) -> Hold:
        """Hold all entries of these jobs, or of the tenant, until the hold is released. Of the jobs that the search
        ``where`` found those that leave are left out.

        Raises:
            TenantNotFoundError, JobNotFoundError: there is no such tenant or job.
            ArchivedError: a job has left for the archive, or leaves; one that a prune took before the hold was chained,
                too, and then the hold of the others is open.
            InvalidInputError: too many jobs, or none.
            ProblemError: the tenant has too many holds.
            LedgerError: as ``enter``.
        """
        known = await self.read(tenant_id)
        if len(known.holds) >= HOLDS_MAX:
            raise ProblemError(
                problems.RETENTION_CONFLICT,
                f"tenant {tenant_id} has {HOLDS_MAX} holds: release one, or hold the tenant",
            )
        if job_ids is not None:
            job_ids = await self._jobs_here(tenant_id, job_ids, is_search=where is not None)
        hold_id = secrets.token_hex(8)
        facts = facts_of(
            hold_id=hold_id, reason=reason, job_ids=None if job_ids is None else sorted(job_ids), where=where
        )
        await self._write(SystemAction.HOLD_PLACED, tenant_id, facts | facts_of(**{ACTOR: actor}), actor)
        found = await self.read(tenant_id)
        if job_ids is not None and found.floor_seq > known.floor_seq:
            await self._jobs_here(tenant_id, job_ids)
        return found.holds[hold_id]

    async def _jobs_here(self, tenant_id: str, job_ids: Sequence[str], *, is_search: bool = False) -> list[str]:
        """These jobs, whose entries are all here and stay; of a search those of which that is so.

        Raises: as ``place``.
        """
        async with reading(self.pool, snapshot=True) as connection:
            first_seqs = await retention.first_seqs(connection, tenant_id, job_ids, 0)
            floor = (await self.reader.read(connection, tenant_id)).floor
            leaving = {} if floor is None else {job: seq for job, seq in first_seqs.items() if seq <= floor.to_seq}
            if is_search:
                job_ids = sorted(first_seqs.keys() - leaving)
            await self.reader.refuse_departed(connection, [(tenant_id, each) for each in job_ids])
        if not 1 <= len(job_ids) <= JOBS_A_HOLD_MAX:
            raise InvalidInputError(
                f"a hold has 1 to {JOBS_A_HOLD_MAX} jobs, and these are {len(job_ids)}: narrow the search, or hold the "
                "tenant"
            )
        for each in job_ids:
            if each in leaving:
                raise archived(f"job {each} of tenant {tenant_id}", floor)
            if each not in first_seqs:
                raise JobNotFoundError(f"tenant {tenant_id} has no job {each}")
        return [*job_ids]

    async def release(self, tenant_id: str, hold_id: str, reason: str, actor: str | None) -> Hold:
        """End a hold.

        Raises:
            TenantNotFoundError, NotFoundError: there is no such tenant, or no such hold that is open.
            ProblemError: other changes came between each time.
            LedgerError: as ``enter``.
        """
        for _ in range(ATTEMPTS_MAX):
            known = await self.read(tenant_id)
            if (hold := known.holds.get(hold_id)) is None:
                raise NotFoundError(f"tenant {tenant_id} has no hold {hold_id} that is open")
            facts: Facts = {"hold_id": hold_id, "reason": reason}
            if await self.enter(SystemAction.HOLD_RELEASED, tenant_id, facts, known.newest, actor) is not None:
                return hold
        raise _came_between(tenant_id)

    async def enter(
        self, action: SystemAction, tenant_id: str, facts: Mapping[str, object], after: Place, actor: str | None
    ) -> ChainPosition | None:
        """Write an entry that loosens, signed, behind ``after``, the newest entry about retention that the caller read.
        None if another was chained between: the entry is chained and counts for nothing.

        Raises:
            SignerAwayError: the node's key signs nothing now.
            LedgerError: as ``SystemEntries.chain_about``.
        """
        if self.keys.not_admitted is not None:
            raise SignerAwayError(self.keys.not_admitted)
        said = {**facts, "after": msgspec.to_builtins(after), **facts_of(**{ACTOR: actor})}
        log_name = own_log(self.log_origin, tenant_id)
        assert log_name is not None
        async with self.keys.signing() as (signer, *_):
            signed = await self.keys.sign(lambda: retention_statement.sign(action, said, log_name, signer))
        place = await self._write(action, tenant_id, signed, actor)
        rows = await run_in(reading(self.pool), retention.retention_rows, tenant_id)
        before = max((row[0] for row in rows if row[0] < place.seq), default=0)
        return place if before in (0, after.seq) else None

    async def _write(
        self, action: SystemAction, tenant_id: str, facts: Mapping[str, Any], actor: str | None
    ) -> ChainPosition:
        payload = canonical.encode({"type": action.value, **facts})
        if len(payload) > self.record_bytes_max // 2:
            raise InvalidInputError("the entry would be longer than wal.record_bytes_max allows: name fewer jobs")
        _, place = await self.system.chain_about(action, SUBJECT, payload, tenant_id, actor)
        return place


def _came_between(tenant_id: str) -> ProblemError:
    return ProblemError(
        problems.RETENTION_CONFLICT,
        f"the retention of tenant {tenant_id} was changed by others meanwhile, {ATTEMPTS_MAX} times: read it, and send "
        "the request again",
    )


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
        found = await run_in(reading(self.pool, snapshot=True), self.folds.statements, [tenant_id])
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
        hlc, place = await self.system.chain_about(action, exclusions.SUBJECT, payload, tenant_id, actor)
        is_excluded = action is SystemAction.LOG_EXCLUDED
        return Statement((*hlc, ""), log, is_excluded, place.seq, None, reason, actor)

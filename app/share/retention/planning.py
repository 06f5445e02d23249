"""What may leave of a chain, and what stops the rest: facts are read here, ``ledger.machines.retention`` decides."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from app.runtime.tasks import keep_newest
from app.share.retention.carrying import NOTHING_CARRIED, TENANTS_REMEMBERED_MAX, Carried, Carrying
from app.store import Connection, chain_reads, retention
from app.store.jobs import table as job_table
from app.store.jobs.table import JobFolds
from app.store.reading import Pool, reading
from app.trust.retention import RetentionReader
from ledger.errors import LedgerError
from ledger.facts.events import SYSTEM_TENANT
from ledger.machines.exclusions import NO_STATEMENTS, Statements
from ledger.machines.retention import Plan, Retention, Stop, Why, plan, stopping_holds, stopping_jobs
from signing.keys import Keyring

if TYPE_CHECKING:
    from pipeline.archive.ranges import ArchivedEnd

PLAN_TIMEOUT_S = 600.0
"""Longest that reading the facts of one tenant may take."""


class Planned(NamedTuple):
    """What may leave of one chain at a moment."""

    retention: Retention
    plan: Plan
    never_ended: int
    """Jobs with entries in the prefix that have not ended."""
    now_ms: int
    carried: Carried = NOTHING_CARRIED
    """What the PRUNED entry of the prefix carries."""
    stated: Statements = NO_STATEMENTS
    """The statements about excluded logs, by which jobs have ended or not."""


@dataclass(eq=False)
class StoredArchive:
    """The archive that a prune relies on, in a folder or bucket. Both methods block.

    Raises:
        LedgerError: the archive cannot be read, or no key of ``keyring`` signed what it says.
    """

    url: str

    def end(self, tenant_id: str, keyring: Keyring) -> ArchivedEnd | None:
        """How far a tenant is archived by its newest manifest, None if it is not. No file is read."""
        from objects.store import ArchiveStore
        from pipeline.archive.ranges import archived_end

        return archived_end(ArchiveStore(self.url), tenant_id, keyring)

    def read_back(self, tenant_id: str, keyring: Keyring, from_seq: int, to_seq: int) -> Sequence[ArchivedEnd]:
        """Read and verify every file of these entries; returns the ends of the manifests that cover them, by seq."""
        from objects.store import ArchiveStore
        from pipeline.archive.ranges import verified_range

        return verified_range(ArchiveStore(self.url), tenant_id, keyring, from_seq, to_seq)


@dataclass(kw_only=True, eq=False)
class Planner:
    """Plans prunes of one ledger's tenants."""

    pool: Pool
    reader: RetentionReader
    folds: JobFolds
    carrying: Carrying
    archive: StoredArchive | None
    keys_of: Callable[[str], Awaitable[Keyring]]
    """Returns the keys of a tenant's log and of the ledger."""
    now_ms: Callable[[], int]

    def __post_init__(self) -> None:
        self._old: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By tenant a time, and the seq up to which all entries are older."""

    async def plan(self, tenant_id: str, to_seq: int | None = None) -> Planned:
        """What may leave now, up to ``to_seq`` if given.

        Raises:
            TenantNotFoundError: there is no such tenant.
            ChainDamagedError: an entry that decides is not what was chained.
            DatabaseUnavailableError: PostgreSQL cannot be reached.
        """
        archived = await self._archived(tenant_id)
        async with reading(self.pool, timeout_s=PLAN_TIMEOUT_S, snapshot=True) as connection:
            head = await chain_reads.head(connection, tenant_id)
            known = await self.reader.read(connection, tenant_id)
            floor_seq, now_ms = known.floor_seq, self.now_ms()
            if tenant_id == SYSTEM_TENANT:
                stop = Stop(1, Why.SYSTEM, "the ledger's own chain keeps everything")
                return Planned(known, Plan(0, stop), 0, now_ms)
            if known.kept_s is None or known.period_s is None:
                stop = Stop(floor_seq + 1, Why.NO_PERIOD, "the tenant has no period, so nothing leaves")
                return Planned(known, Plan(floor_seq, stop), 0, now_ms)
            stated = await self._stated(connection, tenant_id)
            stops = [archived, *([] if to_seq is None else [Stop(to_seq + 1, Why.ASKED)])]
            stops += await self._lasting_stops(connection, tenant_id, known, head.signed_seq, now_ms)
            stops += await self._stops(connection, tenant_id, known, stated)
            first = min(stop.seq for stop in stops)
            jobs = await retention.open_jobs(connection, tenant_id, floor_seq, first - 1)
            if (stop_of_job := stopping_jobs(jobs, now_ms, known.period_s)) is not None:
                stops.append(stop_of_job)
            ends = await retention.signed_ends(connection, tenant_id, floor_seq)
            stops = [stop._replace(seq=max(stop.seq, floor_seq + 1)) for stop in stops]
            found, carried = await self._planned(connection, tenant_id, known, ends, stops)
            if found.stopped_by is not None and found.stopped_by.seq > head.head_seq:
                found = found._replace(stopped_by=None)
            never_ended = sum(job.first_seq <= found.to_seq for job in jobs)
            return Planned(known, found, never_ended, now_ms, carried, stated)

    async def is_as_planned(self, tenant_id: str, planned: Planned) -> bool:
        """Whether nothing was chained or set since that stops the prefix, or can. What is old enough, signed, archived
        and of a job that has ended stays so.

        Raises: as ``plan``.
        """
        async with reading(self.pool, timeout_s=PLAN_TIMEOUT_S, snapshot=True) as connection:
            known, stated = await self.reader.read(connection, tenant_id), await self._stated(connection, tenant_id)
            if (known.newest, stated) != (planned.retention.newest, planned.stated):
                return False
            stops = await self._stops(connection, tenant_id, known, stated)
            return all(stop.seq > planned.plan.to_seq for stop in stops)

    async def _planned(
        self, connection: Connection, tenant_id: str, known: Retention, ends: Sequence[int], stops: Sequence[Stop]
    ) -> tuple[Plan, Carried]:
        """The prefix that may leave and whose state can be carried, and what is carried."""
        floor_seq = known.floor_seq
        found = plan(floor_seq, ends, stops)
        for _ in range(2):
            if found.to_seq == floor_seq:
                return found, NOTHING_CARRIED
            carried = await self.carrying.at(connection, tenant_id, known.floor, found.to_seq)
            if not carried.stops:
                return found, carried
            found = plan(floor_seq, ends, [*stops, *carried.stops])
        # What is carried at the shorter prefix stops it as well: all of it stays until that has ended.
        return found._replace(to_seq=floor_seq), NOTHING_CARRIED

    async def _lasting_stops(
        self, connection: Connection, tenant_id: str, known: Retention, signed_seq: int, now_ms: int
    ) -> list[Stop]:
        """The first entry that stops a prefix for each reason that ends by itself and does not return: age, a missing
        signature, a job table that is behind."""
        assert known.kept_s is not None
        stops = [Stop(signed_seq + 1, Why.UNSIGNED, "no signed snapshot covers it yet")]
        young = await self._first_young(connection, tenant_id, known.floor_seq, now_ms - known.kept_s * 1000)
        if young is not None:
            stops.append(Stop(young, Why.YOUNG, f"it is younger than {known.kept_s} s"))
        place = await job_table.place(connection, tenant_id)
        followed_seq = 0 if place is None or place.is_begun else place.seq
        stops.append(Stop(followed_seq + 1, Why.OPEN_JOB, "the job table has not followed the chain to it yet"))
        return stops

    async def _stops(self, connection: Connection, tenant_id: str, known: Retention, stated: Statements) -> list[Stop]:
        """The first entry that stops a prefix for each reason that may arise while a prune is under way."""
        floor_seq = known.floor_seq
        held = {job_id for hold in known.holds.values() for job_id in hold.job_ids or ()}
        first_seqs = await retention.first_seqs(connection, tenant_id, held, floor_seq)
        stops = [*stopping_holds(known.holds.values(), floor_seq, first_seqs)]
        stops += [
            Stop(each.seq, Why.EXCLUSION, f"it decides whether log {each.log} counts: state that again to let it go")
            for each in stated.by_log.values()
            if each.seq > floor_seq
        ]
        needed = await retention.first_needed(connection, tenant_id, floor_seq)
        reasons = (
            (needed.keyed, Why.KEYED, "its Idempotency-Key is still kept"),
            (needed.webhook, Why.WEBHOOK, "a webhook has not delivered it, or keeps it as a dead letter"),
        )
        return stops + [Stop(seq, why, detail) for seq, why, detail in reasons if seq is not None]

    async def _stated(self, connection: Connection, tenant_id: str) -> Statements:
        return (await self.folds.statements(connection, [tenant_id])).get(tenant_id, NO_STATEMENTS)

    async def _first_young(self, connection: Connection, tenant_id: str, floor_seq: int, since_ms: int) -> int | None:
        """The first entry above the floor whose time is ``since_ms`` or later. Entries that were found to be old before
        are not read again, unless more time is asked for."""
        old_since_ms, old_to_seq = self._old.get(tenant_id, (since_ms, 0))
        after_seq = max(floor_seq, old_to_seq) if old_since_ms <= since_ms else floor_seq
        young, last_seq = await retention.first_young(connection, tenant_id, after_seq, since_ms)
        keep_newest(self._old, tenant_id, (since_ms, last_seq if young is None else young - 1), TENANTS_REMEMBERED_MAX)
        return young

    async def _archived(self, tenant_id: str) -> Stop:
        """Where the archive ends, as its newest manifest says."""
        if self.archive is None:
            return Stop(0, Why.ARCHIVE, "archive.url is not set, so nothing is archived")
        try:
            end = await asyncio.to_thread(self.archive.end, tenant_id, await self.keys_of(tenant_id))
        except (LedgerError, ImportError, OSError) as error:
            return Stop(0, Why.ARCHIVE, f"the archive cannot be read: {error}")
        return Stop(0 if end is None else end.to_seq + 1, Why.ARCHIVE, "it is not archived yet")

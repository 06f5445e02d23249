"""What the entries of a chain say about its retention, as a node believes it: entries as they were chained, and
statements by admitted keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from app.store import Connection
from app.store.departed import departed
from app.store.entry_check import EntryCheck
from app.store.reading import Pool, reading
from app.store.retention import retention_rows
from ledger.errors import ArchivedError
from ledger.facts.events import SYSTEM_TENANT
from ledger.machines.retention import NOTHING, Retention, retention_of
from signing import retention_statement
from signing.keys import Keyring

JobKey = tuple[str, str]


@dataclass(kw_only=True, eq=False)
class RetentionReader:
    """Reads the retention of the tenants of one ledger."""

    pool: Pool
    check: EntryCheck
    keyring: Callable[[], Awaitable[Keyring]]
    origin: Callable[[str], str]
    """Returns the name of a tenant's log."""
    departed: set[str] = field(default_factory=set, init=False)
    """Tenants that jobs are known to have left; a new one is found within ``removal.SEARCH_INTERVAL_S``."""

    async def read(self, connection: Connection, tenant_id: str) -> Retention:
        """Policy, holds and floor of a tenant. ``_system`` has none: it keeps everything.

        Raises:
            ChainDamagedError: an entry about them is not what was chained.
            DatabaseUnavailableError: the keys cannot be read.
        """
        if tenant_id == SYSTEM_TENANT:
            return NOTHING
        if not (rows := await retention_rows(connection, tenant_id)):
            return NOTHING
        await self.check.require(connection, tenant_id, rows)
        return retention_of(rows, partial(retention_statement.judge, self.origin(tenant_id), await self.keyring()))

    async def refuse_departed(self, connection: Connection, jobs: Sequence[JobKey]) -> None:
        """Return if no entry of these jobs has left.

        Raises:
            ArchivedError: names the first job of which one has, and where it is.
            ChainDamagedError: as ``read``.
        """
        if found := await departed(connection, jobs):
            tenant_id, job_id = found[0]
            raise archived(f"job {job_id} of tenant {tenant_id}", await self.read(connection, tenant_id))

    async def refuse_events(self, jobs: Sequence[JobKey]) -> None:
        """Return if these jobs may take events: none has left.

        Raises:
            ArchivedError, ChainDamagedError, DatabaseUnavailableError: as ``refuse_departed``.
        """
        if doubtful := [job for job in jobs if job[0] in self.departed]:
            async with reading(self.pool) as connection:
                await self.refuse_departed(connection, doubtful)

    async def refuse_left(self, connection: Connection, tenant_id: str, seq: int) -> None:
        """Return if entry ``seq`` of a tenant has not left.

        Raises:
            ArchivedError: it has.
            ChainDamagedError: as ``read``.
        """
        found = await self.read(connection, tenant_id)
        if seq <= found.floor_seq:
            raise archived(f"seq {seq} of tenant {tenant_id}", found)


def archived(what: str, found: Retention) -> ArchivedError:
    """The error that ``what`` has left."""
    floor = found.floor
    if floor is None:
        return ArchivedError(
            f"{what} has left the database, and no PRUNED entry that counts says where to: run tally verify",
            archive="",
            manifest=None,
            verified_from_seq=1,
        )
    return ArchivedError(
        f"{what} has left: entries up to seq {floor.to_seq} are in the archive {floor.archive}",
        archive=floor.archive,
        manifest=floor.manifest,
        verified_from_seq=floor.to_seq + 1,
    )

"""What the entries of a chain say about its retention, as far as a node trusts them: entries as they were chained, and
statements by admitted keys.

*Reading while rows leave.* Rows leave only behind a PRUNED entry that is committed. A transaction that shows one state
shows all rows above the floor that it shows. A reader of several states reads rows first and the floor after them, on
the same connection: the floor then covers whatever it missed (``RetentionReader.leaving``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from app.runtime.tasks import keep_newest
from app.store import Connection
from app.store.commitments import AtFloor
from app.store.departed import departed
from app.store.entry_check import EntryCheck, not_as_chained
from app.store.reading import Pool, reading, run_in
from app.store.retention import retention_rows, retention_versions, tenants_with_prunes
from ledger.errors import ChainDamagedError, InvalidInputError
from ledger.facts.events import SYSTEM_TENANT
from ledger.machines.carried import NOTHING_PRIVATE, CarriedFields, read_commitments, read_private_fields
from ledger.machines.retention import NOTHING, Floor, Retention, archived, retention_of
from ledger.verification.verdict import Break
from signing import retention_statement
from signing.keys import Keyring

JobKey = tuple[str, str]
TENANTS_REMEMBERED_MAX: Final = 1000
"""Tenants whose retention is remembered."""
HELD_REMEMBERED_MAX: Final = 5000
"""Most jobs that the holds of one of them name."""


class FieldsAtFloor(NamedTuple):
    """What the entries up to a floor said about private fields."""

    seq: int = 0
    """The floor, 0 if nothing left."""
    fields: CarriedFields = NOTHING_PRIVATE


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

    def __post_init__(self) -> None:
        self._known: OrderedDict[str, tuple[object, Retention]] = OrderedDict()
        """By tenant, what was read last, and the versions of the rows and the keys that it was read from."""

    async def read(self, connection: Connection, tenant_id: str) -> Retention:
        """Policy, holds and floor of a tenant. ``_system`` has none: it keeps everything.

        Raises:
            ChainDamagedError: an entry about them is not what was chained.
            DatabaseUnavailableError: the keys cannot be read.
        """
        if tenant_id == SYSTEM_TENANT:
            return NOTHING
        if not (versions := await retention_versions(connection, tenant_id)):
            return NOTHING
        keyring = await self.keyring()
        read_from = versions, [*keyring]
        if (known := self._known.get(tenant_id)) is not None and known[0] == read_from:
            return known[1]
        rows = await retention_rows(connection, tenant_id)
        await self.check.require(connection, tenant_id, rows)
        found = retention_of(rows, partial(retention_statement.judge, self.origin(tenant_id), keyring))
        if sum(len(hold.job_ids or ()) for hold in found.holds.values()) <= HELD_REMEMBERED_MAX:
            keep_newest(self._known, tenant_id, (read_from, found), TENANTS_REMEMBERED_MAX)
        return found

    async def refuse_departed(self, connection: Connection, jobs: Sequence[JobKey]) -> None:
        """Return if no entry of these jobs has left.

        Raises:
            ArchivedError: names the first job of which one has, and where it is.
            ChainDamagedError: as ``read``.
        """
        if found := await departed(connection, jobs):
            tenant_id, job_id = found[0]
            raise archived(f"job {job_id} of tenant {tenant_id}", (await self.read(connection, tenant_id)).floor)

    async def refuse_events(self, jobs: Sequence[JobKey]) -> None:
        """Return if these jobs may take events: none has left.

        Raises:
            ArchivedError, ChainDamagedError, DatabaseUnavailableError: as ``refuse_departed``.
        """
        if doubtful := [job for job in jobs if job[0] in self.departed]:
            await run_in(reading(self.pool), self.refuse_departed, doubtful)

    async def refuse_left(self, connection: Connection, tenant_id: str, seq: int) -> None:
        """Return if entry ``seq`` of a tenant has not left.

        Raises:
            ArchivedError: it has.
            ChainDamagedError: as ``read``.
        """
        found = await self.read(connection, tenant_id)
        if seq <= found.floor_seq:
            raise archived(f"seq {seq} of tenant {tenant_id}", found.floor)

    @asynccontextmanager
    async def leaving(self, connection: Connection, tenant_id: str, from_seq: int) -> AsyncIterator[None]:
        """Around statements that read entries from ``from_seq`` on, which may leave between two of them.

        Raises:
            ArchivedError: they found damage, and entry ``from_seq`` has left.
        """
        try:
            yield
        except ChainDamagedError:
            await self.refuse_left(connection, tenant_id, from_seq)
            raise

    async def refuse_as_of(self, connection: Connection, tenant_id: str, as_of_seq: int) -> None:
        """Return if the state as of a seq can be made out: it is not below the floor.

        Raises:
            ArchivedError: it is.
            ChainDamagedError: as ``read``.
        """
        found = await self.read(connection, tenant_id)
        if as_of_seq < found.floor_seq:
            raise archived(f"the state as of seq {as_of_seq} of tenant {tenant_id}", found.floor)

    async def commitments(self, connection: Connection, tenant_id: str) -> AtFloor:
        """The commitments in force at the floor of a tenant's chain.

        Raises:
            ChainDamagedError: as ``read``, or the PRUNED entry carries no state.
        """
        return _commitments(tenant_id, await self.read(connection, tenant_id))

    async def private_fields(self, connection: Connection, tenant_id: str) -> FieldsAtFloor:
        """What the entries of a tenant that left said about private fields.

        Raises:
            ChainDamagedError: as ``read``, or the PRUNED entry does not say.
        """
        if (floor := (await self.read(connection, tenant_id)).floor) is None:
            return FieldsAtFloor()
        try:
            return FieldsAtFloor(floor.to_seq, read_private_fields(floor.private_fields))
        except InvalidInputError as error:
            raise _not_carried(tenant_id, floor, error) from None

    async def all_private_fields(
        self, connection: Connection
    ) -> tuple[dict[str, FieldsAtFloor], list[ChainDamagedError]]:
        """The same by tenant that entries left; and the damage of those of which it cannot be read."""
        found, damaged = dict[str, FieldsAtFloor](), list[ChainDamagedError]()
        for tenant_id in await tenants_with_prunes(connection):
            try:
                found[tenant_id] = await self.private_fields(connection, tenant_id)
            except ChainDamagedError as error:
                damaged.append(error)
        return {tenant_id: each for tenant_id, each in found.items() if each.seq}, damaged


async def unjudged_commitments(connection: Connection, tenant_id: str) -> AtFloor:
    """As ``RetentionReader.commitments``, before a node knows its keys: whether an admitted key signed the PRUNED entry
    is left to verification."""
    rows = await retention_rows(connection, tenant_id)
    return _commitments(tenant_id, retention_of(rows, lambda *_: "not_checked", is_strict=False))


def _commitments(tenant_id: str, found: Retention) -> AtFloor:
    if (floor := found.floor) is None:
        return AtFloor()
    try:
        return AtFloor(floor.to_seq, read_commitments(floor.commitments, floor.to_seq))
    except InvalidInputError as error:
        raise _not_carried(tenant_id, floor, error) from None


def _not_carried(tenant_id: str, floor: Floor, error: InvalidInputError) -> ChainDamagedError:
    return not_as_chained(tenant_id, Break(floor.seq, "projection", f"PRUNED at seq {floor.seq}: {error}"))

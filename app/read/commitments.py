"""Active commitments and the nodes, as of the end of the chain or of an earlier seq.

Tables of nodes (:mod:`ledger.machines.node_table`) are kept in memory and advanced by later entries. The first table of
a tenant is built from its capacities and active commitments, some 50 us each. Every entry is recomputed when it is
read. A list that goes on with an earlier seq finds the table of that seq, unless it was evicted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from app.read.consistency import Promise, ReadLevel
from app.read.copies import Copies, Judge
from app.runtime.logs import log
from app.runtime.metrics import Values
from app.store import Connection, chain_reads, commitments
from app.store.commitments import AtFloor, PromiseCheck, PromiseEntry
from app.store.entry_check import EntryCheck
from app.store.reading import Pool, reading, run_in
from app.trust.retention import RetentionReader
from ledger.errors import ChainDamagedError, DatabaseUnavailableError, InvalidInputError, SeqOutOfRangeError
from ledger.facts.events import CommitmentAction
from ledger.machines.node_table import NodeTable
from ledger.machines.promises import Capacity, Proposal, Revocation, RulesVersion, read_capacity, read_proposal

_STRONG = Promise(ReadLevel.STRONG, (), 0)

Found = TypeVar("Found")


class PromisedPage(NamedTuple):
    """A page of what was valid at ``as_of_seq``; ``last`` is where the next page starts, None after the last page."""

    as_of_seq: int
    items: Sequence[dict[str, Any]]
    last: int | None


class CommitmentReader:
    """Reads the primary, after this node has proved that it is not fenced and that all its own entries are chained."""

    def __init__(
        self,
        copies: Copies,
        check: EntryCheck,
        promise_check: PromiseCheck,
        tables: NodeTables,
        retention: RetentionReader,
    ) -> None:
        self._retention = retention
        self._copies = copies
        self._check = check
        self._promise_check = promise_check
        self._tables = tables

    async def page(self, tenant_id: str, as_of_seq: int | None, after_seq: int, limit: int) -> PromisedPage:
        """Active commitments by ascending index above ``after_seq``. If ``as_of_seq`` is None, as of the end of the
        chain.

        Raises:
            TenantNotFoundError: there is no such tenant.
            SeqOutOfRangeError: the chain has no entry ``as_of_seq``.
            ArchivedError: that entry left, and the next one too.
            ChainDamagedError: an entry differs from what was chained, or the table of commitments is wrong.
            FencedError, TooStaleError: as STRONG reads.
        """

        async def active(connection: Connection, as_of: int) -> list[PromiseEntry]:
            floor = await self._promise_check.require(connection, tenant_id)
            return await commitments.page(
                connection, self._check, tenant_id, as_of, after_seq, limit + 1, capacities=False, floor=floor
            )

        as_of, found = await self._read(tenant_id, as_of_seq, active)
        items = [_item(tenant_id, entry) for entry in found[:limit]]
        return PromisedPage(as_of, items, found[limit - 1].seq if len(found) > limit else None)

    async def nodes(
        self, tenant_id: str, as_of_seq: int | None, after_seq: int, limit: int, *, overbooked: bool
    ) -> tuple[PromisedPage, int]:
        """The nodes of known capacity, all or those that are ``overbooked``, by ascending index of their capacity, and
        the version of the rules in force; errors as of ``page``."""

        async def table_at(connection: Connection, as_of: int) -> NodeTable:
            return await self._tables.at(connection, tenant_id, as_of)

        as_of, table = await self._read(tenant_id, as_of_seq, table_at)
        found = table.page(after_seq, limit + 1, overbooked=overbooked)
        items = [node.to_json() for node in found[:limit]]
        return PromisedPage(as_of, items, found[limit - 1].index if len(found) > limit else None), table.rules

    async def _read(
        self, tenant_id: str, as_of_seq: int | None, find: Callable[[Connection, int], Awaitable[Found]]
    ) -> tuple[int, Found]:
        """What ``find`` finds at ``as_of_seq``, or at the end of the chain, and that seq."""

        async def look(pool: Pool, judge: Judge) -> tuple[int, Found]:
            async with reading(pool, snapshot=True) as connection:
                await self._copies.judged(connection, _STRONG, judge)
                head_seq = (await chain_reads.head(connection, tenant_id)).head_seq
                as_of = head_seq if as_of_seq is None else as_of_seq
                if as_of > head_seq:
                    raise SeqOutOfRangeError(f"as_of_seq: the chain of {tenant_id} ends at {head_seq}")
                if as_of_seq is not None:
                    await self._retention.refuse_as_of(connection, tenant_id, as_of)
                return as_of, await find(connection, as_of)

        found, _ = await self._copies.read(tenant_id, look, _STRONG)
        return found


def _item(tenant_id: str, entry: PromiseEntry) -> dict[str, Any]:
    try:
        facts = orjson.loads(entry.payload)
        return {"index": entry.seq, "commitment": facts["commitment"]}
    except (ValueError, TypeError, KeyError):
        raise ChainDamagedError(
            tenant_id, f"scheduler.commitments names seq {entry.seq}, whose entry promises nothing"
        ) from None


NODES_MAX: Final = 500_000
"""Nodes of all tables in memory, some 700 bytes each; the least recently used table is evicted first."""
ADVANCED_MAX: Final = 20_000
"""Most entries of a chain by which a table is advanced; further on it is built anew."""
ENTRIES_AT_ONCE: Final = 500
"""Entries that are read, and taken, before others get their turn."""
COUNT_INTERVAL_S: Final = 60.0
COUNT_TIMEOUT_S: Final = 3600.0
"""Longest that counting the nodes of one tenant may take."""


class NodeTables:
    """Builds the tables, and keeps the newest."""

    def __init__(self, check: EntryCheck, promise_check: PromiseCheck) -> None:
        self._check = check
        self._promise_check = promise_check
        self._kept: OrderedDict[tuple[str, int], NodeTable] = OrderedDict()
        """By tenant and seq, the most recently used last."""

    async def at(self, connection: Connection, tenant_id: str, as_of_seq: int) -> NodeTable:
        """The tenant's table as of a seq of its chain. In a transaction that shows one state.

        Raises:
            ChainDamagedError: an entry is not as it was chained, or the table of commitments is wrong.
        """
        floor = await self._promise_check.require(connection, tenant_id)
        table = self._nearest(tenant_id, as_of_seq, floor.seq)
        try:
            if table is None:
                table = await self._built(connection, tenant_id, as_of_seq, floor)
            elif table.seq < as_of_seq:
                table = await self._advanced(connection, tenant_id, table, as_of_seq, floor)
        except InvalidInputError as error:
            raise ChainDamagedError(tenant_id, f"its nodes cannot be made out: {error}") from None
        self._keep(tenant_id, table)
        return table

    def _nearest(self, tenant_id: str, as_of_seq: int, floor_seq: int) -> NodeTable | None:
        first = max(as_of_seq - ADVANCED_MAX, floor_seq)
        seqs = (seq for of, seq in self._kept if of == tenant_id and first <= seq <= as_of_seq)
        nearest = max(seqs, default=None)
        return None if nearest is None else self._kept[tenant_id, nearest]

    def _keep(self, tenant_id: str, table: NodeTable) -> None:
        self._kept[tenant_id, table.seq] = table
        self._kept.move_to_end((tenant_id, table.seq))
        nodes = sum(1 + len(each) for each in self._kept.values())
        while nodes > NODES_MAX and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            nodes -= 1 + len(oldest)

    async def _built(self, connection: Connection, tenant_id: str, as_of_seq: int, floor: AtFloor) -> NodeTable:
        table = NodeTable(as_of_seq, await self._rules(connection, tenant_id, as_of_seq, floor))
        for capacities in (True, False):
            after_seq = 0
            while entries := await commitments.page(
                connection,
                self._check,
                tenant_id,
                as_of_seq,
                after_seq,
                ENTRIES_AT_ONCE,
                capacities=capacities,
                floor=floor,
            ):
                await self._take(connection, tenant_id, table, list(map(_read, entries)), floor)
                after_seq = entries[-1].seq
        return table

    async def _rules(self, connection: Connection, tenant_id: str, as_of_seq: int, floor: AtFloor) -> int | None:
        entry = await commitments.rules_entry(connection, self._check, tenant_id, as_of_seq, floor)
        if entry is None:
            return floor.rules
        _, said = _read(entry)
        if isinstance(said, Proposal) and isinstance(said.commitment, RulesVersion):
            return said.commitment.version
        return said.rules

    async def _advanced(
        self, connection: Connection, tenant_id: str, table: NodeTable, as_of_seq: int, floor: AtFloor
    ) -> NodeTable:
        advanced, chunk = table.copy(), list[_Entry]()
        async for entry in commitments.entries(connection, self._check, tenant_id, table.seq, as_of_seq):
            chunk.append(_read(entry))
            if len(chunk) == ENTRIES_AT_ONCE:
                await self._take(connection, tenant_id, advanced, chunk, floor)
                chunk = []
        await self._take(connection, tenant_id, advanced, chunk, floor)
        advanced.seq = as_of_seq
        return advanced

    async def _take(
        self, connection: Connection, tenant_id: str, table: NodeTable, entries: Sequence[_Entry], floor: AtFloor
    ) -> None:
        """Take these entries, the next ones, with the commitments that they revoke."""
        revoked = [index for _, said in entries if (index := _revoked_by(said))]
        found = await commitments.promises_at(connection, self._check, tenant_id, revoked, floor) if revoked else {}
        ended = {index: read_proposal(entry.payload).commitment for index, entry in found.items()}
        for index, said in entries:
            if isinstance(said, Capacity):
                table.take_capacity(index, said)
            else:
                table.take_proposal(said, ended.get(_revoked_by(said)))


_Entry = tuple[int, Capacity | Proposal]
"""The seq of an entry, and what it says."""


def _read(entry: PromiseEntry) -> _Entry:
    is_capacity = entry.action == CommitmentAction.CAPACITY_SET
    return entry.seq, read_capacity(entry.payload) if is_capacity else read_proposal(entry.payload)


def _revoked_by(said: Capacity | Proposal) -> int:
    """The index that an entry revokes, 0 if none."""
    if isinstance(said, Proposal) and isinstance(said.commitment, Revocation):
        return said.commitment.index
    return 0


class OverbookedNodes:
    """Counts the overbooked nodes of all tenants, for the metric of that name."""

    def __init__(self, tables: NodeTables, pool: Pool) -> None:
        self._tables = tables
        self._pool = pool
        self._counts: dict[str, int] = {}
        """By tenant, as of the last count that succeeded."""

    def values(self) -> Values:
        """The metric."""
        return {"commitment_nodes_overbooked": sum(self._counts.values())}

    async def run(self) -> None:
        """Count every ``COUNT_INTERVAL_S``, for ever."""
        while True:
            await self.count()
            await asyncio.sleep(COUNT_INTERVAL_S)

    async def count(self) -> None:
        """Count once. A tenant that cannot be read keeps its last count."""
        try:
            tenants = await run_in(reading(self._pool), commitments.tenants_with_capacities)
            counts = [(tenant_id, await self._count_of(tenant_id)) for tenant_id in tenants]
        except DatabaseUnavailableError as error:
            log.warning("overbooked_nodes_not_counted", error=str(error))
            return
        self._counts = {tenant_id: self._counts.get(tenant_id, 0) if n is None else n for tenant_id, n in counts}

    async def _count_of(self, tenant_id: str) -> int | None:
        try:
            async with reading(self._pool, timeout_s=COUNT_TIMEOUT_S, snapshot=True) as connection:
                head = await chain_reads.head(connection, tenant_id)
                return (await self._tables.at(connection, tenant_id, head.head_seq)).overbooked_count
        except ChainDamagedError as error:
            log.warning("overbooked_nodes_not_counted", tenant_id=tenant_id, error=str(error))
            return None

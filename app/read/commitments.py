"""Active commitments and the nodes, as of the end of the chain or of an earlier seq."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import orjson

from app.read.consistency import Promise, ReadLevel
from app.read.copies import Copies, Judge
from app.read.node_tables import NodeTables
from app.store import Connection, chain_reads, commitments
from app.store.commitments import PromiseCheck, PromiseEntry
from app.store.entry_check import EntryCheck
from app.store.reading import Pool, reading
from app.trust.retention import RetentionReader
from ledger.errors import ChainDamagedError, SeqOutOfRangeError
from ledger.machines.node_table import NodeTable

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

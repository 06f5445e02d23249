"""Active commitments and the capacities of nodes, as of the end of the chain or of an earlier seq."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from app.read.consistency import Promise, ReadLevel
from app.read.copies import Copies, Judge
from app.store import chain_reads, commitments
from app.store.commitments import PromiseCheck, PromiseEntry
from app.store.entry_check import EntryCheck
from app.store.reading import Pool, reading
from ledger.errors import ChainDamagedError, SeqOutOfRangeError

_STRONG = Promise(ReadLevel.STRONG, (), 0)


class PromisedPage(NamedTuple):
    """A page of what was valid at ``as_of_seq``; ``last`` is where the next page starts, None after the last page."""

    as_of_seq: int
    items: Sequence[dict[str, Any]]
    last: int | None


class CommitmentReader:
    """Reads the primary, after this node has proved that it is not fenced and that all its own entries are chained."""

    def __init__(self, copies: Copies, check: EntryCheck, promise_check: PromiseCheck) -> None:
        self._copies = copies
        self._check = check
        self._promise_check = promise_check

    async def page(
        self, tenant_id: str, as_of_seq: int | None, after_seq: int, limit: int, *, capacities: bool
    ) -> PromisedPage:
        """Active commitments, or capacities of nodes, by ascending index above ``after_seq``. If ``as_of_seq`` is None,
        as of the end of the chain.

        Raises:
            TenantNotFoundError: there is no such tenant.
            SeqOutOfRangeError: the chain has no entry ``as_of_seq``.
            ChainDamagedError: an entry differs from what was chained, or the table of commitments is wrong.
            FencedError, TooStaleError: as STRONG reads.
        """

        async def look(pool: Pool, judge: Judge) -> tuple[int, list[PromiseEntry]]:
            async with reading(pool, snapshot=True) as connection:
                await self._copies.judged(connection, _STRONG, judge)
                head_seq = (await chain_reads.head(connection, tenant_id)).head_seq
                as_of = head_seq if as_of_seq is None else as_of_seq
                if as_of > head_seq:
                    raise SeqOutOfRangeError(f"as_of_seq: the chain of {tenant_id} ends at {head_seq}")
                await self._promise_check.require(connection, tenant_id)
                return as_of, await commitments.page(
                    connection, self._check, tenant_id, as_of, after_seq, limit + 1, capacities=capacities
                )

        (as_of, found), _ = await self._copies.read(tenant_id, look, _STRONG)
        items = [_item(tenant_id, entry, capacities) for entry in found[:limit]]
        return PromisedPage(as_of, items, found[limit - 1].seq if len(found) > limit else None)


def _item(tenant_id: str, entry: PromiseEntry, is_capacity: bool) -> dict[str, Any]:
    try:
        facts = orjson.loads(entry.payload)
        if is_capacity:
            return {"index": entry.seq, "node": facts["node"], "capacity": facts["capacity"]}
        return {"index": entry.seq, "commitment": facts["commitment"]}
    except (ValueError, TypeError, KeyError):
        raise ChainDamagedError(
            tenant_id, f"scheduler.commitments names seq {entry.seq}, whose entry promises nothing"
        ) from None

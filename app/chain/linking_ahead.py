"""The next batch, linked while Postgres stores the one before it.

Good only for the batch and the heads that it was linked for: whoever takes it holds the locks of those heads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.chain import previous
from app.pending.backlog import Pending
from app.pending.linking import ChainedKeys, LinkedBatch, link_batch, tenants_begun_by
from app.store.chaining import ChainHead
from app.store.growth import head_of
from app.store.reading import Pool, reading
from ledger.chain import Linker
from ledger.errors import DatabaseUnavailableError
from ledger.positions import Lsn


@dataclass(frozen=True, slots=True)
class _LinkedAhead:
    """A batch linked while the one before it was being stored; good if the heads it meets are ``heads``."""

    batch: list[Pending]
    heads: dict[str, ChainHead]
    linked: LinkedBatch


class LinkingAhead:
    """Links one batch at a time. ``linkers`` are those of the appender, which keeps them up to date."""

    def __init__(self, pool: Pool, linkers: dict[str, Linker]) -> None:
        self._pool = pool
        self._linkers = linkers
        self._task: asyncio.Task[_LinkedAhead | None] | None = None

    def start(
        self, batch: list[Pending], before: LinkedBatch, known: Mapping[str, ChainHead], chained_lsn: Lsn
    ) -> None:
        """Begin to link ``batch`` onto what ``before`` leaves. ``known`` has the heads of tenants that ``before`` does
        not touch, as this node left them; events up to ``chained_lsn`` were chained before."""
        self._task = None
        heads = _heads_after(batch, before, known)
        if heads is None or batch[0].lsn <= chained_lsn or tenants_begun_by(batch):
            return
        self._task = asyncio.get_running_loop().create_task(self._link(batch, before, heads))

    async def take(
        self, batch: Sequence[Pending], heads: dict[str, ChainHead], new_tenants: set[str]
    ) -> LinkedBatch | None:
        """What was linked ahead, if that is done, is this very batch and meets these very heads, which are locked."""
        task, self._task = self._task, None
        if task is None:
            return None
        if not task.done():
            task.cancel()
            return None
        ahead = await task
        if ahead is None or new_tenants or ahead.heads != heads or ahead.batch != batch:
            return None
        return ahead.linked

    def cancel(self) -> None:
        """Stop what is under way."""
        if self._task is not None:
            self._task.cancel()

    async def _link(
        self, batch: list[Pending], before: LinkedBatch, heads: dict[str, ChainHead]
    ) -> _LinkedAhead | None:
        keys: ChainedKeys = {}
        try:
            if any(pending.idempotency is not None for pending in batch):
                async with reading(self._pool) as connection:
                    keys = await previous.chained_keys(connection, batch)
        except DatabaseUnavailableError:
            return None
        for name, winners in before.winners.items():
            keys.setdefault(name, {}).update(winners)
        linked = link_batch(batch, heads=heads, new_tenants=set(), chained_keys=keys, linkers=self._linkers)
        return _LinkedAhead(batch, heads, linked)


def _heads_after(
    batch: Sequence[Pending], before: LinkedBatch, known: Mapping[str, ChainHead]
) -> dict[str, ChainHead] | None:
    """The heads that ``batch`` meets; None when one cannot be known without its lock."""
    heads = {}
    for tenant in {pending.tenant_id for pending in batch}:
        links = before.links.get(tenant)
        head = head_of(links) if links else known.get(tenant)
        if head is None:
            return None
        heads[tenant] = head
    return heads

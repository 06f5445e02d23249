"""The next batch, linked while Postgres stores the one before it, as its records become committed.

What is linked ahead is the beginning of the batch that is chained next, which may have more by then. It is good only
for those records and for the heads that it was linked onto: whoever takes it holds the locks of those heads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from app.store import Connection
from app.store.chaining import ChainHead
from app.store.growth import head_of
from app.store.reading import Pool, reading
from app.write.chain import previous
from app.write.pending.backlog import Pending, payload_bytes_of
from app.write.pending.linking import ChainedKeys, LinkedBatch, link_batch, tenants_begun_by, tenants_decided_by
from ledger.chain import Linker
from ledger.errors import ChainDamagedError, DatabaseUnavailableError

Peek = Callable[[int, int], Sequence[Pending]]
"""What of the next batch is committed, behind so many of its records with so many bytes of payload; none once it is
full, or where what comes next is not linked ahead."""


class Ahead:
    """The beginning of the batch that follows ``before``, linked."""

    def __init__(self, before: LinkedBatch, known: Mapping[str, ChainHead], linkers: dict[str, Linker]) -> None:
        self._before = before
        self._known = known
        self._linkers = linkers
        self.batch: list[Pending] = []
        self.payload_bytes = 0
        self.linked = LinkedBatch()
        self.met: dict[str, ChainHead] = {}
        """By tenant, the head that its first record meets."""

    def heads_for(self, piece: Sequence[Pending]) -> dict[str, ChainHead] | None:
        """The heads that these records meet; None when one cannot be known without its lock."""
        heads = {}
        for tenant_id in {pending.tenant_id for pending in piece}:
            links = self.linked.links.get(tenant_id) or self._before.links.get(tenant_id)
            head = head_of(links) if links else self._known.get(tenant_id)
            if head is None:
                return None
            heads[tenant_id] = head
        return heads

    def link(self, piece: Sequence[Pending], heads: Mapping[str, ChainHead], keys: ChainedKeys) -> None:
        """Link what comes next onto ``heads``; ``keys`` is what the chain has of its keyed requests."""
        for winners in (self._before.winners, self.linked.winners):
            for name, lines in winners.items():
                keys.setdefault(name, {}).update(lines)
        linked = link_batch(piece, heads=heads, new_tenants=set(), chained_keys=keys, linkers=self._linkers)
        self.met = {**heads, **self.met}
        self.batch += piece
        self.payload_bytes += payload_bytes_of(piece)
        self.linked.extend(linked)

    def fits(self, heads: Mapping[str, ChainHead]) -> bool:
        """Whether these are the heads that it was linked onto."""
        return all(heads.get(tenant_id) == head for tenant_id, head in self.met.items())


class LinkingAhead:
    """Links one batch at a time. ``linkers`` are those of the appender."""

    def __init__(self, pool: Pool, linkers: dict[str, Linker]) -> None:
        self._pool = pool
        self._linkers = linkers
        self._ahead: Ahead | None = None
        self._task: asyncio.Task[None] | None = None
        self._more = asyncio.Event()
        self._wanted: tuple[int, Callable[[Ahead], None]] | None = None

    def start(self, peek: Peek, before: LinkedBatch, known: Mapping[str, ChainHead]) -> None:
        """Begin to link what ``peek`` finds onto what ``before`` leaves. ``known`` has the heads of tenants that
        ``before`` does not touch, as this node left them."""
        self.cancel()
        self._ahead = Ahead(before, known, self._linkers)
        self._more.set()
        self._task = asyncio.get_running_loop().create_task(self._link(self._ahead, peek))

    @property
    def batch(self) -> Sequence[Pending]:
        """What is linked."""
        return () if self._ahead is None else self._ahead.batch

    @property
    def payload_bytes(self) -> int:
        """Of all that is linked."""
        return 0 if self._ahead is None else self._ahead.payload_bytes

    def more(self) -> None:
        """More may be committed."""
        self._more.set()

    def pause(self) -> None:
        """Link no more until what is linked is taken: the batch before is about to leave the backlog."""
        self._wanted = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def take(
        self, connection: Connection, batch: Sequence[Pending], heads: Mapping[str, ChainHead]
    ) -> LinkedBatch | None:
        """``batch``, linked onto ``heads``, which are locked; None when nothing good for it was linked ahead."""
        ahead = self._ahead
        self.cancel()
        if ahead is None or not ahead.batch or batch[: len(ahead.batch)] != ahead.batch:
            return None
        if not ahead.fits(heads):
            return None
        if rest := batch[len(ahead.batch) :]:
            ends = {tenant_id: head_of(links) for tenant_id, links in ahead.linked.links.items()}
            ahead.link(rest, {**heads, **ends}, await previous.chained_keys(connection, rest))
        return ahead.linked

    def hand_over(self, entries_min: int, take: Callable[[Ahead], None]) -> None:
        """Call ``take`` with what is linked, to which nothing is added any more, as soon as it is so many entries,
        unless the batch before leaves the backlog first."""
        self._wanted = entries_min, take
        self._hand_over()

    def _hand_over(self) -> None:
        ahead, wanted = self._ahead, self._wanted
        if ahead is not None and wanted is not None and len(ahead.batch) >= wanted[0]:
            self.cancel()
            wanted[1](ahead)

    def cancel(self) -> None:
        """Stop what is under way, and forget it."""
        self.pause()
        self._ahead = None

    async def _link(self, ahead: Ahead, peek: Peek) -> None:
        """Link what is committed as it comes, until something needs locks first."""
        while True:
            await self._more.wait()
            self._more.clear()
            piece = peek(len(ahead.batch), ahead.payload_bytes)
            heads = ahead.heads_for(piece)
            if heads is None or tenants_begun_by(piece) or tenants_decided_by(piece):
                return
            keys: ChainedKeys = {}
            try:
                if any(pending.idempotency is not None for pending in piece):
                    async with reading(self._pool) as connection:
                        keys = await previous.chained_keys(connection, piece)
            except (ChainDamagedError, DatabaseUnavailableError):
                return  # the transaction will find the same, and say so
            if piece:
                ahead.link(piece, heads, keys)
                self._hand_over()

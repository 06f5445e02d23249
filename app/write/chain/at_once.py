"""A small batch, chained in one statement onto the heads that this node left.

What a batch of some dozens costs is the questions, one behind the other, and not the rows: begin, fence and heads,
keys, rows, keyed lines, heads again, commit. Where nobody else writes to its tenants all the answers are known before:
the heads are where this node left them, what is promised is in its memory, and the keys are new. So it is linked onto
those, and one statement (``app.store.chaining_at_once``) does all of it, if they are so under their locks, or nothing.
Then the batch is chained as usual.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import asyncpg
import structlog

from app.store import chaining
from app.store.chaining import ChainHead, Step
from app.store.chaining_at_once import AtOnce, chain_at_once
from app.store.growth import head_of
from app.write.chain.promised import Promised
from app.write.pending.backlog import Pending
from app.write.pending.linking import LinkedBatch, link_batch, tenants_begun_by, tenants_decided_by
from ledger.chain import Linker

ENTRIES_MAX = 200
"""More are copied: a row costs PostgreSQL less that way, and the questions are spread."""
PAUSE_S = 5.0
"""How long nothing is tried after a head was elsewhere: where another node writes to the same tenants, most would be in
vain."""

log = structlog.get_logger()


class LinkedAtOnce(NamedTuple):
    """A batch that is linked, and onto what."""

    linked: LinkedBatch
    heads: Mapping[str, ChainHead]

    async def commit(self, connection: asyncpg.Connection[asyncpg.Record], step: Step) -> AtOnce:
        """Chain it, or do nothing where something is not as known here.

        Raises:
            asyncpg.PostgresError: of a class that ``is_record_fault``, or about a lock: nothing was done.
            DATABASE_FAULTS: all or nothing may be committed.
        """
        linked = self.linked
        moves = [(tenant_id, head, head_of(linked.links[tenant_id])) for tenant_id, head in self.heads.items()]
        return await chain_at_once(connection, step, moves, linked.log_rows, linked.idempotency_rows)


class LinkingAtOnce:
    """Links batches onto ``known``, the heads as this node left them."""

    def __init__(self, known: Mapping[str, ChainHead], promised: Promised, linkers: dict[str, Linker]) -> None:
        self._known = known
        self._promised = promised
        self._linkers = linkers
        self._paused_until_s = 0.0

    def link(self, batch: Sequence[Pending]) -> LinkedAtOnce | None:
        """``batch``, linked; None where it is large, or something must be asked first."""
        if len(batch) > ENTRIES_MAX or time.monotonic() < self._paused_until_s or tenants_begun_by(batch):
            return None
        heads = {}
        for tenant_id in {pending.tenant_id for pending in batch}:
            head = self._known.get(tenant_id)
            if head is None or chaining.head_fault(head) is not None:
                return None
            heads[tenant_id] = head
        machines = self._promised.known_at({name: heads[name] for name in tenants_decided_by(batch)})
        if machines is None:
            return None
        linked = link_batch(
            batch, heads=heads, new_tenants=set(), chained_keys={}, linkers=self._linkers, machines=machines
        )
        return LinkedAtOnce(linked, heads)

    def pause(self) -> None:
        """A head was elsewhere, or locked."""
        self._paused_until_s = time.monotonic() + PAUSE_S

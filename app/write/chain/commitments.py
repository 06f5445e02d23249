"""The commitments that proposals are judged by, in memory, at the heads that this node left.

They are built from the log with the first proposal to a tenant on this node, where entries left from the state that a
PRUNED entry carries. When another node has moved the head, its entries are folded in. A batch is judged on a copy,
which is taken over once the batch is committed. Every entry that is read is recomputed. The table of commitments is not
read: if an attacker removed a row, a capsule would be placed twice.
A history of more than ``AT_ONCE_MAX`` entries, some 35 us each, is read by a separate task. Its tenant waits meanwhile;
the others are chained.

A proposal that another node accepted is folded as the chain records it, and judged here, too. If this node would have
rejected it, one of the two nodes read a changed table: that is reported as a break.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from app.runtime.logs import log
from app.store import Connection, chain_reads
from app.store import commitments as store
from app.store.chaining import ChainHead
from app.store.commitments import FloorOf, PromiseEntry, nothing_left
from app.store.entry_check import EntryCheck
from app.store.reading import Pool, reading
from app.store.retention import covered_to
from app.write.pending.linking import LinkedBatch
from ledger.errors import ChainDamagedError, DatabaseUnavailableError, InvalidInputError
from ledger.facts.events import CommitmentAction
from ledger.machines.commitment_state import commit, overlaid
from ledger.machines.commitments import Commitments
from ledger.machines.promises import Revocation, read_proposal
from ledger.verification.verdict import Break

AT_ONCE_MAX = 1000
"""Entries of a tenant that the appender reads itself; a task reads a longer history."""
READ_TIMEOUT_S = 3600.0
"""Longest that reading a history may take."""
LIVE_MAX = 2_000_000
"""Commitments kept in memory for all tenants, some 1.5 KiB each; the least recently used tenant is evicted first."""


@dataclass(slots=True)
class _Known:
    machine: Commitments = field(default_factory=Commitments)
    seq: int = 0
    """Seq of the head that it covers."""


class CommitmentMemory:
    """The commitments of tenants with proposals, for one appender."""

    def __init__(
        self,
        check: EntryCheck,
        pool: Pool,
        on_break: Callable[[str, Break], object] = lambda tenant_id, found: None,
        floor_of: FloorOf = nothing_left,
    ) -> None:
        """``pool`` lends a connection for long histories, one at a time. ``on_break`` gets each entry that another node
        accepted and this node would have rejected."""
        self._check = check
        self._floor_of = floor_of
        self._pool = pool
        self._known: OrderedDict[str, _Known] = OrderedDict()
        """By tenant, the most recently used last."""
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._reading_one = asyncio.Lock()
        self._unreadable: dict[str, ChainDamagedError] = {}
        """Errors of tenants whose history could not be read, until they are raised."""
        self._on_break = on_break

    def is_reading(self, tenant_id: str) -> bool:
        """Whether the history of the tenant is being read."""
        return tenant_id in self._reading

    def cancel(self) -> None:
        """Stop reading histories."""
        for task in self._reading.values():
            task.cancel()

    async def at(
        self, connection: Connection, heads: Mapping[str, ChainHead]
    ) -> tuple[dict[str, Commitments], list[str]]:
        """Copies of the commitments at these heads, whose changes are taken over by ``chained``; and the tenants whose
        long history is being read: they must wait while ``is_reading``.

        Raises:
            ChainDamagedError: the entries are inconsistent.
        """
        machines: dict[str, Commitments] = {}
        waiting = []
        for tenant_id, head in heads.items():
            if (error := self._unreadable.pop(tenant_id, None)) is not None:
                raise error
            known = None if self.is_reading(tenant_id) else await self._at(connection, tenant_id, head)
            if known is None:
                waiting.append(tenant_id)
                continue
            self._known[tenant_id] = known
            self._known.move_to_end(tenant_id)
            machines[tenant_id] = Commitments(overlaid(known.machine.state))
        return machines, waiting

    async def _at(self, connection: Connection, tenant_id: str, head: ChainHead) -> _Known | None:
        """The tenant's commitments at its head; None if its history is long: a task starts to read it."""
        if (known := self._known.get(tenant_id)) is not None and known.seq == head.seq:
            return known
        is_judged = known is not None and known.seq < head.seq
        if known is None or not is_judged or await self._has_left(connection, tenant_id, known.seq):
            self._known.pop(tenant_id, None)
            floor = await self._floor_of(connection, tenant_id)
            known, is_judged = _Known(floor.machine(), floor.seq), False
        async with connection.transaction():
            after_seq = known.seq
            is_whole = await self._read(
                connection, tenant_id, known, head.seq, None if is_judged else AT_ONCE_MAX, is_judged=is_judged
            )
            if await self._has_left(connection, tenant_id, after_seq):
                # They left while they were read, so a later floor speaks for them.
                self._known.pop(tenant_id, None)
                return await self._at(connection, tenant_id, head)
        if is_whole:
            return known
        self._reading[tenant_id] = asyncio.create_task(self._read_rest(tenant_id, known))
        return None

    async def _has_left(self, connection: Connection, tenant_id: str, after_seq: int) -> bool:
        """Whether an entry after ``after_seq`` may have left: entries up to the floor leave in any order."""
        if after_seq >= await covered_to(connection, tenant_id):
            return False
        return after_seq < (await self._floor_of(connection, tenant_id)).seq

    async def _read(
        self,
        connection: Connection,
        tenant_id: str,
        known: _Known,
        head_seq: int,
        entries_max: int | None = None,
        *,
        is_judged: bool = False,
    ) -> bool:
        """Fold the entries after ``known`` up to the head; False if there are more than ``entries_max``."""
        taken = 0
        async for entry in store.entries(connection, self._check, tenant_id, known.seq, head_seq):
            if taken == entries_max:
                return False
            self._fold(tenant_id, known.machine, entry, is_judged=is_judged)
            known.seq, taken = entry.seq, taken + 1
        known.seq = head_seq
        return True

    async def _read_rest(self, tenant_id: str, known: _Known) -> None:
        """Fold all entries after ``known``."""
        try:
            async with self._reading_one, reading(self._pool, timeout_s=READ_TIMEOUT_S) as connection:
                log.info("commitments_read_from_log", tenant_id=tenant_id)
                async with connection.transaction():
                    head_seqs = await chain_reads.head_seqs(connection, [tenant_id])
                    after_seq = known.seq
                    await self._read(connection, tenant_id, known, head_seqs.get(tenant_id, 0))
                    if await self._has_left(connection, tenant_id, after_seq):
                        log.warning("commitments_not_read", tenant_id=tenant_id, error="entries left meanwhile")
                        return
            self._known[tenant_id] = known
        except ChainDamagedError as error:
            self._unreadable[tenant_id] = error
        except DatabaseUnavailableError as error:
            # The next proposal to the tenant starts another read.
            log.warning("commitments_not_read", tenant_id=tenant_id, error=str(error))
        finally:
            del self._reading[tenant_id]

    def _fold(self, tenant_id: str, machine: Commitments, entry: PromiseEntry, *, is_judged: bool = False) -> None:
        """Fold one entry; on an error forget the tenant. With ``is_judged`` the entry is another node's: a proposal is
        judged here, too, and reported if this node would have rejected it."""
        try:
            if is_judged and entry.action == CommitmentAction.PROPOSE_ACCEPTED:
                if (rejection := machine.judge(read_proposal(entry.payload))) is not None:
                    detail = (
                        f"the verdict of seq {entry.seq} is not what judging its proposal gives: {rejection.detail}"
                    )
                    self._on_break(tenant_id, Break(entry.seq, "projection", detail, rejection.reason, "accepted"))
            elif _ends_nothing(machine, entry):
                # It was accepted wrongly; verification names it. No other accepted proposal depends on it.
                return
            machine.fold(entry.seq, entry.action, entry.payload)
        except InvalidInputError as error:
            self._known.pop(tenant_id, None)
            raise ChainDamagedError(
                tenant_id, f"its commitments cannot be made out at seq {entry.seq}: {error}"
            ) from None

    def chained(self, linked: LinkedBatch) -> None:
        """The batch is committed: take over its decisions and heads."""
        for machine in linked.commitments.values():
            commit(machine.state)
        for tenant_id, links in linked.links.items():
            if (known := self._known.get(tenant_id)) is not None and known.seq == links[0].seq - 1:
                known.seq = links[-1].seq
        if not linked.commitments:
            return
        live = sum(len(known.machine.state.active) for known in self._known.values())
        while live > LIVE_MAX and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            live -= len(oldest.machine.state.active)


def _ends_nothing(machine: Commitments, entry: PromiseEntry) -> bool:
    """Whether the entry revokes a commitment that is not active.

    Raises:
        InvalidInputError: its payload is not that of a proposal.
    """
    commitment = read_proposal(entry.payload).commitment if entry.action == CommitmentAction.PROPOSE_ACCEPTED else None
    return isinstance(commitment, Revocation) and commitment.index not in machine.state.active

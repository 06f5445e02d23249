"""What is promised to whom, as the appender judges with it: in memory, as of the heads that this node left.

Built from the log when something is first proposed to a tenant here, and caught up with what other nodes chained
whenever its head is not where this node left it. A batch is judged on a copy that counts once the batch is committed.
Every entry that is read is recomputed, and the table of commitments is not asked: a row that somebody removed would
have a capsule placed twice.

What another node accepted counts as the chain says, and is judged here too: where it was not to be accepted, one of the
two was told something else of the entries before, by a table that somebody changed. That is for people to look at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.pending.linking import LinkedBatch
from app.store import Connection
from app.store import commitments as store
from app.store.chaining import ChainHead
from app.store.commitments import PromiseEntry
from app.store.entry_check import EntryCheck
from ledger.errors import ChainDamagedError, InvalidInputError
from ledger.machines.commitments import Commitments, commit, overlaid
from ledger.machines.events import CommitmentAction
from ledger.machines.promises import Revocation, read_proposal
from ledger.verification.verdict import Break

LIVE_MAX = 2_000_000
"""Commitments that are kept for tenants to whom nothing is proposed just now: some 1.5 KiB each."""


@dataclass(slots=True)
class _Known:
    machine: Commitments
    seq: int
    """Of the head that it stands for."""


class Promised:
    """What is promised to the tenants that something was proposed to, of one appender."""

    def __init__(
        self, check: EntryCheck, on_break: Callable[[str, Break], object] = lambda tenant_id, found: None
    ) -> None:
        """``on_break`` is told of each entry that another node accepted and that, by what is known here, was to be
        rejected."""
        self._check = check
        self._known: OrderedDict[str, _Known] = OrderedDict()
        """The one that was asked for last stands last."""
        self._on_break = on_break

    async def prepare(self, connection: Connection, tenant_ids: Iterable[str]) -> None:
        """Load those of the tenants that are not known, before the transaction that locks their heads: a long history
        is read while other nodes go on.

        Raises:
            ChainDamagedError: entries do not hold together.
        """
        for tenant_id in tenant_ids:
            if tenant_id not in self._known:
                async with connection.transaction():
                    head_seq = await store.head_seq(connection, tenant_id)
                    self._known[tenant_id] = await self._load(connection, tenant_id, head_seq)

    async def at(self, connection: Connection, heads: Mapping[str, ChainHead]) -> dict[str, Commitments]:
        """What is promised at these heads, which the transaction holds locked; changes count once ``chained`` was told.

        Raises:
            ChainDamagedError: entries do not hold together.
        """
        machines = {}
        for tenant_id, head in heads.items():
            known = self._known.get(tenant_id)
            if known is None or known.seq > head.seq:
                known = await self._load(connection, tenant_id, head.seq)
            elif known.seq < head.seq:
                async for entry in store.entries(connection, self._check, tenant_id, known.seq, head.seq):
                    self._fold(tenant_id, known.machine, entry, is_judged=True)
                    known.seq = entry.seq
                known.seq = head.seq
            self._known[tenant_id] = known
            self._known.move_to_end(tenant_id)
            machines[tenant_id] = Commitments(overlaid(known.machine.state))
        return machines

    def known_at(self, heads: Mapping[str, ChainHead]) -> dict[str, Commitments] | None:
        """As ``at``, without asking: None where something would have to be read."""
        machines = {}
        for tenant_id, head in heads.items():
            known = self._known.get(tenant_id)
            if known is None or known.seq != head.seq:
                return None
            self._known.move_to_end(tenant_id)
            machines[tenant_id] = Commitments(overlaid(known.machine.state))
        return machines

    async def _load(self, connection: Connection, tenant_id: str, head_seq: int) -> _Known:
        self._known.pop(tenant_id, None)
        machine = Commitments()
        async for entry in store.entries(connection, self._check, tenant_id, 0, head_seq):
            self._fold(tenant_id, machine, entry)
        return _Known(machine, head_seq)

    def _fold(self, tenant_id: str, machine: Commitments, entry: PromiseEntry, *, is_judged: bool = False) -> None:
        """Take one entry, or forget the tenant. What was accepted is judged where it is new to this node."""
        try:
            if is_judged and entry.action == CommitmentAction.PROPOSE_ACCEPTED:
                self._judge(tenant_id, machine, entry.seq, entry.payload)
            elif _ends_nothing(machine, entry):
                # Accepted falsely: verification names it. Nothing else that was accepted changes by it.
                return
            machine.fold(entry.seq, entry.action, entry.payload)
        except InvalidInputError as error:
            self._known.pop(tenant_id, None)
            raise ChainDamagedError(
                tenant_id, f"its commitments cannot be made out at seq {entry.seq}: {error}"
            ) from None

    def _judge(self, tenant_id: str, machine: Commitments, seq: int, payload: str) -> None:
        """Tell of an entry that another node accepted and that was to be rejected."""
        rejection = machine.judge(read_proposal(payload))
        if rejection is not None:
            detail = f"the verdict of seq {seq} is not what judging its proposal gives: {rejection.detail}"
            found = Break(seq, "projection", detail, rejection.reason, "accepted")
            self._on_break(tenant_id, found)

    def chained(self, linked: LinkedBatch) -> None:
        """The batch is committed: what was decided in it counts, and the heads are where it left them."""
        for machine in linked.machines.values():
            commit(machine.state)
        for tenant_id, links in linked.links.items():
            known = self._known.get(tenant_id)
            if known is not None and known.seq == links[0].seq - 1:
                known.seq = links[-1].seq
        if not linked.machines:
            return
        live = sum(len(known.machine.state.active) for known in self._known.values())
        while live > LIVE_MAX and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            live -= len(oldest.machine.state.active)


def _ends_nothing(machine: Commitments, entry: PromiseEntry) -> bool:
    """Whether the entry revokes what is not active.

    Raises:
        InvalidInputError: its payload is none of a proposal.
    """
    if entry.action != CommitmentAction.PROPOSE_ACCEPTED:
        return False
    commitment = read_proposal(entry.payload).commitment
    return isinstance(commitment, Revocation) and commitment.index not in machine.state.active

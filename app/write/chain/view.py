"""Reads what the chains hold of a batch: heads, keyed lines, entries and commitments; and checks the fence: the writer
stops unless ``wal_positions`` is where it left it, in its epoch.

Nothing is locked during the read. A batch is committed only if every chain that it extends still ends at the head that
was read. So the read is still valid then: entries at or below a head never change, and keyed lines change only together
with the head of their tenant.

Invariant: a chain whose head went below one that this node has seen, or changed at the same seq, is never extended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from app.runtime.logs import log
from app.runtime.state.node import Node
from app.store import Connection, chaining, idempotency, node
from app.store.chain_reads import Chained, find_existing
from app.store.chaining import ChainEnd, ChainHead, WalPosition
from app.store.departed import departed, highest_left
from app.write.pending.backlog import Pending
from app.write.pending.keyed_entries import is_bound
from app.write.pending.linking import ChainedKeys, FirstUseOfKey, event_of, events_by_hlc, is_refused_in
from app.write.pending.quarantine import Quarantine
from app.write.pending.requests import RequestName
from ledger.chain.conflict import Event, ExistingEvents, find_event
from ledger.errors import ClockSkewError, DatabaseWentBackError, FencedError, InvalidInputError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from ledger.positions import Lsn
from ledger.verification.verdict import damaged

EMPTY_HEAD = ChainHead(0, None, None)
ReadHeads = Callable[[Connection, Sequence[str]], Awaitable[dict[str, ChainHead]]]


def is_moved(position: WalPosition | None, node: Node, new_lsn: Lsn) -> bool:
    """Whether the position of ``node``, read under lock, is at ``new_lsn`` already: then the transaction that moves it
    there was committed. False if it is still where ``node`` left it: retry the transaction.

    Raises:
        FencedError: it has another epoch.
        DatabaseWentBackError: it is below a committed position.
    """
    old_lsn = node.chained.lsn
    if position is not None and position.epoch > node.epoch:
        log.error("wal_fencing_reject", epoch=node.epoch, newer_epoch=position.epoch)
        raise FencedError(
            f"epoch {position.epoch} has taken over the WAL of {node.node_id}; "
            f"this process is epoch {node.epoch} and stops"
        )
    if position is not None and position.epoch == node.epoch:
        # A retry of held records moves no position; if they were chained, the next attempt finds them.
        if position.chained_lsn == old_lsn:
            return False
        if position.chained_lsn == new_lsn:
            return True
    raise _went_back(position, node, old_lsn)


def refuse_older(position: WalPosition | None, node: Node, chained_lsn: Lsn) -> None:
    """Refuse a database whose ``position`` of the WAL of ``node`` is below ``chained_lsn``, which was chained before
    the position was read. Another WAL or a higher epoch is left to the fence.

    Raises:
        DatabaseWentBackError: the position is lower.
    """
    if position is None or (
        position.wal_id == node.wal_id and (position.epoch, position.chained_lsn) < (node.epoch, chained_lsn)
    ):
        raise _went_back(position, node, chained_lsn)


def _went_back(position: WalPosition | None, node: Node, chained_lsn: Lsn) -> DatabaseWentBackError:
    return DatabaseWentBackError(
        f"Postgres says {position} for {node.node_id}, but this node had chained up to LSN {chained_lsn} "
        f"in epoch {node.epoch}; the database was restored or failed over to an older copy"
    )


class Heads:
    """The last heads that this node has seen, by tenant. ``seen`` are the heads that the start read."""

    def __init__(self, node: Node, quarantine: Quarantine, seen: dict[str, ChainHead]) -> None:
        self._node = node
        self._quarantine = quarantine
        self.seen = seen
        self._stale: set[str] = set()
        """Tenants whose chain another node or an import has extended since the head was seen."""

    def moved(self, tenant_ids: Iterable[str]) -> None:
        """Read the heads of these tenants again before they are used."""
        self._stale.update(tenant_ids)

    async def read(self, connection: Connection, tenant_ids: Collection[str]) -> dict[str, ChainHead]:
        """The heads of these tenants, if they have one. Only heads that this node does not know are read.

        Raises:
            ChainDamagedError: as ``stored``.
        """
        if unknown := sorted(name for name in tenant_ids if name in self._stale or not self._is_usable(name)):
            found, ends = await self._read(connection, unknown, chaining.read_heads)
            self._learn_time(found, ends)
            self.seen.update(found)
            self._stale.difference_update(unknown)
        return {name: self.seen[name] for name in tenant_ids if name in self.seen}

    async def stored(
        self, connection: Connection, tenant_ids: Iterable[str], read: ReadHeads = chaining.read_heads
    ) -> dict[str, ChainHead]:
        """The heads of these tenants as PostgreSQL has them now, if they have one; ``read`` may lock them.

        Raises:
            QuarantinedError: a tenant is quarantined.
            ChainDamagedError: names the first tenant whose chain MUST NOT be extended: it is shorter than this node has
                seen, differs at that seq, its head is missing, or its head has no entry.
        """
        return (await self._read(connection, sorted(tenant_ids), read))[0]

    async def _read(
        self, connection: Connection, tenant_ids: Sequence[str], read: ReadHeads
    ) -> tuple[dict[str, ChainHead], dict[str, ChainEnd]]:
        """As ``stored``, and the last entry of each chain whose head is new to this node.

        The heads are compared with those that this node had seen before it read them: without a lock its own appends
        move them meanwhile, and a head that was read before such an append is no sign of a database that went back.
        """
        before = {tenant_id: self.seen[tenant_id] for tenant_id in tenant_ids if tenant_id in self.seen}
        heads = await read(connection, tenant_ids)
        for tenant_id in tenant_ids:
            head, seen = heads.get(tenant_id), before.get(tenant_id)
            if head is None:
                if seen is None:
                    continue
                raise damaged(
                    tenant_id, "head", seen.seq, f"its head is gone, which this node has seen at seq {seen.seq}"
                )
            self._quarantine.check(tenant_id)
            if (fault := chaining.head_fault(head)) is not None:
                raise damaged(tenant_id, "head", 0, fault)
            if seen is not None and (head.seq < seen.seq or (head.seq == seen.seq and head[:2] != seen[:2])):
                raise damaged(
                    tenant_id,
                    "head",
                    seen.seq,
                    f"its head stands at seq {head.seq} ({head.chain_link}), but this node has seen seq {seen.seq} "
                    f"({seen.chain_link})",
                )
        moved = {tenant_id: head for tenant_id, head in heads.items() if head != before.get(tenant_id)}
        ends = await chaining.read_ends(connection, moved)
        for tenant_id, head in moved.items():
            if (fault := chaining.end_fault(head, ends.get(tenant_id))) is not None:
                raise damaged(tenant_id, "head", head.seq, fault)
        return heads, ends

    def _is_usable(self, tenant_id: str) -> bool:
        """Whether the head is known. A head read by the start may be invalid: it is read again, and refused."""
        seen = self.seen.get(tenant_id)
        return seen is not None and chaining.head_fault(seen) is None

    def _learn_time(self, heads: Mapping[str, ChainHead], ends: Mapping[str, ChainEnd]) -> None:
        """Advance the clock past the ``ends`` that other nodes of this ledger wrote, so that later entries get a later
        HLC. Imported ends come from another clock."""
        for tenant_id, end in ends.items():
            if not end.is_by_node:
                continue
            try:
                self._node.clock.receive(Hlc.parse(heads[tenant_id].hlc or ""), self._node.wall.now_ms())
            except (ClockSkewError, InvalidInputError) as error:
                log.warning("head_hlc_refused", tenant_id=tenant_id, error=str(error))


async def read_keys(connection: Connection, batch: Iterable[Pending]) -> ChainedKeys:
    """The chained lines of each keyed request in the batch, by line.

    Raises:
        KeyRowError: a row of the idempotency table names an entry with another key or without one.
    """
    requests: dict[RequestName, dict[int, Pending]] = {}
    for pending in batch:
        if (key := pending.idempotency) is not None:
            requests.setdefault((pending.tenant_id, key.route, key.key), {})[key.line] = pending
    found: ChainedKeys = {}
    for name, line in await idempotency.find_claims(connection, sorted(requests)) if requests else ():
        if not is_bound(line, name, requests[name]):
            raise idempotency.key_row_error(
                line.tenant_id,
                name[2],
                line.seq,
                f"names seq {line.seq}, whose entry did not come with that key: somebody put the row there",
            )
        found.setdefault(name, {})[line.line] = FirstUseOfKey(line.body_digest, line.t_hlc, line.job_id)
    return found


async def read_entries(connection: Connection, batch: Iterable[Pending]) -> dict[str, Chained]:
    """By tenant, the entries with the HLC of an event of the batch."""
    events: dict[str, list[Event]] = {}
    for pending in batch:
        events.setdefault(pending.tenant_id, []).append(event_of(pending))
    return {tenant_id: await find_existing(connection, tenant_id, each) for tenant_id, each in events.items()}


def is_chained(pending: Pending, existing: ExistingEvents) -> bool:
    """Whether the event is in the chain, as itself or in the REFUSED or CONFLICT entry that keeps it."""
    event = event_of(pending)
    at, _ = find_event(event, existing)
    return at is not None or is_refused_in(pending, existing.get(event.t_hlc))


async def unchained(connection: Connection, batch: Sequence[Pending]) -> list[Pending]:
    """The events of the batch, all of which were chained, that are not in the chain and have not left it."""
    chained = {name: events_by_hlc(each) for name, each in (await read_entries(connection, batch)).items()}
    absent = [pending for pending in batch if not is_chained(pending, chained[pending.tenant_id])]
    # Rows leave meanwhile: what left is read after the rows.
    highest = await highest_left(connection, {pending.tenant_id for pending in absent}) if absent else {}
    old = [each for each in absent if each.tenant_id in highest and each.hlc <= highest[each.tenant_id]]
    left = {*await departed(connection, [(each.tenant_id, each.job_id) for each in old])} if old else set()
    return [each for each in absent if each not in old or (each.tenant_id, each.job_id) not in left]


async def unrecorded(connection: Connection, new_tenants: Collection[str]) -> set[str]:
    """The tenants among these whose beginning ``_system`` does not record."""
    return {
        tenant_id
        for tenant_id in new_tenants
        if not await node.is_recorded(connection, SystemAction.TENANT_CREATED, f"tenant:{tenant_id}")
    }

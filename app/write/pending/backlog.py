"""Events on their way from the WAL to the chain, in LSN order.

A record enters when it is queued for the WAL and leaves when it is chained. So after a restart the backlog is exactly
the WAL beyond ``chained_lsn``. It is bounded by ``wal.backlog_max_entries`` and in bytes. There is no other bound, as
all records in the queue of the WAL are here, too.

One tenant may fill it up to these limits. Beyond them a reserve is left for tenants with few waiting events.

    entries of all    <= entries_max + kept_entries        bytes of all    <= bytes_max + kept_bytes
    beyond entries_max or bytes_max a record is added only if then <= 1/OWN_PARTS of the reserve waits of its tenant
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter

import msgspec

from app.runtime.state.node import Rises
from app.store.appended import ChainPosition
from ledger.chain import record
from ledger.chain.record import IdempotencyKey
from ledger.errors import LedgerError, RequestTooLargeError, WalFullError
from ledger.hlc import Hlc
from ledger.machines.promises import Proposal
from ledger.positions import Epoch, Lsn
from wal.reader import Record

BYTES_MAX_MIN = 256 << 20
"""Bytes that any backlog may hold."""
BYTES_MAX_PER_ENTRY = 1024
"""Limit in bytes for each entry of the limit, if that gives more."""
BYTES_AROUND_PAYLOAD = 640
"""Most bytes of a record besides its payload: header, tenant, job, key, digest."""


KEPT_PARTS = 4
"""This part (1/4) of the limit is reserved, beyond it, for tenants with few waiting events."""
OWN_PARTS = 4
"""One tenant may use this part (1/4) of the reserve."""


def record_bytes_of(records: int, payload_bytes: int) -> int:
    """Most bytes that ``records`` with ``payload_bytes`` in total take."""
    return payload_bytes + records * BYTES_AROUND_PAYLOAD


class Pending(msgspec.Struct, eq=False):
    """One event between WAL and chain. ``outcome`` resolves once it is chained, never before.

    ``answered_early`` tells that the event may be acknowledged before it is chained: then an entry MUST record it.
    ``refusal`` is why another entry, or none, took its place; it is known once the event is chained. ``proposal`` is
    the parsed payload, if it was parsed already.
    """

    lsn: Lsn
    epoch: Epoch
    hlc: Hlc
    record_type: int
    tenant_id: str
    job_id: str
    payload: bytes
    idempotency: IdempotencyKey | None
    outcome: asyncio.Future[ChainPosition] | None
    answered_early: bool = True
    refusal: LedgerError | None = None
    proposal: Proposal | None = None


def pending_of(read: Record) -> Pending:
    """The event of a WAL record, for which no caller waits."""
    event = record.decode(read.payload)
    return Pending(
        read.lsn,
        read.epoch,
        read.hlc,
        read.type,
        event.tenant_id,
        event.job_id,
        event.payload,
        event.idempotency,
        None,
        event.answered_early,
    )


_NOTHING = (0, 0)
_NO_EVENTS: deque[Pending] = deque(maxlen=0)
_PAYLOAD = attrgetter("payload")


class Backlog:
    """Bounded queue in LSN order. Belongs to one event loop."""

    def __init__(self, entries_max: int, entered: Rises | None = None) -> None:
        """``entered`` gets the times of the entries; None if nobody reads them."""
        self.entries_max = entries_max
        self._entered = entered
        self.bytes_max = max(BYTES_MAX_MIN, entries_max * BYTES_MAX_PER_ENTRY)
        self.kept_entries = entries_max // KEPT_PARTS
        self.kept_bytes = self.bytes_max // KEPT_PARTS
        self._queue: deque[Pending] = deque()
        self._of_tenants: dict[str, tuple[int, int]] = {}
        """Entries and bytes of each tenant."""
        self._deferred: dict[str, deque[Pending]] = {}
        """By tenant, events that were passed over until its rows can be locked, in LSN order."""
        self._reserved = 0
        self._reserved_bytes = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._deferred.values()))

    def is_due(self, entries: int, size_bytes: int) -> bool:
        """Whether the queue holds ``entries`` or ``size_bytes``, or is half full."""
        return len(self._queue) >= min(entries, self.entries_max / 2) or self._bytes >= min(
            size_bytes, self.bytes_max / 2
        )

    def check(self, entries: int, record_bytes: int = 0, tenants: Iterable[str] = ()) -> None:
        """Return if ``entries`` more of these ``tenants``, of ``record_bytes`` in total, fit now, besides the reserved
        room.

        Raises:
            RequestTooLargeError: they never fit.
            WalFullError: they do not fit now.
        """
        if self._fits(entries, record_bytes, self.entries_max, self.bytes_max) or (
            self._has_little(tenants, entries, record_bytes)
            and self._fits(
                entries, record_bytes, self.entries_max + self.kept_entries, self.bytes_max + self.kept_bytes
            )
        ):
            return
        waiting = len(self)
        if entries and waiting + self._reserved + entries > self.entries_max:
            if entries > self.entries_max:
                raise RequestTooLargeError(
                    f"the request makes {entries} entries; wal.backlog_max_entries is {self.entries_max}: send fewer"
                )
            raise WalFullError(
                f"{waiting} events wait to be chained and {entries} more do not fit within "
                f"{self.entries_max}; try again once the database has caught up"
            )
        if record_bytes > self.bytes_max:
            raise RequestTooLargeError(
                f"the events take {record_bytes} bytes; {self.bytes_max} may wait at once: send fewer"
            )
        raise WalFullError(
            f"events of {self._bytes} bytes wait to be chained and {record_bytes} more do not fit within "
            f"{self.bytes_max}; try again once the database has caught up"
        )

    def _fits(self, entries: int, record_bytes: int, entries_max: int, bytes_max: int) -> bool:
        return (not entries or len(self) + self._reserved + entries <= entries_max) and (
            self._bytes + self._reserved_bytes + record_bytes <= bytes_max
        )

    def _has_little(self, tenants: Iterable[str], entries: int, record_bytes: int) -> bool:
        """Whether none of these tenants would then exceed its part of the reserve."""
        held = [self._of_tenants.get(tenant_id, (0, 0)) for tenant_id in tenants]
        return bool(held) and all(
            OWN_PARTS * (own_entries + entries) <= self.kept_entries
            and OWN_PARTS * (own_bytes + record_bytes) <= self.kept_bytes
            for own_entries, own_bytes in held
        )

    def reserve(self, entries: int, record_bytes: int = 0, tenants: Iterable[str] = ()) -> None:
        """Reserve room for ``entries`` more, of ``record_bytes`` in total, so that a request is taken as a whole.

        Raises:
            RequestTooLargeError, WalFullError: as ``check``; nothing was reserved.
        """
        self.check(entries, record_bytes, tenants)
        self._reserved += entries
        self._reserved_bytes += record_bytes

    def release(self, entries: int, record_bytes: int = 0) -> None:
        """Release reserved room."""
        self._reserved -= entries
        self._reserved_bytes -= record_bytes

    def add(self, events: Sequence[Pending]) -> None:
        """Queue ``events``, whose LSNs rise and are above every queued one."""
        assert not self._queue or events[0].lsn > self._queue[-1].lsn
        self._queue.extend(events)
        self._count(events, 1)
        if self._entered is not None:
            self._entered.note(events[-1].lsn)

    def peek(self, committed_lsn: Lsn, entries_max: int, bytes_max: int, *, behind: int = 0) -> list[Pending]:
        """The first committed events behind the first ``behind``, in LSN order, within both bounds; at least one if
        there is any."""
        return _within(islice(self._queue, behind, None), entries_max, bytes_max, committed_lsn)

    def begins_with(self, batch: Sequence[Pending]) -> bool:
        """Whether ``batch``, which was in the queue, is its beginning; not an empty one."""
        return bool(batch and self._queue) and self._queue[0] is batch[0]

    def has_committed(self, committed_lsn: Lsn) -> bool:
        """Whether ``peek`` finds any."""
        return bool(self._queue) and self._queue[0].lsn <= committed_lsn

    def peek_deferred(self, tenant_id: str, entries_max: int, bytes_max: int) -> list[Pending]:
        """The first deferred events of a tenant, in LSN order, within both bounds; at least one if there is any."""
        return _within(self._deferred.get(tenant_id, ()), entries_max, bytes_max, math.inf)

    def drop(self, batch: Sequence[Pending], keep: Collection[str]) -> None:
        """Remove these chained events, the first of the queue or of one tenant's deferred events. Events of tenants in
        ``keep`` were passed over and become deferred."""
        tenant_id = batch[0].tenant_id
        deferred = self._deferred.get(tenant_id, _NO_EVENTS)
        is_deferred = bool(deferred) and deferred[0] is batch[0]
        if is_deferred and tenant_id in keep:
            return
        queue = deferred if is_deferred else self._queue
        for pending in batch:
            gone = queue.popleft()
            assert gone is pending
            if pending.tenant_id in keep:
                self._deferred.setdefault(pending.tenant_id, deque()).append(pending)
        self._count([pending for pending in batch if pending.tenant_id not in keep] if keep else batch, -1)
        if is_deferred and not queue:
            del self._deferred[tenant_id]

    def _count(self, events: Sequence[Pending], sign: int) -> None:
        """Count these events, which wait from now on (``sign`` 1) or no longer (-1)."""
        counted: dict[str, tuple[int, int]] = {}
        for pending in events:
            entries, payload_bytes = counted.get(pending.tenant_id, _NOTHING)
            counted[pending.tenant_id] = entries + 1, payload_bytes + len(pending.payload)
        for tenant_id, (entries, payload_bytes) in counted.items():
            size = sign * record_bytes_of(entries, payload_bytes)
            held = self._of_tenants.pop(tenant_id, _NOTHING)
            if (waiting := (held[0] + sign * entries, held[1] + size)) != _NOTHING:
                self._of_tenants[tenant_id] = waiting
            self._bytes += size

    def __iter__(self) -> Iterator[Pending]:
        return chain(*self._deferred.values(), self._queue)


def _within(events: Iterable[Pending], entries_max: int, bytes_max: int, upto_lsn: float) -> list[Pending]:
    first = list(islice(events, entries_max))
    if first and first[-1].lsn <= upto_lsn and sum(map(len, map(_PAYLOAD, first))) <= bytes_max:
        return first
    batch: list[Pending] = []
    size = 0
    for pending in first:
        size += len(pending.payload)
        if (batch and size > bytes_max) or pending.lsn > upto_lsn:
            break
        batch.append(pending)
    return batch

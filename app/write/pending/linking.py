"""Turning a batch of pending events into rows of the log, in memory, before Postgres sees any of it.

Decides duplicates, assigns ``seq`` and links. A pure function of the batch, the locked heads and the keys already
chained; the appender runs it inside its transaction.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import structlog

from app.store.chaining import ChainHead
from app.store.growth import ChainPosition, Entry, Grower, Growth
from app.store.standing import Chained, ChainedEntry
from app.write.pending.backlog import Pending
from app.write.pending.requests import RequestName
from ledger import canonical
from ledger.chain import Linker
from ledger.chain.conflict import Event, Standing, conflict_hlc, conflict_payload, place_of
from ledger.errors import (
    CommitmentConflictError,
    EventRefusedError,
    HeldBackError,
    IdempotencyReusedError,
    LedgerError,
)
from ledger.facts.events import (
    ACTIONS,
    CAPACITY_RECORD_TYPE,
    DECIDED_RECORD_TYPES,
    PROPOSED_RECORD_TYPE,
    REFUSED_TYPE,
    SYSTEM_RECORD_TYPES,
    CommitmentAction,
    SystemAction,
)
from ledger.hlc import Hlc
from ledger.machines import jobs
from ledger.machines.commitments import Commitments
from ledger.machines.promises import Rejection, read_capacity, read_proposal, rejected_payload
from ledger.machines.refusals import refused_job_id
from ledger.positions import BEFORE_FIRST, Epoch, Lsn

_TENANT_CREATED = next(n for n, action in SYSTEM_RECORD_TYPES.items() if action is SystemAction.TENANT_CREATED)

_NEVER_PLAIN = {_TENANT_CREATED, *DECIDED_RECORD_TYPES}
_ENDING = {record_type for record_type, action in ACTIONS.items() if action in jobs.ENDING}

log = structlog.get_logger()


class KeyWinner(NamedTuple):
    """The event that a line of a keyed request has in the chain; its place is known by its HLC."""

    body_digest: bytes
    t_hlc: str
    job_id: str


ChainedKeys = dict[RequestName, dict[int, KeyWinner]]
"""By chained line, what each keyed request has in the chain."""


class DuplicateLineError(LedgerError):
    """The keyed line is chained already, by this node or another; nothing of its kind was added."""


@dataclass(slots=True)
class LinkedBatch(Growth):
    """Rows and outcomes of one batch; ``outcomes`` runs parallel to the pending events."""

    idempotency_rows: list[tuple[str, int, str, int, bytes, int, int, int]] = field(default_factory=list)
    """(tenant, route, key, line, body digest, seq, epoch, LSN) of each keyed line."""
    winners: ChainedKeys = field(default_factory=dict)
    """What each keyed request of the batch has in the chain by it."""
    outcomes: list[ChainPosition | LedgerError | None] = field(default_factory=list)
    """Where each event stands, None where nobody waits to know, or why it does not."""
    is_returning: bool = False
    """Whether an event of the batch, or another with its HLC, was in the chain already."""
    refused_jobs: list[tuple[str, str]] = field(default_factory=list)
    """(tenant, job) of each event in whose place a REFUSED entry stands."""
    last_lsn: Lsn = BEFORE_FIRST
    """LSN of the last event of the batch."""
    conflicts: list[tuple[str, str, int]] = field(default_factory=list)
    """(tenant, HLC, LSN) of each event whose HLC another event of the chain has."""

    machines: Mapping[str, Commitments] = field(default_factory=dict)
    """By tenant, the commitments that changed."""

    def extend(self, following: LinkedBatch) -> None:
        """Take what was linked onto the end of this."""
        self.log_rows.pieces += following.log_rows.pieces
        self.ended += following.ended
        self.idempotency_rows += following.idempotency_rows
        self.outcomes += following.outcomes
        self.refused_jobs += following.refused_jobs
        self.conflicts += following.conflicts
        for tenant_id, links in following.links.items():
            self.links.setdefault(tenant_id, []).extend(links)
        for request, winners in following.winners.items():
            self.winners.setdefault(request, {}).update(winners)
        self.is_returning |= following.is_returning
        self.last_lsn = following.last_lsn

    def settle(self, batch: Sequence[Pending], passed_over: Collection[str]) -> None:
        """Tell who waits for an event of ``batch`` what became of it, once that is committed. Events of tenants that
        were ``passed_over`` still wait."""
        if self.outcomes.count(None) == len(batch):
            return
        for pending, outcome in zip(batch, self.outcomes, strict=True):
            future = pending.outcome
            if (outcome is None and future is None) or pending.tenant_id in passed_over:
                continue
            if isinstance(outcome, EventRefusedError | IdempotencyReusedError):
                pending.refusal = outcome
                log.error("event_refused", tenant_id=pending.tenant_id, lsn=pending.lsn, error=str(outcome))
            if future is None or future.done():
                continue
            if isinstance(outcome, LedgerError):
                future.set_exception(outcome)
                future.exception()
            else:
                assert outcome is not None
                future.set_result(outcome)


def refused_payload(pending: Pending, why: Mapping[str, object]) -> bytes:
    """Payload of the REFUSED entry that stands in for an event, with all of its bytes."""
    return canonical.encode(
        {
            "type": REFUSED_TYPE,
            **why,
            "record_type": pending.record_type,
            "job_id": base64.b64encode(pending.job_id.encode()).decode(),
            "payload": base64.b64encode(pending.payload).decode(),
        }
    )


def event_refused(sqlstate: object, seq: int, t_hlc: str, epoch: Epoch, lsn: Lsn) -> EventRefusedError:
    """What the caller is told of an event that the REFUSED entry at ``seq`` stands in for."""
    return EventRefusedError(
        f"PostgreSQL refused the event with SQLSTATE {sqlstate}; a REFUSED entry at seq {seq} keeps its bytes. "
        "Mend what refuses it, then send the event again under a new Idempotency-Key",
        seq=seq,
        hlc=t_hlc,
        epoch=epoch,
        lsn=lsn,
    )


def is_refused_in(pending: Pending, standing: Event | None) -> bool:
    """Whether what stands at the event's HLC is the REFUSED entry that keeps it."""
    if standing is None or standing.action != SystemAction.REFUSED:
        return False
    return standing.job_id in (pending.job_id, refused_job_id(pending.job_id))


def link_batch(
    batch: Sequence[Pending],
    *,
    heads: Mapping[str, ChainHead],
    new_tenants: set[str],
    chained_keys: Mapping[RequestName, Mapping[int, KeyWinner]],
    linkers: dict[str, Linker],
    chained: Mapping[str, Chained] | None = None,
    machines: Mapping[str, Commitments] | None = None,
    refused_sqlstate: str | None = None,
    held_back: Callable[[Pending], HeldBackError | None] | None = None,
) -> LinkedBatch:
    """Chain ``batch`` onto ``heads``.

    Args:
        batch: events in LSN order.
        heads: locked head of every tenant in the batch.
        new_tenants: tenants whose head was created in this transaction.
        chained_keys: what every keyed request in the batch has in the chain.
        linkers: per-tenant linkers, filled as needed.
        chained: when some of the batch came into the chain by another way, what stands there, by tenant and HLC.
        machines: of each tenant that something is proposed to, or whose capacities change, the commitments at its head;
            they take what is decided here.
        refused_sqlstate: when given, the batch is one event that Postgres refused with this code, and
            a REFUSED entry takes its place.
        held_back: makes the outcome of events whose tenant has no head in ``heads``: its chain is damaged, or locked.
    """
    linked = LinkedBatch(last_lsn=batch[-1].lsn, machines=machines or {})
    keys_in_batch = linked.winners
    awaited: list[tuple[int, str, int]] = []
    grower = Grower(linked, heads, linkers)
    events_there = events_of(chained or {})
    is_usual = refused_sqlstate is None and held_back is None and not chained
    if is_usual and (entries := _plain_entries(batch, linked.ended)) is not None:
        for tenant_id, of_tenant in entries.items():
            grower.extend(tenant_id, of_tenant)
        grower.finish()
        linked.outcomes = [None] * len(batch)
        return linked
    for pending in batch:
        tenant_id = pending.tenant_id
        if held_back is not None and tenant_id not in heads:
            linked.outcomes.append(held_back(pending))
            continue
        key = pending.idempotency
        is_plain = key is None and pending.record_type != _TENANT_CREATED
        lost = None if is_plain else _duplicate(pending, new_tenants, chained_keys, keys_in_batch)
        refusal: LedgerError | None = None
        why: dict[str, object] | None = None
        if lost is not None:
            refusal, winner = lost
            if key is None or winner is None or not pending.answered_early or winner.t_hlc == pending.hlc.text():
                linked.outcomes.append(refusal)
                continue
            why = {
                "reason": jobs.KEY_REPLAYED if isinstance(refusal, DuplicateLineError) else jobs.KEY_REUSED,
                "idempotency_key": key.key,
                "lost_to": {"job_id": winner.job_id, "hlc": winner.t_hlc},
            }
        elif refused_sqlstate is not None:
            why = {"sqlstate": refused_sqlstate}
        hlc = pending.hlc
        if why is None:
            job_id, action, payload = pending.job_id, ACTIONS[pending.record_type], pending.payload
        else:
            job_id = pending.job_id if lost is not None else refused_job_id(pending.job_id)
            action = SystemAction.REFUSED.value
            payload = refused_payload(pending, why)
        stands = None
        if chained:
            event = event_of(pending)
            stands, kept_digest = _found(pending, event, chained.get(tenant_id, {}), events_there.get(tenant_id, {}))
            linked.is_returning |= stands is not None or kept_digest is not None
            if kept_digest is not None:
                hlc = conflict_hlc(event)
                linked.conflicts.append((tenant_id, event.t_hlc, pending.lsn))
                if why is None:
                    action = SystemAction.CONFLICT.value
                    payload = conflict_payload(event, pending.payload.decode(), kept_digest)
        place: ChainPosition | None = None
        is_history = is_decided = False
        if pending.record_type in DECIDED_RECORD_TYPES and why is None:
            is_history = stands is not None or hlc is not pending.hlc
            is_decided = not is_history
        if is_decided:
            action, payload, refusal = _decided(linked.machines[tenant_id], grower.next_seq(tenant_id), pending)
        if stands is not None:
            place = ChainPosition(*stands[:3])
            seq = place.seq
        else:
            seq = grower.append(tenant_id, hlc, job_id, action, payload)
            if why is not None:
                linked.refused_jobs.append((tenant_id, pending.job_id))
                if lost is None:
                    refusal = event_refused(refused_sqlstate, seq, pending.hlc.text(), pending.epoch, pending.lsn)
            if pending.outcome is not None:
                awaited.append((len(linked.outcomes), tenant_id, seq))
        if is_history and pending.record_type == PROPOSED_RECORD_TYPE:
            refusal = _not_judged(seq, hlc)
        linked.outcomes.append(refusal or place)
        if key is not None and lost is None and not is_history:
            linked.idempotency_rows.append(
                (tenant_id, key.route, key.key, key.line, key.body_digest, seq, pending.epoch, pending.lsn)
            )
    grower.finish()
    for number, tenant_id, seq in awaited:
        linked.outcomes[number] = linked.outcomes[number] or grower.place(tenant_id, seq)
    return linked


def _decided(machine: Commitments, index: int, pending: Pending) -> tuple[str, bytes, LedgerError | None]:
    """Action and payload of the entry at ``index`` that ``pending`` becomes, and why it is not accepted."""
    if pending.record_type == CAPACITY_RECORD_TYPE:
        machine.set_capacity(*read_capacity(pending.payload))
        return CommitmentAction.CAPACITY_SET.value, pending.payload, None
    rejection = machine.decide(index, pending.proposal or read_proposal(pending.payload))
    if rejection is None:
        return CommitmentAction.PROPOSE_ACCEPTED.value, pending.payload, None
    payload = rejected_payload(pending.payload, rejection)
    return CommitmentAction.PROPOSE_REJECTED.value, payload, conflict_of(rejection, index, pending.hlc.text())


def conflict_of(rejection: Rejection, index: int, t_hlc: str) -> CommitmentConflictError:
    """What the proposer is told of the rejection that the entry at ``index`` records."""
    free = None if rejection.free is None else msgspec.to_builtins(rejection.free)
    return CommitmentConflictError(
        rejection.detail,
        reason=rejection.reason,
        index=index,
        hlc=t_hlc,
        free=free,
        blocking_index=rejection.blocking_index,
        current_epoch=rejection.epoch,
    )


def _not_judged(index: int, hlc: Hlc) -> CommitmentConflictError:
    """What becomes of a proposal that came into the chain by an import before this node could chain it."""
    says = (
        f"the proposal came into the chain at seq {index} by an import, as history, and was not judged; propose again"
    )
    return CommitmentConflictError(says, reason="imported", index=index, hlc=hlc.text())


def _found(
    pending: Pending, event: Event, chained: Chained, standing: Standing
) -> tuple[ChainedEntry | None, str | None]:
    """The entry that the event is in the chain already; else, where another event has its HLC, the payload digest of
    that one."""
    entry = chained.get(event.t_hlc)
    if entry is not None and is_refused_in(pending, entry.event):
        return entry, None
    stands_at, kept_digest = place_of(event, standing)
    return None if stands_at is None else chained[stands_at], kept_digest


def _plain_entries(batch: Sequence[Pending], ended: list[tuple[str, str]]) -> dict[str, list[Entry]] | None:
    """The entries of a batch by tenant, where nobody waits for one of them and nothing of it is to be decided, and into
    ``ended`` the jobs that they may end; else None."""
    entries: dict[str, list[Entry]] = {}
    ending: list[tuple[str, str]] = []
    for pending in batch:
        kind, tenant_id = pending.record_type, pending.tenant_id
        if pending.outcome is not None or pending.idempotency is not None or kind in _NEVER_PLAIN:
            return None
        if kind in _ENDING:
            ending.append((tenant_id, pending.job_id))
        entry = (pending.hlc, pending.job_id, ACTIONS[kind], pending.payload, None)
        if (of_tenant := entries.get(tenant_id)) is None:
            entries[tenant_id] = [entry]
        else:
            of_tenant.append(entry)
    ended += ending
    return entries


def events_of(chained: Mapping[str, Chained]) -> dict[str, Standing]:
    """The events of what stands in each tenant's chain, by HLC."""
    return {tenant: {t_hlc: entry.event for t_hlc, entry in here.items()} for tenant, here in chained.items()}


def event_of(pending: Pending) -> Event:
    """The event as the chain knows it."""
    digest = hashlib.sha256(pending.payload).hexdigest()
    return Event(pending.hlc.text(), pending.job_id, ACTIONS[pending.record_type], digest)


def tenants_decided_by(batch: Iterable[Pending]) -> set[str]:
    """The tenants whose commitments these events need, or change."""
    return {each.tenant_id for each in batch if each.record_type in DECIDED_RECORD_TYPES}


def tenants_begun_by(batch: Iterable[Pending]) -> list[str]:
    """The tenants whose beginning these events record."""
    return [begun for each in batch if each.record_type == _TENANT_CREATED and (begun := tenant_begun_by(each))]


def tenant_begun_by(pending: Pending) -> str | None:
    """The tenant whose beginning this event records, None for any other event."""
    return pending.job_id.removeprefix("tenant:") if pending.record_type == _TENANT_CREATED else None


def _duplicate(
    pending: Pending,
    new_tenants: set[str],
    chained_keys: Mapping[RequestName, Mapping[int, KeyWinner]],
    keys_in_batch: ChainedKeys,
) -> tuple[LedgerError, KeyWinner | None] | None:
    """Why this event must not be chained and against which it lost, None when it must. First chained wins."""
    begun = tenant_begun_by(pending)
    if begun is not None and begun not in new_tenants:
        return DuplicateLineError("the tenant exists already"), None
    key = pending.idempotency
    if key is None:
        return None
    request = (pending.tenant_id, key.route, key.key)
    lines_here = keys_in_batch.setdefault(request, {})
    for lines in (chained_keys.get(request), lines_here):
        if not lines:
            continue
        first = next(iter(lines.values()))
        if first.body_digest != key.body_digest:
            reused = f"Idempotency-Key {key.key!r} was used before with another body; use a new key"
            return IdempotencyReusedError(reused), first
        if key.line in lines:
            return DuplicateLineError(f"line {key.line} of this keyed request is chained already"), lines[key.line]
    lines_here[key.line] = KeyWinner(key.body_digest, pending.hlc.text(), pending.job_id)
    return None

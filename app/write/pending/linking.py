"""Turning a batch of pending events into rows of the log, in memory, before PostgreSQL sees any of it.

``decide`` says what each event becomes at the end of its chain, as a value. ``apply`` makes rows, moved heads and
outcomes of these values. ``link`` does both. All are pure functions of the batch and of what the chains hold of it::

    Deferred     its tenant takes no entries now
    Duplicate    the keyed line, or the beginning of the tenant, is chained already
    KeyReused    the key was used with another body
    Existing     the event is in the chain already, or an entry that keeps it
    Refused      a REFUSED entry takes its place
    Conflict     another event has its HLC: a CONFLICT entry keeps it
    Judged       a proposal with its verdict, or a capacity
    Plain        the event as it is

Decisions are made in chain order: a keyed line and a proposal see those before them in the same batch.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from app.runtime.logs import log
from app.store.appended import AppendedEntries, ChainAppender, ChainPosition
from app.store.chain_reads import Chained, ChainedEntry
from app.store.chaining import ChainHead
from app.store.commit import KeyedRow
from app.write.pending.backlog import Pending
from app.write.pending.requests import RequestName
from ledger import canonical
from ledger.chain import Linker, Unlinked
from ledger.chain.conflict import Event, ExistingEvents, conflict_hlc, conflict_payload, find_event
from ledger.chain.record import IdempotencyKey
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
from ledger.machines.jobs import refused_job_id
from ledger.machines.promises import Rejection, read_capacity, read_proposal, rejected_payload
from ledger.positions import Epoch, Lsn

_TENANT_CREATED = next(n for n, action in SYSTEM_RECORD_TYPES.items() if action is SystemAction.TENANT_CREATED)

_NEVER_PLAIN = {_TENANT_CREATED, *DECIDED_RECORD_TYPES}
_ENDING = {record_type for record_type, action in ACTIONS.items() if action in jobs.ENDING}


class FirstUseOfKey(NamedTuple):
    """The chained event of a line of a keyed request; its HLC identifies it."""

    body_digest: bytes
    t_hlc: str
    job_id: str


ChainedKeys = dict[RequestName, dict[int, FirstUseOfKey]]
"""The chained lines of each keyed request, by line."""


class KeyedLine(NamedTuple):
    """The event of a line of a keyed request in a batch, and its entry."""

    hlc: Hlc
    job_id: str
    epoch: Epoch
    lsn: Lsn
    seq: int


@dataclass(slots=True)
class KeyedLines:
    """The lines of one keyed request in a batch; ``before`` are those in the batches before it, while they follow on
    each other."""

    before: Sequence[KeyedLines] = ()
    body_digest: bytes = b""
    lines: dict[int, KeyedLine] = field(default_factory=dict)

    def add(self, pending: Pending, key: IdempotencyKey, seq: int) -> None:
        """Add the line of ``key``, whose entry has this seq."""
        self.body_digest = key.body_digest
        self.lines[key.line] = KeyedLine(pending.hlc, pending.job_id, pending.epoch, pending.lsn, seq)

    def first_use(self, key: IdempotencyKey) -> FirstUseOfKey | None:
        """The line to which an event with ``key`` loses; None if it may be added."""
        for part in (*self.before, self) if self.before else (self,):
            is_other = bool(part.lines) and part.body_digest != key.body_digest
            if is_other or key.line in part.lines:
                line = next(iter(part.lines.values())) if is_other else part.lines[key.line]
                return FirstUseOfKey(part.body_digest, line.hlc.text(), line.job_id)
        return None


class DuplicateLineError(LedgerError):
    """The keyed line is chained already, by this node or another; no entry was added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    """What the chains hold of a batch, at ``heads``."""

    heads: Mapping[str, ChainHead]
    """The head of every tenant of the batch that takes entries."""
    keys: Mapping[RequestName, Mapping[int, FirstUseOfKey]] = field(default_factory=dict)
    """The chained lines of its keyed requests, if they were read."""
    before: Mapping[RequestName, KeyedLines] = field(default_factory=dict)
    """Else the lines in the batch before it, if this node has just chained one."""
    entries: Mapping[str, Chained] = field(default_factory=dict)
    """By tenant and HLC, the entries with the HLC of an event, if events may be in the chain already."""
    commitments: Mapping[str, Commitments] = field(default_factory=dict)
    """Of each tenant with proposals or changes of capacity in the batch; ``decide`` updates them in place."""
    unrecorded: Collection[str] = ()
    """Tenants whose beginning ``_system`` does not record yet."""
    refused_sqlstate: str | None = None
    """If given, the batch is one event that PostgreSQL refused with this code."""
    deferred: Callable[[Pending], HeldBackError | None] = lambda _: None
    """Returns the outcome of an event whose tenant has no head in ``heads``; None if it is still open."""

    def lines_of(self, name: RequestName) -> KeyedLines:
        """For the lines of a request in this batch; none yet."""
        before = self.before.get(name)
        return KeyedLines(() if before is None else (*before.before, before))


@dataclass(slots=True)
class LinkedBatch(AppendedEntries):
    """Rows and outcomes of one batch; ``outcomes`` runs parallel to the pending events."""

    keyed: dict[RequestName, KeyedLines] = field(default_factory=dict)
    """The lines that the table of keys gets a row for."""
    outcomes: list[ChainPosition | LedgerError | None] = field(default_factory=list)
    """The position of each event in its chain, or why it has none; None if no caller awaits it."""
    has_existing: bool = False
    """Whether an event of the batch, or another with its HLC, was in the chain already."""
    refused_jobs: list[tuple[str, str]] = field(default_factory=list)
    """(tenant, job) of each event that a REFUSED entry replaced."""
    conflicts: list[tuple[str, str, int]] = field(default_factory=list)
    """(tenant, HLC, LSN) of each event whose HLC another event of the chain has."""
    commitments: Mapping[str, Commitments] = field(default_factory=dict)
    """By tenant, the commitments that changed."""

    @property
    def keyed_rows(self) -> list[KeyedRow]:
        """The rows that the table of keys gets."""
        return [
            (*name, line, part.body_digest, at.seq, at.epoch, at.lsn, sum(len(each.lines) for each in part.before))
            for name, part in self.keyed.items()
            for line, at in part.lines.items()
        ]

    def resolve_futures(self, batch: Sequence[Pending], deferred: Collection[str]) -> None:
        """Resolve the outcomes of ``batch``, which is committed. Events of tenants that were ``deferred`` still
        wait."""
        if self.outcomes.count(None) == len(batch):
            return
        for pending, outcome in zip(batch, self.outcomes, strict=True):
            if isinstance(outcome, DuplicateLineError) and pending.tenant_id not in deferred:
                pending.refusal = outcome
            if isinstance(outcome, EventRefusedError | IdempotencyReusedError) and pending.tenant_id not in deferred:
                pending.refusal = outcome
                log.error("event_refused", tenant_id=pending.tenant_id, lsn=pending.lsn, error=str(outcome))
            if (future := pending.outcome) is None or future.done() or pending.tenant_id in deferred:
                continue
            if isinstance(outcome, LedgerError):
                future.set_exception(outcome)
                future.exception()
            else:
                assert outcome is not None
                future.set_result(outcome)


# --- deciding ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NotAppended:
    """No entry is added."""

    outcome: ChainPosition | LedgerError | None = None
    seq: int | None = None
    """Seq of the entry that is in the chain already."""
    is_keyed: bool = False
    """Whether a row of the idempotency table names the entry."""


class Deferred(NotAppended):
    """Its tenant takes no entries now. Without an outcome it is chained later."""


class Duplicate(NotAppended):
    """The keyed line, or the beginning of the tenant, is chained already."""


class KeyReused(NotAppended):
    """The key was used with another body."""


class Existing(NotAppended):
    """The event is in the chain: as itself, or in a REFUSED or CONFLICT entry."""


@dataclass(slots=True)
class Appended:
    """An entry is added."""

    hlc: Hlc
    job_id: str
    action: str
    payload: bytes
    error: LedgerError | None = None
    """The caller's answer in place of a chain position."""
    is_keyed: bool = True
    """Whether a row of the idempotency table names the entry."""


class Refused(Appended):
    """A REFUSED entry takes its place, with all of its bytes."""


class Conflict(Appended):
    """Another event has its HLC: a CONFLICT entry keeps it."""


class Judged(Appended):
    """A proposal with its verdict, or a capacity."""


class Plain(Appended):
    """The event as it is."""


Decision = Deferred | Duplicate | KeyReused | Existing | Refused | Conflict | Judged | Plain


class _KeyConflict(NamedTuple):
    """Why an event of a keyed request is not chained as it is, and the event that it lost to."""

    error: DuplicateLineError | IdempotencyReusedError
    winner: FirstUseOfKey

    def why(self, key: str) -> dict[str, object]:
        """The reason that the REFUSED entry records."""
        return {
            "reason": jobs.KEY_REPLAYED if isinstance(self.error, DuplicateLineError) else jobs.KEY_REUSED,
            "idempotency_key": key,
            "lost_to": {"job_id": self.winner.job_id, "hlc": self.winner.t_hlc},
        }


@dataclass(slots=True)
class _Decider:
    """Decides about the events of one batch, in order."""

    view: ChainView
    keys: dict[RequestName, KeyedLines] = field(default_factory=dict)
    """Keyed lines of the batch that will be chained; their seq is not known yet."""
    appended: Counter[str] = field(default_factory=Counter)
    """Entries that are added to each chain."""
    events: dict[str, ExistingEvents] = field(init=False)
    """The events of ``view.entries``."""

    def __post_init__(self) -> None:
        self.events = {tenant_id: events_by_hlc(chained) for tenant_id, chained in self.view.entries.items()}

    def decide(self, pending: Pending) -> Decision:
        """The decision about ``pending``: refusals first, then existing events, then new ones."""
        if pending.tenant_id not in self.view.heads:
            return Deferred(self.view.deferred(pending))
        if (begun := tenant_begun_by(pending)) is not None and begun not in self.view.unrecorded:
            return Duplicate(DuplicateLineError("the tenant exists already"))
        lost = self._lost(pending)
        # An event that may have been acknowledged is recorded even if it lost.
        if lost is not None and (not pending.answered_early or lost.winner.t_hlc == pending.hlc.text()):
            return Duplicate(lost.error) if isinstance(lost.error, DuplicateLineError) else KeyReused(lost.error)
        existing, kept_digest = self._find(pending)
        if existing is not None:
            return self._existing(pending, existing, lost)
        decision = self._appended(pending, lost, kept_digest)
        self.appended[pending.tenant_id] += 1
        return decision

    def _lost(self, pending: Pending) -> _KeyConflict | None:
        """The conflict if another event of its key was chained first: that one wins."""
        if (key := pending.idempotency) is None:
            return None
        request = (pending.tenant_id, key.route, key.key)
        if (here := self.keys.get(request)) is None:
            here = self.keys[request] = self.view.lines_of(request)
        chained = self.view.keys.get(request, {})
        winner = next((each for each in chained.values() if each.body_digest != key.body_digest), chained.get(key.line))
        if (winner := winner or here.first_use(key)) is None:
            here.add(pending, key, 0)
            return None
        if winner.body_digest != key.body_digest:
            reused = f"Idempotency-Key {key.key!r} was used before with another body; use a new key"
            return _KeyConflict(IdempotencyReusedError(reused), winner)
        return _KeyConflict(DuplicateLineError(f"line {key.line} of this keyed request is chained already"), winner)

    def _find(self, pending: Pending) -> tuple[ChainedEntry | None, str | None]:
        """The existing entry of the event; else the payload digest of another event with its HLC, if there is one."""
        if not (chained := self.view.entries.get(pending.tenant_id)):
            return None, None
        event = event_of(pending)
        if (entry := chained.get(event.t_hlc)) is not None and is_refused_in(pending, entry.event):
            return entry, None
        found_at, kept_digest = find_event(event, self.events[pending.tenant_id])
        return None if found_at is None else chained[found_at], kept_digest

    def _existing(self, pending: Pending, entry: ChainedEntry, lost: _KeyConflict | None) -> Existing:
        place = ChainPosition(entry.seq, entry.chain_link, entry.prev_chain_link)
        if lost is not None:
            return Existing(lost.error, entry.seq)
        if self.view.refused_sqlstate is not None or pending.record_type not in DECIDED_RECORD_TYPES:
            return Existing(place, entry.seq, is_keyed=True)
        is_proposed = pending.record_type == PROPOSED_RECORD_TYPE
        return Existing(_not_judged(entry.seq, pending.hlc) if is_proposed else place, entry.seq)

    def _appended(self, pending: Pending, lost: _KeyConflict | None, kept_digest: str | None) -> Decision:
        """The entry to add. ``kept_digest`` is that of another event with its HLC, if there is one."""
        hlc = pending.hlc if kept_digest is None else conflict_hlc(event_of(pending))
        seq = self.view.heads[pending.tenant_id].seq + self.appended[pending.tenant_id] + 1
        refused = SystemAction.REFUSED.value
        if lost is not None:
            assert pending.idempotency is not None
            payload = refused_payload(pending, lost.why(pending.idempotency.key))
            return Refused(hlc, pending.job_id, refused, payload, lost.error, is_keyed=False)
        if (sqlstate := self.view.refused_sqlstate) is not None:
            payload = refused_payload(pending, {"sqlstate": sqlstate})
            why = event_refused(sqlstate, seq, pending.hlc.text(), pending.epoch, pending.lsn)
            return Refused(hlc, refused_job_id(pending.job_id), refused, payload, why)
        is_decided = pending.record_type in DECIDED_RECORD_TYPES
        if kept_digest is not None:
            payload = conflict_payload(event_of(pending), pending.payload.decode(), kept_digest)
            error = _not_judged(seq, hlc) if pending.record_type == PROPOSED_RECORD_TYPE else None
            return Conflict(hlc, pending.job_id, SystemAction.CONFLICT.value, payload, error, is_keyed=not is_decided)
        if is_decided:
            return self._judge(pending, seq)
        return Plain(hlc, pending.job_id, ACTIONS[pending.record_type], pending.payload)

    def _judge(self, pending: Pending, seq: int) -> Judged:
        machine, hlc, job_id = self.view.commitments[pending.tenant_id], pending.hlc, pending.job_id
        if pending.record_type == CAPACITY_RECORD_TYPE:
            machine.set_capacity(read_capacity(pending.payload))
            return Judged(hlc, job_id, CommitmentAction.CAPACITY_SET.value, pending.payload)
        if (rejection := machine.decide(seq, pending.proposal or read_proposal(pending.payload))) is None:
            return Judged(hlc, job_id, CommitmentAction.PROPOSE_ACCEPTED.value, pending.payload)
        payload = rejected_payload(pending.payload, rejection)
        return Judged(
            hlc, job_id, CommitmentAction.PROPOSE_REJECTED.value, payload, conflict_of(rejection, seq, hlc.text())
        )


def decide(batch: Sequence[Pending], view: ChainView) -> list[Decision]:
    """What each event of ``batch``, in LSN order, becomes at the end of its chain."""
    return list(map(_Decider(view).decide, batch))


# --- applying ---------------------------------------------------------------------------------------------------------


def apply(
    batch: Sequence[Pending], decisions: Sequence[Decision], view: ChainView, linkers: dict[str, Linker]
) -> LinkedBatch:
    """Rows, moved heads and outcomes of ``decisions`` about ``batch``; ``linkers``, by tenant, is filled as needed."""
    linked = LinkedBatch(commitments=view.commitments)
    appender = ChainAppender(linked, view.heads, linkers)
    awaited: list[tuple[int, str, int]] = []
    for number, (pending, decision) in enumerate(zip(batch, decisions, strict=True)):
        tenant_id, key = pending.tenant_id, pending.idempotency
        if isinstance(decision, Appended):
            seq = appender.append(tenant_id, decision.hlc, decision.job_id, decision.action, decision.payload)
            linked.outcomes.append(decision.error)
            if pending.outcome is not None:
                awaited.append((number, tenant_id, seq))
            if isinstance(decision, Refused):
                linked.refused_jobs.append((tenant_id, pending.job_id))
            if decision.hlc != pending.hlc:
                linked.conflicts.append((tenant_id, pending.hlc.text(), pending.lsn))
        else:
            linked.outcomes.append(decision.outcome)
            seq = decision.seq or 0
        linked.has_existing |= isinstance(decision, Existing)
        if key is not None and decision.is_keyed:
            name = (tenant_id, key.route, key.key)
            if name not in linked.keyed:
                linked.keyed[name] = view.lines_of(name)
            linked.keyed[name].add(pending, key, seq)
    linked.has_existing |= bool(linked.conflicts)
    appender.finish()
    for number, tenant_id, seq in awaited:
        linked.outcomes[number] = linked.outcomes[number] or appender.place(tenant_id, seq)
    return linked


def link(batch: Sequence[Pending], view: ChainView, linkers: dict[str, Linker]) -> LinkedBatch:
    """``batch`` linked onto the heads of ``view``; a batch of plain events takes a fast path."""
    if view.refused_sqlstate is None and not view.entries and (plain := _link_plain(batch, view, linkers)) is not None:
        return plain
    return apply(batch, decide(batch, view), view, linkers)


def _link_plain(batch: Sequence[Pending], view: ChainView, linkers: dict[str, Linker]) -> LinkedBatch | None:
    """The fast path of a batch without awaited or proposed events and keyed lines that are repeated; None for any other
    batch."""
    entries: dict[str, list[Unlinked]] = {}
    ended: list[tuple[str, str]] = []
    keyed: dict[RequestName, KeyedLines] = {}
    for pending in batch:
        kind, tenant_id = pending.record_type, pending.tenant_id
        if pending.outcome is not None or kind in _NEVER_PLAIN:
            return None
        if kind in _ENDING:
            ended.append((tenant_id, pending.job_id))
        entry = (pending.hlc, pending.job_id, ACTIONS[kind], pending.payload, None)
        if (of_tenant := entries.get(tenant_id)) is None:
            if tenant_id not in view.heads:
                return None
            of_tenant = entries[tenant_id] = []
        of_tenant.append(entry)
        if (key := pending.idempotency) is not None:
            name = (tenant_id, key.route, key.key)
            if (lines := keyed.get(name)) is None:
                lines = keyed[name] = view.lines_of(name)
            if name in view.keys or lines.first_use(key) is not None:
                return None
            lines.add(pending, key, view.heads[tenant_id].seq + len(of_tenant))
    linked = LinkedBatch(ended=ended, keyed=keyed, outcomes=[None] * len(batch))
    appender = ChainAppender(linked, {tenant_id: view.heads[tenant_id] for tenant_id in entries}, linkers)
    for tenant_id, of_tenant in entries.items():
        appender.extend(tenant_id, of_tenant)
    appender.finish()
    return linked


# --- entries and errors in place of an event --------------------------------------------------------------------------


def refused_payload(pending: Pending, why: Mapping[str, object]) -> bytes:
    """Payload of the REFUSED entry in place of an event, with all of its bytes."""
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
    """The caller's error for an event that the REFUSED entry at ``seq`` replaced."""
    return EventRefusedError(
        f"PostgreSQL refused the event with SQLSTATE {sqlstate}; a REFUSED entry at seq {seq} keeps its bytes. "
        "Mend what refuses it, then send the event again under a new Idempotency-Key",
        seq=seq,
        hlc=t_hlc,
        epoch=epoch,
        lsn=lsn,
    )


def is_refused_in(pending: Pending, existing: Event | None) -> bool:
    """Whether ``existing``, at the event's HLC, is the REFUSED entry that keeps it."""
    return (
        existing is not None
        and existing.action == SystemAction.REFUSED
        and existing.job_id in (pending.job_id, refused_job_id(pending.job_id))
    )


def conflict_of(rejection: Rejection, index: int, t_hlc: str) -> CommitmentConflictError:
    """The proposer's error for the rejection that the entry at ``index`` records."""
    return CommitmentConflictError(
        rejection.detail,
        reason=rejection.reason,
        index=index,
        hlc=t_hlc,
        free=None if rejection.free is None else msgspec.to_builtins(rejection.free),
        blocking_index=rejection.blocking_index,
        current_epoch=rejection.epoch,
    )


def _not_judged(index: int, hlc: Hlc) -> CommitmentConflictError:
    """The error for a proposal that an import chained before this node could."""
    return CommitmentConflictError(
        f"the proposal came into the chain at seq {index} by an import, as history, and was not judged; propose again",
        reason="imported",
        index=index,
        hlc=hlc.text(),
    )


def events_by_hlc(chained: Chained) -> ExistingEvents:
    """The events of the entries of one chain."""
    return {t_hlc: entry.event for t_hlc, entry in chained.items()}


def event_of(pending: Pending) -> Event:
    """The event as the chain knows it."""
    return Event(
        pending.hlc.text(), pending.job_id, ACTIONS[pending.record_type], hashlib.sha256(pending.payload).hexdigest()
    )


def tenants_decided_by(batch: Iterable[Pending]) -> set[str]:
    """The tenants whose commitments these events need, or change."""
    return {each.tenant_id for each in batch if each.record_type in DECIDED_RECORD_TYPES}


def tenants_begun_by(batch: Iterable[Pending]) -> list[str]:
    """The tenants whose beginning these events record."""
    return [begun for each in batch if each.record_type == _TENANT_CREATED and (begun := tenant_begun_by(each))]


def tenant_begun_by(pending: Pending) -> str | None:
    """The tenant whose beginning this event records, None for any other event."""
    return pending.job_id.removeprefix("tenant:") if pending.record_type == _TENANT_CREATED else None

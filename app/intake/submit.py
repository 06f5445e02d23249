"""From a validated request to the WAL, and on to the level of durability it asked for.

One request, in order::

    1. a keyed request is looked up: seen before, under way here, or new       (app.intake.keyed)
    2. an event about a job: the job must exist and must not be known to have ended
    3. the payload becomes canonical bytes, once
    4. room is kept for all its records, or it is refused whole
    5. in one synchronous step each record draws its HLC and LSN and is queued
    6. the answer waits for the level: durable for LOCAL, chained above that   (app.intake.answers)

A caller MUST NOT take a Receipt of level LOCAL for chained, nor anything for lost when this raises
DurabilityTimeoutError: the event is in the WAL and may still be chained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.background.turns import LINES_PER_TURN, Turn
from app.intake.answers import Answers, Entered, fence_token_of, raise_refusal, refused
from app.intake.job_checks import CREATED, JobChecks, JobLookup, creation_in, creation_of
from app.intake.job_index import JobIndex
from app.intake.keyed import KeyedRequests
from app.intake.system_entries import SystemEntries, WalAppend, record_of
from app.node.state import Node
from app.pending.backlog import (
    Backlog,
    Pending,
    record_bytes_of,
)
from app.pending.keyed_entry import check_lines, gone
from app.pending.linking import DuplicateLineError, LinkedBatch, tenant_begun_by
from app.pending.quarantine import Quarantine
from app.pending.requests import BatchReceipt, Draft, Receipt, RequestKey
from app.store.chaining import LOG_COLUMNS
from app.store.growth import Growth
from app.store.job_table import JobKey
from ledger import canonical, keyed
from ledger.chain import record
from ledger.errors import (
    InvalidEventError,
    RecordTooLargeError,
)
from ledger.hlc import Hlc
from ledger.machines import jobs
from ledger.machines.events import ACTIONS, EVENTS_BY_ACTION, Durability, SystemAction
from ledger.machines.jobs import ENDING
from ledger.positions import BEFORE_FIRST, Lsn, lsns_from

FIRST_FENCE_TOKEN = 1
"""Fence of a job whose creator named none."""

_ENDS = frozenset({"JobCompleted", "JobFailed", "JobTimedOut"})
_TENANT, _JOB, _ACTION = (LOG_COLUMNS.index(name) for name in ("tenant_id", "job_id", "action"))


@dataclass(kw_only=True, eq=False)
class Submitter:
    """Takes events in. Belongs to one event loop; only this and ``SystemEntries`` draw positions."""

    node: Node
    wal: WalAppend
    backlog: Backlog
    keyed: KeyedRequests
    quarantine: Quarantine
    job_index: JobIndex
    find_jobs: JobLookup
    system: SystemEntries
    answers: Answers
    record_bytes_max: int

    def __post_init__(self) -> None:
        self._tenants = self.system.tenants
        self._checks = JobChecks(self.node, self.job_index, self.find_jobs)
        self._watched: tuple[int, float] | None = None
        """LSN and time of one record on its way, a sample of how long they take: watching each would cost more."""

    # --- requests ---------------------------------------------------------------------------------

    async def submit(self, draft: Draft, *, key: RequestKey | None) -> Receipt:
        """Take one event and wait for its level.

        Raises:
            JobNotFoundError, JobEndedError: the event is about no job, or one known to have ended.
            JobExistsError: the job is known to have been created with another spec.
            InvalidInputError: a job is to be created under an id that only this node may make.
            ChainDamagedError: the tenant's chain is damaged; nothing was taken.
            HeldBackError: so it was found to be meanwhile; the event stays in the WAL.
            IdempotencyReusedError: the key was used with another body.
            EventRefusedError: Postgres would not hold the event; a REFUSED entry was chained in its place.
            RequestTooLargeError: there never is room for it; nothing was taken.
            WalFullError: no room; nothing was taken.
            WalPoisonedError, FencedError, DatabaseWentBackError: the node has failed. What failed it may have
                struck after the event was taken, so whether it will be chained is not known.
            DurabilityTimeoutError: taken, but the level was not reached in time.
        """
        if key is None:
            await self._checks.check((draft,), draft.durability, in_lines=False)
            return await self.answers.entered(draft, *self._enter_one(draft, None)).settled()
        async with self.keyed.begin((draft.tenant_id,), key, draft.durability) as (request, seen):
            if not seen and request.recovered:
                request.entered(request.recovered[0])
                seen = True
            if not seen and not request.chained:
                await self._checks.check((draft,), draft.durability, in_lines=False)
                request.entered(self._enter_one(draft, _line_key(key, 0))[0])
        if request.chained:
            return await self.answers.again(request.chained, draft, key)
        entered = request.pending
        assert entered is not None
        try:
            receipt = await self.answers.finish(draft, entered, fence_token_of(entered.payload))
        except DuplicateLineError:
            return await self.answers.again(await self.keyed.find((draft.tenant_id,), key), draft, key)
        return receipt._replace(replayed=seen)

    def enter_known(self, draft: Draft) -> Entered | None:
        """As ``submit`` of an event without a key, up to its answer; None, and nothing taken, when the store must be
        asked for its job first.

        Raises:
            as ``submit``: nothing was taken.
        """
        if not self._checks.is_known(draft):
            return None
        return self.answers.entered(draft, *self._enter_one(draft, None))

    async def submit_lines(
        self, drafts: Sequence[Draft], *, durability: Durability | None, key: RequestKey | None
    ) -> BatchReceipt:
        """Take all events of one request, or none, and wait until the last has reached the level.

        ``durability`` is the level asked for the whole request; without it the highest default of the
        lines counts.

        Raises:
            InvalidEventError: a line is about no job, or one known to have ended, or creates one that is known to have
                been created with another spec; nothing was taken.
            EventRefusedError: the first line in whose place a REFUSED entry was chained; the others are chained.
            IdempotencyReusedError, RequestTooLargeError, WalFullError, WalPoisonedError, FencedError,
            DatabaseWentBackError, ChainDamagedError, HeldBackError, DurabilityTimeoutError: as ``submit``.
        """
        requested = durability if durability is not None else max(draft.durability for draft in drafts)
        if key is None:
            await self._checks.check(drafts, requested, in_lines=True)
            entered = await self._enter_lines(drafts, None, frozenset(), requested)
            await self.answers.wait(entered[-1].lsn, requested, entered[-1])
            if requested > Durability.LOCAL:
                await self.answers.unlocked(self.quarantine, {each.tenant_id for each in entered}, entered[-1])
                self.quarantine.check_chained(entered)
            raise_refusal(entered)
            return self.answers.of_lines(entered, drafts, requested)
        return await self._submit_keyed_lines(drafts, requested, key)

    async def _submit_keyed_lines(
        self, drafts: Sequence[Draft], requested: Durability, key: RequestKey
    ) -> BatchReceipt:
        """Add the lines that are missing, then answer from what is chained: the same answer each time."""
        tenants = tuple(sorted({draft.tenant_id for draft in drafts}))
        added = False
        async with self.keyed.begin(tenants, key, requested) as (request, seen):
            present = request.present()
            if not seen and len(present) < len(drafts):
                await check_lines(request.chained, drafts, key)
                if not present:
                    await self._checks.check(drafts, requested, in_lines=True)
                line_key = key._replace(body_digest=request.body_digest)
                entered = await self._enter_lines(drafts, line_key, present, requested)
                if not present:
                    request.receipt = self.answers.of_lines(entered, drafts, requested)
                request.entered(entered[-1])
                added = True
            elif not seen and request.recovered:
                request.entered(max(request.recovered, key=lambda pending: pending.lsn))
        if request.last_lsn:
            answered_early = requested <= Durability.LOCAL and request.receipt is not None
            await self.answers.wait(
                request.last_lsn, requested if answered_early else Durability.GLOBAL, request.pending
            )
            if answered_early and request.receipt is not None:
                return request.receipt._replace(replayed=seen)
            await self.answers.unlocked(self.quarantine, tenants, request.pending)
        chained = await self.keyed.find(tenants, key)
        if len(chained) < len(drafts):
            for tenant_id in tenants:
                self.quarantine.check(tenant_id)
        if not chained:
            raise gone(tenants[0], key)
        await check_lines(chained, drafts, key)
        for line in chained:
            if line.action == SystemAction.REFUSED:
                raise refused(line).at_line(line.line + 1)
        return self.answers.of_chained_lines(chained, drafts, requested, replayed=not added)

    def recover(self, pending: Pending) -> None:
        """Learn from a record that the WAL holds beyond the chain, as when it was entered."""
        self._tenants.update((pending.tenant_id, tenant_begun_by(pending) or pending.tenant_id))
        event = EVENTS_BY_ACTION.get(ACTIONS[pending.record_type])
        if event is not None:
            fence_token = fence_token_of(pending.payload)
            creation = creation_in(pending.payload) if event.name == CREATED else None
            is_end = event.name in _ENDS
            self.job_index.entered(
                pending.tenant_id, pending.job_id, fence_token, pending.lsn, is_end=is_end, creation=creation
            )

    def chained(self, linked: LinkedBatch) -> None:
        """Forget the jobs of events that were refused; doubt what is known of those that may have ended."""
        for tenant_id, job_id in linked.refused_jobs:
            self.job_index.forget(tenant_id, job_id)
        self.job_index.mark_doubtful((row[_TENANT], row[_JOB]) for row in linked.log_rows if row[_ACTION] in ENDING)

    def imported(self, growth: Growth) -> None:
        """Doubt what is known of the jobs that something was imported of."""
        self.job_index.mark_doubtful((row[_TENANT], row[_JOB]) for row in growth.log_rows)

    def followed(self, states: Mapping[JobKey, jobs.JobState], covered_lsn: Mapping[str, Lsn]) -> None:
        """Learn from what the chain says of jobs now which of those that are known take no more events, and which still
        do. ``covered_lsn``, by tenant, is up to which LSN the records of this node are part of that."""
        for (tenant_id, job_id), state in states.items():
            if self.job_index.get(tenant_id, job_id) is not None:
                ended = jobs.ended_text(jobs.status(state), state.refused)
                self.job_index.chained(tenant_id, job_id, state.fence, ended, covered_lsn.get(tenant_id, BEFORE_FIRST))

    def became_durable(self, lsn: Lsn) -> float | None:
        """Seconds from queueing until durable of the one record being watched, once ``lsn`` has reached it."""
        if self._watched is None or self._watched[0] > lsn:
            return None
        queued_s, self._watched = self._watched[1], None
        return time.perf_counter() - queued_s

    # --- entering: the one synchronous step -------------------------------------------------------

    def _enter_one(self, draft: Draft, key: record.IdempotencyKey | None) -> tuple[Pending, int]:
        self.system.refuse_unfit((draft.tenant_id,))
        encoded = self._payload(draft, key)
        fence_token, payload = encoded[:2]
        records = 1 + (draft.tenant_id not in self._tenants)
        self.backlog.check(records, record_bytes_of(records, len(payload)))
        answered_early = draft.durability <= Durability.LOCAL
        (pending,) = self._enter(((draft, *encoded, key),), answered_early)
        if key is not None or not answered_early:
            pending.outcome = asyncio.get_running_loop().create_future()
        return pending, fence_token

    async def _enter_lines(
        self, drafts: Sequence[Draft], key: RequestKey | None, present: frozenset[int], requested: Durability
    ) -> list[Pending]:
        self.system.refuse_unfit({draft.tenant_id for draft in drafts})
        room = len(drafts) - len(present) + len({draft.tenant_id for draft in drafts} - self._tenants)
        self.backlog.reserve(room)
        entered: list[Pending] = []
        record_bytes = 0
        answered_early = requested <= Durability.LOCAL
        try:
            payloads = []
            fences: dict[tuple[str, str], int] = {}
            encoding = Turn()
            for number, draft in enumerate(drafts):
                if number % LINES_PER_TURN == LINES_PER_TURN - 1:
                    await asyncio.sleep(0)
                if encoding.is_over():
                    await encoding.pause()
                payloads.append(self._payload(draft, _line_key(key, number), fences, number))
            wanted_bytes = record_bytes_of(room, sum(len(payload) for _, payload, *_ in payloads))
            self.backlog.reserve(0, wanted_bytes)
            record_bytes = wanted_bytes
            lines = [number for number in range(len(drafts)) if number not in present]
            for first in range(0, len(lines), LINES_PER_TURN):
                if first:
                    await asyncio.sleep(0)
                turn = lines[first : first + LINES_PER_TURN]
                events = [(drafts[number], *payloads[number], _line_key(key, number)) for number in turn]
                entered += self._enter(events, answered_early)
        finally:
            self.backlog.release(room, record_bytes)
        return entered

    def _payload(
        self,
        draft: Draft,
        key: record.IdempotencyKey | None,
        fences: dict[tuple[str, str], int] | None = None,
        number: int | None = None,
    ) -> tuple[int, bytes, str | None]:
        """Fence token, canonical payload, and its ``creation_of`` where others may create the job too; ``fences``
        carries what earlier lines of the request chose."""
        tenant_id, job_id, event, fields, fence_token, _, _, seal = draft
        job = (tenant_id, job_id or "")
        if fence_token is None:
            known = self.job_index.get(*job)
            fence_token = known.fence_token if known is not None else FIRST_FENCE_TOKEN
            if fences is not None:
                fence_token = max(fence_token, fences.get(job, 0))
        if fences is not None and job_id is not None:
            fences[job] = fence_token
        facts = {"type": event.name, "fence_token": fence_token, **fields}
        if key is not None:
            facts[keyed.MEMBER] = keyed.key_digest(tenant_id, key)
        payload = canonical.encode(facts) if seal is None else _sealed(draft, fence_token, "", key)
        if len(payload) > self.record_bytes_max - 1024:
            reason = f"the event takes {len(payload)} bytes; wal.record_bytes_max is {self.record_bytes_max}"
            raise RecordTooLargeError(reason) if number is None else InvalidEventError(reason, number + 1)
        creation = creation_of(draft) if event.name == CREATED and job_id is not None else None
        return fence_token, payload, creation

    def _enter(
        self,
        events: Sequence[tuple[Draft, int, bytes, str | None, record.IdempotencyKey | None]],
        answered_early: bool,
    ) -> list[Pending]:
        """Draw HLC and LSN together and queue the records: WAL order is HLC order.

        Each event is a draft with what ``_payload`` says of it, and key. All are queued, or none.
        """
        node, tick, wall_ms = self.node, self.node.clock.tick, self.node.wall.now_ms()
        epoch, lsns = node.epoch, lsns_from(self.wal.next_lsn)
        entered: list[Pending] = []
        queued: list[Pending] = []
        records: list[tuple[Hlc, int, bytes]] = []
        begun: set[str] = set()
        for draft, fence_token, payload, _, key in events:
            tenant_id, job_id, event = draft[:3]
            if tenant_id not in self._tenants and tenant_id not in begun:
                begun.add(tenant_id)
                named: dict[str, object] = {"tenant_id": tenant_id}
                beginning = self.system.event(SystemAction.TENANT_CREATED, f"tenant:{tenant_id}", named, next(lsns))
                queued.append(beginning)
                records.append(record_of(beginning))
            hlc = tick(wall_ms)
            if job_id is None:
                job_id = f"{node.region}-{hlc.physical_ms}-{node.gate}-{hlc.logical:05d}"
            if draft.seal is not None:
                payload = _sealed(draft, fence_token, hlc.text(), key)
            kind = event.record_type
            pending = Pending(next(lsns), epoch, hlc, kind, tenant_id, job_id, payload, key, None, answered_early)
            entered.append(pending)
            queued.append(pending)
            records.append((hlc, kind, record.encode(pending)))
        first_lsn = self.wal.append_all(records)
        assert first_lsn == queued[0].lsn
        self.backlog.add(queued)
        self._tenants |= begun
        for pending, (draft, fence_token, _, creation, _) in zip(entered, events, strict=True):
            name = draft.event.name
            self.job_index.entered(
                pending.tenant_id, pending.job_id, fence_token, pending.lsn, is_end=name in _ENDS, creation=creation
            )
        if self._watched is None:
            self._watched = (entered[-1].lsn, time.perf_counter())
        return entered


def _line_key(key: RequestKey | None, line: int) -> record.IdempotencyKey | None:
    return None if key is None else record.IdempotencyKey(key.route, key.key, line, key.body_digest)


def _sealed(draft: Draft, fence_token: int, hlc: str, key: record.IdempotencyKey | None) -> bytes:
    """The canonical payload, what is private in it sealed for an event of this HLC."""
    assert draft.seal is not None
    facts = {"type": draft.event.name, "fence_token": fence_token, **draft.seal.seal(draft.fields, hlc)}
    if key is not None:
        facts[keyed.MEMBER] = keyed.key_digest(draft.tenant_id, key)
    return canonical.encode(facts)

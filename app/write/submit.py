"""From a validated request to the WAL, and on to the level of durability it asked for.

One request, in order::

    1. a keyed request is looked up: seen before, under way here, or new       (app.write.keyed)
    2. an event about a job: the job must exist and must not be known to have ended
    3. the payload becomes canonical bytes, once
    4. room is kept for all its records, or it is refused whole
    5. in one synchronous step each record draws its HLC and LSN and is queued
    6. the answer waits for the level: durable for LOCAL, chained above that

A caller MUST NOT take a Receipt of level LOCAL for chained, nor anything for lost when this raises
DurabilityTimeoutError: the event is in the WAL and may still be chained.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import orjson

from app.node import Node, expire
from app.store.growth import Growth, Place
from app.store.idempotency import ChainedLine
from app.write.backlog import (
    BYTES_AROUND_PAYLOAD,
    FACTS_KEPT_BYTES_MAX,
    FACTS_KEPT_ENTRIES_MAX,
    Backlog,
    Pending,
)
from app.write.job_index import JobIndex
from app.write.keyed import KeyedRequests
from app.write.keyed_entry import check_lines, gone
from app.write.linking import DuplicateLineError, LinkedBatch, event_refused, tenant_begun_by
from app.write.quarantine import Quarantine
from app.write.requests import BatchReceipt, Draft, Receipt, RequestKey
from ledger import canonical, jobs, record
from ledger.errors import (
    DurabilityTimeoutError,
    EventRefusedError,
    InvalidEventError,
    InvalidInputError,
    JobEndedError,
    JobNotFoundError,
    LedgerError,
    RecordTooLargeError,
)
from ledger.events import ACTIONS, EVENTS_BY_ACTION, SYSTEM_RECORD_TYPES, SYSTEM_TENANT, Durability, SystemAction
from ledger.hlc import Hlc

FIRST_FENCE_TOKEN = 1
"""Fence of a job whose creator named none."""
LINES_PER_TURN = 500
"""Lines of one request entered before other requests get a turn."""
SURVIVES = ("process", "node", "region")

LEDGER_ROUTE = 255
"""Stands, in keyed records, where other requests have their route: what the ledger writes once about itself."""

Facts = dict[str, object] | None
"""A payload before it is encoded, None where it is not kept: see ``Pending.facts``."""

_CREATED = "JobCreated"
_ENDS = frozenset({"JobCompleted", "JobFailed", "JobTimedOut"})
_TYPE_OF_ACTION = {action: number for number, action in SYSTEM_RECORD_TYPES.items()}


class WalQueue(Protocol):
    """What submitting needs of the WAL writer."""

    @property
    def next_lsn(self) -> int: ...
    def check_room(self, records: int, record_bytes: int, reserved_bytes: int) -> None: ...
    def append_all(self, records: Sequence[tuple[Hlc, int, bytes]]) -> int: ...


class JobLookup(Protocol):
    """What submitting needs of the store: (fence, ended) of each job that exists."""

    async def __call__(self, wanted: Sequence[tuple[str, str]], /) -> dict[tuple[str, str], tuple[int, bool]]: ...


class Submitter:
    """Takes events in. Belongs to one event loop; ``enter`` is the only place where positions are drawn."""

    def __init__(
        self,
        *,
        node: Node,
        wal: WalQueue,
        backlog: Backlog,
        keyed: KeyedRequests,
        quarantine: Quarantine,
        job_index: JobIndex,
        find_jobs: JobLookup,
        tenants: set[str],
        write_timeout_s: float,
        record_bytes_max: int,
        acknowledge_before_fsync: bool,
        postgres_survives: str,
    ) -> None:
        self._node = node
        self._wal = wal
        self._backlog = backlog
        self._keyed = keyed
        self._quarantine = quarantine
        self._jobs = job_index
        self._find_jobs = find_jobs
        self._tenants = tenants
        self._write_timeout_s = write_timeout_s
        self._record_bytes_max = record_bytes_max
        self._acknowledge_before_fsync = acknowledge_before_fsync
        self._made_here = re.compile(rf"{re.escape(node.region)}-[0-9]+-{re.escape(node.gate)}-[0-9]+")
        """Job ids that this node makes; a caller who brought one could meet a job made later."""
        self._watched: tuple[int, float] | None = None
        """LSN and time of one record on its way, a sample of how long they take: watching each would cost more."""
        self._entering_bytes = 0
        """Bytes of requests that are being entered in turns, wholly, for which room is kept."""
        self._chained_survives = SURVIVES[: SURVIVES.index(postgres_survives) + 1]

    # --- requests ---------------------------------------------------------------------------------

    async def submit(self, draft: Draft, *, key: RequestKey | None) -> Receipt:
        """Take one event and wait for its level.

        Raises:
            JobNotFoundError, JobEndedError: the event is about no job, or one known to have ended.
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
            await self._check_jobs((draft,), in_lines=False)
            pending, fence_token = self._enter_one(draft, None)
            return await self._finish(pending, draft, fence_token)
        async with self._keyed.begin((draft.tenant_id,), key, draft.durability) as (request, seen):
            if not seen and request.recovered:
                request.entered(request.recovered[0])
                seen = True
            if not seen and not request.chained:
                await self._check_jobs((draft,), in_lines=False)
                line_key = record.IdempotencyKey(key.route, key.key, 0, key.body_digest)
                pending, fence_token = self._enter_one(draft, line_key)
                request.entered(pending)
        if request.chained:
            return await self._chained_receipt(request.chained, draft, key)
        entered = request.pending
        assert entered is not None
        try:
            receipt = await self._finish(entered, draft, fence_token_of(entered.payload))
        except DuplicateLineError:
            return await self._chained_receipt(await self._keyed.find((draft.tenant_id,), key), draft, key)
        return receipt._replace(replayed=seen)

    async def submit_lines(
        self, drafts: Sequence[Draft], *, durability: Durability | None, key: RequestKey | None
    ) -> BatchReceipt:
        """Take all events of one request, or none, and wait until the last has reached the level.

        ``durability`` is the level asked for the whole request; without it the highest default of the
        lines counts.

        Raises:
            InvalidEventError: a line is about no job, or one known to have ended; nothing was taken.
            EventRefusedError: the first line in whose place a REFUSED entry was chained; the others are chained.
            IdempotencyReusedError, RequestTooLargeError, WalFullError, WalPoisonedError, FencedError,
            DatabaseWentBackError, ChainDamagedError, HeldBackError, DurabilityTimeoutError: as ``submit``.
        """
        requested = durability if durability is not None else max(draft.durability for draft in drafts)
        if key is None:
            await self._check_jobs(drafts, in_lines=True)
            entered = await self._enter_lines(drafts, None, frozenset(), requested)
            await self._wait(entered[-1].lsn, requested, entered[-1])
            if requested > Durability.LOCAL:
                self._quarantine.check_chained(entered)
            _raise_refusal(entered)
            return self._batch_receipt(drafts, entered, requested)
        return await self._submit_keyed_lines(drafts, requested, key)

    async def _submit_keyed_lines(
        self, drafts: Sequence[Draft], requested: Durability, key: RequestKey
    ) -> BatchReceipt:
        """Add the lines that are missing, then answer from what is chained: the same answer each time."""
        tenants = tuple(sorted({draft.tenant_id for draft in drafts}))
        added = False
        async with self._keyed.begin(tenants, key, requested) as (request, seen):
            present = request.present()
            if not seen and len(present) < len(drafts):
                await check_lines(request.chained, drafts, key)
                if not present:
                    await self._check_jobs(drafts, in_lines=True)
                line_key = key._replace(body_digest=request.body_digest)
                entered = await self._enter_lines(drafts, line_key, present, requested)
                if not present:
                    request.receipt = self._batch_receipt(drafts, entered, requested)
                request.entered(entered[-1])
                added = True
            elif not seen and request.recovered:
                request.entered(max(request.recovered, key=lambda pending: pending.lsn))
        if request.last_lsn:
            answered_early = requested <= Durability.LOCAL and request.receipt is not None
            await self._wait(request.last_lsn, requested if answered_early else Durability.GLOBAL, request.pending)
            if answered_early and request.receipt is not None:
                return request.receipt._replace(replayed=seen)
        chained = await self._keyed.find(tenants, key)
        if len(chained) < len(drafts):
            for tenant_id in tenants:
                self._quarantine.check(tenant_id)
        if not chained:
            raise gone(tenants[0], key)
        if not added:
            await check_lines(chained, drafts, key)
        for line in chained:
            if line.action == SystemAction.REFUSED:
                raise _refused(line).at_line(line.line + 1)
        last = max(chained, key=lambda line: line.lsn)
        return BatchReceipt(
            accepted=len(drafts),
            requested=requested,
            achieved=self._achieved(requested),
            survives=self._survives(requested),
            first_hlc=chained[0].t_hlc,
            last_hlc=chained[-1].t_hlc,
            job_ids=[line.job_id for line in chained if drafts[line.line].event.name == _CREATED],
            epoch=last.epoch,
            last_lsn=last.lsn,
            replayed=not added,
        )

    def recover(self, pending: Pending) -> None:
        """Learn from a record that the WAL holds beyond the chain, as when it was entered."""
        self._tenants.update((pending.tenant_id, tenant_begun_by(pending) or pending.tenant_id))
        event = EVENTS_BY_ACTION.get(ACTIONS[pending.record_type])
        if event is not None:
            fence_token = fence_token_of(pending.payload)
            self._jobs.learn(pending.tenant_id, pending.job_id, fence_token, event.name in _ENDS)

    def chained(self, linked: LinkedBatch) -> None:
        """Learn which jobs have ended by what was chained, such as a cancellation that all have acknowledged."""
        for tenant_id, job_id in linked.refused_jobs:
            self._jobs.reopen(tenant_id, job_id)
        for (tenant_id, job_id), state in linked.job_states.items():
            if jobs.is_ended(jobs.status(state)):
                self._jobs.learn(tenant_id, job_id, state.fence, True)

    def became_durable(self, lsn: int) -> float | None:
        """Seconds from queueing until durable of the one record being watched, once ``lsn`` has reached it."""
        if self._watched is None or self._watched[0] > lsn:
            return None
        queued_s, self._watched = self._watched[1], None
        return time.perf_counter() - queued_s

    async def record_system(self, action: SystemAction, subject: str, facts: dict[str, object]) -> Place:
        """Write an entry of ``_system`` about ``subject`` and wait until it is chained.

        Raises:
            ChainDamagedError: the chain of ``_system`` takes none.
        """
        self._quarantine.check(SYSTEM_TENANT)
        self._backlog.reserve(1)
        try:
            pending = self._enter_system(action, subject, facts)
        finally:
            self._backlog.release(1)
        pending.outcome = asyncio.get_running_loop().create_future()
        return await pending.outcome

    async def begin_tenant(self, tenant_id: str) -> None:
        """Let a tenant begin without an event of its own; on return its chain has a head."""
        if tenant_id in self._tenants:
            await self._node.chained.wait(self._wal.next_lsn - 1, self._write_timeout_s)
            return
        with contextlib.suppress(DuplicateLineError, EventRefusedError):
            await self.record_system(SystemAction.TENANT_CREATED, f"tenant:{tenant_id}", {"tenant_id": tenant_id})
        self._tenants.add(tenant_id)

    def imported(self, growth: Growth) -> None:
        """Learn which of the jobs that this node knows have ended by what was imported."""
        for (tenant_id, job_id), state in growth.job_states.items():
            if self._jobs.get(tenant_id, job_id) is not None:
                self._jobs.learn(tenant_id, job_id, state.fence, jobs.is_ended(jobs.status(state)))

    async def record_once(self, tenant_id: str, action: SystemAction, name: str, facts: dict[str, object]) -> Place:
        """Write the entry about ``name`` that the tenant's chain has once, whichever nodes try, and wait for it.

        Raises:
            DuplicateLineError: the chain has it already.
            ChainDamagedError, HeldBackError: as ``submit``.
            DurabilityTimeoutError: not chained in time; it may still be.
            WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError: as ``submit``.
        """
        self._refuse_unfit((tenant_id,))
        room = 1 + (tenant_id not in self._tenants)
        self._backlog.reserve(room)
        try:
            self._begin_tenant(tenant_id)
            digest = hashlib.sha256(canonical.encode(facts)).digest()
            key = record.IdempotencyKey(LEDGER_ROUTE, f"{action}:{name}", 0, digest)
            pending = self._enter_system(action, name, facts, tenant_id, key)
        finally:
            self._backlog.release(room)
        pending.outcome = asyncio.get_running_loop().create_future()
        return await self._outcome(pending.outcome, shared=True)

    # --- checks -----------------------------------------------------------------------------------

    async def _check_jobs(self, drafts: Sequence[Draft], *, in_lines: bool) -> None:
        """Refuse events about jobs that do not exist or have ended; jobs created earlier in the request exist."""
        created: set[tuple[str, str]] = set()
        unknown: dict[tuple[str, str], int] = {}
        for number, draft in enumerate(drafts):
            if draft.job_id is None:
                continue
            job = (draft.tenant_id, draft.job_id)
            if draft.event.name == _CREATED and self._made_here.fullmatch(draft.job_id) is not None:
                raise _taken(draft.job_id, number, in_lines)
            known = self._jobs.get(*job)
            if known is not None and known.ended:
                raise _ended(draft.job_id, number, in_lines)
            if draft.event.name == _CREATED:
                created.add(job)
            elif known is None and job not in created:
                unknown.setdefault(job, number)
        if not unknown:
            return
        found = await self._find_jobs(list(unknown))
        for job, number in unknown.items():
            if job not in found:
                raise _not_found(job, number, in_lines)
            fence_token, ended = found[job]
            if ended:
                raise _ended(job[1], number, in_lines)
            self._jobs.learn(*job, fence_token, ended)

    # --- entering: the one synchronous step -------------------------------------------------------

    def _refuse_unfit(self, tenant_ids: Iterable[str]) -> None:
        """A fenced or failed node takes nothing, even while its WAL would still have it, and nobody takes anything
        for a tenant whose chain is damaged; a new tenant is also an entry of ``_system``."""
        if self._node.failure is not None:
            raise self._node.failure.with_traceback(None)
        if not self._quarantine:
            return
        for tenant_id in tenant_ids:
            self._quarantine.check(tenant_id)
            if tenant_id not in self._tenants:
                self._quarantine.check(SYSTEM_TENANT)

    def _enter_one(self, draft: Draft, key: record.IdempotencyKey | None) -> tuple[Pending, int]:
        self._refuse_unfit((draft.tenant_id,))
        fence_token, payload, facts = self._payload(draft)
        room = 1 + (draft.tenant_id not in self._tenants)
        self._backlog.reserve(room)
        try:
            self._check_bytes(room, len(payload))
            answered_early = draft.durability <= Durability.LOCAL
            (pending,) = self._enter(((draft, fence_token, payload, facts, key),), answered_early)
        finally:
            self._backlog.release(room)
        if key is not None or not answered_early:
            pending.outcome = asyncio.get_running_loop().create_future()
        return pending, fence_token

    async def _enter_lines(
        self, drafts: Sequence[Draft], key: RequestKey | None, present: frozenset[int], requested: Durability
    ) -> list[Pending]:
        self._refuse_unfit({draft.tenant_id for draft in drafts})
        room = len(drafts) - len(present) + len({draft.tenant_id for draft in drafts} - self._tenants)
        self._backlog.reserve(room)
        entered: list[Pending] = []
        entering_bytes = 0
        answered_early = requested <= Durability.LOCAL
        try:
            payloads = []
            fences: dict[tuple[str, str], int] = {}
            for number, draft in enumerate(drafts):
                if number % LINES_PER_TURN == LINES_PER_TURN - 1:
                    await asyncio.sleep(0)
                payloads.append(self._payload(draft, fences, number))
            entering_bytes = self._check_bytes(room, sum(len(payload) for _, payload, _ in payloads))
            self._entering_bytes += entering_bytes
            lines = [number for number in range(len(drafts)) if number not in present]
            for first in range(0, len(lines), LINES_PER_TURN):
                if first:
                    await asyncio.sleep(0)
                turn = lines[first : first + LINES_PER_TURN]
                keys = [key and record.IdempotencyKey(key.route, key.key, number, key.body_digest) for number in turn]
                events = [
                    (drafts[number], *payloads[number], line_key) for number, line_key in zip(turn, keys, strict=True)
                ]
                entered += self._enter(events, answered_early)
        finally:
            self._backlog.release(room)
            self._entering_bytes -= entering_bytes
        return entered

    def _check_bytes(self, records: int, payload_bytes: int) -> int:
        """Most bytes of these records, for which there is room beside all that is being entered in turns.

        Raises:
            RequestTooLargeError: there never is.
            WalFullError, WalPoisonedError: there is none.
        """
        record_bytes = payload_bytes + records * BYTES_AROUND_PAYLOAD
        self._backlog.check_bytes(record_bytes, self._entering_bytes)
        self._wal.check_room(records, record_bytes, self._entering_bytes)
        return record_bytes

    def _payload(
        self, draft: Draft, fences: dict[tuple[str, str], int] | None = None, number: int | None = None
    ) -> tuple[int, bytes, Facts]:
        """Fence token, canonical payload and what it encodes; ``fences`` carries what earlier lines of the request
        chose."""
        tenant_id, job_id, event, fields, fence_token, _, _, seal = draft
        job = (tenant_id, job_id or "")
        if fence_token is None:
            known = self._jobs.get(*job)
            fence_token = known.fence_token if known is not None else FIRST_FENCE_TOKEN
            if fences is not None:
                fence_token = max(fence_token, fences.get(job, 0))
        if fences is not None and job_id is not None:
            fences[job] = fence_token
        facts = {"type": event.name, "fence_token": fence_token, **fields}
        payload = canonical.encode(facts) if seal is None else _sealed(draft, fence_token, "")
        if len(payload) > self._record_bytes_max - 1024:
            reason = f"the event takes {len(payload)} bytes; wal.record_bytes_max is {self._record_bytes_max}"
            raise RecordTooLargeError(reason) if number is None else InvalidEventError(reason, number + 1)
        return fence_token, payload, facts if seal is None and len(payload) <= FACTS_KEPT_BYTES_MAX else None

    def _enter(
        self, events: Sequence[tuple[Draft, int, bytes, Facts, record.IdempotencyKey | None]], answered_early: bool
    ) -> list[Pending]:
        """Draw HLC and LSN together and queue the records: WAL order is HLC order.

        Each event is a draft with its fence token, canonical payload, what that encodes, and key. All are queued, or
        none.
        """
        node, tick, wall_ms = self._node, self._node.clock.tick, time.time_ns() // 1_000_000
        epoch, lsn = node.epoch, self._wal.next_lsn
        entered: list[Pending] = []
        queued: list[Pending] = []
        records: list[tuple[Hlc, int, bytes]] = []
        begun: set[str] = set()
        keeps_facts = len(self._backlog) < FACTS_KEPT_ENTRIES_MAX
        for draft, fence_token, payload, facts, key in events:
            tenant_id, job_id, event = draft[:3]
            if tenant_id not in self._tenants and tenant_id not in begun:
                begun.add(tenant_id)
                named: dict[str, object] = {"tenant_id": tenant_id}
                beginning = self._system_event(SystemAction.TENANT_CREATED, f"tenant:{tenant_id}", named, lsn)
                queued.append(beginning)
                records.append(_record_of(beginning))
                lsn += 1
            hlc = tick(wall_ms)
            if job_id is None:
                job_id = f"{node.region}-{hlc.physical_ms}-{node.gate}-{hlc.logical:05d}"
            if draft.seal is not None:
                payload = _sealed(draft, fence_token, hlc.text())
            kept = facts if keeps_facts else None
            kind = event.record_type
            pending = Pending(lsn, epoch, hlc, kind, tenant_id, job_id, payload, key, None, answered_early, kept)
            entered.append(pending)
            queued.append(pending)
            records.append((hlc, kind, record.encode(pending)))
            lsn += 1
        first_lsn = self._wal.append_all(records)
        assert first_lsn == queued[0].lsn
        self._backlog.add(queued)
        self._tenants |= begun
        for pending, (draft, fence_token, *_) in zip(entered, events, strict=True):
            self._jobs.learn(pending.tenant_id, pending.job_id, fence_token, draft.event.name in _ENDS)
        if self._watched is None:
            self._watched = (entered[-1].lsn, time.perf_counter())
        return entered

    def _begin_tenant(self, tenant_id: str) -> None:
        if tenant_id not in self._tenants:
            self._enter_system(SystemAction.TENANT_CREATED, f"tenant:{tenant_id}", {"tenant_id": tenant_id})
            self._tenants.add(tenant_id)

    def _enter_system(
        self,
        action: SystemAction,
        subject: str,
        facts: dict[str, object],
        tenant_id: str = SYSTEM_TENANT,
        key: record.IdempotencyKey | None = None,
    ) -> Pending:
        pending = self._system_event(action, subject, facts, self._wal.next_lsn, tenant_id, key)
        self._wal.append_all((_record_of(pending),))
        self._backlog.add((pending,))
        return pending

    def _system_event(
        self,
        action: SystemAction,
        subject: str,
        facts: dict[str, object],
        lsn: int,
        tenant_id: str = SYSTEM_TENANT,
        key: record.IdempotencyKey | None = None,
    ) -> Pending:
        payload = canonical.encode({"type": action.value, **facts})
        hlc = self._node.clock.tick(time.time_ns() // 1_000_000)
        return Pending(lsn, self._node.epoch, hlc, _TYPE_OF_ACTION[action], tenant_id, subject, payload, key, None)

    # --- waiting and answering --------------------------------------------------------------------

    async def _wait(
        self, lsn: int, level: Durability, pending: Pending | None, outcome: asyncio.Future[Place] | None = None
    ) -> Place | None:
        """Wait until ``lsn`` has reached ``level``; the chain position when its ``outcome`` was waited for.

        ``pending`` is the event that a timeout names.
        """
        node = self._node
        try:
            if level <= Durability.LOCAL:
                if not self._acknowledge_before_fsync:
                    await node.durable.wait(lsn, self._write_timeout_s)
                return None
            if outcome is None:
                await node.chained.wait(lsn, self._write_timeout_s)
                return None
            return await self._outcome(outcome, shared=pending is None or pending.idempotency is not None)
        except DurabilityTimeoutError as error:
            achieved = Durability.LOCAL if node.durable.lsn >= lsn else Durability.NONE
            raise DurabilityTimeoutError(
                f"{level.name} was not reached: {error}. The event is in the log of this node at LSN {lsn}; "
                "send the same Idempotency-Key again to learn its outcome",
                job_id=pending.job_id if pending else None,
                hlc=pending.hlc.text() if pending else None,
                epoch=node.epoch,
                lsn=lsn,
                achieved=achieved,
            ) from None

    async def _outcome(self, outcome: asyncio.Future[Place], *, shared: bool) -> Place:
        """The outcome within ``write.timeout``; a shared one, which others of the same key await, outlives that."""
        message = f"not chained within {self._write_timeout_s:g} s"
        if shared:
            done, _ = await asyncio.wait((outcome,), timeout=self._write_timeout_s)
            if not done:
                raise DurabilityTimeoutError(message)
            return outcome.result()
        timer = asyncio.get_running_loop().call_later(self._write_timeout_s, expire, outcome, message)
        try:
            return await outcome
        finally:
            timer.cancel()

    async def _finish(self, pending: Pending, draft: Draft, fence_token: int) -> Receipt:
        level = draft.durability
        chain = await self._wait(pending.lsn, level, pending, pending.outcome)
        return Receipt(
            job_id=pending.job_id,
            tenant_id=pending.tenant_id,
            event=draft.event,
            hlc=pending.hlc.text(),
            epoch=pending.epoch,
            lsn=pending.lsn,
            fence_token=fence_token,
            requested=level,
            achieved=self._achieved(level),
            survives=self._survives(level),
            chain=chain,
            replayed=False,
        )

    async def _chained_receipt(self, chained: Sequence[ChainedLine], draft: Draft, key: RequestKey) -> Receipt:
        """The first answer again, from what the chain holds."""
        if not chained:
            raise gone(draft.tenant_id, key)
        await check_lines(chained, (draft,), key)
        line = chained[0]
        if line.action == SystemAction.REFUSED:
            raise _refused(line)
        level = draft.durability
        chain = Place(line.seq, line.chain_link, line.prev_chain_link)
        return Receipt(
            job_id=line.job_id,
            tenant_id=line.tenant_id,
            event=draft.event,
            hlc=line.t_hlc,
            epoch=line.epoch,
            lsn=line.lsn,
            fence_token=fence_token_of(line.payload),
            requested=level,
            achieved=self._achieved(level),
            survives=self._survives(level),
            chain=chain if level > Durability.LOCAL else None,
            replayed=True,
        )

    def _batch_receipt(
        self, drafts: Sequence[Draft], entered: Sequence[Pending], requested: Durability
    ) -> BatchReceipt:
        return BatchReceipt(
            accepted=len(drafts),
            requested=requested,
            achieved=self._achieved(requested),
            survives=self._survives(requested),
            first_hlc=entered[0].hlc.text(),
            last_hlc=entered[-1].hlc.text(),
            job_ids=[
                pending.job_id for pending, draft in zip(entered, drafts, strict=True) if draft.event.name == _CREATED
            ],
            epoch=entered[-1].epoch,
            last_lsn=entered[-1].lsn,
            replayed=False,
        )

    def _achieved(self, level: Durability) -> Durability:
        if level <= Durability.LOCAL:
            return Durability.NONE if self._acknowledge_before_fsync else Durability.LOCAL
        return level

    def _survives(self, level: Durability) -> tuple[str, ...]:
        if level <= Durability.LOCAL:
            return () if self._acknowledge_before_fsync else ("process",)
        return self._chained_survives


def _sealed(draft: Draft, fence_token: int, hlc: str) -> bytes:
    """The canonical payload, what is private in it sealed for an event of this HLC."""
    assert draft.seal is not None
    fields = draft.seal.seal(draft.fields, hlc)
    return canonical.encode({"type": draft.event.name, "fence_token": fence_token, **fields})


def _record_of(pending: Pending) -> tuple[Hlc, int, bytes]:
    """The event as the WAL takes it."""
    return pending.hlc, pending.record_type, record.encode(pending)


def fence_token_of(payload: bytes | str) -> int:
    """The fence token frozen in a canonical payload; 0 where the event was refused and its place taken."""
    fence_token: int = orjson.loads(payload).get("fence_token", 0)
    return fence_token


def _refused(line: ChainedLine) -> EventRefusedError:
    """What was said, or could not be said yet, when ``line`` was chained as REFUSED."""
    return event_refused(orjson.loads(line.payload).get("sqlstate"), line.seq, line.t_hlc, line.epoch, line.lsn)


def _raise_refusal(entered: Sequence[Pending]) -> None:
    """Raise the refusal of the first line, if any, in whose place a REFUSED entry was chained."""
    for number, pending in enumerate(entered, 1):
        if isinstance(pending.refusal, EventRefusedError):
            raise pending.refusal.at_line(number)


def _not_found(job: tuple[str, str], number: int, in_lines: bool) -> LedgerError:
    reason = f"tenant {job[0]} has no job {job[1]}; create it first"
    return InvalidEventError(reason, number + 1) if in_lines else JobNotFoundError(reason)


def _taken(job_id: str, number: int, in_lines: bool) -> LedgerError:
    reason = f"job_id: {job_id} is of the form of the ids that this node makes; leave it out, or choose another"
    return InvalidEventError(reason, number + 1, ("job_id",)) if in_lines else InvalidInputError(reason, ("job_id",))


def _ended(job_id: str, number: int, in_lines: bool) -> LedgerError:
    reason = f"job {job_id} has ended and takes no more events"
    return InvalidEventError(reason, number + 1) if in_lines else JobEndedError(reason)

"""From a validated request to the WAL, and on to the requested level of durability.

One request, in order::

    0. what a caller signed is checked, in threads                              (app.write.intake.caller_signatures)
    1. a keyed request is looked up: seen before, under way here, or new       (app.write.intake.keyed)
    2. an event about a job: the job must exist and must not be known to have ended
    3. the payload becomes canonical bytes, once
    4. room is reserved for all its records, or it is refused as a whole
    5. in one synchronous step each record draws its HLC and LSN and is queued
    6. the answer waits for the level: durable for LOCAL, chained above that   (app.write.intake.answers);
       if safekeepers vote, REGIONAL without a key waits only until it is committed

A caller MUST NOT assume that an event with a Receipt of level LOCAL is chained, nor that an event is lost after
DurabilityTimeoutError: it is in the WAL and may still be chained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TypeVar

from app.runtime.sharing import LINES_PER_TURN, TURN_S, FairTurns
from app.runtime.state.node import Node
from app.store.appended import AppendedEntries
from app.store.chaining import LOG_COLUMNS
from app.store.jobs.table import JobKey
from app.write.intake.answers import Answers, Awaited, Checked, Entered, Running, fence_token_of, raise_refusal, refused
from app.write.intake.caller_signatures import CallerSignatures
from app.write.intake.coalescing import WriteCoalescer
from app.write.intake.job_checks import HomeRegions, JobChecks, JobIndex, JobLookup
from app.write.intake.keyed import KeyedRequest, KeyedRequests
from app.write.intake.system_entries import SystemEntries, record_of
from app.write.pending.backlog import (
    Backlog,
    Pending,
    record_bytes_of,
)
from app.write.pending.keyed_entries import check_lines, gone
from app.write.pending.linking import DuplicateLineError, LinkedBatch, tenant_begun_by
from app.write.pending.quarantine import Quarantine
from app.write.pending.requests import (
    CREATED,
    BatchReceipt,
    Draft,
    EventLines,
    JobOfLine,
    Receipt,
    RequestKey,
    creation_in,
    creation_of,
    line_key,
    payload_of,
)
from ledger.chain import record
from ledger.errors import (
    IdempotencyReusedError,
    InvalidEventError,
    RecordTooLargeError,
)
from ledger.facts.events import ACTIONS, EVENTS_BY_ACTION, JOB_EVENTS, Durability, Part, SystemAction
from ledger.machines import jobs
from ledger.positions import BEFORE_FIRST, Lsn, lsns_from
from ledger.signed_events import MEMBER

FIRST_FENCE_TOKEN = 1
"""Fence of a job that was created without one."""

_ENDS = frozenset(event.record_type for event in JOB_EVENTS.values() if event.part is Part.END)
_LASTING = _ENDS | {CREATED}
"""Types of events that each change the known facts of their job."""
_REPEATED = (DuplicateLineError, IdempotencyReusedError)
_TENANT, _JOB = (LOG_COLUMNS.index(name) for name in ("tenant_id", "job_id"))


Value = TypeVar("Value")


@dataclass(kw_only=True, eq=False)
class Submitter:
    """Takes events. Belongs to one event loop; only this, ``SystemEntries`` and ``Returning`` draw positions."""

    node: Node
    wal: WriteCoalescer
    backlog: Backlog
    keyed: KeyedRequests
    quarantine: Quarantine
    job_index: JobIndex
    find_jobs: JobLookup
    system: SystemEntries
    answers: Answers
    record_bytes_max: int
    line_turns: FairTurns
    homes: HomeRegions
    signatures: CallerSignatures

    def __post_init__(self) -> None:
        self._tenants = self.system.tenants
        self._checks = JobChecks(self.node, self.job_index, self.find_jobs, self.homes)
        self._watched: tuple[int, float] | None = None
        """LSN and queueing time of one sampled record: to time each record would cost more."""

    # --- requests ---------------------------------------------------------------------------------

    async def submit(self, draft: Draft, *, key: RequestKey | None, takes_early: bool = True) -> Receipt:
        """Take one event and wait for its level. ``takes_early`` is for a cancellation, as in ``JobChecks.check``.

        Raises:
            JobNotFoundError, JobEndedError: the event's job does not exist, or is known to have ended.
            OtherRegionError: ``exchange.foreign_jobs`` sends events of the job to the ledger of its region.
            JobExistsError: the job is known to have been created with another spec.
            InvalidInputError: the id of the job to create is one that only this node may make.
            ChainDamagedError: the tenant's chain is damaged; nothing was taken.
            HeldBackError: the chain was found damaged afterwards; the event stays in the WAL.
            IdempotencyReusedError: the key was used with another body.
            ProblemError: its caller did not sign it so, or must sign it.
            EventRefusedError: Postgres would not hold the event; a REFUSED entry was chained in its place.
            RequestTooLargeError: it never fits; nothing was taken.
            WalFullError: no room now; nothing was taken.
            WalPoisonedError, FencedError, DatabaseWentBackError: the node has failed, perhaps after it took the event.
                Whether the event will be chained is not known.
            DurabilityTimeoutError: taken, but the level was not reached in time.
        """
        if MEMBER in draft.fields:
            signed = await self.signatures.check(draft, key)
            if key is None:
                return await self._submit_once(draft, signed, takes_early)
            key = signed
        else:
            self.signatures.refuse_unsigned(draft)
        if key is None:
            await self._check(draft, takes_early)
            return await self._entered(draft).settled()
        async with self.keyed.begin((draft.tenant_id,), key, draft.durability) as (request, seen):
            if not seen and request.recovered:
                request.entered(request.recovered[0])
                seen = True
            if not seen and not request.chained:
                await self.keyed.look_again(request, [(draft.tenant_id, 0)], key)
            if not seen and not request.chained:
                await self._check(draft, takes_early)
                request.entered(self._enter_one(draft, line_key(key, 0))[0])
        if request.chained:
            return await self.answers.again(request.chained, draft, key)
        entered = request.pending
        assert entered is not None
        try:
            receipt = await self.answers.finish(draft, entered, fence_token_of(entered.payload), seen=seen)
        except DuplicateLineError:
            return await self.answers.again(await self.keyed.find((draft.tenant_id,), key), draft, key)
        return receipt._replace(replayed=seen)

    async def _submit_once(self, draft: Draft, key: RequestKey, takes_early: bool) -> Receipt:
        """Take a signed event under its own key, without a look at earlier ones: the appender finds them."""
        await self._check(draft, takes_early)
        if self.answers.is_early(draft.durability, keyed=True):
            return await self._entered(draft, line_key(key, 0)).settled()
        entered, fence_token = self._enter_one(draft, line_key(key, 0))
        try:
            return await self.answers.finish(draft, entered, fence_token, seen=False)
        except DuplicateLineError:
            return await self.answers.again(await self.keyed.find((draft.tenant_id,), key), draft, key)

    async def _check(self, draft: Draft, takes_early: bool) -> None:
        await self._checks.check(EventLines.of((draft,)), draft.durability, in_lines=False, takes_early=takes_early)

    def enter_known(self, draft: Draft) -> Entered[Receipt] | None:
        """As ``submit`` of an event without a key, up to its answer. None, and nothing taken, if its job must first be
        read from the store. A signed event is taken once its signature is checked.

        Raises:
            as ``submit``: nothing was taken.
        """
        if MEMBER in draft.fields:
            return self._enter_signed(draft)
        self.signatures.refuse_unsigned(draft)
        return self._entered(draft) if self._checks.is_known(draft) else None

    def _enter_signed(self, draft: Draft) -> Entered[Receipt]:
        if not self.answers.is_early(draft.durability, keyed=True) or not self._checks.is_known(draft):
            return Running(asyncio.ensure_future(self.submit(draft, key=None)))
        prepared, checked = self.signatures.prepare(draft, None), Checked[Receipt]()

        def enter(made: bool) -> Awaited[Receipt]:
            prepared.refuse_unless(made)
            self.node.check_writable()
            return self._entered(draft, line_key(prepared.key, 0))

        self.signatures.begin(prepared, lambda made: checked.settle(partial(enter, made)))
        return checked

    def _entered(self, draft: Draft, once: record.IdempotencyKey | None = None) -> Awaited[Receipt]:
        """``once`` is the key of an event that is answered before it is chained; the appender finds an earlier one."""
        pending, fence_token = self._enter_one(draft, once, is_once=once is not None)
        make = partial(self.answers.receipt, draft, pending, pending.hlc.text(), fence_token)
        return Awaited(self.answers, pending, draft.durability, make)

    async def submit_lines(
        self,
        lines: EventLines,
        *,
        durability: Durability | None,
        key: RequestKey | None,
        once: RequestKey | None = None,
    ) -> BatchReceipt:
        """Take all events of one request, or none, and wait until the last has reached the level.

        ``durability`` is the level of the whole request; the default is the highest default of its lines. ``once`` is
        the key of signed lines without an Idempotency-Key: the appender finds what it has chained before.

        Raises:
            InvalidEventError: a line's job does not exist or is known to have ended, or it creates a job that is known
                to have been created with another spec; nothing was taken.
            OtherRegionError: as ``submit``.
            EventRefusedError: the first line in whose place a REFUSED entry was chained; the others are chained.
            IdempotencyReusedError, RequestTooLargeError, WalFullError, WalPoisonedError, FencedError,
            DatabaseWentBackError, ChainDamagedError, HeldBackError, DurabilityTimeoutError: as ``submit``.
        """
        requested = durability if durability is not None else lines.level
        if not lines.are_signed:
            self.signatures.refuse_unsigned_lines(lines)
        if key is None:
            await self._checks.check(lines, requested, in_lines=True)
            entered = await self._enter_lines(lines, once, frozenset(), requested)
            await self.answers.wait(entered[-1], requested, keyed=once is not None)
            if not self.answers.is_early(requested, keyed=once is not None):
                await self.answers.unlocked(self.quarantine, lines.tenants, entered[-1])
                await self.answers.spread(lines.tenants, requested, entered[-1])
                self.quarantine.check_chained(entered)
            if once is not None and any(isinstance(each.refusal, _REPEATED) for each in entered):
                return await self._submit_keyed_lines(lines, requested, once)
            raise_refusal(entered)
            return self.answers.of_lines(entered, requested)
        return await self._submit_keyed_lines(lines, requested, key)

    async def _submit_keyed_lines(self, lines: EventLines, requested: Durability, key: RequestKey) -> BatchReceipt:
        """Enter the missing lines, then answer from the chained entries: the same answer each time."""
        tenants = tuple(sorted(lines.tenants))
        async with self.keyed.begin(tenants, key, requested) as (request, seen):
            added = 0 if seen else await self._enter_missing(request, lines, requested, key)
        is_first = added == len(lines)
        if request.pending is not None:
            receipt = await self._reached(request, request.pending, tenants, requested, is_first=is_first)
            if receipt is not None:
                return receipt._replace(replayed=seen)
        chained = await self.keyed.find(tenants, key)
        for tenant_id in tenants if len(chained) < len(lines) else ():
            self.quarantine.check(tenant_id)
        if not chained:
            raise gone(tenants[0], key)
        await check_lines(chained, lines, key)
        for line in chained:
            if line.action == SystemAction.REFUSED:
                raise refused(line).at_line(line.line + 1)
        if not is_first:
            await self.answers.shown(chained, requested)
        return self.answers.of_chained_lines(chained, lines, requested, replayed=not added)

    async def _enter_missing(
        self, request: KeyedRequest, lines: EventLines, requested: Durability, key: RequestKey
    ) -> int:
        """Enter the lines that are neither in the chain nor in the WAL; returns how many."""
        present = request.present()
        if len(present) < len(lines):
            # If some lines are present, each is checked. If none is, the first line is enough.
            missing = [number for number in range(len(lines)) if number not in present] if present else [0]
            await self.keyed.look_again(request, [(lines.jobs[number][0], number) for number in missing], key)
            present = request.present()
        if len(present) == len(lines):
            if request.recovered:
                request.entered(max(request.recovered, key=lambda pending: pending.lsn))
            return 0
        await check_lines(request.chained, lines, key)
        if not present:
            await self._checks.check(lines, requested, in_lines=True)
        entered = await self._enter_lines(lines, key._replace(body_digest=request.body_digest), present, requested)
        if not present:
            request.receipt = self.answers.of_lines(entered, requested)
        request.entered(entered[-1])
        return len(entered)

    async def _reached(
        self, request: KeyedRequest, last: Pending, tenants: Sequence[str], requested: Durability, *, is_first: bool
    ) -> BatchReceipt | None:
        """Wait until the request has reached its level, or is chained if an earlier request entered it. Returns the
        answer if it is given before the request is chained."""
        answers = self.answers
        if requested <= Durability.LOCAL and request.receipt is not None:
            await answers.wait(last, requested, keyed=True)
            return request.receipt
        await answers.settled(request.recovered)
        await answers.wait(last, requested if is_first else Durability.REGIONAL, keyed=True)
        await answers.unlocked(self.quarantine, tenants, last)
        if is_first:
            await answers.spread(tenants, requested, last)
        return None

    def recover(self, pending: Pending) -> None:
        """Take up a record that the WAL holds beyond the chain, as when it was entered."""
        self._tenants.update((pending.tenant_id, tenant_begun_by(pending) or pending.tenant_id))
        event = EVENTS_BY_ACTION.get(ACTIONS[pending.record_type])
        if event is not None:
            fence_token = fence_token_of(pending.payload)
            creation = creation_in(pending.payload) if event.record_type == CREATED else None
            is_end = event.record_type in _ENDS
            self.job_index.entered(
                pending.tenant_id, pending.job_id, fence_token, pending.lsn, is_end=is_end, creation=creation
            )

    def chained(self, linked: LinkedBatch) -> None:
        """Forget the jobs of refused events; mark jobs that may have ended as doubtful."""
        for tenant_id, job_id in linked.refused_jobs:
            self.job_index.forget(tenant_id, job_id)
        self.job_index.mark_doubtful(linked.ended)

    def imported(self, appended: AppendedEntries) -> None:
        """Mark the jobs of imported entries as doubtful."""
        self.job_index.mark_doubtful((row[_TENANT], row[_JOB]) for row in appended.log_rows)

    def followed(self, states: Mapping[JobKey, jobs.JobState], covered_lsn: Mapping[str, Lsn]) -> None:
        """Update from the followed chain which known jobs have ended. ``states`` include the records of this node up to
        ``covered_lsn``, by tenant."""
        for (tenant_id, job_id), state in states.items():
            if self.job_index.get((tenant_id, job_id)) is not None:
                ended = jobs.ended_text(jobs.status(state), state.refused)
                upto_lsn = covered_lsn.get(tenant_id, BEFORE_FIRST)
                self.job_index.chained(tenant_id, job_id, state.fence, ended, state.last_seq, upto_lsn)

    def became_durable(self, lsn: Lsn) -> float | None:
        """Seconds from queueing until durable of the sampled record, once ``lsn`` has reached it."""
        if self._watched is None or self._watched[0] > lsn:
            return None
        queued_s, self._watched = self._watched[1], None
        return time.perf_counter() - queued_s

    # --- entering: the one synchronous step -------------------------------------------------------

    def _enter_one(
        self, draft: Draft, key: record.IdempotencyKey | None, *, is_once: bool = False
    ) -> tuple[Pending, int]:
        fence_token = draft.fence_token
        if fence_token is None:
            fence_token = self._fence_of((draft.tenant_id, draft.job_id))
        payload = payload_of(draft, fence_token, key)
        if (reason := self._too_large(payload)) is not None:
            raise RecordTooLargeError(reason)
        self.system.admit(draft.tenant_id, len(payload), draft.actor)
        answered_early = self.answers.is_early(draft.durability, keyed=key is not None)
        entering = _Entering(
            jobs=[(draft.tenant_id, draft.job_id)],
            types=[draft.event.record_type],
            fences=[fence_token],
            payloads=[payload],
            creations=[creation_of(draft)],
            keys=None if key is None else [key],
            sealed={} if draft.seal is None else {0: draft},
        )
        (pending,) = self._enter(entering, answered_early)
        if (key is not None and not is_once) or not answered_early:
            pending.outcome = asyncio.get_running_loop().create_future()
        return pending, fence_token

    async def _enter_lines(
        self, lines: EventLines, key: RequestKey | None, present: frozenset[int], requested: Durability
    ) -> list[Pending]:
        self.system.refuse_unfit(lines.tenants)
        room = len(lines) - len(present) + len(lines.tenants - self._tenants)
        self.backlog.check(room, 0, lines.tenants)
        fences, payloads = await self._encoded(lines, key)
        record_bytes = record_bytes_of(room, sum(map(len, payloads)))
        self.backlog.reserve(room, record_bytes, lines.tenants)
        answered_early = self.answers.is_early(requested, keyed=key is not None)
        entered: list[Pending] = []
        try:
            await self.line_turns.next(lines.actor)
            self.system.charge_new(lines.actor, len(lines.tenants - self._tenants))
            numbers = [number for number in range(len(lines)) if number not in present]
            for first in range(0, len(numbers), LINES_PER_TURN):
                if first:
                    await self.line_turns.next(lines.actor)
                turn = numbers[first : first + LINES_PER_TURN]
                entering = _Entering(
                    jobs=_at(lines.jobs, turn),
                    types=_at(lines.types, turn),
                    fences=_at(fences, turn),
                    payloads=_at(payloads, turn),
                    creations=_at(lines.creations, turn),
                    keys=None if key is None else [line_key(key, number) for number in turn],
                    sealed={
                        at: lines.drafts[number]
                        for at, number in enumerate(turn if lines.drafts else ())
                        if number in lines.drafts and lines.drafts[number].seal is not None
                    },
                )
                entered += self._enter(entering, answered_early)
        finally:
            self.backlog.release(room, record_bytes)
        return entered

    async def _encoded(self, lines: EventLines, key: RequestKey | None) -> tuple[list[int], list[bytes]]:
        """The fence token of each line, by default the highest known of its job; and its payload."""
        if lines.are_plain:
            return await self._encoded_plain(lines, key)
        fences: list[int] = []
        payloads: list[bytes] = []
        of_jobs: dict[JobOfLine, int] = {}
        turn_ends_s = 0.0
        for number, (job, fence) in enumerate(zip(lines.jobs, lines.fences, strict=True)):
            if number % LINES_PER_TURN == 0 or (number in lines.drafts and time.perf_counter() > turn_ends_s):
                await self.line_turns.next(lines.actor)
                turn_ends_s = time.perf_counter() + TURN_S
            if fence is None:
                fence = of_jobs.get(job)
                if fence is None:
                    fence = of_jobs[job] = self._fence_of(job)
            elif job[1] is not None:
                of_jobs[job] = max(fence, self._fence_of(job))
            fences.append(fence)
            payloads.append(lines.payload(number, fence, key))
            if (reason := self._too_large(payloads[-1])) is not None:
                raise InvalidEventError(reason, number + 1)
        return fences, payloads

    async def _encoded_plain(self, lines: EventLines, key: RequestKey | None) -> tuple[list[int], list[bytes]]:
        """``_encoded`` of lines that ``are_plain``."""
        fences: list[int] = []
        payloads: list[bytes] = []
        for first in range(0, len(lines), LINES_PER_TURN):
            await self.line_turns.next(lines.actor)
            here = range(first, min(first + LINES_PER_TURN, len(lines)))
            jobs, given = lines.jobs[here.start : here.stop], lines.fences[here.start : here.stop]
            known = {job: self._fence_of(job) for job in set(jobs)} if None in given else {}
            fences += [known[job] if fence is None else fence for job, fence in zip(jobs, given, strict=True)]
            payloads += lines.payloads(here, fences[first:], key)
        for number, payload in enumerate(payloads, 1) if self._too_large(max(payloads, key=len)) else ():
            if (reason := self._too_large(payload)) is not None:
                raise InvalidEventError(reason, number)
        return fences, payloads

    def _fence_of(self, job: JobOfLine) -> int:
        """The fence token of an event of this job that names none."""
        known = None if job[1] is None else self.job_index.get((job[0], job[1]))
        return FIRST_FENCE_TOKEN if known is None else known.fence_token

    def _too_large(self, payload: bytes) -> str | None:
        if len(payload) <= self.record_bytes_max - 1024:
            return None
        return f"the event takes {len(payload)} bytes; wal.record_bytes_max is {self.record_bytes_max}"

    def _enter(self, events: _Entering, answered_early: bool) -> list[Pending]:
        """Draw HLC and LSN together and queue the records: WAL order is HLC order. All are queued, or none."""
        node, wall_ms, first_lsn = self.node, self.node.wall.now_ms(), self.wal.next_lsn
        begun = [name for name in dict.fromkeys([job[0] for job in events.jobs]) if name not in self._tenants]
        beginnings = [
            self.system.event(SystemAction.TENANT_CREATED, f"tenant:{name}", {"tenant_id": name}, Lsn(first_lsn + at))
            for at, name in enumerate(begun)
        ]
        hlcs = node.clock.draw(wall_ms, len(events.jobs))
        tenant_ids = [tenant_id for tenant_id, _ in events.jobs]
        job_ids = [
            job_id or f"{node.region}-{hlc.physical_ms}-{node.gate}-{hlc.logical:05d}"
            for (_, job_id), hlc in zip(events.jobs, hlcs, strict=True)
        ]
        keys: Sequence[record.IdempotencyKey | None] = events.keys or [None] * len(hlcs)
        for at, draft in events.sealed.items():
            events.payloads[at] = payload_of(draft, events.fences[at], keys[at], hlcs[at].text())
        lsns, epochs, early = lsns_from(Lsn(first_lsn + len(begun))), repeat(node.epoch), repeat(answered_early)
        columns = (hlcs, events.types, tenant_ids, job_ids, events.payloads, keys)
        entered = list(map(Pending, lsns, epochs, *columns, repeat(None), early))
        assert len(entered) == len(hlcs)
        if events.keys is None:
            encoded = record.encode_plain(tenant_ids, job_ids, events.payloads)
        else:
            encoded = record.encode_keyed(tenant_ids, job_ids, events.payloads, events.keys, answered_early)
        records = [*map(record_of, beginnings), *zip(hlcs, events.types, encoded, strict=True)]
        if len(records) > 1:
            queued_lsn = self.wal.append_all(records)
        elif answered_early:
            queued_lsn = self.wal.append_until_durable(records[0])
        else:
            queued_lsn = self.wal.append_until_chained(records[0])
        assert queued_lsn == first_lsn
        self.backlog.add([*beginnings, *entered])
        self._tenants.update(begun)
        self._learn(events, entered)
        if self._watched is None:
            self._watched = (entered[-1].lsn, time.perf_counter())
        return entered

    def _learn(self, events: _Entering, entered: Sequence[Pending]) -> None:
        """Add the jobs of the entered events to the index. A line that repeats the one before it is skipped."""
        last: dict[JobOfLine, int] = {}
        for job, kind, fence, creation, pending in zip(
            events.jobs, events.types, events.fences, events.creations, entered, strict=True
        ):
            if kind in _LASTING or last.get(job) != fence:
                last[job] = fence
                is_end = kind in _ENDS
                self.job_index.entered(job[0], pending.job_id, fence, pending.lsn, is_end=is_end, creation=creation)


@dataclass(slots=True, kw_only=True)
class _Entering:
    """Columns of events that are entered together."""

    jobs: Sequence[JobOfLine]
    types: Sequence[int]
    fences: Sequence[int]
    payloads: list[bytes]
    """For sealed events, whose bytes depend on their HLC, other bytes of the same length."""
    creations: Sequence[str | None]
    keys: Sequence[record.IdempotencyKey] | None
    sealed: Mapping[int, Draft]
    """Events with a seal, by index."""


def _at(column: list[Value], numbers: Sequence[int]) -> list[Value]:
    """The values of these lines; ``numbers`` rise."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return column[numbers[0] : numbers[-1] + 1]
    return [column[number] for number in numbers]

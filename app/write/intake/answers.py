"""From an entered event to the answer: waiting for the requested level, and the receipts.

A receipt is made from the event as it was entered, or from its entry in the chain; both give the same receipt. Its
claims rest on evidence gathered during its own request. For a first answer, its records reached their positions. For a
repeated answer, members and regions report now that they hold the records (``evidence.py``, decision 0068).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import orjson

from app.runtime.state.node import Node, expire
from app.store.appended import ChainPosition
from app.store.idempotency import ChainedLine
from app.write.intake.evidence import InRegions, MemberCopies, extents_of, not_shown
from app.write.pending.backlog import Pending
from app.write.pending.keyed_entries import check_lines, gone
from app.write.pending.linking import event_refused
from app.write.pending.quarantine import Quarantine
from app.write.pending.requests import CREATED, BatchReceipt, Draft, EventLines, Receipt, RequestKey
from ledger.errors import COPIES_REMOVED, NO_QUORUM, DurabilityTimeoutError, EventRefusedError
from ledger.facts.events import ACTIONS, Durability, SystemAction
from ledger.positions import BEFORE_FIRST, Lsn

SURVIVES = ("process", "node", "region")

Answered = TypeVar("Answered")


class NoQuorum(NamedTuple):
    """Too few safekeepers follow: the reason, and the addresses of the missing ones."""

    why: str
    members_away: Sequence[str]


class Awaited(Generic[Answered]):
    """An entry in the WAL, and the level to wait for. ``reached`` resolves at that level, or when its time is up. The
    entry MUST NOT be acknowledged before that."""

    __slots__ = ("_answers", "_level", "_make", "pending", "reached")

    def __init__(
        self, answers: Answers, pending: Pending, level: Durability, make: Callable[[ChainPosition | None], Answered]
    ) -> None:
        """``make`` makes the answer. It gets the position in the chain, None if the level does not wait for that."""
        self._answers = answers
        self._level = level
        self._make = make
        self.pending = pending
        self.reached = answers.reached(pending, level)

    async def settled(self) -> Answered:
        """``answer``, once ``reached`` is done."""
        await asyncio.wait((self.reached,))
        return self.answer()

    def answer(self) -> Answered:
        """The answer, when ``reached`` is done.

        Raises:
            DurabilityTimeoutError: the level was not reached in time.
            LedgerError: its outcome, where that is none.
        """
        try:
            return self._make(self.reached.result())
        except DurabilityTimeoutError as error:
            if error.job_id is not None:
                raise  # `wait` names the event already
            raise self._answers.late(self._level, str(error), self.pending) from None


class Running(Generic[Answered]):
    """A request that runs in a task, to be awaited like ``Awaited``."""

    __slots__ = ("reached",)

    def __init__(self, task: asyncio.Future[Answered]) -> None:
        self.reached = task

    def answer(self) -> Answered:
        """The answer, when ``reached`` is done; errors are those of the task."""
        return self.reached.result()


class Checked(Generic[Answered]):
    """A request that is entered once it has been checked."""

    __slots__ = ("_entered", "reached")

    def __init__(self) -> None:
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._entered: Awaited[Answered] | None = None

    def settle(self, enter: Callable[[], Awaited[Answered]]) -> None:
        """Enter the request; what that raises is its answer."""
        try:
            self._entered = enter()
            self._entered.reached.add_done_callback(self._settled)
        except Exception as error:
            self.reached.set_exception(error)

    def _settled(self, _: object) -> None:
        if not self.reached.done():
            self.reached.set_result(None)

    def answer(self) -> Answered:
        """The answer, when ``reached`` is done; errors as ``Awaited.answer``, or why it was not entered."""
        self.reached.result()
        assert self._entered is not None
        return self._entered.answer()


Entered = Checked[Answered] | Awaited[Answered] | Running[Answered]
"""A request that will be answered once ``reached`` is done."""


class Deadlines:
    """Fails futures that are not done in time."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[Any], Lsn] = {}
        """The LSN of the record that each future is about."""

    def add(self, future: asyncio.Future[Any], lsn: Lsn, timeout_s: float) -> None:
        """Fail ``future``, about the record at ``lsn``, after ``timeout_s``."""
        timer = future.get_loop().call_later(timeout_s, expire, future, f"not chained within {timeout_s:g} s")
        self._waiting[future] = lsn
        future.add_done_callback(partial(self._done, timer))

    def _done(self, timer: asyncio.TimerHandle, future: asyncio.Future[Any]) -> None:
        timer.cancel()
        del self._waiting[future]

    def give_up_above(self, lsn: Lsn, message: str) -> None:
        """Fail now the futures of records above ``lsn``."""
        for future in [future for future, of_lsn in self._waiting.items() if of_lsn > lsn]:
            expire(future, message)


class Answers:
    """Waits and answers as this node is configured to."""

    def __init__(
        self,
        *,
        node: Node,
        write_timeout_s: float,
        acknowledge_before_fsync: bool,
        postgres_survives: str,
        quorum_survives: str | None = None,
        spreads: bool = False,
        copies: MemberCopies | None = None,
        no_quorum: Callable[[], NoQuorum | None] = lambda: None,
        in_regions: InRegions | None = None,
        has_other_regions: Callable[[], bool] = lambda: True,
        head_seq: Callable[[str], int] = lambda _: 0,
        holds_lease: Callable[[], bool] = lambda: True,
    ) -> None:
        """``quorum_survives`` names the failures that a record on the safekeepers survives, None if none vote. With
        ``spreads`` GLOBAL also needs a majority of the regions. ``copies`` asks the voting safekeepers; ``no_quorum``
        reports whether too few of them follow now. ``in_regions`` is None if GLOBAL needs no importing regions;
        ``has_other_regions`` reports whether any is left that is not retired. ``head_seq`` is the seq at which this
        node left the chain of a tenant. ``holds_lease`` reports whether no other process can write this node's log now;
        the durable position rises only while it does, or up to what a quorum holds."""
        self._node = node
        self._write_timeout_s = write_timeout_s
        self._unchained = Deadlines()
        self._acknowledge_before_fsync = acknowledge_before_fsync
        self._is_replicated = quorum_survives is not None
        self._no_quorum = no_quorum
        self._is_quorum_lost = False
        """Whether ``quorum_lost`` was called; ``no_quorum`` reports whether the quorum is still lost."""
        self._in_regions = in_regions
        self._has_other_regions = has_other_regions
        self._head_seq = head_seq
        self._holds_lease = holds_lease
        self._spreads = spreads
        of_quorum = SURVIVES.index(quorum_survives) if quorum_survives is not None else 0
        of_chain = max(SURVIVES.index(postgres_survives), of_quorum)
        # Without other regions GLOBAL means chained. That is enough if PostgreSQL survives as much as a quorum does.
        self._chain_is_enough = not spreads and SURVIVES.index(postgres_survives) >= of_quorum
        self._copies = copies
        self._asking: set[asyncio.Timeout] = set()
        """Waits for evidence."""
        is_everywhere = spreads or in_regions is not None
        of_local = (Durability.NONE, ()) if acknowledge_before_fsync else (Durability.LOCAL, SURVIVES[:1])
        self._claims: Mapping[Durability, tuple[Durability, tuple[str, ...]]] = {
            Durability.NONE: of_local,
            Durability.LOCAL: of_local,
            Durability.REGIONAL: (
                Durability.REGIONAL,
                SURVIVES[: (of_quorum if self._is_replicated else of_chain) + 1],
            ),
            Durability.GLOBAL: (Durability.GLOBAL, SURVIVES if is_everywhere else SURVIVES[: of_chain + 1]),
        }
        """By level, what an answer says: the achieved level, and the failures that the event survives."""
        self._alone = Durability.GLOBAL, SURVIVES if spreads else SURVIVES[: of_chain + 1]
        """The same for GLOBAL, while no other region is left."""

    def _claim(self, level: Durability) -> tuple[Durability, tuple[str, ...]]:
        if level is Durability.GLOBAL and not self._has_other_regions():
            return self._alone
        return self._claims[level]

    def is_early(self, level: Durability, *, keyed: bool = False) -> bool:
        """Whether an event of this level is answered before it is chained. LOCAL is; so is REGIONAL without a key if
        safekeepers vote. Whether a keyed event is the first of its key is known only once it is chained."""
        return level <= Durability.LOCAL or (level is Durability.REGIONAL and self._is_replicated and not keyed)

    async def wait(
        self,
        pending: Pending,
        level: Durability,
        outcome: asyncio.Future[ChainPosition] | None = None,
        *,
        keyed: bool = False,
    ) -> ChainPosition | None:
        """Wait until the event and all before it have reached ``level``; returns the chain position if it waited for
        the ``outcome``. ``keyed`` as in ``is_early``."""
        node, lsn = self._node, pending.lsn
        try:
            if level <= Durability.LOCAL:
                if not self._acknowledge_before_fsync:
                    await self._local(lsn)
                return None
            is_early = outcome is None and self.is_early(level, keyed=keyed)
            if not is_early:
                node.chained.want(lsn)
            left_s = await self._committed(lsn)
            if is_early:
                return None
            position = None
            if outcome is None:
                await node.chained.reached(lsn, left_s)
            else:
                position = await outcome_within(outcome, left_s)
            if self._spreads and level is Durability.GLOBAL:
                await node.spread.reached(lsn, self._write_timeout_s)
            if self._in_regions is not None and level is Durability.GLOBAL and position is not None:
                await self._in_regions({pending.tenant_id: position.seq}, self._write_timeout_s)
            return position
        except DurabilityTimeoutError as error:
            raise self.late(level, str(error), pending) from None

    async def _local(self, lsn: Lsn) -> None:
        """Wait until ``lsn`` is durable, and a quorum holds it if it was durable before this request and the lease has
        expired since."""
        node = self._node
        was_durable = node.durable.lsn >= lsn
        await node.durable.reached(lsn, self._write_timeout_s)
        if was_durable and not self._holds_lease():
            if node.committed.lsn < lsn and (away := self._away()) is not None:
                raise DurabilityTimeoutError(away.why)
            await node.committed.reached(lsn, self._write_timeout_s)

    async def _committed(self, lsn: Lsn) -> float:
        """Wait until ``lsn`` is committed, if safekeepers vote; returns the seconds left of ``write.timeout``.

        Raises:
            DurabilityTimeoutError: it is not in time. Without a quorum this is raised once it is durable here.
        """
        node, timeout_s = self._node, self._write_timeout_s
        if not self._is_replicated:
            return timeout_s
        began_s = time.monotonic()
        if node.committed.lsn < lsn and (away := self._away()) is not None:
            if self._holds_lease():
                await node.durable.reached(lsn, timeout_s)
            raise DurabilityTimeoutError(away.why)
        await node.committed.reached(lsn, timeout_s)
        return max(0.0, timeout_s - (time.monotonic() - began_s))

    def _away(self) -> NoQuorum | None:
        """Why nothing is committed, None if not known."""
        if not self._is_quorum_lost:
            return None
        away = self._no_quorum()
        self._is_quorum_lost = away is not None
        return away

    def quorum_lost(self) -> None:
        """There was no quorum for a while. Requests that wait for one are answered now. Until there is one again, later
        requests are answered once their records are durable here."""
        self._is_quorum_lost = True
        if (away := self._away()) is not None:
            self._node.committed.give_up(away.why)
            if not self._holds_lease():
                self._node.durable.give_up(away.why)
            self._unchained.give_up_above(self._node.committed.lsn, away.why)

    def lease_expired(self) -> None:
        """Records became durable and the lease has expired. Their requests wait for a quorum; without one for a while
        they are answered now."""
        if (away := self._away()) is not None:
            self._node.durable.give_up(away.why)

    def give_up(self) -> None:
        """End all waits for evidence of other members and regions."""
        for limit in self._asking:
            limit.reschedule(asyncio.get_running_loop().time())

    async def settled(self, recovered: Sequence[Pending]) -> None:
        """Wait for the outcome of each of these records, which an earlier process left in the WAL."""
        outcomes = [pending.outcome for pending in recovered if pending.outcome is not None]
        _, waiting = await asyncio.wait(outcomes, timeout=self._write_timeout_s) if outcomes else ((), ())
        if waiting:
            raise self.late(Durability.GLOBAL, f"not chained within {self._write_timeout_s:g} s", recovered[-1])

    async def unlocked(self, quarantine: Quarantine, tenant_ids: Iterable[str], last: Pending) -> None:
        """Return once none of these tenants is passed over any more. Their records are chained then.

        Raises:
            DurabilityTimeoutError: one still waits; names ``last``.
        """
        if not await quarantine.waited(tenant_ids, self._write_timeout_s):
            reasons = (quarantine.waiting[each] for each in tenant_ids if each in quarantine.waiting)
            raise self.late(Durability.GLOBAL, next(reasons, "it had to wait"), last, tenant_ids)

    async def spread(self, tenant_ids: Iterable[str], level: Durability, last: Pending) -> None:
        """Return once a majority of the regions holds the chains of these tenants, if GLOBAL requires that.

        Raises:
            DurabilityTimeoutError: they do not in time; names ``last``.
        """
        if self._in_regions is None or level is not Durability.GLOBAL:
            return
        heads = {tenant_id: self._head_seq(tenant_id) for tenant_id in tenant_ids}
        try:
            await self._in_regions(heads, self._write_timeout_s)
        except DurabilityTimeoutError as error:
            raise self.late(level, str(error), last, heads) from None

    async def shown(self, lines: Sequence[ChainedLine], level: Durability) -> None:
        """Return once evidence shows that these chained lines have reached ``level``. Without a quorum members are
        asked only once.

        Raises:
            DurabilityTimeoutError: it is not in time; names the last line, and the confirmed level.
            WalPoisonedError, FencedError, DatabaseWentBackError: the node has failed meanwhile.
        """
        is_global = level is Durability.GLOBAL
        in_regions = self._in_regions if is_global else None
        copies = None if is_global and self._chain_is_enough else self._copies
        if level > Durability.LOCAL and (in_regions is not None or copies is not None):
            await self._show(lines, level, copies, in_regions)
        if level > Durability.LOCAL and self._node.failure is not None:
            raise self._node.failure.with_traceback(None)

    async def _show(
        self, lines: Sequence[ChainedLine], level: Durability, copies: MemberCopies | None, in_regions: InRegions | None
    ) -> None:
        stretches, seqs = await extents_of(lines)
        last = max(lines, key=lambda line: line.lsn)
        loop, has_quorum = asyncio.get_running_loop(), self._away() is None
        ends_s = loop.time() + self._write_timeout_s
        achieved = Durability.REGIONAL if copies is None else Durability.LOCAL
        try:
            async with asyncio.timeout(None) as limit:
                self._asking.add(limit)
                if copies is not None:
                    try:
                        await copies.hold(
                            stretches,
                            in_regions=self._spreads and level is Durability.GLOBAL,
                            timeout_s=self._write_timeout_s,
                            is_once=not has_quorum,
                        )
                    except DurabilityTimeoutError as error:
                        # If the chain alone is enough for GLOBAL, it is for REGIONAL.
                        if error.reason != COPIES_REMOVED or not self._chain_is_enough:
                            raise
                achieved, has_quorum = Durability.REGIONAL, True
                if in_regions is not None:
                    await in_regions(seqs, ends_s - loop.time())
        except TimeoutError:
            raise not_shown(level, DurabilityTimeoutError("the service stops"), last, achieved) from None
        except DurabilityTimeoutError as error:
            raise not_shown(level, error, last, achieved, has_quorum=has_quorum) from None
        finally:
            self._asking.discard(limit)

    def late(
        self, level: Durability, why: str, pending: Pending, tenant_ids: Iterable[str] = ()
    ) -> DurabilityTimeoutError:
        """The error that reports the level an event has reached, and how to learn its outcome. ``tenant_ids`` are the
        tenants of all events of its request, if there are more than its own."""
        node, lsn = self._node, pending.lsn
        away = self._no_quorum() if self._is_replicated and node.committed.lsn < lsn else None
        why = why if away is None else away.why
        if level <= Durability.LOCAL and not self._holds_lease():
            why = f"the lease on the log of this node has expired, so another process may write it; {why}"
        return DurabilityTimeoutError(
            f"{level.name} was not reached: {why}. The event is in the log of this node "
            f"at LSN {lsn}; send the same Idempotency-Key again to learn its outcome",
            job_id=pending.job_id,
            hlc=pending.hlc.text(),
            epoch=pending.epoch,
            lsn=lsn,
            achieved=self._reached(lsn, {*tenant_ids, pending.tenant_id}),
            reason=None if away is None else NO_QUORUM,
            members_away=None if away is None else away.members_away,
        )

    def _reached(self, lsn: Lsn, tenant_ids: Iterable[str]) -> Durability:
        """The level that a record of these tenants at ``lsn`` has reached; one that is held back is not chained."""
        node = self._node
        if lsn <= (node.committed.lsn if self._is_replicated else min(map(node.chained_lsn_of, tenant_ids))):
            return Durability.REGIONAL
        return Durability.LOCAL if node.durable.lsn >= lsn and self._holds_lease() else Durability.NONE

    def reached(self, pending: Pending, level: Durability) -> asyncio.Future[ChainPosition | None]:
        """A future that resolves once ``pending`` is at ``level``, or its time is up."""
        node, outcome = self._node, pending.outcome
        asks_regions = (self._spreads or self._in_regions is not None) and level is Durability.GLOBAL
        if asks_regions or (self._is_quorum_lost and level > Durability.LOCAL):
            return asyncio.ensure_future(self.wait(pending, level, outcome))
        if outcome is None:
            lsn = BEFORE_FIRST if self._acknowledge_before_fsync else pending.lsn
            watermark = node.durable if level <= Durability.LOCAL else node.committed
            return watermark.reached(lsn, self._write_timeout_s)  # type: ignore[return-value]
        node.chained.want(pending.lsn)
        self._unchained.add(outcome, pending.lsn, self._write_timeout_s)
        return outcome  # type: ignore[return-value]

    async def finish(self, draft: Draft, pending: Pending, fence_token: int, *, seen: bool) -> Receipt:
        """The receipt of a keyed event, once it has reached its level. If it was ``seen`` before this request, evidence
        must show that it has.

        Raises:
            DurabilityTimeoutError: it has not in time.
            LedgerError: its outcome, where that is none.
        """
        level = draft.durability
        chain = await self.wait(pending, min(level, Durability.REGIONAL) if seen else level, pending.outcome)
        if seen and chain is not None:
            await self.shown((_line_at(pending, chain),), level)
        return self.receipt(draft, pending, pending.hlc.text(), fence_token, chain)

    async def again(self, chained: Sequence[ChainedLine], draft: Draft, key: RequestKey) -> Receipt:
        """The first answer again, from what the chain holds, once its level is shown.

        Raises:
            EventRefusedError: a REFUSED entry was chained in its place.
            ChainDamagedError: the entry in the chain is not the event of this request, or is gone.
            DurabilityTimeoutError: its level is not shown in time.
        """
        if not chained:
            raise gone(draft.tenant_id, key)
        await check_lines(chained, (draft,), key)
        line = chained[0]
        if line.action == SystemAction.REFUSED:
            raise refused(line)
        await self.shown(chained, draft.durability)
        is_chained = draft.durability > Durability.LOCAL
        chain = ChainPosition(line.seq, line.chain_link, line.prev_chain_link) if is_chained else None
        return self.receipt(draft, line, line.t_hlc, fence_token_of(line.payload), chain, replayed=True)

    def of_lines(self, entered: Sequence[Pending], requested: Durability) -> BatchReceipt:
        """The answer to a request all of whose lines were entered now."""
        job_ids = [pending.job_id for pending in entered if pending.record_type == CREATED]
        return BatchReceipt(
            len(entered),
            requested,
            *self._claim(requested),
            entered[0].hlc.text(),
            entered[-1].hlc.text(),
            job_ids,
            entered[-1].epoch,
            entered[0].lsn,
            entered[-1].lsn,
            replayed=False,
        )

    def of_chained_lines(
        self, chained: Sequence[ChainedLine], lines: EventLines, requested: Durability, *, replayed: bool
    ) -> BatchReceipt:
        """The answer to a request all of whose lines are chained, in line order."""
        job_ids = [line.job_id for line in chained if lines.types[line.line] == CREATED]
        last = max(chained, key=lambda line: line.lsn)
        return BatchReceipt(
            len(lines),
            requested,
            *self._claim(requested),
            chained[0].t_hlc,
            chained[-1].t_hlc,
            job_ids,
            last.epoch,
            min(line.lsn for line in chained),
            last.lsn,
            replayed=replayed,
        )

    def receipt(
        self,
        draft: Draft,
        at: Pending | ChainedLine,
        hlc: str,
        fence_token: int,
        chain: ChainPosition | None,
        *,
        replayed: bool = False,
    ) -> Receipt:
        """The answer about an event that has reached its level, from what was entered or is chained."""
        return Receipt(
            at.job_id,
            at.tenant_id,
            draft.event,
            hlc,
            at.epoch,
            at.lsn,
            fence_token,
            draft.durability,
            *self._claim(draft.durability),
            chain,
            replayed,
        )


def _line_at(pending: Pending, chain: ChainPosition) -> ChainedLine:
    """The one line of a keyed request, as this process has seen it chained."""
    key = pending.idempotency
    assert key is not None
    return ChainedLine(
        pending.tenant_id,
        key.line,
        key.body_digest,
        chain.seq,
        pending.epoch,
        pending.lsn,
        pending.hlc.text(),
        pending.job_id,
        ACTIONS[pending.record_type],
        pending.payload.decode(),
        chain.chain_link,
        chain.prev_chain_link,
    )


async def outcome_within(outcome: asyncio.Future[ChainPosition], timeout_s: float) -> ChainPosition:
    """The outcome within ``timeout_s``. The future is not cancelled: other requests of the same key await it too."""
    done, _ = await asyncio.wait((outcome,), timeout=timeout_s)
    if not done:
        raise DurabilityTimeoutError(f"not chained within {timeout_s:g} s")
    return outcome.result()


def fence_token_of(payload: bytes | str) -> int:
    """The fence token frozen in a canonical payload; 0 if a REFUSED entry took the event's place."""
    return cast("int", orjson.loads(payload).get("fence_token", 0))


def refused(line: ChainedLine) -> EventRefusedError:
    """The error for ``line``, which was chained as REFUSED."""
    return event_refused(orjson.loads(line.payload).get("sqlstate"), line.seq, line.t_hlc, line.epoch, line.lsn)


def raise_refusal(entered: Sequence[Pending]) -> None:
    """Raise the refusal of the first line, if any, in whose place a REFUSED entry was chained."""
    for number, pending in enumerate(entered, 1):
        if isinstance(pending.refusal, EventRefusedError):
            raise pending.refusal.at_line(number)

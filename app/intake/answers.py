"""From an entered event to the answer: waiting for the level it asked for, and the receipts.

A receipt is made from the event as it was entered, or from what the chain holds of it; both give the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import orjson

from app.node.state import Node, expire
from app.pending.backlog import Pending
from app.pending.keyed_entry import check_lines, gone
from app.pending.linking import event_refused
from app.pending.quarantine import Quarantine
from app.pending.requests import BatchReceipt, Draft, Receipt, RequestKey
from app.store.growth import ChainPosition
from app.store.idempotency import ChainedLine
from ledger.errors import DurabilityTimeoutError, EventRefusedError
from ledger.machines.events import Durability, SystemAction

_CREATED = "JobCreated"
SURVIVES = ("process", "node", "region")


class Answers:
    """Waits and answers as this node is configured to."""

    def __init__(
        self, *, node: Node, write_timeout_s: float, acknowledge_before_fsync: bool, postgres_survives: str
    ) -> None:
        self._node = node
        self._write_timeout_s = write_timeout_s
        self._acknowledge_before_fsync = acknowledge_before_fsync
        self._chained_survives = SURVIVES[: SURVIVES.index(postgres_survives) + 1]

    async def wait(
        self, lsn: int, level: Durability, pending: Pending | None, outcome: asyncio.Future[ChainPosition] | None = None
    ) -> ChainPosition | None:
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
            node.chained.want(lsn)
            shared = pending is None or pending.idempotency is not None
            return await outcome_within(outcome, self._write_timeout_s, shared=shared)
        except DurabilityTimeoutError as error:
            raise self._late(level, str(error), lsn, pending) from None

    async def unlocked(self, quarantine: Quarantine, tenant_ids: Iterable[str], last: Pending | None) -> None:
        """Return once none of these tenants waits for a lock: records of theirs were passed over when others were
        chained, and are chained by then.

        Raises:
            DurabilityTimeoutError: one still waits; names ``last``.
        """
        if not await quarantine.unlocked(tenant_ids, self._write_timeout_s):
            lsn = last.lsn if last else self._node.durable.lsn
            raise self._late(Durability.GLOBAL, "another session keeps rows of the tenant locked", lsn, last)

    def _late(self, level: Durability, why: str, lsn: int, pending: Pending | None) -> DurabilityTimeoutError:
        node = self._node
        return DurabilityTimeoutError(
            f"{level.name} was not reached: {why}. The event is in the log of this node at LSN {lsn}; "
            "send the same Idempotency-Key again to learn its outcome",
            job_id=pending.job_id if pending else None,
            hlc=pending.hlc.text() if pending else None,
            epoch=node.epoch,
            lsn=lsn,
            achieved=Durability.LOCAL if node.durable.lsn >= lsn else Durability.NONE,
        )

    async def finish(self, pending: Pending, draft: Draft, fence_token: int) -> Receipt:
        """The receipt of an entered event, once it has reached its level.

        Raises:
            DurabilityTimeoutError: it has not in time.
            LedgerError: its outcome, where that is none.
        """
        chain = await self.wait(pending.lsn, draft.durability, pending, pending.outcome)
        return self._receipt(draft, pending, pending.hlc.text(), fence_token, chain, replayed=False)

    async def again(self, chained: Sequence[ChainedLine], draft: Draft, key: RequestKey) -> Receipt:
        """The first answer again, from what the chain holds.

        Raises:
            EventRefusedError: a REFUSED entry was chained in its place.
            ChainDamagedError: what the chain holds is not the event of this request, or is gone.
        """
        if not chained:
            raise gone(draft.tenant_id, key)
        await check_lines(chained, (draft,), key)
        line = chained[0]
        if line.action == SystemAction.REFUSED:
            raise refused(line)
        is_chained = draft.durability > Durability.LOCAL
        chain = ChainPosition(line.seq, line.chain_link, line.prev_chain_link) if is_chained else None
        return self._receipt(draft, line, line.t_hlc, fence_token_of(line.payload), chain, replayed=True)

    def of_lines(self, entered: Sequence[Pending], drafts: Sequence[Draft], requested: Durability) -> BatchReceipt:
        """The answer to a request all of whose lines were entered now."""
        job_ids = [
            pending.job_id for pending, draft in zip(entered, drafts, strict=True) if draft.event.name == _CREATED
        ]
        first, last = entered[0], entered[-1]
        return self._batch_receipt(
            job_ids, len(drafts), first.hlc.text(), last.hlc.text(), last, requested, replayed=False
        )

    def of_chained_lines(
        self, chained: Sequence[ChainedLine], drafts: Sequence[Draft], requested: Durability, *, replayed: bool
    ) -> BatchReceipt:
        """The answer to a request all of whose lines are chained, in line order."""
        job_ids = [line.job_id for line in chained if drafts[line.line].event.name == _CREATED]
        last = max(chained, key=lambda line: line.lsn)
        return self._batch_receipt(
            job_ids, len(drafts), chained[0].t_hlc, chained[-1].t_hlc, last, requested, replayed=replayed
        )

    def _receipt(
        self,
        draft: Draft,
        at: Pending | ChainedLine,
        hlc: str,
        fence_token: int,
        chain: ChainPosition | None,
        *,
        replayed: bool,
    ) -> Receipt:
        level = draft.durability
        return Receipt(
            job_id=at.job_id,
            tenant_id=at.tenant_id,
            event=draft.event,
            hlc=hlc,
            epoch=at.epoch,
            lsn=at.lsn,
            fence_token=fence_token,
            requested=level,
            achieved=self._achieved(level),
            survives=self._survives(level),
            chain=chain,
            replayed=replayed,
        )

    def _batch_receipt(
        self,
        job_ids: list[str],
        accepted: int,
        first_hlc: str,
        last_hlc: str,
        last: Pending | ChainedLine,
        requested: Durability,
        *,
        replayed: bool,
    ) -> BatchReceipt:
        return BatchReceipt(
            accepted=accepted,
            requested=requested,
            achieved=self._achieved(requested),
            survives=self._survives(requested),
            first_hlc=first_hlc,
            last_hlc=last_hlc,
            job_ids=job_ids,
            epoch=last.epoch,
            last_lsn=last.lsn,
            replayed=replayed,
        )

    def _achieved(self, level: Durability) -> Durability:
        if level <= Durability.LOCAL:
            return Durability.NONE if self._acknowledge_before_fsync else Durability.LOCAL
        return level

    def _survives(self, level: Durability) -> tuple[str, ...]:
        if level <= Durability.LOCAL:
            return () if self._acknowledge_before_fsync else ("process",)
        return self._chained_survives


async def outcome_within(outcome: asyncio.Future[ChainPosition], timeout_s: float, *, shared: bool) -> ChainPosition:
    """The outcome within ``timeout_s``; a shared one, which others of the same key await, outlives that."""
    message = f"not chained within {timeout_s:g} s"
    if shared:
        done, _ = await asyncio.wait((outcome,), timeout=timeout_s)
        if not done:
            raise DurabilityTimeoutError(message)
        return outcome.result()
    timer = asyncio.get_running_loop().call_later(timeout_s, expire, outcome, message)
    try:
        return await outcome
    finally:
        timer.cancel()


def fence_token_of(payload: bytes | str) -> int:
    """The fence token frozen in a canonical payload; 0 where the event was refused and its place taken."""
    fence_token: int = orjson.loads(payload).get("fence_token", 0)
    return fence_token


def refused(line: ChainedLine) -> EventRefusedError:
    """What was said, or could not be said yet, when ``line`` was chained as REFUSED."""
    return event_refused(orjson.loads(line.payload).get("sqlstate"), line.seq, line.t_hlc, line.epoch, line.lsn)


def raise_refusal(entered: Sequence[Pending]) -> None:
    """Raise the refusal of the first line, if any, in whose place a REFUSED entry was chained."""
    for number, pending in enumerate(entered, 1):
        if isinstance(pending.refusal, EventRefusedError):
            raise pending.refusal.at_line(number)

"""What a repeated answer rests on: who says now that he holds what the first answer claimed.

A first answer waits until positions of its own records are reached. The records of a repeated one were chained earlier,
perhaps by another process or another node, and those who held them then may be dead, empty or restored from before. So
members of the quorum and regions are asked again, and what they do not say in time is not claimed (decision 0068).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from app.runtime.sharing import Turn
from app.store.idempotency import ChainedLine
from app.write.intake.member_copies import MemberCopies, Stretch
from ledger.errors import COPIES_REMOVED, NO_QUORUM, DurabilityTimeoutError
from ledger.facts.events import Durability
from ledger.positions import Epoch, Lsn

InRegions = Callable[[Mapping[str, int], float], Awaitable[None]]
"""Waits until a majority of regions has said, since it was called, that they imported the chains of tenants up to a seq
each."""


class Chained(NamedTuple):
    """An event that this process has seen chained, as far as it decides who else holds it."""

    tenant_id: str
    job_id: str
    t_hlc: str
    epoch: Epoch
    lsn: Lsn
    seq: int


AtChain: TypeAlias = ChainedLine | Chained
"""An event in the chain, as far as it decides who else holds it."""


class Evidence:
    """Asks members and regions. Belongs to one event loop.

    ``copies`` is None where no safekeeper votes; with ``spreads`` GLOBAL asks for a majority of their regions, and with
    ``chain_is_enough`` for none of them.
    """

    def __init__(self, copies: MemberCopies | None, *, spreads: bool, chain_is_enough: bool) -> None:
        self._copies = copies
        self._spreads = spreads
        self._chain_is_enough = chain_is_enough
        self._asking: set[asyncio.Timeout] = set()

    async def shown(
        self,
        lines: Sequence[AtChain],
        level: Durability,
        in_regions: InRegions | None,
        timeout_s: float,
        *,
        has_quorum: bool,
    ) -> None:
        """Return once it is shown that all these lines, which are chained, have reached ``level`` by now. Where it is
        known that there is no quorum, members are asked once alone.

        Raises:
            DurabilityTimeoutError: it is not in time; names the last line, and the level that is shown.
        """
        asks_regions = in_regions is not None and level is Durability.GLOBAL
        copies = None if level is Durability.GLOBAL and self._chain_is_enough else self._copies
        if level <= Durability.LOCAL or not (asks_regions or copies is not None):
            return
        stretches, seqs = await _extents(lines)
        last = max(lines, key=lambda line: line.lsn)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        achieved = Durability.REGIONAL if copies is None else Durability.LOCAL
        try:
            async with asyncio.timeout(None) as limit:
                self._asking.add(limit)
                if copies is not None:
                    is_spread = self._spreads and level is Durability.GLOBAL
                    try:
                        await copies.hold(stretches, in_regions=is_spread, timeout_s=timeout_s, is_once=not has_quorum)
                    except DurabilityTimeoutError as error:
                        # What GLOBAL claims on the word of the chain, REGIONAL may.
                        if error.reason != COPIES_REMOVED or not self._chain_is_enough:
                            raise _not_held(level, error, last, has_quorum=has_quorum) from None
                    achieved = Durability.REGIONAL
                if asks_regions and in_regions is not None:
                    try:
                        await in_regions(seqs, ends_s - loop.time())
                    except DurabilityTimeoutError as error:
                        raise _not_shown(level, str(error), last, achieved) from None
        except TimeoutError:
            raise _not_shown(level, "the service stops", last, achieved) from None
        finally:
            self._asking.discard(limit)

    def give_up(self) -> None:
        """Nobody is to wait any longer."""
        for limit in self._asking:
            limit.reschedule(asyncio.get_running_loop().time())


def _not_held(
    level: Durability, error: DurabilityTimeoutError, last: AtChain, *, has_quorum: bool
) -> DurabilityTimeoutError:
    """The answer where members do not show what ``error`` is about."""
    reason = error.reason if error.reason is not None or has_quorum else NO_QUORUM
    achieved = Durability.LOCAL if error.achieved is None else error.achieved
    return _not_shown(level, str(error), last, achieved, reason=reason, members_away=error.members_away)


def _not_shown(
    level: Durability,
    why: str,
    last: AtChain,
    achieved: Durability,
    *,
    reason: str | None = None,
    members_away: Sequence[str] | None = None,
) -> DurabilityTimeoutError:
    do = (
        "and stays there; the same Idempotency-Key is answered so again"
        if reason == COPIES_REMOVED
        else "send the same Idempotency-Key again once that is mended"
    )
    when = "any more" if reason == COPIES_REMOVED else "now"
    joined = " " if reason == COPIES_REMOVED else "; "
    return DurabilityTimeoutError(
        f"{level.name} cannot be shown {when}: {why}. The event is chained at seq {last.seq}{joined}{do}",
        job_id=last.job_id,
        hlc=last.t_hlc,
        epoch=last.epoch,
        lsn=last.lsn,
        achieved=achieved,
        reason=reason,
        members_away=members_away,
    )


async def _extents(lines: Sequence[AtChain]) -> tuple[list[Stretch], dict[str, int]]:
    """Where the lines lie: in the log of each node, and by tenant up to which seq."""
    stretches: dict[str, Stretch] = {}
    seqs: dict[str, int] = {}
    turn = Turn()
    for line in lines:
        if turn.is_over():
            await turn.pause()
        node_id = line.t_hlc.rpartition(":")[2]
        known = stretches.get(node_id) or Stretch(node_id, line.epoch, line.lsn, line.lsn)
        stretches[node_id] = Stretch(
            node_id, max(known.epoch, line.epoch), min(known.first_lsn, line.lsn), max(known.last_lsn, line.lsn)
        )
        seqs[line.tenant_id] = max(seqs.get(line.tenant_id, 0), line.seq)
    return list(stretches.values()), seqs

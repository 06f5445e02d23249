"""The evidence of a repeated answer: the safekeepers and regions that hold its records now.

A first answer waits until its own records have reached their positions. The records of a repeated answer were chained
earlier, perhaps by another process or another node. The members that held them then may be dead, empty or restored from
a backup. So members of the quorum and regions are asked again during the request. A level that they do not confirm in
time is not claimed (decision 0068).

A member is asked over one connection at a time; requests that arrive meanwhile share the next question. A chained
record was committed in its epoch. So a member holds this record, and no other at its LSN, if its log ends in that epoch
or a later one and reaches the record's LSN.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from app.runtime.sharing import in_turns
from app.runtime.tasks import attempts_within, in_own_thread
from app.store.idempotency import ChainedLine
from ledger.errors import (
    COPIES_REMOVED,
    NO_QUORUM,
    ConfigurationError,
    DurabilityTimeoutError,
    InvalidInputError,
)
from ledger.facts.events import Durability
from ledger.positions import Epoch, Lsn
from wal.replication import frames
from wal.replication.configuration import NO_MEMBERS, Configuration
from wal.replication.frames import ConnectionOverError
from wal.replication.messages import StatusReport, WalStatus
from wal.replication.tls import PeerTls

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0
"""Longest pause between two rounds of questions about records that are not confirmed yet."""
FAULTS = (OSError, EOFError, TimeoutError, InvalidInputError, ConfigurationError, ConnectionOverError)
"""Why a member does not report its logs."""

InRegions = Callable[[Mapping[str, int], float], Awaitable[None]]
"""Waits until a majority of regions has reported, since the call, that they imported each tenant's chain up to its
seq."""


class Stretch(NamedTuple):
    """Chained records of one node's log, from the first LSN to the last; ``epoch`` is the highest of them."""

    node_id: str
    epoch: Epoch
    first_lsn: Lsn
    last_lsn: Lsn

    def is_held_in(self, status: WalStatus) -> bool:
        """Whether the member that reports this log holds these records."""
        return (
            status.state == "open"
            and status.tail.epoch >= self.epoch
            and status.first_lsn <= self.first_lsn
            and self.last_lsn <= status.durable_lsn
        )


class Reports(NamedTuple):
    """What the members reported in one round."""

    logs: dict[str, Mapping[str, WalStatus]]
    """Logs by node, for the address of each member that answered."""
    faults: dict[str, str]
    """Why the other members did not answer, by address."""

    def of(self, stretch: Stretch) -> list[WalStatus]:
        """The log of ``stretch`` at each member that keeps it."""
        return [logs[stretch.node_id] for logs in self.logs.values() if stretch.node_id in logs]


class MemberCopies:
    """Asks the members that a node is configured with. Belongs to one event loop.

    ``regions`` are the regions that keep its log. With ``needs_all`` every member must hold a committed record. ``own``
    is the valid list of members for the log of ``node_id``, this node. Each answer is awaited for ``timeout_s``.
    """

    def __init__(
        self,
        addresses: Collection[str],
        *,
        node_id: str,
        own: Callable[[], Configuration],
        regions: frozenset[str],
        needs_all: bool,
        tls: PeerTls | None,
        timeout_s: float,
    ) -> None:
        self._addresses = tuple(addresses)
        self._node_id = node_id
        self._own = own
        self._regions = regions
        self._needs_all = needs_all
        self._status = partial(frames.status, tls=tls, timeout_s=timeout_s)
        self._asking: dict[str, asyncio.Future[StatusReport]] = {}
        """By address, the last question."""

    async def hold(self, stretches: Sequence[Stretch], *, in_regions: bool, timeout_s: float, is_once: bool) -> None:
        """Return once a majority of the voters of each log report that they hold its records. With ``in_regions`` a
        majority of the regions must, too. With ``is_once`` each member is asked only once.

        Raises:
            DurabilityTimeoutError: they do not in time; ``achieved`` is the level that they confirm. With ``reason``
                ``COPIES_REMOVED`` they never will.
        """
        ends_s = asyncio.get_running_loop().time() + timeout_s
        left, regional = list(stretches), set[Stretch]()
        for_s = 0.0 if is_once else timeout_s
        async for _ in attempts_within(for_s, pause_first_s=PAUSE_FIRST_S, pause_max_s=PAUSE_MAX_S):
            reports = await self._round(left, in_regions, ends_s)
            left = [each for each in left if not self._is_shown(each, reports, in_regions=in_regions)]
            if not left:
                return
            if any(self._is_removed(each, reports) for each in left):
                raise DurabilityTimeoutError(
                    "the safekeepers have removed it, since wal.retain is shorter than an Idempotency-Key is kept; "
                    "PostgreSQL alone holds it",
                    achieved=Durability.LOCAL,
                    reason=COPIES_REMOVED,
                )
            if in_regions:
                regional.update(each for each in left if self._is_shown(each, reports, in_regions=False))
        achieved = Durability.REGIONAL if regional.issuperset(left) else Durability.LOCAL
        raise self._late(left, reports, achieved, in_regions)

    def _late(
        self, left: Sequence[Stretch], reports: Reports, achieved: Durability, in_regions: bool
    ) -> DurabilityTimeoutError:
        faults = reports.faults | {
            address: "does not hold it"
            for address, logs in reports.logs.items()
            if any(each.node_id not in logs or not each.is_held_in(logs[each.node_id]) for each in left)
        }
        needed = "a majority of the regions" if in_regions else "enough safekeepers"
        away = [address for address in self._addresses if address in faults]
        members = "; ".join(f"{address}: {faults[address]}" for address in away)
        return DurabilityTimeoutError(
            f"nothing shows now that {needed} hold it; {members}", achieved=achieved, members_away=away
        )

    async def _round(self, stretches: Sequence[Stretch], in_regions: bool, ends_s: float) -> Reports:
        """Ask every member once; returns as soon as those that answered show that all is held."""
        reports = Reports({}, dict.fromkeys(self._addresses, "did not answer in time"))
        asked = {asyncio.create_task(self._ask(address)): address for address in self._addresses}
        waiting = set(asked)
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=ends_s - asyncio.get_running_loop().time(), return_when=asyncio.FIRST_COMPLETED
                )
                for each in done:
                    try:
                        reports.logs[asked[each]] = {log.node_id: log for log in each.result().wals}
                        del reports.faults[asked[each]]
                    except FAULTS as error:
                        reports.faults[asked[each]] = str(error) or type(error).__name__
                if not done or all(self._is_shown(each, reports, in_regions=in_regions) for each in stretches):
                    break
        finally:
            for each in waiting:
                each.cancel()
        return reports

    def _is_shown(self, stretch: Stretch, reports: Reports, *, in_regions: bool) -> bool:
        known = reports.of(stretch)
        if self._needs_all and len(known) < len(self._addresses):
            return False
        lists = [status.configuration for status in known]
        # In any majority a member knows the valid list of members. Of its own log the node knows it.
        if stretch.node_id == self._node_id:
            lists.append(self._own())
        elif len(reports.logs) <= len(self._addresses) // 2:
            return False
        counts = max(lists, key=lambda each: each.order, default=NO_MEMBERS)
        holding = frozenset(status.member_id for status in known if stretch.is_held_in(status))
        if not counts.has_majority(holding) or (self._needs_all and len(holding) < len(self._addresses)):
            return False
        names = self._regions | counts.regions | {counts.home} if in_regions else ()
        return not in_regions or sum(_has_majority(counts, name, holding) for name in names) > len(names) // 2

    def _is_removed(self, stretch: Stretch, reports: Reports) -> bool:
        """Whether the logs of a majority of the members begin after its first record: that does not change."""
        return (
            sum(each.state == "open" and each.first_lsn > stretch.first_lsn for each in reports.of(stretch))
            > len(self._addresses) // 2
        )

    async def _ask(self, address: str) -> StatusReport:
        """The state of the member and its logs, at a moment after the call.

        Raises:
            one of ``FAULTS``: it does not report it.
        """
        if (earlier := self._asking.get(address)) is not None and not earlier.done():
            await asyncio.wait((earlier,))
        if (asking := self._asking.get(address)) is earlier or asking is None:
            host, _, port = address.rpartition(":")
            asking = self._asking[address] = in_own_thread(
                partial(self._status, host.strip("[]"), int(port)), "member-copies"
            )
        return await asyncio.shield(asking)


def _has_majority(counts: Configuration, region: str, holding: frozenset[str]) -> bool:
    if region == counts.home:
        return counts.has_majority(holding)
    members = counts.of_region(region)
    return len(members & holding) > len(members) // 2


def not_shown(
    level: Durability,
    why: DurabilityTimeoutError,
    last: ChainedLine,
    achieved: Durability,
    *,
    has_quorum: bool = True,
) -> DurabilityTimeoutError:
    """The error for chained records that nothing shows to be at ``level``; names the last line."""
    if why.reason == COPIES_REMOVED:
        when, do = "any more", " and stays there; the same Idempotency-Key is answered so again"
    else:
        when, do = "now", "; send the same Idempotency-Key again once that is mended"
    return DurabilityTimeoutError(
        f"{level.name} cannot be shown {when}: {why}. The event is chained at seq {last.seq}{do}",
        job_id=last.job_id,
        hlc=last.t_hlc,
        epoch=last.epoch,
        lsn=last.lsn,
        achieved=achieved if why.achieved is None else why.achieved,
        reason=why.reason if why.reason is not None or has_quorum else NO_QUORUM,
        members_away=why.members_away,
    )


async def extents_of(lines: Sequence[ChainedLine]) -> tuple[list[Stretch], dict[str, int]]:
    """The records of the lines in the log of each node, and the highest seq of each tenant."""
    stretches: dict[str, Stretch] = {}
    seqs: dict[str, int] = {}
    async for line in in_turns(lines):
        node_id = line.t_hlc.rpartition(":")[2]
        known = stretches.get(node_id) or Stretch(node_id, line.epoch, line.lsn, line.lsn)
        stretches[node_id] = Stretch(
            node_id, max(known.epoch, line.epoch), min(known.first_lsn, line.lsn), max(known.last_lsn, line.lsn)
        )
        seqs[line.tenant_id] = max(seqs.get(line.tenant_id, 0), line.seq)
    return list(stretches.values()), seqs

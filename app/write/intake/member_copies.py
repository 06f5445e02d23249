"""Which safekeepers hold a record of a log now, by their own word, given while the request that needs it is under way.

What a node once heard from its members says nothing of a moment later: a member may have died, or have lost its disk.
So an answer that repeats an earlier one rests on what the members say when it is given. One member is asked over one
connection at a time for each log; requests that arrive while it is asked share the next one.

A record was chained, hence committed in its epoch: a member whose log ends in that epoch or a later one, and reaches
over the record's LSN, holds this record and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ledger.errors import COPIES_REMOVED, ConfigurationError, DurabilityTimeoutError, InvalidInputError
from ledger.facts.events import Durability
from ledger.positions import Epoch, Lsn
from wal.replication.configuration import NO_MEMBERS, Configuration
from wal.replication.frames import OWN_BYTES
from wal.replication.messages import (
    PREFIX_BYTES,
    Frame,
    Status,
    StatusReport,
    WalStatus,
    decode,
    encode,
    length_of,
)
from wal.replication.tls import PeerTls

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0
"""Between two rounds of questions about records that are not shown yet."""
FAULTS = (OSError, EOFError, TimeoutError, InvalidInputError, ConfigurationError)
"""Why a member does not say how a log stands."""


class Stretch(NamedTuple):
    """Records of one node's log that were chained, from the first LSN to the last, none of a later epoch."""

    node_id: str
    epoch: Epoch
    first_lsn: Lsn
    last_lsn: Lsn


class Answered(NamedTuple):
    """What the members at these addresses said of one log; None of one that keeps none."""

    statuses: Mapping[str, WalStatus | None]
    faults: Mapping[str, str]
    """Why the others did not answer."""


class MemberCopies:
    """Asks the members that a node is configured with. Belongs to one event loop.

    ``regions`` are those that keep its log; ``needs_all``: every member must hold what is committed. ``own`` is the
    list of members that counts for the log of ``node_id``, this node's own.
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
        self._tls = tls
        self._timeout_s = timeout_s
        self._asking: dict[tuple[str, str], asyncio.Task[WalStatus | None]] = {}
        """By address and node, the question that was put last."""

    async def hold(self, stretches: Sequence[Stretch], *, in_regions: bool, timeout_s: float, is_once: bool) -> None:
        """Return once a majority of the voters of each log say that they hold its records; with ``in_regions``, once a
        majority of the regions do as well. With ``is_once`` each member is asked once alone.

        Raises:
            DurabilityTimeoutError: they do not say so in time; ``achieved`` is what they do. With ``reason``
                ``COPIES_REMOVED`` they never will.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        pause_s = PAUSE_FIRST_S
        left = list(stretches)
        regional: set[Stretch] = set()
        """Those that a majority of the voters was shown to hold."""
        while True:
            rounds = [await self._round(stretch, in_regions, ends_s) for stretch in left]
            late = [(stretch, answered) for stretch, answered in zip(left, rounds, strict=True) if answered is not None]
            if not late:
                return
            left = [stretch for stretch, _ in late]
            if any(self._is_removed(stretch, answered) for stretch, answered in late):
                raise DurabilityTimeoutError(
                    "the safekeepers have removed it, since wal.retain is shorter than an Idempotency-Key is kept; "
                    "PostgreSQL alone holds it",
                    achieved=Durability.LOCAL,
                    reason=COPIES_REMOVED,
                )
            if in_regions:
                regional.update(each for each, answered in late if self._is_shown(each, answered, in_regions=False))
            if is_once or loop.time() + pause_s >= ends_s:
                achieved = Durability.REGIONAL if regional.issuperset(left) else Durability.LOCAL
                raise self._late(late, achieved, in_regions)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _late(
        self, late: Iterable[tuple[Stretch, Answered]], achieved: Durability, in_regions: bool
    ) -> DurabilityTimeoutError:
        said: dict[str, str] = {}
        for stretch, answered in late:
            for address, status in answered.statuses.items():
                if status is None or not _holds(status, stretch):
                    said[address] = "does not hold it"
            said |= answered.faults
        needed = "a majority of the regions" if in_regions else "enough safekeepers"
        away = [address for address in self._addresses if address in said]
        members = "; ".join(f"{address}: {said[address]}" for address in away)
        return DurabilityTimeoutError(
            f"nothing shows now that {needed} hold it; {members}", achieved=achieved, members_away=away
        )

    async def _round(self, stretch: Stretch, in_regions: bool, ends_s: float) -> Answered | None:
        """Ask every member once; None as soon as those who answered show it, else all that was said."""
        statuses: dict[str, WalStatus | None] = {}
        faults = dict.fromkeys(self._addresses, "did not answer in time")
        answered = Answered(statuses, faults)
        asked = {asyncio.create_task(self._ask(address, stretch.node_id)): address for address in self._addresses}
        waiting = set(asked)
        try:
            while waiting:
                left_s = ends_s - asyncio.get_running_loop().time()
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    try:
                        statuses[asked[each]] = each.result()
                        del faults[asked[each]]
                    except FAULTS as error:
                        faults[asked[each]] = str(error) or type(error).__name__
                if self._is_shown(stretch, answered, in_regions=in_regions):
                    return None
                if not done:
                    break
            return answered
        finally:
            for each in waiting:
                each.cancel()

    def _is_shown(self, stretch: Stretch, answered: Answered, *, in_regions: bool) -> bool:
        known = [status for status in answered.statuses.values() if status is not None]
        if self._needs_all and len(known) < len(self._addresses):
            return False
        lists = [status.configuration for status in known]
        # One of a majority knows the list that counts; of its own log the node does.
        if stretch.node_id == self._node_id:
            lists.append(self._own())
        elif len(answered.statuses) <= len(self._addresses) // 2:
            return False
        counts = max(lists, key=lambda each: each.order, default=NO_MEMBERS)
        holding = frozenset(status.member_id for status in known if _holds(status, stretch))
        if not counts.has_majority(holding) or (self._needs_all and len(holding) < len(self._addresses)):
            return False
        if not in_regions:
            return True
        names = self._regions | counts.regions | {counts.home}
        return sum(_has_majority(counts, name, holding) for name in names) > len(names) // 2

    def _is_removed(self, stretch: Stretch, answered: Answered) -> bool:
        """Whether a majority of the members say that their logs begin behind its first record: that does not change."""
        begin_behind = [
            each and each.state == "open" and each.first_lsn > stretch.first_lsn for each in answered.statuses.values()
        ]
        return sum(map(bool, begin_behind)) > len(self._addresses) // 2

    async def _ask(self, address: str, node_id: str) -> WalStatus | None:
        """How the member says that this log stands, at a moment after the call; None where it keeps no such log.

        Raises:
            one of ``FAULTS``: it does not say so.
        """
        name = address, node_id
        earlier = self._asking.get(name)
        if earlier is not None and not earlier.done():
            await asyncio.wait((earlier,))
        asking = self._asking.get(name)
        if asking is earlier or asking is None:
            asking = self._asking[name] = asyncio.create_task(self._status(address, node_id))
            asking.add_done_callback(_retrieved)
        return await asyncio.shield(asking)

    async def _status(self, address: str, node_id: str) -> WalStatus | None:
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(self._timeout_s):
            tls = None if self._tls is None else self._tls.context()
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=tls, server_hostname=host.strip("[]") if tls else None
            )
            try:
                writer.writelines(encode(Frame(Status(_just_before(node_id)))))
                prefix = await reader.readexactly(PREFIX_BYTES)
                size_bytes = length_of(prefix)
                if size_bytes > OWN_BYTES:
                    raise InvalidInputError(f"a report of {size_bytes} bytes is longer than any")
                message = decode(prefix + await reader.readexactly(size_bytes - PREFIX_BYTES)).message
            finally:
                writer.transport.abort()
        if not isinstance(message, StatusReport):
            raise InvalidInputError(f"a safekeeper reports how it stands, and does not answer {message}")
        return next((status for status in message.wals if status.node_id == node_id), None)


def _retrieved(ended: asyncio.Task[WalStatus | None]) -> None:
    """No request may be left that wants to know why it failed."""
    if not ended.cancelled():
        ended.exception()


def _holds(status: WalStatus, stretch: Stretch) -> bool:
    is_of_epoch = status.state == "open" and status.tail.epoch >= stretch.epoch
    return is_of_epoch and status.first_lsn <= stretch.first_lsn and stretch.last_lsn <= status.durable_lsn


def _has_majority(counts: Configuration, region: str, holding: frozenset[str]) -> bool:
    if region == counts.home:
        return counts.has_majority(holding)
    members = counts.of_region(region)
    return len(members & holding) > len(members) // 2


def _just_before(node_id: str) -> str:
    """A text between this node's id and every lower one: a report begins behind it."""
    return f"{node_id[:-1]}{chr(ord(node_id[-1]) - 1)}\x7f"

"""A node as the one writer of a log that safekeepers keep. It ships its records to them; a record is committed once a
quorum holds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from app.node.start.procedure import StartedNode
from app.node.start.quorum import Lead, regions_of
from app.runtime.logs import log
from app.runtime.metrics import Metrics, member_values
from app.runtime.settings.config import Settings
from app.runtime.tasks import called_in
from app.write.intake.answers import NoQuorum
from app.write.intake.evidence import MemberCopies
from app.write.intake.system_entries import SystemEntries
from ledger.errors import FencedError, LedgerError
from ledger.positions import BEFORE_FIRST, Lsn, after
from wal.group_commit import GroupCommit
from wal.replication import configuration as configurations
from wal.replication.configuration import AckMode
from wal.replication.file_log import TailReader, oldest_whole_lsn
from wal.replication.leading import Shipper
from wal.replication.proposer import Proposer

QUORUM_AWAY_S = 1.0
"""How long a quorum may be away, as when its members restart, before the node refuses writes."""

_LOG_LEVELS: Final = {
    "wal_replication_member_lost": logging.WARNING,
    "wal_quorum_lost": logging.ERROR,
    "wal_replication_append_reject": logging.ERROR,
    "wal_replication_lag_threshold_exceeded": logging.WARNING,
}
"""Log levels of the shipper's events; the others are logged as information."""


@dataclass(kw_only=True, eq=False)
class Leadership:
    """The term that a start won. Belongs to one event loop, in which ``on_committed`` and ``on_over`` are called.

    ``on_committed(lsn)`` is called whenever more is committed, ``on_over(error)`` once, when nothing more can be,
    ``on_quorum_lost()`` when too few members have followed for ``QUORUM_AWAY_S``.
    """

    settings: Settings
    started: StartedNode
    lead: Lead
    metrics: Metrics
    on_committed: Callable[[Lsn], None]
    on_over: Callable[[LedgerError], None]
    on_quorum_lost: Callable[[], None]

    def __post_init__(self) -> None:
        self._ack_mode = self.settings.wal.ack_mode
        self._regions = regions_of(self.settings)
        self.copies = self._ask_members()
        """Asks the members what they hold; None if no safekeeper votes."""
        self.shipper = self._make_shipper()
        self.metrics.read(lambda: member_values(self.shipper, self.settings.replication.lag_threshold))

    def start(self, writer: GroupCommit, system_entries: SystemEntries) -> None:
        """Ship what ``writer`` writes; its first record is the one that opens the epoch."""
        self.shipper.start(writer)
        system_entries.enter_epoch_start(after(self.started.wal.last_lsn), self.lead.accepted_loss)

    def fault(self) -> str | None:
        """Why nothing is committed now; None while a quorum follows or no safekeeper votes."""
        away = self.no_quorum()
        return None if away is None else away.why

    def no_quorum(self) -> NoQuorum | None:
        """As ``fault``, with the members that do not follow."""
        if not self._ack_mode.is_replicated:
            return None
        proposer = self.shipper.proposer
        if proposer.has_quorum():
            return None
        needed, reports = proposer.needed(), self.shipper.reports()
        found = f"{proposer.in_sync()} of {needed} safekeepers needed follow" if needed else "no safekeeper votes yet"
        faults = "; ".join(f"{each.address}: {each.fault}" for each in reports if each.fault) or "none yet"
        counts = {self.settings.region} if self._ack_mode is not AckMode.REPLICATED_ALL else self._regions
        silent = [each.address for each in reports if not each.is_streaming and each.region in counts]
        return NoQuorum(f"no quorum: {found}; {faults}", silent)

    def _look_at_quorum(self) -> None:
        if self.no_quorum() is not None:
            self.on_quorum_lost()

    def _ask_members(self) -> MemberCopies | None:
        if not self._ack_mode.is_replicated:
            return None
        members = self.lead.members
        return MemberCopies(
            members.addresses,
            node_id=self.started.node.node_id,
            own=lambda: self.shipper.proposer.configuration,
            regions=self._regions,
            needs_all=self._ack_mode is AckMode.REPLICATED_ALL,
            tls=members.tls,
            timeout_s=members.timeout_s,
        )

    def _make_shipper(self) -> Shipper:
        lead, settings, control, folder = self.lead, self.settings, self.started.control, self.started.wal.folder

        def make(shipper: Shipper) -> Proposer:
            return Proposer(
                node_id=control.node_id,
                run=lead.members.run,
                wal_id=control.wal_id,
                epoch=control.epoch,
                history=control.history,
                configuration=lead.plan.configuration,
                home=settings.region,
                ack_mode=self._ack_mode,
                addresses=lead.members.addresses,
                committed_lsn=control.committed_lsn,
                read=shipper.tail.read,
                oldest_lsn=partial(oldest_whole_lsn, folder),
                send=shipper.send,
                drop=shipper.drop,
                on_configured=partial(configurations.store, folder),
            )

        loop = asyncio.get_running_loop()
        return Shipper(
            lead.members,
            make,
            on_reached=called_in(loop, self._reached),
            on_acknowledged=partial(self.metrics.observe, "wal_replication_ack_latency_seconds"),
            on_over=called_in(loop, self._over),
            report=partial(self._report, called_in(loop, self._member_lost)),
            tail=TailReader(folder, control.node_id, control.history),
            lag_threshold=settings.replication.lag_threshold,
            keeps_damaged=settings.replication.corruption_policy == "truncate",
        )

    def _report(self, on_lost: Callable[[], None], event: str, facts: Mapping[str, object]) -> None:
        """Called on the thread of the shipper."""
        log.log(_LOG_LEVELS.get(event, logging.INFO), event, **facts)
        if event == "wal_replication_member_lost":
            on_lost()

    def _member_lost(self) -> None:
        asyncio.get_running_loop().call_later(QUORUM_AWAY_S, self._look_at_quorum)

    def _reached(self, committed_lsn: Lsn, region_lsns: Mapping[str, Lsn]) -> None:
        self.started.node.spread.advance(spread_lsn(self._regions, region_lsns))
        self.on_committed(committed_lsn)

    def _over(self, error: LedgerError) -> None:
        if isinstance(error, FencedError):
            log.error("wal_fencing_reject", epoch=self.started.node.epoch, error=str(error))
        self.on_over(error)


def spread_lsn(regions: Iterable[str], region_lsns: Mapping[str, Lsn]) -> Lsn:
    """The LSN that a majority of ``regions``, and of other regions with a position, holds, by the position of each."""
    names = region_lsns.keys() | regions
    held = sorted((region_lsns.get(name, BEFORE_FIRST) for name in names), reverse=True)
    return held[len(names) // 2]

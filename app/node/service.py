"""A node at work: the write path and its followers, wired by their constructors, from the recovered backlog to the last
flush. Its tasks and the time of its stop are ``app.node.lifecycle``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from app.node.leadership import Leadership
from app.node.lifecycle import Lifecycle
from app.node.start.kept_copies import OtherLogs
from app.node.start.procedure import StartedNode
from app.node.start.quorum import quorum_survives, regions_of
from app.node.start_entries import record_losses, record_start
from app.node.upkeep import LogScrub, Upkeep
from app.runtime.logs import log
from app.runtime.metrics import Metrics, node_values
from app.runtime.settings.config import Settings
from app.runtime.sharing import FairTurns, Share
from app.runtime.state.found_breaks import DAMAGED, FoundBreak, FoundBreaks
from app.runtime.state.kept_files import times_fenced
from app.runtime.state.losses import Losses
from app.runtime.state.node import Node
from app.runtime.tasks import called_in
from app.share.bundle.importer import BundleImporter
from app.share.bundle.staging import StagedFile, Staging
from app.share.exchange import Regions
from app.share.exchange.following import Expect
from app.share.exchange.peer_client import Asker
from app.share.exchange.region_changes import RegionChanges
from app.share.retention import Removal
from app.share.watch.tail import Tails
from app.store import chaining, following, sessions
from app.store.appended import AppendedEntries
from app.store.edge import ChainedJob, EdgeLookups
from app.store.entry_check import EntryCheck
from app.store.jobs.table import JobFolds, JobKey
from app.store.reading import Pool
from app.store.retention import VACUUM_SETTINGS
from app.store.sessions import AT_A_NODE, STATEMENT_TIMEOUT_S
from app.trust.caller_keys import CallerKeys
from app.trust.callers import KnownTokens
from app.trust.key_chain import Trust
from app.trust.key_changes import FOLLOW_INTERVAL_S, KeyChanges
from app.trust.key_in_use import KeyInUse
from app.trust.quotas import Quotas
from app.trust.retention import RetentionReader
from app.trust.tokens import Tokens
from app.write.chain.appender import Appender
from app.write.followers.followers import TableFollower
from app.write.followers.job_table import JobTable
from app.write.followers.notary import Notary
from app.write.followers.signed_chain import OwnEntries
from app.write.intake.access_records import AccessLog, AccessRecords
from app.write.intake.answers import Answers
from app.write.intake.caller_signatures import CallerSignatures
from app.write.intake.coalescing import WriteCoalescer
from app.write.intake.job_checks import HomeRegions, JobIndex
from app.write.intake.keyed import KeyedRequests
from app.write.intake.submit import Submitter
from app.write.intake.system_entries import SystemEntries
from app.write.pending.backlog import Backlog, Pending
from app.write.pending.keyed_entries import KeyedEntries
from app.write.pending.linking import LinkedBatch
from app.write.pending.quarantine import Quarantine
from app.write.stats import StatsFiles, StatsIntake, StatsWriter
from ledger.errors import (
    LedgerError,
    WalPoisonedError,
)
from ledger.facts.events import SYSTEM_TENANT, SystemAction
from ledger.positions import Epoch, Lsn, after
from ledger.verification.verdict import Break
from wal.group_commit import GroupCommit
from wal.log import Log
from wal.queue import NO_FD
from wal.replication.configuration import AckMode

if TYPE_CHECKING:
    from app.runtime.tracing import Tracing

WAL_CLOSE_TIMEOUT_S = 10.0
CLOSE_RESERVE_S = 1.5
"""Part of ``shutdown_grace`` that is kept for cancelling tasks and closing connections."""
FOLLOW_AT_STOP_S = 2.0
"""How long a stop waits for followers; the next start continues where they stopped."""
FENCE_HELD_IDLE_MAX_S = 5.0
"""How long a process that hangs inside a chaining transaction may keep its fence, and its successor, waiting."""


def _tracing_of(settings: Settings, node: Node) -> Tracing | None:
    """None when nothing is traced."""
    if settings.tracing.endpoint is None:
        return None
    from app.runtime.tracing import Tracing

    return Tracing(settings.tracing.endpoint, node)


class Service:
    """One node, wired and running inside one event loop."""

    def __init__(self, settings: Settings, started: StartedNode, pool: Pool, url: str) -> None:
        self.settings = settings
        self.node: Node = started.node
        self._started = started
        self._pool = pool
        self.database_url = url
        self._loop = asyncio.get_running_loop()
        self._persisting: asyncio.Task[None] | None = None
        """The task that stores the control file at intervals."""
        self._tracing = _tracing_of(settings, self.node)
        self.metrics = Metrics(self._tracing)
        rises = self.node.rises
        self.backlog = Backlog(settings.wal.backlog_max_entries, None if rises is None else rises.entered)
        self.lifecycle = Lifecycle(
            node=self.node,
            backlog=self.backlog,
            metrics=self.metrics,
            wal_folder=started.wal.folder,
            grace_s=settings.shutdown_grace.total_seconds(),
            report=lambda error, by: self.breaks.report_error(error, by),
            give_up=lambda: self.submitter.answers.give_up(),
        )
        self.metrics.read(lambda: node_values(self.node, len(self.backlog), self.backlog.entries_max))
        self.metrics.count("wal_fencing_rejects", times_fenced(started.wal.folder))
        self.breaks = FoundBreaks(
            started.wal.folder,
            partial(self.metrics.count, "scheduler_chain_breaks_met", 1),
            called_in(self._loop, self._record_break),
        )
        self.metrics.read(lambda: {"scheduler_chain_breaks": len(self.breaks.open())})
        self.quotas = Quotas.of(
            settings.quota.model_dump(exclude={"burst"}),
            settings.quota.burst.total_seconds(),
            partial(self.metrics.count, "quota_refusals", 1),
        )
        self.line_turns = FairTurns()
        self.stats = StatsIntake(settings.stats.queue_bytes)
        files = StatsFiles(
            settings.stats_dir / self.node.node_id,
            epoch=self.node.epoch,
            file_bytes_max=settings.stats.file_bytes,
            file_age_max_s=settings.stats.file_age.total_seconds(),
            bytes_max=settings.stats.bytes_max,
            on_removed=self._stats_removed,
        )
        self._stats_writer = StatsWriter(self.stats, files, self.metrics)
        self.job_index = JobIndex()
        self._wire_log(settings, started, pool)
        self._wire_chain(settings, started, pool)
        self._wire_intake(settings, started, pool)
        self._wire_followers(settings, started, pool)

    def _wire_log(self, settings: Settings, started: StartedNode, pool: Pool) -> None:
        """Wire the log of this node and its upkeep."""
        self.other_logs = OtherLogs(
            self.node.node_id, settings.wal_dir, None if started.lead is None else started.lead.members, pool
        )
        self.losses = Losses(started.wal.folder, self.node.node_id)
        self.quarantine = Quarantine(started.wal.folder, self.node.damaged, started.wal.held, self.node.waiting)
        self.leadership: Leadership | None = None
        if started.lead is not None:
            self.leadership = Leadership(
                settings=settings,
                started=started,
                lead=started.lead,
                metrics=self.metrics,
                on_committed=self._committed,
                on_over=self.lifecycle.fail,
                on_quorum_lost=lambda: self.submitter.answers.quorum_lost(),
            )
        self._holds_lease = started.lease.is_held if started.lease is not None else lambda: True
        self._durable_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.writer = self._open_writer(started)
        self._loop.add_reader(self._durable_fd, self._take_durable)
        self.upkeep = Upkeep(started, pool, self.writer, self.quarantine, lambda: self.notary.signed_lsn)
        scrub_interval_s = settings.wal.scrub_interval.total_seconds()
        self.scrub = LogScrub(
            self.node.node_id,
            started.wal.folder,
            durable_lsn=lambda: self.node.durable.lsn,
            copies=1 + len(settings.replication.members),
            interval_s=scrub_interval_s,
        )
        self.metrics.read(
            lambda: {
                "wal_scrub_interval_seconds": scrub_interval_s,
                "wal_scrub_round_end_seconds": self.scrub.ended_s(),
                "wal_scrub_damaged_segments": len(self.scrub.damaged()),
            }
        )

    def _wire_chain(self, settings: Settings, started: StartedNode, pool: Pool) -> None:
        """Wire the services that chain, sign and check entries."""
        self.keys = KeyInUse(started.key_chain, self.metrics, started.not_admitted)
        self.notary = Notary(
            node=self.node,
            pool=pool,
            checkpoints=started.checkpoints,
            own=OwnEntries(
                started.wal.folder,
                self.node.node_id,
                last_lsn=started.wal.recovered.last_lsn,
                head_seqs={tenant_id: head.seq for tenant_id, head in started.heads.items()},
                quarantined=tuple(self.node.damaged),
                believes_earlier=started.accepted_loss,
            ),
            keys=self.keys,
            breaks=self.breaks,
            log_origin=started.log_origin,
            settings=settings.chain,
            metrics=self.metrics,
        )
        self.entry_check = EntryCheck(started.checkpoints.newest, self.notary.rebuild)
        self.job_folds = JobFolds(self.entry_check, started.log_origin)
        self.metrics.read(
            lambda: {
                "scheduler_batch_interval_seconds": settings.chain.batch_interval.total_seconds(),
                "scheduler_unsigned_age_seconds": self.notary.unsigned_age_s(),
            }
        )
        self.trust = Trust(started.key_chain, pool, self.notary.origin)
        self.retention = RetentionReader(
            pool=pool, check=self.entry_check, keyring=self.trust.keyring, origin=self.notary.origin
        )
        self.removal = Removal(
            pool=pool,
            reader=self.retention,
            folds=self.job_folds,
            report=self.breaks.report_error,
            connect=partial(sessions.connect, self.database_url, AT_A_NODE | VACUUM_SETTINGS),
        )
        self.appender = Appender(
            node=self.node,
            backlog=self.backlog,
            connect=partial(chaining.connect, self.database_url, STATEMENT_TIMEOUT_S, FENCE_HELD_IDLE_MAX_S),
            pool=pool,
            heads=dict(started.heads),
            quarantine=self.quarantine,
            breaks=self.breaks,
            entry_check=self.entry_check,
            floor_of=self.retention.commitments,
            metrics=self.metrics,
            on_chained=self._chained,
            on_failure=self.lifecycle.fail,
        )
        self.node.chained.on_wanted = self.appender.wake
        self.coalescer = WriteCoalescer(self.writer, lambda: self.appender.is_chaining, self.lifecycle.fail)

    def _wire_intake(self, settings: Settings, started: StartedNode, pool: Pool) -> None:
        """Wire the services that take write requests."""
        self.system_entries = SystemEntries(
            node=self.node,
            wal=self.coalescer,
            backlog=self.backlog,
            quarantine=self.quarantine,
            tenants=set(started.heads),
            write_timeout_s=settings.write.timeout.total_seconds(),
            record_bytes_max=settings.wal.record_bytes_max,
            new_tenants=self.quotas.new_tenants,
        )
        self.key_changes = KeyChanges(
            settings=settings,
            node=self.node,
            pool=pool,
            keys=self.keys,
            chain=started.key_chain,
            write_entry=self.system_entries.record,
            sign_checkpoints_again=partial(self.notary.sign_checkpoints_again, ()),
            sign_uncounted_again=self.notary.sign_checkpoints_again,
            spawn=self.lifecycle.spawn,
        )
        self.caller_keys = CallerKeys(keys=self.key_changes)
        self.access_records = AccessRecords(
            self.system_entries,
            AccessLog(settings.data_dir, partial(self.metrics.count, "access_log_lines_dropped")),
            settings.privacy.log_reads,
            self.node.wall.now_ms,
        )
        lookups = EdgeLookups(pool, self.job_folds, self.breaks.report_error)
        self._keyed_entries = KeyedEntries(lookups.newest_keyed, self.node.wall.now_ms)
        self.keyed = KeyedRequests(self.node, lookups.find_lines, self._keyed_entries, self.breaks.report_error)
        self._wire_imports(settings, started, pool)
        self.submitter = self._make_submitter(settings, lookups)

    def _wire_imports(self, settings: Settings, started: StartedNode, pool: Pool) -> None:
        """Wire the services that take the entries of other ledgers."""
        self.staging = Staging(started.wal.folder, settings.bundle.import_bytes_max, settings.bundle.disk_reserve_bytes)
        self.importer = BundleImporter(
            pool=pool,
            node=self.node,
            folder=started.wal.folder,
            trusted_keys=settings.bundle.trusted_keys,
            begin_tenant=self.system_entries.begin_tenant,
            read_heads=self.appender.heads.stored,
            on_imported=self._imported,
            on_damaged=self.appender.found_damaged,
            metrics=self.metrics,
            retention=self.retention,
            disk_reserve_bytes=settings.bundle.disk_reserve_bytes,
            trusting=lambda ring: self.regions.trusted(ring),
            callers=lambda: self.caller_keys.known,
        )
        self.regions = Regions.of(
            settings.exchange,
            Asker(started.log_origin, settings.region),
            pool,
            keys=self.importer.known_keys,
            take_fetched=self._take_fetched,
            take_offered=self._take_offered,
            head_seq=self.appender.head_seq,
            sign_soon=self.notary.sign_soon,
        )
        self.notary.on_signed.append(self.regions.news.signed)

    def _wire_followers(self, settings: Settings, started: StartedNode, pool: Pool) -> None:
        """Wire the followers of the chain, and the services that entries of ``_system`` change."""
        self.job_table = TableFollower(
            JobTable(
                self.submitter.followed,
                started.log_origin,
                partial(self.metrics.count, "job_conflicts"),
                self.retention.commitments,
            ),
            partial(following.connect, self.database_url, STATEMENT_TIMEOUT_S),
            chained_lsn=self.node.chained_lsn_of,
            report=self.breaks.report_error,
            observe=self._keyed_entries.followed,
            waiting=lambda: self.node.committed.lsn - self.node.chained.lsn,
        )
        self.tails = Tails(pool, Share(), self.job_folds, self.retention, self.breaks.report_error)
        self._followers = (self.notary, self.job_table, self.tails)
        self.region_changes = RegionChanges(
            regions=self.regions, keys=self.key_changes, trusted_keys=self.importer.known_keys
        )
        self.tokens = Tokens(known=KnownTokens(), keys=self.key_changes, folder=settings.data_dir)

    # --- parts that need care ---------------------------------------------------------------------

    def _make_submitter(self, settings: Settings, lookups: EdgeLookups) -> Submitter:
        async def find_jobs(wanted: Sequence[JobKey]) -> dict[JobKey, ChainedJob]:
            await self.retention.refuse_events(wanted)
            return await lookups.find_jobs(wanted)

        return Submitter(
            node=self.node,
            signatures=CallerSignatures(node=self.node, callers=self.caller_keys),
            wal=self.coalescer,
            backlog=self.backlog,
            keyed=self.keyed,
            quarantine=self.quarantine,
            job_index=self.job_index,
            find_jobs=find_jobs,
            system=self.system_entries,
            answers=Answers(
                node=self.node,
                write_timeout_s=settings.write.timeout.total_seconds(),
                acknowledge_before_fsync=settings.wal.ack_mode is AckMode.LOCAL_ASYNC,
                postgres_survives=settings.topology.postgres_survives,
                quorum_survives=quorum_survives(settings),
                spreads=len(regions_of(settings)) > 1 and settings.wal.ack_mode.is_replicated,
                copies=self.leadership.copies if self.leadership is not None else None,
                no_quorum=self.leadership.no_quorum if self.leadership is not None else lambda: None,
                in_regions=self.regions.spread if self.regions.peers and settings.exchange.is_global else None,
                has_other_regions=lambda: bool(self.regions.counted()),
                head_seq=self.appender.head_seq,
                holds_lease=self._holds_lease,
            ),
            record_bytes_max=settings.wal.record_bytes_max,
            line_turns=self.line_turns,
            homes=HomeRegions(
                self.node.region,
                {peer.region: peer.url for peer in settings.exchange.peers},
                redirects=settings.exchange.foreign_jobs == "redirect",
                is_retired=lambda region: region in self.regions.known.retired,
            ),
        )

    async def _take_fetched(self, name: str, pieces: AsyncGenerator[bytes, None], expect: Expect) -> int:
        """Import a bundle that a peer sends in pieces; returns how many entries it added."""
        async with self.staging.fetched(name, pieces) as files:
            await self.importer.check_asked_for(files[0], expect)
            return await self._take(files[0], expect)

    async def _take_offered(self, name: str, bundle: bytes, expect: Expect) -> int:
        """The same of one that came with its news."""
        return await self._take(StagedFile.held(name, bundle), expect)

    async def _take(self, file: StagedFile, expect: Expect) -> int:
        taken = await self.importer.run([file], dry_run=False, expect=expect)
        return 0 if taken.has_ended else taken.imported

    def _open_writer(self, started: StartedNode) -> GroupCommit:
        wal = self.settings.wal
        log = Log(
            started.wal.folder,
            node_id=self.node.node_id,
            wal_id=self.node.wal_id,
            epoch=Epoch(self.node.epoch),
            next_lsn=after(started.wal.last_lsn),
            previous_lsn=started.wal.recovered.last_lsn,
            segment_bytes=wal.segment_bytes,
        )
        return GroupCommit(
            log,
            batch_timeout_us=wal.batch_timeout_microseconds,
            batch_max_entries=1 if wal.ack_mode is AckMode.LOCAL_SYNC else wal.batch_max_entries,
            batch_max_bytes=wal.batch_max_bytes,
            record_bytes_max=wal.record_bytes_max,
            queue_max_entries=self.backlog.entries_max + self.backlog.kept_entries,
            queue_max_bytes=self.backlog.bytes_max + self.backlog.kept_bytes,
            shipper_fd=self.leadership.shipper.wake_fd if self.leadership else NO_FD,
            durable_fd=self._durable_fd,
            on_failure=called_in(self._loop, self._writer_failed),
        )

    def _stats_removed(self, file_bytes: int) -> None:
        self.metrics.count("stats_removed_files")
        self.metrics.count("stats_removed_bytes", file_bytes)

    def _writer_failed(self, error: WalPoisonedError) -> None:
        self._drain_durable()  # what it made durable before
        self.lifecycle.fail(error)

    def _take_durable(self) -> None:
        os.eventfd_read(self._durable_fd)
        self._drain_durable()

    def _drain_durable(self) -> None:
        """Process the batches that the writer has made durable."""
        for batch in self.writer.take_durable():
            self.metrics.observe("wal_sync_seconds", batch.sync_s)
            self.metrics.observe("wal_batch_entries", batch.entries)
        if (lsn := self.writer.durable_lsn) <= self.node.durable.lsn:
            return
        if (waited_s := self.submitter.became_durable(lsn)) is not None:
            self.metrics.observe("wal_append_seconds", waited_s)
        if self._holds_lease():
            self.node.durable.advance(lsn)
        else:
            self.node.durable.advance(min(lsn, self.node.committed.lsn))
            self.submitter.answers.lease_expired()
        if self.leadership is None:
            self._committed(lsn)

    def _detach_writer(self) -> None:
        """Stop reading the descriptor, once. It stays open while the writer may write to it, so that no other file gets
        its number."""
        durable_fd, self._durable_fd = self._durable_fd, NO_FD
        if durable_fd == NO_FD:
            return
        self._loop.remove_reader(durable_fd)
        if self.writer.has_ended:
            os.close(durable_fd)

    def _chained(self, linked: LinkedBatch) -> None:
        self.coalescer.chained()
        self.submitter.chained(linked)
        self._follow(linked)

    def _imported(self, appended: AppendedEntries) -> None:
        """This node chained entries of bundles without the appender."""
        self.submitter.imported(appended)
        for tenant_id, rows in appended.links.items():
            self.regions.news.imported(tenant_id, rows[0].seq, rows[-1].seq)
        self._follow(appended)

    def _follow(self, appended: AppendedEntries) -> None:
        for follower in self._followers:
            follower.chained(appended)

    def _committed(self, lsn: Lsn) -> None:
        self.node.committed.advance(lsn)
        if self.node.durable.lsn < lsn and not self._holds_lease():
            self.node.durable.advance(min(lsn, self.writer.durable_lsn))
        self.appender.wake()

    def backlog_fault(self) -> str | None:
        """Why writes are refused, when too many events wait to be chained."""
        waiting = len(self.backlog)
        return None if waiting < self.backlog.entries_max else f"{waiting} events wait to be chained"

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Pass the recovered records to the appender and start the tasks of the node."""
        self._stats_writer.start()
        self.scrub.start()
        for pending in self._started.recovered:
            self.backlog.add((pending,))
            self._recovered(pending)
        if self.leadership is not None:
            self.leadership.start(self.writer, self.system_entries)
        for tenant_id, reason in self.node.damaged.items():
            self.breaks.report(tenant_id, Break(0, DAMAGED, reason, None, reason), "start")
        for tenant_id, tree in self._started.faulty_trees.items():
            if tree == "damaged":
                detail = "the stored tree, read at the start, is not that of the checkpoint that this node keeps"
                self.breaks.report(tenant_id, Break(0, "tree", detail), "start")
            self.notary.rebuild(tenant_id)
        self.appender.wake()
        self.lifecycle.spawn(self.appender.run())
        self._persisting = self.lifecycle.spawn(self.upkeep.persist_control(self.settings.hlc.persistence_interval))
        for derived in (
            *(follower.run for follower in self._followers),
            self.tails.share.run,
            self.key_changes.follow_admission,
        ):
            self.lifecycle.keep(derived)
        self.lifecycle.keep(partial(self.upkeep.clean_up, self.settings.wal.retain))
        self.lifecycle.spawn(record_start(self._started, self.system_entries, self.key_changes))
        if (lease := self._started.lease) is not None:
            self.metrics.read(lambda: {"wal_lease_reached": lease.is_reached, "wal_lease_held": lease.is_held()})
            self.lifecycle.spawn(lease.keep(self.lifecycle.fail))
        self.lifecycle.keep(self._report_key_faults)
        self.lifecycle.keep(
            partial(record_losses, self._started, self._pool, self.system_entries, self.losses, self._recovered)
        )
        self.lifecycle.keep(self.other_logs.run)

    async def _report_key_faults(self) -> None:
        """Report each fault in the history of keys once, as a break of ``_system``. Runs for ever."""
        reported: str | None = None
        while True:
            fault = self.trust.fault()
            if fault is not None and fault != reported:
                self.breaks.report(SYSTEM_TENANT, Break(0, DAMAGED, fault, None, fault), "keys")
            reported = fault
            await asyncio.sleep(FOLLOW_INTERVAL_S)

    def _recovered(self, pending: Pending) -> None:
        pending.outcome = self._loop.create_future() if pending.idempotency else None
        self.keyed.recover(pending)
        self.submitter.recover(pending)

    def _record_break(self, found: FoundBreak) -> None:
        """Write an entry of ``_system`` about a new break, which the webhooks of that tenant deliver."""
        if not self.lifecycle.is_stopping and found.tenant_id != SYSTEM_TENANT:
            self.lifecycle.spawn(self._write_break(found))

    async def _write_break(self, found: FoundBreak) -> None:
        facts: dict[str, object] = {
            "tenant_id": found.tenant_id,
            "kind": found.kind,
            "seq": found.seq,
            "detail": found.detail,
            "found_at": found.found_at,
            "met_by": found.met_by,
            "node_id": self.node.node_id,
        }
        try:
            await self.system_entries.note(SystemAction.BREAK_FOUND, found.subject, facts)
        except LedgerError as error:
            log.warning("chain_break_not_recorded", tenant_id=found.tenant_id, error=str(error))

    def close_unstarted(self) -> None:
        """Close the writer of a service that was never started; ``stop`` closes a started one."""
        if not self.lifecycle.tasks:
            with contextlib.suppress(LedgerError):
                self.writer.close(WAL_CLOSE_TIMEOUT_S)
            if self.leadership is not None:
                self.leadership.shipper.close(0)
            self._detach_writer()

    async def stop(self) -> None:
        """Flush the WAL, drain the backlog within the grace, write the control file, close."""
        self.lifecycle.begin_stop()
        self.coalescer.flush()
        with contextlib.suppress(LedgerError):
            await asyncio.to_thread(self.writer.close, min(self.lifecycle.left_s(), WAL_CLOSE_TIMEOUT_S))
        self._drain_durable()  # what it made durable at last
        drain_s = max(0.0, self.lifecycle.left_s() - CLOSE_RESERVE_S)
        flushing = asyncio.create_task(asyncio.to_thread(self._stats_writer.close, drain_s))
        if self.node.failure is None:
            with contextlib.suppress(LedgerError):
                await self.node.chained.reached(self.writer.durable_lsn, drain_s)
        elif isinstance(self.node.failure, WalPoisonedError):
            # The file may be gone for good: acknowledged records are in memory and can still be chained.
            await self.appender.drain(drain_s)
        await self.job_table.drain(min(FOLLOW_AT_STOP_S, max(0.0, self.lifecycle.left_s() - CLOSE_RESERVE_S)))
        await flushing
        if self.leadership is not None:
            await asyncio.to_thread(self.leadership.shipper.close, CLOSE_RESERVE_S / 3)
        await asyncio.to_thread(self.scrub.close)
        for task in self.lifecycle.tasks:
            task.cancel()
        await asyncio.wait(self.lifecycle.tasks, timeout=CLOSE_RESERVE_S / 3)
        try:
            async with asyncio.timeout(CLOSE_RESERVE_S / 3):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()
        if self._persisting is not None:
            # Else two tasks write the file, and the older content may land last, after another process took the lock.
            await asyncio.wait((self._persisting,))
        try:
            await asyncio.to_thread(self.upkeep.store_control)
        except OSError as error:
            log.error("control_file_not_written", error=str(error))
        await asyncio.to_thread(self.breaks.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close, CLOSE_RESERVE_S / 3)
        self._detach_writer()
        if self._started.lease is not None:
            await self._started.lease.release()
        self._started.lock.release()

"""The wiring of what reads, exports and answers; the way of writes and its followers are wired in app.node.service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from app.edge.accepted import AccessControl
from app.edge.connection.deadlines import ConnectionBounds
from app.edge.fast_path import FastPath
from app.edge.library_internals import check_libraries
from app.edge.listener import connection_bounds
from app.edge.services import Services
from app.edge.writes import EventWrites, ProposalWrites
from app.node import wall_clock
from app.node.readiness import readiness_checks, reported_checks
from app.node.service import Service
from app.node.start.connecting import went_away
from app.node.start.procedure import StartedNode, start_node
from app.node.start.quorum import Takeover
from app.read.commitments import CommitmentReader
from app.read.consistency import Consistency
from app.read.copies import Copies, Replicas, replicas_at
from app.read.folded_jobs import FoldedJobs, JobTableWalk
from app.read.full_walk import FullWalk
from app.read.jobs import JobReader
from app.read.readiness import Readiness
from app.read.revealing import Revealing
from app.read.verification import ChainVerifier, VerifiedPositions
from app.read.witness_statements import judged_anchors
from app.runtime.database_faults import DATABASE_FAULTS
from app.runtime.metrics import Metrics
from app.runtime.principals import Principal
from app.runtime.settings.config import Settings
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.last_verified import LastVerified
from app.runtime.state.losses import Losses
from app.runtime.state.node import Node
from app.runtime.state.session import SessionTokens
from app.runtime.tasks.sharing import FairTurns
from app.runtime.tasks.slots import MemoryBudget
from app.share.bundle.export import BundleExporter
from app.share.bundle.importer import BundleImporter
from app.share.bundle.receipts import ReceiptMaker
from app.share.bundle.staging import Staging
from app.share.exchange.peer import Admit
from app.share.exchange.regions import Regions
from app.share.watch.watchers import Watchers, watchers_max
from app.share.webhooks.registry import WebhookRegistry
from app.store.entry_check import EntryCheck
from app.store.privacy import PrivacyEntry
from app.store.promise_check import PromiseCheck
from app.store.sessions import STATEMENT_TIMEOUT_S, NodePool
from app.trust.access.callers import Callers, CallerSource, OpenToAll
from app.trust.access.console_sessions import CodeFlow, ConsoleSessions, code_flow_of
from app.trust.access.oidc import OidcIssuer, issuer_of
from app.trust.access.tls import ServerTls, TlsFiles, principals_by_name
from app.trust.keys.changes import KeyChanges
from app.trust.keys.tokens import Tokens
from app.trust.keys.trust import Trust
from app.trust.privacy.agreement import Unchained
from app.trust.privacy.keys import SubjectKeys
from app.trust.privacy.knowledge import PrivacyKnowledge
from app.write.followers.cosignatures import CosignatureInbox
from app.write.followers.ledger_watch import LedgerWatch
from app.write.followers.notary import Notary
from app.write.followers.timestamps import Authority, Timestamper
from app.write.intake.access_records import AccessRecords
from app.write.intake.privacy_changes import PrivacyChanges
from app.write.intake.proposals import Proposals
from app.write.intake.sealing import Sealing
from app.write.intake.submit import Submitter
from app.write.intake.system_entries import SystemEntries
from app.write.pending.keyed_entry import are_rows_whole
from app.write.stats.intake import StatsIntake
from ledger.errors import DatabaseUnavailableError
from ledger.facts.events import ACTIONS, SystemAction
from signing.keys import Keyring
from signing.timestamp import load_authorities, require_available
from wal.group_commit import GroupCommit
from wal.replication.leading import Shipper

POOL_CONNECTIONS_MAX = 16
LONGEST_BODIES_MAX = 16
"""How many request bodies as long as they may be are in memory at once."""

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def running(
    settings: Settings, database_url: str, *, accept_lost_wal: bool = False, takeover: Takeover = Takeover.WAITS
) -> AsyncIterator[tuple[Service, Services]]:
    """A started node with the services that routes name, stopped on leaving."""
    check_libraries()
    given = _Given.of(settings)
    started = await start_node(settings, database_url, accept_lost_wal=accept_lost_wal, takeover=takeover)
    async with contextlib.AsyncExitStack() as held:
        held.callback(started.lock.release)
        held.callback(started.connection.terminate)
        try:
            pool = await NodePool(
                database_url,
                connections_max=POOL_CONNECTIONS_MAX,
                command_timeout_s=STATEMENT_TIMEOUT_S,
                first=started.connection,
            )
            held.callback(pool.terminate)
            service = Service(settings, started, pool, database_url)
            held.callback(service.close_unstarted)
            knowledge = await _private_fields(pool, settings.privacy_master_key_uri, started, service)
        except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
            raise went_away(error) from error
        replicas = await held.enter_async_context(
            replicas_at(settings.database_replica_urls, database_url, started.log_origin)
        )
        services = _services(service, started, pool, replicas, knowledge, given)
        verifier: ChainVerifier = services[ChainVerifier]
        held.push_async_callback(verifier.close)
        try:
            await service.tokens.start()
            if settings.auth.mode == "tokens" and not service.tokens.known:
                log.warning("no_token_counts", do="tally token new NAME --first, beside the data; no restart is needed")
            if settings.auth.mode == "none" and service.tokens.known:
                log.warning("tokens_not_asked_for", count=len(service.tokens.known), do="set auth.mode to tokens")
        except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
            raise went_away(error) from error
        service.start()
        service.keep(services[LedgerWatch].run)
        service.keep(partial(wall_clock.watch, service.node.wall, pool))
        service.keep(knowledge.run)
        service.keep(services[PrivacyChanges].finish)
        service.keep(service.tokens.run)
        service.keep(service.access_records.run)
        service.keep(service.access_records.log.run)
        service.keep(services[WebhookRegistry].deliveries.run)
        if given.tls is not None:
            service.keep(given.tls.run)
        if given.issuer is not None:
            service.keep(given.issuer.keys.run)
        if given.authorities:
            service.keep(_timestamper(service, pool, given.authorities).run)
        verify = settings.verify
        verifying = partial(verifier.run, verify.interval.total_seconds(), on_start=verify.on_start)
        service.keep(verifying)
        service.keep(services[FullWalk].run)
        service.keep(services[JobTableWalk].run)
        service.keep(services[Watchers].run)
        for peer in services[Regions].peers:
            service.keep(peer.run)
        service.keep(services[BundleImporter].log_unfinished)
        if replicas is not None:
            service.keep(replicas.run)
        service.node.accepting = True
        try:
            yield service, services
        finally:
            service.node.stop_accepting()
            await service.stop()


async def _private_fields(
    pool: NodePool, master_key_uri: str, started: StartedNode, service: Service
) -> PrivacyKnowledge:
    """What the ledger's private fields are, known before the first event is taken."""
    keys, node_id = SubjectKeys(pool, master_key_uri), started.node.node_id
    knowledge = PrivacyKnowledge(pool, keys, node_id, service.entry_check, service.breaks.report_error)
    said = {
        action: [
            PrivacyEntry(each.tenant_id, None, each.job_id, each.payload, each.hlc.physical_ms)
            for each in started.recovered
            if ACTIONS.get(each.record_type) == action
        ]
        for action in (SystemAction.PRIVACY_DECLARED, SystemAction.SUBJECT_ERASED)
    }
    await knowledge.start(Unchained(said[SystemAction.PRIVACY_DECLARED], said[SystemAction.SUBJECT_ERASED]))
    return knowledge


class _Given(NamedTuple):
    """What the settings say at length, or by the names of files: read before anything is begun."""

    authorities: Sequence[Authority]
    tls: ServerTls | None
    by_certificate: Callable[[Sequence[str]], Principal | None]
    issuer: OidcIssuer | None
    bounds: ConnectionBounds

    @classmethod
    def of(cls, settings: Settings) -> _Given:
        """All of it.

        Raises:
            ConfigurationError: something of it is not what it should be, or cannot be read.
            StartRefusedError: this process may open too few files for connections.
        """
        cert, key, auth = settings.tls.cert, settings.tls.key, settings.auth
        if settings.bundle.trusted_keys is not None:
            Keyring.load(settings.bundle.trusted_keys)  # each import and exchange reads it again
        return cls(
            _authorities(settings),
            None if cert is None or key is None else ServerTls(TlsFiles(cert, key, auth.client_ca)),
            principals_by_name((each.name, each.grant) for each in auth.certificates),
            issuer_of(auth.oidc) if auth.mode == "oidc" else None,
            connection_bounds(settings),
        )


def _authorities(settings: Settings) -> list[Authority]:
    """The configured time-stamping authorities, with what they are to be traced to.

    Raises:
        ConfigurationError: a CA file cannot be read, or the package that makes requests is not installed.
    """
    configured = settings.log.timestamp_authorities
    if configured:
        require_available()
    return [Authority(each.url, load_authorities(each.ca_file) if each.ca_file else ()) for each in configured]


def _services(
    service: Service,
    started: StartedNode,
    pool: NodePool,
    replicas: Replicas | None,
    knowledge: PrivacyKnowledge,
    given: _Given,
) -> Services:
    """The services that routes name, over those of ``service``."""
    settings, node = service.settings, service.node
    consistency = Consistency(node, pool, settings.read.wait.total_seconds())
    copies = Copies(node, pool, consistency, replicas)
    revealing = Revealing(knowledge)
    if replicas is not None:
        service.metrics.watch_replicas(replicas.fitness)
    last_verified = LastVerified(started.folder)
    folded = FoldedJobs(service.job_folds, service.job_table.doubt, service.breaks.report_error)
    verifier = _verifier(service, started, pool, given.authorities, last_verified)
    importer = _importer(service, pool)
    staging = Staging(started.folder, settings.bundle.import_bytes_max, settings.bundle.disk_reserve_bytes)
    regions = _regions(service, started, pool, importer, staging)
    console_sessions = ConsoleSessions(started.session_secret, settings.auth.session_life)
    sessions = SessionTokens(started.session_secret)
    sealing = Sealing(knowledge)
    readiness = Readiness(
        node=node,
        pool=pool,
        needed=readiness_checks(service),
        reported=reported_checks(service, started, knowledge, given.tls, given.issuer, regions, replicas),
    )
    service.metrics.watch_checks(
        {"database": lambda: readiness.database_fault, **readiness.needed, **readiness.reported}
    )
    access = AccessControl(
        callers=_callers(service, given, console_sessions),
        quotas=service.quotas,
        memory=MemoryBudget(LONGEST_BODIES_MAX * settings.http.body_bytes_max, "request bodies"),
        records=service.access_records,
        breaks=service.breaks,
    )
    events = EventWrites(
        node=node,
        submitter=service.submitter,
        sealing=sealing,
        consistency=consistency,
        sessions=sessions,
        event_bytes_max=settings.event_bytes_max,
    )
    proposals = ProposalWrites(
        node=node,
        proposals=Proposals(
            system=service.system_entries,
            keyed=service.keyed,
            answers=service.submitter.answers,
            record_bytes_max=settings.wal.record_bytes_max,
        ),
        sessions=sessions,
        event_bytes_max=settings.event_bytes_max,
    )
    return {
        Settings: settings,
        ConnectionBounds: given.bounds,
        ServerTls | None: given.tls,
        Node: node,
        NodePool: pool,
        GroupCommit: service.writer,
        Shipper | None: None if service.leadership is None else service.leadership.shipper,
        Readiness: readiness,
        Metrics: service.metrics,
        AccessControl: access,
        AccessRecords: service.access_records,
        EventWrites: events,
        ProposalWrites: proposals,
        FastPath: FastPath(
            node=node,
            access=access,
            events=events,
            proposals=proposals,
            metrics=service.metrics,
            event_bytes_max=settings.event_bytes_max,
        ),
        Submitter: service.submitter,
        Sealing: sealing,
        FairTurns: service.line_turns,
        StatsIntake: service.stats,
        SystemEntries: service.system_entries,
        PrivacyChanges: PrivacyChanges(node, pool, knowledge, service.system_entries),
        SessionTokens: sessions,
        Consistency: consistency,
        JobReader: JobReader(copies, revealing, folded, service.job_table.hurry, service.breaks.report_error),
        CommitmentReader: CommitmentReader(copies, service.entry_check, PromiseCheck(service.job_table.begin_again)),
        EntryCheck: service.entry_check,
        ChainVerifier: verifier,
        FullWalk: _full_walk(service, started, pool, verifier),
        JobTableWalk: JobTableWalk(pool, folded, service.breaks.report_error),
        LastVerified: last_verified,
        FoundBreaks: service.breaks,
        Losses: service.losses,
        LedgerWatch: _ledger_watch(service, started, pool),
        Notary: service.notary,
        CosignatureInbox: _cosignatures(service, pool),
        ReceiptMaker: ReceiptMaker(
            pool=pool,
            node_id=node.node_id,
            log_origin=started.log_origin,
            keys=service.keys,
            published=service.trust.keys_of,
            known_break=service.breaks.unmended_fault,
            attempts=consistency.attempts,
        ),
        BundleExporter: _exporter(service, started, pool),
        BundleImporter: importer,
        Staging: staging,
        Regions: regions,
        Watchers: Watchers(service.tails, watchers_max(given.bounds.connections_max), service.metrics),
        WebhookRegistry: _webhooks(service, pool, knowledge),
        KeyChanges: service.key_changes,
        Trust: service.trust,
        Tokens: service.tokens,
        ConsoleSessions: console_sessions,
        CodeFlow | None: code_flow_of(settings.auth),
    }


def _regions(
    service: Service,
    started: StartedNode,
    pool: NodePool,
    importer: BundleImporter,
    staging: Staging,
) -> Regions:
    """The peers of this ledger, each to be asked by a task."""
    settings = service.settings
    trusted = settings.bundle.trusted_keys

    async def take(name: str, pieces: AsyncGenerator[bytes, None], admit: Admit) -> None:
        async with staging.fetched(name, pieces) as files:
            await importer.check_asked_for(files[0], admit)
            await importer.run(files, dry_run=False, admit=admit)

    regions = Regions([])
    if trusted is not None:
        regions = Regions.of(settings.exchange, started.log_origin, pool, partial(Keyring.load, trusted), take)
    if regions.peers and settings.exchange.is_global:
        service.submitter.answers.in_regions = regions.spread
        service.submitter.answers.head_seq = service.appender.head_seq
    service.metrics.watch_peers(regions.figures)
    return regions


def _webhooks(service: Service, pool: NodePool, knowledge: PrivacyKnowledge) -> WebhookRegistry:
    """The receivers of entries, whose secrets follow from that of the ledger."""

    @contextlib.asynccontextmanager
    async def follow(tenant_id: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        async with service.tails.watching(tenant_id) as tail:
            yield partial(service.tails.grown_beyond, tail)

    return WebhookRegistry(
        pool=pool,
        check=service.entry_check,
        keys=knowledge.keys,
        note=service.system_entries.note,
        follow=follow,
        networks=service.settings.webhooks.networks,
        metrics=service.metrics,
        report=service.breaks.report_error,
    )


def _callers(service: Service, given: _Given, console_sessions: ConsoleSessions) -> CallerSource:
    """Who says who calls."""
    if service.settings.auth.mode == "none":
        return OpenToAll()
    return Callers(
        tokens=service.tokens.known,
        issuer=given.issuer,
        by_certificate=given.by_certificate,
        sessions=console_sessions,
    )


def _verifier(
    service: Service,
    started: StartedNode,
    pool: NodePool,
    authorities: Sequence[Authority],
    last_verified: LastVerified,
) -> ChainVerifier:
    roots = {authority.url: authority.roots for authority in authorities}
    return ChainVerifier(
        pool=pool,
        database_url=service.database_url,
        keyring=service.trust.keyring,
        keyring_fault=service.trust.fault,
        checkpoints=service.trust.checkpoints,
        anchors=lambda tenant_id, keyring: judged_anchors(
            pool,
            tenant_id,
            keyring,
            service.notary.origin(tenant_id),
            service.settings.log.witnesses,
            lambda url: roots.get(url, ()),
        ),
        positions=VerifiedPositions(started.folder),
        breaks=service.breaks,
        last_verified=last_verified,
        are_key_rows_whole=are_rows_whole,
        metrics=service.metrics,
    )


def _exporter(service: Service, started: StartedNode, pool: NodePool) -> BundleExporter:
    return BundleExporter(
        pool=pool,
        node=service.node,
        log_origin=started.log_origin,
        signer=lambda: service.keys.signer,
        keyring=service.trust.keys_of,
        sign_now=service.notary.sign_now,
        known_breaks=service.breaks.of_tenant,
        report=lambda error: service.breaks.report_error(error, "export_bundle"),
    )


def _importer(service: Service, pool: NodePool) -> BundleImporter:
    return BundleImporter(
        pool=pool,
        node=service.node,
        trusted_keys=service.settings.bundle.trusted_keys,
        begin_tenant=service.system_entries.begin_tenant,
        check_heads=service.appender.heads.check,
        on_imported=service.imported,
        on_damaged=service.appender.found_damaged,
        metrics=service.metrics,
        disk_reserve_bytes=service.settings.bundle.disk_reserve_bytes,
    )


def _cosignatures(service: Service, pool: NodePool) -> CosignatureInbox:
    return CosignatureInbox(
        pool=pool,
        origin=service.notary.origin,
        keyring=service.trust.keyring,
        witnesses=service.settings.log.witnesses,
        max_skew_ms=service.settings.hlc.max_clock_skew_ms,
    )


def _timestamper(service: Service, pool: NodePool, authorities: Sequence[Authority]) -> Timestamper:
    return Timestamper(
        pool=pool,
        authorities=authorities,
        interval=service.settings.log.timestamp_interval,
        origin=service.notary.origin,
        keyring=service.trust.keyring,
        metrics=service.metrics,
        report=service.breaks.report,
    )


def _full_walk(service: Service, started: StartedNode, pool: NodePool, verifier: ChainVerifier) -> FullWalk:
    return FullWalk(
        pool=pool,
        verifier=verifier,
        kept=started.checkpoints.newest,
        wal_folder=started.folder,
        interval_s=service.settings.verify.full_interval.total_seconds(),
    )


def _ledger_watch(service: Service, started: StartedNode, pool: NodePool) -> LedgerWatch:
    return LedgerWatch(
        node=service.node,
        pool=pool,
        checkpoints=started.checkpoints,
        notary=service.notary,
        keyring=service.trust.signing_now,
        breaks=service.breaks,
        on_failure=service.fail,
    )

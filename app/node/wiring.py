"""The composition root of a node: it loads files, starts the node, and builds each service that a route names by its
constructor. ``app.node.service`` builds the write path.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from cryptography.hazmat.primitives.serialization import Encoding

from app.edge.accepted import AccessControl, Services
from app.edge.connection.deadlines import ConnectionBounds
from app.edge.library_internals import check_libraries
from app.edge.listener import connection_bounds
from app.edge.writes import EventWrites, ProposalWrites, Reports
from app.node.readiness import readiness_checks, reported_checks
from app.node.service import Service
from app.node.start.connecting import went_away
from app.node.start.procedure import StartedNode, start_node
from app.node.start.quorum import Takeover
from app.node.upkeep import compare_clocks
from app.pages.job_report import Source
from app.read import proofs
from app.read.commitments import CommitmentReader, NodeTables, OverbookedNodes
from app.read.consistency import Consistency
from app.read.copies import Copies, Replicas, replicas_at
from app.read.folded_jobs import FoldedJobs, JobTableWalk
from app.read.full_walk import FullWalk
from app.read.job_reports import JobReports
from app.read.jobs import JobReader
from app.read.proofs import judged_anchors
from app.read.readiness import Readiness
from app.read.revealing import Revealing
from app.read.spark_reports import SparkReports
from app.read.verification import ChainVerifier, VerifiedPositions
from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.principals import Principal
from app.runtime.settings.config import Settings
from app.runtime.sharing import FairTurns
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.kept_files import LastVerified
from app.runtime.state.losses import Losses
from app.runtime.state.node import Node
from app.runtime.state.session import SessionTokens
from app.runtime.tasks import MemoryBudget
from app.share.archive import Archiving, store_of
from app.share.bundle.export import BundleExporter
from app.share.bundle.importer import BundleImporter
from app.share.bundle.receipts import ReceiptMaker
from app.share.bundle.staging import Staging
from app.share.exchange import Regions
from app.share.exchange.news import Offers
from app.share.exchange.region_changes import RegionChanges
from app.share.retention import Carrying, Planner, Prunes, StoredArchive
from app.share.watch import Watchers, watchers_max
from app.share.webhooks import WebhookRegistry
from app.share.webhooks.delivery import WebhookServices
from app.store import Connection
from app.store.commitments import PromiseCheck
from app.store.entry_check import EntryCheck
from app.store.privacy import PrivacyEntry
from app.store.sessions import STATEMENT_TIMEOUT_S, NodePool
from app.trust.caller_keys import CallerKeys
from app.trust.callers import Callers, CallerSource, OpenToAll
from app.trust.console_sessions import CodeFlow, ConsoleSessions, code_flow_of
from app.trust.key_chain import Trust
from app.trust.key_changes import KeyChanges
from app.trust.oidc import OidcIssuer, issuer_of
from app.trust.privacy_agreement import Unchained
from app.trust.privacy_knowledge import PrivacyKnowledge
from app.trust.retention import RetentionReader
from app.trust.subject_keys import SubjectKeys
from app.trust.tls import ServerTls, TlsFiles, principals_by_name
from app.trust.tokens import Tokens
from app.write.followers.anchors import Authority, CosignatureInbox, Timestamper
from app.write.followers.ledger_watch import LedgerWatch
from app.write.followers.notary import Notary
from app.write.followers.witnesses import Witnesses
from app.write.intake.access_records import AccessRecords
from app.write.intake.job_checks import HomeRegions
from app.write.intake.private_fields import PrivacyChanges, Sealing
from app.write.intake.proposals import Proposals
from app.write.intake.statements import Statements
from app.write.intake.submit import Submitter
from app.write.intake.system_entries import SystemEntries
from app.write.intake.tenant_changes import ExclusionChanges, RetentionChanges
from app.write.pending.keyed_entries import are_rows_whole
from app.write.stats import StatsIntake
from ledger import rfc3339
from ledger.errors import ConfigurationError, DatabaseUnavailableError, InvalidInputError, reported_as
from ledger.facts.events import ACTIONS, SystemAction
from ledger.verification import Verdict
from objects.store import ArchiveStore
from signing.anchors import ExternalWitnesses, load_authorities, require_available
from signing.keys import Keyring
from signing.policy import Policy
from wal.group_commit import GroupCommit
from wal.replication.leading import Shipper

POOL_CONNECTIONS_MAX = 16
WALKS_KEPT = 2
"""Intervals of full verifications in which a chain must have been verified whole, for a prune to verify what leaves."""
LONGEST_BODIES_MAX = 16
"""How many request bodies of maximal length are in memory at once."""


@contextlib.asynccontextmanager
async def running(
    settings: Settings, database_url: str, *, accept_lost_wal: bool = False, takeover: Takeover = "waits"
) -> AsyncIterator[tuple[Service, Services]]:
    """A started node with the services that routes name, stopped on leaving."""
    check_libraries()
    files = LoadedFiles.of(settings)
    started = await start_node(settings, database_url, accept_lost_wal=accept_lost_wal, takeover=takeover)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(started.lock.release)
        stack.callback(started.connection.terminate)
        try:
            pool = await NodePool(
                database_url,
                connections_max=POOL_CONNECTIONS_MAX,
                command_timeout_s=STATEMENT_TIMEOUT_S,
                first=started.connection,
            )
            stack.callback(pool.terminate)
            service = Service(settings, started, pool, database_url)
            stack.callback(service.close_unstarted)
            knowledge = await _private_fields(pool, settings.privacy_master_key_uri, started, service)
            await service.tokens.start()
            await service.region_changes.refresh()
            await service.caller_keys.refresh()
        except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
            raise went_away(error) from error
        if settings.auth.mode == "tokens" and not service.tokens.known:
            log.warning("no_token_counts", do="tally token new NAME --first, beside the data; no restart is needed")
        if settings.auth.mode == "none" and service.tokens.known:
            log.warning("tokens_not_asked_for", count=len(service.tokens.known), do="set auth.mode to tokens")
        replicas = await stack.enter_async_context(
            replicas_at(settings.database_replica_urls, database_url, started.log_origin)
        )
        services = _services(service, started, pool, replicas, knowledge, files)
        services = {**services, **_prunes(service, services, pool)}
        stack.push_async_callback(services[ChainVerifier].close)
        stack.push_async_callback(services[JobReports].close)
        service.start()
        _keep_running(service, services, replicas, knowledge, files)
        service.node.accepting = True
        try:
            yield service, services
        finally:
            service.node.stop_accepting()
            await service.stop()


def _keep_running(
    service: Service,
    services: Services,
    replicas: Replicas | None,
    knowledge: PrivacyKnowledge,
    files: LoadedFiles,
) -> None:
    """Start the tasks that run beside the write path for the life of the node."""
    verify = service.settings.verify
    works = [
        services[LedgerWatch].run,
        partial(compare_clocks, service.node.wall, services[NodePool]),
        knowledge.run,
        services[PrivacyChanges].finish,
        service.tokens.run,
        service.region_changes.run,
        service.caller_keys.run,
        service.removal.run,
        service.removal.vacuum,
        services[RetentionChanges].run,
        service.access_records.run,
        service.access_records.log.run,
        services[WebhookRegistry].deliveries.run,
        partial(services[ChainVerifier].run, verify.interval.total_seconds(), on_start=verify.on_start),
        services[FullWalk].run,
        services[JobTableWalk].run,
        services[OverbookedNodes].run,
        services[SparkReports].clear,
        services[Watchers].run,
        *(peer.run for peer in service.regions.peers),
        service.importer.log_unfinished,
        *(() if (archiving := services[Archiving | None]) is None else (archiving.run,)),
    ]
    timestamper = _timestamper(service, services[NodePool], files.authorities)
    issuer_keys = None if files.issuer is None else files.issuer.keys
    extras = (files.tls, timestamper, services[Witnesses | None], replicas, issuer_keys)
    works += [each.run for each in extras if each is not None]
    for work in works:
        service.lifecycle.keep(work)


async def _private_fields(
    pool: NodePool, master_key_uri: str, started: StartedNode, service: Service
) -> PrivacyKnowledge:
    """The ledger's private fields, loaded before the first event is taken."""
    knowledge = PrivacyKnowledge(
        pool,
        SubjectKeys(pool, master_key_uri),
        service.node.node_id,
        service.entry_check,
        service.breaks.report_error,
        service.retention,
    )
    unchained = {
        action: [
            PrivacyEntry(each.tenant_id, None, each.job_id, each.payload, each.hlc.physical_ms)
            for each in started.recovered
            if ACTIONS.get(each.record_type) == action
        ]
        for action in (SystemAction.PRIVACY_DECLARED, SystemAction.SUBJECT_ERASED)
    }
    await knowledge.start(Unchained(unchained[SystemAction.PRIVACY_DECLARED], unchained[SystemAction.SUBJECT_ERASED]))
    return knowledge


class LoadedFiles(NamedTuple):
    """TLS, OIDC, witnesses, time-stamping authorities, the place of the archive and limits, loaded from files and
    settings before the node starts."""

    witnesses: ExternalWitnesses
    authorities: Sequence[Authority]
    archive: ArchiveStore | None
    tls: ServerTls | None
    by_certificate: Callable[[Sequence[str]], Principal | None]
    issuer: OidcIssuer | None
    bounds: ConnectionBounds
    receiver_authorities: bytes
    """Certificates (DER) that receivers of webhooks may be traced to, beside those of the system."""

    @classmethod
    def of(cls, settings: Settings) -> LoadedFiles:
        """All of it.

        Raises:
            ConfigurationError: a file or setting is invalid, or cannot be read.
            StartRefusedError: this process may open too few descriptors for connections.
        """
        cert, key, auth, ca = settings.tls.cert, settings.tls.key, settings.auth, settings.webhooks.ca
        if settings.bundle.trusted_keys is not None:
            # Each import and exchange reads it again. A peer that has not started yet has no key.
            Keyring.load(settings.bundle.trusted_keys, may_be_absent=bool(settings.exchange.peers))
        if settings.tracing.endpoint is not None:
            advice = "tracing.endpoint needs packages that are not installed: pip install 'tallystick[tracing]'"
            with reported_as(ConfigurationError, advice, ImportError):
                import_module("app.runtime.tracing")
        return cls(
            _witnesses(settings),
            _authorities(settings),
            store_of(settings.archive),
            None if cert is None or key is None else ServerTls(TlsFiles(cert, key, auth.client_ca)),
            principals_by_name((each.name, each.grant) for each in auth.certificates),
            issuer_of(auth.oidc) if auth.mode == "oidc" else None,
            connection_bounds(settings),
            b"".join(each.public_bytes(Encoding.DER) for each in load_authorities(ca)) if ca else b"",
        )


def _witnesses(settings: Settings) -> ExternalWitnesses:
    """The configured witnesses, with the policy.

    Raises:
        ConfigurationError: the policy is malformed, or cannot be read.
    """
    path = settings.log.policy
    with reported_as(ConfigurationError, "log.policy", InvalidInputError, OSError):
        return ExternalWitnesses.of(settings.log.witnesses, (), None if path is None else Policy.load(path))


def _authorities(settings: Settings) -> list[Authority]:
    """The configured time-stamping authorities, with their trust anchors.

    Raises:
        ConfigurationError: a CA file cannot be read, or the package that makes requests is not installed.
    """
    if configured := settings.log.timestamp_authorities:
        require_available()
    return [Authority(each.url, load_authorities(each.ca_file) if each.ca_file else ()) for each in configured]


def _services(
    service: Service,
    started: StartedNode,
    pool: NodePool,
    replicas: Replicas | None,
    knowledge: PrivacyKnowledge,
    files: LoadedFiles,
) -> Services:
    """The services that routes name, over those of ``service``."""
    settings, metrics = service.settings, service.metrics
    consistency = Consistency(service.node, pool, settings.read.wait.total_seconds())
    witnesses, archiving = _pushed_witnesses(service, pool, files.witnesses.policy), _archiving(service, files.archive)
    asked = (started, knowledge, files.tls, files.issuer, replicas, witnesses, archiving)
    readiness = Readiness(
        node=service.node,
        pool=pool,
        needed=readiness_checks(service),
        reported=reported_checks(service, *asked),
    )
    checks = {"database": lambda: readiness.database_fault, **readiness.needed, **readiness.reported}
    metrics.read(lambda: {"readyz_check_failing": {name: check() is not None for name, check in checks.items()}})
    metrics.read(service.regions.values)
    if replicas is not None:
        metrics.read(lambda: {"replica_fit": replicas.fitness()})
    return {
        Settings: settings,
        Node: service.node,
        NodePool: pool,
        Metrics: metrics,
        Readiness: readiness,
        Consistency: consistency,
        Witnesses | None: witnesses,
        Archiving | None: archiving,
        Notary: service.notary,
        Tokens: service.tokens,
        Trust: service.trust,
        KeyChanges: service.key_changes,
        CallerKeys: service.caller_keys,
        FoundBreaks: service.breaks,
        Losses: service.losses,
        SystemEntries: service.system_entries,
        AccessRecords: service.access_records,
        GroupCommit: service.writer,
        Shipper | None: None if service.leadership is None else service.leadership.shipper,
        LedgerWatch: LedgerWatch(
            node=service.node,
            pool=pool,
            checkpoints=started.checkpoints,
            notary=service.notary,
            keyring=service.trust.signing_now,
            breaks=service.breaks,
            on_failure=service.lifecycle.fail,
            on_signed=service.regions.news.signed,
        ),
        **_request_services(service, started, files),
        **_write_services(service, started, pool, knowledge, consistency),
        **_read_services(service, started, pool, Copies(service.node, pool, consistency, replicas), knowledge),
        **_verification_services(service, started, pool, consistency, files),
        **_sharing_services(service, started, pool, knowledge, files),
    }


def _request_services(service: Service, started: StartedNode, files: LoadedFiles) -> Services:
    """Authentication, rights, and bounds of connections."""
    settings = service.settings
    console_sessions = ConsoleSessions(started.session_secret, settings.auth.session_life)
    callers: CallerSource = (
        OpenToAll()
        if settings.auth.mode == "none"
        else Callers(
            tokens=service.tokens.known,
            issuer=files.issuer,
            by_certificate=files.by_certificate,
            sessions=console_sessions,
        )
    )
    return {
        ConnectionBounds: files.bounds,
        ServerTls | None: files.tls,
        ConsoleSessions: console_sessions,
        CodeFlow | None: code_flow_of(settings.auth),
        AccessControl: AccessControl(
            callers=callers,
            quotas=service.quotas,
            memory=MemoryBudget(LONGEST_BODIES_MAX * settings.http.body_bytes_max, "request bodies"),
            records=service.access_records,
            breaks=service.breaks,
        ),
    }


def _write_services(
    service: Service, started: StartedNode, pool: NodePool, knowledge: PrivacyKnowledge, consistency: Consistency
) -> Services:
    """Services that take events, proposals and reports."""
    node, settings = service.node, service.settings
    sessions, sealing = SessionTokens(started.session_secret), Sealing(knowledge)
    return {
        SessionTokens: sessions,
        Sealing: sealing,
        Submitter: service.submitter,
        HomeRegions: service.submitter.homes,
        FairTurns: service.line_turns,
        StatsIntake: service.stats,
        PrivacyChanges: PrivacyChanges(node, pool, knowledge, service.system_entries),
        ExclusionChanges: ExclusionChanges(service.system_entries, pool, service.job_folds, started.log_origin),
        RetentionChanges: RetentionChanges(
            system=service.system_entries,
            pool=pool,
            reader=service.retention,
            keys=service.keys,
            log_origin=started.log_origin,
            record_bytes_max=settings.wal.record_bytes_max,
            default_period_s=_seconds(settings.retention.period),
            default_minimum_s=_seconds(settings.retention.minimum),
            chained=frozenset(started.heads),
            last_hlc=started.wal.highest_hlc(),
        ),
        Statements: Statements(
            system=service.system_entries,
            signatures=service.submitter.signatures,
            pool=pool,
            retention=service.retention,
        ),
        EventWrites: EventWrites(
            node=node,
            submitter=service.submitter,
            sealing=sealing,
            consistency=consistency,
            sessions=sessions,
            homes=service.submitter.homes,
            event_bytes_max=settings.event_bytes_max,
            root_path=settings.http.root_path,
        ),
        Reports: Reports(submitter=service.submitter, sealing=sealing),
        ProposalWrites: ProposalWrites(
            node=node,
            proposals=Proposals(
                system=service.system_entries,
                keyed=service.keyed,
                answers=service.submitter.answers,
            ),
            sessions=sessions,
            event_bytes_max=settings.event_bytes_max,
        ),
    }


def _seconds(duration: timedelta | None) -> int | None:
    """Whole seconds, rounded up: nothing leaves before its time."""
    return None if duration is None else math.ceil(duration.total_seconds())


def _prunes(service: Service, services: Services, pool: NodePool) -> Services:
    """Services that plan prunes and let entries leave."""
    url = service.settings.archive.url
    archive = None if url is None else StoredArchive(url)
    planner = Planner(
        pool=pool,
        reader=service.retention,
        folds=service.job_folds,
        carrying=Carrying(check=service.entry_check, record_bytes_max=service.settings.wal.record_bytes_max),
        archive=archive,
        keys_of=service.trust.keys_of,
        now_ms=service.node.wall.now_ms,
    )
    verifier: ChainVerifier = services[ChainVerifier]
    changes: RetentionChanges = services[RetentionChanges]

    whole_within_s = WALKS_KEPT * service.settings.verify.full_interval.total_seconds()

    async def verify(tenant_id: str, to_seq: int) -> Verdict:
        return (await verifier.leaving(tenant_id, to_seq, whole_within_s)).verdict

    return {
        Planner: planner,
        Prunes: Prunes(
            planner=planner,
            pool=pool,
            archive=archive,
            verify=verify,
            enter=changes.enter,
            wake_removal=service.removal.wake,
        ),
    }


def _read_services(
    service: Service, started: StartedNode, pool: NodePool, copies: Copies, knowledge: PrivacyKnowledge
) -> Services:
    """Services that read jobs and commitments."""
    report, job_table = service.breaks.report_error, service.job_table
    folded = FoldedJobs(service.job_folds, job_table.doubt, report)
    promise_check = PromiseCheck(job_table.rewrite, service.retention.commitments)
    tables = NodeTables(service.entry_check, promise_check)
    overbooked = OverbookedNodes(tables, pool)
    service.metrics.read(overbooked.values)
    jobs = JobReader(copies, Revealing(knowledge), folded, job_table.follow_now, report, service.retention)

    data_dir, node_id = service.settings.data_dir, service.node.node_id
    spark = SparkReports(folder=data_dir / "spark-report", logs=data_dir / "logs", database_url=service.database_url)

    def source() -> Source:
        made_at = rfc3339.written(datetime.now(UTC), "seconds")
        return Source(started.log_origin, node_id, version("tallystick"), made_at)

    return {
        EntryCheck: service.entry_check,
        JobReader: jobs,
        SparkReports: spark,
        JobReports: JobReports(jobs=jobs, source=source, spark=spark, node_id=node_id),
        JobTableWalk: JobTableWalk(pool, folded, report, job_table.rewrite),
        CommitmentReader: CommitmentReader(copies, service.entry_check, promise_check, tables, service.retention),
        OverbookedNodes: overbooked,
    }


def _verification_services(
    service: Service, started: StartedNode, pool: NodePool, consistency: Consistency, files: LoadedFiles
) -> Services:
    """Services that verify chains, and prove and keep external evidence."""
    settings, last_verified = service.settings, LastVerified(started.wal.folder)
    cosigned_logs = proofs.CosignedLogs(
        pool=pool, external=files.witnesses, keyring=service.trust.keyring, origin=service.notary.origin
    )
    roots = {authority.url: authority.roots for authority in files.authorities}
    verifier = ChainVerifier(
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
            files.witnesses.witnesses,
            lambda url: roots.get(url, ()),
        ),
        positions=VerifiedPositions(started.wal.folder),
        breaks=service.breaks,
        last_verified=last_verified,
        are_key_rows_whole=are_rows_whole,
        metrics=service.metrics,
        origin=service.notary.origin,
    )
    return {
        ExternalWitnesses: files.witnesses,
        proofs.CosignedLogs: cosigned_logs,
        LastVerified: last_verified,
        ChainVerifier: verifier,
        FullWalk: FullWalk(
            pool=pool,
            verifier=verifier,
            wal_folder=started.wal.folder,
            interval_s=settings.verify.full_interval.total_seconds(),
        ),
        CosignatureInbox: CosignatureInbox(
            pool=pool,
            origin=service.notary.origin,
            keyring=service.trust.keyring,
            witnesses=files.witnesses.witnesses,
            max_skew_ms=settings.hlc.max_clock_skew_ms,
        ),
        ReceiptMaker: ReceiptMaker(
            retention=service.retention,
            pool=pool,
            node_id=service.node.node_id,
            log_origin=started.log_origin,
            keys=service.keys,
            published=service.trust.keys_of,
            known_break=partial(service.breaks.fault, is_unmended=True),
            attempts=consistency.attempts,
            quorum_to=cosigned_logs.quorum_to,
        ),
    }


def _sharing_services(
    service: Service, started: StartedNode, pool: NodePool, knowledge: PrivacyKnowledge, files: LoadedFiles
) -> Services:
    """Services that export entries to other systems and import theirs."""

    @contextlib.asynccontextmanager
    async def follow(tenant_id: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        async with service.tails.watching(tenant_id) as tail:
            yield tail.grown_beyond

    async def prove(connection: Connection, tenant_id: str, first: int, second: int) -> Sequence[str]:
        hashes: Sequence[str] = (await proofs.consistency_in(connection, tenant_id, first, second))["hashes"]
        return hashes

    exporter = BundleExporter(
        pool=pool,
        node=service.node,
        log_origin=started.log_origin,
        signer=lambda: service.keys.signer,
        keyring=service.trust.keys_of,
        retention=service.retention,
        sign_now=service.notary.sign_now,
        known_breaks=service.breaks.of_tenant,
        report=lambda error: service.breaks.report_error(error, "export_bundle"),
    )
    return {
        Staging: service.staging,
        BundleImporter: service.importer,
        Regions: service.regions,
        RegionChanges: service.region_changes,
        Watchers: Watchers(service.tails, watchers_max(files.bounds.connections_max), service.metrics),
        RetentionReader: service.retention,
        BundleExporter: exporter,
        Offers: Offers(pool=pool, retention=service.retention, prove=prove, bundle=exporter.small),
        WebhookRegistry: WebhookRegistry(
            WebhookServices(
                pool=pool,
                check=service.entry_check,
                retention=service.retention,
                keys=knowledge.keys,
                note=service.system_entries.note,
                follow=follow,
                log_origin=started.log_origin,
                networks=service.settings.webhooks.networks,
                authorities=files.receiver_authorities,
                metrics=service.metrics,
                report=service.breaks.report_error,
            )
        ),
    }


def _archiving(service: Service, store: ArchiveStore | None) -> Archiving | None:
    """None when no archive is configured."""
    if store is None:
        return None
    archiving = Archiving(
        settings=service.settings.archive,
        store=store,
        database_url=service.database_url,
        signer=lambda: service.keys.signer,
        keyring=service.trust.keyring,
        metrics=service.metrics,
    )
    service.metrics.read(archiving.values)
    return archiving


def _pushed_witnesses(service: Service, pool: NodePool, policy: Policy | None) -> Witnesses | None:
    """The witnesses that checkpoints are pushed to, None if the policy names none."""
    if policy is None:
        return None
    witnesses = Witnesses(
        pool=pool,
        policy=policy,
        origin=service.notary.origin,
        max_skew_ms=service.settings.hlc.max_clock_skew_ms,
        metrics=service.metrics,
        report=service.breaks.report_error,
    )
    service.notary.on_signed.append(witnesses.signed)
    service.metrics.read(witnesses.values)
    return witnesses


def _timestamper(service: Service, pool: NodePool, authorities: Sequence[Authority]) -> Timestamper | None:
    """None when no authority is configured."""
    if not authorities:
        return None
    return Timestamper(
        pool=pool,
        authorities=authorities,
        interval=service.settings.log.timestamp_interval,
        origin=service.notary.origin,
        keyring=service.trust.keyring,
        metrics=service.metrics,
        report=service.breaks.report,
    )

"""The wiring of what reads, exports and answers; the way of writes and its followers are wired in app.node.service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import asyncpg
import structlog

from app.edge.listener import connections_max
from app.edge.parts import Parts
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
from app.read.revealing import Revealing
from app.read.verification import ChainVerifier, VerifiedPositions
from app.read.witness_statements import judged_anchors
from app.runtime.database_faults import DATABASE_FAULTS
from app.runtime.principals import Principal
from app.runtime.settings.config import Settings
from app.runtime.state.last_verified import LastVerified
from app.runtime.state.session import SessionTokens
from app.runtime.tasks.slots import Room
from app.share.bundle.export import BundleExporter
from app.share.bundle.importer import BundleImporter
from app.share.bundle.receipts import ReceiptMaker
from app.share.bundle.staging import Staging
from app.share.exchange.peer import Admit
from app.share.exchange.regions import Regions
from app.share.watch.watchers import Watchers, watchers_max
from app.share.webhooks.registry import WebhookRegistry
from app.store.privacy import PrivacyEntry
from app.store.promise_check import PromiseCheck
from app.store.sessions import STATEMENT_TIMEOUT_S, NodePool
from app.trust.access.callers import Callers, CallerSource, OpenToAll
from app.trust.access.certificates import principals_by_name
from app.trust.access.code_flow import code_flow_of
from app.trust.access.console_sessions import ConsoleSessions
from app.trust.access.oidc import OidcIssuer, issuer_of
from app.trust.access.tls import ServerTls, TlsFiles
from app.trust.privacy.agreement import Unchained
from app.trust.privacy.keys import SubjectKeys
from app.trust.privacy.knowledge import PrivacyKnowledge
from app.write.followers.cosignatures import CosignatureInbox
from app.write.followers.ledger_watch import LedgerWatch
from app.write.followers.timestamps import Authority, Timestamper
from app.write.intake.privacy_changes import PrivacyChanges
from app.write.intake.proposals import Proposals
from app.write.intake.sealing import Sealing
from app.write.pending.keyed_entry import are_rows_whole
from ledger.errors import DatabaseUnavailableError
from ledger.facts.events import ACTIONS, SystemAction
from signing.keys import Keyring
from signing.timestamp import load_authorities, require_available

POOL_CONNECTIONS_MAX = 16
LONGEST_BODIES_MAX = 16
"""How many request bodies as long as they may be are in memory at once."""

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def running(
    settings: Settings, database_url: str, *, accept_lost_wal: bool = False, takeover: Takeover = Takeover.WAITS
) -> AsyncIterator[tuple[Service, Parts]]:
    """A started service with its parts, stopped on leaving."""
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
        parts = _parts(service, started, pool, replicas, knowledge, given)
        held.push_async_callback(parts.verifier.close)
        try:
            await service.tokens.start()
            if settings.auth.mode == "tokens" and not service.tokens.known:
                log.warning("no_token_counts", do="tally token new NAME --first, beside the data; no restart is needed")
            if settings.auth.mode == "none" and service.tokens.known:
                log.warning("tokens_not_asked_for", count=len(service.tokens.known), do="set auth.mode to tokens")
        except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
            raise went_away(error) from error
        service.start()
        service.keep(parts.ledger_watch.run)
        service.keep(partial(wall_clock.watch, service.node.wall, pool))
        service.keep(knowledge.run)
        service.keep(parts.privacy_changes.finish)
        service.keep(service.tokens.run)
        service.keep(service.access_records.run)
        service.keep(service.access_records.log.run)
        service.keep(parts.webhooks.deliveries.run)
        if parts.tls is not None:
            service.keep(parts.tls.run)
        if given.issuer is not None:
            service.keep(given.issuer.keys.run)
        if parts.timestamper is not None:
            service.keep(parts.timestamper.run)
        verify = settings.verify
        verifying = partial(parts.verifier.run, verify.interval.total_seconds(), on_start=verify.on_start)
        service.keep(verifying)
        service.keep(parts.full_walk.run)
        service.keep(parts.job_table_walk.run)
        service.keep(parts.watchers.run)
        for peer in parts.regions.peers:
            service.keep(peer.run)
        service.keep(parts.importer.log_unfinished)
        if replicas is not None:
            service.keep(replicas.run)
        parts.accepting = True
        try:
            yield service, parts
        finally:
            parts.accepting = False
            service.node.shutting_down = True
            await service.stop()


async def _private_fields(
    pool: asyncpg.Pool[asyncpg.Record], master_key_uri: str, started: StartedNode, service: Service
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
    connections_max: int

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
            connections_max(settings),
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


def _parts(
    service: Service,
    started: StartedNode,
    pool: asyncpg.Pool[asyncpg.Record],
    replicas: Replicas | None,
    knowledge: PrivacyKnowledge,
    given: _Given,
) -> Parts:
    """What the routers use, wired to ``service``."""
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

    needed = readiness_checks(service)
    reported = reported_checks(service, started, knowledge, given.tls, given.issuer, regions, replicas)
    parts = Parts(
        settings=settings,
        connections_max=given.connections_max,
        bodies=Room(LONGEST_BODIES_MAX * settings.http.body_bytes_max, "request bodies"),
        node=node,
        pool=pool,
        submitter=service.submitter,
        notary=service.notary,
        verifier=verifier,
        breaks=service.breaks,
        entry_check=service.entry_check,
        losses=service.losses,
        last_verified=last_verified,
        full_walk=_full_walk(service, started, pool, verifier),
        system_entries=service.system_entries,
        access_records=service.access_records,
        ledger_watch=_ledger_watch(service, started, pool),
        exporter=_exporter(service, started, pool),
        receipts=ReceiptMaker(
            pool=pool,
            node_id=node.node_id,
            log_origin=started.log_origin,
            keys=service.keys,
            published=service.trust.keys_of,
            known_break=service.breaks.unmended_fault,
            attempts=consistency.attempts,
        ),
        importer=importer,
        staging=staging,
        regions=regions,
        job_reader=JobReader(copies, revealing, folded, service.job_table.hurry, service.breaks.report_error),
        job_table_walk=JobTableWalk(pool, folded, service.breaks.report_error),
        proposals=Proposals(
            system=service.system_entries,
            keyed=service.keyed,
            answers=service.submitter.answers,
            record_bytes_max=settings.wal.record_bytes_max,
        ),
        commitment_reader=CommitmentReader(copies, service.entry_check, PromiseCheck(service.job_table.begin_again)),
        sealing=Sealing(knowledge),
        revealing=revealing,
        privacy_changes=PrivacyChanges(node, pool, knowledge, service.system_entries),
        sessions=SessionTokens(started.session_secret),
        consistency=consistency,
        metrics=service.metrics,
        quotas=service.quotas,
        line_turns=service.line_turns,
        stats=service.stats,
        watchers=Watchers(service.tails, watchers_max(given.connections_max), service.metrics),
        key_changes=service.key_changes,
        tokens=service.tokens,
        webhooks=_webhooks(service, pool, knowledge),
        callers=_callers(service, given, console_sessions),
        console_sessions=console_sessions,
        code_flow=code_flow_of(settings.auth),
        tls=given.tls,
        trust=service.trust,
        reported_checks=reported,
        witnesses=settings.log.witnesses,
        cosignatures=_cosignatures(service, pool),
        timestamper=_timestamper(service, pool, given.authorities),
        members=service.leadership.shipper.reports if service.leadership is not None else tuple,
        readiness_checks=needed,
    )
    service.metrics.watch_checks({"database": lambda: parts.database_fault, **needed, **reported})
    return parts


def _regions(
    service: Service,
    started: StartedNode,
    pool: asyncpg.Pool[asyncpg.Record],
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


def _webhooks(service: Service, pool: asyncpg.Pool[asyncpg.Record], knowledge: PrivacyKnowledge) -> WebhookRegistry:
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
    pool: asyncpg.Pool[asyncpg.Record],
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


def _exporter(service: Service, started: StartedNode, pool: asyncpg.Pool[asyncpg.Record]) -> BundleExporter:
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


def _importer(service: Service, pool: asyncpg.Pool[asyncpg.Record]) -> BundleImporter:
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


def _cosignatures(service: Service, pool: asyncpg.Pool[asyncpg.Record]) -> CosignatureInbox:
    return CosignatureInbox(
        pool=pool,
        origin=service.notary.origin,
        keyring=service.trust.keyring,
        witnesses=service.settings.log.witnesses,
        max_skew_ms=service.settings.hlc.max_clock_skew_ms,
    )


def _timestamper(
    service: Service, pool: asyncpg.Pool[asyncpg.Record], authorities: Sequence[Authority]
) -> Timestamper | None:
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


def _full_walk(
    service: Service, started: StartedNode, pool: asyncpg.Pool[asyncpg.Record], verifier: ChainVerifier
) -> FullWalk:
    return FullWalk(
        pool=pool,
        verifier=verifier,
        kept=started.checkpoints.newest,
        wal_folder=started.folder,
        interval_s=service.settings.verify.full_interval.total_seconds(),
    )


def _ledger_watch(service: Service, started: StartedNode, pool: asyncpg.Pool[asyncpg.Record]) -> LedgerWatch:
    return LedgerWatch(
        node=service.node,
        pool=pool,
        checkpoints=started.checkpoints,
        notary=service.notary,
        keyring=service.trust.signing_now,
        breaks=service.breaks,
        on_failure=service.fail,
    )

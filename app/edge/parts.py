"""The parts of a running service, wired by ``app.node.wiring`` and used by the routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from app.share.exchange.regions import Regions
from ledger.errors import ChainDamagedError, FencedError, KeyConflictError, NotReadyError

if TYPE_CHECKING:
    import asyncpg

    from app.read.commitments import CommitmentReader
    from app.read.consistency import Consistency
    from app.read.folded_jobs import JobTableWalk
    from app.read.full_walk import FullWalk
    from app.read.jobs import JobReader
    from app.read.revealing import Revealing
    from app.read.verification import ChainVerifier
    from app.runtime.metrics import Metrics
    from app.runtime.settings.config import Settings
    from app.runtime.state.found_breaks import FoundBreaks
    from app.runtime.state.last_verified import LastVerified
    from app.runtime.state.losses import Losses
    from app.runtime.state.node import Node
    from app.runtime.state.session import SessionTokens
    from app.runtime.tasks.sharing import FairTurns
    from app.runtime.tasks.slots import Room
    from app.share.bundle.export import BundleExporter
    from app.share.bundle.importer import BundleImporter
    from app.share.bundle.receipts import ReceiptMaker
    from app.share.bundle.staging import Staging
    from app.share.watch.watchers import Watchers
    from app.share.webhooks.registry import WebhookRegistry
    from app.store.entry_check import EntryCheck
    from app.trust.access.callers import CallerSource
    from app.trust.access.code_flow import CodeFlow
    from app.trust.access.console_sessions import ConsoleSessions
    from app.trust.access.quotas import Quotas
    from app.trust.access.tls import ServerTls
    from app.trust.keys.changes import KeyChanges
    from app.trust.keys.tokens import Tokens
    from app.trust.keys.trust import Trust
    from app.write.followers.cosignatures import CosignatureInbox
    from app.write.followers.ledger_watch import LedgerWatch
    from app.write.followers.notary import Notary
    from app.write.followers.timestamps import Timestamper
    from app.write.intake.access_records import AccessRecords
    from app.write.intake.privacy_changes import PrivacyChanges
    from app.write.intake.proposals import Proposals
    from app.write.intake.sealing import Sealing
    from app.write.intake.submit import Submitter
    from app.write.intake.system_entries import SystemEntries
    from app.write.stats.intake import StatsIntake
    from signing.note import WitnessKey
    from wal.replication.leading import MemberReport

ReadinessCheck = Callable[[], str | None]
"""None when all is well, else what is wrong."""


@dataclass(slots=True)
class Parts:
    """Everything a request may need."""

    settings: Settings
    connections_max: int
    """Connections at once, as far as this process may open files."""
    node: Node
    pool: asyncpg.Pool[asyncpg.Record]
    submitter: Submitter
    notary: Notary
    verifier: ChainVerifier
    ledger_watch: LedgerWatch
    full_walk: FullWalk
    job_table_walk: JobTableWalk
    breaks: FoundBreaks
    entry_check: EntryCheck
    losses: Losses
    last_verified: LastVerified
    system_entries: SystemEntries
    access_records: AccessRecords
    exporter: BundleExporter
    receipts: ReceiptMaker
    importer: BundleImporter
    staging: Staging
    job_reader: JobReader
    proposals: Proposals
    commitment_reader: CommitmentReader
    sealing: Sealing
    revealing: Revealing
    privacy_changes: PrivacyChanges
    sessions: SessionTokens
    consistency: Consistency
    metrics: Metrics
    bodies: Room
    """Large request bodies, from their first byte until they are answered."""
    quotas: Quotas
    line_turns: FairTurns
    """Who looks at the lines of a request next."""
    stats: StatsIntake
    watchers: Watchers
    witnesses: Sequence[WitnessKey]
    """Whose cosignatures are taken and served."""
    cosignatures: CosignatureInbox
    timestamper: Timestamper | None
    """None when no authority is configured."""
    key_changes: KeyChanges
    tokens: Tokens
    webhooks: WebhookRegistry
    callers: CallerSource
    """Says who calls. Asked by every route before the body is read."""
    console_sessions: ConsoleSessions
    code_flow: CodeFlow | None
    """How people sign in at the issuer; None where they do not."""
    trust: Trust
    """The keys that count in the ledger."""
    reported_checks: Mapping[str, ReadinessCheck] = field(default_factory=dict)
    """Checks that ``/readyz`` tells of and that do not make the node unready: writes go on without them."""
    readiness_checks: Mapping[str, ReadinessCheck] = field(default_factory=dict)
    """Checks of ``/readyz`` by name, beside those every service has."""
    members: Callable[[], Sequence[MemberReport]] = field(default=tuple)
    """How the safekeepers of this node follow."""
    regions: Regions = field(default_factory=lambda: Regions(()))
    """The ledgers that this one exchanges with."""
    tls: ServerTls | None = None
    """What connections are made with; None where they are plain."""
    database_fault: str | None = None
    """What was wrong with the database when it was last asked for `/readyz` or `/metrics`."""
    accepting: bool = False
    """Whether requests are taken: false while starting and from the signal to stop on."""

    @contextmanager
    def mending(self, tenant_id: str) -> Iterator[None]:
        """A read of the tenant's stored tree: where that is damaged, or no key that counts signed its checkpoint, both
        are made again in the background."""
        try:
            yield
        except (ChainDamagedError, KeyConflictError):
            self.notary.mend(tenant_id)
            raise

    def check_writable(self) -> None:
        """Refuse unless this node takes writes now.

        Raises:
            FencedError: another process writes this WAL now.
            NotReadyError: the service is starting or stopping, or the node has failed.
        """
        failure = self.node.failure
        if isinstance(failure, FencedError):
            raise FencedError(str(failure))
        if failure is not None:
            raise NotReadyError(f"this node has stopped writing: {failure}")
        self.check_accepting()

    def check_accepting(self) -> None:
        """Refuse unless requests are taken.

        Raises:
            NotReadyError: the service is starting or stopping.
        """
        if not self.accepting or self.node.shutting_down:
            raise NotReadyError("the service is starting or stopping; try again")


def parts_of(request: Request) -> Parts:
    """The parts of the service that ``request`` came to."""
    parts: Parts = request.app.state.parts
    return parts


PartsDep = Annotated[Parts, Depends(parts_of)]

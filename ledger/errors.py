"""Every error the project raises on purpose, under one root.

Each says what happened, where, and what to do; none carries a secret, so its text may go to a log
or, where the HTTP layer maps it to a problem, to a client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ledger.facts import problems
from ledger.facts.problems import ProblemType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ledger.facts.events import Durability
    from ledger.verification.verdict import Break


class LedgerError(Exception):
    """Root of all errors raised on purpose."""

    problem: ProblemType = problems.INTERNAL_ERROR
    """The problem that answers a request which ends in this error: that of the nearest base that names one."""

    def __init_subclass__(cls, problem: ProblemType | None = None) -> None:
        if problem is not None:
            cls.problem = problem


class ProblemError(LedgerError):
    """A request is refused with a problem that no program catches, so that it has no class of its own."""

    def __init__(self, problem: ProblemType, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class InvalidInputError(LedgerError, problem=problems.INVALID_REQUEST):
    """A value from outside is not allowed; ``path`` names the field, such as ``("spec", "image")``."""

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


class CanonicalError(InvalidInputError):
    """A value has no RFC 8785 form: a number out of range, a lone surrogate, U+0000, too deep."""


class ClockSkewError(LedgerError, problem=problems.CLOCK_SKEW):
    """A remote HLC is further ahead of the wall clock than allowed; the clock was left untouched."""


class ProofError(LedgerError):
    """A Merkle proof does not prove what it is said to prove."""


class ConfigurationError(LedgerError):
    """A setting is missing or wrong; the text names it and says what is allowed."""


class UnauthenticatedError(LedgerError, problem=problems.UNAUTHENTICATED):
    """Nothing says who the caller is, or what does is not believed."""


class ForbiddenError(LedgerError, problem=problems.FORBIDDEN):
    """The caller is known and has not the right; where it is one for a tenant, ``tenant_id`` says for which."""

    def __init__(self, message: str, tenant_id: str | None = None) -> None:
        super().__init__(message)
        if tenant_id is not None:
            self.tenant_id = tenant_id


class QuotaExceededError(LedgerError, problem=problems.QUOTA_EXCEEDED):
    """The caller, or the tenant that ``tenant_id`` names, has had its share; there is more in ``retry_after_s``."""

    tenant_id: str

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StartRefusedError(LedgerError):
    """The node must not start as things are; the text says why and what the operator can do."""


class WalError(LedgerError):
    """Root of what can go wrong with a write-ahead log."""


class WalLockedError(WalError):
    """Another process holds the WAL folder."""


class WalFilesError(WalError):
    """Files of a log are not as its writer left them. ``damage`` names the file and what is wrong, without the remedy:
    that of a node's own log is not that of a copy which a safekeeper keeps."""

    def __init__(self, damage: str, remedy: str) -> None:
        super().__init__(f"{damage}. {remedy}")
        self.damage = damage


NODE_REMEDY = (
    "On a node: where safekeepers vote, start it again, and it takes the log from them. Else restore the WAL folder "
    "from a copy, or start once with --accept-lost-wal: what is sound in this folder is appended again, what is not is "
    "given up and named in _system"
)


class WalCorruptError(WalFilesError):
    """Damage that is not a torn tail, or of another file of a log. Nothing was changed; ``segment`` names the file."""

    def __init__(self, segment: str, offset: int, reason: str, remedy: str = NODE_REMEDY) -> None:
        kind = "segment" if segment.endswith(".wal") else "file"
        super().__init__(f"WAL {kind} {segment} is damaged at byte {offset}: {reason}. Nothing was changed", remedy)
        self.segment = segment
        self.offset = offset
        self.reason = reason


class WalPoisonedError(WalError, problem=problems.NOT_READY):
    """A write or fsync failed earlier; this writer takes nothing any more and the process must restart."""


class WalFullError(WalError, problem=problems.BACKLOG_FULL):
    """The bounded queue has no room; nothing was queued. Try again later."""


class RequestTooLargeError(InvalidInputError, problem=problems.PAYLOAD_TOO_LARGE):
    """The events of one request can never fit within a bound, however empty the node is; nothing was queued."""


class RecordTooLargeError(WalError, InvalidInputError, problem=problems.PAYLOAD_TOO_LARGE):
    """One record is over ``wal.record_bytes_max``; nothing was queued."""

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        InvalidInputError.__init__(self, message, path)


class FencedError(LedgerError, problem=problems.FENCED):
    """Another process took a higher epoch on this WAL; this one must stop writing."""


class DatabaseWentBackError(LedgerError, problem=problems.NOT_READY):
    """Postgres is older than what this node has seen: a restore or a bad failover."""


NO_QUORUM = "no-quorum"
"""Why a level was not reached: too few safekeepers follow."""
COPIES_REMOVED = "copies-removed"
"""Why a level cannot be shown: safekeepers have removed the record, so the same request is never answered otherwise."""


@dataclass(eq=False, repr=False, kw_only=True)
class DurabilityTimeoutError(LedgerError, problem=problems.DURABILITY_TIMEOUT):
    """The asked level was not reached in ``write.timeout``, or cannot be shown now; the event is in the WAL or the
    chain and may still reach it.

    The attributes name the event, the last one if there were several; None where nothing is known. ``reason`` is
    ``NO_QUORUM`` where too few safekeepers follow, ``COPIES_REMOVED`` where they have removed the record.
    ``members_away`` are the addresses of those that do not follow, or, for an event that was chained before, of those
    that do not hold the record, or did not answer.
    """

    message: str = field(kw_only=False)
    job_id: str | None = None
    hlc: str | None = None
    epoch: int | None = None
    lsn: int | None = None
    achieved: Durability | None = None
    reason: str | None = None
    members_away: Sequence[str] | None = None


class NotFoundError(LedgerError, problem=problems.NOT_FOUND):
    """The thing asked for does not exist."""


class SignatureError(LedgerError):
    """A signature or a signed document does not hold."""


class UnknownKeyError(SignatureError):
    """No key that the verifier holds made this signature, or the key had expired or been revoked."""


class SigningUnavailableError(LedgerError, problem=problems.SIGNING_UNAVAILABLE):
    """The signer cannot be reached or has no key; chaining goes on, signing catches up."""


class SignerAwayError(SigningUnavailableError):
    """The key of snapshots does not sign now, or may not any more; the rows are not at fault."""


class KeyConflictError(LedgerError, problem=problems.KEY_CONFLICT):
    """What is asked of a key cannot be done in the state it is in."""


class JobNotFoundError(NotFoundError, problem=problems.JOB_NOT_FOUND):
    """No such job, neither chained nor waiting on this node."""


class TenantNotFoundError(NotFoundError, problem=problems.TENANT_NOT_FOUND):
    """No such tenant; a tenant begins with its first write."""


class JobEndedError(LedgerError, problem=problems.JOB_ENDED):
    """The job is known to have ended; it takes no more events."""


class OtherRegionError(LedgerError, problem=problems.OTHER_REGION):
    """An event is about a job of another region, whose ledger at ``url`` takes it."""

    def __init__(self, job_id: str, region: str, url: str) -> None:
        super().__init__(f"job {job_id} is of region {region}: send what concerns it to {url}")
        self.job_id = job_id
        self.url = url


class JobExistsError(LedgerError, problem=problems.JOB_EXISTS):
    """The job is known to have been created, and with another spec."""


@dataclass(eq=False, repr=False, kw_only=True)
class CommitmentConflictError(LedgerError, problem=problems.CONFLICT):
    """A proposal was rejected: its precondition does not hold, or it would break what always holds.

    ``index`` and ``hlc`` are of the entry that records so; ``reason`` is a word for programs. The rest helps the next
    proposal and is None where it says nothing: ``free``, what the node has, ``blocking_index``, of a commitment that
    stands in the way, ``current_epoch``, of the newest adjustment.
    """

    message: str = field(kw_only=False)
    reason: str
    index: int
    hlc: str
    free: object = None
    blocking_index: int | None = None
    current_epoch: int | None = None
    replayed: bool = False
    """Whether the same request was told so before."""


class IdempotencyReusedError(LedgerError, problem=problems.IDEMPOTENCY_KEY_REUSED):
    """An Idempotency-Key came back with another body than its first request had."""


class EventRefusedError(LedgerError, problem=problems.EVENT_REFUSED):
    """Postgres would not hold the event; a REFUSED entry at ``seq`` keeps its bytes in its place.

    ``line`` counts from 1 and is there when the event was one of many in a request.
    """

    line: int

    def __init__(self, message: str, *, seq: int, hlc: str, epoch: int, lsn: int) -> None:
        super().__init__(message)
        self.seq = seq
        self.hlc = hlc
        self.epoch = epoch
        self.lsn = lsn

    def at_line(self, line: int) -> EventRefusedError:
        """This error, once it is known which line of a request it is about."""
        self.line = line
        return self


class InvalidEventError(InvalidInputError, problem=problems.INVALID_EVENT):
    """A line of an NDJSON request is not a valid event; ``line`` counts from 1."""

    def __init__(self, message: str, line: int, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message, path)
        self.line = line


class SeqOutOfRangeError(InvalidInputError, problem=problems.SEQ_OUT_OF_RANGE):
    """A seq or tree size lies outside what the chain, or its newest checkpoint, covers."""


class SessionNotCaughtUpError(LedgerError, problem=problems.SESSION_NOT_CAUGHT_UP):
    """The writes of a session token were not chained in ``read.wait``; they may be later."""


class TooStaleError(LedgerError, problem=problems.TOO_STALE):
    """No source fresh enough for a bounded-staleness read answered in time."""


class WriteLostError(LedgerError, problem=problems.WRITE_LOST):
    """A session token names a write beyond the end of its epoch: it was lost and will never appear."""


class NotReadyError(LedgerError, problem=problems.NOT_READY):
    """The node is starting or shutting down and takes no writes."""


class DatabaseUnavailableError(LedgerError, problem=problems.NOT_READY):
    """Postgres cannot be reached, does not answer in time or refuses; try again later."""


class ChainBrokenError(SigningUnavailableError):
    """Stored rows of a tenant do not hold together, or are not the ones that were chained: nothing of them is signed.

    ``found`` is the break where its place is known.
    """

    def __init__(self, tenant_id: str, reason: str, found: Break | None = None) -> None:
        super().__init__(reason)
        self.tenant_id = tenant_id
        self.found = found


class StoredTreeError(SigningUnavailableError):
    """The stored Merkle tree is not that of its chain; it is made again before anything more is signed."""


class StoredTreeBehindError(StoredTreeError):
    """The stored Merkle tree is shorter than one that this node signed, as after a restore of the database."""


class StoredTreeLockedError(SigningUnavailableError):
    """Another session keeps the row of the stored Merkle tree locked; it grows on once that lets it go."""


class ChainDamagedError(LedgerError, problem=problems.CHAIN_DAMAGED):
    """Stored rows of one tenant are not what they must be: what hangs on them is neither extended nor shown.

    Every other tenant goes on. ``found`` is the break where its place is known; the node reports it, whatever it was
    doing (``app.runtime.state.found_breaks``). A restart of the node is needed only where the tenant is quarantined.
    """

    damaged = "the chain"
    what_to_do = (
        "tally verify --tenant {tenant_id} names what is wrong; restore the rows from a backup, then verify it again. "
        "A restart is needed only where /readyz names the tenant under tenants"
    )

    def __init__(self, tenant_id: str, reason: str, found: Break | None = None) -> None:
        what_to_do = self.what_to_do.format(tenant_id=tenant_id)
        super().__init__(f"{self.damaged} of tenant {tenant_id} is damaged: {reason}. {what_to_do}")
        self.tenant_id = tenant_id
        self.reason = reason
        self.found = found


class KeyRowError(ChainDamagedError):
    """As its base, of a row of the table of keys, which is no part of the chain: a verification compares none but those
    that were met."""

    damaged = "the table scheduler.idempotency"
    what_to_do = (
        "Restore the row from a backup, or remove one that somebody put there; then tally verify --tenant {tenant_id}, "
        "which looks at it again. A restart is needed only where /readyz names the tenant under tenants"
    )


class KnownDamageError(ChainDamagedError):
    """As its base, because of a break that was reported before: the tenant is quarantined, or a break is open."""


class QuarantinedError(KnownDamageError):
    """As its base: the tenant is quarantined until the node is restarted."""

    what_to_do = (
        "tally verify --tenant {tenant_id} names what is wrong; restore the rows from a backup, then restart the node"
    )


class HeldBackError(QuarantinedError):
    """The event is durable in this node's WAL, but the chain of its tenant is damaged and cannot take it.

    It stays in the WAL whatever its age, and is chained once the rows are restored and the node is restarted.
    """

    def __init__(self, tenant_id: str, reason: str, *, job_id: str, hlc: str, epoch: int, lsn: int) -> None:
        super().__init__(tenant_id, f"{reason} (the event is kept at LSN {lsn} of this node and will be chained then)")
        self.job_id = job_id
        self.hlc = hlc
        self.epoch = epoch
        self.lsn = lsn


class BundleInvalidError(LedgerError, problem=problems.BUNDLE_INVALID):
    """A file is not a bundle as docs/formats/bundle.md has it, or its parts are not those its manifest names."""


class NotABundleError(BundleInvalidError):
    """A file is no bundle, whole or damaged: it is something else, which the text names."""


class BundleSignatureError(BundleInvalidError):
    """The signature of a bundle's manifest does not hold, although it names a key that is held."""


class ReceiptInvalidError(LedgerError):
    """A file is not a receipt as docs/formats/receipt.md has it, or not the one that was signed."""


class ReceiptTooLargeError(LedgerError, problem=problems.RECEIPT_TOO_LARGE):
    """A job is more than one receipt holds; the text says what to do."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: ask for receipts of single entries (tally prove --seq N), or export a bundle of the range"
        )


class ReceiptSignatureError(ReceiptInvalidError):
    """The signature of a receipt's statement does not hold, although it names a key that is held."""


class ArchiveInvalidError(LedgerError):
    """An archive is not as docs/formats/archive.md has it, or its files are not those its manifests name.

    ``seq`` is that of the first entry concerned, 0 where that cannot be said.
    """

    def __init__(self, message: str, seq: int = 0) -> None:
        super().__init__(message)
        self.seq = seq


class ArchiveSignatureError(ArchiveInvalidError):
    """The signature of an archive's manifest does not hold, although it names a key that is held."""


class BrokenRangeError(LedgerError):
    """Rows of a range do not hold, so it is not archived; ``found`` says which."""

    def __init__(self, found: Break) -> None:
        super().__init__(f"{found.kind} at seq {found.seq}: {found.detail}")
        self.found = found


class MergeRefusedError(LedgerError):
    """Some of the bundles may not be merged, so none was; ``bundles`` is the verdict object of each of these, with its
    ``file``, ``exit_code`` and ``error``."""

    def __init__(self, bundles: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("; ".join(bundle["error"] for bundle in bundles))
        self.bundles = bundles


class ArchiveConflictError(LedgerError):
    """Something else stands where an archive must be written; nothing was overwritten."""


class ArchiveUnavailableError(LedgerError):
    """The place of an archive cannot be reached, or does not do what is asked of it."""


class NotImportedError(LedgerError):
    """A bundle is not imported; ``verdict`` is what verifying it came to, ``file`` what its sender called it."""

    def __init__(self, message: str, verdict: dict[str, Any] | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.file = file


class BundleRefusedError(NotImportedError, BundleInvalidError):
    """What a bundle holds may not be imported."""


class UntrustedKeyError(NotImportedError, UnknownKeyError, problem=problems.UNTRUSTED_KEY):
    """A bundle is not signed by a key that this ledger trusts to import from, or it trusts none."""


class UploadTooLargeError(InvalidInputError, problem=problems.PAYLOAD_TOO_LARGE):
    """Files sent together are over their bound; nothing of them was kept."""


class PrivacyUnavailableError(LedgerError, problem=problems.PRIVACY_UNAVAILABLE):
    """The keys of private fields cannot be used on this node now; nothing was stored, least of all in clear."""


class PrivacyDamagedError(PrivacyUnavailableError):
    """Rows that private fields hang on are not as they were written: nothing private is taken on their word."""


class PrivateValueError(LedgerError):
    """A private value or a wrapped key does not open with the key it names: it was changed, or moved here."""

"""Every error that the project raises on purpose, under one root.

Each text says what happened, where, and what to do. No text contains a secret, so it may go to a log or, if the HTTP
layer maps the error to a problem, to a client.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ledger.facts import problems
from ledger.facts.problems import ProblemType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ledger.facts.events import Durability
    from ledger.verification.verdict import Break


class LedgerError(Exception):
    """Root of all errors raised on purpose."""

    problem: ProblemType = problems.INTERNAL_ERROR
    """The problem that answers a request which ends in this error; inherited unless a class names its own."""

    def __init_subclass__(cls, problem: ProblemType | None = None) -> None:
        if problem is not None:
            cls.problem = problem


@contextmanager
def reported_as(kind: Callable[[str], Exception], what: str, *errors: type[Exception]) -> Iterator[None]:
    """Raises ``kind`` in place of ``errors``, with ``what`` and the reason. Of an OSError the reason has no path."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{what}: {reason}") from error


def refuse(kind: Callable[[str], Exception], *reasons: tuple[bool, str]) -> None:
    """Raise ``kind`` with the first reason that applies; return if none does."""
    for applies, reason in reasons:
        if applies:
            raise kind(reason)


class ProblemError(LedgerError):
    """A request is refused with a problem that no code catches, so that it needs no class of its own."""

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
    """A remote HLC is further ahead of the wall clock than allowed; the clock is unchanged."""


class ProofError(LedgerError):
    """A Merkle proof does not prove its claim."""


class ConfigurationError(LedgerError):
    """A setting is missing or wrong; the text names it and says what is allowed."""


class UnauthenticatedError(LedgerError, problem=problems.UNAUTHENTICATED):
    """The request has no credentials, or invalid ones."""


class ForbiddenError(LedgerError, problem=problems.FORBIDDEN):
    """The caller is known and lacks the right; if the right is for one tenant, ``tenant_id`` names it."""

    def __init__(self, message: str, tenant_id: str | None = None) -> None:
        super().__init__(message)
        if tenant_id is not None:
            self.tenant_id = tenant_id


class QuotaExceededError(LedgerError, problem=problems.QUOTA_EXCEEDED):
    """The caller, or the tenant ``tenant_id``, has used up its quota; retry after ``retry_after_s``."""

    tenant_id: str

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StartRefusedError(LedgerError):
    """The node must not start in its present state; the text says why and what the operator can do."""


class WalError(LedgerError):
    """Root of the errors of a write-ahead log."""


class WalLockedError(WalError):
    """Another process holds the WAL folder."""


class WalFilesError(WalError):
    """Files of a log are not as its writer left them. ``damage`` names the file and the damage, without the remedy,
    which differs between a node's own log and a safekeeper's copy."""

    def __init__(self, damage: str, remedy: str) -> None:
        super().__init__(f"{damage}. {remedy}")
        self.damage = damage


NODE_REMEDY = (
    "On a node: where safekeepers vote, start it again, and it takes the log from them. Else restore the WAL folder "
    "from a copy, or start once with --accept-lost-wal: what is sound in this folder is appended again, what is not is "
    "given up and named in _system"
)


class WalCorruptError(WalFilesError):
    """Damage other than a torn tail, or damage of another file of a log. No file was changed; ``segment`` names
    the damaged one."""

    def __init__(self, segment: str, offset: int, reason: str, remedy: str = NODE_REMEDY) -> None:
        kind = "segment" if segment.endswith(".wal") else "file"
        super().__init__(f"WAL {kind} {segment} is damaged at byte {offset}: {reason}. Nothing was changed", remedy)
        self.segment = segment
        self.offset = offset
        self.reason = reason


class WalPoisonedError(WalError, problem=problems.NOT_READY):
    """A write or fsync failed earlier; this writer accepts no more records and the process must restart."""


class WalFullError(WalError, problem=problems.BACKLOG_FULL):
    """The bounded queue has no room; nothing was queued. Retry later."""


class RequestTooLargeError(InvalidInputError, problem=problems.PAYLOAD_TOO_LARGE):
    """The events of one request can never fit within a bound, however empty the node is; nothing was queued."""


class RecordTooLargeError(WalError, InvalidInputError, problem=problems.PAYLOAD_TOO_LARGE):
    """One record is over ``wal.record_bytes_max``; nothing was queued."""

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        InvalidInputError.__init__(self, message, path)


class FencedError(LedgerError, problem=problems.FENCED):
    """Another process took a higher epoch on this WAL; this one must stop writing."""


class DatabaseWentBackError(LedgerError, problem=problems.NOT_READY):
    """Postgres is in an older state than this node has seen: a restore or a bad failover."""


NO_QUORUM = "no-quorum"
"""Why a level was not reached: too few safekeepers follow."""
COPIES_REMOVED = "copies-removed"
"""Why a level cannot be proved: safekeepers have removed the record, so a retry gets the same answer."""


@dataclass(eq=False, repr=False, kw_only=True)
class DurabilityTimeoutError(LedgerError, problem=problems.DURABILITY_TIMEOUT):
    """The requested level was not reached in ``write.timeout``, or cannot be proved now; the event is in the WAL or the
    chain and may still reach it.

    The attributes name the event, the last one of several; None if unknown. ``reason`` is ``NO_QUORUM`` if too few
    safekeepers follow, ``COPIES_REMOVED`` if they have removed the record. ``members_away`` are the addresses of the
    safekeepers that do not follow, or, for an already chained event, that lack the record or did not answer.
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
    """The requested object does not exist."""


class SignatureError(LedgerError):
    """A signature or a signed document is invalid."""


class UnknownKeyError(SignatureError):
    """The signing key is not among the verifier's keys, or had expired or been revoked."""


class SigningUnavailableError(LedgerError, problem=problems.SIGNING_UNAVAILABLE):
    """The signer cannot be reached or has no key; chaining continues, signing catches up."""


class SignerAwayError(SigningUnavailableError):
    """The snapshot key cannot sign now, or may no longer sign; the rows are not at fault."""


class KeyConflictError(LedgerError, problem=problems.KEY_CONFLICT):
    """The key's state does not allow the requested operation."""


class JobNotFoundError(NotFoundError, problem=problems.JOB_NOT_FOUND):
    """No such job, neither chained nor waiting on this node."""


class TenantNotFoundError(NotFoundError, problem=problems.TENANT_NOT_FOUND):
    """No such tenant; a tenant is created by its first write."""


class ArchivedError(LedgerError, problem=problems.ARCHIVED):
    """What was asked for has left the database with a prune, for the archive at this address."""

    def __init__(self, message: str, *, archive: str, manifest: str | None, verified_from_seq: int) -> None:
        super().__init__(message)
        self.archive = archive
        self.manifest = manifest
        self.verified_from_seq = verified_from_seq


class JobEndedError(LedgerError, problem=problems.JOB_ENDED):
    """The job is known to have ended; it accepts no more events."""


class OtherRegionError(LedgerError, problem=problems.OTHER_REGION):
    """An event is about a job of another region, and this ledger leaves it to that region's: ``url`` is the job's
    address there."""

    line: int

    def __init__(self, job_id: str, home_region: str, ledger_url: str) -> None:
        self.job_id = job_id
        self.home_region = home_region
        self.url = f"{ledger_url}/v1/jobs/{job_id}"
        super().__init__(f"job {job_id} is of region {home_region}: send its events to {self.url}")

    def at_line(self, line: int) -> OtherRegionError:
        """This error, about a line of a request."""
        self.line = line
        return self


class JobExistsError(LedgerError, problem=problems.JOB_EXISTS):
    """The job is known to have been created, and with another spec."""


@dataclass(eq=False, repr=False, kw_only=True)
class CommitmentConflictError(LedgerError, problem=problems.CONFLICT):
    """A proposal was rejected: its precondition is false, or it would violate an invariant.

    ``index`` and ``hlc`` are those of the entry with the rejection; ``reason`` is a word for programs. The other
    attributes help the next proposal, or are None: ``free`` is the node's free amount, ``blocking_index`` the index of
    a blocking commitment, ``current_epoch`` the epoch of the newest adjustment.
    """

    message: str = field(kw_only=False)
    reason: str
    index: int
    hlc: str
    free: object = None
    blocking_index: int | None = None
    current_epoch: int | None = None
    replayed: bool = False
    """Whether the same request had this answer before."""


class IdempotencyReusedError(LedgerError, problem=problems.IDEMPOTENCY_KEY_REUSED):
    """A request reused an Idempotency-Key with another body."""


class EventRefusedError(LedgerError, problem=problems.EVENT_REFUSED):
    """Postgres refused the event; a REFUSED entry at ``seq`` keeps its bytes instead.

    ``line`` counts from 1 and is set if the request had several events.
    """

    line: int

    def __init__(self, message: str, *, seq: int, hlc: str, epoch: int, lsn: int) -> None:
        super().__init__(message)
        self.seq = seq
        self.hlc = hlc
        self.epoch = epoch
        self.lsn = lsn

    def at_line(self, line: int) -> EventRefusedError:
        """This error with the line of the request."""
        self.line = line
        return self


class InvalidEventError(InvalidInputError, problem=problems.INVALID_EVENT):
    """A line of an NDJSON request is not a valid event; ``line`` counts from 1."""

    def __init__(self, message: str, line: int, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message, path)
        self.line = line


class SeqOutOfRangeError(InvalidInputError, problem=problems.SEQ_OUT_OF_RANGE):
    """A seq or tree size is outside the chain or its newest checkpoint."""


class SessionNotCaughtUpError(LedgerError, problem=problems.SESSION_NOT_CAUGHT_UP):
    """The writes of a session token were not chained within ``read.wait``; they may be chained later."""


class TooStaleError(LedgerError, problem=problems.TOO_STALE):
    """No source fresh enough for a bounded-staleness read answered in time."""


class WriteLostError(LedgerError, problem=problems.WRITE_LOST):
    """A session token names a write beyond the end of its epoch: it was lost and will never appear."""


class NotReadyError(LedgerError, problem=problems.NOT_READY):
    """The node is starting or shutting down and accepts no writes."""


class DatabaseUnavailableError(LedgerError, problem=problems.NOT_READY):
    """Postgres cannot be reached, does not answer in time or refuses; retry later."""


class ChainBrokenError(SigningUnavailableError):
    """Stored rows of a tenant are inconsistent, or differ from what was chained: none of them is signed.

    ``found`` is the break if its place is known.
    """

    def __init__(self, tenant_id: str, reason: str, found: Break | None = None) -> None:
        super().__init__(reason)
        self.tenant_id = tenant_id
        self.found = found


class StoredTreeError(SigningUnavailableError):
    """The stored Merkle tree differs from its chain; it is rebuilt before the next signature."""


class StoredTreeBehindError(StoredTreeError):
    """The stored Merkle tree is shorter than one that this node signed, as after a restore of the database."""


class StoredTreeLockedError(SigningUnavailableError):
    """Another session has locked the row of the stored Merkle tree; the tree grows again after the lock is released."""


class ChainDamagedError(LedgerError, problem=problems.CHAIN_DAMAGED):
    """Stored rows of one tenant are damaged: nothing that depends on them is extended or shown.

    Every other tenant is unaffected. ``found`` is the break if its place is known; the node reports it in any case
    (``app.runtime.state.found_breaks``). The node must be restarted only if the tenant is quarantined.
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
    """As its base, for a row of the table of keys, which is not part of the chain: a verification compares only key
    rows that were found broken before."""

    damaged = "the table scheduler.idempotency"
    what_to_do = (
        "Restore the row from a backup, or remove one that somebody put there; then tally verify --tenant {tenant_id}, "
        "which looks at it again. A restart is needed only where /readyz names the tenant under tenants"
    )


class KnownDamageError(ChainDamagedError):
    """As its base, for a break reported before: the tenant is quarantined, or a break is open."""


class QuarantinedError(KnownDamageError):
    """As its base: the tenant is quarantined until the node is restarted."""

    what_to_do = (
        "tally verify --tenant {tenant_id} names what is wrong; restore the rows from a backup, then restart the node"
    )


class HeldBackError(QuarantinedError):
    """The event is durable in this node's WAL, but its tenant's chain is damaged and cannot be extended.

    It stays in the WAL regardless of its age, and is chained once the rows are restored and the node is restarted.
    """

    def __init__(self, tenant_id: str, reason: str, *, job_id: str, hlc: str, epoch: int, lsn: int) -> None:
        super().__init__(tenant_id, f"{reason} (the event is kept at LSN {lsn} of this node and will be chained then)")
        self.job_id = job_id
        self.hlc = hlc
        self.epoch = epoch
        self.lsn = lsn


class BundleInvalidError(LedgerError, problem=problems.BUNDLE_INVALID):
    """A file is not a bundle by docs/formats/bundle.md, or its parts are not those that its manifest names."""


class NotABundleError(BundleInvalidError):
    """A file is neither a bundle nor a damaged one; the text names its kind."""


class BundleSignatureError(BundleInvalidError):
    """The signature of a bundle's manifest is invalid, although the verifier has the key that it names."""


class V1ChainBrokenError(LedgerError):
    """A chain of the v1 scheduler log was changed; the text names the first row that does not fit."""


class ReceiptInvalidError(LedgerError):
    """A file is not a receipt by docs/formats/receipt.md, or not the one that was signed."""


class ReceiptTooLargeError(LedgerError, problem=problems.RECEIPT_TOO_LARGE):
    """A job is too large for one receipt; the text says what to do."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: ask for receipts of single entries (tally prove --seq N), or export a bundle of the range"
        )


class ReceiptSignatureError(ReceiptInvalidError):
    """The signature of a receipt's statement is invalid, although the verifier has the key that it names."""


class ArchiveInvalidError(LedgerError, problem=problems.ARCHIVE_DISAGREES):
    """An archive violates docs/formats/archive.md, or its files are not those that its manifests name.

    ``seq`` is that of the first entry concerned, 0 if unknown.
    """

    def __init__(self, message: str, seq: int = 0) -> None:
        super().__init__(message)
        self.seq = seq


class ArchiveSignatureError(ArchiveInvalidError):
    """The signature of an archive's manifest is invalid, although the verifier has the key that it names."""


class BrokenRangeError(LedgerError):
    """Rows of a range are broken, so it is not archived; ``found`` is the break."""

    def __init__(self, found: Break) -> None:
        super().__init__(f"{found.kind} at seq {found.seq}: {found.detail}")
        self.found = found


class MergeRefusedError(LedgerError):
    """Some bundles may not be merged, so none was. ``bundles`` is the verdict object of each refused bundle, with its
    ``file``, ``exit_code`` and ``error``."""

    def __init__(self, bundles: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("; ".join(bundle["error"] for bundle in bundles))
        self.bundles = bundles


class ArchiveConflictError(LedgerError):
    """Another file exists where an archive must be written; nothing was overwritten."""


class ArchiveUnavailableError(LedgerError, problem=problems.ARCHIVE_UNAVAILABLE):
    """The place of an archive cannot be reached, or fails a request."""


class NotImportedError(LedgerError):
    """A bundle is not imported; ``verdict`` is its verification's result, ``file`` the sender's name for it."""

    def __init__(self, message: str, verdict: dict[str, Any] | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.file = file


class BundleRefusedError(NotImportedError, BundleInvalidError):
    """The content of a bundle may not be imported."""


class UntrustedKeyError(NotImportedError, UnknownKeyError, problem=problems.UNTRUSTED_KEY):
    """A bundle is not signed by a key that this ledger trusts for imports, or it trusts none."""


class UploadTooLargeError(InvalidInputError, problem=problems.PAYLOAD_TOO_LARGE):
    """Files sent together exceed their bound; none was kept."""


class PrivacyUnavailableError(LedgerError, problem=problems.PRIVACY_UNAVAILABLE):
    """The keys of private fields cannot be used on this node now; nothing was stored, encrypted or in clear."""


class PrivacyDamagedError(PrivacyUnavailableError):
    """Rows on which private fields depend differ from what was written; this node does not use them."""


class PrivateValueError(LedgerError):
    """A private value or a wrapped key does not open with the key that it names: it was changed, or moved here."""

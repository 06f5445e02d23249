"""The errors of the API, as Problem Details (RFC 9457).

To add one, declare it here and write the generated files again (``make facts``). An error of :mod:`ledger.errors` names
its problem; an error that no code catches needs no class: ``raise ProblemError(PROBLEM, detail)``.
"""

from enum import Enum, auto
from typing import Final, NamedTuple


class Retry(Enum):
    """Whether the same request may succeed when it is sent again."""

    LATER = auto()
    """Yes, without a change: programs try again, after ``Retry-After`` where there is one."""
    AFTER_CHANGE = auto()
    """Yes, after something else has changed, such as rights, a setting or the chain."""
    NEVER = auto()
    """No: the request itself is at fault, so it is refused again."""


class ProblemType(NamedTuple):
    """One problem."""

    name: str
    """The end of its URI."""
    status: int
    """The status of the HTTP answer."""
    title: str
    retry: Retry
    remedy: str
    """What a caller or an operator does about it; Markdown."""
    advice: str = ""
    """The same for a person at the console, where people meet it there."""


ARCHIVE_DISAGREES = ProblemType(
    "archive-disagrees",
    409,
    "The archive is not that of the chain",
    Retry.AFTER_CHANGE,
    "nothing has left. `tally verify --archive` says what is wrong: put back what is missing or changed, or archive "
    "to another place",
    advice="Nothing has left. Verify the archive: the detail says which file or entry is wrong.",
)
ARCHIVE_UNAVAILABLE = ProblemType(
    "archive-unavailable",
    503,
    "The archive cannot be reached",
    Retry.LATER,
    "nothing has left. `GET /v1/archive` says since when; see that the folder is there or the bucket answers",
)
ARCHIVED = ProblemType(
    "archived",
    410,
    "It has left for the archive",
    Retry.NEVER,
    "read it from `archive` (`tally jobs --archive`); `manifest` is the digest of the manifest there that covers it, "
    "`verified_from_seq` the first entry that is still here. The id of a job that left is not used again",
    advice="Read it from the archive, which the detail names.",
)
BACKLOG_FULL = ProblemType(
    "backlog-full",
    503,
    "Too many events wait to be chained",
    Retry.LATER,
    "try again after `Retry-After`; the database is behind or away",
)
BUNDLE_INVALID = ProblemType(
    "bundle-invalid",
    422,
    "The bundle does not hold",
    Retry.AFTER_CHANGE,
    "`verdict` and `file` say what does not hold; get the bundle again from its ledger",
    advice="Get the bundle again from its ledger. What does not hold stands above.",
)
CHAIN_DAMAGED = ProblemType(
    "chain-damaged",
    409,
    "Stored rows of the tenant are damaged",
    Retry.AFTER_CHANGE,
    "the operator runs `tally verify`, restores the rows from a backup and verifies again; the detail says whether the "
    "node must be restarted ([runbook](runbook.md#rows))",
    advice="Verify the tenant: that shows where.",
)
CLOCK_SKEW = ProblemType(
    "clock-skew",
    400,
    "A time lies too far ahead",
    Retry.AFTER_CHANGE,
    "set the clock of whoever made the time (`hlc.max_clock_skew`)",
)
CONFLICT = ProblemType(
    "conflict",
    409,
    "The proposal was rejected",
    Retry.AFTER_CHANGE,
    "`reason` says why ([commitments](commitments.md)), `index` which entry records it, `blocking_index` which "
    "commitment stands in the way, `free` what the node has; read again and propose something else",
)
COSIGNATURE_REFUSED = ProblemType(
    "cosignature-refused",
    422,
    "The cosigned checkpoint is not taken",
    Retry.AFTER_CHANGE,
    "cosign the newest checkpoint, unchanged, with a key that `log.witnesses` or `log.policy` names",
)
DURABILITY_TIMEOUT = ProblemType(
    "durability-timeout",
    503,
    "The level asked for was not reached, or cannot be shown now",
    Retry.LATER,
    "repeat with the same Idempotency-Key, unless `reason` is `copies-removed`, which is final; `achieved` and "
    "`members_away` say more ([replication](replication.md#what-is-answered-when))",
)
EVENT_REFUSED = ProblemType(
    "event-refused",
    422,
    "The event was recorded as REFUSED",
    Retry.NEVER,
    "the REFUSED entry at `seq` keeps the bytes; correct the event, send it under a new Idempotency-Key",
)
FENCED = ProblemType(
    "fenced",
    503,
    "This node may not write any more",
    Retry.LATER,
    "another process writes this WAL; use another node",
)
FORBIDDEN = ProblemType(
    "forbidden",
    403,
    "The caller may not do this",
    Retry.AFTER_CHANGE,
    "ask whoever issues tokens for the right; `GET /v1/whoami` says which there are",
    advice="Ask whoever issues tokens for this right; your rights are listed under Access.",
)
HEADERS_TOO_LARGE = ProblemType(
    "headers-too-large",
    431,
    "The head of the request is too large",
    Retry.AFTER_CHANGE,
    "send fewer or shorter headers",
)
HOST_NOT_ALLOWED = ProblemType(
    "host-not-allowed",
    421,
    "The service is not called by this name",
    Retry.AFTER_CHANGE,
    "use an address, or have the operator name the host in `http.hosts`",
)
IDEMPOTENCY_KEY_REUSED = ProblemType(
    "idempotency-key-reused",
    422,
    "The Idempotency-Key belongs to another request",
    Retry.NEVER,
    "use a new key for another body",
)
IDEMPOTENCY_KEY_UNPROVEN = ProblemType(
    "idempotency-key-unproven",
    409,
    "Nothing proves what the Idempotency-Key was used for",
    Retry.NEVER,
    "it was used before entries said their key; take the job that is named for the outcome if it is yours, else "
    "send the request under a new key",
)
INTERNAL_ERROR = ProblemType(
    "internal-error",
    500,
    "The service failed",
    Retry.LATER,
    "the cause is in the log of the service; repeat with the same Idempotency-Key",
)
INVALID_EVENT = ProblemType(
    "invalid-event",
    422,
    "A line is not a valid event",
    Retry.NEVER,
    "correct line `line`; nothing of the request was taken",
)
INVALID_REQUEST = ProblemType(
    "invalid-request",
    422,
    "The request is not valid",
    Retry.NEVER,
    "correct what `path` names",
)
JOB_ENDED = ProblemType(
    "job-ended",
    409,
    "The job has ended",
    Retry.NEVER,
    "nothing more can happen to the job; one that lost its Idempotency-Key never was: the detail names the job "
    "that won",
)
JOB_EXISTS = ProblemType(
    "job-exists",
    409,
    "The job was created with another spec",
    Retry.NEVER,
    "choose another `job_id`; the same `spec` and `assigned_dcs` again are recorded and change nothing",
)
JOB_NOT_FOUND = ProblemType(
    "job-not-found",
    404,
    "There is no such job",
    Retry.NEVER,
    "check tenant and id; a job just made elsewhere needs its `Tally-Session`, one of another region its import",
    advice="Check tenant and job.",
)
KEY_CONFLICT = ProblemType(
    "key-conflict",
    409,
    "The key is in another state",
    Retry.AFTER_CHANGE,
    "look at `/v1/keys`: the key was rotated, admitted or revoked meanwhile, or the node asked is not admitted "
    "itself; or no key that counts signed the newest checkpoint",
    advice="The key was changed meanwhile, or this node's own key is not admitted: the page Keys shows both.",
)
MALFORMED_HTTP = ProblemType(
    "malformed-http",
    400,
    "That is not an HTTP request",
    Retry.AFTER_CHANGE,
    "correct the client, or the proxy before the service",
)
METHOD_NOT_ALLOWED = ProblemType(
    "method-not-allowed",
    405,
    "The method is not allowed here",
    Retry.AFTER_CHANGE,
    "use a method that the header `Allow` names",
)
NOT_FOUND = ProblemType(
    "not-found",
    404,
    "There is nothing here",
    Retry.AFTER_CHANGE,
    "look at `/docs` for the paths, at the list for what there is",
)
NOT_READY = ProblemType(
    "not-ready",
    503,
    "The node is not ready",
    Retry.LATER,
    "try again after `Retry-After`; `/readyz` says what is missing",
    advice="Try again in a moment; the overview says what is wrong.",
)
ORIGIN_NOT_ALLOWED = ProblemType(
    "origin-not-allowed",
    403,
    "A page of another origin may change nothing",
    Retry.AFTER_CHANGE,
    "call from a page of the service's own origin; behind a proxy the operator names its host in `http.hosts`",
)
OTHER_REGION = ProblemType(
    "other-region",
    421,
    "The job is of another region",
    Retry.NEVER,
    "send the event to the ledger of that region: `Location` is the job's address there, `home_region` the region",
)
PAYLOAD_TOO_LARGE = ProblemType(
    "payload-too-large",
    413,
    "The request is too large",
    Retry.NEVER,
    "send less at once; the detail names the bound",
)
PRIVACY_UNAVAILABLE = ProblemType(
    "privacy-unavailable",
    503,
    "Private fields cannot be encrypted here now",
    Retry.LATER,
    "try again later; the operator looks at `privacy` in `/readyz`, and at `privacy.master_key_uri`",
)
QUOTA_EXCEEDED = ProblemType(
    "quota-exceeded",
    429,
    "The caller or the tenant has had its share",
    Retry.LATER,
    "try again after `Retry-After`; `quota.*` says how much there is",
    advice="Wait a moment and try again.",
)
RECEIPT_TOO_LARGE = ProblemType(
    "receipt-too-large",
    422,
    "The job is more than one receipt holds",
    Retry.AFTER_CHANGE,
    "it has more than 10,000 entries or 64 MiB: ask for receipts of single entries, or export a bundle of the range",
)
REGION_CONFLICT = ProblemType(
    "region-conflict",
    409,
    "The region is in another state",
    Retry.AFTER_CHANGE,
    "look at `tally peer list`: the region is retired already, or its ledger still answers and must be stopped first",
)
REGION_RETIRED = ProblemType(
    "region-retired",
    403,
    "The region of the asking ledger is retired here",
    Retry.AFTER_CHANGE,
    "nothing that the asking ledger chains comes here by itself; its operator brings it by a bundle, or returns as "
    "the [runbook](runbook.md#the-region-returns) says",
)
REQUEST_TIMEOUT = ProblemType(
    "request-timeout",
    408,
    "The request did not come in time",
    Retry.LATER,
    "send the rest faster, or raise `http.header_timeout` or `http.body_timeout`; nothing of it was taken",
)
RETENTION_CONFLICT = ProblemType(
    "retention-conflict",
    409,
    "The retention of the tenant is in another state",
    Retry.AFTER_CHANGE,
    "read `GET /v1/retention` again: a minimum is never shortened, a hold is released once, and of changes at the same "
    "moment one counts",
    advice="Read the policy again: somebody changed it meanwhile, or a minimum would be shortened.",
)
SEQ_OUT_OF_RANGE = ProblemType(
    "seq-out-of-range",
    422,
    "The chain does not reach that far",
    Retry.AFTER_CHANGE,
    "ask for entries up to the head",
)
SESSION_NOT_CAUGHT_UP = ProblemType(
    "session-not-caught-up",
    503,
    "The session's writes are not here yet",
    Retry.LATER,
    "try again after `Retry-After`, or read without the session",
)
SIGNATURE_INVALID = ProblemType(
    "signature-invalid",
    422,
    "The caller did not sign this",
    Retry.NEVER,
    "sign exactly the bytes of [signed events](formats/signed-events.md), with a registered key, for times around now",
)
SIGNATURE_REQUIRED = ProblemType(
    "signature-required",
    403,
    "The event must be signed by its caller",
    Retry.NEVER,
    "sign it: [signing events](signing-events.md); `GET /v1/callers` lists what must be signed",
)
SIGNING_UNAVAILABLE = ProblemType(
    "signing-unavailable",
    503,
    "Nothing can be signed now",
    Retry.LATER,
    "try again after `Retry-After`; the operator looks at the signer",
)
STATEMENT_REJECTED = ProblemType(
    "statement-rejected",
    400,
    "Rejected",
    Retry.NEVER,
    "the detail says why; [SCITT](scitt.md#what-is-registered) says what a signed statement must have and who signs it",
)
REPORT_ELSEWHERE = ProblemType(
    "report-elsewhere",
    421,
    "Another node keeps the report",
    Retry.LATER,
    "its id begins with the node that made it: ask that node, or again where a balancer chooses the node "
    "([reports](search.md#a-report-of-them))",
    advice="Ask again, or open the console of the node that is named above.",
)
REPORT_TOO_LARGE = ProblemType(
    "report-too-large",
    422,
    "The report is one for Spark",
    Retry.AFTER_CHANGE,
    "the jobs of the period follow from more than 1,000,000 entries, and the detail says why Spark made none "
    "beside the node: name a shorter period, or run the command that it names ([pipeline](pipeline.md#report))",
    advice="Name a shorter period, or run the command above.",
)
SUBJECT_NOT_FOUND = ProblemType(
    "subject-not-found",
    404,
    "There is no such subject",
    Retry.AFTER_CHANGE,
    "check tenant and subject: no event has private fields of this subject",
)
TENANT_NOT_FOUND = ProblemType(
    "tenant-not-found",
    404,
    "There is no such tenant",
    Retry.AFTER_CHANGE,
    "check the name; a tenant begins with its first event",
    advice="Check the name. A tenant begins with its first event.",
)
TOO_STALE = ProblemType(
    "too-stale",
    503,
    "Nothing fresh enough could answer",
    Retry.LATER,
    "allow more staleness, or try again after `Retry-After`",
)
TRANSFER_CODING_UNSUPPORTED = ProblemType(
    "transfer-coding-unsupported",
    501,
    "The transfer coding is not supported",
    Retry.AFTER_CHANGE,
    "send `Transfer-Encoding: chunked`, or a `Content-Length`",
)
UNAUTHENTICATED = ProblemType(
    "unauthenticated",
    401,
    "Nothing says who calls",
    Retry.AFTER_CHANGE,
    "send `Authorization: Bearer` and a token that counts",
    advice="Sign in again.",
)
UNSUPPORTED_MEDIA_TYPE = ProblemType(
    "unsupported-media-type",
    415,
    "The media type is not supported",
    Retry.AFTER_CHANGE,
    "send the media type that `/docs` names, without a Content-Encoding",
)
UNTRUSTED_KEY = ProblemType(
    "untrusted-key",
    422,
    "The bundle was not signed by a trusted key",
    Retry.AFTER_CHANGE,
    "the operator adds the key to `bundle.trusted_keys`, if it is to be trusted",
    advice="Whoever runs the service adds the key to bundle.trusted_keys, if it is to be trusted.",
)
WRITE_LOST = ProblemType(
    "write-lost",
    409,
    "The session's write was lost",
    Retry.NEVER,
    "do the write again, forget the session",
)


PROBLEMS: Final = tuple(sorted(problem for problem in tuple(vars().values()) if isinstance(problem, ProblemType)))
"""Every problem, by name."""

"""Problem Details (RFC 9457): the one shape of every answer that is not the one asked for.

    {"type": URI, "title", "status", "detail", ...members of the problem}

``type`` is ``https://tallystick.dev/problems/`` and one of the names below; clients compare it and may show
``title`` and ``detail``. ``detail`` is the text of an error raised on purpose. Any other exception becomes
``internal-error`` without a word about its cause, which goes to the log. Every 503 has Retry-After, but one that stays
as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
import structlog
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.edge.forms.unknown_fields import first_error, nearest_field
from app.runtime.settings.words import words_of
from ledger import errors

PROBLEM_URI = "https://tallystick.dev/problems/"
PROBLEM_MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = "1"
AUTHENTICATE = 'Bearer realm="tallystick"'
DETAIL_CHARACTERS_MAX = 1000
"""Longest ``detail``; what a caller sent may be part of it."""
PATH_PART_CHARACTERS_MAX = 128
ERRORS_LISTED_MAX = 1000
"""With more faults than this in one body none is picked out: listing them would hold up everybody else."""

_log = structlog.get_logger(__name__)


class ProblemType(NamedTuple):
    """One kind of problem: the end of its URI, its HTTP status and what it is called."""

    name: str
    status: int
    title: str


class ProblemError(Exception):
    """A problem that is a matter of HTTP alone, so no ledger error stands for it."""

    def __init__(self, kind: ProblemType, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


HEADERS_TOO_LARGE = ProblemType("headers-too-large", 431, "The head of the request is too large")
HOST_NOT_ALLOWED = ProblemType("host-not-allowed", 421, "The service is not called by this name")
INTERNAL_ERROR = ProblemType("internal-error", 500, "The service failed")
INVALID_REQUEST = ProblemType("invalid-request", 422, "The request is not valid")
MALFORMED_HTTP = ProblemType("malformed-http", 400, "That is not an HTTP request")
METHOD_NOT_ALLOWED = ProblemType("method-not-allowed", 405, "The method is not allowed here")
NOT_FOUND = ProblemType("not-found", 404, "There is nothing here")
NOT_READY = ProblemType("not-ready", 503, "The node is not ready")
ORIGIN_NOT_ALLOWED = ProblemType("origin-not-allowed", 403, "A page of another origin may change nothing")
PAYLOAD_TOO_LARGE = ProblemType("payload-too-large", 413, "The request is too large")
REQUEST_TIMEOUT = ProblemType("request-timeout", 408, "The request did not come in time")
TRANSFER_CODING_UNSUPPORTED = ProblemType("transfer-coding-unsupported", 501, "The transfer coding is not supported")
UNSUPPORTED_MEDIA_TYPE = ProblemType("unsupported-media-type", 415, "The media type is not supported")

PROBLEMS: Mapping[type[Exception], ProblemType] = {
    errors.BundleInvalidError: ProblemType("bundle-invalid", 422, "The bundle does not hold"),
    errors.ChainDamagedError: ProblemType("chain-damaged", 409, "Stored rows of the tenant are damaged"),
    errors.ClockSkewError: ProblemType("clock-skew", 400, "A time lies too far ahead"),
    errors.CommitmentConflictError: ProblemType("conflict", 409, "The proposal was rejected"),
    errors.CosignatureRefusedError: ProblemType("cosignature-refused", 422, "The cosigned checkpoint is not taken"),
    errors.DatabaseUnavailableError: NOT_READY,
    errors.DatabaseWentBackError: NOT_READY,
    errors.DurabilityTimeoutError: ProblemType(
        "durability-timeout", 503, "The level asked for was not reached, or cannot be shown now"
    ),
    errors.EventRefusedError: ProblemType("event-refused", 422, "The event was recorded as REFUSED"),
    errors.ForbiddenError: ProblemType("forbidden", 403, "The caller may not do this"),
    errors.FencedError: ProblemType("fenced", 503, "This node may not write any more"),
    errors.IdempotencyReusedError: ProblemType(
        "idempotency-key-reused", 422, "The Idempotency-Key belongs to another request"
    ),
    errors.InvalidEventError: ProblemType("invalid-event", 422, "A line is not a valid event"),
    errors.InvalidInputError: INVALID_REQUEST,
    errors.JobEndedError: ProblemType("job-ended", 409, "The job has ended"),
    errors.JobExistsError: ProblemType("job-exists", 409, "The job was created with another spec"),
    errors.JobNotFoundError: ProblemType("job-not-found", 404, "There is no such job"),
    errors.KeyConflictError: ProblemType("key-conflict", 409, "The key is in another state"),
    errors.KeyUnprovenError: ProblemType(
        "idempotency-key-unproven", 409, "Nothing proves what the Idempotency-Key was used for"
    ),
    errors.NotFoundError: NOT_FOUND,
    errors.NotReadyError: NOT_READY,
    errors.OtherRegionError: ProblemType("other-region", 421, "The job is of another region"),
    errors.PrivacyUnavailableError: ProblemType(
        "privacy-unavailable", 503, "Private fields cannot be encrypted here now"
    ),
    errors.ReceiptTooLargeError: ProblemType("receipt-too-large", 422, "The job is more than one receipt holds"),
    errors.RecordTooLargeError: PAYLOAD_TOO_LARGE,
    errors.RequestTooLargeError: PAYLOAD_TOO_LARGE,
    errors.QuotaExceededError: ProblemType("quota-exceeded", 429, "The caller or the tenant has had its share"),
    errors.SeqOutOfRangeError: ProblemType("seq-out-of-range", 422, "The chain does not reach that far"),
    errors.SessionNotCaughtUpError: ProblemType("session-not-caught-up", 503, "The session's writes are not here yet"),
    errors.SigningUnavailableError: ProblemType("signing-unavailable", 503, "Nothing can be signed now"),
    errors.SubjectNotFoundError: ProblemType("subject-not-found", 404, "There is no such subject"),
    errors.TenantNotFoundError: ProblemType("tenant-not-found", 404, "There is no such tenant"),
    errors.TooStaleError: ProblemType("too-stale", 503, "Nothing fresh enough could answer"),
    errors.UnauthenticatedError: ProblemType("unauthenticated", 401, "Nothing says who calls"),
    errors.UntrustedKeyError: ProblemType("untrusted-key", 422, "The bundle was not signed by a trusted key"),
    errors.UploadTooLargeError: PAYLOAD_TOO_LARGE,
    errors.WalFullError: ProblemType("backlog-full", 503, "Too many events wait to be chained"),
    errors.WalPoisonedError: NOT_READY,
    errors.WriteLostError: ProblemType("write-lost", 409, "The session's write was lost"),
}
"""The problem of each error; a subclass that is not here takes its nearest base's."""

KINDS = sorted({*PROBLEMS.values(), *(kind for kind in tuple(vars().values()) if isinstance(kind, ProblemType))})
"""Every problem, by name."""

_MEMBERS = ("line", "tenant_id", "job_id", "seq", "hlc", "epoch", "lsn", "achieved", "file", "verdict")
"""Attributes of an error that become members of its problem when it has them."""
_MEMBERS_IF_SAID = ("reason", "index", "free", "blocking_index", "current_epoch", "members_away")
"""The same, where they are not None."""
_BY_STATUS = {
    404: NOT_FOUND,
    405: METHOD_NOT_ALLOWED,
    413: PAYLOAD_TOO_LARGE,
    415: UNSUPPORTED_MEDIA_TYPE,
    503: NOT_READY,
}


def problem_type_of(error: Exception) -> ProblemType:
    """The problem that ``error`` is answered with; ``INTERNAL_ERROR`` when it was not raised on purpose."""
    if isinstance(error, ProblemError):
        return error.kind
    return next((PROBLEMS[base] for base in type(error).__mro__ if base in PROBLEMS), INTERNAL_ERROR)


def problem_response(
    kind: ProblemType,
    detail: str,
    *,
    members: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A problem as an answer; ``members`` are added to the standard ones."""
    body = {
        "type": PROBLEM_URI + kind.name,
        "title": kind.title,
        "status": kind.status,
        "detail": _cut(detail, DETAIL_CHARACTERS_MAX),
        **(members or {}),
    }
    # A 404 may be kept by caches like any answer, and what is not there yet may come.
    all_headers = {"Cache-Control": "no-store", **(headers or {})}
    if kind.status == 503 and (members or {}).get("reason") != errors.COPIES_REMOVED:
        all_headers.setdefault("Retry-After", RETRY_AFTER_S)
    return Response(orjson.dumps(body, default=str), kind.status, all_headers, media_type=PROBLEM_MEDIA_TYPE)


def respond(error: Exception) -> Response:
    """The answer to any error; what was not raised on purpose is logged, its cause kept from the caller."""
    kind = problem_type_of(error)
    if kind is INTERNAL_ERROR:
        _log.error("request_failed", exc_info=error)
        return problem_response(kind, "The cause is in the service's log.")
    return problem_response(kind, str(error), members=_members_of(error), headers=_headers_of(error))


def _headers_of(error: Exception) -> dict[str, str]:
    if isinstance(error, errors.UnauthenticatedError):
        return {"WWW-Authenticate": AUTHENTICATE}
    if isinstance(error, errors.QuotaExceededError):
        return {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, errors.CommitmentConflictError) and error.replayed:
        return {"Idempotent-Replay": "true"}
    if isinstance(error, errors.OtherRegionError):
        return {"Location": error.url}
    return {}


async def respond_to_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    kind = _BY_STATUS.get(error.status_code)
    if kind is None:
        kind = INVALID_REQUEST if error.status_code < 500 else INTERNAL_ERROR
    return problem_response(kind, _what_to_do(request, error), headers=error.headers)


def _what_to_do(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"{request.url.path} is no path of this API; /docs describes those there are"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "what /docs describes")
        return f"{request.method} is not allowed here, {allowed} is"
    return error.detail


async def respond_to_invalid_parameters(_request: Request, error: Exception) -> Response:
    """What the framework finds wrong with the query, the path or a header."""
    assert isinstance(error, RequestValidationError)
    item = error.errors()[0]
    return respond(_wrong(tuple(item["loc"][1:]), words_of(item)))


def invalid(
    error: ValidationError, tags: frozenset[str] = frozenset(), form: TypeAdapter[Any] | None = None
) -> errors.InvalidInputError:
    """The first thing ``error`` found, as our own; ``tags`` are parts of its path that no caller wrote, ``form`` is
    what was not met."""
    if error.error_count() > ERRORS_LISTED_MAX:
        return errors.InvalidInputError(f"{error.error_count()} fields are wrong or unknown")
    items = error.errors(include_url=False, include_input=False)
    first = items[0]
    if first["type"].startswith("union_tag_"):
        # A tag is chosen before any field is looked at.
        path, message = _wrong_tag(first, error.errors(include_url=False)[0]["input"])
    else:
        path, message = first_error(items, form)
    # A tag stands first, or behind the field whose value it is of.
    return _wrong(tuple(part for at, part in enumerate(path) if at > 1 or part not in tags), message)


def _wrong_tag(item: Mapping[str, Any], given: object) -> tuple[tuple[str | int, ...], str]:
    name = item["ctx"]["discriminator"].strip("'") if "ctx" in item else "type"
    if item["type"] == "union_tag_not_found":
        meant = nearest_field(given, name)
        if meant is not None:
            return (*item["loc"], meant), f"there is no such field; the nearest is {name}, which is required"
        return (*item["loc"], name), "is required"
    return (*item["loc"], name), words_of(item)


def _wrong(path: tuple[str | int, ...], message: str) -> errors.InvalidInputError:
    message = _cut(message, DETAIL_CHARACTERS_MAX)
    return errors.InvalidInputError(f"{dotted(path)}: {message}" if path else message, path)


def dotted(path: Sequence[str | int]) -> str:
    """``("spec", "image")`` as ``spec.image``, bounded."""
    return _cut(".".join(_cut(str(part), PATH_PART_CHARACTERS_MAX) for part in path), DETAIL_CHARACTERS_MAX)


def _members_of(error: Exception) -> dict[str, object]:
    members = {name: getattr(error, name) for name in _MEMBERS if hasattr(error, name)}
    said = {name: getattr(error, name, None) for name in _MEMBERS_IF_SAID}
    members |= {name: value for name, value in said.items() if value is not None}
    if "achieved" in members:
        members["achieved"] = getattr(members["achieved"], "name", None)
    if isinstance(error, errors.InvalidInputError) and error.path:
        members["path"] = dotted(error.path)
    return members


def _cut(text: str, characters_max: int) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"

"""Problem Details (RFC 9457): the one shape of every error answer.

    {"type": URI, "title", "status", "detail", ...members of the problem}

(routes whose clients read CBOR answer the same as Concise Problem Details, RFC 9290)

``type`` is ``https://tallystick.dev/problems/`` and a name of :mod:`ledger.facts.problems`; clients compare it and
may show ``title`` and ``detail``. ``detail`` is the text of an error raised on purpose. Any other exception becomes
``internal-error`` without its cause, which goes to the log. Every 503 has Retry-After, unless a retry cannot help.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson
import structlog
from starlette.responses import Response

from ledger import errors
from ledger.facts.problems import INTERNAL_ERROR, ProblemType
from signing.cose import encoded

PROBLEM_URI = "https://tallystick.dev/problems/"
PROBLEM_MEDIA_TYPE = "application/problem+json"
CONCISE_MEDIA_TYPE = "application/concise-problem-details+cbor"
DETAIL_CHARACTERS_MAX = 1000
"""Longest ``detail``; it may quote the caller's data."""
PATH_PART_CHARACTERS_MAX = 128

_log = structlog.get_logger(__name__)


_MEMBERS = ("line", "tenant_id", "job_id", "home_region", "seq", "hlc", "epoch", "lsn", "achieved", "file", "verdict")
"""Attributes of an error that become members of its problem if it has them."""
_MEMBERS_IF_SAID = (
    *("reason", "index", "free", "blocking_index", "current_epoch", "members_away"),
    *("archive", "manifest", "verified_from_seq"),
)
"""The same, where they are not None."""


def problem_type_of(error: Exception) -> ProblemType:
    """The problem that ``error`` is answered with; ``INTERNAL_ERROR`` when it was not raised on purpose."""
    return error.problem if isinstance(error, errors.LedgerError) else INTERNAL_ERROR


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
        "detail": cut(detail, DETAIL_CHARACTERS_MAX),
        **(members or {}),
    }
    is_passing = kind.status == 503 and (members or {}).get("reason") != errors.COPIES_REMOVED
    # Caches may store a 404 like any answer, and the missing object may be created later.
    all_headers = {"Cache-Control": "no-store", **({"Retry-After": "1"} if is_passing else {}), **(headers or {})}
    return Response(orjson.dumps(body, default=str), kind.status, all_headers, media_type=PROBLEM_MEDIA_TYPE)


def concise(problem: Response) -> Response:
    """A problem as Concise Problem Details (RFC 9290): ``{-1: title, -2: detail, URI of the problem: its members}``."""
    members = orjson.loads(problem.body)
    uri, title, detail = (members.pop(name) for name in ("type", "title", "detail"))
    content = encoded({-1: title, -2: detail, uri: members})
    kept = {name: value for name, value in problem.headers.items() if not name.startswith("content-")}
    return Response(content, problem.status_code, kept, media_type=CONCISE_MEDIA_TYPE)


def respond(error: Exception) -> Response:
    """The answer to any error. An unexpected error is logged, and its cause kept from the caller."""
    kind = problem_type_of(error)
    if kind is INTERNAL_ERROR:
        _log.error("request_failed", exc_info=error)
        return problem_response(kind, "The cause is in the service's log.")
    return problem_response(kind, str(error), members=_members_of(error), headers=_headers_of(error))


def _headers_of(error: Exception) -> dict[str, str]:
    if isinstance(error, errors.UnauthenticatedError):
        return {"WWW-Authenticate": 'Bearer realm="tallystick"'}
    if isinstance(error, errors.QuotaExceededError):
        return {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, errors.CommitmentConflictError) and error.replayed:
        return {"Idempotent-Replay": "true"}
    return {"Location": error.url} if isinstance(error, errors.OtherRegionError) else {}


def dotted(path: Sequence[str | int]) -> str:
    """``("spec", "image")`` as ``spec.image``, bounded."""
    return cut(".".join(cut(str(part), PATH_PART_CHARACTERS_MAX) for part in path), DETAIL_CHARACTERS_MAX)


def _members_of(error: Exception) -> dict[str, object]:
    members = {name: getattr(error, name) for name in _MEMBERS if hasattr(error, name)}
    members |= {name: value for name in _MEMBERS_IF_SAID if (value := getattr(error, name, None)) is not None}
    if "achieved" in members:
        members["achieved"] = getattr(members["achieved"], "name", None)
    if isinstance(error, errors.InvalidInputError) and error.path:
        members["path"] = dotted(error.path)
    return members


def cut(text: str, characters_max: int) -> str:
    """``text``, or its beginning and an ellipsis; lone surrogates are replaced."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"

"""SCITT for a tenant (draft-ietf-scitt-scrapi): signed statements are registered, receipts resolved, keys published.

Requests and answers are CBOR, problems too (``ConciseRoute``).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Request, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import path_outside
from app.edge.forms.body import COSE_MEDIA_TYPE, read_body
from app.edge.forms.fields import TENANT_PATTERN
from app.edge.problems import CONCISE_MEDIA_TYPE
from app.edge.routing import PROBLEM_RESPONSE, ConciseRoute
from app.runtime.settings.config import Settings
from app.runtime.state.node import Node
from app.share.bundle.receipts import ReceiptMaker
from app.trust.key_chain import Trust
from app.write.followers.notary import Notary
from app.write.intake.statements import Registered, Statements
from ledger.errors import DatabaseUnavailableError, NotFoundError, NotReadyError, SigningUnavailableError
from signing.cose import STATEMENT_BYTES_MAX, cose_key, encoded
from signing.keys import ED25519

CBOR_MEDIA_TYPE: Final = "application/cbor"
RETRY_AFTER_S: Final = "1"
"""When a client asks again for a receipt that cannot be made now: mostly as no checkpoint covers the entry yet."""

_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
_PROBLEM: dict[int | str, dict[str, Any]] = {
    "default": {
        **PROBLEM_RESPONSE["default"],
        "content": {**PROBLEM_RESPONSE["default"]["content"], CONCISE_MEDIA_TYPE: _BINARY},
    }
}
_LOCATION: dict[str, Any] = {
    "Location": {"schema": {"type": "string"}, "description": "Where the receipt is resolved."}
}
_RECEIPT: dict[str, Any] = {
    "description": "The COSE receipt (RFC 9942).",
    "content": {COSE_MEDIA_TYPE: _BINARY},
    "headers": _LOCATION,
}
_LATER: dict[str, Any] = {
    "description": "Registered; its receipt cannot be made yet: ask there for it.",
    "headers": {**_LOCATION, "Retry-After": {"schema": {"type": "string"}, "description": "Seconds."}},
}
_KEYS: dict[str, Any] = {"content": {CBOR_MEDIA_TYPE: _BINARY}}

router = APIRouter(route_class=ConciseRoute, tags=["scitt"], responses=_PROBLEM)

TenantPath = Annotated[str, Path(pattern=TENANT_PATTERN, description="Whose.")]


@router.get(
    "/.well-known/scitt-keys",
    response_class=Response,
    responses={200: {**_KEYS, "description": "A COSE Key Set."}},
)
async def list_scitt_keys(trust: Service[Trust]) -> Response:
    """The keys that sign receipts, or did, without revoked ones: a COSE Key Set."""
    return Response(encoded([*(await _keys(trust)).values()]), media_type=CBOR_MEDIA_TYPE)


@router.get(
    "/.well-known/scitt-keys/{kid}", response_class=Response, responses={200: {**_KEYS, "description": "A COSE Key."}}
)
async def read_scitt_key(
    trust: Service[Trust], kid: Annotated[str, Path(max_length=64, description="As receipts have it.")]
) -> Response:
    """One of these keys: a COSE Key."""
    if (found := (await _keys(trust)).get(kid)) is None:
        raise NotFoundError(f"no key {kid} signs receipts here, or it is revoked")
    return Response(encoded(found), media_type=CBOR_MEDIA_TYPE)


@router.post(
    "/v1/tenants/{tenant_id}/scitt/entries",
    status_code=201,
    response_class=Response,
    responses={201: _RECEIPT, 303: _LATER},
    openapi_extra={"requestBody": {"required": True, "content": {COSE_MEDIA_TYPE: _BINARY}}},
)
async def register_statement(
    request: Request,
    accepted: AcceptedDep,
    node: Service[Node],
    settings: Service[Settings],
    notary: Service[Notary],
    statements: Service[Statements],
    receipts: Service[ReceiptMaker],
    tenant_id: TenantPath,
) -> Response:
    """Register a signed statement whose key is that of a caller (`/v1/callers`) of the tenant. The same statement again
    finds its one entry."""
    node.check_writable()
    body = await read_body(request, COSE_MEDIA_TYPE, STATEMENT_BYTES_MAX)
    accepted.charge_body(tenant_id, len(body))
    registered = await statements.register(tenant_id, body, accepted.caller.id)
    location = _location(request, settings, tenant_id, registered)
    with notary.rebuilds_if_damaged(tenant_id):
        return await _receipt(location, receipts, tenant_id, registered, (201, 303))


@router.get(
    "/v1/tenants/{tenant_id}/scitt/entries/{statement_id}",
    response_class=Response,
    responses={200: _RECEIPT, 302: _LATER},
)
async def resolve_receipt(
    request: Request,
    accepted: AcceptedDep,
    settings: Service[Settings],
    notary: Service[Notary],
    statements: Service[Statements],
    receipts: Service[ReceiptMaker],
    tenant_id: TenantPath,
    statement_id: Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The last part of `Location`.")],
) -> Response:
    """A fresh receipt of a registered statement."""
    registered = await statements.find(tenant_id, statement_id)
    location = _location(request, settings, tenant_id, registered)
    with notary.rebuilds_if_damaged(tenant_id):
        answer = await _receipt(location, receipts, tenant_id, registered, (200, 302))
    await accepted.record_read(tenant_id, from_seq=registered.seq, entries=1)
    return answer


async def _receipt(
    location: str, receipts: ReceiptMaker, tenant_id: str, registered: Registered, statuses: tuple[int, int]
) -> Response:
    """The receipt with the first status; or that it comes later, with the second."""
    headers = {"Location": location, "Cache-Control": "no-store"}
    try:
        made = await receipts.of_entry(tenant_id, registered.seq, None)
        return Response(await receipts.in_cose(made), statuses[0], headers, media_type=COSE_MEDIA_TYPE)
    except (SigningUnavailableError, NotReadyError, DatabaseUnavailableError):
        return Response(b"", statuses[1], {**headers, "Retry-After": RETRY_AFTER_S})


def _location(request: Request, settings: Settings, tenant_id: str, registered: Registered) -> str:
    path = f"/v1/tenants/{tenant_id}/scitt/entries/{registered.statement_id}"
    return str(request.url.replace(path=path_outside(request.scope, settings.http.root_path, path), query=""))


async def _keys(trust: Trust) -> dict[str, dict[int, object]]:
    """By id, the admitted Ed25519 keys that are not revoked: a receipt has no time, so none by a revoked one counts."""
    published = [each.key for each in (await trust.published()).admitted]
    return {key.key_id: cose_key(key) for key in published if key.algorithm == ED25519 and key.revoked_from_hlc is None}

"""``/v1/tenants/{tenant_id}``: private fields and erasures."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from app.http.answers import json_answer
from app.http.body import JSON_MEDIA_TYPE, parse, read_body
from app.http.fields import READABLE_TENANT_PATTERN, TENANT_PATTERN
from app.http.node_answers import ErasureAnswer, PrivacyAnswer
from app.http.requests import ERASURE_REQUEST, PRIVACY_REQUEST
from app.http.routing import PROBLEM_RESPONSE, StrictRoute, body_of
from app.intake.privacy_changes import Declared
from app.parts import Parts, PartsDep, parts_of
from app.privacy.keys import TRUSTED_S
from app.privacy.knowledge import REFRESH_S
from app.store import chain_reads
from app.store.reading import reading
from ledger.errors import TenantNotFoundError
from ledger.private_fields import declaration_of

router = APIRouter(route_class=StrictRoute, tags=["privacy"])

BODY_BYTES_MAX = 128 << 10
COVERS = "events taken from now on; entries recorded before stay as they are"

TenantPath = Annotated[str, Path(pattern=TENANT_PATTERN, description="Whose.")]
ReadableTenantPath = Annotated[str, Path(pattern=READABLE_TENANT_PATTERN, description="Whose: a tenant, or _system.")]


@router.put(
    "/v1/tenants/{tenant_id}/privacy",
    responses={200: {"model": PrivacyAnswer}, **PROBLEM_RESPONSE},
    openapi_extra={"requestBody": body_of(PRIVACY_REQUEST)},
)
async def declare_private_fields(request: Request, tenant_id: TenantPath) -> Response:
    """Encrypt these fields of the tenant's events from now on, each under the key of the person it is about."""
    parts = parts_of(request)
    given = await _read(request, parts, PRIVACY_REQUEST)
    declaration = declaration_of(given["fields"], given.get("subject"))
    return json_answer(_privacy_answer(tenant_id, await parts.privacy_changes.declare(tenant_id, declaration)))


@router.get("/v1/tenants/{tenant_id}/privacy", responses={200: {"model": PrivacyAnswer}, **PROBLEM_RESPONSE})
async def read_private_fields(parts: PartsDep, tenant_id: ReadableTenantPath) -> Response:
    """The tenant's private fields; none when it never declared any."""
    declared = await parts.privacy_changes.declared(tenant_id)
    if declared is None:
        async with reading(parts.pool) as connection:
            if not await chain_reads.tenant_exists(connection, tenant_id):
                raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    return json_answer(_privacy_answer(tenant_id, declared))


@router.post(
    "/v1/tenants/{tenant_id}/erasures",
    responses={200: {"model": ErasureAnswer}, **PROBLEM_RESPONSE},
    openapi_extra={"requestBody": body_of(ERASURE_REQUEST)},
)
async def erase_subject(request: Request, tenant_id: TenantPath) -> Response:
    """Destroy the key of a person's private fields, for good. The chain stays whole, and says so."""
    parts = parts_of(request)
    given = await _read(request, parts, ERASURE_REQUEST)
    erased = await parts.privacy_changes.erase(tenant_id, given["subject"], given.get("reason"))
    return json_answer(
        {
            "tenant_id": tenant_id,
            "key_ids": erased.key_ids,
            "seq": erased.seq,
            "erased_at": erased.erased_at,
            "other_nodes_within_s": TRUSTED_S,
        }
    )


async def _read(request: Request, parts: Parts, adapter: Any) -> dict[str, Any]:
    parts.check_writable()
    body = await read_body(request, JSON_MEDIA_TYPE, BODY_BYTES_MAX)
    given: dict[str, Any] = parse(adapter, body)
    return given


def _privacy_answer(tenant_id: str, declared: Declared | None) -> dict[str, object]:
    return {
        "tenant_id": tenant_id,
        "fields": [] if declared is None else declared.fields,
        "subject": None if declared is None else declared.subject,
        "seq": None if declared is None else declared.seq,
        "declared_at": None if declared is None else declared.declared_at,
        "covers": COVERS,
        "other_nodes_within_s": REFRESH_S,
    }

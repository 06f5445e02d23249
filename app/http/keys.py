"""``GET /v1/keys``: public keys, for whoever wants to check signatures without us."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from app.http.answers import KeyList, json_answer
from app.http.fields import ReadableTenantId
from app.http.routing import PROBLEM_RESPONSE, StrictRoute
from app.parts import PartsDep
from app.store import chain_reads
from app.store.reading import reading

router = APIRouter(route_class=StrictRoute, tags=["keys"])

TENANTS_MAX = 1000
"""Most tenants whose log keys one answer lists; ask by ``tenant_id`` for others."""


@router.get("/v1/keys", responses={200: {"model": KeyList}, **PROBLEM_RESPONSE})
async def list_keys(parts: PartsDep, tenant_id: Annotated[ReadableTenantId | None, Query()] = None) -> Response:
    """Keys of snapshots; and of checkpoints, one a tenant's log, of one tenant or of all."""
    async with reading(parts.pool) as connection:
        keys = await chain_reads.list_keys(connection)
        tenants = [tenant_id] if tenant_id else await chain_reads.first_tenants(connection, TENANTS_MAX)
    return json_answer(
        {
            "keys": [key._asdict() for key in keys],
            "log_verifier_keys": [parts.log_verifier_key(tenant) for tenant in tenants],
        }
    )

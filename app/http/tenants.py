"""``/v1/tenants``: whose chains there are."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from app.http import cursor as cursors
from app.http.answers import json_answer
from app.http.chain_answers import TenantList
from app.http.fields import CursorQuery, Limit
from app.http.routing import PROBLEM_RESPONSE, StrictRoute
from app.parts import PartsDep
from app.store import chain_reads
from app.store.reading import reading

router = APIRouter(route_class=StrictRoute, tags=["chain"])


@router.get("/v1/tenants", responses={200: {"model": TenantList}, **PROBLEM_RESPONSE})
async def list_tenants(
    parts: PartsDep,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """The tenants that have a chain, by name, `_system` among them."""
    after = cursors.decode_text("tenants", "", cursor) or ""
    async with reading(parts.pool) as connection:
        found = await chain_reads.list_tenants(connection, after, limit + 1)
    following = cursors.encode("tenants", "", found[limit - 1]) if len(found) > limit else None
    return json_answer({"items": [{"tenant_id": tenant} for tenant in found[:limit]], "next_cursor": following})

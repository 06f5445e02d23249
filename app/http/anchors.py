"""``/v1/log/{tenant_id}/cosignatures`` and ``/anchors``: what witnesses and authorities said of checkpoints."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from app.http import cursor as cursors
from app.http.answers import json_answer
from app.http.body import TEXT_MEDIA_TYPE, read_body
from app.http.chain_answers import CosignatureList, CosignedAnswer, TimestampList
from app.http.fields import READABLE_TENANT_PATTERN, TREE_SIZE_MAX, CursorQuery, Limit
from app.http.routing import PROBLEM_RESPONSE, StrictRoute
from app.parts import PartsDep, parts_of
from app.read import cosigned
from app.store import anchors, chain_reads
from app.store.reading import reading
from ledger.errors import TenantNotFoundError
from signing.anchors import RFC_3161

router = APIRouter(route_class=StrictRoute, tags=["log"])

NOTE_BYTES_MAX = 16 * 1024
"""Longest note taken: room for every cosignature that a note may have."""

TenantPath = Annotated[str, Path(pattern=READABLE_TENANT_PATTERN, description="Whose: a tenant, or _system.")]


@router.post(
    "/v1/log/{tenant_id}/cosignatures",
    status_code=201,
    responses={201: {"model": CosignedAnswer}, **PROBLEM_RESPONSE},
    openapi_extra={"requestBody": {"required": True, "content": {TEXT_MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def add_cosignatures(request: Request, tenant_id: TenantPath) -> Response:
    """Take a checkpoint of this log, as C2SP signed note, that registered witnesses have cosigned."""
    parts = parts_of(request)
    parts.check_writable()
    note = await read_body(request, TEXT_MEDIA_TYPE, NOTE_BYTES_MAX)
    checkpoint, added = await parts.cosignatures.take(tenant_id, note, datetime.now(UTC))
    return json_answer(
        {
            "tenant_id": tenant_id,
            "tree_size": checkpoint.size,
            "root_hash": checkpoint.root.hex(),
            "added": [{"witness": each.witness.text(), "time": each.time} for each in added],
        },
        201,
    )


@router.get("/v1/log/{tenant_id}/cosignatures", responses={200: {"model": CosignatureList}, **PROBLEM_RESPONSE})
async def list_cosignatures(
    parts: PartsDep,
    tenant_id: TenantPath,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Cosignatures on the tenant's checkpoints, newest first, each with whether it holds."""
    below = cursors.decode_number("cosignatures", tenant_id, cursor) or TREE_SIZE_MAX
    async with reading(parts.pool) as connection:
        found = await anchors.list_cosignatures(connection, tenant_id, below, limit + 1)
        if not found and not await chain_reads.tenant_exists(connection, tenant_id):
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    page = await asyncio.to_thread(lambda: [cosigned.listed(row, parts.witnesses) for row in found[:limit]])
    items = [
        {
            "tree_size": row.tree_size,
            "witness": row.witness,
            "time": row.cosigned_at,
            "status": status,
            "note": row.note,
        }
        for row, status in page
    ]
    following = cursors.encode("cosignatures", tenant_id, page[-1].row.id) if len(found) > limit else None
    return json_answer({"items": items, "next_cursor": following})


@router.get("/v1/log/{tenant_id}/anchors", responses={200: {"model": TimestampList}, **PROBLEM_RESPONSE})
async def list_anchors(
    parts: PartsDep,
    tenant_id: TenantPath,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Time stamps (RFC 3161) on the tenant's checkpoints, newest first, as they came: whoever holds the CA judges."""
    below = cursors.decode_number("anchors", tenant_id, cursor) or TREE_SIZE_MAX
    async with reading(parts.pool) as connection:
        found = await anchors.list_timestamps(connection, tenant_id, below, limit + 1)
        if not found and not await chain_reads.tenant_exists(connection, tenant_id):
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    page = found[:limit]
    items = [
        {
            "kind": RFC_3161,
            "tree_size": row.tree_size,
            "authority": row.authority,
            "time": row.generated_at,
            "checkpoint": row.note,
            "response": base64.b64encode(row.response).decode(),
        }
        for row in page
    ]
    following = cursors.encode("anchors", tenant_id, page[-1].id) if len(found) > limit else None
    return json_answer({"items": items, "next_cursor": following})

"""``/v1/snapshots``: signed batches of entries."""

from __future__ import annotations

from typing import Annotated

import orjson
from fastapi import APIRouter, Path, Query, Request, Response

from app.http import cursor as cursors
from app.http.answers import json_answer
from app.http.body import JSON_MEDIA_TYPE, parse, read_body
from app.http.chain_answers import SnapshotAnswer, SnapshotList
from app.http.fields import TREE_SIZE_MAX, CursorQuery, Limit, ReadableTenantId, WholeNumber
from app.http.requests import SNAPSHOT_REQUEST
from app.http.routing import PROBLEM_RESPONSE, StrictRoute, body_of
from app.parts import PartsDep, parts_of
from app.store import chain_reads
from app.store.reading import reading
from ledger import rfc3339
from ledger.errors import NotFoundError, TenantNotFoundError

router = APIRouter(route_class=StrictRoute, tags=["snapshots"])

BODY_BYTES_MAX = 4096


@router.post(
    "/v1/snapshots",
    status_code=201,
    responses={
        201: {"model": SnapshotAnswer},
        200: {"model": SnapshotAnswer, "description": "Everything was signed already; the newest snapshot"},
        **PROBLEM_RESPONSE,
    },
    openapi_extra={"requestBody": body_of(SNAPSHOT_REQUEST)},
)
async def sign_snapshot(request: Request) -> Response:
    """Sign everything chained so far; answers the newest snapshot."""
    parts = parts_of(request)
    parts.check_writable()
    body = await read_body(request, JSON_MEDIA_TYPE, BODY_BYTES_MAX)
    tenant_id = parse(SNAPSHOT_REQUEST, body)["tenant_id"]
    async with reading(parts.pool) as connection:
        if not await chain_reads.tenant_exists(connection, tenant_id):
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    signed = await parts.notary.sign_now(tenant_id)
    async with reading(parts.pool) as connection:
        newest = await chain_reads.newest_snapshot(connection, tenant_id)
    if newest is None:
        raise NotFoundError(f"tenant {tenant_id} has no entry that could be signed")
    return json_answer(_with_envelope(*newest), 201 if signed else 200)


@router.get("/v1/snapshots", responses={200: {"model": SnapshotList}, **PROBLEM_RESPONSE})
async def list_snapshots(
    parts: PartsDep,
    tenant_id: Annotated[ReadableTenantId, Query()],
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Snapshots of a tenant, newest first."""
    below = cursors.decode_number("snapshots", tenant_id, cursor) or TREE_SIZE_MAX
    async with reading(parts.pool) as connection:
        found = await chain_reads.list_snapshots(connection, tenant_id, below, limit + 1)
        if not found and not await chain_reads.tenant_exists(connection, tenant_id):
            raise TenantNotFoundError(f"there is no tenant {tenant_id}")
    page = found[:limit]
    following = cursors.encode("snapshots", tenant_id, page[-1].from_seq) if len(found) > limit else None
    return json_answer({"items": [_shown(row) for row in page], "next_cursor": following})


@router.get("/v1/snapshots/{snapshot_id}", responses={200: {"model": SnapshotAnswer}, **PROBLEM_RESPONSE})
async def read_snapshot(
    parts: PartsDep, snapshot_id: Annotated[WholeNumber, Path(ge=1, le=TREE_SIZE_MAX, description="Its id in lists.")]
) -> Response:
    """One snapshot with its DSSE envelope."""
    async with reading(parts.pool) as connection:
        found = await chain_reads.snapshot(connection, snapshot_id)
    if found is None:
        raise NotFoundError(f"there is no snapshot {snapshot_id}")
    return json_answer(_with_envelope(*found))


def _with_envelope(row: chain_reads.SnapshotRow, dsse_envelope: str) -> dict[str, object]:
    return {**_shown(row), "dsse_envelope": orjson.Fragment(dsse_envelope)}


def _shown(row: chain_reads.SnapshotRow) -> dict[str, object]:
    return {**row._asdict(), "snapshot_at": rfc3339.time_of(row.snapshot_hlc)}

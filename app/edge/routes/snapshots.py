"""``/v1/snapshots``: signed batches of entries."""

from __future__ import annotations

from typing import Annotated

import orjson
from fastapi import APIRouter, Path, Query, Response

from app.edge.accepted import AcceptedDep
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import TREE_SIZE_MAX, CursorQuery, Limit, ReadableTenantId, WholeNumber
from app.edge.forms.lists import NewestFirst, page
from app.edge.forms.requests import SnapshotRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.services import Service
from app.runtime.answers.chain import SnapshotAnswer, SnapshotList
from app.runtime.principals import Right
from app.store import chain_reads
from app.store.reading import reading
from app.store.sessions import NodePool
from app.write.followers.notary import Notary
from ledger import rfc3339
from ledger.errors import NotFoundError

router = APIRouter(route_class=StrictRoute, tags=["snapshots"], responses=PROBLEM_RESPONSE)

_SNAPSHOTS = NewestFirst("snapshots", chain_reads.list_snapshots, lambda row: row.from_seq)


@router.post(
    "/v1/snapshots",
    status_code=201,
    responses={
        **answered(SnapshotAnswer, 201),
        **answered(SnapshotAnswer, description="Everything was signed already; the newest snapshot"),
    },
)
async def sign_snapshot(
    pool: Service[NodePool], notary: Service[Notary], wanted: Annotated[SnapshotRequest, json_body(SnapshotRequest)]
) -> Response:
    """Sign everything chained so far; answers the newest snapshot."""
    tenant_id = wanted["tenant_id"]
    async with reading(pool) as connection:
        await chain_reads.require_tenant(connection, tenant_id)
    signed = await notary.sign_now(tenant_id)
    async with reading(pool) as connection:
        newest = await chain_reads.newest_snapshot(connection, tenant_id)
    if newest is None:
        raise NotFoundError(f"tenant {tenant_id} has no entry that could be signed")
    return json_answer(_with_envelope(*newest), 201 if signed else 200)


@router.get("/v1/snapshots", responses=answered(SnapshotList))
async def list_snapshots(
    pool: Service[NodePool],
    tenant_id: Annotated[ReadableTenantId, Query()],
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """Snapshots of a tenant, newest first."""
    rows, following = await _SNAPSHOTS.read(pool, tenant_id, cursor, limit)
    return page([_shown(row) for row in rows], following)


@router.get("/v1/snapshots/{snapshot_id}", responses=answered(SnapshotAnswer))
async def read_snapshot(
    pool: Service[NodePool],
    accepted: AcceptedDep,
    snapshot_id: Annotated[WholeNumber, Path(ge=1, le=TREE_SIZE_MAX, description="Its id in lists.")],
) -> Response:
    """One snapshot with its DSSE envelope."""
    async with reading(pool) as connection:
        found = await chain_reads.snapshot(connection, snapshot_id)
    if found is None or not accepted.caller.may(Right.AUDIT, found[0].tenant_id):
        raise NotFoundError(f"there is no snapshot {snapshot_id}")
    return json_answer(_with_envelope(*found))


def _with_envelope(row: chain_reads.SnapshotRow, dsse_envelope: str) -> dict[str, object]:
    return {**_shown(row), "dsse_envelope": orjson.Fragment(dsse_envelope)}


def _shown(row: chain_reads.SnapshotRow) -> dict[str, object]:
    return {**row._asdict(), "snapshot_at": rfc3339.time_of(row.snapshot_hlc)}

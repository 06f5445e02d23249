"""Receipts: files that prove one job, or one entry, alone and offline (docs/formats/receipt.md)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from app.edge.accepted import record_read
from app.edge.forms.fields import JOB_ID_PATTERN, ReadableTenantId, SeqNumber
from app.edge.parts import PartsDep
from app.edge.routing import PROBLEM_RESPONSE, SESSION_PARAMETER, StrictRoute
from app.edge.writes import session_tokens
from app.share.bundle.receipts import Made

router = APIRouter(route_class=StrictRoute, responses=PROBLEM_RESPONSE)

MEDIA_TYPE = "application/json"
_RECEIPT = {
    "description": "A receipt; tally verify-proof and the page /verify verify it",
    "content": {MEDIA_TYPE: {"schema": {"type": "object", "required": ["receipt", "statement"]}}},
}

TenantQuery = Annotated[ReadableTenantId, Query()]
Extends = Annotated[
    SeqNumber | None, Query(description="Also prove that the log extends its tree of so many entries, seen earlier.")
]


@router.get(
    "/v1/jobs/{job_id}/receipt",
    tags=["jobs"],
    response_class=Response,
    responses={200: _RECEIPT},
    openapi_extra={"parameters": [SESSION_PARAMETER]},
)
async def prove_job(
    request: Request,
    parts: PartsDep,
    job_id: Annotated[str, Path(pattern=JOB_ID_PATTERN, description="The job.")],
    tenant_id: TenantQuery,
    extends: Extends = None,
) -> Response:
    """A file that proves what was recorded of a job, alone and offline. Entries that no checkpoint covers yet are
    waited for; the writes of a session, too."""
    tokens = session_tokens(request)
    if tokens:
        parts.consistency.receive(tokens)
        await parts.consistency.wait_for_session(tokens)
    with parts.mending(tenant_id):
        made = await parts.receipts.of_job(tenant_id, job_id, extends)
    await record_read(request, tenant_id, job_id=job_id, entries=made.entries)
    return _file(made, job_id)


@router.get("/v1/chain/receipt", tags=["chain"], response_class=Response, responses={200: _RECEIPT})
async def prove_entry(
    request: Request,
    parts: PartsDep,
    tenant_id: TenantQuery,
    seq: Annotated[SeqNumber, Query(description="The entry.")],
    extends: Extends = None,
) -> Response:
    """A file that proves one entry, alone and offline."""
    with parts.mending(tenant_id):
        made = await parts.receipts.of_entry(tenant_id, seq, extends)
    await record_read(request, tenant_id, from_seq=seq, entries=made.entries)
    return _file(made, f"{tenant_id}-{seq}")


def _file(made: Made, name: str) -> Response:
    disposition = f'attachment; filename="{name.replace(":", "-")}.receipt.json"'
    headers = {"Content-Disposition": disposition, "Cache-Control": "no-store"}
    return Response(made.file, headers=headers, media_type=MEDIA_TYPE)

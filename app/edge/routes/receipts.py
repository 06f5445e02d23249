"""Receipts: files that prove one job, or one entry, alone and offline (docs/formats/receipt.md)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from app.edge.accepted import AcceptedDep
from app.edge.forms.fields import JOB_ID_PATTERN, ReadableTenantId, SeqNumber
from app.edge.routing import PROBLEM_RESPONSE, SESSION_PARAMETER, StrictRoute
from app.edge.services import Service
from app.edge.writes import shown_session
from app.read.consistency import Consistency
from app.runtime.state.session import SessionTokens
from app.share.bundle.receipts import Made, ReceiptMaker
from app.write.followers.notary import Notary

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
    accepted: AcceptedDep,
    sessions: Service[SessionTokens],
    consistency: Service[Consistency],
    notary: Service[Notary],
    receipts: Service[ReceiptMaker],
    job_id: Annotated[str, Path(pattern=JOB_ID_PATTERN, description="The job.")],
    tenant_id: TenantQuery,
    extends: Extends = None,
) -> Response:
    """A file that proves what was recorded of a job, alone and offline. Entries that no checkpoint covers yet are
    waited for; the writes of a session, too."""
    tokens = shown_session(accepted, sessions, consistency)
    if tokens:
        await consistency.wait_for_session(tokens)
    with notary.mending(tenant_id):
        made = await receipts.of_job(tenant_id, job_id, extends)
    await accepted.record_read(tenant_id, job_id=job_id, entries=made.entries)
    return _file(made, job_id)


@router.get("/v1/chain/receipt", tags=["chain"], response_class=Response, responses={200: _RECEIPT})
async def prove_entry(
    accepted: AcceptedDep,
    notary: Service[Notary],
    receipts: Service[ReceiptMaker],
    tenant_id: TenantQuery,
    seq: Annotated[SeqNumber, Query(description="The entry.")],
    extends: Extends = None,
) -> Response:
    """A file that proves one entry, alone and offline."""
    with notary.mending(tenant_id):
        made = await receipts.of_entry(tenant_id, seq, extends)
    await accepted.record_read(tenant_id, from_seq=seq, entries=made.entries)
    return _file(made, f"{tenant_id}-{seq}")


def _file(made: Made, name: str) -> Response:
    disposition = f'attachment; filename="{name.replace(":", "-")}.receipt.json"'
    headers = {"Content-Disposition": disposition, "Cache-Control": "no-store"}
    return Response(made.file, headers=headers, media_type=MEDIA_TYPE)

"""``/v1/bundles`` and receipts: a ledger, a range of it, one job or one entry, as a portable file that can be verified
(docs/formats/bundle.md, docs/formats/receipt.md).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import JSON_MEDIA_TYPE, json_answer, streamed
from app.edge.forms.body import MULTIPART_MEDIA_TYPE as MULTIPART
from app.edge.forms.body import json_body, uploaded
from app.edge.forms.fields import JOB_ID_PATTERN, SeqNumber, TenantQuery
from app.edge.forms.requests import ExportRequest
from app.edge.routing import PROBLEM_RESPONSE, SESSION_PARAMETER, StrictRoute, answered
from app.edge.writes import shown_session
from app.read.consistency import Consistency
from app.runtime.answers.chain import ImportAnswer
from app.runtime.state.node import Node
from app.runtime.state.session import SessionTokens
from app.share.bundle.export import BundleExporter
from app.share.bundle.importer import BundleImporter
from app.share.bundle.receipts import Made, ReceiptMaker
from app.share.bundle.staging import Staging
from app.share.exchange import Regions
from app.write.followers.notary import Notary
from app.write.intake.system_entries import SystemEntries
from signing.entry_proof import COSE_MEDIA_TYPE
from signing.manifest import RangeManifest

router = APIRouter(route_class=StrictRoute, tags=["bundles"], responses=PROBLEM_RESPONSE)

MEDIA_TYPE = "application/x-tar"


@router.post(
    "/v1/bundles/export",
    response_class=Response,
    responses={
        200: {
            "description": "A bundle, or evidence of a broken chain, also where a row behind those already sent does "
            "not hold; without its end it is neither, and nothing in it counts",
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def export_bundle(
    request: Request,
    exporter: Service[BundleExporter],
    accepted: AcceptedDep,
    wanted: Annotated[dict[str, Any], json_body(ExportRequest)],
) -> Response:
    """Sign everything chained so far, then send the tenant's ledger, or a range of it, as one file.

    With `without_signing` no snapshot is signed for a range that a checkpoint covers: its last entries may then be
    under no snapshot.

    With `evidence`, of a tenant in whose chain a break was found: send what is stored, as it stands and marked as
    broken. Every verifier refuses that file."""
    is_evidence = wanted.get("evidence", False)
    give = (
        exporter.evidence
        if is_evidence
        else partial(exporter.export, without_signing=wanted.get("without_signing", False))
    )
    tenant_id, from_seq, to_seq = wanted["tenant_id"], wanted.get("from_seq"), wanted.get("to_seq")
    headers = {
        "Content-Disposition": f'attachment; filename="{tenant_id}.{"evidence" if is_evidence else "bundle"}.tar"'
    }
    return await streamed(
        request,
        accepted,
        give(tenant_id, from_seq, to_seq),
        MEDIA_TYPE,
        headers,
        tenant_id,
        from_seq=from_seq,
        to_seq=to_seq,
    )


@router.post(
    "/v1/bundles/import",
    responses=answered(ImportAnswer),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                MULTIPART: {
                    "schema": {
                        "type": "object",
                        "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                        "required": ["file"],
                    }
                }
            },
        }
    },
)
async def import_bundles(
    request: Request,
    node: Service[Node],
    importer: Service[BundleImporter],
    system_entries: Service[SystemEntries],
    staging: Service[Staging],
    regions: Service[Regions],
    accepted: AcceptedDep,
    dry_run: Annotated[bool, Query(description="Say what would come of it, and store nothing.")] = False,
) -> Response:
    """Verify the bundles, all of them, then merge them into the chains of their tenants; what is there already is not
    added again. With `dry_run` nothing is stored. Cut short, the same call again goes on where it was."""
    node.check_writable()
    await importer.check_trusting()

    charged, admitted = set[str](), list[RangeManifest]()

    async def admit(bundle: RangeManifest) -> None:
        tenant_id = bundle.tenant_id
        admitted.append(bundle)
        await accepted.allow(tenant_id)
        if not dry_run and tenant_id not in charged and tenant_id not in system_entries.tenants:
            system_entries.charge_new(accepted.caller.id, 1)
            charged.add(tenant_id)

    with accepted.access.quotas.imports.one(accepted.caller.id):
        async with uploaded(request, staging) as upload:
            outcome = await importer.run(upload.files, dry_run=dry_run, admit=admit)
    for bundle in () if dry_run else admitted:
        regions.was_brought(bundle)
    return json_answer(outcome.to_json(dry_run=dry_run))


receipts_router = APIRouter(route_class=StrictRoute, responses=PROBLEM_RESPONSE)

_RECEIPT_CONTENT = {JSON_MEDIA_TYPE: {"schema": {"type": "object", "required": ["receipt", "statement"]}}}
_RECEIPT = {
    "description": "A receipt; tally verify-proof and the page /verify verify it",
    "content": _RECEIPT_CONTENT,
}
_ENTRY_RECEIPT = {
    **_RECEIPT,
    "content": {**_RECEIPT_CONTENT, COSE_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}

Extends = Annotated[
    SeqNumber | None, Query(description="Also prove that the log extends its tree of so many entries, seen earlier.")
]

QUORUM_WAIT_S_MAX = 30.0
WaitS = Annotated[
    float,
    Query(ge=0, le=QUORUM_WAIT_S_MAX, description="How long to wait until the quorum of `log.policy` has cosigned it."),
]


@receipts_router.get(
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
    absent: Annotated[bool, Query(description="Prove that the job has no entries, up to the newest snapshot.")] = False,
    wait_s: WaitS = 0.0,
) -> Response:
    """A file that proves what was recorded of a job, alone and offline: also that there is nothing else, up to the
    newest snapshot with an index of jobs. Entries that no checkpoint covers yet are waited for; the writes of a
    session, too."""
    if tokens := shown_session(accepted, sessions, consistency):
        await consistency.wait_for_session(tokens)
    with notary.rebuilds_if_damaged(tenant_id):
        of_job = receipts.of_no_entry if absent else receipts.of_job
        made = await of_job(tenant_id, job_id, extends, wait_s)
    await accepted.record_read(tenant_id, job_id=job_id, entries=made.entries)
    return _receipt_answer(made, job_id)


@receipts_router.get(
    "/v1/chain/receipt",
    tags=["chain"],
    response_class=Response,
    responses={200: _ENTRY_RECEIPT},
)
async def prove_entry(
    accepted: AcceptedDep,
    notary: Service[Notary],
    receipts: Service[ReceiptMaker],
    tenant_id: TenantQuery,
    seq: Annotated[SeqNumber, Query(description="The entry.")],
    extends: Extends = None,
    form: Annotated[
        Literal["json", "cose"], Query(description="`cose`: the receipt in COSE (RFC 9942), without the entry.")
    ] = "json",
    wait_s: WaitS = 0.0,
) -> Response:
    """A file that proves one entry, alone and offline."""
    with notary.rebuilds_if_damaged(tenant_id):
        made = await receipts.of_entry(tenant_id, seq, extends, wait_s)
    await accepted.record_read(tenant_id, from_seq=seq, entries=made.entries)
    if form == "cose":
        return Response(await receipts.in_cose(made), headers={"Cache-Control": "no-store"}, media_type=COSE_MEDIA_TYPE)
    return _receipt_answer(made, f"{tenant_id}-{seq}")


def _receipt_answer(made: Made, name: str) -> Response:
    return Response(
        made.file,
        headers={
            "Content-Disposition": f'attachment; filename="{name.replace(":", "-")}.receipt.json"',
            "Cache-Control": "no-store",
        },
        media_type=JSON_MEDIA_TYPE,
    )

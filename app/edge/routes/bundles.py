"""``/v1/bundles``: a ledger, or a range of it, as a file that can be verified and carried elsewhere."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.edge.accepted import AcceptedDep
from app.edge.answers import Streamed, json_answer, started, within
from app.edge.forms.body import json_body
from app.edge.forms.requests import ExportRequest
from app.edge.forms.uploads import MEDIA_TYPE as MULTIPART
from app.edge.forms.uploads import uploaded
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.services import Service
from app.runtime.answers.chain import ImportAnswer
from app.runtime.state.node import Node
from app.share.bundle.export import BundleExporter
from app.share.bundle.importer import BundleImporter
from app.share.bundle.staging import Staging
from app.write.intake.system_entries import SystemEntries
from signing.manifest import RangeManifest

router = APIRouter(route_class=StrictRoute, tags=["bundles"], responses=PROBLEM_RESPONSE)

MEDIA_TYPE = "application/x-tar"
_BUNDLE = {
    "description": "A bundle, or evidence of a broken chain, also where a row behind those already sent does not hold; "
    "without its end it is neither, and nothing in it counts",
    "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}

_FILES = {
    "type": "object",
    "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}},
    "required": ["file"],
}


@router.post("/v1/bundles/export", response_class=Response, responses={200: _BUNDLE})
async def export_bundle(
    request: Request,
    exporter: Service[BundleExporter],
    accepted: AcceptedDep,
    wanted: Annotated[ExportRequest, json_body(ExportRequest)],
) -> Response:
    """Sign everything chained so far, then send the tenant's ledger, or a range of it, as one file.

    With `evidence`, of a tenant in whose chain a break was found: send what is stored, as it stands and marked as
    broken. Every verifier refuses that file."""
    is_evidence = wanted.get("evidence", False)
    give = exporter.evidence if is_evidence else exporter.export
    exported = give(wanted["tenant_id"], wanted.get("from_seq"), wanted.get("to_seq"))
    pieces = within(accepted.quotas.exports.one(accepted.caller.id), exported)
    async with started(request, pieces) as unless_sent:
        await accepted.record_read(wanted["tenant_id"], from_seq=wanted.get("from_seq"), to_seq=wanted.get("to_seq"))
        unless_sent.pop_all()
    disposition = f'attachment; filename="{wanted["tenant_id"]}.{"evidence" if is_evidence else "bundle"}.tar"'
    return Streamed(request, accepted, pieces, MEDIA_TYPE, {"Content-Disposition": disposition})


@router.post(
    "/v1/bundles/import",
    responses=answered(ImportAnswer),
    openapi_extra={"requestBody": {"required": True, "content": {MULTIPART: {"schema": _FILES}}}},
)
async def import_bundles(
    request: Request,
    node: Service[Node],
    importer: Service[BundleImporter],
    system_entries: Service[SystemEntries],
    staging: Service[Staging],
    accepted: AcceptedDep,
    dry_run: Annotated[bool, Query(description="Say what would come of it, and store nothing.")] = False,
) -> Response:
    """Verify the bundles, all of them, then merge them into the chains of their tenants; what is there already is not
    added again. With `dry_run` nothing is stored. Cut short, the same call again goes on where it was."""
    node.check_writable()
    await importer.check_trusting()

    charged = set[str]()

    async def admit(bundle: RangeManifest) -> None:
        tenant_id = bundle.tenant_id
        await accepted.allow(tenant_id)
        if not dry_run and tenant_id not in charged and tenant_id not in system_entries.tenants:
            system_entries.charge_new(accepted.caller.id, 1)
            charged.add(tenant_id)

    with accepted.quotas.imports.one(accepted.caller.id):
        async with uploaded(request, staging) as upload:
            outcome = await importer.run(upload.files, dry_run=dry_run, admit=admit)
    return json_answer(outcome.to_json(dry_run=dry_run))

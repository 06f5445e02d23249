"""``/v1/tenants/{tenant_id}``: private fields and erasures; the fields by which a tenant's jobs are indexed."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import TENANT_PATTERN, ReadableTenantPath
from app.edge.forms.requests import ErasureRequest, PrivacyRequest, SearchFieldsRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.runtime.answers import Time, shape
from app.runtime.answers.node import ErasureAnswer, PrivacyAnswer
from app.store import chain_reads
from app.store.jobs import search as job_search
from app.store.jobs.search import SearchFields
from app.store.reading import reading, run_in
from app.store.sessions import NodePool
from app.trust.privacy_knowledge import REFRESH_S
from app.trust.subject_keys import TRUSTED_S
from app.write.intake.private_fields import Facts, PrivacyChanges
from app.write.intake.system_entries import SystemEntries
from ledger.errors import InvalidInputError, reported_as
from ledger.machines.job_search import check_indexed
from ledger.private_fields import declaration_of

router = APIRouter(route_class=StrictRoute, tags=["privacy"], responses=PROBLEM_RESPONSE)


TenantPath = Annotated[str, Path(pattern=TENANT_PATTERN, description="Whose.")]
_NOTHING: dict[str, object] = {"fields": [], "subject": None, "seq": None, "declared_at": None}
"""What a tenant declares that never declared anything."""


SearchFieldsAnswer = shape(
    "SearchFieldsAnswer",
    "The fields by which a tenant's jobs are found at once. Until all jobs are indexed, ``is_built`` is false, and\n"
    "searches look at jobs one by one.",
    tenant_id=str,
    fields=list[str],
    is_built=bool,
    declared_at=Time | None,
)


@router.put("/v1/tenants/{tenant_id}/privacy", responses=answered(PrivacyAnswer))
async def declare_private_fields(
    system_entries: Service[SystemEntries],
    privacy: Service[PrivacyChanges],
    accepted: AcceptedDep,
    tenant_id: TenantPath,
    wanted: Annotated[dict[str, Any], json_body(PrivacyRequest)],
) -> Response:
    """Encrypt these fields of the tenant's events from now on, each under the key of the person it is about."""
    declaration = declaration_of(wanted["fields"], wanted.get("subject"))
    if tenant_id not in system_entries.tenants:
        system_entries.charge_new(accepted.caller.id, 1)
    return _answer(tenant_id, await privacy.declare(tenant_id, declaration))


@router.get("/v1/tenants/{tenant_id}/privacy", responses=answered(PrivacyAnswer))
async def read_private_fields(
    privacy: Service[PrivacyChanges], pool: Service[NodePool], tenant_id: ReadableTenantPath
) -> Response:
    """The tenant's private fields; none when it never declared any."""
    declared = await privacy.declared(tenant_id)
    if declared is None:
        await run_in(reading(pool), chain_reads.require_tenant, tenant_id)
    return _answer(tenant_id, declared)


@router.post("/v1/tenants/{tenant_id}/erasures", responses=answered(ErasureAnswer))
async def erase_subject(
    privacy: Service[PrivacyChanges],
    tenant_id: TenantPath,
    wanted: Annotated[dict[str, Any], json_body(ErasureRequest)],
) -> Response:
    """Destroy the key of a person's private fields, for good. The chain stays whole, and says so."""
    return json_answer(
        {
            "tenant_id": tenant_id,
            **await privacy.erase(tenant_id, wanted["subject"], wanted.get("reason")),
            "other_nodes_within_s": TRUSTED_S,
        }
    )


def _answer(tenant_id: str, declared: Facts | None) -> Response:
    return json_answer(
        {
            "tenant_id": tenant_id,
            **(_NOTHING if declared is None else declared),
            "covers": "events taken from now on; entries recorded before stay as they are",
            "other_nodes_within_s": REFRESH_S,
        }
    )


search = APIRouter(route_class=StrictRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)


@search.put("/v1/tenants/{tenant_id}/search", responses=answered(SearchFieldsAnswer))
async def declare_search_fields(
    pool: Service[NodePool],
    tenant_id: TenantPath,
    wanted: Annotated[dict[str, Any], json_body(SearchFieldsRequest)],
) -> Response:
    """Index the tenant's jobs by these fields, and no others: inside `spec`, or `dc`. Searches find the same jobs
    without, more slowly. The jobs that are there are indexed behind the answer."""
    for number, field in enumerate(wanted["fields"]):
        with reported_as(partial(InvalidInputError, path=("fields", number)), f"fields.{number}", InvalidInputError):
            check_indexed(field)
    declared = await run_in(reading(pool), job_search.declare, tenant_id, sorted(set(wanted["fields"])))
    return _search_answer(tenant_id, declared)


@search.get("/v1/tenants/{tenant_id}/search", responses=answered(SearchFieldsAnswer))
async def read_search_fields(pool: Service[NodePool], tenant_id: ReadableTenantPath) -> Response:
    """The fields by which the tenant's jobs are indexed; none when it never declared any."""
    async with reading(pool) as connection:
        declared = (await job_search.declared(connection, [tenant_id])).get(tenant_id)
        if declared is None:
            await chain_reads.require_tenant(connection, tenant_id)
    return _search_answer(tenant_id, declared)


def _search_answer(tenant_id: str, declared: SearchFields | None) -> Response:
    fields, is_built, at = (
        ([], True, None) if declared is None else (declared.fields, declared.built_to is None, declared.declared_at)
    )
    return json_answer({"tenant_id": tenant_id, "fields": fields, "is_built": is_built, "declared_at": at})

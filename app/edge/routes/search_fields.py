"""``/v1/tenants/{tenant_id}/search``: the fields by which a tenant's jobs are indexed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import TENANT_PATTERN, ReadableTenantPath
from app.edge.forms.requests import SearchFieldsRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.services import Service
from app.runtime.answers.node import SearchFieldsAnswer
from app.store import (
    chain_reads,
    job_search,
)
from app.store.job_search import SearchFields
from app.store.reading import reading
from app.store.sessions import NodePool
from ledger.errors import InvalidInputError
from ledger.machines.job_search import check_indexed

router = APIRouter(route_class=StrictRoute, tags=["jobs"], responses=PROBLEM_RESPONSE)

TenantPath = Annotated[str, Path(pattern=TENANT_PATTERN, description="Whose.")]


@router.put("/v1/tenants/{tenant_id}/search", responses=answered(SearchFieldsAnswer))
async def declare_search_fields(
    pool: Service[NodePool],
    tenant_id: TenantPath,
    wanted: Annotated[SearchFieldsRequest, json_body(SearchFieldsRequest)],
) -> Response:
    """Index the tenant's jobs by these fields, and no others: inside `spec`, or `dc`. Searches find the same jobs
    without, more slowly. The jobs that are there are indexed behind the answer."""
    for number, field in enumerate(wanted["fields"]):
        try:
            check_indexed(field)
        except InvalidInputError as error:
            raise InvalidInputError(f"fields.{number}: {error}", ("fields", number)) from None
    async with reading(pool) as connection:
        declared = await job_search.declare(connection, tenant_id, sorted(set(wanted["fields"])))
    return _answer(tenant_id, declared)


@router.get("/v1/tenants/{tenant_id}/search", responses=answered(SearchFieldsAnswer))
async def read_search_fields(pool: Service[NodePool], tenant_id: ReadableTenantPath) -> Response:
    """The fields by which the tenant's jobs are indexed; none when it never declared any."""
    async with reading(pool) as connection:
        declared = (await job_search.declared(connection, [tenant_id])).get(tenant_id)
        if declared is None:
            await chain_reads.require_tenant(connection, tenant_id)
    return _answer(tenant_id, declared)


def _answer(tenant_id: str, declared: SearchFields | None) -> Response:
    fields, is_built, at = (
        ([], True, None) if declared is None else (declared.fields, declared.built_to is None, declared.declared_at)
    )
    return json_answer({"tenant_id": tenant_id, "fields": fields, "is_built": is_built, "declared_at": at})

"""``/v1/commitments`` and ``/v1/nodes``: propose, read commitments, set capacities of nodes; a tenant's rules."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.forms.body import body_of, json_body
from app.edge.forms.fields import TENANT_PATTERN, CursorQuery, Limit, SeqNumber, TenantQuery
from app.edge.forms.lists import Cursors, number_position, page
from app.edge.forms.requests import CAPACITY, PROMISE_PATTERN, PROPOSAL, RulesRequest
from app.edge.routing import (
    IDEMPOTENCY_KEY_PARAMETER,
    PROBLEM_RESPONSE,
    WRITE_HEADERS,
    LeanRoute,
    StrictRoute,
    answered,
)
from app.edge.writes import PROPOSING, ProposalWrites
from app.read.commitments import CommitmentReader, PromisedPage
from app.runtime.answers.jobs import CapacityAnswer, CommitmentList, NodeList, RulesAnswer, VerdictOfProposal
from app.store import chain_reads
from app.store.reading import reading, run_in
from app.store.sessions import NodePool

router = APIRouter(route_class=StrictRoute, tags=["commitments"], responses=PROBLEM_RESPONSE)
proposals = APIRouter(route_class=LeanRoute, tags=["commitments"], responses=PROBLEM_RESPONSE)

AsOfQuery = Annotated[SeqNumber | None, Query(description="As it was once that entry was there; else now.")]


def _place(as_of_seq: int, index: int) -> tuple[int, int]:
    return (*number_position(as_of_seq), *number_position(index))


_COMMITMENTS, _NODES = Cursors("commitments", _place), Cursors("nodes", _place)


@proposals.post(
    PROPOSING.path,
    status_code=201,
    responses=answered(VerdictOfProposal, 201, headers=WRITE_HEADERS),
    openapi_extra={
        "requestBody": body_of(PROPOSAL),
        "parameters": [{**IDEMPOTENCY_KEY_PARAMETER, "required": True}],
    },
)
async def propose(request: Request, accepted: AcceptedDep, writes: Service[ProposalWrites]) -> Response:
    """Propose a commitment that holds from the end of the chain on, if its precondition holds there. A proposal that
    is rejected is recorded, too."""
    return await writes.submit(PROPOSING, request, accepted)


@proposals.put(
    "/v1/nodes/{node}/capacity",
    responses=answered(CapacityAnswer, headers=WRITE_HEADERS),
    openapi_extra={"requestBody": body_of(CAPACITY)},
)
async def set_capacity(
    request: Request,
    accepted: AcceptedDep,
    writes: Service[ProposalWrites],
    node: Annotated[str, Path(pattern=PROMISE_PATTERN, description="The node.")],
) -> Response:
    """Record what a node has, and how far it may be overcommitted. Where that is known, free is that less what is
    reserved, and no more can be reserved."""
    return await writes.set_capacity(node, request, accepted)


@router.put(
    "/v1/tenants/{tenant_id}/rules",
    responses=answered(RulesAnswer, headers=WRITE_HEADERS),
)
async def set_rules(
    accepted: AcceptedDep,
    pool: Service[NodePool],
    writes: Service[ProposalWrites],
    tenant_id: Annotated[str, Path(pattern=TENANT_PATTERN, description="Whose.")],
    wanted: Annotated[dict[str, Any], json_body(RulesRequest)],
) -> Response:
    """Judge the tenant's proposals by newer rules from now on. Entries before stay judged by the rules of then, and
    older rules never return."""
    await run_in(reading(pool), chain_reads.require_tenant, tenant_id)
    return await writes.set_rules(tenant_id, wanted["version"], accepted)


@router.get("/v1/commitments", responses=answered(CommitmentList))
async def list_commitments(
    accepted: AcceptedDep,
    commitments: Service[CommitmentReader],
    tenant_id: TenantQuery,
    as_of_seq: AsOfQuery = None,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """What is promised: linearizable, and all pages as of the seq of the first."""
    scope = f"{tenant_id}/{as_of_seq or ''}"
    as_of, after = _COMMITMENTS.at(scope, cursor) or (as_of_seq, 0)
    found = await commitments.page(tenant_id, as_of, after, limit)
    next_cursor = _next(_COMMITMENTS, scope, found)
    await accepted.record_read(tenant_id, commitments=len(found.items))
    return page(found.items, next_cursor, as_of_seq=found.as_of_seq)


@router.get("/v1/nodes", responses=answered(NodeList))
async def list_nodes(
    accepted: AcceptedDep,
    commitments: Service[CommitmentReader],
    tenant_id: TenantQuery,
    as_of_seq: AsOfQuery = None,
    overbooked: Annotated[bool, Query(description="Only nodes of which more is reserved than their limit.")] = False,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """The nodes of known capacity: what each has, what is reserved of it and what is free. Linearizable, and all pages
    as of the seq of the first."""
    scope = f"{tenant_id}/{as_of_seq or ''}/{'overbooked' if overbooked else ''}"
    as_of, after = _NODES.at(scope, cursor) or (as_of_seq, 0)
    found, rules = await commitments.nodes(tenant_id, as_of, after, limit, overbooked=overbooked)
    await accepted.record_read(tenant_id, nodes=len(found.items))
    return page(found.items, _next(_NODES, scope, found), as_of_seq=found.as_of_seq, rules=rules)


def _next(cursors: Cursors[tuple[int, int]], scope: str, found: PromisedPage) -> str | None:
    return cursors.next(scope, None if found.last is None else (found.as_of_seq, found.last))

"""``/v1/commitments`` and ``/v1/nodes``: propose, read what is promised, say what nodes have."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from app.edge.accepted import record_read
from app.edge.charging import charge_tenant
from app.edge.forms.body import JSON_MEDIA_TYPE, body_of, parse, read_body
from app.edge.forms.fields import CursorQuery, Limit, ReadableTenantId, SeqNumber
from app.edge.forms.lists import Cursors, number_position, page
from app.edge.forms.requests import CAPACITY, PROMISE_PATTERN, PROPOSAL, PROPOSAL_TAGS
from app.edge.parts import Parts, PartsDep, parts_of
from app.edge.routing import (
    BEGUN,
    IDEMPOTENCY_KEY_PARAMETER,
    PROBLEM_RESPONSE,
    WRITE_HEADERS,
    Begun,
    LeanRoute,
    StrictRoute,
    answered,
    caller_of,
)
from app.edge.writes import Route, request_key, token_of, write_headers
from app.read.commitments import PromisedPage
from app.runtime.answers import json_bytes
from app.runtime.answers.commitments import CapacityAnswer, CommitmentList, NodeList, VerdictOfProposal
from app.runtime.settings.words import WORDS
from app.write.intake.proposals import Recorded
from ledger.errors import InvalidInputError

router = APIRouter(route_class=StrictRoute, tags=["commitments"], responses=PROBLEM_RESPONSE)
proposals = APIRouter(route_class=LeanRoute, tags=["commitments"], responses=PROBLEM_RESPONSE)

TenantQuery = Annotated[ReadableTenantId, Query()]
AsOfQuery = Annotated[SeqNumber | None, Query(description="As it was once that entry was there; else now.")]
NodePath = Annotated[str, Path(pattern=PROMISE_PATTERN, description="The node.")]

_is_name = re.compile(PROMISE_PATTERN).fullmatch


def _place(as_of_seq: int, index: int) -> tuple[int, int]:
    return (*number_position(as_of_seq), *number_position(index))


_COMMITMENTS, _NODES = Cursors("commitments", _place), Cursors("nodes", _place)


PROPOSALS_PATH = "/v1/commitments"


@proposals.post(
    PROPOSALS_PATH,
    status_code=201,
    responses=answered(VerdictOfProposal, 201, headers=WRITE_HEADERS),
    openapi_extra={
        "requestBody": body_of(PROPOSAL),
        "parameters": [{**IDEMPOTENCY_KEY_PARAMETER, "required": True}],
    },
)
async def propose(request: Request) -> Response:
    """Propose a commitment that holds from the end of the chain on, if its precondition holds there. A proposal that
    is rejected is recorded, too."""
    parts = parts_of(request)
    parts.check_writable()
    body = await read_body(request, JSON_MEDIA_TYPE, parts.settings.event_bytes_max)
    wanted = parse(PROPOSAL, body, PROPOSAL_TAGS)
    begun: Begun | None = request.scope.get(BEGUN)
    if begun is None or not begun.is_charged:
        charge_tenant(request, wanted["tenant_id"], body)
    key = request_key(request, Route.COMMITMENTS, body, "")
    if key is None:
        raise InvalidInputError(
            "Idempotency-Key: a proposal needs one, so that it can be repeated", ("Idempotency-Key",)
        )
    recorded = await parts.proposals.propose(wanted, caller_of(request).id, key)
    return _answer(parts, recorded, 201, ACCEPTED)


@proposals.put(
    "/v1/nodes/{node}/capacity",
    responses=answered(CapacityAnswer, headers=WRITE_HEADERS),
    openapi_extra={"requestBody": body_of(CAPACITY)},
)
async def set_capacity(request: Request, node: NodePath) -> Response:
    """Record what a node has. Where that is known, free is that less what is reserved."""
    parts = parts_of(request)
    parts.check_writable()
    if _is_name(node) is None:
        raise InvalidInputError(f"node: {WORDS[PROMISE_PATTERN]}", ("node",))
    body = await read_body(request, JSON_MEDIA_TYPE, parts.settings.event_bytes_max)
    wanted = parse(CAPACITY, body)
    charge_tenant(request, wanted["tenant_id"], body)
    recorded = await parts.proposals.set_capacity(wanted["tenant_id"], node, wanted["capacity"], caller_of(request).id)
    return _answer(parts, recorded, 200, {"node": node})


def _answer(parts: Parts, recorded: Recorded, status: int, said: dict[str, Any]) -> Response:
    token = token_of(parts.sessions, recorded.hlc, recorded.epoch, recorded.lsn)
    headers = write_headers(token, recorded.replayed)
    return Response(recorded_body(recorded, said), status, headers, media_type=JSON_MEDIA_TYPE)


ACCEPTED = {"verdict": "accepted"}


def recorded_body(recorded: Recorded, said: dict[str, Any]) -> bytes:
    """The JSON that answers what was recorded."""
    return json_bytes({"index": recorded.seq, "hlc": recorded.hlc, **said})


@router.get("/v1/commitments", responses=answered(CommitmentList))
async def list_commitments(
    request: Request,
    parts: PartsDep,
    tenant_id: TenantQuery,
    as_of_seq: AsOfQuery = None,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """What is promised: linearizable, and all pages as of the seq of the first."""
    found, next_cursor = await _read(parts, _COMMITMENTS, tenant_id, as_of_seq, limit, cursor, capacities=False)
    await record_read(request, tenant_id, commitments=len(found.items))
    return page(found.items, next_cursor, as_of_seq=found.as_of_seq)


@router.get("/v1/nodes", responses=answered(NodeList))
async def list_nodes(
    request: Request,
    parts: PartsDep,
    tenant_id: TenantQuery,
    as_of_seq: AsOfQuery = None,
    limit: Annotated[Limit, Query()] = 100,
    cursor: CursorQuery = None,
) -> Response:
    """What nodes have, as far as that was said."""
    found, next_cursor = await _read(parts, _NODES, tenant_id, as_of_seq, limit, cursor, capacities=True)
    await record_read(request, tenant_id, nodes=len(found.items))
    return page(found.items, next_cursor, as_of_seq=found.as_of_seq)


async def _read(
    parts: Parts,
    cursors: Cursors[tuple[int, int]],
    tenant_id: str,
    as_of_seq: int | None,
    limit: int,
    cursor: str | None,
    *,
    capacities: bool,
) -> tuple[PromisedPage, str | None]:
    scope = f"{tenant_id}/{as_of_seq or ''}"
    as_of, after = cursors.at(scope, cursor) or (as_of_seq, 0)
    found = await parts.commitment_reader.page(tenant_id, as_of, after, limit, capacities=capacities)
    return found, None if found.last is None else cursors.next(scope, (found.as_of_seq, found.last))


# In front: see app.edge.routes.jobs.
router.routes[:0] = proposals.routes

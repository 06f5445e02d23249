"""``/v1/callers``: keys of callers that sign their events; which events of a tenant must be signed."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import TENANT_PATTERN, HlcText
from app.edge.forms.requests import CallerRequest, SignaturesRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.runtime.answers.exchange import CallerAnswer, CallerList
from app.runtime.principals import Right, shown_callers
from app.runtime.state.node import Node
from app.trust.caller_keys import CallerKeys
from ledger.errors import InvalidInputError
from signing.keys import Caller

router = APIRouter(route_class=StrictRoute, tags=["callers"], responses=PROBLEM_RESPONSE)


@router.post("/v1/callers", status_code=201, responses=answered(CallerAnswer, 201))
async def register_caller(
    callers: Service[CallerKeys], accepted: AcceptedDep, wanted: Annotated[dict[str, Any], json_body(CallerRequest)]
) -> Response:
    """Let a key sign events of these tenants as this caller. Its private half stays with the caller."""
    caller = await callers.register(wanted["name"], wanted["tenants"], wanted["public_key_pem"], accepted.caller)
    return json_answer(_answer(caller), 201)


@router.get("/v1/callers", responses=answered(CallerList))
async def list_callers(callers: Service[CallerKeys], accepted: AcceptedDep) -> Response:
    """The callers that may sign events of tenants that the caller may audit, and what must be signed there."""
    return json_answer(shown_callers(callers.known.to_json(), accepted.caller.patterns(Right.AUDIT)))


@router.delete("/v1/callers/{key_id}", responses=answered(CallerAnswer))
async def revoke_caller(
    callers: Service[CallerKeys],
    node: Service[Node],
    accepted: AcceptedDep,
    key_id: Annotated[str, Path(max_length=64, description="The key.")],
    reason: Annotated[str, Query(max_length=1000, description="Why; goes on record. Must be given.")] = "",
    from_hlc: Annotated[HlcText | None, Query(description="From when on; left out, in two seconds.")] = None,
) -> Response:
    """Let no event count that the key signed from an HLC on. The key is never registered again."""
    node.check_writable()
    await accepted.allow()
    if not reason:
        raise InvalidInputError("reason: say why the key is revoked", ("reason",))
    return json_answer(_answer(await callers.revoke(key_id, from_hlc, reason, accepted.caller)))


@router.put("/v1/tenants/{tenant_id}/signatures", responses=answered(CallerList))
async def require_signatures(
    callers: Service[CallerKeys],
    accepted: AcceptedDep,
    tenant_id: Annotated[str, Path(pattern=TENANT_PATTERN, description="Whose.")],
    wanted: Annotated[dict[str, Any], json_body(SignaturesRequest)],
) -> Response:
    """Take events of these types only if their callers sign them, from now on; of all others either way."""
    await callers.require(tenant_id, wanted["types"], accepted.caller)
    return json_answer(shown_callers(callers.known.to_json(), [tenant_id]))


def _answer(caller: Caller) -> dict[str, Any]:
    return {**caller.key.to_json(), "name": caller.name, "tenants": list(caller.tenants)}

"""``/v1/exclusions``: logs of other ledgers whose facts are recorded in a tenant's chain and do not count."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import TenantQuery
from app.edge.forms.requests import ExclusionRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.runtime.answers.exchange import ExclusionAnswer, ExclusionList
from app.write.intake.tenant_changes import ExclusionChanges
from ledger import rfc3339
from ledger.hlc import Hlc
from ledger.machines.exclusions import Statement

router = APIRouter(route_class=StrictRoute, tags=["exchange"], responses=PROBLEM_RESPONSE)


@router.post("/v1/exclusions", status_code=201, responses=answered(ExclusionAnswer, 201))
async def exclude_log(
    changes: Service[ExclusionChanges],
    accepted: AcceptedDep,
    wanted: Annotated[dict[str, Any], json_body(ExclusionRequest)],
) -> Response:
    """Record that the facts of a log do not count in a tenant, neither those chained before nor later ones, or, with
    `excluded` false, that they count again. They stay in the chain. Every ledger that imports the entry, and every
    verifier, folds the tenant's jobs accordingly."""
    change = changes.exclude if wanted.get("excluded", True) else changes.include
    statement = await change(wanted["tenant_id"], wanted["log"], wanted["reason"], accepted.caller.id)
    return json_answer(_answer(wanted["tenant_id"], statement), status=201)


@router.get("/v1/exclusions", responses=answered(ExclusionList))
async def list_exclusions(changes: Service[ExclusionChanges], tenant_id: TenantQuery) -> Response:
    """The newest statement about each log that was ever excluded in a tenant, by log."""
    found = await changes.statements(tenant_id)
    return json_answer({"items": [_answer(tenant_id, each) for each in found], "next_cursor": None})


def _answer(tenant_id: str, statement: Statement) -> dict[str, Any]:
    physical_ms, logical, node, _ = statement.rank
    return {
        "tenant_id": tenant_id,
        "log": statement.log,
        "excluded": statement.is_excluded,
        "reason": statement.reason,
        "actor": statement.actor if isinstance(statement.actor, str) else None,
        "stated_by": statement.by_log,
        "seq": statement.seq,
        "hlc": Hlc(physical_ms, logical, node).text(),
        "at": rfc3339.text_of(physical_ms),
    }

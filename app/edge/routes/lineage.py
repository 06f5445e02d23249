"""``POST /api/v1/lineage``: what Airflow, Spark, dbt, Flink and Dagster tell of their runs by OpenLineage.

Emitters repeat what they are not sure of, send events of one run in any order and leave some out. So an event that adds
nothing is answered like one that does: it was recorded before, its run has ended, or it is not about a run. A run that
is heard of first by its end is created with it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request, Response

from app.edge.accepted import AcceptedDep
from app.edge.answers import JSON_MEDIA_TYPE, json_answer
from app.edge.forms.body import read_body
from app.edge.routes.openlineage import STARTS, TYPES, RunEvent, read
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.services import Service
from app.edge.writes import Route
from app.runtime.answers.jobs import LineageAnswer
from app.runtime.principals import Principal, Right
from app.runtime.settings.config import Settings
from app.runtime.state.node import Node
from app.write.intake.sealing import Sealing
from app.write.intake.submit import Submitter
from app.write.pending.requests import RequestKey, draft_of
from ledger import canonical
from ledger.errors import (
    IdempotencyReusedError,
    InvalidInputError,
    JobEndedError,
    JobExistsError,
    JobNotFoundError,
    ProblemError,
)
from ledger.facts.events import SYSTEM_TENANT
from ledger.facts.problems import PAYLOAD_TOO_LARGE

router = APIRouter(route_class=StrictRoute, tags=["events"], responses=PROBLEM_RESPONSE)

EVENTS_MAX: Final = 1000
"""Most events in one request."""
RUNS_AT_ONCE: Final = 32
"""Runs of one request whose events are recorded beside each other."""
_ADDS_NOTHING: Final = (IdempotencyReusedError, JobEndedError, JobExistsError)
_BODY: Final = {
    "required": True,
    "content": {
        JSON_MEDIA_TYPE: {
            "schema": {
                "description": "An event of OpenLineage, or an array of them; facets that are not known count nothing.",
                "oneOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}, "maxItems": EVENTS_MAX}],
            }
        }
    },
}


@router.post("/api/v1/lineage", responses=answered(LineageAnswer), openapi_extra={"requestBody": _BODY})
async def record_lineage(
    request: Request,
    accepted: AcceptedDep,
    node: Service[Node],
    settings: Service[Settings],
    sealing: Service[Sealing],
    submitter: Service[Submitter],
) -> Response:
    """Record what run events of OpenLineage say, as events of the job that has the id of the run. The tenant is the one
    that `lineage.tenants` names for the namespace of the job, else the only one of the token. What adds nothing (said
    before, about a run that has ended, or about none) is counted and well."""
    node.check_writable()
    body = await read_body(request, JSON_MEDIA_TYPE, settings.http.body_bytes_max)
    events = [read(value) for value in _values(body)]
    by_run: defaultdict[tuple[str, str], list[RunEvent]] = defaultdict(list)
    tenants: Counter[str] = Counter()
    for event in filter(None, events):
        tenant_id = tenant_of(event.namespace, settings.lineage.tenants, accepted.caller)
        accepted.check_tenant(tenant_id)
        by_run[tenant_id, event.run_id].append(event)
        tenants[tenant_id] += 1
    if accepted.quotas.bounds_tenants and tenants:
        accepted.quotas.admit_tenants(tenants, dict.fromkeys(tenants, len(body) // len(tenants)))
    at_once = asyncio.Semaphore(RUNS_AT_ONCE)

    async def submit(tenant_id: str, event: RunEvent, types: Sequence[str]) -> None:
        for event_type in types:
            given = event.fields(event_type) | {"tenant_id": tenant_id}
            digest = hashlib.sha256(canonical.encode(given)).digest()
            draft = await sealing.prepare(draft_of(given, None, event.run_id, accepted.caller.id))
            key = RequestKey(Route.LINEAGE, event.key(event_type), digest)
            await submitter.submit(draft, key=sealing.key_of(key, draft.seal is not None))

    async def record(tenant_id: str, event: RunEvent) -> bool:
        """Record what the event says; whether the ledger has all of it now, by this request or another."""
        try:
            try:
                await submit(tenant_id, event, TYPES[event.state])
            except JobNotFoundError:
                # The first event of the run to arrive: its START was lost, or is still on its way.
                await submit(tenant_id, event, (*STARTS, *TYPES[event.state]))
        except _ADDS_NOTHING:
            return False
        return True

    async def record_run(tenant_id: str, told: Sequence[RunEvent]) -> int:
        async with at_once:
            return sum([await record(tenant_id, event) for event in told])

    recorded = await asyncio.gather(*(record_run(tenant_id, told) for (tenant_id, _), told in by_run.items()))
    return json_answer({"events": len(events), "recorded": sum(recorded)})


def tenant_of(namespace: str, tenants: Mapping[str, str], caller: Principal) -> str:
    """Whose a run of this namespace is: as ``lineage.tenants`` says, by the namespace or the longest beginning of it
    that stands there before a ``*``; else the only tenant that the caller may write to.

    Raises:
        InvalidInputError: neither says it.
    """
    if namespace in tenants:
        return tenants[namespace]
    begun = [name for name in tenants if name.endswith("*") and namespace.startswith(name[:-1])]
    if begun:
        return tenants[max(begun, key=len)]
    match caller.patterns(Right.WRITE):
        # The ledger's own chain has no jobs, whatever a token says.
        case [tenant_id] if tenant_id != SYSTEM_TENANT and not tenant_id.endswith("*"):
            return tenant_id
    raise InvalidInputError(
        f"lineage.tenants names no tenant for namespace {namespace[:100]!r}: add one to that setting, or give the "
        "emitter a token that may write to one tenant alone"
    )


def _values(body: bytes) -> list[Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"the body is not JSON: {error}") from None
    values = value if isinstance(value, list) else [value]
    if len(values) > EVENTS_MAX:
        raise ProblemError(PAYLOAD_TOO_LARGE, f"at most {EVENTS_MAX} events go into one request")
    return values

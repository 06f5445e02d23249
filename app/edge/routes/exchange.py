"""``/v1/exchange``: the ledgers that this one exchanges with, and how far each is imported."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from app.edge.accepted import AcceptedDep
from app.edge.answers import json_answer
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.services import Service
from app.runtime.answers.node import ExchangeAnswer, HeldList
from app.runtime.principals import Right
from app.share.exchange.regions import Regions
from app.store import exchange
from app.store.reading import reading
from app.store.sessions import NodePool
from ledger import names
from signing.manifest import LOG_ORIGIN

router = APIRouter(route_class=StrictRoute, tags=["exchange"], responses=PROBLEM_RESPONSE)

HELD_MAX = 1000
_TENANT_OR_NONE = names.anchored(f"({names.READABLE_TENANT_ID})?")


@router.get("/v1/exchange", responses=answered(ExchangeAnswer))
async def read_exchange(regions: Service[Regions]) -> Response:
    """The peers, and how this node finds them."""
    return json_answer(
        {
            "peers": [
                {
                    "url": peer.settings.url,
                    "region": peer.settings.region,
                    "fault": peer.fault,
                    "lag_entries": peer.lag_entries,
                    "imported_entries": peer.imported_entries,
                }
                for peer in regions.peers
            ]
        }
    )


@router.get("/v1/exchange/held", responses=answered(HeldList))
async def list_held(
    pool: Service[NodePool],
    accepted: AcceptedDep,
    origin: Annotated[
        str, Query(pattern=names.anchored(LOG_ORIGIN), description="Log origin of the ledger that asks.")
    ],
    after: Annotated[str, Query(pattern=_TENANT_OR_NONE, description="Tenants above this one.")] = "",
    limit: Annotated[int, Query(ge=1, le=HELD_MAX, description="At most so many tenants.")] = HELD_MAX,
) -> Response:
    """By tenant that the caller may audit, up to which seq of that ledger this one has imported.

    A page with fewer than `limit` tenants is the last."""
    async with reading(pool) as connection:
        held = await exchange.held_of(connection, origin, after, limit, accepted.caller.patterns(Right.AUDIT))
    return json_answer({"items": [{"tenant_id": tenant_id, "seq": seq} for tenant_id, seq in held]})

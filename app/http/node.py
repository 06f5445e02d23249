"""``GET /v1/node``: who this node is and how far its writes have come."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.http.answers import json_answer
from app.http.node_answers import NodeAnswer
from app.http.routing import PROBLEM_RESPONSE, StrictRoute
from app.parts import PartsDep
from ledger import rfc3339

router = APIRouter(route_class=StrictRoute, tags=["node"])


@router.get("/v1/node", responses={200: {"model": NodeAnswer}, **PROBLEM_RESPONSE})
async def read_node(parts: PartsDep) -> Response:
    """This node. Positions are read from the last to the first, so each is at least the next."""
    node, settings = parts.node, parts.settings
    chained_lsn, commit_lsn, durable_lsn = node.chained.lsn, node.committed.lsn, node.durable.lsn
    return json_answer(
        {
            "node_id": node.node_id,
            "region": node.region,
            "gate": node.gate,
            "epoch": node.epoch,
            "wal_id": node.wal_id,
            "ack_mode": settings.wal.ack_mode,
            "topology": {"postgres_survives": settings.topology.postgres_survives, "safekeepers": 0},
            "positions": {
                "written_lsn": node.written_lsn(),
                "durable_lsn": durable_lsn,
                "commit_lsn": commit_lsn,
                "chained_lsn": chained_lsn,
            },
            "clock": {
                "last_hlc": node.clock.last.text(),
                "last_at": rfc3339.text_of(node.clock.last.physical_ms),
                "offset_ms": node.clock.offset_ms(node.wall.now_ms()),
                "max_clock_skew_ms": node.clock.max_clock_skew_ms,
                "ticks": node.clock.ticks,
                "skew_rejections": node.clock.skew_rejections,
            },
            "failure": None if node.failure is None else str(node.failure),
        }
    )

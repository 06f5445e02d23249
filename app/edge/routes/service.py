"""``/v1/node``, ``/livez``, ``/readyz``, ``/metrics``: identity and health of this node, for its operators."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from app.edge.accepted import AccessControl, Service
from app.edge.answers import json_answer
from app.edge.forms.body import TEXT_MEDIA_TYPE
from app.edge.problems import problem_response
from app.edge.routing import (
    PROBLEM_RESPONSE,
    StrictRoute,
    answered,
)
from app.read.readiness import Readiness
from app.runtime.answers import Time, shape
from app.runtime.answers.node import NodeAnswer
from app.runtime.metrics import Metrics
from app.runtime.principals import EVERY_TENANT, Right
from app.runtime.settings.config import Settings
from app.runtime.state.kept_files import LastVerified
from app.runtime.state.node import Node
from app.write.intake.system_entries import SystemEntries
from ledger import native, rfc3339
from ledger.errors import InvalidInputError
from ledger.facts.checks import CHECKS
from ledger.facts.events import SYSTEM_TENANT
from ledger.facts.problems import NOT_READY
from wal.group_commit import GroupCommit
from wal.replication.leading import Shipper

router = APIRouter(route_class=StrictRoute, tags=["service"], responses=PROBLEM_RESPONSE)

ALWAYS_COUNTED = frozenset({"accepting", "writer"})
"""Checks without which no write is taken, whatever its level."""
NAMING_TENANTS = frozenset(check.name for check in CHECKS if check.names_tenants)


LiveAnswer = shape(
    "LiveAnswer",
    "The process runs.",
    status=Literal["live"],
)

CheckAnswer = shape(
    "CheckAnswer",
    "One readiness check.",
    ok=bool,
    detail=str | None,
)

VerifiedAnswer = shape(
    "VerifiedAnswer",
    "When the chains of all tenants, but for those that never were, had been verified from end to end.",
    at=Time | None,
    by=str | None,
    tenants=int,
    never_verified=int,
)

ReadyAnswer = shape(
    "ReadyAnswer",
    "The node takes requests.",
    status=Literal["ready"],
    checks={str: CheckAnswer},
    verified=VerifiedAnswer,
)


@router.get("/v1/node", responses=answered(NodeAnswer))
async def read_node(
    node: Service[Node], settings: Service[Settings], shipper: Service[Shipper | None], writer: Service[GroupCommit]
) -> Response:
    """This node. Positions are read from the last to the first, so each is at least the next."""
    chained_lsn, commit_lsn, durable_lsn = node.chained.lsn, node.committed.lsn, node.durable.lsn
    return json_answer(
        {
            "node_id": node.node_id,
            "region": node.region,
            "gate": node.gate,
            "epoch": node.epoch,
            "wal_id": node.wal_id,
            "ack_mode": settings.wal.ack_mode,
            "core": native.NAME,
            "topology": {
                "postgres_survives": settings.topology.postgres_survives,
                "safekeepers": len(settings.replication.members),
            },
            "members": [
                {
                    "address": each.address,
                    "region": each.region,
                    "member_id": each.member_id or None,
                    "in_sync": each.is_streaming,
                    "last_replicated_lsn": each.replicated_lsn,
                    "lag_lsn": each.lag_lsn,
                    "fault": each.fault,
                }
                for each in (() if shipper is None else shipper.reports())
            ],
            "positions": {
                "written_lsn": writer.written_lsn,
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


@router.get("/livez", responses=answered(LiveAnswer))
async def read_liveness() -> Response:
    """The process runs and answers."""
    return json_answer({"status": "live"})


@router.get("/readyz", responses=answered(ReadyAnswer))
async def read_readiness(
    request: Request,
    access: Service[AccessControl],
    readiness: Service[Readiness],
    system_entries: Service[SystemEntries],
    last_verified: Service[LastVerified],
    exclude: Annotated[
        str | None,
        Query(
            max_length=200,
            description="Checks that are told and make no 503, separated by commas: `database,chaining,checkpoints` "
            "keeps a node that takes writes at LOCAL while PostgreSQL is away. `accepting` and `writer` always count.",
        ),
    ] = None,
) -> Response:
    """Whether the node takes requests, check by check; 503 when one fails.

    Other checks are reported and make no 503: without ``signing`` it still takes requests, and with damage to single
    tenants (``tenants``, ``rows``) it serves all others. Which, callers with `operate` for all are told.
    """
    found = await readiness.faults()
    excluded = set(exclude.split(",")) if exclude is not None else set()
    if unknown := excluded - (found.keys() - ALWAYS_COUNTED):
        raise InvalidInputError(f"exclude: {min(unknown)[:100]!r} is no check that can be left out", ("exclude",))
    checks = {name: {"ok": fault is None, "detail": fault} for name, fault in found.items()}
    faults = [f"{name}: {fault}" for name, fault in found.items() if fault is not None and name not in excluded]
    caller = await access.caller_if_known(request.scope)
    may_know_tenants = caller is not None and caller.may(Right.OPERATE, EVERY_TENANT)
    for name, check in readiness.reported.items():
        fault = check()
        if fault is not None and name in NAMING_TENANTS and not may_know_tenants:
            fault = "what it is, callers with the right operate for all tenants are told"
        checks[name] = {"ok": fault is None, "detail": fault}
    verified = _verified(system_entries, last_verified, may_know_callers=may_know_tenants)
    if faults:
        return problem_response(NOT_READY, "; ".join(faults), members={"checks": checks, "verified": verified})
    return json_answer({"status": "ready", "checks": checks, "verified": verified})


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Text format of Prometheus, or OpenMetrics with exemplars where that is accepted",
            "content": {
                TEXT_MEDIA_TYPE: {"schema": {"type": "string"}},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            },
        }
    },
)
async def read_metrics(request: Request, metrics: Service[Metrics], readiness: Service[Readiness]) -> Response:
    """Metrics in the text format of Prometheus. With ``Accept: application/openmetrics-text`` they have exemplars: the
    trace of the last request in each bucket that named one."""
    await readiness.ask_database()
    content, media_type = metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": media_type, "Vary": "Accept"})


def _verified(
    system_entries: SystemEntries, last_verified: LastVerified, *, may_know_callers: bool
) -> dict[str, object]:
    tenants = system_entries.tenants | {SYSTEM_TENANT}
    oldest, never = last_verified.of_all(tenants)
    return {
        "at": None if oldest is None else datetime.fromtimestamp(oldest.at_s, UTC),
        "by": oldest.by if oldest is not None and may_know_callers else None,
        "tenants": len(tenants),
        "never_verified": never,
    }

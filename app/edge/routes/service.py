"""``/v1/node``, ``/livez``, ``/readyz``, ``/metrics``: who this node is and how it does, for those who run it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.edge.answers import json_answer
from app.edge.forms.body import TEXT_MEDIA_TYPE
from app.edge.parts import Parts, PartsDep
from app.edge.problems import problem_response
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered, caller_if_known
from app.runtime import metrics
from app.runtime.answers.node import LiveAnswer, NodeAnswer, ReadyAnswer, VerifiedAnswer
from app.runtime.principals import EVERY_TENANT, Right
from app.store import chain_reads
from app.store.reading import reading
from ledger import native, rfc3339
from ledger.errors import DatabaseUnavailableError, InvalidInputError
from ledger.facts.events import SYSTEM_TENANT
from ledger.facts.problems import NOT_READY

router = APIRouter(route_class=StrictRoute, tags=["service"], responses=PROBLEM_RESPONSE)

DATABASE_CHECK_TIMEOUT_S = 2.0
EXCLUDED_CHARACTERS_MAX = 200
ALWAYS_COUNTED = frozenset({"accepting", "writer"})
"""Checks without which no write is taken, whatever its level."""
NAMING_TENANTS = frozenset({"breaks", "locks", "lost", "privacy", "rows", "tenants", "watch"})
"""Reported checks that say which tenants are at fault: not to everybody."""
_NOT_TOLD = "what it is, callers with the right operate for all tenants are told"
_TEXT = {
    "description": "Text format of Prometheus",
    "content": {TEXT_MEDIA_TYPE: {"schema": {"type": "string"}}},
}


@router.get("/v1/node", responses=answered(NodeAnswer))
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
                for each in parts.members()
            ],
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


@router.get("/livez", responses=answered(LiveAnswer))
async def read_liveness() -> Response:
    """The process runs and answers."""
    return json_answer({"status": "live"})


@router.get("/readyz", responses=answered(ReadyAnswer))
async def read_readiness(
    request: Request,
    parts: PartsDep,
    exclude: Annotated[
        str | None,
        Query(
            max_length=EXCLUDED_CHARACTERS_MAX,
            description="Checks that are told and make no 503, separated by commas: `database,chaining,checkpoints` "
            "keeps a node that takes writes at LOCAL while PostgreSQL is away. `accepting` and `writer` always count.",
        ),
    ] = None,
) -> Response:
    """Whether the node takes requests, check by check; 503 when one fails.

    Other checks are reported and make no 503: without ``signing`` it still takes requests, and with damage to single
    tenants (``tenants``, ``rows``) it serves all others. Which, callers with `operate` for all are told.
    """
    found = await _checks(parts)
    excluded = set(exclude.split(",")) if exclude is not None else set()
    if unknown := excluded - (found.keys() - ALWAYS_COUNTED):
        raise InvalidInputError(f"exclude: {min(unknown)[:100]!r} is no check that can be left out", ("exclude",))
    checks = {name: {"ok": fault is None, "detail": fault} for name, fault in found.items()}
    faults = [f"{name}: {fault}" for name, fault in found.items() if fault is not None and name not in excluded]
    for name, check in parts.reported_checks.items():
        fault = check()
        if fault is not None and name in NAMING_TENANTS and not await _may_know_tenants(request):
            fault = _NOT_TOLD
        checks[name] = {"ok": fault is None, "detail": fault}
    verified = _verified(parts, may_know_callers=await _may_know_tenants(request))
    if faults:
        return problem_response(NOT_READY, "; ".join(faults), members={"checks": checks, "verified": verified})
    return json_answer({"status": "ready", "checks": checks, "verified": verified})


@router.get("/metrics", response_class=Response, responses={200: _TEXT})
async def read_metrics(parts: PartsDep) -> Response:
    """Metrics in the text format of Prometheus."""
    await _ask_database(parts)
    return Response(parts.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})


async def _checks(parts: Parts) -> dict[str, str | None]:
    """Every check by name: None when it holds, else what is wrong."""
    await _ask_database(parts)
    found: dict[str, str | None] = {
        "accepting": None if parts.accepting and not parts.node.shutting_down else "stopping",
        "writer": None if parts.node.failure is None else str(parts.node.failure),
        "database": parts.database_fault,
    }
    for name, check in parts.readiness_checks.items():
        found[name] = check()
    return found


def _verified(parts: Parts, *, may_know_callers: bool) -> VerifiedAnswer:
    tenants = parts.system_entries.tenants | {SYSTEM_TENANT}
    oldest, never = parts.last_verified.of_all(tenants)
    return VerifiedAnswer(
        at=None if oldest is None else datetime.fromtimestamp(oldest.at_s, UTC),
        by=oldest.by if oldest is not None and may_know_callers else None,
        tenants=len(tenants),
        never_verified=never,
    )


async def _may_know_tenants(request: Request) -> bool:
    caller = await caller_if_known(request)
    return caller is not None and caller.may(Right.OPERATE, EVERY_TENANT)


async def _ask_database(parts: Parts) -> None:
    """See whether the database answers: ``parts.database_fault``, which metrics report as well."""
    fault = None
    try:
        async with reading(parts.pool, timeout_s=DATABASE_CHECK_TIMEOUT_S) as connection:
            await chain_reads.ping(connection)
    except DatabaseUnavailableError as error:
        fault = str(error)
    parts.database_fault = fault

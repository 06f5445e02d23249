"""``/v1/archive``: how far the archive is that a node of this ledger fills."""

from __future__ import annotations

from time import monotonic
from typing import Final

from fastapi import APIRouter, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import json_answer
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.runtime.answers.retention import ArchiveAnswer
from app.runtime.principals import Right
from app.share.archive import Archiving

TENANTS_MAX: Final = 1000
"""Most tenants that an answer has."""

router = APIRouter(route_class=StrictRoute, tags=["archive"], responses=PROBLEM_RESPONSE)


@router.get("/v1/archive", responses=answered(ArchiveAnswer))
async def read_archive(archiving: Service[Archiving | None], accepted: AcceptedDep) -> Response:
    """How far each tenant is archived, and what fails. At a node that does not fill the archive, the place is read."""
    if archiving is None:
        return json_answer(_answer(None, "none"))
    found, now_s = await archiving.progress(), monotonic()
    tenants = [each for each in found.tenants if accepted.caller.may(Right.AUDIT, each.tenant_id)]
    tenants.sort(key=lambda each: (each.error is None, -each.lag_entries, each.tenant_id))
    return json_answer(
        _answer(archiving.url, archiving.lock)
        | {
            "has_turn": found.has_turn,
            "lag_entries": found.lag_entries,
            "lag_seconds": found.lag_s(now_s),
            "error": found.error,
            "table_version": found.table_version,
            "table_metadata": archiving.table_metadata(found.table_version),
            "tenants_total": len(tenants),
            "tenants": [
                {
                    "tenant_id": each.tenant_id,
                    "archived_to_seq": each.archived_seq,
                    "signed_to_seq": each.signed_seq,
                    "lag_entries": each.lag_entries,
                    "lag_seconds": each.waits_s,
                    "error": each.error,
                }
                for each in tenants[:TENANTS_MAX]
            ],
        }
    )


def _answer(url: str | None, lock: str) -> dict[str, object]:
    """The answer without tenants."""
    return {
        "url": url,
        "lock": lock,
        "has_turn": False,
        "lag_entries": 0,
        "lag_seconds": 0.0,
        "error": None,
        "table_version": 0,
        "table_metadata": None,
        "tenants_total": 0,
        "tenants": [],
    }

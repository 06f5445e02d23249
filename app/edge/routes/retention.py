"""``/v1/retention``, ``/v1/holds``, ``/v1/prunes``: how long entries stay, which are held, and how they leave;
``/v1/archive``: how far the archive is that a node of this ledger fills."""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import TENANT_PATTERN, TenantQuery
from app.edge.forms.requests import HoldRequest, PruneRequest, RetentionRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.read.consistency import Promise, ReadLevel
from app.read.jobs import JobReader
from app.runtime.answers.retention import ArchiveAnswer, HoldAnswer, HoldList, PruneAnswer, RetentionAnswer
from app.runtime.principals import Right
from app.runtime.state.node import Node
from app.share.archive import Archiving
from app.share.retention import Planner, Prunes
from app.share.retention.planning import Planned
from app.share.retention.pruning import shown_stop
from app.store.jobs.order import ListRange
from app.write.intake.tenant_changes import RetentionChanges
from ledger import rfc3339
from ledger.errors import InvalidInputError, reported_as
from ledger.machines.job_search import JobFilter, field_is
from ledger.machines.retention import JOBS_A_HOLD_MAX, KEPT_S_MAX, Floor, Hold

router = APIRouter(route_class=StrictRoute, tags=["retention"], responses=PROBLEM_RESPONSE)
archive = APIRouter(route_class=StrictRoute, tags=["archive"], responses=PROBLEM_RESPONSE)

PRUNES_SHOWN_MAX: Final = 100
"""Most PRUNED entries that an answer has."""
ARCHIVED_TENANTS_MAX: Final = 1000
"""Most tenants that an answer about the archive has."""
FOUND_AT_ONCE: Final = 500
"""Jobs of a search that are read at once for a hold."""
_UNIT_SECONDS: Final = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_NEWEST: Final = Promise(ReadLevel.STRONG, (), 0)

WrittenTenantQuery = Annotated[str, Query(pattern=TENANT_PATTERN, description="Whose.")]


def kept_text(seconds: int | None) -> str | None:
    """A duration in the largest unit that gives a whole number."""
    if seconds is None:
        return None
    unit = next(unit for unit, length in _UNIT_SECONDS.items() if seconds % length == 0)
    return f"{seconds // _UNIT_SECONDS[unit]}{unit}"


def _kept_s(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    seconds = int(text[:-1]) * _UNIT_SECONDS[text[-1]]
    if seconds > KEPT_S_MAX:
        raise InvalidInputError(f"{name}: at most {KEPT_S_MAX // 86_400}d", (name,))
    return seconds


@router.get("/v1/retention", responses=answered(RetentionAnswer))
async def read_retention(planner: Service[Planner], tenant_id: TenantQuery) -> Response:
    """How long a tenant's entries stay, up to where they have left or could leave now, and what stops the rest."""
    return json_answer(_policy(tenant_id, await planner.plan(tenant_id)))


@router.put("/v1/retention", responses=answered(RetentionAnswer))
async def set_retention(
    changes: Service[RetentionChanges],
    planner: Service[Planner],
    accepted: AcceptedDep,
    tenant_id: WrittenTenantQuery,
    wanted: Annotated[dict[str, Any], json_body(RetentionRequest)],
) -> Response:
    """Set how long entries stay. A minimum is never shortened. Nothing leaves by this alone: `POST /v1/prunes` does."""
    period_s, minimum_s = (_kept_s(name, wanted.get(name)) for name in ("period", "minimum"))
    await changes.set_policy(tenant_id, period_s, minimum_s, accepted.caller.id)
    return json_answer(_policy(tenant_id, await planner.plan(tenant_id)))


@router.post("/v1/holds", status_code=201, responses=answered(HoldAnswer, 201))
async def place_hold(
    changes: Service[RetentionChanges],
    jobs: Service[JobReader],
    accepted: AcceptedDep,
    wanted: Annotated[dict[str, Any], json_body(HoldRequest)],
) -> Response:
    """Hold the entries of a job, of the jobs that `where` finds now, or of the tenant, whatever their age."""
    tenant_id, where, job_ids = wanted["tenant_id"], wanted.get("where"), None
    if where is not None and "job_id" in wanted:
        raise InvalidInputError("where: give either it or job_id", ("where",))
    if where is not None:
        job_ids = await _found(jobs, tenant_id, where)
    elif "job_id" in wanted:
        job_ids = [wanted["job_id"]]
    hold = await changes.place(tenant_id, wanted["reason"], job_ids, where, accepted.caller.id)
    return json_answer(_hold(tenant_id, hold), status=201)


async def _found(jobs: JobReader, tenant_id: str, where: str) -> list[str]:
    """The jobs of which ``where`` is true now.

    Raises:
        InvalidInputError: ``where`` is no condition, or it is true of none, or of too many.
    """
    with reported_as(partial(InvalidInputError, path=("where",)), "where", InvalidInputError):
        wanted = JobFilter(fields=(field_is(where),))
    found: list[str] = []
    listed = ListRange()
    while len(found) <= JOBS_A_HOLD_MAX:
        page = await jobs.list(tenant_id, _NEWEST, wanted, listed, FOUND_AT_ONCE)
        if page.damaged:
            raise InvalidInputError(
                f"where: job {page.damaged[0]['job_id']} cannot be read: run tally verify", ("where",)
            )
        found += [item["job_id"] for item in page.items]
        if page.last is None:
            break
        listed = listed._replace(after=page.last)
    if not 1 <= len(found) <= JOBS_A_HOLD_MAX:
        many = "no job" if not found else f"more than {JOBS_A_HOLD_MAX} jobs: narrow it, or hold the tenant"
        raise InvalidInputError(f"where: finds {many}", ("where",))
    return found


@router.get("/v1/holds", responses=answered(HoldList))
async def list_holds(changes: Service[RetentionChanges], tenant_id: TenantQuery) -> Response:
    """The open holds of a tenant, all of them."""
    found = await changes.read(tenant_id)
    items = [_hold(tenant_id, hold) for hold in sorted(found.holds.values(), key=lambda hold: hold.seq)]
    return json_answer({"items": items, "next_cursor": None})


@router.delete("/v1/holds/{hold_id}", responses=answered(HoldAnswer))
async def release_hold(
    changes: Service[RetentionChanges],
    node: Service[Node],
    accepted: AcceptedDep,
    hold_id: Annotated[str, Path(max_length=64, description="The hold.")],
    tenant_id: WrittenTenantQuery,
    reason: Annotated[str, Query(max_length=1000, description="Why; goes on record. Must be given.")] = "",
) -> Response:
    """End a hold. The release is an entry too, with its reason."""
    node.check_writable()
    await accepted.allow(tenant_id)
    if not reason:
        raise InvalidInputError("reason: say why the hold ends", ("reason",))
    return json_answer(_hold(tenant_id, await changes.release(tenant_id, hold_id, reason, accepted.caller.id)))


@router.post("/v1/prunes", responses=answered(PruneAnswer))
async def prune(
    prunes: Service[Prunes],
    accepted: AcceptedDep,
    wanted: Annotated[dict[str, Any], json_body(PruneRequest)],
) -> Response:
    """Let the oldest entries leave for the archive, as far as policy, holds, open jobs and the archive allow. First
    they are verified, in the chain and in the archive; then the entry PRUNED is chained, and the rows leave."""
    tenant_id, dry_run = wanted["tenant_id"], wanted.get("dry_run", False)
    done = await prunes.prune(tenant_id, wanted.get("to_seq"), accepted.caller.id, dry_run=dry_run)
    planned = done.planned
    floor_seq, to_seq = planned.retention.floor_seq, planned.plan.to_seq
    return json_answer(
        {
            "tenant_id": tenant_id,
            "dry_run": dry_run,
            "from_seq": floor_seq + 1,
            "to_seq": to_seq,
            "entries": to_seq - floor_seq,
            "never_ended": planned.never_ended,
            "seq": done.seq,
            "archive": None if prunes.archive is None else prunes.archive.url,
            "stopped_by": shown_stop(planned),
        }
    )


def _policy(tenant_id: str, planned: Planned) -> dict[str, Any]:
    found = planned.retention
    return {
        "tenant_id": tenant_id,
        "period": kept_text(found.period_s),
        "minimum": kept_text(found.minimum_s),
        "verified_from_seq": found.floor_seq + 1,
        "pruned_to_seq": found.floor_seq,
        "prunable_to_seq": planned.plan.to_seq,
        "stopped_by": shown_stop(planned),
        "archive": None if found.floor is None else found.floor.archive,
        "open_holds": len(found.holds),
        "prunes": [_prune_entry(each) for each in found.floors[: -PRUNES_SHOWN_MAX - 1 : -1]],
    }


def _prune_entry(floor: Floor) -> dict[str, Any]:
    return {
        "seq": floor.seq,
        "hlc": floor.hlc,
        "at": rfc3339.time_of(floor.hlc),
        "from_seq": floor.from_seq,
        "to_seq": floor.to_seq,
        "entries": floor.entry_count,
        "never_ended": floor.never_ended,
        "actor": floor.actor,
        "archive": floor.archive,
        "manifest": floor.manifest,
    }


def _hold(tenant_id: str, hold: Hold) -> dict[str, Any]:
    return {
        "hold_id": hold.hold_id,
        "tenant_id": tenant_id,
        "job_ids": None if hold.job_ids is None else list(hold.job_ids),
        "where": hold.where,
        "reason": hold.reason,
        "actor": hold.actor,
        "placed_by_log": hold.log,
        "seq": hold.seq,
        "hlc": hold.hlc,
        "at": rfc3339.time_of(hold.hlc),
    }


@archive.get("/v1/archive", responses=answered(ArchiveAnswer))
async def read_archive(archiving: Service[Archiving | None], accepted: AcceptedDep) -> Response:
    """How far each tenant is archived, and what fails. At a node that does not fill the archive, the place is read."""
    if archiving is None:
        return json_answer(_archived(None, "none"))
    found, now_s = await archiving.progress(), monotonic()
    tenants = [each for each in found.tenants if accepted.caller.may(Right.AUDIT, each.tenant_id)]
    tenants.sort(key=lambda each: (each.error is None, -each.lag_entries, each.tenant_id))
    return json_answer(
        _archived(archiving.url, archiving.lock)
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
                for each in tenants[:ARCHIVED_TENANTS_MAX]
            ],
        }
    )


def _archived(url: str | None, lock: str) -> dict[str, object]:
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

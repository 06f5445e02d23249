"""``POST /api/v1/lineage``: reports of Airflow, Spark, dbt, Flink and Dagster about their runs by OpenLineage
(https://openlineage.io/spec/2-0-2), as events of jobs.

    START      JobCreated, JobAccepted                              COMPLETE   JobCompleted
    RUNNING    JobProgressReported                                  FAIL       JobFailed
    ABORT      JobCancellationRequested, JobCancellationAcked       OTHER      nothing

Emitters repeat events, send events of one run in any order and leave some out. So an event that adds nothing is
answered like one that does: it was recorded before, its run has ended, or it is not about a run. A run whose first
event is its end is created with it.

The id of the run is that of the job, the namespace of the job its data centre. Emitters put whole query plans and
schemas into facets; only the names and measures of a run are kept::

    len(text) <= TEXT_CHARACTERS_MAX        len(error) <= ERROR_CHARACTERS_MAX        names in a list <= NAMES_MAX
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
from fastapi import APIRouter, Request, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import JSON_MEDIA_TYPE, json_answer
from app.edge.forms.body import read_body
from app.edge.forms.fields import JOB_ID_PATTERN, NAME_CHARACTERS_MAX
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.writes import Reports, Route, for_each_job
from app.runtime.answers import shape
from app.runtime.logs import log
from app.runtime.principals import Principal
from app.runtime.settings.config import Settings
from app.runtime.state.node import Node
from app.store.jobs.table import JobKey
from app.write.pending.requests import RequestKey
from ledger import canonical, rfc3339
from ledger.canonical import INTEGER_MAX
from ledger.errors import (
    IdempotencyReusedError,
    InvalidInputError,
    JobEndedError,
    JobExistsError,
    JobNotFoundError,
    LedgerError,
    ProblemError,
    reported_as,
)
from ledger.facts.problems import PAYLOAD_TOO_LARGE

router = APIRouter(route_class=StrictRoute, tags=["events"], responses=PROBLEM_RESPONSE)

EVENTS_MAX: Final = 1000
"""Most events in one request."""


LineageAnswer = shape(
    "LineageAnswer",
    "What became of events of OpenLineage: how many there were, and how many of them the ledger holds now. The others\n"
    "are about no run, or about one that has ended or was told otherwise before.",
    events=int,
    recorded=int,
)


@router.post(
    "/api/v1/lineage",
    responses=answered(LineageAnswer),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON_MEDIA_TYPE: {
                    # Without types: generators of clients cannot say "an object, or an array of objects".
                    "schema": {
                        "description": f"An event of OpenLineage, or an array of at most {EVENTS_MAX:,}; facets that "
                        "are not known count nothing."
                    }
                }
            },
        }
    },
)
async def record_lineage(
    request: Request,
    accepted: AcceptedDep,
    node: Service[Node],
    settings: Service[Settings],
    reports: Service[Reports],
) -> Response:
    """Record what run events of OpenLineage say, as events of the job that has the id of the run. The tenant is the one
    that `lineage.tenants` names for the namespace of the job, else the only one of the token. What adds nothing (said
    before, about a run that has ended, or about none) is counted and well."""
    node.check_writable()
    body = await read_body(request, JSON_MEDIA_TYPE, settings.http.body_bytes_max, takes_gzip=True)
    by_run: defaultdict[JobKey, list[RunEvent]] = defaultdict(list)
    tenants: Counter[str] = Counter()
    try:
        events = [read_event(value) for value in _values(body)]
        for event in filter(None, events):
            tenant_id = tenant_of(event.namespace, settings.lineage.tenants, accepted.caller)
            accepted.check_tenant(tenant_id)
            by_run[tenant_id, event.run_id].append(event)
            tenants[tenant_id] += 1
    except LedgerError as error:
        # Emitters print the status alone: their operator finds the reason in the log of this service.
        log.warning("lineage_refused", caller=accepted.caller.id, reason=str(error))
        raise
    if accepted.access.quotas.bounds_tenants and tenants:
        accepted.access.quotas.admit_tenants(tenants, dict.fromkeys(tenants, len(body) // len(tenants)))

    async def submit(tenant_id: str, event: RunEvent, types: Sequence[str]) -> None:
        for event_type in types:
            given = event.fields(event_type) | {"tenant_id": tenant_id}
            digest = hashlib.sha256(canonical.encode(given)).digest()
            key = RequestKey(Route.LINEAGE, event.key(event_type), digest)
            await reports.record(given | {"job_id": event.run_id}, key, accepted)

    async def record(tenant_id: str, event: RunEvent) -> bool:
        """Record the facts of the event. Returns whether the ledger has all of them now, by this request or another."""
        try:
            try:
                await submit(tenant_id, event, TYPES[event.state])
            except JobNotFoundError:
                # The first event of the run to arrive: its START was lost, or is still on its way.
                await submit(tenant_id, event, (*STARTS, *TYPES[event.state]))
        except (IdempotencyReusedError, JobEndedError, JobExistsError):
            return False
        return True

    async def record_run(run: JobKey, told: Sequence[RunEvent]) -> int:
        return sum([await record(run[0], event) for event in told])

    recorded = await for_each_job(by_run, record_run)
    return json_answer({"events": len(events), "recorded": sum(recorded)})


def tenant_of(namespace: str, tenants: Mapping[str, str], caller: Principal) -> str:
    """The tenant of a run of this namespace: from ``lineage.tenants``, by the namespace or its longest prefix there
    before a ``*``; else the only tenant that the caller may write to.

    Raises:
        InvalidInputError: neither names one.
    """
    if namespace in tenants:
        return tenants[namespace]
    if begun := [name for name in tenants if name.endswith("*") and namespace.startswith(name[:-1])]:
        return tenants[max(begun, key=len)]
    if (own := caller.own_tenant) is not None:
        return own
    raise InvalidInputError(
        f"lineage.tenants names no tenant for namespace {namespace[:100]!r}: add one to that setting, or give the "
        "emitter a token that may write to one tenant alone"
    )


def _values(body: bytes) -> list[Any]:
    with reported_as(InvalidInputError, "the body is not JSON", orjson.JSONDecodeError):
        value = orjson.loads(body)
    values = value if isinstance(value, list) else [value]
    if len(values) > EVENTS_MAX:
        raise ProblemError(PAYLOAD_TOO_LARGE, f"at most {EVENTS_MAX} events go into one request")
    return values


TEXT_CHARACTERS_MAX: Final = 1024
ERROR_CHARACTERS_MAX: Final = 16_384
NAMES_MAX: Final = 64
STARTS: Final = ("JobCreated", "JobAccepted")
TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "START": STARTS,
    "RUNNING": ("JobProgressReported",),
    "COMPLETE": ("JobCompleted",),
    "FAIL": ("JobFailed",),
    "ABORT": ("JobCancellationRequested", "JobCancellationAcked"),
}
"""Events of a job that each state of a run is."""

_ERRORS: Final = ("errorMessage", "spark.exception")
"""Facets whose ``message`` says why a run failed."""
_STATISTICS: Final = {"rowCount": "rows", "size": "bytes", "fileCount": "files"}


class RunEvent(NamedTuple):
    """One event of a run; ``body`` is all of it."""

    run_id: str
    state: str
    namespace: str
    name: str
    body: Mapping[str, Any]

    @property
    def dc_id(self) -> str:
        """The data centre of the job: the namespace."""
        return self.namespace[:NAME_CHARACTERS_MAX]

    @property
    def at_ms(self) -> int | None:
        """The time of the event; None if it is not in RFC 3339."""
        try:
            return rfc3339.milliseconds_of(str(self.body.get("eventTime")))[0]
        except InvalidInputError:
            return None

    def key(self, event_type: str) -> str:
        """The idempotency key of the fact in the event: equal for each repetition."""
        told = f"/{self.at_ms}" if event_type == "JobProgressReported" else ""
        return f"{self.run_id}/{event_type}{told}"

    def fields(self, event_type: str) -> dict[str, Any]:
        """The body of the event of this type, without tenant and job."""
        given: dict[str, Any] = {"type": event_type, **_FIELDS[event_type](self)}
        if self.at_ms is not None:
            given["trace_time"] = self.at_ms / 1000
        return given


def read_event(value: object) -> RunEvent | None:
    """The run event in ``value``; None for an event without a run (of a dataset, of a job), a state that is not in
    ``TYPES``, and a run whose id no job can have.

    Raises:
        InvalidInputError: it is not an event of OpenLineage.
    """
    body, run, job = _object(value), _object(_object(value).get("run")), _object(_object(value).get("job"))
    if not (run or job or _object(body.get("dataset"))):
        raise InvalidInputError("that is no event of OpenLineage: it has no run, no job and no dataset")
    if not run:
        return None
    run_id, namespace, name = run.get("runId"), job.get("namespace"), job.get("name")
    if not (isinstance(run_id, str) and isinstance(namespace, str) and isinstance(name, str) and namespace):
        raise InvalidInputError("a run event has the texts run.runId, job.namespace and job.name")
    state = str(body.get("eventType", "OTHER")).upper()
    if state not in TYPES or re.fullmatch(JOB_ID_PATTERN, run_id) is None:
        return None
    return RunEvent(run_id, state, _text(namespace) or "-", _text(name) or "-", body)


def _created(event: RunEvent) -> dict[str, Any]:
    body = event.body
    run, job = _facets(body.get("run")), _facets(body.get("job"))
    parent, root = _object(run.get("parent")), _object(_object(run.get("parent")).get("root"))
    nominal, engine, kind = (
        _object(part) for part in (run.get("nominalTime"), run.get("processing_engine"), job.get("jobType"))
    )
    spec = {
        "namespace": event.namespace,
        "name": event.name,
        "producer": _text(body.get("producer")),
        "parent": _run_of(parent),
        "root": _run_of(root),
        "nominal_start": _text(nominal.get("nominalStartTime")),
        "nominal_end": _text(nominal.get("nominalEndTime")),
        "engine": _text(engine.get("name")),
        "engine_version": _text(engine.get("version")),
        "integration": _text(kind.get("integration")),
        "kind": _text(kind.get("jobType")),
        "owners": list(_names(_objects(_object(job.get("ownership")).get("owners")), "name")),
        "labels": {**_labels(job), **_labels(run)},
        **_datasets(body),
    }
    return {"spec": {name: value for name, value in spec.items() if value}}


def _of_a_dc(event: RunEvent) -> dict[str, Any]:
    return {"dc_id": event.dc_id}


def _aborted(event: RunEvent) -> dict[str, Any]:
    return {"reason": "the run was aborted", "requestor": _text(event.body.get("producer")) or "-"}


def _completed(event: RunEvent) -> dict[str, Any]:
    measured: dict[str, Any] = _datasets(event.body)
    for side in ("input", "output"):
        for dataset in _objects(event.body.get(f"{side}s")):
            told = _object(_object(dataset.get(f"{side}Facets")).get(f"{side}Statistics"))
            for name, called in _STATISTICS.items():
                if type(count := told.get(name)) is int and count >= 0:
                    known = measured.get(f"{side}_{called}", 0)
                    measured[f"{side}_{called}"] = min(known + count, INTEGER_MAX)
    return {"final_status": event.state, **({"aggregate_metrics": measured} if measured else {})}


def _failed(event: RunEvent) -> dict[str, Any]:
    facets = _facets(event.body.get("run"))
    said = (_text(_object(facets.get(name)).get("message"), ERROR_CHARACTERS_MAX) for name in _ERRORS)
    return {"error": next(filter(None, said), "the run failed and did not say why"), "failed_dc": event.dc_id}


_FIELDS: Final[Mapping[str, Callable[[RunEvent], dict[str, Any]]]] = {
    "JobCreated": _created,
    "JobAccepted": _of_a_dc,
    "JobProgressReported": _of_a_dc,
    "JobCompleted": _completed,
    "JobFailed": _failed,
    "JobCancellationRequested": _aborted,
    "JobCancellationAcked": _of_a_dc,
}


def _datasets(body: Mapping[str, Any]) -> dict[str, Any]:
    """The names of the datasets that were read_event and written, ``namespace/name`` each."""
    return {
        side: names
        for side in ("inputs", "outputs")
        if (names := list(_names(_objects(body.get(side)), "namespace", "name")))
    }


def _run_of(facet: Mapping[str, Any]) -> dict[str, str]:
    run, job = _object(facet.get("run")), _object(facet.get("job"))
    told = {"run_id": run.get("runId"), "namespace": job.get("namespace"), "name": job.get("name")}
    return {name: text for name, value in told.items() if (text := _text(value))}


def _labels(facets: Mapping[str, Any]) -> dict[str, str]:
    tags = [
        (_text(tag.get("key")), _text(tag.get("value"))) for tag in _objects(_object(facets.get("tags")).get("tags"))
    ]
    return {key: value for key, value in tags[:NAMES_MAX] if key}


def _names(objects: Iterable[Mapping[str, Any]], *members: str) -> Iterator[str]:
    """The texts of these members of each item, joined; at most ``NAMES_MAX`` of them."""
    for number, each in enumerate(objects):
        texts = [_text(each.get(member)) for member in members]
        if number < NAMES_MAX and all(texts):
            yield _text("/".join(texts))


def _facets(part: object) -> dict[str, Any]:
    return _object(_object(part).get("facets"))


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """A text as the ledger can store it; empty for any other value."""
    return value.replace("\0", "")[:characters_max] if isinstance(value, str) else ""

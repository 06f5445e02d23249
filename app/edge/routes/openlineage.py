"""Run events of OpenLineage, and what each says of a job of this ledger (https://openlineage.io/spec/2-0-2).

    START      JobCreated, JobAccepted                              COMPLETE   JobCompleted
    RUNNING    JobProgressReported                                  FAIL       JobFailed
    ABORT      JobCancellationRequested, JobCancellationAcked       OTHER      nothing

The id of the run is that of the job, the namespace of the job its data centre. Emitters put whole query plans and
schemas into facets; of these only what names and measures a run is kept::

    len(text) <= TEXT_CHARACTERS_MAX        len(error) <= ERROR_CHARACTERS_MAX        names in a list <= NAMES_MAX
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from app.edge.forms.fields import JOB_ID_PATTERN, NAME_CHARACTERS_MAX
from ledger import rfc3339
from ledger.canonical import INTEGER_MAX
from ledger.errors import InvalidInputError

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

_JOB_ID: Final = re.compile(JOB_ID_PATTERN)
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
        """What stands for the data centre: the namespace."""
        return self.namespace[:NAME_CHARACTERS_MAX]

    @property
    def at_ms(self) -> int | None:
        """When it happened, None where that is not said in RFC 3339."""
        try:
            return rfc3339.milliseconds_of(str(self.body.get("eventTime")))[0]
        except InvalidInputError:
            return None

    def key(self, event_type: str) -> str:
        """What a repetition of the fact that the run's event says has in common with it."""
        told = f"/{self.at_ms}" if event_type == "JobProgressReported" else ""
        return f"{self.run_id}/{event_type}{told}"

    def fields(self, event_type: str) -> dict[str, Any]:
        """The body of the event of this type, but for tenant and job."""
        given: dict[str, Any] = {"type": event_type, **_FIELDS[event_type](self)}
        if self.at_ms is not None:
            given["trace_time"] = self.at_ms / 1000
        return given


def read(value: object) -> RunEvent | None:
    """The run event that ``value`` is; None of an event without a run (of a dataset, of a job), of a state that is not
    in ``TYPES``, and of a run whose id no job can have.

    Raises:
        InvalidInputError: it is no event of OpenLineage.
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
    if state not in TYPES or _JOB_ID.fullmatch(run_id) is None:
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
    """The names of the datasets that were read and written, ``namespace/name`` each."""
    found = {side: list(_names(_objects(body.get(side)), "namespace", "name")) for side in ("inputs", "outputs")}
    return {side: names for side, names in found.items() if names}


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
    """The texts of these members of each, joined; ``NAMES_MAX`` of them at the most."""
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
    """A text as the ledger can hold it, empty of anything else."""
    return value.replace("\0", "")[:characters_max] if isinstance(value, str) else ""

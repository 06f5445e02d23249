"""The openb cluster trace as job events: ``tally replay FILE --map openb``.

Format: CSV with the columns below, one pod a row; times are whole seconds since the trace began::

    name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
    openb-pod-0017,88000,327680,8,1000,,Burstable,Succeeded,9437497,10769854,9437497

That row becomes three events, ``trace_time`` in each payload::

    JobCreated    at creation_time    job_id = name, spec = the resource columns and qos that are not blank
    JobAccepted   at scheduled_time   when it is not blank
    JobCompleted  at deletion_time    when pod_phase is Succeeded; JobFailed when it is Failed

A pod that was deleted while Running or Pending was cancelled: JobCancellationRequested (reason ``deleted``, requestor
``trace``) and JobCancellationAcked, both at deletion_time. Without a deletion_time such a pod stays open. Events come
in order of trace time; at one time, in order of rows. Within a job no event precedes the one before it, even where the
trace's times do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ledger.errors import InvalidInputError

CLUSTER = "openb"
DIGITS_MAX = 15
"""The data centre every job of the trace ran in."""
COLUMNS = (
    "name",
    "cpu_milli",
    "memory_mib",
    "num_gpu",
    "gpu_milli",
    "gpu_spec",
    "qos",
    "pod_phase",
    "creation_time",
    "deletion_time",
    "scheduled_time",
)
_AMOUNTS = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
_TEXTS = ("gpu_spec", "qos")
_PHASES = ("Pending", "Running", "Succeeded", "Failed")

_DELETED = {"reason": "deleted", "requestor": "trace"}

Row = dict[str, str]
EventFields = dict[str, Any]


class _Placed(NamedTuple):
    """An event and its place in the feed: trace time, then row, then step within the job."""

    trace_time: int
    line: int
    step: int
    event: EventFields


def events(rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, EventFields]]:
    """``(line, event)`` in the order they are to be fed; ``rows`` are ``(line, row)`` of the trace.

    Raises:
        InvalidInputError: a row does not have this form; the text names its line.
    """
    first_line_of: dict[str, int] = {}
    placed: list[_Placed] = []
    for line, row in rows:
        of_job = _events_of(line, row)
        name = row["name"]
        if name in first_line_of:
            raise InvalidInputError(f"line {line}: job {name} was already in line {first_line_of[name]}")
        first_line_of[name] = line
        placed += of_job
    placed.sort(key=lambda item: item[:3])
    return ((item.line, item.event) for item in placed)


def _events_of(line: int, row: Row) -> list[_Placed]:
    if not row["name"]:
        raise InvalidInputError(f"line {line}: name is blank")
    phase = row["pod_phase"]
    if phase not in _PHASES:
        raise InvalidInputError(f"line {line}: pod_phase is {phase!r}, not one of {', '.join(_PHASES)}")
    spec: dict[str, Any] = {name: _number(line, row, name) for name in _AMOUNTS if row[name]}
    spec |= {name: row[name] for name in _TEXTS if row[name]}
    steps: list[tuple[str, EventFields]] = [
        ("creation_time", {"type": "JobCreated", "spec": spec, "assigned_dcs": [CLUSTER]})
    ]
    if row["scheduled_time"]:
        steps.append(("scheduled_time", {"type": "JobAccepted", "dc_id": CLUSTER, "worker_count": 1}))
    if phase == "Succeeded":
        steps.append(("deletion_time", {"type": "JobCompleted", "final_status": phase}))
    elif phase == "Failed":
        steps.append(("deletion_time", {"type": "JobFailed", "error": phase, "failed_dc": CLUSTER}))
    elif row["deletion_time"]:
        steps.append(("deletion_time", {"type": "JobCancellationRequested", **_DELETED}))
        steps.append(("deletion_time", {"type": "JobCancellationAcked", "dc_id": CLUSTER}))
    return _place(line, row, steps)


def _place(line: int, row: Row, steps: list[tuple[str, EventFields]]) -> list[_Placed]:
    placed: list[_Placed] = []
    not_before = 0
    for step, (column, event) in enumerate(steps):
        trace_time = _number(line, row, column)
        not_before = max(not_before, trace_time)
        placed.append(_Placed(not_before, line, step, {**event, "job_id": row["name"], "trace_time": trace_time}))
    return placed


def _number(line: int, row: Row, column: str) -> int:
    text = row[column]
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise InvalidInputError(f"line {line}: {column} is {text[:100]!r}, not a whole number of the trace")
    return int(text)

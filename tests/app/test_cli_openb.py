"""The openb trace becomes job events as the contract says."""

from typing import Any

import pytest

from lab import openb
from ledger.errors import InvalidInputError

CANCELLED = ("JobCancellationRequested", "JobCancellationAcked")


def row(**columns: str) -> dict[str, str]:
    return {
        "name": "pod-1",
        "cpu_milli": "12000",
        "memory_mib": "16384",
        "num_gpu": "1",
        "gpu_milli": "1000",
        "gpu_spec": "",
        "qos": "LS",
        "pod_phase": "Running",
        "creation_time": "5",
        "deletion_time": "90",
        "scheduled_time": "7",
    } | columns


def events_of(*rows: dict[str, str]) -> list[dict[str, Any]]:
    return [event for _, event in openb.events(enumerate(rows, start=2))]


def test_a_pod_that_was_created_has_its_resources_and_qos_as_spec() -> None:
    created = events_of(row(pod_phase="Pending", scheduled_time=""))[0]

    assert created == {
        "type": "JobCreated",
        "job_id": "pod-1",
        "spec": {"cpu_milli": 12000, "memory_mib": 16384, "num_gpu": 1, "gpu_milli": 1000, "qos": "LS"},
        "assigned_dcs": ["openb"],
        "trace_time": 5,
    }


@pytest.mark.parametrize(
    ("phase", "scheduled", "deleted", "types"),
    [
        ("Pending", "", "", ["JobCreated"]),
        ("Running", "7", "", ["JobCreated", "JobAccepted"]),
        ("Pending", "", "90", ["JobCreated", *CANCELLED]),
        ("Running", "7", "90", ["JobCreated", "JobAccepted", *CANCELLED]),
        ("Succeeded", "7", "90", ["JobCreated", "JobAccepted", "JobCompleted"]),
        ("Failed", "7", "90", ["JobCreated", "JobAccepted", "JobFailed"]),
        ("Failed", "", "90", ["JobCreated", "JobFailed"]),
    ],
)
def test_the_phase_and_its_times_decide_what_happened(
    phase: str, scheduled: str, deleted: str, types: list[str]
) -> None:
    fed = events_of(row(pod_phase=phase, scheduled_time=scheduled, deletion_time=deleted))

    assert [event["type"] for event in fed] == types


def test_a_pod_that_was_deleted_was_cancelled_by_the_trace_and_that_was_acknowledged_at_once() -> None:
    requested, acked = events_of(row(pod_phase="Running"))[-2:]

    at = {"job_id": "pod-1", "trace_time": 90}
    assert requested == {"type": "JobCancellationRequested", "reason": "deleted", "requestor": "trace", **at}
    assert acked == {"type": "JobCancellationAcked", "dc_id": "openb", **at}


def test_a_pod_scheduled_at_time_zero_was_scheduled() -> None:
    fed = events_of(row(creation_time="0", scheduled_time="0", deletion_time=""))

    assert [(event["type"], event["trace_time"]) for event in fed] == [("JobCreated", 0), ("JobAccepted", 0)]


def test_each_event_carries_the_time_the_trace_gives_it() -> None:
    fed = events_of(row(pod_phase="Succeeded"))

    assert [event["trace_time"] for event in fed] == [5, 7, 90]


def test_events_of_all_jobs_come_in_order_of_trace_time_and_at_one_time_in_order_of_rows() -> None:
    fed = events_of(
        row(name="late", creation_time="9", scheduled_time="9", deletion_time=""),
        row(name="early", creation_time="1", scheduled_time="9", deletion_time=""),
    )

    assert [(event["job_id"], event["type"]) for event in fed] == [
        ("early", "JobCreated"),
        ("late", "JobCreated"),
        ("late", "JobAccepted"),
        ("early", "JobAccepted"),
    ]


def test_within_a_job_the_order_is_causal_even_where_the_times_of_the_trace_are_not() -> None:
    fed = events_of(row(creation_time="50", scheduled_time="7", deletion_time="3", pod_phase="Failed"))

    assert [event["type"] for event in fed] == ["JobCreated", "JobAccepted", "JobFailed"]
    assert [event["trace_time"] for event in fed] == [50, 7, 3]


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"name": ""}, "line 3: name is blank"),
        ({"pod_phase": "Unknown"}, "line 3: pod_phase is 'Unknown'"),
        ({"creation_time": ""}, "line 3: creation_time is ''"),
        ({"cpu_milli": "12k"}, "line 3: cpu_milli is '12k'"),
        ({"cpu_milli": "9" * 5000}, "line 3: cpu_milli is '99"),
        ({"pod_phase": "Failed", "deletion_time": "-1"}, "line 3: deletion_time is '-1'"),
        ({"name": "pod-1"}, "line 3: job pod-1 was already in line 2"),
    ],
)
def test_a_malformed_row_is_named_with_its_line(columns: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        events_of(row(), row(**{"name": "pod-2"} | columns))

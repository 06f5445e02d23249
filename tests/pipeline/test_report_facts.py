"""What a report takes an entry to state about its job."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pyarrow as pa
import pytest

from ledger import canonical
from ledger.chain.conflict import Event, conflict_hlc, conflict_payload
from ledger.private_fields import PRIVATE_MARK
from pipeline.report.jobs import COLUMNS, TEXT_CHARACTERS_MAX, _facts, decode_fact

HLC = (1_795_000_000_000, 2, "node-1")
SEALED = {PRIVATE_MARK: {"key": "k1", "sealed": "c2VjcmV0"}}


def told(action: str, payload: str | None, hlc: tuple[int, int, str] = HLC) -> dict[str, Any]:
    """The row of one entry, with the parts of its fact."""
    digest = sha256((payload or "").encode()).hexdigest()
    values = ("acme", 7, "job-1", *hlc, action, payload, digest)
    columns = [pa.array([value], pa.int64() if isinstance(value, int) else pa.string()) for value in values]
    (batch,) = _facts([], [pa.RecordBatch.from_arrays(columns, names=list(COLUMNS))])
    (row,) = batch.to_pylist()
    return row | (decode_fact(row.pop("fact"))._asdict() if row["fact"] is not None else {})


def fields(**given: Any) -> str:
    return canonical.encode(given).decode()


def test_a_conflict_entry_says_what_the_event_says_that_it_holds() -> None:
    payload = fields(error="disk", failed_dc="eu1", fence_token=4, requestor=SEALED)
    own = told("FAIL", payload)
    event = Event("1795000000000:2:node-1", "job-1", "FAIL", sha256(payload.encode()).hexdigest())
    hlc = conflict_hlc(event)
    held = told("CONFLICT", conflict_payload(event, payload, "ab" * 32).decode(), tuple(hlc))
    assert held["at"] == {"physical_ms": hlc.physical_ms, "logical": hlc.logical, "node": hlc.node_id}
    assert {**held, "at": None} == {**own, "at": None}
    assert (own["action"], own["error"], own["failed_dc"], own["private"]) == ("FAIL", ("disk", False), "eu1", 1)
    assert (own["fields"], own["hlc"]) == ({"fence_token": 4}, HLC)


@pytest.mark.parametrize("action", ["CONFLICT", "REFUSED", "KEY_ADMITTED"])
def test_an_entry_that_is_no_job_event_says_nothing(action: str) -> None:
    row = told(action, fields(dc_id="eu1"))
    assert [row[name] for name in ("action", "event_ms", "trace_ms", "fact", "private")] == [None] * 4 + [0]


def test_a_field_of_the_wrong_type_counts_as_not_given() -> None:
    row = told("ENQUEUE", fields(fence_token="2", dc_id=3, assigned_dcs=["a", 7], trace_time="1", failed_dc=[]))
    assert (row["fields"], row["trace_ms"], row["failed_dc"]) == ({}, None, None)
    assert told("ENQUEUE", None)["action"] == told("ENQUEUE", "[]")["action"] == "ENQUEUE"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("x" * 600, ("x" * TEXT_CHARACTERS_MAX, False)),
        ({"b": [1, True]}, ('{"b":[1,true]}', False)),
        (SEALED, (None, True)),
        (None, None),
    ],
)
def test_a_text_is_cut_and_nothing_is_shown_of_a_private_one(given: Any, shown: tuple[str | None, bool] | None) -> None:
    reason = told("CANCEL", fields(reason=given))["reason"]
    assert reason == shown


@pytest.mark.parametrize(("seconds", "ms"), [(0, 0), (0.0005, 1), (-0.0005, -1), (12.3456, 12346), (1e12, None)])
def test_a_time_of_a_trace_is_told_in_milliseconds(seconds: float, ms: int | None) -> None:
    assert told("EXECUTE", f'{{"trace_time":{seconds}}}')["trace_ms"] == ms

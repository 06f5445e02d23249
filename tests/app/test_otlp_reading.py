"""Log records of OTLP are the same in both encodings, as the library of OpenTelemetry writes them."""

from __future__ import annotations

import base64
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from app.edge.forms.otlp import Record, records_of
from tests.app.otlp_requests import SPAN_ID, TRACE_ID, any_value, pairs, protobuf_of, record, request_of

TEXTS = st.text(max_size=5)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ATTRIBUTES = st.dictionaries(TEXTS, VALUES, max_size=4)
NUMBERS = st.integers(0, 2**64 - 1)


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "timeUnixNano": str(draw(NUMBERS)),
        "observedTimeUnixNano": str(draw(NUMBERS)),
        "attributes": pairs(draw(ATTRIBUTES)),
        "body": any_value(draw(VALUES)),
        "eventName": draw(TEXTS),
        "flags": draw(st.integers(0, 2**32 - 1)),
        "traceId": draw(st.binary(max_size=17)).hex(),
        "spanId": draw(st.sampled_from([SPAN_ID, "0" * 16, "", "ab"])),
        "severityNumber": draw(st.integers(0, 24)),
        "droppedAttributesCount": draw(st.integers(0, 9)),
    }


def read(body: bytes, *, is_protobuf: bool) -> list[Record]:
    return [each for each in records_of(body, is_protobuf=is_protobuf) if each is not None]


@given(st.lists(records(), max_size=3), ATTRIBUTES)
def test_a_request_is_read_alike_in_both_encodings(told: list[dict[str, Any]], resource: dict[str, Any]) -> None:
    request = request_of(*told)
    request["resourceLogs"][0]["resource"]["attributes"] = pairs(resource)
    found = read(protobuf_of(request), is_protobuf=True)
    assert found == read(orjson.dumps(request), is_protobuf=False)
    assert [each.event_name for each in found] == [each["eventName"] for each in told]


def test_a_record_has_the_attributes_of_its_resource_its_own_time_and_its_span() -> None:
    own = record("JobCreated", at_ns=7) | {"traceId": TRACE_ID.upper(), "spanId": SPAN_ID, "flags": 257}
    seen = {"observedTimeUnixNano": 9, "attributes": pairs({"tallystick.type": "JobFailed", "unset": None})}
    request = request_of(own, seen, service_name="use1", tallystick_type="of the resource")
    first, second = read(orjson.dumps(request), is_protobuf=False)
    assert first == Record(
        {"service.name": "use1", "tallystick.type": "JobCreated"},
        "",
        "a line of a log",
        7,
        f"00-{TRACE_ID}-{SPAN_ID}-01",
    )
    assert second == Record({"service.name": "use1", "tallystick.type": "JobFailed"}, "", None, 9, None)


def test_what_a_reader_does_not_know_is_skipped_in_both_encodings() -> None:
    request = request_of(record("JobCreated", "j", at_ns=1))
    plain = read(protobuf_of(request), is_protobuf=True)
    # Fields 100 of every wire type, and field 1 of a record, which is a fixed64, as a varint.
    unknown = b"\xa0\x06\x05\xa1\x06" + bytes(8) + b"\xa2\x06\x01x\xa5\x06" + bytes(4)
    assert read(protobuf_of(request) + unknown, is_protobuf=True) == plain
    for level in (request, *request["resourceLogs"], *request["resourceLogs"][0]["scopeLogs"]):
        level["isNew"] = [{"a": 1}]
    assert read(orjson.dumps(request), is_protobuf=False) == plain
    varint = b"\x0a\x06\x12\x04\x12\x02\x08\x05"
    assert [each.at_ns for each in read(varint, is_protobuf=True)] == [0]


def test_bytes_are_base64_and_the_last_of_several_values_counts() -> None:
    request = request_of({"body": {"bytesValue": base64.b64encode(b"\xff\x00").decode()}})
    assert [each.body for each in read(protobuf_of(request), is_protobuf=True)] == ["/wA="]
    a_text_and_5 = b"\x0a\x0b\x12\x09\x12\x07\x2a\x05\x0a\x01a\x18\x05"
    assert [each.body for each in read(a_text_and_5, is_protobuf=True)] == [5]

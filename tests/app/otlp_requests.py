"""Log records as OTLP sends them in JSON, and the same requests in protobuf, made by the library of OpenTelemetry."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

import orjson
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

TRACE_ID, SPAN_ID = "5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174"


def any_value(value: Any) -> dict[str, Any]:
    """``AnyValue`` in JSON."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(each) for each in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": pairs(value)}}
    return {} if value is None else {"stringValue": value}


def pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": any_value(value)} for name, value in attributes.items()]


def record(type_: str | None, job_id: str | None = None, /, at_ns: int | None = None, **fields: Any) -> dict[str, Any]:
    """A record with these fields of an event."""
    given = {"type": type_, "job_id": job_id, **fields}
    attributes = {f"tallystick.{name}": value for name, value in given.items() if value is not None}
    return {
        "timeUnixNano": str(time.time_ns() if at_ns is None else at_ns),
        "attributes": pairs(attributes),
        "body": {"stringValue": "a line of a log"},
    }


def request_of(*records: Mapping[str, Any], **resource: Any) -> dict[str, Any]:
    """A request of one resource; ``service_name`` is its attribute ``service.name``."""
    attributes = pairs({name.replace("_", ".", 1): value for name, value in resource.items()})
    return {"resourceLogs": [{"resource": {"attributes": attributes}, "scopeLogs": [{"logRecords": list(records)}]}]}


def protobuf_of(request: Mapping[str, Any]) -> bytes:
    """The request in protobuf. Protobuf's own JSON has base64 where OTLP has hexadecimal ids."""
    copy = orjson.loads(orjson.dumps(request))
    for resource_logs in copy["resourceLogs"]:
        for scope_logs in resource_logs["scopeLogs"]:
            for each in scope_logs["logRecords"]:
                for name in {"traceId", "spanId"} & each.keys():
                    each[name] = base64.b64encode(bytes.fromhex(each[name])).decode()
    made: bytes = json_format.ParseDict(copy, ExportLogsServiceRequest()).SerializeToString()
    return made

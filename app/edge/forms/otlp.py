"""Log records of OpenTelemetry as OTLP/HTTP sends them (``ExportLogsServiceRequest`` of opentelemetry-proto), in both
encodings, and the answers of that protocol.

The protobuf encoding is read into the members of the JSON encoding, so that one function makes records of both. Only
the members of ``_RECORD`` and ``_RESOURCE`` are read; others are skipped, as the protocol demands. A request is read
record by record, and no input makes reading take long or much memory::

    fields of protobuf around records <= PARTS_MAX        objects and lists of a JSON body <= JSON_PARTS_MAX
    fields in a record or resource <= VALUES_MAX          messages inside each other <= DEPTH_MAX
    attributes of a record or resource <= ATTRIBUTES_MAX

https://opentelemetry.io/docs/specs/otlp/
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from ledger.errors import InvalidInputError, ProblemError, reported_as
from ledger.facts.problems import PAYLOAD_TOO_LARGE

PROTOBUF_MEDIA_TYPE: Final = "application/x-protobuf"
PARTS_MAX: Final = 100_000
JSON_PARTS_MAX: Final = 500_000
VALUES_MAX: Final = 10_000
ATTRIBUTES_MAX: Final = VALUES_MAX // 4
"""An attribute is four fields: itself, its name, its value, and what kind of value that is."""
DEPTH_MAX: Final = 64

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TRACE_ID: Final = re.compile(r"(?!0{32})[0-9a-fA-F]{32}")
_SPAN_ID: Final = re.compile(r"(?!0{16})[0-9a-fA-F]{16}")


Made = TypeVar("Made")
_Message = Callable[[], Mapping[str, Any]]
"""Reads a message into its members."""


class Record(NamedTuple):
    """A log record. ``attributes`` are those of its resource, and in front of them its own; ``at_ns`` is when it
    happened, else when it was observed, 0 without either."""

    attributes: Mapping[str, Any]
    event_name: str
    body: Any
    at_ns: int
    traceparent: str | None
    """Its trace and span (W3C Trace Context); None unless it has both."""


class RecordBoundError(InvalidInputError):
    """A record, or the resource of records, is beyond a bound; the records beside it are not."""


def records_of(body: bytes, *, is_protobuf: bool) -> Iterator[Record | RecordBoundError | None]:
    """The log records of a request, an error in place of each that is beyond a bound. None stands for a resource or
    scope, so that a caller that works in turns has one at each part.

    Raises:
        InvalidInputError: the body is not such a request.
        ProblemError: it has too many parts.
    """
    above: Mapping[str, Any] | RecordBoundError = {}
    for resource, record in _protobuf_parts(body) if is_protobuf else _json_parts(body):
        if resource is not None:
            above = _bounded(_attributes, resource)
        if record is None:
            yield None
        elif isinstance(above, RecordBoundError):
            yield above
        else:
            yield _bounded(partial(_record, above), record)


def _bounded(make: Callable[[Mapping[str, Any]], Made], message: _Message) -> Made | RecordBoundError:
    """What ``make`` makes of a message, or the bound that it is beyond."""
    try:
        return make(message())
    except RecordBoundError as error:
        return error


def _record(above: Mapping[str, Any], record: Mapping[str, Any]) -> Record:
    return Record(
        {**above, **_attributes(record)},
        _member(record, "eventName", str, ""),
        value_of(_member(record, "body", dict, {})),
        _unsigned(record, "timeUnixNano") or _unsigned(record, "observedTimeUnixNano"),
        _traceparent(record),
    )


def value_of(given: Mapping[str, Any], depth: int = 0) -> Any:
    """The plain value of an ``AnyValue``; bytes stay base64.

    Raises:
        InvalidInputError: it is none.
        RecordBoundError: it is too deep.
    """
    if depth > DEPTH_MAX:
        raise RecordBoundError(f"a value is nested more than {DEPTH_MAX} deep")
    match given:
        case {"stringValue": str(text)} | {"bytesValue": str(text)}:
            return text
        case {"boolValue": bool(flag)}:
            return flag
        case {"intValue": int() | str() as number}:
            with reported_as(InvalidInputError, "intValue", ValueError):
                return int(number)
        case {"doubleValue": int() | float() | str() as number}:
            with reported_as(InvalidInputError, "doubleValue", ValueError):
                return float(number)
        case {"arrayValue": dict(array)}:
            return [value_of(each, depth + 1) for each in _objects(array, "values")]
        case {"kvlistValue": dict(pairs)}:
            return _pairs(_objects(pairs, "values"), depth + 1)
    if set(given) & {field.name for field in _ANY.values()}:
        raise InvalidInputError(f"{', '.join(given)[:100]}: that is no value of OTLP")
    return None


def success(rejected: int, message: str, *, is_protobuf: bool) -> bytes:
    """``ExportLogsServiceResponse``; with ``rejected`` records it is a partial success, and ``message`` says why."""
    if not is_protobuf:
        told = {"rejectedLogRecords": str(rejected), "errorMessage": message}
        return orjson.dumps({"partialSuccess": told} if rejected else {})
    return _field(1, b"\x08" + _varint(rejected) + _field(2, message.encode())) if rejected else b""


def failure(message: str, *, is_protobuf: bool) -> bytes:
    """``google.rpc.Status`` with a message alone."""
    return _field(2, message.encode()) if is_protobuf else orjson.dumps({"message": message})


# --- JSON -----------------------------------------------------------------------------------------

_Part = tuple[_Message | None, _Message | None]
"""A resource, or a record of the resource before; neither where a scope begins."""


def _json_parts(body: bytes) -> Iterator[_Part]:
    if body.count(b"{") + body.count(b"[") > JSON_PARTS_MAX:
        raise ProblemError(PAYLOAD_TOO_LARGE, f"at most {JSON_PARTS_MAX} objects and lists go into one request")
    with reported_as(InvalidInputError, "the body is not JSON", orjson.JSONDecodeError):
        request = orjson.loads(body)
    if not isinstance(request, dict):
        raise InvalidInputError("the body is no object")
    for resource_logs in _objects(request, "resourceLogs"):
        yield partial(_member, resource_logs, "resource", dict, {}), None
        for scope_logs in _objects(resource_logs, "scopeLogs"):
            yield None, None
            for record in _objects(scope_logs, "logRecords"):
                yield None, partial(dict, record)


def _objects(given: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _member(given, name, list, [])
    if not all(isinstance(each, dict) for each in found):
        raise InvalidInputError(f"{name}: must be a list of objects", (name,))
    return found


def _member(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    if (value := given.get(name)) is None:
        return default
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name}: is not of the type that OTLP gives it", (name,))
    return value


def _unsigned(given: Mapping[str, Any], name: str) -> int:
    """A number of 64 bits, which may be written as text."""
    value = given.get(name, 0)
    with reported_as(InvalidInputError, name, ValueError, TypeError):
        number = int(value) if isinstance(value, int | str) else -1
    if not 0 <= number < 1 << 64:
        raise InvalidInputError(f"{name}: must be a number of 64 bits", (name,))
    return number


def _attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a resource or record that have a value."""
    pairs = _objects(given, "attributes")
    if len(pairs) > ATTRIBUTES_MAX:
        raise RecordBoundError(f"a record or resource has more than {ATTRIBUTES_MAX} attributes")
    return {name: value for name, value in _pairs(pairs).items() if value is not None}


def _pairs(pairs: Sequence[Mapping[str, Any]], depth: int = 0) -> dict[str, Any]:
    return {_member(pair, "key", str, ""): value_of(_member(pair, "value", dict, {}), depth) for pair in pairs}


def _traceparent(record: Mapping[str, Any]) -> str | None:
    trace_id, span_id = _member(record, "traceId", str, ""), _member(record, "spanId", str, "")
    if _TRACE_ID.fullmatch(trace_id) is None or _SPAN_ID.fullmatch(span_id) is None:
        return None
    return f"00-{trace_id}-{span_id}-{_unsigned(record, 'flags') & 0xFF:02x}".lower()


# --- protobuf -------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """A field of a message: its name in JSON, its wire type, and its value made of the bytes or number there; or the
    fields of the message that it is."""

    name: str
    wire: int
    value: Callable[[Any], Any] | None = None
    message: Mapping[int, _Field] = {}
    is_list: bool = False


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError("the body is not protobuf: a text is not UTF-8") from None


def _little(data: memoryview) -> int:
    return int.from_bytes(data, "little")


_ANY: dict[int, _Field] = {}
_KEY_VALUE: Final = {1: _Field("key", _BYTES, _text), 2: _Field("value", _BYTES, message=_ANY)}
_ANY.update(
    {
        1: _Field("stringValue", _BYTES, _text),
        2: _Field("boolValue", _VARINT, bool),
        3: _Field("intValue", _VARINT, lambda number: number - (number >> 63 << 64)),
        4: _Field("doubleValue", _FIXED64, lambda data: struct.unpack("<d", data)[0]),
        5: _Field("arrayValue", _BYTES, message={1: _Field("values", _BYTES, message=_ANY, is_list=True)}),
        6: _Field("kvlistValue", _BYTES, message={1: _Field("values", _BYTES, message=_KEY_VALUE, is_list=True)}),
        7: _Field("bytesValue", _BYTES, lambda data: base64.b64encode(data).decode()),
    }
)
_RESOURCE: Final = {1: _Field("attributes", _BYTES, message=_KEY_VALUE, is_list=True)}
_RECORD: Final = {
    1: _Field("timeUnixNano", _FIXED64, _little),
    5: _Field("body", _BYTES, message=_ANY),
    6: _Field("attributes", _BYTES, message=_KEY_VALUE, is_list=True),
    8: _Field("flags", _FIXED32, _little),
    9: _Field("traceId", _BYTES, memoryview.hex),
    10: _Field("spanId", _BYTES, memoryview.hex),
    11: _Field("observedTimeUnixNano", _FIXED64, _little),
    12: _Field("eventName", _BYTES, _text),
}


def _protobuf_parts(body: bytes) -> Iterator[_Part]:
    left = iter(range(PARTS_MAX))
    for resource_logs in _messages(memoryview(body), 1, left):
        *_, resource = memoryview(b""), *_messages(resource_logs, 1, left)
        yield partial(_read, resource, _RESOURCE), None
        for scope_logs in _messages(resource_logs, 2, left):
            yield None, None
            for record in _messages(scope_logs, 2, left):
                yield None, partial(_read, record, _RECORD)


def _messages(data: memoryview, number: int, left: Iterator[int]) -> Iterator[memoryview]:
    return (raw for found, wire, raw in _fields(data, left) if found == number and wire == _BYTES)


def _read(
    data: memoryview, fields: Mapping[int, _Field], left: Iterator[int] | None = None, depth: int = 0
) -> dict[str, Any]:
    """The members of a message that ``fields`` have. A field with another wire type is unknown, as for any reader."""
    if depth > DEPTH_MAX:
        raise RecordBoundError(f"messages are nested more than {DEPTH_MAX} deep")
    left = iter(range(VALUES_MAX)) if left is None else left
    members: dict[str, Any] = {}
    for number, wire, raw in _fields(data, left, _TOO_MANY_VALUES):
        field = fields.get(number)
        if field is None or field.wire != wire:
            continue
        value = _read(raw, field.message, left, depth + 1) if field.value is None else field.value(raw)
        if field.is_list:
            members.setdefault(field.name, []).append(value)
        elif fields is _ANY:
            members = {field.name: value}
        else:
            members[field.name] = value
    return members


_TOO_MANY_VALUES: Final = partial(RecordBoundError, f"a record or resource has more than {VALUES_MAX} values")
_TOO_MANY_PARTS: Final = partial(
    ProblemError, PAYLOAD_TOO_LARGE, f"at most {PARTS_MAX} fields around records go into one request"
)


def _fields(
    data: memoryview, left: Iterator[int], too_many: Callable[[], Exception] = _TOO_MANY_PARTS
) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and bytes, of a varint its value, of each field. Each takes one of ``left``."""
    at = 0
    while at < len(data):
        if next(left, None) is None:
            raise too_many()
        tag, at = _varint_at(data, at)
        wire, begin = tag & 7, at
        if wire == _VARINT:
            number, at = _varint_at(data, at)
            yield tag >> 3, wire, number
            continue
        if wire == _BYTES:
            count, begin = _varint_at(data, at)
        elif wire in (_FIXED64, _FIXED32):
            count = 8 if wire == _FIXED64 else 4
        else:
            raise InvalidInputError(f"the body is not protobuf: there is no wire type {wire}")
        at = begin + count
        if at > len(data):
            raise InvalidInputError("the body is not protobuf: it ends within a field")
        yield tag >> 3, wire, data[begin:at]


def _varint_at(data: memoryview, at: int) -> tuple[int, int]:
    """The number of at most 64 bits at this offset, and the offset after it."""
    if at < len(data) and data[at] < 0x80:
        return data[at], at + 1
    number = 0
    for shift, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, at + shift + 1
    raise InvalidInputError("the body is not protobuf: a number does not end")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _varint(len(data)) + data

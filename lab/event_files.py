"""Files of job events, read twice: once to check every line, once to send them.

Two forms, told apart by name (``.csv``, ``.ndjson``, ``.jsonl``), else by the first byte:

* NDJSON, one event a line, as ``POST /v1/events`` takes it; ``tenant_id`` may be left out::

    {"type": "JobAccepted", "job_id": "j-1", "dc_id": "use1", "worker_count": 4}

* CSV with a header: ``type``, ``job_id`` and any field of an event; blank = not given. Numbers and JSON
  are read as such where the field is one, everything else is text::

    type,job_id,dc_id,worker_count,spec
    JobCreated,j-1,,,"{""image"": ""a/b:1""}"
    JobAccepted,j-1,use1,4,

Blank lines are passed over. Every line is judged by the service's own models before anything is sent.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import orjson
from pydantic import ValidationError

from app.edge.forms.requests import EVENT_LINE, EVENT_TAGS
from lab import openb
from lab.openb import EventFields
from ledger import canonical
from ledger.errors import CanonicalError, InvalidInputError

FileFormat = Literal["auto", "ndjson", "csv"]
Mapping = Literal["openb"]

CHUNK_LINES_MAX = 1000
CHUNK_BYTES_MAX = 4 << 20
"""Bounds of one request, part of its identity: with other ones a repeated replay would add events again."""
_LINE_BYTES_MAX = 1 << 20
_NUMBERS = frozenset({"fence_token", "worker_count", "completed", "failed", "workflows_cancelled", "trace_time"})
_JSON = frozenset({"spec", "assigned_dcs", "aggregate_metrics"})


class EventChunk(NamedTuple):
    """One request: ``number`` from 0, NDJSON ``lines``, and the types of its events, in order."""

    number: int
    lines: bytes
    types: tuple[str, ...]


class EventFile:
    """A file of events for one tenant.

    Raises:
        InvalidInputError: it is no regular file, its form cannot be told, or goes with no such mapping.
    """

    def __init__(self, path: Path, tenant_id: str, file_format: FileFormat, mapping: Mapping | None) -> None:
        if not path.is_file():
            raise InvalidInputError(f"{path} is not a regular file, and it is read twice; save it to one first")
        self.path = path
        self.mapping = mapping
        self._tenant_id = tenant_id
        self._is_csv = _is_csv(path, file_format)
        if mapping is not None and not self._is_csv:
            raise InvalidInputError(f"--map {mapping} reads CSV, and {path} is NDJSON")

    def digest(self) -> str:
        """SHA-256 of the file's bytes, lowercase hex."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def events(self) -> Iterator[tuple[int, EventFields]]:
        """``(line, event)`` in the order they are to be fed, each checked.

        Raises:
            InvalidInputError: a line is malformed; the text names it.
        """
        for line, event in self._raw():
            yield line, _checked(line, event, self._tenant_id)

    def chunks(self) -> Iterator[EventChunk]:
        """The events as requests, cut the same way every time."""
        number, size = 0, 0
        lines: list[bytes] = []
        types: list[str] = []
        for _, event in self.events():
            encoded = orjson.dumps(event)
            if lines and (len(lines) == CHUNK_LINES_MAX or size + len(encoded) >= CHUNK_BYTES_MAX):
                yield EventChunk(number, b"\n".join(lines) + b"\n", tuple(types))
                number, lines, types, size = number + 1, [], [], 0
            lines.append(encoded)
            types.append(event["type"])
            size += len(encoded) + 1
        if lines:
            yield EventChunk(number, b"\n".join(lines) + b"\n", tuple(types))

    def _raw(self) -> Iterator[tuple[int, EventFields]]:
        if self.mapping == "openb":
            return openb.events(_csv_rows(self.path, openb.COLUMNS))
        if self._is_csv:
            return _csv_events(self.path)
        return _ndjson_events(self.path)


def _is_csv(path: Path, file_format: FileFormat) -> bool:
    if file_format != "auto":
        return file_format == "csv"
    suffix = path.suffix.lower()
    if suffix in (".csv", ".ndjson", ".jsonl"):
        return suffix == ".csv"
    with path.open("rb") as file:
        start = file.read(4096).lstrip()
    if not start:
        raise InvalidInputError(f"{path} is empty; say --format if that is right")
    return not start.startswith(b"{")


def _ndjson_events(path: Path) -> Iterator[tuple[int, EventFields]]:
    with path.open("rb") as file:
        for line, text in enumerate(iter(lambda: file.readline(_LINE_BYTES_MAX + 1), b""), start=1):
            if len(text) > _LINE_BYTES_MAX:
                raise InvalidInputError(f"line {line}: longer than {_LINE_BYTES_MAX} bytes")
            if text.strip():
                yield line, _json_object(line, text)


def _json_object(line: int, text: bytes) -> EventFields:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"line {line}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInputError(f"line {line}: not a JSON object")
    return value


def _csv_rows(path: Path, required: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """``(line, row)`` of a CSV file whose header holds ``required``; a row spans the line it ends on."""
    with io.TextIOWrapper(path.open("rb"), encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(_bounded_lines(file), strict=True)
        try:
            header = next(reader, [])
            _check_header(header, required)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise InvalidInputError(
                        f"line {reader.line_num}: {len(cells)} cells, but the header has {len(header)}"
                    )
                yield reader.line_num, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise InvalidInputError(f"line {reader.line_num}: not CSV: {error}") from None
        except UnicodeDecodeError:
            raise InvalidInputError(f"after line {reader.line_num}: not UTF-8") from None


def _bounded_lines(file: io.TextIOWrapper) -> Iterator[str]:
    for line, text in enumerate(iter(lambda: file.readline(_LINE_BYTES_MAX + 1), ""), start=1):
        if len(text) > _LINE_BYTES_MAX:
            raise InvalidInputError(f"line {line}: longer than {_LINE_BYTES_MAX} characters")
        yield text


def _check_header(header: list[str], required: tuple[str, ...]) -> None:
    missing = [name for name in required if name not in header]
    if missing:
        raise InvalidInputError(f"line 1: the header lacks {', '.join(missing)}")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise InvalidInputError(f"line 1: the header names {', '.join(twice)} twice")


def _csv_events(path: Path) -> Iterator[tuple[int, EventFields]]:
    for line, row in _csv_rows(path, ("type",)):
        yield line, {name: _cell(line, name, text) for name, text in row.items() if text}


def _cell(line: int, name: str, text: str) -> object:
    if name not in _NUMBERS and name not in _JSON:
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        wanted = "a number" if name in _NUMBERS else "JSON"
        raise InvalidInputError(f"line {line}: {name} is {text!r}, not {wanted}") from None


def _checked(line: int, event: EventFields, tenant_id: str) -> EventFields:
    """``event`` with its tenant, if it is what the service takes: the same models judge it here and there."""
    event = {"tenant_id": tenant_id, **event}
    if event["tenant_id"] != tenant_id:
        raise InvalidInputError(
            f"line {line}: belongs to tenant {event['tenant_id']!r}, but this replay is for {tenant_id!r}"
        )
    try:
        EVENT_LINE.validate_python(event)
        canonical.encode(event)
    except ValidationError as error:
        # Imported here because it loads the web framework, which only a malformed line needs.
        from app.edge.forms.validation import invalid

        raise InvalidInputError(f"line {line}: {invalid(error, EVENT_TAGS, EVENT_LINE)}") from None
    except CanonicalError as error:
        raise InvalidInputError(f"line {line}: {error}") from None
    return event

"""Lists for other programs: JSON values a line, or the rows of a table.

The table is CSV (RFC 4180): CR LF, texts in quotes. What is no text or whole number is its JSON, null an empty cell. A
program for tables takes a cell for a formula by how it begins, and whoever may submit a job would say what an auditor's
machine runs; such a text gets a ``'`` in front, which those programs do not show.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from app.edge.answers import JSON_MEDIA_TYPE
from app.edge.forms.body import NDJSON_MEDIA_TYPE
from app.runtime.answers import json_bytes

JSON: Final = JSON_MEDIA_TYPE
NDJSON: Final = NDJSON_MEDIA_TYPE
CSV: Final = "text/csv"
JOB_COLUMNS: Final = (
    "tenant_id",
    "job_id",
    "status",
    "created_at",
    "last_at",
    "actor",
    "assigned_dcs",
    "completed",
    "failed",
    "error",
    "result",
    "spec",
    "fence_token",
    "created_hlc",
    "last_hlc",
    "last_seq",
)
"""Members of a listed job that a table has, in this order."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""How a cell begins that is taken for a formula; the last four are the wide forms of the first."""


def media_type_of(accept: Iterable[str]) -> str:
    """Which of the three the values of ``Accept`` headers like best (RFC 9110 12.5.1); JSON where they name none."""
    weights: dict[str, float] = {}
    for named in ",".join(accept).split(","):
        media_type, *parameters = (part.strip().lower() for part in named.split(";"))
        weights.setdefault(media_type, next(map(_weight, (p for p in parameters if p.startswith("q="))), 1.0))
    any_of_these = max(weights.get("*/*", 0.0), weights.get("application/*", 0.0))
    found = {JSON: weights.get(JSON, any_of_these), NDJSON: weights.get(NDJSON, 0.0), CSV: weights.get(CSV, 0.0)}
    best = max(found, key=lambda media_type: found[media_type])
    return best if found[best] > 0 else JSON


def _weight(parameter: str) -> float:
    try:
        return float(parameter[2:])
    except ValueError:
        return 0.0


def ndjson(items: Iterable[object]) -> bytes:
    """One value a line."""
    return b"".join(json_bytes(item) + b"\n" for item in items)


def csv_rows(columns: Sequence[str], items: Iterable[Mapping[str, Any]]) -> bytes:
    """One row an item: its members that are called like the columns."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC)
    for item in items:
        plain = orjson.loads(json_bytes(item))
        writer.writerow([_cell(plain[name]) for name in columns])
    return text.getvalue().encode()


def csv_head(columns: Sequence[str]) -> bytes:
    """The row that names the columns."""
    return csv_rows(columns, [dict(zip(columns, columns, strict=True))])


def _cell(value: Any) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = "" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()
    return "'" + text if text.startswith(_FORMULA) else text

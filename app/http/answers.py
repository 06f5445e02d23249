"""Answers as they leave: plain values in the shapes of ``app.answers``, as JSON."""

from __future__ import annotations

import orjson
from starlette.responses import Response

_JSON_OPTIONS = orjson.OPT_UTC_Z


def json_bytes(value: object) -> bytes:
    """``value`` as the JSON of an answer."""
    return orjson.dumps(value, option=_JSON_OPTIONS)


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``value`` as a JSON answer."""
    return Response(json_bytes(value), status, headers, media_type="application/json")

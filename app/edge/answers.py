"""Answers as they leave: plain values in the shapes of ``app.runtime.answers``, as JSON."""

from __future__ import annotations

from starlette.responses import Response

from app.runtime.answers import json_bytes


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``value`` as a JSON answer."""
    return Response(json_bytes(value), status, headers, media_type="application/json")

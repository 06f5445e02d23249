"""Reading request bodies: bounded while they stream in, then parsed strictly, once.

0 <= len(body) <= bytes_max       nothing past it is read or kept
0 <= held of all bodies, but for the first FREE_BYTES of each, <= the memory budget, until they are answered
"""

from __future__ import annotations

from typing import Any

from fastapi import Depends
from pydantic import TypeAdapter
from starlette.requests import Request

from app.edge.accepted import ACCEPTED, Accepted, AcceptedDep, body_chunks
from app.edge.answers import JSON_MEDIA_TYPE
from app.edge.forms.validation import parse
from app.edge.services import Service
from app.runtime.state.node import Node
from ledger.errors import ProblemError
from ledger.facts.problems import PAYLOAD_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE

NDJSON_MEDIA_TYPE = "application/x-ndjson"
TEXT_MEDIA_TYPE = "text/plain"
FREE_BYTES = 64 * 1024
"""So long a body is always taken: clients that send large ones, or never end them, must not lock out the others."""
SCHEMA_REF = "#/components/schemas/{model}"
COMMAND_BYTES_MAX = 128 * 1024
"""Longest body of a request that is neither events nor files; the bounds of its fields are lower."""


async def read_body(request: Request, media_type: str, bytes_max: int) -> bytes:
    """The whole body, if it is of ``media_type`` and no longer than ``bytes_max`` bytes.

    Raises:
        ProblemError: another media type, an encoding, another charset than UTF-8, or too long.
        NotReadyError: other requests hold as many bytes as may be in memory.
    """
    headers = request.headers
    content_type = headers.get("content-type", "")
    if content_type != media_type:
        _check_media_type(content_type, media_type)
    if "content-encoding" in headers:
        raise ProblemError(UNSUPPORTED_MEDIA_TYPE, "send the body plain, without a Content-Encoding")
    declared = headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > bytes_max):
        raise _too_large(bytes_max)
    chunks: list[bytes] = []
    size = 0
    async for chunk in body_chunks(request):
        size += len(chunk)
        if size > bytes_max:
            raise _too_large(bytes_max)
        counted = min(len(chunk), size - FREE_BYTES)
        if counted > 0:
            accepted: Accepted = request.scope[ACCEPTED]
            accepted.hold(counted)
        chunks.append(chunk)
    return b"".join(chunks)


class JsonBody:
    """The JSON body of a request that changes something, read as ``model``: a dependency that its route describes."""

    def __init__(self, model: Any) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(model)
        self.description = body_of(self._adapter)

    async def __call__(self, request: Request, node: Service[Node], accepted: AcceptedDep) -> Any:
        """What the caller asks for, checked, and allowed; refused unread while this node takes no writes."""
        node.check_writable()
        body = await read_body(request, JSON_MEDIA_TYPE, COMMAND_BYTES_MAX)
        wanted = parse(self._adapter, body)
        if "tenant_id" in wanted:
            accepted.charge_tenant(wanted["tenant_id"], len(body))
        named = wanted.get("tenants") or [wanted.get("tenant_id")]
        await accepted.allow(*filter(None, named))
        return wanted


def json_body(model: Any) -> Any:
    """``JsonBody`` as an endpoint asks for it."""
    return Depends(JsonBody(model))


def body_of(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """Describes a JSON body that the endpoint reads by itself."""
    schema = adapter.json_schema(ref_template=SCHEMA_REF)
    return {"required": True, "content": {JSON_MEDIA_TYPE: {"schema": schema}}}


def _check_media_type(content_type: str, media_type: str) -> None:
    given, *parameters = [part.strip().lower() for part in content_type.split(";")]
    if given != media_type:
        raise ProblemError(UNSUPPORTED_MEDIA_TYPE, f"send {media_type}, not {given[:100] or 'nothing'}")
    for parameter in filter(None, parameters):
        if parameter not in ("charset=utf-8", 'charset="utf-8"'):
            raise ProblemError(UNSUPPORTED_MEDIA_TYPE, f"{parameter[:100]!r} is not allowed; send UTF-8")


def _too_large(bytes_max: int) -> ProblemError:
    """The connection stays open: what is still being sent is thrown away, so the client gets to read this."""
    return ProblemError(PAYLOAD_TOO_LARGE, f"a body may have {bytes_max} bytes here; send less")

"""The shapes of answers: what the OpenAPI document says of them, and what commands check with ``msgspec``.

A shape is a TypedDict. The service builds plain values, which is faster; tests run every operation against its
description. A reader ignores members that are not in a shape: a newer service may send more. A member that is added to
a shape is ``optional``: an older service does not send it. The shapes that commands read are in this package; the
others are declared beside their routes.
"""

from __future__ import annotations

from datetime import datetime
from types import GenericAlias
from typing import Annotated, Any, Final, NotRequired

import orjson
from msgspec import Meta
from typing_extensions import TypedDict

from ledger import hlc, names

HexHash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
HlcText = Annotated[str, Meta(pattern=names.anchored(hlc.TEXT), examples=["1704931200000:1:node-7f3a"])]
TenantId = Annotated[str, Meta(pattern=names.anchored(names.READABLE_TENANT_ID))]
JobId = Annotated[str, Meta(pattern=names.anchored(names.JOB_ID), examples=["use1-1704931200000-gate42-00001"])]
Time = Annotated[datetime, Meta(tz=True)]
TimeOfHlc = str | None
"""The time that the HLC beside it says (RFC 3339, UTC); null where that has no such form."""


def json_bytes(value: object) -> bytes:
    """``value`` as the JSON of an answer."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z)


SHAPES: Final[list[Any]] = []
"""The shapes that ``shape`` made."""


def shape(name: str, meaning: str, /, **members: Any) -> Any:
    """The shape of an answer. ``[kind]`` is a list of the kind, ``{str: kind}`` an object of them by name."""
    form = TypedDict(name, {member: _kind_of(kind) for member, kind in members.items()})  # type: ignore[misc]
    form.__doc__ = meaning
    SHAPES.append(form)
    return form


def list_shape(name: str, meaning: str, item: Any, /, **more: Any) -> Any:
    """The shape of a page of a list of ``item``."""
    return shape(name, meaning, next_cursor=str | None, items=[item], **more)


def optional(kind: Any) -> Any:
    """A member that an older service does not send."""
    return NotRequired[_kind_of(kind)]


def _kind_of(kind: Any) -> Any:
    if isinstance(kind, list):
        return GenericAlias(list, kind[0])
    return GenericAlias(dict, (str, kind[str])) if isinstance(kind, dict) else kind


Problem = shape(
    "Problem",
    "RFC 9457. ``type`` ends in the problem's name; some problems have further members.",
    type=str,
    title=str,
    status=int,
    detail=str,
    path=optional(str),
)

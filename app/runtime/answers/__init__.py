"""Shapes of the service's answers that commands read or the service builds by type; it describes itself by them, too.

A shape is a TypedDict whose members a reader can check with ``msgspec`` and a description can be made of. Whoever
answers builds plain values, which is faster; that they agree is proved by running every operation against its
description. Whoever reads passes over members that are not in a shape: a newer service may say more. A member that is
added to a shape is NotRequired: an older service does not say it. An answer that is only described has its shape beside
its route (``app.edge.routing.shape``).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, NotRequired

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


class Page(TypedDict):
    """Of every list: where the next page goes on."""

    next_cursor: str | None


class Problem(TypedDict):
    """RFC 9457. ``type`` ends in the problem's name; some problems have further members."""

    type: str
    title: str
    status: int
    detail: str
    path: NotRequired[str]

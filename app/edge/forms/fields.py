"""The kinds of value in requests, each with its bound."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from app.runtime.principals import Right
from ledger import hlc, names, rfc3339
from ledger.canonical import INTEGER_MAX
from ledger.errors import InvalidInputError, reported_as
from ledger.facts.events import Kind
from ledger.hlc import Hlc
from ledger.machines.job_fold import CREATOR_CHARACTERS_MAX
from ledger.machines.retention import KEPT_PATTERN
from ledger.private_fields import PATH_CHARACTERS_MAX

NAME_CHARACTERS_MAX = 256
TEXT_CHARACTERS_MAX = 65_536
ASSIGNED_DCS_MAX = 1024
STATS_NAMES_MAX = 32
TREE_SIZE_MAX = 2**63 - 1

TENANT_PATTERN = names.anchored(names.TENANT_ID)
JOB_ID_PATTERN = names.anchored(names.JOB_ID)


def _number(value: object) -> int | float:
    if (type(value) is int and abs(value) <= INTEGER_MAX) or (type(value) is float and math.isfinite(value)):
        return value
    raise ValueError("must be a number that binary64 holds exactly or nearly")


TenantId = Annotated[str, Field(pattern=TENANT_PATTERN, examples=["acme"])]
"""A tenant that may be written to."""
ReadableTenantId = Annotated[
    str,
    Field(
        pattern=names.anchored(names.READABLE_TENANT_ID), description="Whose: a tenant, or _system.", examples=["acme"]
    ),
]
"""A tenant, or ``_system``, whose chain records acts on the ledger itself."""
ReadableTenantPath = Annotated[ReadableTenantId, Path()]
TenantQuery = Annotated[ReadableTenantId, Query()]
RightName = Annotated[Right, WithJsonSchema({"type": "string", "enum": [str(right) for right in Right]})]
PrincipalName = Annotated[str, Field(pattern=names.anchored(names.PRINCIPAL), examples=["ci-runner"])]
ActorName = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=CREATOR_CHARACTERS_MAX, examples=["ci-runner"])
]
JobId = Annotated[str, Field(pattern=JOB_ID_PATTERN, examples=["use1-1704931200000-gate42-00001"])]
HlcText = Annotated[str, Field(pattern=names.anchored(hlc.TEXT), examples=["1704931200000:1:node-7f3a"])]
Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Text = Annotated[str, Field(max_length=TEXT_CHARACTERS_MAX)]
FieldName = Annotated[str, Field(min_length=1, max_length=PATH_CHARACTERS_MAX, examples=["spec.user"])]
"""A field of payloads, its parts separated by dots."""
Count = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
Number = Annotated[int | float, PlainValidator(_number), WithJsonSchema({"type": "number"})]
KeptText = Annotated[str, Field(pattern=KEPT_PATTERN, examples=["400d"])]
"""How long entries are kept: a whole number of seconds, minutes, hours or days."""
TimeText = Annotated[str, Field(pattern=names.anchored(rfc3339.TEXT), examples=["2026-11-21T13:40:00.250Z"])]
"""A time (RFC 3339); its user checks that the calendar has it."""
StatsName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$", examples=["requests"])]
"""The name of a counter or measurement."""
StatsValue = Annotated[float, Field(allow_inf_nan=False)]
TraceParent = Annotated[
    str,
    Field(pattern=names.anchored(names.SPAN), examples=["00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"]),
]
"""A span of W3C Trace Context."""
JsonObject = dict[str, Any]
"""Any JSON object; what it holds is checked when it becomes canonical bytes."""
Level = Literal["LOCAL", "REGIONAL", "GLOBAL"]
"""A level of durability that can be asked for."""
FORM_OF_KIND: Mapping[Kind, Any] = {
    Kind.TENANT: TenantId,
    Kind.JOB_ID: JobId,
    Kind.NAME: Name,
    Kind.NAMES: Annotated[list[Name], Field(max_length=ASSIGNED_DCS_MAX)],
    Kind.TEXT: Text,
    Kind.COUNT: Count,
    Kind.NUMBER: Number,
    Kind.HLC: HlcText,
    Kind.TRACEPARENT: TraceParent,
    Kind.OBJECT: JsonObject,
}
"""The fields of events."""


def _digits(value: object) -> object:
    """A whole number in a query or path has one spelling: no sign, space, underscore or zero in front."""
    if isinstance(value, str) and _DIGITS.fullmatch(value) is None:
        raise ValueError("must be a whole number")
    return value


_DIGITS = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
WholeNumber = Annotated[int, BeforeValidator(_digits)]
Limit = Annotated[WholeNumber, Field(ge=1, le=1000, description="Most items in the answer.")]
CursorText = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,2048}$")]
CursorQuery = Annotated[
    CursorText | None, Query(description="The next_cursor of the page before; left out, the list begins.")
]
SeqNumber = Annotated[WholeNumber, Field(ge=1, le=TREE_SIZE_MAX)]

Moment = Annotated[
    str,
    Field(
        max_length=128,
        json_schema_extra={"pattern": rfc3339.MOMENT_PATTERN},
        examples=["2026-11-21T13:40:00.250Z", "1704931200000:1:node-7f3a"],
    ),
]
"""An HLC, or a time of RFC 3339; ``moment`` reads it."""


def moment(name: str, text: str | None, read: Callable[[str], Hlc]) -> Hlc | None:
    """The parameter ``name``, parsed by ``read``, a function of ``ledger.rfc3339``; None if it was not given.

    Raises:
        InvalidInputError: ``text`` is neither a time nor an HLC.
    """
    with reported_as(partial(InvalidInputError, path=(name,)), name, InvalidInputError):
        return None if text is None else read(text)


SESSION_PATTERN = r"^[A-Za-z0-9_-]+([ \t]*,[ \t]*[A-Za-z0-9_-]+)*$"
IDEMPOTENCY_KEY_PATTERN = r"^[!-~]{1,255}$"

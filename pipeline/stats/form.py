"""The form of a line in a stats file (docs/formats/stats.md), strictly: Spark's own reader takes more for a report.

It would pass over text behind the object and bytes that are no UTF-8, and make names of numbers and objects. So each
line is read here too, by the types that ``POST /v1/stats`` asks for. What is not known is passed over, so that
a newer node may say more.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ledger.canonical import INTEGER_MAX
from ledger.names import JOB_ID, TENANT_ID

NAME_CHARACTERS_MAX: Final = 256
NAMES_MAX: Final = 32
"""Names in ``counts``, and in ``values``."""
WEIGHT_MAX: Final = 1_000_000
_TIME: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z"

Tenant = Annotated[str, Meta(pattern=rf"^({TENANT_ID})\Z")]
Job = Annotated[str, Meta(pattern=rf"^({JOB_ID})\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Measured = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
Time = Annotated[str, Meta(pattern=rf"^{_TIME}\Z")]
Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]


class Report(msgspec.Struct, frozen=True):
    """What one line says."""

    tenant_id: Tenant
    job_id: Job
    dc_id: Name
    time: Time
    received: Time
    weight: Annotated[int, Meta(ge=1, le=WEIGHT_MAX)]
    workflow_id: Name | UnsetType = UNSET
    completed: Count | UnsetType = UNSET
    failed: Count | UnsetType = UNSET
    interval_ms: Count | UnsetType = UNSET
    counts: Annotated[dict[Measured, Count], Meta(max_length=NAMES_MAX)] | UnsetType = UNSET
    values: Annotated[dict[Measured, float], Meta(max_length=NAMES_MAX)] | UnsetType = UNSET


_decode = msgspec.json.Decoder(Report).decode


def is_report(line: bytes) -> bool:
    """Whether ``line`` is of the form."""
    try:
        _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True

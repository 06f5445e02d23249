"""Times of RFC 3339 and HLCs.

An HLC is converted to the time of its physical part, a time to the HLCs of its millisecond.

    1704931200000:1:node-7f3a    ->  2024-01-11T00:00:00.000Z
    2024-01-11T01:00:00+01:00    ->  from 1704931200000:0: up to the last HLC of that millisecond
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from ledger import names
from ledger.errors import InvalidInputError
from ledger.hlc import LOGICAL_MAX, Hlc
from ledger.hlc import TEXT as HLC_TEXT

TEXT = r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})"
"""A time as a regular expression; the parser checks that the calendar has it."""
MOMENT_PATTERN = names.anchored(f"({HLC_TEXT}|{TEXT})")
"""A time or an HLC."""

_HLC = re.compile(HLC_TEXT)
_TIME = re.compile(TEXT)
_SPACE_FOR_PLUS = re.compile(TEXT.replace("[+-]", " "))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
LAST_MS = (datetime(9999, 12, 31, tzinfo=UTC) - _EPOCH) // _MILLISECOND
"""The latest time that has a text."""
_NAIVE_EPOCH = _EPOCH.replace(tzinfo=None)
_ABOVE_NODES = "~"
"""Above every node id in the order of HLCs."""


def written(time: datetime, timespec: str = "auto") -> str:
    """``time`` in UTC, ending in Z, as exact as ``timespec`` of ``datetime.isoformat``."""
    return time.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


@lru_cache(maxsize=1024)
def text_of(physical_ms: int) -> str | None:
    """``physical_ms`` since 1970 in UTC, with milliseconds; None for a time that has no such form."""
    if not 0 <= physical_ms <= LAST_MS:
        return None
    return (_NAIVE_EPOCH + timedelta(milliseconds=physical_ms)).isoformat(timespec="milliseconds") + "Z"


def time_of(hlc: str | None) -> str | None:
    """The time of an HLC; None for None, and for an edited text that is no HLC."""
    try:
        return None if hlc is None else text_of(Hlc.parse(hlc).physical_ms)
    except InvalidInputError:
        return None


def milliseconds_of(text: str) -> tuple[int, bool]:
    """Whole milliseconds from 1970 to the time ``text``, and whether that is the time exactly.

    Raises:
        InvalidInputError: ``text`` is no time of RFC 3339.
    """
    if (match := _TIME.fullmatch(text)) is None:
        raise InvalidInputError(f"{text[:100]!r} is no time of RFC 3339; write 2026-11-21T13:40:00.250Z")
    try:
        moment = datetime.fromisoformat(text.upper())
    except ValueError:
        raise InvalidInputError(f"there is no time {text}") from None
    nanoseconds = int((match[1] or ".")[1:].ljust(9, "0"))
    return (moment.replace(microsecond=0) - _EPOCH) // _MILLISECOND + nanoseconds // 10**6, nanoseconds % 10**6 == 0


def up_to(moment: str) -> Hlc:
    """The last HLC in ``moment``, an HLC or a time; a time includes its whole millisecond.

    Raises:
        InvalidInputError: ``moment`` is neither.
    """
    return Hlc(milliseconds_of(moment)[0], LOGICAL_MAX, _ABOVE_NODES) if _is_time(moment) else Hlc.parse(moment)


def at_or_after(moment: str) -> Hlc:
    """The lowest HLC that is not before ``moment``, an HLC or a time.

    Raises:
        InvalidInputError: ``moment`` is neither.
    """
    if _is_time(moment):
        whole_ms, exact = milliseconds_of(moment)
        return Hlc(whole_ms if exact else whole_ms + 1, 0, "")
    return Hlc.parse(moment)


def _is_time(moment: str) -> bool:
    """Whether ``moment`` is a time, not an HLC.

    Raises:
        InvalidInputError: it is neither.
    """
    if _HLC.fullmatch(moment) is not None:
        return False
    if _TIME.fullmatch(moment) is not None:
        return True
    if _SPACE_FOR_PLUS.fullmatch(moment) is not None:
        raise InvalidInputError(f"{moment} has a space where a + was; write %2B for + in a URL, or give the time in Z")
    raise InvalidInputError(
        f"{moment[:100]!r} is neither an HLC (physical_ms:logical:node_id) nor a time of RFC 3339"
        " (2026-11-21T13:40:00.250Z)"
    )

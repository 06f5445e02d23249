"""Up to where a stream of stats has come, as it stands in the checkpoint, and what else may stand there.

    {"folders": {"node-a": {"before": 0, "7": "1-30@20261121T134000Z/20261121T141000Z"}},
     "taken_ms": 1795268400000, "clock_ms": 0}

What was taken of each folder (``pipeline.stats.taken``); when the newest of these files was closed, and never past the
clock of the run that took it; and up to when the clock has gone on without anything new.
"""

from __future__ import annotations

import json
from typing import Any, Final

from pipeline.stats.taken import Taken, unknown_form

Offset = dict[str, Any]
BEGINNING: Final[Offset] = {"folders": {}, "taken_ms": 0, "clock_ms": 0}
TIME_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999."""
_VERSION: Final = "v1"
_NONE: Final = "-"


def check(offset: Any) -> None:
    """See that ``offset`` is one.

    Raises:
        ConfigurationError: it is none of this source.
    """
    if not isinstance(offset, dict) or offset.keys() != BEGINNING.keys():
        raise unknown_form()
    if not all(type(offset[name]) is int and 0 <= offset[name] <= TIME_MS_MAX for name in ("taken_ms", "clock_ms")):
        raise unknown_form()
    if not isinstance(offset["folders"], dict):
        raise unknown_form()
    for value in offset["folders"].values():
        if not isinstance(value, dict):
            raise unknown_form()
        Taken(value)


def check_entry(text: str) -> None:
    """See that ``text``, one entry of Spark's log of offsets, is whole: a version, what Spark notes, then offsets.

    Raises:
        ConfigurationError: it is not.
    """
    version, *lines = text.splitlines() or [""]
    if version != _VERSION or len(lines) < 2:
        raise unknown_form()
    try:
        _, *offsets = [None if line == _NONE else json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        raise unknown_form() from None
    for offset in offsets:
        if offset is not None:
            check(offset)

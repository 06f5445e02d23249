"""Shapes of answers about logs whose facts do not count."""

from __future__ import annotations

from app.runtime.answers import HlcText, TimeOfHlc, list_shape, shape

ExclusionAnswer = shape(
    "ExclusionAnswer",
    "The newest statement about a log, at ``seq``. While ``excluded`` is true, none of its facts counts in the\n"
    "tenant. ``stated_by`` is the log that made the statement, null for this ledger's own.",
    tenant_id=str,
    log=str,
    excluded=bool,
    reason=str | None,
    actor=str | None,
    stated_by=str | None,
    seq=int,
    hlc=HlcText,
    at=TimeOfHlc,
)

ExclusionList = list_shape(
    "ExclusionList",
    "The newest statement about each log that was ever excluded, by log.",
    ExclusionAnswer,
)

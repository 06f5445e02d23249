"""Shapes of answers about callers that sign their events."""

from __future__ import annotations

from app.runtime.answers import HlcText, shape

CallerAnswer = shape(
    "CallerAnswer",
    "A caller's key. Events of these tenants count that it signed below ``revoked_from_hlc``.",
    key_id=str,
    algorithm=str,
    public_key_pem=str,
    not_before=str | None,
    not_after=str | None,
    revoked_from_hlc=HlcText | None,
    name=str,
    tenants=list[str],
)

RequiredAnswer = shape(
    "RequiredAnswer",
    "From ``from_hlc`` on, callers of the tenant sign events of these types, and no others.",
    from_hlc=HlcText,
    tenant_id=str,
    types=list[str],
)

CallerList = shape(
    "CallerList",
    "The callers that sign events, and what they must sign.",
    callers=[CallerAnswer],
    signatures_required=[RequiredAnswer],
)

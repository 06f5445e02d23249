"""Shapes of answers about others than this ledger: regions that it exchanges with, logs whose facts do not count, and
callers that sign their events."""

from __future__ import annotations

from app.runtime.answers import HlcText, Time, TimeOfHlc, list_shape, shape

RetiredAnswer = shape(
    "RetiredAnswer",
    "A retired region: why, since when, by whom, the log of its ledger, and how many entries seen there are not here.",
    region=str,
    reason=str,
    retired_at=Time | None,
    retired_by=str | None,
    log_origin=str | None,
    lag_entries=int,
)

PeerAnswer = shape(
    "PeerAnswer",
    "A ledger that this one imports from: why not now, which keys are to be admitted and how, how much is lacking, and "
    "what came since the process began.",
    url=str,
    region=str,
    log_origin=str | None,
    fault=str | None,
    waits_for=list[str],
    untrusted_keys=list[str],
    untrusted_there=list[str],
    retired=RetiredAnswer | None,
    lag_entries=int,
    imported_entries=int,
)

ExchangeAnswer = shape(
    "ExchangeAnswer",
    "The region of this ledger, the ledgers that it imports from, and how many regions GLOBAL needs.",
    region=str,
    regions_counted=int,
    majority=int,
    peers=[PeerAnswer],
    retired=[RetiredAnswer],
)

AdmittedRegionAnswer = shape(
    "AdmittedRegionAnswer",
    "A key that the ledger of a region signs with, and that is trusted from now on.",
    region=str,
    key_id=str,
    algorithm=str,
    admitted_by=str | None,
)

RevokedRegionKeyAnswer = shape(
    "RevokedRegionKeyAnswer",
    "A key of a region's ledger that is trusted no longer.",
    region=str,
    key_id=str,
    reason=str,
    revoked_by=str | None,
)


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

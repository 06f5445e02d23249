"""Shapes of answers about the regions that a ledger exchanges with."""

from __future__ import annotations

from app.runtime.answers import Time, shape

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

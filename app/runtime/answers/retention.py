"""Shapes of answers about retention, holds and prunes, and about the archive that entries leave for."""

from __future__ import annotations

from app.runtime.answers import HlcText, TenantId, TimeOfHlc, list_shape, shape

StopAnswer = shape(
    "StopAnswer",
    "The first entry that must stay, and why. ``why`` is one of docs/retention.md.",
    seq=int,
    why=str,
    detail=str,
)

PruneEntry = shape(
    "PruneEntry",
    "A PRUNED entry that counts: ``seq`` is its own, the others are about what has left by it.",
    seq=int,
    hlc=HlcText,
    at=TimeOfHlc,
    from_seq=int,
    to_seq=int,
    entries=int,
    never_ended=int,
    actor=str | None,
    archive=str,
    manifest=str | None,
)

RetentionAnswer = shape(
    "RetentionAnswer",
    "How long entries stay (``400d``; null: for ever) and must stay, how far they have left or could leave now, and\n"
    "the newest 100 prunes whose PRUNED entries are here, the newest first.",
    tenant_id=str,
    period=str | None,
    minimum=str | None,
    verified_from_seq=int,
    pruned_to_seq=int,
    prunable_to_seq=int,
    stopped_by=StopAnswer | None,
    archive=str | None,
    open_holds=int,
    prunes=[PruneEntry],
)

HoldAnswer = shape(
    "HoldAnswer",
    "A hold. Without ``job_ids`` it holds every entry of the tenant. ``placed_by_log`` is the log that placed\n"
    "it, null for this ledger's own.",
    hold_id=str,
    tenant_id=str,
    job_ids=list[str] | None,
    where=str | None,
    reason=str,
    actor=str | None,
    placed_by_log=str | None,
    seq=int,
    hlc=HlcText,
    at=TimeOfHlc,
)

HoldList = list_shape("HoldList", "Open holds, in the order in which they were placed.", HoldAnswer)

PruneAnswer = shape(
    "PruneAnswer",
    "Entries that leave, or with ``dry_run`` could. ``seq`` is of the PRUNED entry, null if nothing leaves. Their\n"
    "rows are removed soon afterwards.",
    tenant_id=str,
    dry_run=bool,
    from_seq=int,
    to_seq=int,
    entries=int,
    never_ended=int,
    seq=int | None,
    archive=str | None,
    stopped_by=StopAnswer | None,
)


ArchivedTenantAnswer = shape(
    "ArchivedTenantAnswer",
    "How far a tenant is archived: the entries that are signed and not archived, how long the oldest waits, and why.",
    tenant_id=TenantId,
    archived_to_seq=int,
    signed_to_seq=int,
    lag_entries=int,
    lag_seconds=float,
    error=str | None,
)

ArchiveAnswer = shape(
    "ArchiveAnswer",
    "Where the archive is, null without one; whether this node fills it; its lag as a whole; what fails; the version "
    "of its Iceberg table and where that is; and the tenants that lag most, of all that the caller may audit.",
    url=str | None,
    lock=str,
    has_turn=bool,
    lag_entries=int,
    lag_seconds=float,
    error=str | None,
    table_version=int,
    table_metadata=str | None,
    tenants_total=int,
    tenants=[ArchivedTenantAnswer],
)

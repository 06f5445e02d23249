"""Shapes of answers about the archive of a ledger."""

from __future__ import annotations

from app.runtime.answers import TenantId, shape

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

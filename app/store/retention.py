"""SQL of retention: the entries about it, what may leave of a chain, and the removal of what a prune covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.store.reading import ENTRIES, fetch_tuples
from ledger.machines.retention import SUBJECT

if TYPE_CHECKING:
    from app.store import Connection


async def retention_rows(connection: Connection, tenant_id: str) -> list[tuple[Any, ...]]:
    """``ENTRY_COLUMNS`` of the entries about retention of a tenant, in seq order, as stored."""
    return await fetch_tuples(
        connection, f"{ENTRIES} WHERE tenant_id = $1 AND job_id = $2 ORDER BY seq, ctid", tenant_id, SUBJECT
    )

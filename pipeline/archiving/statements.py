"""SQL of archiving: what of a ledger is chained and signed, and how its entries are cut into files.

Values are put in as literals, as ``pipeline.places.statements`` has it, whose statements are used for all that any
reader asks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS
from pipeline.places.statements import HEADS, LOG, SNAPSHOTS, TREES, literal, select_list, tenants_in, wanted

READ_ONLY: Final = "SET default_transaction_read_only = on"
END: Final = "ROLLBACK"

PUBLISHED_KEYS: Final = "SELECT public_key_pem, not_before, not_after, revoked_from_hlc FROM scheduler.signing_keys"

_STORED_BYTES: Final = "pg_column_size(payload)::bigint + coalesce(pg_column_size(origin), 0)"


def signed(tenants: Collection[str] | None) -> str:
    """(tenant, end of its last snapshot, last seq, whether it has a tree, newest checkpoint) of each of ``tenants``, or
    of all, that has a snapshot."""
    among = f"({tenants_in(SNAPSHOTS)}) AS wanted" if tenants is None else wanted(tenants)
    return f"""
    SELECT wanted.tenant_id, s.signed_seq,
           coalesce((SELECT max(seq) FROM {LOG} l WHERE l.tenant_id = wanted.tenant_id), 0) AS last_seq,
           m.tenant_id IS NOT NULL AS has_tree, m.checkpoint
      FROM {among}
     CROSS JOIN LATERAL (SELECT max(to_seq) AS signed_seq FROM {SNAPSHOTS} WHERE tenant_id = wanted.tenant_id) AS s
      LEFT JOIN {TREES} m ON m.tenant_id = wanted.tenant_id
     WHERE s.signed_seq IS NOT NULL
     ORDER BY wanted.tenant_id COLLATE "C"
    """


UNSIGNED: Final = f"""
SELECT h.tenant_id, h.head_seq FROM {HEADS} h
 WHERE h.head_seq > 0 AND NOT EXISTS (SELECT FROM {SNAPSHOTS} s WHERE s.tenant_id = h.tenant_id)
 ORDER BY h.tenant_id COLLATE "C"
"""
"""(tenant, last seq) of each that has entries and no snapshot."""


def snapshot_end(tenant_id: str, from_seq: int, to_seq: int) -> str:
    """Where the last snapshot ends that ends in the range."""
    return (
        f"SELECT max(to_seq) FROM {SNAPSHOTS} WHERE tenant_id = {literal(tenant_id)}"
        f" AND to_seq BETWEEN {from_seq:d} AND {to_seq:d}"
    )


def next_snapshot_end(tenant_id: str, seq: int) -> str:
    """Where the first snapshot ends that ends at ``seq`` or behind it."""
    return f"SELECT min(to_seq) FROM {SNAPSHOTS} WHERE tenant_id = {literal(tenant_id)} AND to_seq >= {seq:d}"


def links(tenant_id: str, seq: int) -> str:
    """Link and link version of the entry at ``seq``."""
    return (
        f"SELECT chain_link, link_version::bigint FROM {LOG} WHERE tenant_id = {literal(tenant_id)} AND seq = {seq:d}"
    )


def first_at_or_after(tenant_id: str, from_seq: int, to_seq: int, physical_ms: int) -> str:
    """The first entry of the range whose hlc_physical is at least so much."""
    return (
        f"SELECT seq, hlc_physical FROM {_entries(tenant_id, from_seq, to_seq)} AND hlc_physical >= {physical_ms:d}"
        " ORDER BY seq LIMIT 1"
    )


def stretches(tenant_id: str, from_seq: int, to_seq: int, rows: int) -> str:
    """(first, last, stored bytes, highest hlc_physical) of the entries of a range, by so many."""
    return (
        f"SELECT min(seq), max(seq), sum({_STORED_BYTES})::bigint, max(hlc_physical)"
        f" FROM {_entries(tenant_id, from_seq, to_seq)} GROUP BY (seq - 1) / {rows:d} ORDER BY 1"
    )


def one_by_one(tenant_id: str, from_seq: int, to_seq: int) -> str:
    """The same of each entry."""
    return (
        f"SELECT seq, seq AS last_seq, {_STORED_BYTES} AS stored_bytes, hlc_physical"
        f" FROM {_entries(tenant_id, from_seq, to_seq)} ORDER BY seq"
    )


def snapshots(tenant_id: str, from_seq: int, to_seq: int) -> str:
    """The snapshots that end in the range."""
    return (
        f"SELECT {select_list({}, SNAPSHOTS, SNAPSHOT_COLUMNS)} FROM {SNAPSHOTS} s"
        f" WHERE s.tenant_id = {literal(tenant_id)} AND s.to_seq BETWEEN {from_seq:d} AND {to_seq:d}"
        " ORDER BY s.from_seq"
    )


def _entries(tenant_id: str, from_seq: int, to_seq: int) -> str:
    return f"{LOG} WHERE tenant_id = {literal(tenant_id)} AND seq BETWEEN {from_seq:d} AND {to_seq:d}"

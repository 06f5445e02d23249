"""What a batch snapshot claims about a tenant's chain; ``signing`` wraps it, ``verification`` judges it."""

from typing import NamedTuple


class SnapshotClaim(NamedTuple):
    """The predicate of one snapshot. Links, roots and digests are lowercase hex.

    Invariants::

        to_seq - from_seq + 1 == entry_count >= 1
        tree_size == to_seq
        from_seq == 1 if previous_snapshot is None else (to_seq of the previous snapshot) + 1
    """

    tenant_id: str
    from_seq: int
    to_seq: int
    from_chain_link: str
    to_chain_link: str
    entry_count: int
    merkle_root: str
    """Root over the links of ``from_seq..to_seq`` alone."""
    tree_size: int
    tree_root: str
    """Root of the tenant's whole tree at ``tree_size``."""
    snapshot_hlc: str
    """HLC of the last entry."""
    previous_snapshot: str | None
    """SHA-256 of the previous snapshot's DSSE payload."""
    node_id: str
    key_id: str

"""Prunes: entries of a tenant leave for the archive, once they are old enough, archived and not held.

carrying   what the entry PRUNED carries of what leaves
planning   what may leave of a chain, and what stops the rest; the archive that a prune relies on
pruning    the entry PRUNED
removal    rows that such an entry covers leave the database
"""

from __future__ import annotations

from app.share.retention.carrying import Carrying
from app.share.retention.planning import Planner, StoredArchive
from app.share.retention.pruning import Prunes
from app.share.retention.removal import Removal

__all__ = ["Carrying", "Planner", "Prunes", "Removal", "StoredArchive"]

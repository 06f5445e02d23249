"""Leases on WALs, the exchange, commitments, webhooks and search fields: the first half of version 0.2.0."""

from app.store.migrate import downgrade as downgrade
from app.store.migrate import run_sql_files

revision = "0015"
down_revision = "0010"


def upgrade() -> None:
    """Run the SQL files of ``migrations/sql`` numbered 0011 to 0015."""
    run_sql_files(down_revision, revision)
